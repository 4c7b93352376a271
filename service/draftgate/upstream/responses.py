"""Inference responses -> domain chunks."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

from draftgate import contract
from draftgate._pb.inference import grpc_service_pb2 as pb
from draftgate.contract import DataType, DraftSource, TensorSpec
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.upstream.types import Chunk, PromptReport, TokenAlternative, VerifyStep

__all__ = ["control_result", "has_outputs", "parse_chunk"]

_STRUCT_CODES = {DataType.INT32: "i", DataType.INT64: "q", DataType.FP32: "f"}
_ITEM_BYTES = {DataType.INT32: 4, DataType.INT64: 8, DataType.FP32: 4}


class _Tensor(NamedTuple):
    """How a tensor is read."""

    datatype: str
    code: str
    item_bytes: int

    @classmethod
    def of(cls, spec: TensorSpec) -> _Tensor:
        dtype = spec.dtype
        return cls(dtype.value, _STRUCT_CODES.get(dtype, ""), _ITEM_BYTES.get(dtype, 0))


_ENSEMBLE = {spec.name: _Tensor.of(spec) for spec in contract.ENSEMBLE_OUTPUTS}
_ENGINE = {spec.name: _Tensor.of(spec) for spec in contract.ENGINE_OUTPUTS}


def has_outputs(response: pb.ModelInferResponse) -> bool:
    """False for the empty response that only carries the final flag."""
    return bool(response.outputs)


def parse_chunk(response: pb.ModelInferResponse) -> Chunk:
    """The ensemble's response as a chunk.

    A tensor that is missing or empty means that the engine had nothing to say there. Raises
    DraftgateError(INTERNAL) for a response that breaks the contract.
    """
    outputs = _Outputs(response, _ENSEMBLE)
    ids = outputs.integers("output_ids")
    return Chunk(
        index=outputs.integer("chunk_index"),
        text=outputs.text("text_output"),
        token_ids=ids,
        steps=_steps(outputs),
        gate_reason=outputs.integer("gate_reason", 0),
        batch_rows=outputs.integer("batch_rows", 0),
        finish_reason=outputs.text("finish_reason"),
        logprobs=_logprobs(outputs, len(ids)),
        alternatives=_alternatives(outputs, len(ids)),
        prompt=_prompt_report(outputs),
        size_bytes=outputs.size_bytes,
    )


def control_result(response: pb.ModelInferResponse) -> str:
    """The JSON that the engine's control plane answered."""
    return _Outputs(response, _ENGINE).text(contract.CONTROL_RESULT)


class _Outputs:
    """Typed reads of a response's tensors, checked against the contract."""

    def __init__(self, response: pb.ModelInferResponse, tensors: Mapping[str, _Tensor]) -> None:
        outputs = response.outputs
        contents = response.raw_output_contents
        if len(outputs) != len(contents):
            raise broken("outputs without raw contents")
        found: dict[str, bytes] = {}
        for index, content in enumerate(contents):
            if not content:
                continue  # As most are: as good as missing, and not worth a look at its name.
            output = outputs[index]
            name = output.name
            tensor = tensors.get(name)
            if tensor is None:
                continue  # A newer engine may say more than we understand.
            if output.datatype != tensor.datatype:
                raise broken(f"{name} has data type {output.datatype}")
            found[name] = content
        self._contents = found
        self._tensors = tensors
        self.size_bytes = sum(map(len, found.values()))
        """Of all contents."""

    def any_of(self, *names: str) -> bool:
        """Whether any of these tensors has something in it."""
        return not self._contents.keys().isdisjoint(names)

    def numbers(self, name: str) -> tuple[float, ...]:
        """Values of an FP32 tensor."""
        return self._values(name)

    def integers(self, name: str) -> tuple[int, ...]:
        """Values of an INT32 or INT64 tensor."""
        values: tuple[int, ...] = self._values(name)
        return values

    def integer(self, name: str, default: int | None = None) -> int:
        """The value of a tensor of one element; `default` if it is missing or empty."""
        content = self._contents.get(name)
        if content is not None and len(content) == self._tensors[name].item_bytes:
            return int.from_bytes(content, "little", signed=True)
        values = self.integers(name)
        if not values and default is not None:
            return default
        raise broken(f"{name} has {len(values)} elements")

    def text(self, name: str) -> str:
        """The value of a BYTES tensor of one element; empty if it is missing or empty."""
        content = self._contents.get(name, b"")
        if not content:
            return ""
        if len(content) < 4 or len(content) != 4 + struct.unpack_from("<I", content)[0]:
            raise broken(f"{name} is not one string")
        try:
            return content[4:].decode()
        except UnicodeDecodeError as error:
            raise broken(f"{name} is not UTF-8") from error

    def _values(self, name: str) -> tuple[int, ...]:
        content = self._contents.get(name)
        if content is None:
            return ()
        _, code, item_bytes = self._tensors[name]
        count, rest = divmod(len(content), item_bytes)
        if rest:
            raise broken(f"{name} has {len(content)} bytes")
        return struct.unpack(f"<{count}{code}", content)


