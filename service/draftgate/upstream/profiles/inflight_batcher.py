"""The profile `inflight_batcher_llm`: TensorRT-LLM engines as its own Triton backend served them.

Three models of such a repository can be entered: `ensemble` and `tensorrt_llm_bls` take and give
text, `tensorrt_llm` takes and gives ids. Inputs carry a batch dimension, names changed between
releases, and nothing says why a generation ended.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate

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
from draftgate.upstream.types import EngineDescription, GenerationRequest, TextPrompt, TokenPrompt

__all__ = ["NAME", "InflightBatcherProfile", "is_engine", "is_text_entry"]

NAME = "inflight_batcher_llm"

_TEXT_OUTPUT = "text_output"
_IDS_OUTPUTS = ("output_ids", "sequence_length")
_DRAFT_LEN = "num_draft_tokens"

# The names of each sampling parameter in the releases that have it.
_SAMPLING_INPUTS: dict[str, tuple[str, ...]] = {
    "temperature": ("temperature",),
    "top_p": ("top_p", "runtime_top_p"),
    "top_k": ("top_k", "runtime_top_k"),
    "repetition_penalty": ("repetition_penalty",),
    "presence_penalty": ("presence_penalty",),
    "frequency_penalty": ("frequency_penalty",),
    "seed": ("seed", "random_seed"),
}
# Sent even where they ask for nothing: without any of them the engine takes the likeliest token.
_ALWAYS_SENT = ("temperature", "top_p", "top_k")

_SPECULATIVE_MODES = ("medusa", "redrafter", "lookahead", "eagle")


def is_text_entry(model: ModelView) -> bool:
    """Whether it is the ensemble or the BLS model of such a repository."""
    return model.has_inputs("text_input", "max_tokens") and model.has_outputs(_TEXT_OUTPUT)


def is_engine(model: ModelView) -> bool:
    """Whether it is such a repository's engine."""
    return model.has_inputs("input_lengths", "request_output_len") and model.has_outputs(
        *_IDS_OUTPUTS
    )


