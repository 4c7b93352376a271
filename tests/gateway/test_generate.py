"""A generation over the wire: events, tokens, usage, acceptance, errors."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf import empty_pb2

from draftgate._pb.draftgate.v1 import generation_pb2 as pb
from draftgate.contract import DraftSource
from draftgate.errors import DraftgateError, ErrorCode, invalid_argument, to_wire
from tests.fakes.triton import FakeTriton, Script, Step, words
from tests.support.gateway import MODEL, Client


async def test_events_come_in_order(client: Client) -> None:
    outcome = await client.generate(prompt="Hi", request_id="abc")
    assert outcome.error is None
    assert outcome.kinds == ["started", "tokens", "tokens", "finished"]
    started = outcome.events[0].started
    assert (started.request_id, started.model) == ("abc", MODEL)
    assert (started.prompt_tokens, started.cached_tokens) == (3, 1)
    assert (started.queue_us, started.prefill_us) == (40, 900)
    assert outcome.text == "Hello world"
    assert outcome.finished.finish_reason == pb.FINISH_REASON_LENGTH
    assert outcome.finished.usage == pb.Usage(prompt_tokens=3, output_tokens=2, cached_tokens=1)
    assert outcome.finished.speculation == pb.Speculation(
        verify_steps=0, drafted_tokens=0, accepted_tokens=0
    )


async def test_the_server_chooses_an_id(client: Client, triton: FakeTriton) -> None:
    outcome = await client.generate(prompt="Hi")
    request_id = outcome.events[0].started.request_id
    assert len(request_id) == 32
    assert triton.generations[0].id.startswith(f"{request_id}-")


async def test_every_parameter_reaches_triton(client: Client, triton: FakeTriton) -> None:
    sampling = pb.SamplingParameters(
        temperature=0.5,
        top_p=0.25,
        top_k=40,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        seed=2**64 - 1,
        stop_token_ids=[3, 4],
        ignore_eos=True,
        logprobs=5,
        verification=pb.VERIFICATION_COUPLED,
    )
    named = {field.name for field, _ in sampling.ListFields()}
    assert named == set(pb.SamplingParameters.DESCRIPTOR.fields_by_name)
    await client.generate(
        input_ids=[5, 6, 7, 8],
        resume_len=2,
        max_tokens=17,
        max_draft_len=3,
        return_drafts=True,
        sampling=sampling,
    )
    assert triton.generations[0].tensors == {
        "input_ids": [5, 6, 7, 8],
        "resume_len": [2],
        "max_tokens": [17],
        "max_draft_len": [3],
        "return_drafts": [True],
        "temperature": [0.5],
        "top_p": [0.25],
        "top_k": [40],
        "min_p": [0.125],
        "repetition_penalty": [1.5],
        "presence_penalty": [-0.5],
        "frequency_penalty": [0.75],
        "seed": [2**64 - 1],
        "stop_token_ids": [3, 4],
        "ignore_eos": [True],
        "logprobs": [5],
        "verification": "coupled",
    }


async def test_defaults_are_left_out_but_zeros_are_not(client: Client, triton: FakeTriton) -> None:
    await client.generate(prompt="Hi")
    assert triton.generations[0].tensors == {"text_input": "Hi", "max_tokens": [256]}
    await client.generate(
        prompt="Hi",
        max_draft_len=0,
        sampling=pb.SamplingParameters(temperature=0.0, seed=0, logprobs=0),
    )
    assert triton.generations[1].tensors == {
        "text_input": "Hi",
        "max_tokens": [256],
        "max_draft_len": [0],
        "temperature": [0.0],
        "seed": [0],
        "logprobs": [0],
    }


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        (pb.VERIFICATION_UNSPECIFIED, None),
        (pb.VERIFICATION_REJECTION, "rejection"),
        (pb.VERIFICATION_COUPLED, "coupled"),
    ],
)
async def test_the_verification_is_the_engines_to_choose_or_the_callers(
    client: Client, triton: FakeTriton, asked: pb.Verification.ValueType, sent: str | None
) -> None:
    outcome = await client.generate(prompt="Hi", sampling=pb.SamplingParameters(verification=asked))
    assert outcome.error is None
    assert triton.generations[0].tensors.get("verification") == sent


async def test_messages_travel_as_json(client: Client, triton: FakeTriton) -> None:
    await client.generate(
        messages=[
            pb.ChatMessage(role="system", content="Be brief."),
            pb.ChatMessage(role="user", content='"Grüße" 🙂'),
        ]
    )
    assert triton.generations[0].tensors["messages"] == (
        '[{"role": "system", "content": "Be brief."},'
        ' {"role": "user", "content": "\\"Grüße\\" 🙂"}]'
    )


async def test_tokens_say_where_they_came_from(client: Client, triton: FakeTriton) -> None:
    triton.scripts = [
        Script(
            [
                Step({"output_ids": [10], "text_output": "a"}),  # prefill: no verify step
                Step(
                    {
                        "output_ids": [11, 12, 13],
                        "text_output": "bcd",
                        "draft_lens": [4],
                        "accepted_lens": [2],
                        "draft_source": [2],
                        "draft_ids": [11, 12, 98, 99],
                    }
                ),
                Step(
                    {
                        "output_ids": [14],
                        "text_output": "e",
                        "draft_lens": [0],
                        "accepted_lens": [0],
                        "draft_source": [0],
                    }
                ),
                # The end cut this step's own token.
                Step(
                    {
                        "output_ids": [15, 2],
                        "text_output": "f",
                        "draft_lens": [3],
                        "accepted_lens": [2],
                        "draft_source": [2],
                    }
                ),
            ],
            finish_reason="eos",
        )
    ]
    outcome = await client.generate(prompt="Hi", return_drafts=True)
    sources = {pb.TOKEN_SOURCE_TARGET: "T", pb.TOKEN_SOURCE_DRAFT: "D"}
    found = ["".join(sources[token.source] for token in chunk.tokens) for chunk in outcome.chunks]
    assert found == ["T", "DDT", "T", "DD"]
    steps = [list(chunk.verify_steps) for chunk in outcome.chunks]
    assert [len(each) for each in steps] == [0, 1, 0, 1]
    assert (steps[1][0].drafted, steps[1][0].accepted) == (4, 2)
    assert steps[1][0].draft_source == pb.DRAFT_SOURCE_NGRAM
    assert [draft.id for draft in steps[1][0].drafts] == [11, 12, 98, 99]
    assert not steps[1][0].drafts[0].HasField("text")
    finished = outcome.finished
    assert finished.finish_reason == pb.FINISH_REASON_EOS
    assert finished.usage.output_tokens == 7
    speculation = finished.speculation
    assert (speculation.verify_steps, speculation.drafted_tokens) == (2, 7)
    assert speculation.accepted_tokens == 4
    assert speculation.acceptance_rate == pytest.approx(4 / 7)
    assert speculation.mean_acceptance_length == pytest.approx(3.0)


@pytest.mark.parametrize("source", list(DraftSource)[1:])
async def test_every_drafter_has_a_name_in_the_api(
    client: Client, triton: FakeTriton, source: DraftSource
) -> None:
    drafts = {"draft_lens": [2], "accepted_lens": [0], "draft_source": [int(source)]}
    triton.scripts = [words("a", **drafts)]
    [chunk] = (await client.generate(prompt="Hi")).chunks
    name = pb.DraftSource.Name(chunk.verify_steps[0].draft_source)
    assert name == f"DRAFT_SOURCE_{source.name}"


async def test_nothing_drafted_is_absent_and_nothing_accepted_is_zero(
    client: Client, triton: FakeTriton
) -> None:
    drafts = {"draft_lens": [2], "accepted_lens": [0], "draft_source": [2]}
    triton.scripts = [words("a"), words("a", **drafts)]
    absent = (await client.generate(prompt="Hi")).finished.speculation
    assert not absent.HasField("acceptance_rate")
    assert not absent.HasField("mean_acceptance_length")
    zero = (await client.generate(prompt="Hi")).finished.speculation
    assert zero.HasField("acceptance_rate")
    assert zero.acceptance_rate == 0.0
    assert zero.mean_acceptance_length == 1.0


async def test_logprobs_and_alternatives_belong_to_their_token(
    client: Client, triton: FakeTriton
) -> None:
    triton.scripts = [
        Script(
            [
                Step(
                    {
                        "output_ids": [10, 11],
                        "text_output": "ab",
                        "token_logprobs": [-0.5, -1.5],
                        "top_ids": [10, 20, 21, 11],
                        "top_logprobs": [-0.5, -2.0, -0.25, -1.5],
                    }
                )
            ]
        )
    ]
    outcome = await client.generate(prompt="Hi", sampling=pb.SamplingParameters(logprobs=2))
    first, second = outcome.tokens
    assert (first.logprob, second.logprob) == (-0.5, -1.5)
    assert [(each.id, each.logprob) for each in first.alternatives] == [(10, -0.5), (20, -2.0)]
    assert [(each.id, each.logprob) for each in second.alternatives] == [(21, -0.25), (11, -1.5)]


async def test_gate_reason_and_rows_pass_through(client: Client, triton: FakeTriton) -> None:
    triton.scripts = [words("a", gate_reason=99, batch_rows=5)]
    (chunk,) = (await client.generate(prompt="Hi")).chunks
    assert (chunk.gate_reason, chunk.batch_rows) == (99, 5)


async def test_chunks_that_overtook_each_other_are_put_in_order(
    client: Client, triton: FakeTriton
) -> None:
    script = words("a", "b", "c", "d")
    triton.scripts = [Script(script.steps, order=[1, 3, 0, 2])]
    outcome = await client.generate(prompt="Hi")
    assert outcome.text == "abcd"
    assert outcome.kinds == ["started", "tokens", "tokens", "tokens", "tokens", "finished"]


async def test_32_streams_at_once_keep_their_text(client: Client, triton: FakeTriton) -> None:
    triton.script_for = lambda received: Script(
        [
            Step(
                {
                    "output_ids": [index],
                    "text_output": f"{received.tensors['text_input']}.{index} ",
                },
                delay_s=0.002,
            )
            for index in range(20)
        ]
    )
    outcomes = await asyncio.gather(*(client.generate(prompt=f"p{n}") for n in range(32)))
    for number, outcome in enumerate(outcomes):
        assert outcome.code is grpc.StatusCode.OK
        assert outcome.text == "".join(f"p{number}.{index} " for index in range(20))
    assert len({received.id for received in triton.generations}) == 32
    assert triton.stops == []


@pytest.mark.parametrize(
    ("finish_reason", "code"),
    [
        ("deadline", grpc.StatusCode.DEADLINE_EXCEEDED),
        ("cancelled", grpc.StatusCode.CANCELLED),
    ],
)
async def test_an_end_that_is_a_failure_is_the_status_too(
    client: Client, triton: FakeTriton, finish_reason: str, code: grpc.StatusCode
) -> None:
    triton.scripts = [Script(words("a", "b").steps, finish_reason=finish_reason)]
    outcome = await client.generate(prompt="Hi")
    assert outcome.code is code
    assert outcome.kinds == ["started", "tokens", "tokens", "finished"]
    assert outcome.finished.usage.output_tokens == 2


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (to_wire(DraftgateError(ErrorCode.RESOURCE_EXHAUSTED, "full")), "RESOURCE_EXHAUSTED"),
        (
            "in ensemble 'ensemble', "
            + to_wire(DraftgateError(ErrorCode.FAILED_PRECONDITION, "no template")),
            "FAILED_PRECONDITION",
        ),
        ("in ensemble 'ensemble', Exceeds maximum queue size", "RESOURCE_EXHAUSTED"),
        ("Request timeout expired", "RESOURCE_EXHAUSTED"),
        ("[StatusCode.UNAVAILABLE] GRPC server is shutting down", "UNAVAILABLE"),
        ("Server exiting", "UNAVAILABLE"),
        ("Model 'engine' is not at ready state", "UNAVAILABLE"),
        ("model has no available versions", "UNAVAILABLE"),
        ("Request for unknown model: 'ensemble' is not found", "NOT_FOUND"),
        ("unexpected inference input 'x' for model 'ensemble'", "INTERNAL"),
        ("Traceback: KeyError in /srv/secret.py", "INTERNAL"),
    ],
)
@pytest.mark.parametrize("in_band", [True, False])
async def test_a_failure_keeps_what_was_done(
    client: Client, triton: FakeTriton, text: str, code: str, in_band: bool
) -> None:
    steps = words("a", "b").steps
    triton.scripts = [
        Script(steps, in_band_error=text)
        if in_band
        else Script(steps, status=grpc.StatusCode.INTERNAL, details=text)
    ]
    outcome = await client.generate(prompt="Hi")
    assert outcome.code is grpc.StatusCode[code]
    assert outcome.reason == code
    assert "secret" not in outcome.message
    assert outcome.kinds == ["started", "tokens", "tokens", "finished"]
    assert outcome.finished.usage.output_tokens == 2
    await triton.wait_for(lambda: triton.stops == [triton.generations[0].id])
    assert (await client.generate(prompt="Hi")).code is grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("fields", "tensor", "field"),
    [
        ({"prompt": "Hi"}, "text_input", "prompt"),
        ({"prompt": "Hi"}, "input_ids", "prompt"),
        ({"prompt": "Hi"}, "input_ids[3]", "prompt"),
        ({"messages": [pb.ChatMessage(role="user", content="Hi")]}, "input_ids", "messages"),
        ({"messages": [pb.ChatMessage(role="user", content="Hi")]}, "messages[0]", "messages[0]"),
        ({"input_ids": [1]}, "input_ids[0]", "input_ids[0]"),
        ({"prompt": "Hi"}, "top_p", "sampling.top_p"),
        ({"prompt": "Hi"}, "stop_token_ids[2]", "sampling.stop_token_ids[2]"),
        ({"prompt": "Hi"}, "max_tokens", "max_tokens"),
    ],
)
async def test_a_refusal_of_the_models_names_the_callers_field(
    client: Client, triton: FakeTriton, fields: dict[str, Any], tensor: str, field: str
) -> None:
    refusal = invalid_argument(tensor, 9, "less")
    triton.scripts = [Script(in_band_error="in ensemble 'ensemble', " + to_wire(refusal))]
    outcome = await client.generate(**fields)
    assert outcome.code is grpc.StatusCode.INVALID_ARGUMENT
    assert outcome.bad_fields == [field]
    assert outcome.message == f"{field}: got 9, allowed: less"


async def test_a_failure_before_the_first_token_has_no_events(
    client: Client, triton: FakeTriton
) -> None:
    # Not once: it would be tried again.
    triton.default = Script(in_band_error=to_wire(DraftgateError(ErrorCode.UNAVAILABLE, "no")))
    outcome = await client.generate(prompt="Hi")
    assert (outcome.code, outcome.message) == (grpc.StatusCode.UNAVAILABLE, "no")
    assert outcome.events == []


async def test_a_stream_without_an_end_is_an_error(client: Client, triton: FakeTriton) -> None:
    triton.scripts = [Script(words("a").steps, no_finish=True)]
    outcome = await client.generate(prompt="Hi")
    assert outcome.code is grpc.StatusCode.INTERNAL
    assert outcome.kinds[-1] == "finished"
    assert outcome.finished.finish_reason == pb.FINISH_REASON_UNSPECIFIED
    assert outcome.finished.usage.output_tokens == 1


async def test_an_unknown_method_is_unimplemented(client: Client) -> None:
    call = client.channel.unary_unary(
        "/draftgate.v1.GenerationService/Nothing",
        request_serializer=empty_pb2.Empty.SerializeToString,
        response_deserializer=empty_pb2.Empty.FromString,
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(empty_pb2.Empty())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_response_that_cannot_be_read_ends_the_call(
    triton: FakeTriton, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(response: object) -> None:
        raise KeyError("a mistake of ours")

    with monkeypatch.context() as patched:
        patched.setattr("draftgate.upstream.responses.parse_chunk", broken)
        outcome = await client.generate(prompt="Hi")
    assert outcome.code is grpc.StatusCode.INTERNAL
    assert "mistake" not in outcome.message
    assert (await client.generate(prompt="Hi")).text == "Hello world"
