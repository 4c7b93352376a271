"""Generations through the client: what is asked reaches Triton, what comes back is typed."""

from __future__ import annotations

from typing import Any

import pytest

from draftgate.client import (
    DraftgateError,
    DraftSource,
    DraftToken,
    ErrorCode,
    Finished,
    FinishReason,
    GateReason,
    GenerationOptions,
    Message,
    Priority,
    Speculation,
    Started,
    Token,
    TokenAlternative,
    Tokens,
    Usage,
    Verification,
    VerifyStep,
)
from tests.fakes.triton import FakeTriton, Script, Step, words
from tests.support.clients import Opened
from tests.support.gateway import MODEL

SPECULATED = Script(
    [
        Step({"output_ids": [10], "text_output": "a", "gate_reason": int(GateReason.PREFILL)}),
        Step(
            {
                "output_ids": [11, 12],
                "text_output": "bc",
                "draft_lens": [2],
                "accepted_lens": [1],
                "draft_source": [int(DraftSource.NGRAM)],
                "draft_ids": [11, 99],
                "gate_reason": int(GateReason.GAIN),
                "batch_rows": 3,
                "token_logprobs": [-0.5, -1.5],
                "top_ids": [11, 12],
                "top_logprobs": [-0.5, -1.5],
            }
        ),
    ],
    finish_reason="eos",
)


async def test_the_events_of_a_generation(client: Opened, triton: FakeTriton) -> None:
    triton.scripts = [SPECULATED]
    generation = client.generate("Hi", request_id="abc", return_drafts=True)
    assert [event async for event in generation] == [
        Started(
            "abc", MODEL, prompt_tokens=3, cached_tokens=1, queue_us=40, prefill_us=900,
            prompt_text=None,
        ),
        Tokens(
            "a", (Token(10, drafted=False, text=None, logprob=None, alternatives=()),), (),
            GateReason.PREFILL, batch_rows=1,
        ),
        Tokens(
            "bc",
            (
                Token(11, True, None, -0.5, (TokenAlternative(11, -0.5),)),
                Token(12, False, None, -1.5, (TokenAlternative(12, -1.5),)),
            ),
            (
                VerifyStep(
                    2, 1, DraftSource.NGRAM, (DraftToken(11, None), DraftToken(99, None))
                ),
            ),
            GateReason.GAIN,
            batch_rows=3,
        ),
        Finished(
            FinishReason.EOS, None, Usage(3, 3, 1),
            Speculation(
                verify_steps=1, drafted_tokens=2, accepted_tokens=1, acceptance_rate=0.5,
                mean_acceptance_length=2.0, derived=False,
            ),
            resumes=0,
        ),
    ]  # fmt: skip
    assert [event async for event in generation] == []


async def test_text_and_completion_are_all_of_it(client: Opened, triton: FakeTriton) -> None:
    triton.scripts = [SPECULATED, SPECULATED, SPECULATED]
    assert await client.generate("Hi").text() == "abc"
    streamed = await client.generate("Hi", request_id="x").completion()
    assert streamed.text == "abc"
    assert [token.id for token in streamed.choices[0].tokens] == [10, 11, 12]
    assert streamed.usage == Usage(3, 3, 1)
    assert streamed.choices[0].finished.speculation.acceptance_rate == 0.5
    once = await client.generate_once("Hi", request_id="x", return_tokens=True)
    assert once == streamed


async def test_what_came_is_there_while_it_comes(client: Opened, triton: FakeTriton) -> None:
    triton.scripts = [words("a", "b", "c")]
    generation = client.generate("Hi")
    assert (generation.choices, generation.text_so_far, generation.finished) == ((), "", None)
    async for event in generation:
        if isinstance(event, Tokens) and event.text == "b":
            break
    assert generation.text_so_far == "ab"
    assert generation.choices[0].finished is None
    assert await generation.text() == "abc"
    assert generation.finished.finish_reason is FinishReason.LENGTH


async def test_choices_are_told_apart(client: Opened, triton: FakeTriton) -> None:
    triton.default = words("a", "b")
    completion = await client.generate("Hi", n=3).completion()
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert [choice.text for choice in completion.choices] == ["ab", "ab", "ab"]
    assert completion.usage == Usage(9, 6, 3)
    assert (await client.generate_once("Hi", n=3)).usage == Usage(9, 6, 3)


