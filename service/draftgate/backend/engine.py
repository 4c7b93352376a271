"""The Triton model `engine`: requests in, one response per engine step out.

Three threads share the work: Triton's own hands requests over, the engine's runs steps, and a
sender's writes responses, so that neither Triton nor a slow write holds up a step.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from draftgate.backend.control import Control
from draftgate.backend.environment import ENGINE_SETTINGS, model_dir
from draftgate.backend.logs import log_to_server
from draftgate.backend.tensors import (
    Inputs,
    PbUtils,
    Value,
    error_response,
    load_pb_utils,
    loading,
    response,
    unforeseen,
)
from draftgate.contract import (
    CONTEXT_IDS,
    CONTROL,
    CONTROL_RESULT,
    ENGINE_INPUTS,
    ENGINE_OUTPUTS,
    STOP,
    DataType,
    FinishReason,
    TensorSpec,
)
from draftgate.engine import Engine, EngineConfig, Output, Request
from draftgate.errors import DraftgateError, ErrorCode, invalid_argument
from draftgate.sampling import SamplingParams, Verification
from draftgate.text import Tokenizer

__all__ = ["TritonPythonModel"]

_LOG = logging.getLogger(__name__)

_SPECS = {spec.name: spec for spec in ENGINE_INPUTS}

_CANCEL_SWEEP_S = 0.1
"""How often streams that have nothing to send are asked whether their caller has gone."""


class TritonPythonModel:
    """What Triton's Python backend loads."""

    def initialize(self, args: Mapping[str, str]) -> None:
        self._pb_utils = load_pb_utils()
        log_to_server()
        with loading(self._pb_utils):
            directory = model_dir()
            self._tokenizer = Tokenizer.load(directory)
            self._engine = Engine.load(directory, _settings())
        self._control = Control(self._engine, self._tokenizer)
        self._sender = _Sender(self._pb_utils, self._engine, self._tokenizer)
        self._sender.start()
        self._engine.start(self._sender.end)

    def execute(self, requests: Sequence[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._accept(request, sender)
            except DraftgateError as error:
                self._refuse(sender, error)
            except Exception as error:  # noqa: BLE001 - the others of the batch must not suffer
                self._refuse(sender, unforeseen(error))

    def finalize(self) -> None:
        self._engine.close()
        self._sender.close()

    def _refuse(self, sender: Any, error: DraftgateError) -> None:
        final = self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        sender.send(error_response(self._pb_utils, error), flags=final)

    def _accept(self, request: Any, sender: Any) -> None:
        inputs = Inputs(self._pb_utils, request, ENGINE_INPUTS)
        request_id = request.request_id()
        wanted = frozenset(request.requested_output_names())
        if inputs.flag(STOP):
            if not request_id:
                raise invalid_argument("request_id", request_id, "the id of the request to stop")
            self._engine.stop(request_id)
            sender.send(flags=self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        elif inputs.has(CONTROL):
            answer = self._control.answer(inputs.text(CONTROL) or "")
            sender.send(
                response(self._pb_utils, ENGINE_OUTPUTS, {CONTROL_RESULT: answer}, wanted),
                flags=self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
            )
        else:
            self._sender.submit(_request(inputs, request_id or uuid.uuid4().hex), sender, wanted)


@dataclass(eq=False)
class _Stream:
    """One generation on its way to its caller."""

    request: Request
    sender: Any
    wanted: frozenset[str]
    """The outputs that the caller asked for."""
    output_ids: list[int] = field(default_factory=list)
    """Everything emitted so far, by an earlier run too: the text's context."""
    broken: bool = False
    """A response could not be sent: nothing more is."""


@dataclass(frozen=True)
class _End:
    """The last thing in a sender's queue."""

    failure: str = ""
    """Why the engine failed, if it did."""


class _Sender:
    """Turns outputs into responses on a thread of its own.

    Its queue needs no bound of its own: a generation puts in at most `max_tokens` outputs, and the
    engine holds only so many generations.
    """

    def __init__(self, pb_utils: PbUtils, engine: Engine, tokenizer: Tokenizer) -> None:
        self._pb_utils = pb_utils
        self._engine = engine
        self._tokenizer = tokenizer
        self._queue: queue.SimpleQueue[tuple[_Stream, Output] | _End] = queue.SimpleQueue()
        self._live: set[_Stream] = set()
        self._lock = threading.Lock()
        self._swept_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="draftgate-sender", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Send what is queued, then end."""
        self._queue.put(_End())
        self._thread.join()

    def end(self, failure: str) -> None:
        """Send what is queued, then end the process: an engine that failed serves nobody, and
        without its process the supervisor starts it again."""
        self._queue.put(_End(failure))

    def submit(self, request: Request, sender: Any, wanted: frozenset[str]) -> None:
        """Start a generation. Raises DraftgateError as `Engine.submit` does."""
        emitted = request.input_ids[len(request.input_ids) - request.resume_len :]
        stream = _Stream(request, sender, wanted, list(emitted))
        with self._lock:
            self._live.add(stream)
        try:
            self._engine.submit(request, lambda output: self._queue.put((stream, output)))
        except DraftgateError:
            self._drop(stream)
            raise

    def _run(self) -> None:
        try:
            failure = self._deliver()
        except Exception:  # noqa: BLE001 - logged with its traceback
            _LOG.exception("the thread that sends responses failed")
            os._exit(1)
        if failure:
            _LOG.critical("ending the process: %s", failure)
            os._exit(1)

    def _deliver(self) -> str:
        """Send until the end; why it came, if the engine failed."""
        while True:
            if time.monotonic() - self._swept_s > _CANCEL_SWEEP_S:
                self._sweep()
            try:
                item = self._queue.get(timeout=_CANCEL_SWEEP_S)
            except queue.Empty:
                continue
            if isinstance(item, _End):
                return item.failure
            stream, output = item
            if not stream.broken:
                self._send(stream, output)

    def _send(self, stream: _Stream, output: Output) -> None:
        last = output.finish_reason is not FinishReason.NONE
        flags = self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0
        try:
            if output.error is not None:
                answer = error_response(self._pb_utils, output.error)
            else:
                values = self._values(stream, output)
                answer = response(self._pb_utils, ENGINE_OUTPUTS, values, stream.wanted)
            stream.sender.send(answer, flags=flags)
        except Exception as error:  # noqa: BLE001 - one stream's failure is not the others'
            self._give_up(stream, error)
            return
        if last:
            self._drop(stream)

    def _give_up(self, stream: _Stream, error: Exception) -> None:
        """A response could not be sent: end the generation, and tell the caller if that works."""
        stream.broken = True
        self._drop(stream)
        self._engine.stop(stream.request.request_id)
        answer = error_response(self._pb_utils, unforeseen(error))
        try:
            stream.sender.send(answer, flags=self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except Exception:  # noqa: BLE001 - logged with its traceback
            _LOG.exception("a stream could not be ended")

    def _values(self, stream: _Stream, output: Output) -> dict[str, Value]:
        context = stream.output_ids[self._tokenizer.context_start(stream.output_ids) :]
        stream.output_ids.extend(output.token_ids)
        step = output.verify_step
        values: dict[str, Value] = {
            "output_ids": output.token_ids,
            "chunk_index": output.chunk_index,
            "token_logprobs": output.logprobs,
            "top_logprobs": [value for row in output.top_logprobs for value in row],
            "top_ids": [token for row in output.top_ids for token in row],
            "gate_reason": int(output.gate_reason),
            "batch_rows": output.batch_rows,
            "finish_reason": str(output.finish_reason),
            CONTEXT_IDS: context,
        }
        if step is not None:
            values["draft_lens"] = [len(step.draft_ids)]
            values["accepted_lens"] = [step.accepted]
            values["draft_source"] = [int(step.source)]
            if stream.request.params.return_drafts:
                values["draft_ids"] = step.draft_ids
        if output.chunk_index == 0:
            values["prompt_len"] = output.prompt_len
            values["cached_len"] = 0
            values["queue_us"] = output.queue_us
            values["prefill_us"] = output.prefill_us
        return values

    def _drop(self, stream: _Stream) -> None:
        with self._lock:
            self._live.discard(stream)

    def _sweep(self) -> None:
        """End the generations whose caller has gone."""
        with self._lock:
            streams = list(self._live)
        for stream in streams:
            try:
                cancelled = stream.sender.is_cancelled()
            except Exception as error:  # noqa: BLE001 - one stream's failure is not the others'
                self._give_up(stream, error)
                continue
            if cancelled:
                self._engine.stop(stream.request.request_id)
        self._swept_s = time.monotonic()


def _settings() -> EngineConfig:
    text = os.environ.get(ENGINE_SETTINGS, "{}")
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise DraftgateError(
            ErrorCode.FAILED_PRECONDITION, f"{ENGINE_SETTINGS} is not JSON: {error}"
        ) from error
    if not isinstance(raw, dict):
        raise DraftgateError(
            ErrorCode.FAILED_PRECONDITION, f"{ENGINE_SETTINGS} is not a JSON object"
        )
    return EngineConfig.from_mapping(raw)


def _request(inputs: Inputs, request_id: str) -> Request:
    return Request(
        request_id=request_id,
        input_ids=tuple(inputs.integers("input_ids") or ()),
        params=_sampling(inputs),
        resume_len=inputs.integer("resume_len") or 0,
        deadline_ms=inputs.integer("deadline_ms"),
    )


def _sampling(inputs: Inputs) -> SamplingParams:
    if not inputs.has("max_tokens"):
        raise invalid_argument("max_tokens", None, "an integer of at least 1")
    given = {field.name: _read(inputs, _SPECS[field.name]) for field in fields(SamplingParams)}
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def _read(inputs: Inputs, spec: TensorSpec) -> Any:
    if spec.dtype is DataType.FP32:
        return inputs.number(spec.name)
    if spec.dtype is DataType.BOOL:
        return inputs.flag(spec.name)
    if spec.dtype is DataType.STRING:
        return inputs.choice(spec.name, Verification)
    if spec.dims == (-1,):
        values = inputs.integers(spec.name)
        return None if values is None else tuple(values)
    return inputs.integer(spec.name)
