"""`draftgate gateway` as a program, in front of Tritons that run elsewhere."""

from __future__ import annotations

import asyncio
import re

import grpc
import grpc.aio

from tests.fakes.triton import FakeTriton, Script, Step
from tests.support.gateway import Client
from tests.support.terminal import on_terminal, run_in_pipe


async def test_it_serves_until_ctrl_c_and_lets_streams_finish(triton: FakeTriton) -> None:
    second = FakeTriton()
    await second.start()
    slow = [Step({"output_ids": [n], "text_output": f"{n} "}, delay_s=0.02) for n in range(30)]
    triton.default = second.default = Script(slow)
    async with on_terminal(
        *("gateway", "--triton", triton.target, "--triton", second.target),
        *("--listen", "127.0.0.1:0", "--model-name", "some-model"),
    ) as terminal:
        await terminal.sees("Ctrl-C stops")
        [address] = re.findall(r"gateway on (\S+),", terminal.screen)
        async with grpc.aio.insecure_channel(address) as channel:
            client = Client(channel)
            await client.wait_serving()
            assert list(await client.replicas()) == [triton.target, second.target]
            running = asyncio.create_task(client.generate(prompt="Hi", model="some-model"))
            await triton.wait_for(lambda: bool(triton.generations or second.generations))
            terminal.type("\x03")
            outcome = await running
        assert outcome.code is grpc.StatusCode.OK
        assert outcome.text == "".join(f"{n} " for n in range(30))
        assert await terminal.ends() == 0
    await second.stop()


async def test_a_second_ctrl_c_ends_everything(triton: FakeTriton) -> None:
    triton.default = Script([Step({"output_ids": [1]}, delay_s=0.02)], endless=True)
    async with on_terminal(
        *("gateway", "--triton", triton.target, "--listen", "127.0.0.1:0"),
        *("--model-name", "some-model", "--grace", "3600"),
    ) as terminal:
        await terminal.sees("Ctrl-C stops")
        [address] = re.findall(r"gateway on (\S+),", terminal.screen)
        async with grpc.aio.insecure_channel(address) as channel:
            client = Client(channel)
            await client.wait_serving()
            running = asyncio.create_task(client.generate(prompt="Hi"))
            await triton.wait_for(lambda: bool(triton.generations))
            terminal.type("\x03")
            await terminal.sees("once more ends everything at once")
            terminal.type("\x03")
            assert await terminal.ends() == 0
            assert (await running).code is not grpc.StatusCode.OK


async def test_what_cannot_be_is_one_clear_line() -> None:
    nameless = await run_in_pipe(["gateway", "--triton", "127.0.0.1:1"])
    assert nameless.code == 1
    assert "--model-name or --model-dir is needed" in nameless.err
    wrong = await run_in_pipe(["gateway", "--triton", "nonsense", "--model-name", "m"])
    assert wrong.code == 1
    assert "triton_target: got 'nonsense', allowed: HOST:PORT" in wrong.err
