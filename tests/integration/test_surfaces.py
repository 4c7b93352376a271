"""What each kind of client sees of the real stack."""

from __future__ import annotations

import asyncio
import math
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftgate._pb.draftgate.v1 import generation_pb2 as pb
from draftgate.errors import from_wire
from draftgate.text import Message, Tokenizer
from tests.integration.conftest import ROWS, Served
from tests.support.gateway import Client
from tests.support.infer import InferError, stream_infer

pytestmark = [pytest.mark.triton, pytest.mark.timeout(300)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "triton_client.py"

GREEDY = pb.SamplingParameters(temperature=0.0)
QUOTE = "Repeat exactly: the quick brown fox jumps over the lazy dog and the quick brown fox."


async def test_the_model_is_described(client: Client, tokenizer: Tokenizer) -> None:
    model = await client.get_model()
    assert model.architecture == "LlamaForCausalLM"
    assert (model.quantization, model.compute_dtype) == ("FP8", "float32")
    assert model.vocab_size == tokenizer.vocab_size
    assert list(model.eos_token_ids) == [2]
    assert model.has_chat_template
    assert (model.drafter, model.max_draft_len, model.max_batch_rows) == ("hybrid", 4, ROWS)


async def test_the_kinds_of_prompt_agree(client: Client, tokenizer: Tokenizer) -> None:
    messages = [pb.ChatMessage(role="user", content="Name three colours.")]
    shared = {"sampling": GREEDY, "max_tokens": 24}
    chat = await client.generate(messages=messages, **shared)
    ids = tokenizer.encode_chat([Message("user", "Name three colours.")])
    assert chat.events[0].started.prompt_tokens == len(ids)
    assert (await client.generate(input_ids=ids, **shared)).text == chat.text
    raw = "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n"
    of_raw = await client.generate(prompt=raw, **shared)
    of_ids = await client.generate(input_ids=tokenizer.encode_prompt(raw), **shared)
    assert of_raw.text == of_ids.text


@pytest.mark.parametrize("server", ["triton", "gateway"])
async def test_a_stock_triton_client_streams_from_the_ensemble(
    client: Client, served: Served, server: str
) -> None:
    target = served.triton if server == "triton" else served.address
    command = [sys.executable, str(EXAMPLE), "--target", target]
    command += ["--prompt", "1, 2, 3, 4,", "--max-tokens", "12"]
    ran = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=120)
    assert ran.returncode == 0, ran.stderr.decode()
    expected = await client.generate(prompt="1, 2, 3, 4,", sampling=GREEDY, max_tokens=12)
    assert expected.text.strip() in ran.stdout.decode()


async def test_speculation_is_shown_token_by_token(client: Client, tokenizer: Tokenizer) -> None:
    outcome = await client.generate(
        messages=[pb.ChatMessage(role="user", content=QUOTE)],
        sampling=GREEDY,
        max_tokens=64,
        return_drafts=True,
        return_token_text=True,
    )
    assert "".join(token.text for token in outcome.tokens) == outcome.text
    steps = [step for chunk in outcome.chunks for step in chunk.verify_steps]
    total = outcome.finished.speculation
    assert total.verify_steps == len(steps) > 0
    assert total.drafted_tokens == sum(step.drafted for step in steps)
    assert total.accepted_tokens == sum(step.accepted for step in steps) > 0
    assert total.acceptance_rate == pytest.approx(total.accepted_tokens / total.drafted_tokens)
    assert total.mean_acceptance_length == pytest.approx(1 + total.accepted_tokens / len(steps))
    drafted = [t for t in outcome.tokens if t.source == pb.TOKEN_SOURCE_DRAFT]
    assert len(drafted) == total.accepted_tokens
    for chunk in outcome.chunks:
        for step in chunk.verify_steps:
            accepted = [draft.id for draft in step.drafts[: step.accepted]]
            assert [token.id for token in chunk.tokens[: step.accepted]] == accepted
            assert step.draft_source in (pb.DRAFT_SOURCE_NGRAM, pb.DRAFT_SOURCE_EAGLE)
    # The head drafts until the answer begins to quote.
    assert len({step.draft_source for step in steps}) == 2


