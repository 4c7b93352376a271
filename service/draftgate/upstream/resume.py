"""A generation that outlives the replica it runs on.

When a replica is lost, the generation goes on at another one, or at the same one once it is back,
from what was emitted: the prompt's ids and the emitted ids are the new input, and `resume_len` says
how many of them are output. No token is lost or comes twice; greedy and seeded tokens are those of
an undisturbed run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace

from draftgate.contract import FinishReason
from draftgate.errors import DraftgateError, ErrorCode, deadline_passed
from draftgate.text import Tokenizer
from draftgate.upstream.balance import prefix_key, prompt_tokens
from draftgate.upstream.encoding import prompt_ids
from draftgate.upstream.replica import Attempt, Replica
from draftgate.upstream.replicas import ReplicaSet
from draftgate.upstream.types import (
    Chunk,
    EngineDescription,
    GenerationRequest,
    TokenPrompt,
)

__all__ = ["ResumeLimits", "ResumingGeneration"]

_log = logging.getLogger(__name__)

OnAttempt = Callable[[str, str], None]
"""Hears of every attempt: the id on the wire, and the replica's address."""


@dataclass(frozen=True)
class ResumeLimits:
    """How stubbornly a generation goes on."""

    max_resumes: int = 16
    """How often one generation may lose its replica."""
    max_failures: int = 5
    """Attempts in a row that bring no token, after which it fails."""
    min_backoff_s: float = 0.1
    """The pause after the second such attempt in a row; it doubles with each. The first has
    none."""
    max_backoff_s: float = 2.0
    """The longest pause."""
    wait_s: float = 120.0
    """How long a generation waits for a replica to be there, if its deadline is not earlier: a
    supervised server restarts meanwhile."""


