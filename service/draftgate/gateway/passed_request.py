"""What the gateway reads of a request in Triton's protocol that it passes on as it is.

Everything here is an estimate or a wish: a request that makes no sense is read as far as it goes,
and Triton says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from draftgate import contract
from draftgate._pb.inference import grpc_service_pb2 as pb
from draftgate.gateway.admission import Ask, Priority
from draftgate.gateway.admission.asking import text_tokens
from draftgate.gateway.tenant import Tenant
from draftgate.upstream.balance import prefix_key
from draftgate.upstream.raw import Size
from draftgate.upstream.types import TextPrompt, TokenPrompt

__all__ = ["PassedRequest", "SequenceStep", "leave_of_limits", "read_request"]

_IDS = "input_ids"
_DEADLINE = "deadline_ms"
_TEXTS = ("text_input", "messages", "prompt")
_MAX_TOKENS = ("max_tokens", "request_output_len", "sampling_param_max_tokens")
"""How the three kinds of model repository call them."""
_INTEGER_BYTES = {
    "INT8": 1,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
    "UINT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "UINT64": 8,
}
_KEY_BYTES = 4096
_KEY_IDS = 256
"""As much as `prefix_key` looks at."""
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class SequenceStep:
    """One request to a stateful model, of many that belong together."""

    key: tuple[str, str, str | int]
    """Tenant, model and the id that the client gave the sequence."""
    start: bool
    end: bool


@dataclass(frozen=True)
class PassedRequest:
    """A request as admission and balancing see it."""

    request: pb.ModelInferRequest
    ask: Ask
    key: bytes
    """The `prefix_key` of its prompt; empty if that is not known."""
    timeout_s: float | None
    """How long it may wait for its start, by its parameter `timeout`."""
    sequence: SequenceStep | None
    stops: bool
    """Whether it does nothing but end a running generation."""

    @property
    def size(self) -> Size:
        """What it makes its replica do."""
        pinned = self.stops or self.sequence is not None
        return Size(self.ask.prompt_tokens, self.ask.max_tokens, pinned)


def read_request(
    request: pb.ModelInferRequest,
    *,
    tenant: Tenant,
    time_left_ms: int | None,
    longest: int | None,
) -> PassedRequest:
    """Read it; whatever it holds, nothing is raised.

    time_left_ms: of the call it came on. longest: the most tokens that the model takes or gives.

    `priority` 0 and 1 are interactive, as is none; larger ones, which are lower to Triton, are
    batch. `timeout` is in microseconds.
    """
    raw = iter(request.raw_input_contents)
    tensors = {each.name: _Tensor(each, next(raw, b"")) for each in request.inputs}
    timeout_us = _timeout_us(request)
    limits_ms = (
        time_left_ms,
        timeout_us // 1000 if timeout_us else None,
        _deadline_ms(tensors.get(_DEADLINE)),
    )
    prompts = [each for each in tensors.values() if each.tokens]
    return PassedRequest(
        request=request,
        ask=Ask(
            tenant=tenant,
            priority=_priority(request),
            prompt_tokens=sum(each.tokens for each in prompts),
            prompt_field=prompts[0].name if prompts else "inputs",
            max_tokens=min(_max_tokens(tensors), longest or _INT32_MAX),
            deadline_ms=min((each for each in limits_ms if each is not None), default=None),
        ),
        key=_prefix_key(tensors),
        timeout_s=timeout_us / 1e6 or None,
        sequence=_sequence(request, tenant),
        stops=contract.STOP in tensors and tensors[contract.STOP].is_true,
    )


def leave_of_limits(request: pb.ModelInferRequest, waited_s: float) -> None:
    """Leave Triton what the wait here has left of the request's `timeout`, and the engine what it
    has left of its `deadline_ms`."""
    timeout_us = _timeout_us(request)
    if timeout_us and waited_s:
        left_us = max(1, timeout_us - int(waited_s * 1e6))
        request.parameters["timeout"].int64_param = left_us
    raws = request.raw_input_contents
    for index, tensor in enumerate(request.inputs):
        if tensor.name != _DEADLINE:
            continue
        raw = raws[index] if index < len(raws) else b""
        deadline_ms = _deadline_ms(_Tensor(tensor, raw))
        if deadline_ms is None:
            continue
        left_ms = max(1, deadline_ms - int(waited_s * 1000))
        if raw:
            raws[index] = left_ms.to_bytes(len(raw), "little")
        else:
            tensor.contents.int_contents[0] = left_ms


class _Tensor:
    """An input, with its contents wherever they stand."""

    def __init__(self, tensor: pb.ModelInferRequest.InferInputTensor, raw: bytes) -> None:
        self.name = tensor.name
        self._datatype = tensor.datatype
        self._contents = tensor.contents
        self._raw = raw

    @property
    def tokens(self) -> int:
        """About how many tokens of a prompt it holds."""
        if self._datatype == "BYTES":
            given = sum(map(len, self._contents.bytes_contents)) or max(0, len(self._raw) - 4)
            return text_tokens(given)
        if self.name == _IDS and self._datatype in _INTEGER_BYTES:
            return len(self._raw) // _INTEGER_BYTES[self._datatype] or len(self._integers)
        return 0

    @property
    def single_int32(self) -> int | None:
        """The number it holds, if it holds one of this type and nothing else."""
        if self._datatype != "INT32" or len(self._raw) not in (0, 4):
            return None
        given = self.first_integers(1) if self._raw else self._contents.int_contents
        return given[0] if len(given) == 1 else None

    @property
    def is_true(self) -> bool:
        return bool(self._raw.strip(b"\0")) or any(self._contents.bool_contents)

    def first_integers(self, most: int) -> tuple[int, ...]:
        """At most so many of its numbers; none if they are no integers."""
        size = _INTEGER_BYTES.get(self._datatype)
        if size is None or not self._raw:
            return tuple(islice(self._integers, most))
        signed = self._datatype.startswith("I")
        ends = range(size, min(len(self._raw), most * size) + 1, size)
        return tuple(
            int.from_bytes(self._raw[end - size : end], "little", signed=signed) for end in ends
        )

    def start_of_text(self, most_bytes: int) -> str:
        """The beginning of its first string."""
        given = self._contents.bytes_contents
        content = given[0] if given else self._raw[4 : 4 + int.from_bytes(self._raw[:4], "little")]
        return content[:most_bytes].decode(errors="replace")

    @property
    def _integers(self) -> Sequence[int]:
        typed = self._contents
        return (
            typed.int_contents
            or typed.int64_contents
            or typed.uint_contents
            or typed.uint64_contents
        )


def _max_tokens(tensors: dict[str, _Tensor]) -> int:
    """0 where nobody says: then it may be no generation at all."""
    given = (tensors[name].first_integers(1) for name in _MAX_TOKENS if name in tensors)
    return max((0, *(number for numbers in given for number in numbers)))


def _deadline_ms(tensor: _Tensor | None) -> int | None:
    """Of our own models; None if there is none that makes sense."""
    given = tensor.single_int32 if tensor else None
    return given if given and given > 0 else None


def _prefix_key(tensors: dict[str, _Tensor]) -> bytes:
    for name in _TEXTS:
        if name in tensors and (text := tensors[name].start_of_text(_KEY_BYTES)):
            return prefix_key(TextPrompt(text))
    if _IDS in tensors and (ids := tensors[_IDS].first_integers(_KEY_IDS)):
        return prefix_key(TokenPrompt(tuple(each & 0xFFFFFFFF for each in ids)))
    return b""


def _parameter(request: pb.ModelInferRequest, name: str, *kinds: str) -> str | int | None:
    """The parameter's value if it is there and of one of these kinds."""
    if name not in request.parameters:
        return None
    parameter = request.parameters[name]
    kind = parameter.WhichOneof("parameter_choice")
    value: str | int | None = getattr(parameter, str(kind)) if kind in kinds else None
    return value


def _priority(request: pb.ModelInferRequest) -> Priority:
    given = _parameter(request, "priority", "int64_param", "uint64_param")
    return Priority.BATCH if isinstance(given, int) and given > 1 else Priority.INTERACTIVE


def _timeout_us(request: pb.ModelInferRequest) -> int:
    """0 if there is none."""
    given = _parameter(request, "timeout", "int64_param")
    return max(0, given) if isinstance(given, int) else 0


def _sequence(request: pb.ModelInferRequest, tenant: Tenant) -> SequenceStep | None:
    given = _parameter(request, "sequence_id", "int64_param", "string_param")
    if not given:
        return None
    return SequenceStep(
        key=(tenant.name, request.model_name, given),
        start=bool(_parameter(request, "sequence_start", "bool_param")),
        end=bool(_parameter(request, "sequence_end", "bool_param")),
    )