async def test_a_seed_gives_the_same_text_with_and_without_speculation(client: Client) -> None:
    request: dict[str, Any] = {
        "messages": [pb.ChatMessage(role="user", content=QUOTE)],
        "sampling": pb.SamplingParameters(temperature=0.9, top_p=0.95, seed=7),
        "max_tokens": 48,
    }
    first, again, plain = await asyncio.gather(
        client.generate(**request),
        client.generate(**request),
        client.generate(**request, max_draft_len=0),
    )
    assert first.text == again.text == plain.text


async def test_logprobs_are_the_targets(client: Client) -> None:
    outcome = await client.generate(
        prompt="The capital of France is",
        sampling=pb.SamplingParameters(temperature=0.0, logprobs=3),
        max_tokens=8,
    )
    for token in outcome.tokens:
        assert token.alternatives[0].id == token.id
        assert token.alternatives[0].logprob == pytest.approx(token.logprob)
        assert sum(math.exp(a.logprob) for a in token.alternatives) <= 1.0 + 1e-5


async def test_a_trace_shows_the_acceptance(client: Client, served: Served) -> None:
    request_id = f"traced-{secrets.token_hex(4)}"
    outcome = await client.generate(
        request_id=request_id,
        messages=[pb.ChatMessage(role="user", content=QUOTE)],
        sampling=GREEDY,
        max_tokens=32,
    )
    spans = await asyncio.to_thread(served.spans.of_request, request_id)
    total = outcome.finished.speculation
    inference = spans["client"]
    assert inference["draftgate.spec.num_spec_steps"] == total.verify_steps
    assert inference["draftgate.spec.num_draft_tokens"] == total.drafted_tokens
    assert inference["draftgate.spec.num_accepted_draft_tokens"] == total.accepted_tokens
    rate = inference["draftgate.spec.draft_acceptance_rate"]
    assert rate == pytest.approx(total.acceptance_rate)
    assert inference["gen_ai.usage.output_tokens"] == len(outcome.tokens)
    assert spans["server"]["rpc.response.status_code"] == "OK"


MALFORMED = [
    ({}, "text_input"),
    ({"text_input": b"a", "messages": b"[]"}, "text_input"),
    ({"messages": b"no json"}, "messages"),
    ({"messages": b'[{"role": "user"}]'}, "messages[0].content"),
    ({"text_input": b"\xff"}, "text_input"),
    ({"input_ids": [-5]}, "input_ids[0]"),
    ({"input_ids": [2**31 - 1]}, "input_ids[0]"),
    ({"input_ids": [1] * 9000}, "input_ids"),
    ({"text_input": b"a", "temperature": np.float32("nan")}, "temperature"),
    ({"text_input": b"a", "top_p": np.float32(0)}, "top_p"),
    ({"text_input": b"a", "verification": b"greedy"}, "verification"),
    ({"text_input": b"a", "max_tokens": np.int32(0)}, "max_tokens"),
    ({"text_input": b"a", "stop_token_ids": [70000]}, "stop_token_ids[0]"),
    ({"text_input": b"a", "deadline_ms": np.int32(-1)}, "deadline_ms"),
]


@pytest.mark.parametrize("server", ["triton", "gateway"])
@pytest.mark.parametrize(("inputs", "field"), MALFORMED)
async def test_a_stock_client_is_told_the_field_too(
    served: Served, inputs: dict[str, Any], field: str, server: str
) -> None:
    target = served.triton if server == "triton" else served.address
    tensors = {"max_tokens": np.array([4], np.int32)}
    for name, value in inputs.items():
        if isinstance(value, bytes):
            tensors[name] = np.array([value], dtype=object)
        elif isinstance(value, list):
            tensors[name] = np.array(value, np.int32)
        else:
            tensors[name] = np.array([value])

    def ask() -> list[Any]:
        return list(stream_infer(target, "ensemble", tensors))

    with pytest.raises(InferError) as caught:
        await asyncio.to_thread(ask)
    error = from_wire(str(caught.value))
    assert error is not None
    assert (error.code, error.field) == ("INVALID_ARGUMENT", field)