class InflightBatcherProfile:
    """Generations enter at `entry`, which may be the engine itself."""

    def __init__(self, entry: ModelView, engine: ModelView | None) -> None:
        """`engine`: the model behind `entry`; None if it is not known, so that a generation is
        ended by cancelling its RPC."""
        self._entry = entry
        self._engine = engine
        self._takes_text = is_text_entry(entry)
        streamed = engine or entry
        self._streams = streamed.decoupled
        mode = streamed.parameter("decoding_mode")
        drafting_model = entry.parameter("tensorrt_llm_draft_model_name")
        self._drafter = drafting_model or (mode if mode in _SPECULATIVE_MODES else "")
        # Two engines in turn: their steps are not those of the responses.
        self._one_step_each = self._streams and bool(self._drafter) and not drafting_model
        self._cumulative = entry.parameter("accumulate_tokens").lower() in ("true", "1")

    @property
    def name(self) -> str:
        return NAME

    @property
    def entry(self) -> str:
        return self._entry.name

    @property
    def models(self) -> Sequence[str]:
        behind = (self._engine.name,) if self._engine else ()
        return tuple(dict.fromkeys((self._entry.name, *self._entry.steps, *behind)))

    @property
    def stoppable(self) -> Collection[str]:
        if self._engine is None or not self._can_stop(self._engine):
            return ()
        return {self._entry.name, self._engine.name}

    @property
    def description(self) -> EngineDescription:
        rows = (self._engine or self._entry).max_batch_size
        return EngineDescription(
            name=self._entry.name,
            architecture="",
            quantization="",
            compute_dtype="",
            vocab_size=None,
            max_sequence_tokens=None,
            eos_token_ids=(),
            has_chat_template=False,
            lacks_tokenizer=True,
            drafter=self._drafter,
            max_draft_len=None,
            max_batch_rows=rows or None,
        )

    async def generation(self, request: GenerationRequest, wire_id: str) -> pb.ModelInferRequest:
        sampling = request.sampling
        supported = {"max_tokens", *_SAMPLING_INPUTS}
        if self._entry.has_inputs(_DRAFT_LEN) and self._drafter:
            supported.add("max_draft_len")
        if not self._takes_text:
            supported.add("stop_token_ids")
        refuse_unless_default(sampling, supported, NAME)
        if request.resume_len:
            raise unsupported("resume_len", NAME)
        built = RequestBuilder(self._entry, wire_id)
        self._add_prompt(built, request)
        self._add_sampling(built, sampling)
        built.add_known("stream" if self._takes_text else "streaming", self._streams)
        for flag in (
            "exclude_input_in_output",
            "return_perf_metrics",
            "return_num_input_tokens",
            "return_num_output_tokens",
        ):
            built.add_known(flag, True)
        built.want((_TEXT_OUTPUT, *_IDS_OUTPUTS, *PERFORMANCE_OUTPUTS))
        return built.request

    def stop(self, wire_id: str) -> pb.ModelInferRequest | None:
        if self._engine is None or not self._can_stop(self._engine):
            return None
        built = RequestBuilder(self._engine, wire_id)
        # The engine looks at the id alone, but its configuration wants a whole request.
        built.add_known("input_ids", 0)
        built.add("input_lengths", 1)
        built.add("request_output_len", 1)
        built.add("stop", True)
        return built.request

    def reader(self, request: GenerationRequest) -> Reader:
        return _Reader(
            request.sampling.max_tokens,
            TextDeltas(cumulative=self._cumulative),
            Counts(one_step_each=self._one_step_each),
        )

    @staticmethod
    def _can_stop(engine: ModelView) -> bool:
        return engine.has_inputs("stop")

    def _add_prompt(self, built: RequestBuilder, request: GenerationRequest) -> None:
        prompt, max_tokens = request.prompt, request.sampling.max_tokens
        if self._takes_text and isinstance(prompt, TextPrompt):
            built.add("text_input", prompt.text)
            built.add("max_tokens", max_tokens)
        elif not self._takes_text and isinstance(prompt, TokenPrompt):
            built.add("input_ids", *prompt.ids)
            built.add("input_lengths", len(prompt.ids))
            built.add("request_output_len", max_tokens)
        else:
            raise unsupported(prompt.tensor, NAME)

    def _add_sampling(self, built: RequestBuilder, sampling: SamplingParams) -> None:
        if sampling.greedy:
            self._add_parameter(built, "top_k", 1)
        for name in _SAMPLING_INPUTS:
            value = getattr(sampling, name)
            if name in _ALWAYS_SENT:
                if not sampling.greedy:
                    self._add_parameter(built, name, value)
            elif value != SamplingParams.__dataclass_fields__[name].default:
                self._add_parameter(built, name, value)
        if sampling.max_draft_len is not None:
            built.add(_DRAFT_LEN, sampling.max_draft_len, field="max_draft_len")
        if sampling.stop_token_ids:
            # Each word is one id: all ids, and where each word ends.
            ids = sampling.stop_token_ids
            ends = tuple(accumulate(1 for _ in ids))
            if not self._entry.has_inputs("stop_words_list"):
                raise unsupported("stop_token_ids", NAME)
            built.add("stop_words_list", *ids, *ends, shape=(2, len(ids)))

    def _add_parameter(self, built: RequestBuilder, name: str, value: float) -> None:
        for tensor in _SAMPLING_INPUTS[name]:
            if self._entry.has_inputs(tensor):
                built.add(tensor, value, field=name)
                return
        raise unsupported(name, NAME)


class _Reader(StreamReader):
    def __init__(self, max_tokens: int, texts: TextDeltas, counts: Counts) -> None:
        super().__init__(texts, counts)
        self._max_tokens = max_tokens

    def token_ids(self, answer: Answer) -> tuple[int, ...]:
        ids = answer.integers("output_ids")
        lengths = answer.integers("sequence_length")
        return ids[: lengths[0]] if lengths else ids

    def finish_reason(self, answer: Answer, *, final: bool) -> str:
        """Derived: no words to stop at are ever sent, so what ended early met the end token."""
        if not final:
            return FinishReason.NONE
        tokens = self._counts.output_tokens
        if tokens is None:
            return FinishReason.LENGTH if self._counts.responses >= self._max_tokens else ENDED
        return FinishReason.LENGTH if tokens >= self._max_tokens else FinishReason.EOS