@pytest.mark.parametrize(
    ("prompt", "tensors"),
    [
        ("Hi", {"text_input": "Hi"}),
        (
            [Message("system", "Be brief."), Message("user", "Grüße")],
            {
                "messages": '[{"role": "system", "content": "Be brief."},'
                ' {"role": "user", "content": "Grüße"}]'
            },
        ),
        ([1, 2, 3], {"input_ids": [1, 2, 3]}),
        ((4,), {"input_ids": [4]}),
    ],
)
async def test_a_prompt_is_text_or_messages_or_ids(
    client: Opened, triton: FakeTriton, prompt: Any, tensors: dict[str, Any]
) -> None:
    await client.generate(prompt).text()
    await client.generate_once(prompt)
    for received in triton.generations:
        assert received.tensors == {**tensors, "max_tokens": [256]}


async def test_options_reach_triton_and_zeros_too(client: Opened, triton: FakeTriton) -> None:
    options = GenerationOptions(
        max_tokens=7,
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        seed=2**64 - 1,
        stop_token_ids=[3, 4],
        ignore_eos=True,
        logprobs=0,
        verification=Verification.COUPLED,
        max_draft_len=0,
        return_drafts=True,
        resume_len=1,
        model=MODEL,
        priority=Priority.BATCH,
    )
    await client.generate([5, 6, 7], **options).text()
    assert triton.generations[0].tensors == {
        "input_ids": [5, 6, 7],
        "max_tokens": [7],
        "temperature": [0.0],
        "top_p": [0.5],
        "top_k": [3],
        "min_p": [0.25],
        "repetition_penalty": [1.5],
        "presence_penalty": [0.5],
        "frequency_penalty": [-0.5],
        "seed": [2**64 - 1],
        "stop_token_ids": [3, 4],
        "ignore_eos": [True],
        "logprobs": [0],
        "verification": "coupled",
        "max_draft_len": [0],
        "return_drafts": [True],
        "resume_len": [1],
    }


async def test_what_ended_it_is_named(client: Opened, triton: FakeTriton) -> None:
    triton.scripts = [words("one ", "two ", "three")]
    generation = client.generate("Hi", stop=["zwei", "two"])
    assert await generation.text() == "one "
    assert generation.finished.finish_reason is FinishReason.STOP_STRING
    assert generation.finished.matched == "two"

    triton.scripts = [Script(words("a", "b").steps, finish_reason="stop_token")]
    generation = client.generate("Hi", stop_token_ids=[11])
    await generation.text()
    assert generation.finished.finish_reason is FinishReason.STOP_TOKEN
    assert generation.finished.matched == 11


async def test_what_this_version_does_not_know_does_no_harm(
    client: Opened, triton: FakeTriton
) -> None:
    triton.scripts = [words("a", gate_reason=99)]
    (tokens,) = [event async for event in client.generate("Hi") if isinstance(event, Tokens)]
    assert tokens.gate_reason is GateReason.UNKNOWN


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("", {"max_tokens": 2**40}, "max_tokens"),
        ("", {"seed": -1}, "sampling.seed"),
        ("", {"stop_token_ids": [1, 2**40]}, "sampling.stop_token_ids"),
        ("\ud800", {}, "prompt"),
        ([Message("user", "\ud800")], {}, "messages[0].content"),
        ([], {}, "prompt"),
        ([1, 2**40], {}, "input_ids"),
    ],
)
async def test_what_a_field_cannot_hold_is_named(
    client: Opened, triton: FakeTriton, prompt: Any, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(DraftgateError) as streamed:
        client.generate(prompt, **options)
    with pytest.raises(DraftgateError) as whole:
        await client.generate_once(prompt, **options)
    for caught in (streamed, whole):
        assert caught.value.code is ErrorCode.INVALID_ARGUMENT
        assert caught.value.field == field
    assert triton.generations == []


async def test_what_is_no_option_or_no_prompt_is_a_type_error(client: Opened) -> None:
    with pytest.raises(TypeError, match="no such option of a generation: tempature"):
        client.generate("Hi", tempature=1.0)
    with pytest.raises(TypeError):
        client.generate("Hi", max_tokens="7")
    with pytest.raises(TypeError, match=r"messages\[1\] is a str, not a Message"):
        client.generate([Message("user", "Hi"), "Hi"])
