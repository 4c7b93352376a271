"""The profiles of foreign models: what is sent, what is refused, what responses become.

The real Triton with stand-ins for these models is in `test_profiles_on_triton.py`.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate import contract
from draftgate._pb.inference import grpc_service_pb2 as pb
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.sampling import SamplingParams, Verification
from draftgate.text import Message, Tokenizer
from draftgate.totals import Totals
from draftgate.upstream.profiles import ModelView, Profile, detect
from draftgate.upstream.profiles.reading import TextDeltas
from draftgate.upstream.types import ChatPrompt, Chunk, GenerationRequest, TextPrompt, TokenPrompt
from tests.support.byte_tokenizer import write_byte_tokenizer

ENGINE = ModelView(
    name="tensorrt_llm",
    inputs={
        "input_ids": "INT32",
        "input_lengths": "INT32",
        "request_output_len": "INT32",
        "runtime_top_k": "INT32",
        "runtime_top_p": "FP32",
        "temperature": "FP32",
        "random_seed": "UINT64",
        "stop_words_list": "INT32",
        "stop": "BOOL",
        "streaming": "BOOL",
    },
    outputs={"output_ids": "INT32", "sequence_length": "INT32"},
    max_batch_size=8,
    decoupled=True,
    parameters={"decoding_mode": "eagle"},
    steps=(),
)
ENSEMBLE = ModelView(
    name="ensemble",
    inputs={
        "text_input": "BYTES",
        "max_tokens": "INT32",
        "top_k": "INT32",
        "top_p": "FP32",
        "temperature": "FP32",
        "seed": "UINT64",
        "stream": "BOOL",
        "return_num_output_tokens": "BOOL",
    },
    outputs={"text_output": "BYTES", "num_output_tokens": "INT32", "total_draft_tokens": "INT32"},
    max_batch_size=8,
    decoupled=False,
    parameters={},
    steps=("preprocessing", "tensorrt_llm", "postprocessing"),
)
BLS = dataclasses.replace(
    ENSEMBLE,
    name="tensorrt_llm_bls",
    inputs={**ENSEMBLE.inputs, "num_draft_tokens": "INT32"},
    parameters={"accumulate_tokens": "true", "tensorrt_llm_draft_model_name": "small"},
    steps=(),
)
LLMAPI = ModelView(
    name="tensorrt_llm",
    inputs={
        "text_input": "BYTES",
        "streaming": "BOOL",
        "return_finish_reason": "BOOL",
        "sampling_param_max_tokens": "INT32",
        "sampling_param_temperature": "FP32",
        "sampling_param_top_k": "INT32",
        "sampling_param_top_p": "FP32",
        "sampling_param_seed": "UINT64",
        "sampling_param_exclude_input_from_output": "BOOL",
    },
    outputs={"text_output": "BYTES", "finish_reason": "BYTES", "acceptance_rate": "FP32"},
    max_batch_size=0,
    decoupled=True,
    parameters={},
    steps=(),
)
OURS = ModelView(
    name=contract.ENSEMBLE_MODEL,
    inputs={spec.name: spec.dtype.value for spec in contract.ENSEMBLE_INPUTS},
    outputs={spec.name: spec.dtype.value for spec in contract.ENSEMBLE_OUTPUTS},
    max_batch_size=0,
    decoupled=False,
    parameters={},
    steps=(),
)


async def profile_of(
    *models: ModelView, entry: str | None = None, tokenizer: Tokenizer | None = None
) -> Profile:
    there = {model.name: model for model in models}

    async def find(name: str) -> ModelView | None:
        return there.get(name)

    return await detect(find, entry, tokenizer)


def asked(prompt: Any = None, **sampling: Any) -> GenerationRequest:
    params = SamplingParams(**{"max_tokens": 9, **sampling})
    return GenerationRequest("abc", prompt or TextPrompt("Hi"), params)


def tensors(request: pb.ModelInferRequest) -> dict[str, tuple[str, list[int], bytes]]:
    return {
        tensor.name: (tensor.datatype, list(tensor.shape), content)
        for tensor, content in zip(request.inputs, request.raw_input_contents, strict=True)
    }


def response(*, final: bool = False, **outputs: Any) -> pb.ModelInferResponse:
    made = pb.ModelInferResponse()
    made.parameters["triton_final_response"].bool_param = final
    for name, value in outputs.items():
        datatype, content = _encoded(value)
        made.outputs.add(name=name, datatype=datatype, shape=[1])
        made.raw_output_contents.append(content)
    return made


def _encoded(value: Any) -> tuple[str, bytes]:
    if isinstance(value, str):
        content = value.encode()
        return "BYTES", struct.pack("<I", len(content)) + content
    if isinstance(value, float):
        return "FP32", struct.pack("<f", value)
    values = value if isinstance(value, list) else [value]
    return "INT32", struct.pack(f"<{len(values)}i", *values)


def read(profile: Profile, *responses: pb.ModelInferResponse, **sampling: Any) -> list[Chunk]:
    prompt = TokenPrompt((1,)) if profile.entry == ENGINE.name and "ids" in sampling else None
    sampling.pop("ids", None)
    reader = profile.reader(asked(prompt, **sampling))
    chunks = [reader.read(each) for each in responses]
    found = [chunk for chunk in chunks if chunk is not None]
    if not found or not found[-1].finish_reason:
        end = reader.end()
        assert end is not None
        found.append(end)
    assert [chunk.index for chunk in found] == list(range(len(found)))
    return found


def totals(chunks: list[Chunk]) -> Totals:
    found = chunks[-1].totals
    assert found is not None
    return found


# Detection.


@pytest.mark.parametrize(
    ("models", "entry", "name", "entered"),
    [
        ([OURS], None, "draftgate", "ensemble"),
        ([ENSEMBLE, ENGINE, BLS], None, "inflight_batcher_llm", "ensemble"),
        ([ENSEMBLE, ENGINE, BLS], "tensorrt_llm_bls", "inflight_batcher_llm", "tensorrt_llm_bls"),
        ([ENSEMBLE, ENGINE, BLS], "tensorrt_llm", "inflight_batcher_llm", "tensorrt_llm"),
        ([ENGINE], None, "inflight_batcher_llm", "tensorrt_llm"),
        ([LLMAPI], None, "llmapi", "tensorrt_llm"),
        ([dataclasses.replace(LLMAPI, name="mine")], "mine", "llmapi", "mine"),
    ],
)
async def test_the_profile_is_told_by_the_tensors(
    models: list[ModelView], entry: str | None, name: str, entered: str
) -> None:
    profile = await profile_of(*models, entry=entry)
    assert (profile.name, profile.entry) == (name, entered)


@pytest.mark.parametrize(
    ("models", "entry", "problem"),
    [
        ([], None, "no model ensemble or tensorrt_llm_bls or tensorrt_llm"),
        ([ENSEMBLE], "other", "no model other"),
        ([dataclasses.replace(ENSEMBLE, inputs={})], None, "ensemble is of no kind"),
    ],
)
async def test_models_of_no_known_kind_are_an_error(
    models: list[ModelView], entry: str | None, problem: str
) -> None:
    with pytest.raises(DraftgateError, match=problem) as caught:
        await profile_of(*models, entry=entry)
    assert caught.value.code is ErrorCode.FAILED_PRECONDITION


async def test_what_must_be_ready_and_what_is_known() -> None:
    profile = await profile_of(ENSEMBLE, ENGINE)
    assert set(profile.models) == {"ensemble", *ENSEMBLE.steps}
    description = profile.description
    assert description is not None
    assert (description.drafter, description.max_batch_rows) == ("eagle", 8)
    assert (description.vocab_size, description.max_sequence_tokens) == (None, None)
    assert (await profile_of(OURS)).description is None


def test_a_config_becomes_a_view() -> None:
    config = pb.ModelConfig(name="m", max_batch_size=4)
    config.input.add(name="a", data_type=pb.TYPE_STRING)
    for _ in range(2):  # the shipped ensemble lists one output twice
        config.output.add(name="b", data_type=pb.TYPE_FP32)
    config.parameters["filled"].string_value = "x"
    config.parameters["left"].string_value = "${left}"
    view = ModelView.of(config)
    assert (view.inputs, view.outputs, view.decoupled) == ({"a": "BYTES"}, {"b": "FP32"}, False)
    assert [view.parameter(name) for name in ("filled", "left", "none")] == ["x", "", ""]


# Requests.


async def test_the_ensemble_gets_a_batch_dimension_and_always_its_sampling() -> None:
    request = await (await profile_of(ENSEMBLE, ENGINE)).generation(asked(), "abc-1")
    assert (request.model_name, request.id) == ("ensemble", "abc-1")
    assert request.parameters["triton_enable_empty_final_response"].bool_param
    assert tensors(request) == {
        "text_input": ("BYTES", [1, 1], struct.pack("<I", 2) + b"Hi"),
        "max_tokens": ("INT32", [1, 1], struct.pack("<i", 9)),
        "temperature": ("FP32", [1, 1], struct.pack("<f", 1.0)),
        "top_p": ("FP32", [1, 1], struct.pack("<f", 1.0)),
        "top_k": ("INT32", [1, 1], struct.pack("<i", 0)),
        "stream": ("BOOL", [1, 1], b"\1"),
        "return_num_output_tokens": ("BOOL", [1, 1], b"\1"),
    }
    assert {output.name for output in request.outputs} == set(ENSEMBLE.outputs)


@pytest.mark.parametrize(
    ("models", "prompt", "top_k"),
    [
        ([ENSEMBLE, ENGINE], TextPrompt("Hi"), "top_k"),
        ([ENGINE], TokenPrompt((1, 2)), "runtime_top_k"),
        ([LLMAPI], TextPrompt("Hi"), "sampling_param_top_k"),
    ],
)
async def test_greedy_is_the_likeliest_token_alone(
    models: list[ModelView], prompt: Any, top_k: str
) -> None:
    profile = await profile_of(*models)
    sent = tensors(await profile.generation(asked(prompt, temperature=0.0), "1"))
    assert sent[top_k][2] == struct.pack("<i", 1)
    assert not any("temperature" in name or "top_p" in name for name in sent)


async def test_names_of_older_releases_are_used_where_they_are() -> None:
    request = asked(TokenPrompt((5, 6, 7)), seed=2**64 - 1, stop_token_ids=(3, 4))
    sent = tensors(await (await profile_of(ENGINE)).generation(request, "1"))
    assert sent["random_seed"] == ("UINT64", [1, 1], struct.pack("<Q", 2**64 - 1))
    assert sent["input_ids"] == ("INT32", [1, 3], struct.pack("<3i", 5, 6, 7))
    assert sent["input_lengths"] == ("INT32", [1, 1], struct.pack("<i", 3))
    # Two words of one id each: the ids, and where the words end.
    assert sent["stop_words_list"] == ("INT32", [1, 2, 2], struct.pack("<4i", 3, 4, 1, 2))


async def test_a_model_that_is_not_decoupled_is_not_asked_to_stream() -> None:
    profile = await profile_of(dataclasses.replace(LLMAPI, decoupled=False))
    sent = tensors(await profile.generation(asked(), "1"))
    assert sent["streaming"] == ("BOOL", [1], b"\0")


async def test_two_models_that_speculate_take_a_draft_length() -> None:
    profile = await profile_of(BLS, ENGINE)
    sent = tensors(await profile.generation(asked(max_draft_len=3), "1"))
    assert sent["num_draft_tokens"] == ("INT32", [1, 1], struct.pack("<i", 3))


@pytest.mark.parametrize("models", [[ENSEMBLE, ENGINE], [BLS, ENGINE], [LLMAPI]])
async def test_messages_are_made_text_for_models_that_take_text_alone(
    models: list[ModelView], tmp_path: Path
) -> None:
    tokenizer = Tokenizer.load(write_byte_tokenizer(tmp_path))
    profile = await profile_of(*models, tokenizer=tokenizer)
    request = asked(ChatPrompt((Message("user", "Grüße"),)))
    content = "Grüße".encode()
    sent = tensors(await profile.generation(request, "1"))["text_input"]
    assert sent[2] == struct.pack("<I", len(content)) + content
    assert profile.description is not None
    assert profile.description.has_chat_template
    assert not profile.description.lacks_tokenizer
    # A raw prompt is sent as it is, and the rest of the profile is what it was.
    plain = await profile_of(*models)
    assert await profile.generation(asked(), "1") == await plain.generation(asked(), "1")
    assert (profile.entry, profile.models) == (plain.entry, plain.models)
    assert profile.stop("1") == plain.stop("1")
    assert plain.description is not None
    assert plain.description.lacks_tokenizer


REFUSED: list[tuple[list[ModelView], GenerationRequest, str]] = [
    ([ENSEMBLE, ENGINE], asked(TokenPrompt((1,))), "input_ids"),
    ([ENSEMBLE, ENGINE], asked(ChatPrompt((Message("user", "Hi"),))), "messages"),
    ([ENSEMBLE, ENGINE], asked(stop_token_ids=(1,)), "stop_token_ids"),
    ([ENSEMBLE, ENGINE], asked(max_draft_len=0), "max_draft_len"),
    ([ENSEMBLE, ENGINE], asked(repetition_penalty=1.5), "repetition_penalty"),  # not in its config
    ([ENGINE], asked(), "text_input"),
    ([LLMAPI], asked(TokenPrompt((1,))), "input_ids"),
    ([LLMAPI], asked(repetition_penalty=1.5), "repetition_penalty"),
    ([LLMAPI], asked(presence_penalty=1.0), "presence_penalty"),  # not in its config
    ([LLMAPI], asked(max_draft_len=0), "max_draft_len"),
    *[
        (models, asked(**{name: value}), name)
        for models in ([ENSEMBLE, ENGINE], [LLMAPI])
        for name, value in (
            ("min_p", 0.5),
            ("logprobs", 0),
            ("ignore_eos", True),
            ("return_drafts", True),
            ("verification", Verification.COUPLED),
        )
    ],
]


@pytest.mark.parametrize(("models", "request_", "name"), REFUSED)
async def test_what_the_models_cannot_do_is_refused_by_name(
    models: list[ModelView], request_: GenerationRequest, name: str
) -> None:
    profile = await profile_of(*models)
    with pytest.raises(DraftgateError) as caught:
        await profile.generation(request_, "1")
    assert (caught.value.code, caught.value.field) == (ErrorCode.UNIMPLEMENTED, name)
    assert caught.value.message.startswith(f"{name}: ")


async def test_a_number_that_the_data_type_cannot_hold_is_refused() -> None:
    narrow = dataclasses.replace(ENSEMBLE, inputs={**ENSEMBLE.inputs, "seed": "INT64"})
    profile = await profile_of(narrow, ENGINE)
    with pytest.raises(DraftgateError) as caught:
        await profile.generation(asked(seed=2**63), "1")
    assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_ARGUMENT, "seed")


async def test_how_a_generation_is_stopped() -> None:
    stop = (await profile_of(ENSEMBLE, ENGINE)).stop("abc-1")
    assert stop is not None
    assert (stop.model_name, stop.id) == ("tensorrt_llm", "abc-1")
    assert tensors(stop)["stop"] == ("BOOL", [1, 1], b"\1")
    assert {"input_lengths", "request_output_len"} < tensors(stop).keys()
    assert (await profile_of(LLMAPI)).stop("abc-1") is None
    without = dataclasses.replace(ENGINE, inputs={**ENGINE.inputs})
    del without.inputs["stop"]  # type: ignore[attr-defined]
    assert (await profile_of(ENSEMBLE, without)).stop("abc-1") is None
    assert (await profile_of(BLS)).stop("abc-1") is None


# Responses.


@given(st.lists(st.text(alphabet="aé🙂 ", max_size=4), max_size=8), st.data())
def test_deltas_of_growing_text_are_the_text(words: list[str], data: st.DataObject) -> None:
    """Whatever bytes each response brings, as decoders make text of them that may end within a
    character."""
    whole = "".join(words).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    deltas = TextDeltas(cumulative=True)
    texts = [whole[:cut].decode(errors="replace") for cut in cuts]
    pieces = [deltas.delta(text, last=False) for text in texts]
    pieces.append(deltas.delta(whole.decode(), last=True))
    assert "".join(pieces) == whole.decode()
    assert not any("\ufffd" in piece for piece in pieces)


def test_text_that_stays_broken_is_handed_out_at_the_end() -> None:
    deltas = TextDeltas(cumulative=True)
    assert deltas.delta("a\ufffd", last=False) == "a"
    assert deltas.delta(None, last=True) == "\ufffd"


def test_text_that_changes_is_an_error() -> None:
    deltas = TextDeltas(cumulative=True)
    deltas.delta("abc", last=False)
    with pytest.raises(DraftgateError, match="changed text"):
        deltas.delta("abd", last=False)


async def test_acceptance_that_is_reported_is_exact_and_the_last_word_counts() -> None:
    profile = await profile_of(ENSEMBLE, ENGINE)
    chunks = read(
        profile,
        response(text_output="a", num_output_tokens=1),
        response(
            text_output="bc",
            num_output_tokens=2,
            total_draft_tokens=4,
            total_accepted_draft_tokens=1,
            final=True,
        ),
    )
    assert [chunk.text for chunk in chunks] == ["a", "bc"]
    assert totals(chunks) == Totals(output_tokens=3, drafted_tokens=4, accepted_tokens=1)


async def test_acceptance_is_derived_from_the_sizes_of_steps() -> None:
    profile = await profile_of(ENSEMBLE, ENGINE)
    chunks = read(
        profile,
        *[response(text_output="x", num_output_tokens=count) for count in (1, 3, 1, 2)],
        response(final=True),
    )
    assert totals(chunks) == Totals(
        output_tokens=7, accepted_tokens=3, verify_steps=3, derived=True
    )


@pytest.mark.parametrize(
    ("models", "outputs"),
    [
        # Zero of an engine that may not count is not a measurement.
        ([LLMAPI], {"total_draft_tokens": "0", "total_accepted_draft_tokens": "0"}),
        ([LLMAPI], {"total_draft_tokens": "None", "total_accepted_draft_tokens": "None"}),
        ([LLMAPI], {"total_draft_tokens": "2", "total_accepted_draft_tokens": "3"}),
        ([LLMAPI], {}),
        # No tokens are told: nothing to derive from.
        ([ENSEMBLE, ENGINE], {}),
        # Not known to speculate.
        ([ENSEMBLE, dataclasses.replace(ENGINE, parameters={})], {"num_output_tokens": 3}),
    ],
)
async def test_acceptance_may_be_unknown(
    models: list[ModelView], outputs: Mapping[str, Any]
) -> None:
    profile = await profile_of(*models)
    told = totals(
        read(profile, response(text_output="a", **outputs), response(text_output="a", **outputs))
    )
    assert (told.drafted_tokens, told.accepted_tokens, told.verify_steps) == (None, None, None)


async def test_numbers_may_come_as_text() -> None:
    outputs = {"total_draft_tokens": "4", "total_accepted_draft_tokens": "3.0"}
    told = totals(read(await profile_of(LLMAPI), response(text_output="a", **outputs)))
    assert (told.drafted_tokens, told.accepted_tokens, told.derived) == (4, 3, False)


@pytest.mark.parametrize(
    ("reason", "stop_reason", "finish"),
    [
        ("stop", "None", "eos"),
        ("stop", "128009", "stop_token"),
        ("length", "None", "length"),
        ("timeout", "None", "deadline"),
        ("cancelled", "None", "cancelled"),
        ("bored", "None", "bored"),
    ],
)
async def test_the_words_none_are_no_reason(reason: str, stop_reason: str, finish: str) -> None:
    nothing = {"finish_reason": "None", "stop_reason": "None"}
    chunks = read(
        await profile_of(LLMAPI),
        response(text_output="a", **nothing),
        response(text_output="ab", finish_reason=reason, stop_reason=stop_reason, final=True),
    )
    assert [chunk.finish_reason for chunk in chunks] == ["", finish]
    assert [chunk.text for chunk in chunks] == ["a", "b"]


@pytest.mark.parametrize(
    ("counts", "finish"),
    [([1, 8], "length"), ([1, 7], "eos"), ([None] * 9, "length"), ([None] * 2, "ended")],
)
@pytest.mark.parametrize("ending", ["flag", "flag alone", "end of the stream"])
async def test_a_finish_that_nobody_tells_is_derived(
    counts: list[int | None], finish: str, ending: str
) -> None:
    responses = [
        response(text_output="x", **({} if count is None else {"num_output_tokens": count}))
        for count in counts
    ]
    if ending == "flag":
        responses[-1].parameters["triton_final_response"].bool_param = True
    elif ending == "flag alone":
        responses.append(response(final=True))
    chunks = read(await profile_of(ENSEMBLE, ENGINE), *responses)
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [finish]


async def test_an_engine_that_tells_ids() -> None:
    chunks = read(
        await profile_of(ENGINE),
        response(output_ids=[7], sequence_length=1),
        response(output_ids=[8, 9, 0], sequence_length=2, final=True),
        ids=True,
    )
    assert [chunk.token_ids for chunk in chunks] == [(7,), (8, 9)]
    assert totals(chunks).accepted_tokens == 1


@pytest.mark.parametrize(
    "broken",
    [
        {"num_output_tokens": "many"},
        {"text_output": 1.0},
        {"num_input_tokens": []},
    ],
)
async def test_a_response_that_makes_no_sense_is_an_error(broken: dict[str, Any]) -> None:
    reader = (await profile_of(ENSEMBLE, ENGINE)).reader(asked())
    made = response(**{"text_output": "a", **broken})
    if broken.get("num_input_tokens") == []:
        made.raw_output_contents[1] = b"123"
    with pytest.raises(DraftgateError, match="unusable response") as caught:
        reader.read(made)
    assert caught.value.code is ErrorCode.INTERNAL


async def test_a_stream_without_any_response_is_an_error() -> None:
    for models in ([ENSEMBLE, ENGINE], [LLMAPI]):
        reader = (await profile_of(*models)).reader(asked())
        with pytest.raises(DraftgateError, match="without a response"):
            reader.end()
