"""The profile `llmapi`: TensorRT-LLM's LLM API in its stock Python-backend model.

One model takes text and gives text, the whole of it in every response. Its numbers come as text.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from draftgate._pb.inference import grpc_service_pb2 as pb
from draftgate.contract import FinishReason
from draftgate.sampling import SamplingParams
from draftgate.upstream.profiles.base import Reader, refuse_unless_default, unsupported
from draftgate.upstream.profiles.model_view import ModelView
from draftgate.upstream.profiles.reading import (
    ENDED,
    PERFORMANCE_OUTPUTS,
    Counts,
    StreamReader,
    TextDeltas,
)
from draftgate.upstream.profiles.tensors import Answer, RequestBuilder
from draftgate.upstream.types import EngineDescription, GenerationRequest, TextPrompt

__all__ = ["NAME", "LlmApiProfile", "is_llmapi"]

NAME = "llmapi"

_PREFIX = "sampling_param_"
_SUPPORTED = (
    "temperature",
    "top_p",
    "top_k",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)
# Sent even where they ask for nothing: without any of them the engine takes the likeliest token.
_ALWAYS_SENT = ("temperature", "top_p", "top_k")

_FINISH_REASONS: Mapping[str, str] = {
    "stop": FinishReason.EOS,
    "length": FinishReason.LENGTH,
    "timeout": FinishReason.DEADLINE,
    "cancelled": FinishReason.CANCELLED,
}


def is_llmapi(model: ModelView) -> bool:
    """Whether it is that model."""
    return model.has_inputs("text_input", _PREFIX + "max_tokens") and model.has_outputs(
        "text_output"
    )


class LlmApiProfile:
    """Ends generations by cancelling their RPC, which the model looks for every 100 ms. It has a
    `stop` request too, after which a generation may get no last response, or two."""

    def __init__(self, model: ModelView) -> None:
        self._model = model

    @property
    def name(self) -> str:
        return NAME

    @property
    def entry(self) -> str:
        return self._model.name

    @property
    def models(self) -> Sequence[str]:
        return (self._model.name,)

    @property
    def stoppable(self) -> Collection[str]:
        return ()

    @property
    def description(self) -> EngineDescription:
        return EngineDescription(
            name=self._model.name,
            architecture="",
            quantization="",
            compute_dtype="",
            vocab_size=None,
            max_sequence_tokens=None,
            eos_token_ids=(),
            has_chat_template=False,
            lacks_tokenizer=True,
            drafter="",
            max_draft_len=None,
            max_batch_rows=self._model.max_batch_size or None,
        )

    async def generation(self, request: GenerationRequest, wire_id: str) -> pb.ModelInferRequest:
        sampling = request.sampling
        refuse_unless_default(sampling, ("max_tokens", *_SUPPORTED), NAME)
        if request.resume_len:
            raise unsupported("resume_len", NAME)
        if not isinstance(request.prompt, TextPrompt):
            raise unsupported(request.prompt.tensor, NAME)
        built = RequestBuilder(self._model, wire_id)
        built.add("text_input", request.prompt.text)
        built.add(_PREFIX + "max_tokens", sampling.max_tokens, field="max_tokens")
        self._add_sampling(built, sampling)
        # A model that is not decoupled refuses to stream.
        built.add_known("streaming", self._model.decoupled)
        # The prompt is part of the text unless this is said.
        built.add_known(_PREFIX + "exclude_input_from_output", True)
        built.add_known(_PREFIX + "return_perf_metrics", True)
        built.add_known("return_finish_reason", True)
        built.add_known("return_stop_reason", True)
        built.want(("text_output", "finish_reason", "stop_reason", *PERFORMANCE_OUTPUTS))
        return built.request

    def stop(self, wire_id: str) -> pb.ModelInferRequest | None:
        return None

    def reader(self, request: GenerationRequest) -> Reader:
        # Tokens are not told, so nothing could be derived from them.
        return _Reader(TextDeltas(cumulative=True), Counts(one_step_each=False))

    def _add_sampling(self, built: RequestBuilder, sampling: SamplingParams) -> None:
        given = {name: getattr(sampling, name) for name in _SUPPORTED}
        if sampling.greedy:
            given |= {"temperature": None, "top_p": None, "top_k": 1}
        for name, value in given.items():
            default = SamplingParams.__dataclass_fields__[name].default
            if value is None or (value == default and name not in _ALWAYS_SENT):
                continue
            if not self._model.has_inputs(_PREFIX + name):
                raise unsupported(name, NAME)
            built.add(_PREFIX + name, value, field=name)


class _Reader(StreamReader):
    def finish_reason(self, answer: Answer, *, final: bool) -> str:
        reason = answer.word("finish_reason")
        if reason == "stop" and answer.word("stop_reason"):
            return FinishReason.STOP_TOKEN
        if reason:
            return _FINISH_REASONS.get(reason, reason)
        return ENDED if final else FinishReason.NONE
