"""Many clients at once on the real stack."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from typing import Any

import grpc
import numpy as np
import pytest

from draftgate._pb.draftgate.v1 import generation_pb2 as pb
from draftgate.text import Tokenizer
from tests.integration.conftest import ROWS, Served
from tests.support.gateway import Client
from tests.support.infer import stream_infer

pytestmark = [pytest.mark.triton, pytest.mark.timeout(600)]

TOKENS = 24

PROMPTS = [
    *("Why is the sky blue?", "What is the capital of France?", "Write a haiku about rain."),
    *(
        "Repeat after me: one, two, three, one, two, three.",
        "List five fruits.",
        "Was ist ein Baum?",
    ),
    *(
        "Write a Python function that adds two numbers.",
        "Tell me about the moon.",
        "你好, 介绍一下自己",
    ),
    *("Explain gravity to a child.", "What is 17 plus 25?", "Write a short story about a fox."),
]


def asked(index: int) -> dict[str, Any]:
    """The request of stream `index`: no two alike, greedy, of equal length."""
    content = f"{PROMPTS[index % len(PROMPTS)]} ({index})"
    return {
        "messages": [pb.ChatMessage(role="user", content=content)],
        "max_tokens": TOKENS,
        "sampling": pb.SamplingParameters(temperature=0.0, ignore_eos=True),
    }


async def test_32_streams_at_once_run_to_the_end_with_correct_text(
    client: Client, tokenizer: Tokenizer
) -> None:
    plain, speculated = [
        await asyncio.gather(*(client.generate(**asked(n), **extra) for n in range(ROWS)))
        for extra in ({"max_draft_len": 0}, {})
    ]
    alone = [await client.generate(**asked(n), max_draft_len=0) for n in (0, 13, 31)]
    for outcome in (*plain, *speculated, *alone):
        assert outcome.code is grpc.StatusCode.OK
        ids = [token.id for token in outcome.tokens]
        assert len(ids) == TOKENS
        assert outcome.text == tokenizer.decode(ids)
        assert outcome.finished.usage.output_tokens == TOKENS
        assert outcome.kinds[0] == "started"
        assert outcome.kinds[-1] == "finished"
    assert [o.text for o in speculated] == [o.text for o in plain]
    assert [plain[n].text for n in (0, 13, 31)] == [o.text for o in alone]
    assert max(chunk.batch_rows for o in plain for chunk in o.chunks) == ROWS
    assert sum(o.finished.speculation.verify_steps for o in plain) == 0
    assert sum(o.finished.speculation.accepted_tokens for o in speculated) > 0


async def test_a_killed_client_frees_its_row_within_two_steps(
    client: Client, served: Served
) -> None:
    others = [asyncio.create_task(client.generate(**asked(n))) for n in range(8)]
    killed = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "draftgate.cli", "generate", "Tell me a long story."),
        *("--server", served.address, "--max-tokens", "4000", "--ignore-eos"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert killed.stdout is not None
    await killed.stdout.readexactly(20)
    before = await counters(served)
    killed.send_signal(signal.SIGKILL)
    while (after := await counters(served))["rows_freed_cancelled"] == before[
        "rows_freed_cancelled"
    ]:
        pass
    await killed.wait()
    assert after["rows_freed_cancelled"] == before["rows_freed_cancelled"] + 1
    # The step under way when the client died, and at most two more.
    assert after["steps"] - before["steps"] <= 3
    assert all(outcome.code is grpc.StatusCode.OK for outcome in await asyncio.gather(*others))


async def test_a_cancelled_call_and_a_passed_deadline_free_their_rows(
    client: Client, served: Served
) -> None:
    long = asked(1) | {"max_tokens": 4000}
    before = await counters(served)
    call = client.generation.Generate(pb.GenerateRequest(**long))
    await call.read()
    call.cancel()
    after = await idle(served)
    assert after["rows_freed_cancelled"] == before["rows_freed_cancelled"] + 1
    assert after["kv_used_blocks"] == 0
    # Who sees the deadline first ends the generation: the engine, or the gateway with a stop.
    late = await client.generate(timeout=0.5, **long)
    assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert (await idle(served))["kv_used_blocks"] == 0


async def test_chunks_come_as_they_are_made(client: Client) -> None:
    """One event for each step that emitted, not the whole answer at the end."""
    outcome = await client.generate(**asked(0), max_draft_len=0)
    assert len(outcome.chunks) == TOKENS


async def idle(served: Served) -> dict[str, int]:
    """The counters once no generation runs."""
    async with asyncio.timeout(20):
        while (found := await counters(served))["running_rows"]:
            await asyncio.sleep(0.02)
    return found


async def counters(served: Served) -> dict[str, int]:
    def ask() -> Any:
        control = np.array([b'{"op": "counters"}'], dtype=object)
        (answer,) = stream_infer(served.triton, "engine", {"control": control}, request_id="c")
        return json.loads(answer["control_result"][0])

    return dict(await asyncio.to_thread(ask))