class ResumingGeneration:
    """One generation: `started` is an async context manager, inside it is an iterator of chunks.

    Leaving before the last chunk, for whatever reason, frees the engine's row.
    """

    def __init__(
        self,
        replicas: ReplicaSet,
        request: GenerationRequest,
        *,
        tokenizer: Tokenizer | None,
        limits: ResumeLimits,
    ) -> None:
        """Without the `tokenizer` of the model, a prompt that is not given as ids cannot be resumed
        once tokens have been emitted."""
        self.resumes = 0
        """How often it went on elsewhere, or at the same replica again, after it was lost."""
        self._replicas = replicas
        self._request = request
        self._tokenizer = tokenizer
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._deadline_s: float | None = None
        if request.deadline_ms is not None:
            self._deadline_s = self._loop.time() + request.deadline_ms / 1000
        self._key = prefix_key(request.prompt)
        self._chunks: AsyncIterator[Chunk] | None = None
        self._attempt: Attempt | None = None
        self._engine: EngineDescription | None = None
        """What the replica serves where it began: it goes on where the same is served."""
        self._pause: asyncio.Timeout | None = None
        self._abandoned: DraftgateError | None = None
        self._emitted: list[int] = []
        self._taken = 0
        """Chunks handed on."""
        self._text_without_ids = False
        self._prompt_tokens = 0
        """As the first chunk told; 0 if it did not."""
        self._prompt_ids: tuple[int, ...] | None = None
        if isinstance(request.prompt, TokenPrompt):
            self._prompt_ids = request.prompt.ids
        self._fruitless = 0
        """Attempts in a row that brought no token, from `_stuck_since_s` on."""
        self._losses = 0
        """Those of them whose replica was lost."""
        self._stuck_since_s = 0.0
        self._full: frozenset[str] = frozenset()
        """Replicas whose queue was found full since the last pause."""

    @asynccontextmanager
    async def started(
        self, metadata: Sequence[tuple[str, str]] = (), on_attempt: OnAttempt | None = None
    ) -> AsyncIterator[ResumingGeneration]:
        """Run it. `metadata` goes with every attempt's RPC."""
        async with aclosing(self._run(metadata, on_attempt)) as chunks:
            self._chunks = chunks
            yield self

    def __aiter__(self) -> AsyncIterator[Chunk]:
        """Iterating raises DraftgateError for whatever ended the generation early."""
        assert self._chunks is not None, "iterate inside `started`"
        return self._chunks

    def abandon(self, error: DraftgateError) -> None:
        """End the generation now: the consumer sees `error` next, the engine is told to stop.

        Without effect once the last chunk came.
        """
        self._abandoned = self._abandoned or error
        if self._attempt is not None:
            self._attempt.generation.abandon(error)
        if self._pause is not None and not self._pause.expired():
            self._pause.reschedule(self._loop.time())

    async def _run(
        self, metadata: Sequence[tuple[str, str]], on_attempt: OnAttempt | None
    ) -> AsyncGenerator[Chunk, None]:
        failure: DraftgateError | None = None
        request = self._request
        while True:
            replica = await self._acquire(failure)
            if self._abandoned is not None:
                raise self._abandoned
            self._engine = self._engine or replica.engine
            attempt = Attempt(replica, replace(request, deadline_ms=self._left_ms()))
            self._attempt = attempt
            if on_attempt is not None:
                on_attempt(attempt.generation.wire_id, replica.target)
            try:
                async with attempt.started(metadata) as chunks:
                    async for chunk in chunks:
                        attempt.count(chunk)
                        if _is_cut_off(chunk) and self._abandoned is None:
                            failure = DraftgateError(
                                ErrorCode.UNAVAILABLE, "the model server shut down"
                            )
                            break
                        yield self._handed_on(chunk)
                    else:
                        return
            except DraftgateError as error:
                failure = error
            self._attempt = None
            assert failure is not None
            request = await self._next_request(attempt, failure)

    def _handed_on(self, chunk: Chunk) -> Chunk:
        """The chunk as one of the whole generation, whichever attempt it comes from."""
        self._emitted += chunk.token_ids
        if chunk.text and not chunk.token_ids:
            self._text_without_ids = True
        if chunk.prompt is not None:
            self._prompt_tokens = self._prompt_tokens or chunk.prompt.prompt_tokens or 0
            if self._taken:
                chunk = replace(chunk, prompt=None)
        self._taken += 1
        return chunk

    async def _acquire(self, failure: DraftgateError | None) -> Replica:
        """The replica for the next attempt. Raises `failure`, why the last one ended, if none comes
        in time."""
        if self._abandoned is not None:
            raise self._abandoned
        try:
            async with asyncio.timeout(self._wait_s()) as self._pause:
                return await self._replicas.acquire(
                    tokens=prompt_tokens(self._request.prompt) + self._request.sampling.max_tokens,
                    key=self._key,
                    avoid=self._full,
                    like=self._engine,
                )
        except TimeoutError:
            self._left_ms()
            error = failure or DraftgateError(ErrorCode.UNAVAILABLE, self._replicas.reason)
            raise self._abandoned or error from None
        finally:
            self._pause = None

    async def _next_request(self, attempt: Attempt, failure: DraftgateError) -> GenerationRequest:
        """What to ask the next replica for. Raises `failure` if the generation ends with it."""
        if self._abandoned is not None:
            raise self._abandoned
        lost = failure.code is ErrorCode.UNAVAILABLE
        full = failure.code is ErrorCode.RESOURCE_EXHAUSTED and attempt.generation.refused
        if lost and not attempt.sent_away:
            attempt.replica.lost()
        if not (lost or full):
            raise failure
        if attempt.moved:
            self._fruitless = self._losses = 0
        else:
            self._fruitless += 1
            self._losses += lost
        if self._fruitless <= 1:
            self._stuck_since_s = self._loop.time()
        request = await self._resumed()
        if request is None:
            raise failure
        if lost:
            await self._after_a_loss(attempt, failure)
        else:
            await self._after_a_full_queue(attempt, failure)
        return request

    async def _after_a_loss(self, attempt: Attempt, failure: DraftgateError) -> None:
        if self._losses >= self._limits.max_failures or self.resumes >= self._limits.max_resumes:
            raise failure
        self.resumes += 1
        attempt.replica.resumes += 1
        _log.info("generation %s goes on elsewhere", attempt.generation.wire_id)
        await self._back_off()

    async def _after_a_full_queue(self, attempt: Attempt, failure: DraftgateError) -> None:
        self._full |= {attempt.replica.target}
        if self._replicas.others(self._full, self._engine):
            return
        # What has not begun is refused at once: its caller can wait as well as we can. What has
        # begun was promised a place.
        if not self._taken or self._loop.time() >= self._stuck_since_s + self._limits.wait_s:
            raise failure
        self._full = frozenset()
        await self._back_off()

    async def _back_off(self) -> None:
        if self._fruitless < 2:
            return
        pause_s = self._limits.min_backoff_s * 2.0 ** min(self._fruitless - 2, 32)
        pause_s = min(pause_s, self._limits.max_backoff_s, self._wait_s())
        try:
            async with asyncio.timeout(pause_s) as self._pause:
                await self._loop.create_future()  # Until `abandon`, or the pause is over.
        except TimeoutError:
            return
        finally:
            self._pause = None

    async def _resumed(self) -> GenerationRequest | None:
        """The request for the rest of the generation; None if nobody can be asked for it."""
        if not self._emitted:
            return None if self._text_without_ids else self._request
        resume_len = self._request.resume_len + len(self._emitted)
        if self._text_without_ids or resume_len >= self._request.sampling.max_tokens:
            return None
        if self._prompt_ids is None:
            self._prompt_ids = await self._encoded()
        if self._prompt_ids is None:
            return None
        prompt = TokenPrompt((*self._prompt_ids, *self._emitted))
        return replace(self._request, prompt=prompt, resume_len=resume_len)

    async def _encoded(self) -> tuple[int, ...] | None:
        """The prompt's ids; None unless they are surely those that the replica had."""
        prompt = self._request.prompt
        if self._tokenizer is None or isinstance(prompt, TokenPrompt):
            return None  # Of the latter they are known.
        try:
            ids = tuple(await prompt_ids(self._tokenizer, prompt))
        except DraftgateError as error:
            _log.warning("a prompt cannot be encoded here: %s", error.code)
            return None
        if len(ids) != self._prompt_tokens:
            _log.warning(
                "the gateway's tokenizer is not the replica's: %d ids for %d",
                len(ids),
                self._prompt_tokens,
            )
            return None
        return ids

    def _wait_s(self) -> float:
        """How long to wait at most."""
        if self._deadline_s is None:
            return self._limits.wait_s
        return max(0.0, min(self._limits.wait_s, self._deadline_s - self._loop.time()))

    def _left_ms(self) -> int | None:
        """What is left of the deadline. Raises DraftgateError(DEADLINE_EXCEEDED) if nothing is."""
        if self._deadline_s is None:
            return None
        left_ms = int((self._deadline_s - self._loop.time()) * 1000)
        if left_ms <= 0:
            raise deadline_passed()
        return left_ms


def _is_cut_off(chunk: Chunk) -> bool:
    """Whether it is what an engine says that is shut down in good order. What was asked to stop
    here is not iterated any more."""
    return chunk.finish_reason == FinishReason.CANCELLED and not chunk.token_ids