def _steps(outputs: _Outputs) -> tuple[VerifyStep, ...]:
    if not outputs.any_of("draft_lens", "accepted_lens", "draft_source", "draft_ids"):
        return ()
    drafted = outputs.integers("draft_lens")
    accepted = outputs.integers("accepted_lens")
    sources = outputs.integers("draft_source")
    if not len(drafted) == len(accepted) == len(sources):
        raise broken("draft_lens, accepted_lens and draft_source differ in length")
    drafts = outputs.integers("draft_ids")
    if drafts and len(drafts) != sum(drafted):
        raise broken("draft_ids and draft_lens disagree")
    steps = []
    start = 0
    for draft_len, accepted_len, source in zip(drafted, accepted, sources, strict=True):
        if not 0 <= accepted_len <= draft_len:
            raise broken(f"{accepted_len} of {draft_len} drafts accepted")
        step_drafts = drafts[start : start + draft_len]
        steps.append(VerifyStep(draft_len, accepted_len, _draft_source(source), step_drafts))
        start += draft_len
    return tuple(steps)


def _draft_source(value: int) -> DraftSource:
    try:
        return DraftSource(value)
    except ValueError:
        return DraftSource.NONE  # A drafter that this version does not know by name.


def _logprobs(outputs: _Outputs, tokens: int) -> tuple[float, ...]:
    logprobs = outputs.numbers("token_logprobs")
    if logprobs and len(logprobs) != tokens:
        raise broken(f"{len(logprobs)} token_logprobs for {tokens} tokens")
    return logprobs


def _alternatives(outputs: _Outputs, tokens: int) -> tuple[tuple[TokenAlternative, ...], ...]:
    if not outputs.any_of("top_ids", "top_logprobs"):
        return ()
    ids = outputs.integers("top_ids")
    logprobs = outputs.numbers("top_logprobs")
    if len(ids) != len(logprobs):
        raise broken("top_ids and top_logprobs differ in length")
    if not ids:
        return ()
    if not tokens or len(ids) % tokens:
        raise broken(f"{len(ids)} alternatives for {tokens} tokens")
    pairs = [TokenAlternative(*pair) for pair in zip(ids, logprobs, strict=True)]
    each = len(pairs) // tokens
    return tuple(tuple(pairs[start : start + each]) for start in range(0, len(pairs), each))


def _prompt_report(outputs: _Outputs) -> PromptReport | None:
    if not outputs.integers("prompt_len"):
        return None
    return PromptReport(
        prompt_tokens=outputs.integer("prompt_len"),
        cached_tokens=outputs.integer("cached_len", 0),
        queue_us=outputs.integer("queue_us", 0),
        prefill_us=outputs.integer("prefill_us", 0),
    )


def broken(problem: str) -> DraftgateError:
    """The error for a response that does not keep the contract."""
    return DraftgateError(ErrorCode.INTERNAL, f"the engine broke the tensor contract: {problem}")
