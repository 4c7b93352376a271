"""The engine: a thread that runs step after step over whatever requests there are."""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from draftgate.contract import FinishReason
from draftgate.engine.config import EngineConfig
from draftgate.engine.drafters import Drafter, make_drafter
from draftgate.engine.gating import make_gate, save_policy, saved_policy
from draftgate.engine.known_costs import known_costs
from draftgate.engine.kv_cache import BLOCK_TOKENS, KVCache
from draftgate.engine.linear import compute_dtype, dtype_name
from draftgate.engine.model import Target, load_target, sequence_limit
from draftgate.engine.recent_ids import RecentIds
from draftgate.engine.request import EngineCounters, Request, Sink, check_request
from draftgate.engine.sampler import RowSampler
from draftgate.engine.scheduler import Scheduler
from draftgate.engine.sequence import Sequence
from draftgate.engine.step import Stepper
from draftgate.engine.step_log import StepsSince
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.speculation import CostTable, Gate, Mode, Policy, gate_state

__all__ = ["Engine"]

_LOG = logging.getLogger(__name__)

_EARLY_STOP_S = 10.0
"""How long a stop waits for the request that it overtook."""


class Engine:
    """Runs generations on a target model. Safe to call from any thread."""

    def __init__(
        self,
        target: Target,
        config: EngineConfig,
        *,
        drafter: Drafter | None = None,
        costs: CostTable | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """drafter: one to use instead of the configured one. costs: what steps cost, which a gate
        that is to decide needs.

        Raises DraftgateError when the KV cache or the configured drafter cannot be had.
        """
        self.target = target
        self.config = config
        self._clock = clock
        wanted = sequence_limit(target.config, config)
        if drafter is None:
            drafter = make_drafter(config, target)
        shapes = [target.kv_shape]
        if drafter is not None and drafter.kv_shape is not None:
            shapes.append(drafter.kv_shape)
        # A drafter may write further than the row will ever be.
        spare = drafter.places(config.draft_len) - config.draft_len if drafter is not None else 0
        self._cache = KVCache(shapes, config, wanted + spare, target.dtype, target.device)
        if drafter is not None and drafter.kv_shape is not None:
            drafter.attach(self._cache.stores[1])
        self.max_sequence_tokens = min(wanted, self._cache.total_blocks * BLOCK_TOKENS)
        self._scheduler = Scheduler(config, self._cache)
        self._speculates = drafter is not None and config.draft_len > 0
        self._gate = make_gate(config, costs, speculates=self._speculates)
        self._stepper = Stepper(
            target,
            self._cache,
            drafter,
            self._gate,
            self.max_sequence_tokens,
            clock,
        )
        self._row_ids = itertools.count()
        self._by_id: dict[str, Sequence] = {}
        self._stopped_ids = RecentIds()
        self._ended_ids = RecentIds()
        self._freed_cancelled = 0
        self._work = threading.Condition()
        self._closing = False
        self._failure = ""
        self._on_failure: Callable[[str], None] | None = None
        self._thread = threading.Thread(target=self._run, name="draftgate-engine", daemon=True)

    @classmethod
    def load(
        cls, model_dir: Path, config: EngineConfig, *, drafter: Drafter | None = None
    ) -> Engine:
        """Load a checkpoint and make an engine of it; `start` runs it."""
        # On a thread that ends: OpenMP keeps a team of threads for every thread that has computed,
        # and once there are more of them than cores it lets all of them sleep between two loops. A
        # step of the engine's thread would then take nearly twice as long.
        with ThreadPoolExecutor(1, thread_name_prefix="draftgate-load") as loader:
            return loader.submit(cls._load, model_dir, config, drafter).result()

    @classmethod
    def _load(cls, model_dir: Path, config: EngineConfig, drafter: Drafter | None) -> Engine:
        config.validate()
        cuda = config.device != "cpu" and torch.cuda.is_available()
        if config.device == "cuda" and not cuda:
            raise DraftgateError(ErrorCode.FAILED_PRECONDITION, "device: there is no CUDA here")
        if config.threads:
            torch.set_num_threads(config.threads)
        device = torch.device("cuda" if cuda else "cpu")
        dtype = compute_dtype(config.dtype, device)
        config = replace(config, dtype=dtype_name(dtype))
        target = load_target(model_dir, dtype, device)
        engine = cls(target, config, drafter=drafter)
        if config.gate == "auto" and engine.speculates:
            engine.use_costs(known_costs(engine))
        engine._restore_policy()
        return engine

    @property
    def speculates(self) -> bool:
        """Whether it has a drafter that may draft."""
        return self._speculates

    @property
    def stepper(self) -> Stepper:
        """Runs its steps. Only the engine's own thread may touch it, or one that calls `step`."""
        return self._stepper

    @property
    def gate(self) -> Gate:
        """Decides how much each step drafts. Only the engine's own thread may change it, or one
        that has called `step`."""
        return self._gate

    def set_policy(self, policy: Policy, *, save: bool = False) -> None:
        """What an operator asks of the gate, from the next step on. save: at the next start too.

        Raises DraftgateError: INVALID_ARGUMENT where it is out of range, FAILED_PRECONDITION where
        it cannot be obeyed or kept; nothing changes then.
        """
        policy.validate(self._gate.draft_lens[-1])
        if policy.mode is Mode.AUTO and self.speculates and self._gate.costs is None:
            raise DraftgateError(
                ErrorCode.FAILED_PRECONDITION,
                "mode: auto goes by measured step times, and this server was started without them: "
                "start it with --gate auto",
                field="mode",
            )
        if save:
            save_policy(self.config, policy)
        with self._work:
            self._gate.set_policy(policy)

    def gate_state(self) -> dict[str, object]:
        """What the gate does and knows, fit for JSON, with what the engine holds and its totals
        since its start."""
        with self._work:
            totals = self._stepper.totals
            return {
                **gate_state(self._gate, self._stepper.log.last, now_s=time.time()),
                "running_rows": len(self._scheduler.running),
                "waiting_rows": len(self._scheduler.waiting),
                "kv_used_tokens": self._cache.used_blocks * BLOCK_TOKENS,
                "kv_total_tokens": self.kv_total_tokens,
                "emitted_tokens": totals.emitted_tokens,
                "verify_steps": totals.verify_steps,
                "drafted_tokens": totals.drafted_tokens,
                "accepted_tokens": totals.accepted_tokens,
                "uptime_s": self._stepper.uptime_s,
            }

    def steps_since(self, step: int, most: int) -> StepsSince:
        """What became of the steps after the one of this number, the oldest first, at most so
        many of them; of those long ago only how many they were."""
        return self._stepper.log.since(step, most)

    def use_costs(self, costs: CostTable) -> None:
        """Let the gate start from this table, as if no step had run."""
        self._gate = make_gate(self.config, costs, speculates=self._speculates)
        self._stepper.gate = self._gate
        self._stepper.start_over()
        self._freed_cancelled = 0

    def step(self) -> None:
        """Run one step on the caller's thread, as long as the engine has not been started."""
        with torch.inference_mode():
            self._step()

    def start(self, on_failure: Callable[[str], None] | None = None) -> None:
        """Begin to run. `on_failure` hears why, after every request has, if a step ever fails."""
        self._on_failure = on_failure
        self._thread.start()

    def close(self) -> None:
        """End every generation as cancelled and stop the thread."""
        with self._work:
            self._closing = True
            self._work.notify()
        if self._thread.is_alive():
            self._thread.join()
        self._end_all()

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request; its outputs go to `sink`, the last one with a finish reason.

        Raises DraftgateError: INVALID_ARGUMENT naming a field, ALREADY_EXISTS for an id that is
        running, RESOURCE_EXHAUSTED when the queue is full, UNAVAILABLE when the engine has ended.
        """
        try:
            self._admit(request, sink)
        except DraftgateError as error:
            if error.code is not ErrorCode.ALREADY_EXISTS:
                with self._work:
                    # A stop for it comes too late, and is not meant for the next of this id.
                    self._ended_ids.add(request.request_id, self._clock())
            raise

    def _admit(self, request: Request, sink: Sink) -> None:
        vocab_size = self.target.config.shape.vocab_size
        check_request(request, vocab_size, self.max_sequence_tokens)
        sequence = Sequence(
            row_id=next(self._row_ids),
            request=request,
            sink=sink,
            make_sampler=partial(self._sampler, request),
            arrived_s=self._clock(),
            tokens=list(request.input_ids),
        )
        with self._work:
            self._check_open()
            if request.request_id in self._by_id:
                raise DraftgateError(
                    ErrorCode.ALREADY_EXISTS,
                    f"request_id: {request.request_id!r} is already running",
                    field="request_id",
                )
            early_s = self._stopped_ids.discard(request.request_id)
            sequence.cancelled = early_s is not None and self._clock() - early_s < _EARLY_STOP_S
            self._scheduler.add(sequence)
            self._by_id[request.request_id] = sequence
            self._ended_ids.discard(request.request_id)
            self._work.notify()

    def stop(self, request_id: str) -> None:
        """End a generation; one that has not arrived yet ends when it does.

        A stop that comes after the end does nothing: the next request of that id is another one.
        """
        with self._work:
            sequence = self._by_id.get(request_id)
            if sequence is not None:
                sequence.cancelled = True
                self._work.notify()
            elif request_id not in self._ended_ids:
                self._stopped_ids.add(request_id, self._clock())

    def counters(self) -> EngineCounters:
        with self._work:
            totals = self._stepper.totals
            return EngineCounters(
                running_rows=len(self._scheduler.running),
                waiting_rows=len(self._scheduler.waiting),
                steps=totals.steps,
                emitted_tokens=totals.emitted_tokens,
                verify_steps=totals.verify_steps,
                drafted_tokens=totals.drafted_tokens,
                accepted_tokens=totals.accepted_tokens,
                rows_freed_cancelled=self._freed_cancelled,
                preemptions=self._scheduler.preemptions,
                kv_used_blocks=self._cache.used_blocks,
                kv_total_blocks=self._cache.total_blocks,
            )

    @property
    def kv_block_bytes(self) -> int:
        return self._cache.block_bytes

    @property
    def kv_total_tokens(self) -> int:
        """What the KV cache holds, all rows together."""
        return self._cache.total_blocks * BLOCK_TOKENS

    @property
    def max_batch_rows(self) -> int:
        return self._cache.max_rows

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._wait_for_work():
                    self._step()
        except Exception as error:  # noqa: BLE001 - whatever it was, the requests must hear of it
            # A step that fails leaves the cache in doubt: every request is told, and the process
            # that hosts the engine sees it closed.
            _LOG.exception("the engine's step failed")
            self._failure = f"the engine failed: {error}"
        finally:
            self._end_all()
        if self._failure and self._on_failure is not None:
            self._on_failure(self._failure)

    def _wait_for_work(self) -> bool:
        with self._work:
            while not self._closing and not self._by_id:
                self._work.wait()
            return not self._closing

    def _step(self) -> None:
        with self._work:
            now_s = self._clock()
            self._drop_ended(now_s)
            self._scheduler.trim()
            planned = self._scheduler.planned_prefill()
            # What arrives while tokens are drafted would lengthen a step that was decided on
            # without it; where there is a ceiling it waits for the next.
            known = len(self._scheduler.waiting) if self._gate.policy.max_step_ms else None
        # Only this thread changes which rows run, so a drafter may take its time unlocked.
        draft = self._stepper.draft(self._scheduler.running, planned)
        lens = {row_id: len(d.token_ids) for row_id, d in draft.items()}
        with self._work:
            rows = self._scheduler.schedule(now_s, lens, known)
        if not rows:
            return
        outputs = self._stepper.run(rows, draft)
        with self._work:
            # Before the last output is sent, so that its receiver may use the id again at once.
            for sequence, output in outputs:
                if output.finish_reason is not FinishReason.NONE:
                    self._forget(sequence)
        for sequence, output in outputs:
            sequence.sink(output)

    def _restore_policy(self) -> None:
        """Obey what an operator saved. Raises DraftgateError where that cannot be."""
        saved = saved_policy(self.config)
        if saved is None:
            return
        path = self.config.policy_file
        try:
            self.set_policy(saved)
        except DraftgateError as error:
            raise DraftgateError(error.code, f"{path}: {error.message}") from error
        told = {name: value for name, value in saved.to_mapping().items() if value is not None}
        _LOG.info("the gate obeys the policy saved in %s: %s", path, json.dumps(told))

    def _drop_ended(self, now_s: float) -> None:
        """Take out what was cancelled or is past its deadline."""
        for sequence in list(self._by_id.values()):
            if sequence.cancelled:
                reason = FinishReason.CANCELLED
            elif sequence.expired(now_s):
                reason = FinishReason.DEADLINE
            else:
                continue
            if reason is FinishReason.CANCELLED and sequence.slot is not None:
                self._freed_cancelled += 1
            self._forget(sequence)
            self._stepper.send_last(sequence, reason)

    def _forget(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        self._stepper.forget(sequence)
        del self._by_id[sequence.request.request_id]
        self._ended_ids.add(sequence.request.request_id, self._clock())

    def _end_all(self) -> None:
        with self._work:
            self._closing = True
            for sequence in list(self._by_id.values()):
                self._forget(sequence)
                error = self._failed() if self._failure else None
                self._stepper.send_last(sequence, FinishReason.CANCELLED, error)

    def _failed(self) -> DraftgateError:
        return DraftgateError(ErrorCode.UNAVAILABLE, self._failure)

    def _check_open(self) -> None:
        if self._failure:
            raise self._failed()
        if self._closing:
            raise DraftgateError(ErrorCode.UNAVAILABLE, "the engine is shutting down")

    def _sampler(self, request: Request) -> RowSampler:
        split = len(request.input_ids) - request.resume_len
        return RowSampler(
            request.params,
            request.input_ids[:split],
            request.input_ids[split:],
            self.target.config.shape.vocab_size,
            self.target.device,
        )
