"""Running an engine in a test: streams that check what every generation must keep to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from draftgate.contract import DraftSource, FinishReason, GateReason
from draftgate.engine import Engine, EngineConfig, Output, Request, Target
from draftgate.engine.drafters import Draft, Drafter, DraftQuery, Settled
from draftgate.sampling import SamplingParams

_PATIENCE_S = 240.0


def greedy(max_tokens: int, **settings: Any) -> SamplingParams:
    """Greedy to the last token, unless `settings` say otherwise."""
    return SamplingParams(
        **{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **settings}
    )


def sampled(max_tokens: int, **settings: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True, **settings})


@dataclass(eq=False)
class Stream:
    """One generation's outputs. Calling it with an output makes it the engine's sink."""

    request: Request
    on_output: Callable[[Stream, Output], None] | None = None
    """Runs on the engine's thread after each output, between two steps."""
    outputs: list[Output] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)

    def __call__(self, output: Output) -> None:
        self.outputs.append(output)
        if self.on_output is not None:
            self.on_output(self, output)
        if output.finish_reason is not FinishReason.NONE:
            self._ended.set()

    @property
    def ended(self) -> bool:
        """Whether its last output is there."""
        return bool(self.outputs) and self.finish_reason is not FinishReason.NONE

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def logprobs(self) -> list[float]:
        return [value for output in self.outputs for value in output.logprobs]

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[-1].finish_reason

    @property
    def gate_reasons(self) -> set[GateReason]:
        return {output.gate_reason for output in self.outputs if output.token_ids}

    @property
    def accepted(self) -> int:
        return sum(o.verify_step.accepted for o in self.outputs if o.verify_step is not None)

    @property
    def drafted(self) -> int:
        return sum(len(o.verify_step.draft_ids) for o in self.outputs if o.verify_step is not None)

    def wait(self) -> Stream:
        assert self._ended.wait(_PATIENCE_S), f"{self.request.request_id} never ended"
        self.check()
        return self

    def check(self) -> None:
        """What holds for every generation that ended."""
        assert [o.chunk_index for o in self.outputs] == list(range(len(self.outputs)))
        for output in self.outputs:
            assert output.request_id == self.request.request_id
            last = output is self.outputs[-1]
            assert (output.finish_reason is not FinishReason.NONE) == last
            if output.token_ids:
                self._check_tokens(output)
            else:
                assert last
        params = self.request.params
        assert len(self.tokens) + self.request.resume_len <= params.max_tokens
        if self.finish_reason is FinishReason.STOP_TOKEN:
            assert self.tokens[-1] in params.stop_token_ids
        assert not set(self.tokens[:-1]) & set(params.stop_token_ids)

    def _check_tokens(self, output: Output) -> None:
        assert output.batch_rows >= 1
        assert output.prompt_len == len(self.request.input_ids) - self.request.resume_len
        assert output.gate_reason is not GateReason.UNKNOWN
        step = output.verify_step
        if step is None:
            assert len(output.token_ids) == 1
            return
        assert step.draft_ids
        assert output.token_ids[: step.accepted] == step.draft_ids[: step.accepted]
        # The target adds one token of its own, unless the run was cut at an accepted draft.
        cut = len(output.token_ids) == step.accepted
        assert cut or len(output.token_ids) == step.accepted + 1
        assert not cut or output.finish_reason is not FinishReason.NONE
        cap = self.request.params.max_draft_len
        assert cap is None or len(step.draft_ids) <= cap


@dataclass
class Running:
    """An engine under test."""

    engine: Engine

    def submit(
        self,
        request_id: str,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        on_output: Callable[[Stream, Output], None] | None = None,
        **more: Any,
    ) -> Stream:
        stream = Stream(Request(request_id, tuple(input_ids), params, **more), on_output)
        self.engine.submit(stream.request, stream)
        return stream

    def run(
        self, prompts: Mapping[str, Sequence[int]], params: SamplingParams
    ) -> dict[str, list[int]]:
        """All prompts at once; the tokens of each."""
        streams = {name: self.submit(name, ids, params) for name, ids in prompts.items()}
        return {name: stream.wait().tokens for name, stream in streams.items()}

    def one(self, input_ids: Sequence[int], params: SamplingParams, **more: Any) -> Stream:
        """One generation, to its end."""
        return self.submit("one", input_ids, params, **more).wait()


@contextmanager
def running(
    target: Target,
    *,
    clock: Callable[[], float] | None = None,
    started: bool = True,
    **settings: Any,
) -> Iterator[Running]:
    """An engine, checked for leftovers when the test is done with it.

    started: whether it runs already; else what is submitted before `start` arrives all at once.
    """
    defaults = {"dtype": "float32", "device": "cpu", "kv_cache_bytes": 1 << 28}
    config = EngineConfig.from_mapping({**defaults, **settings})
    engine = Engine(target, config) if clock is None else Engine(target, config, clock=clock)
    if started:
        engine.start()
    try:
        yield Running(engine)
    finally:
        engine.close()
    left = engine.counters()
    assert (left.running_rows, left.waiting_rows, left.kv_used_blocks) == (0, 0, 0)


class ScriptedDrafter(Drafter):
    """Proposes what `rule` says, and holds the engine to what a drafter may count on."""

    def __init__(
        self,
        rule: Callable[[DraftQuery], Draft],
        source: DraftSource = DraftSource.NGRAM,
    ) -> None:
        self.rule = rule
        self.source = source
        self.rows: dict[int, list[int]] = {}
        """What each row's tokens are known to be."""

    def propose(self, queries: Sequence[DraftQuery]) -> list[Draft]:
        assert len({query.row_id for query in queries}) == len(queries)
        drafts = []
        for query in queries:
            assert query.count >= 1
            assert self.rows[query.row_id] == list(query.tokens), "drafting for a row out of sync"
            draft = self.rule(query)
            assert draft.source is DraftSource.NONE, "a rule does not say who drafts"
            drafts.append(replace(draft, source=self.source))
            assert len(draft.token_ids) <= query.count
        return drafts

    def observe(self, rows: Sequence[Settled], features: torch.Tensor | None) -> None:
        assert features is None
        for row in rows:
            known = self.rows.get(row.row_id, [])
            # The token before `start` was taken in with the pass before, as the next to come.
            assert max(len(known) - 1, 0) == row.start, "observed again without a reset"
            assert row.start < row.computed < row.upto + 1 <= len(row.tokens) + 1
            assert list(row.tokens[: len(known)]) == known, "a settled token has changed"
            assert 0 <= row.accepted <= len(row.draft.token_ids)
            self.rows[row.row_id] = list(row.tokens[: row.upto])

    def reset(self, row_id: int) -> None:
        self.rows.pop(row_id, None)

    def synced_upto(self, row_id: int) -> int:
        return len(self.rows.get(row_id, []))


def use_drafter(monkeypatch: pytest.MonkeyPatch, drafter: Drafter) -> None:
    """Engines made from now on draft with this one."""
    monkeypatch.setattr("draftgate.engine.engine.make_drafter", lambda config, target: drafter)
