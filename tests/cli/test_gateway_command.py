"""`draftgate gateway` as a program, in front of Tritons that run elsewhere."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

import grpc
import grpc.aio

from tests.fakes.triton import FakeTriton, Script, Step
from tests.support.footprint import Footprint
from tests.support.gateway import Client
from tests.support.terminal import on_terminal, run_in_pipe
from tests.support.workers import clients


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


async def test_several_workers_reload_and_end_in_order_with_their_parent(
    triton: FakeTriton, footprint: Footprint, tmp_path: Path
) -> None:
    file = tmp_path / "gateway.yaml"
    settings = f"triton: {triton.target}\nadmin_listen: 127.0.0.1:0\nmodel_name: some-model\n"
    file.write_text(settings)
    triton.default = Script(
        [Step({"output_ids": [n], "text_output": f"{n} "}, delay_s=0.02) for n in range(60)]
    )
    async with on_terminal(
        *("gateway", "--config", str(file), "--listen", "127.0.0.1:0", "--workers", "2"),
        env=footprint.env,
    ) as terminal:
        await terminal.sees("Ctrl-C stops")
        [address] = re.findall(r"gateway on (\S+),", terminal.screen)
        [admin] = re.findall(r"operators on (\S+)", terminal.screen)
        assert len(footprint.processes()) == 3
        async with clients(admin, 4) as operators:
            assert {tuple(await each.replicas()) for each in operators} == {(triton.target,)}
        changed = settings.replace("some-model", "other")
        file.write_text(f"{changed}admission: {{max_concurrency: 9}}\n")
        os.kill(terminal.process.pid, signal.SIGHUP)
        await terminal.sees("reloaded; only a restart changes model_name")
        async with clients(address, 8) as found:
            running = [asyncio.create_task(each.generate(prompt="Hi")) for each in found]
            await triton.wait_for(lambda: len(triton.generations) == 8)
            # As a service manager does, which sends it to every process.
            for pid in footprint.processes():
                os.kill(pid, signal.SIGTERM)
            outcomes = await asyncio.gather(*running)
        assert {each.code for each in outcomes} == {grpc.StatusCode.OK}
        assert {each.text for each in outcomes} == {"".join(f"{n} " for n in range(60))}
        assert await terminal.ends() == 0
    footprint.assert_gone()


async def test_workers_do_not_outlive_a_parent_that_is_killed(
    triton: FakeTriton, footprint: Footprint
) -> None:
    triton.default = Script([Step({"output_ids": [1]}, delay_s=0.02)], endless=True)
    async with on_terminal(
        *("gateway", "--triton", triton.target, "--listen", "127.0.0.1:0"),
        *("--model-name", "some-model", "--workers", "2", "--grace", "3600"),
        env=footprint.env,
    ) as terminal:
        await terminal.sees("Ctrl-C stops")
        [address] = re.findall(r"gateway on (\S+),", terminal.screen)
        async with clients(address, 4) as found:
            running = [asyncio.create_task(each.generate(prompt="Hi")) for each in found]
            await triton.wait_for(lambda: len(triton.generations) == 4)
            terminal.process.kill()
            outcomes = await asyncio.gather(*running)
        assert {each.code for each in outcomes} == {grpc.StatusCode.UNAVAILABLE}
        async with asyncio.timeout(30):
            while footprint.processes():
                await asyncio.sleep(0.02)


async def test_its_settings_come_from_a_file_the_environment_and_options(
    triton: FakeTriton, tmp_path: Path
) -> None:
    file = tmp_path / "gateway.yaml"
    settings = (
        f"triton: {triton.target}\nlisten: 127.0.0.1:1\nadmin_listen: 127.0.0.1:0\n"
        "model_name: of-the-file\ndefaults: {max_tokens: 3, temperature: 0.5}\n"
    )
    file.write_text(settings)
    async with on_terminal(
        *("gateway", "--config", str(file), "--listen", "127.0.0.1:0"),
        *("--log-level", "info", "--log-format", "json"),
        env={"DRAFTGATE_DEFAULTS__MAX_TOKENS": "4", "DRAFTGATE_LISTEN": "127.0.0.1:2"},
    ) as terminal:
        await terminal.sees("Ctrl-C stops")
        [address] = re.findall(r"gateway on (\S+),", terminal.screen)
        [admin] = re.findall(r"operators on (\S+)", terminal.screen)
        async with (
            grpc.aio.insecure_channel(address) as channel,
            grpc.aio.insecure_channel(admin) as operators,
        ):
            client = Client(channel)
            await client.wait_serving()
            assert (await client.get_model()).name == "of-the-file"
            await terminal.sees(f'"message": "serving of-the-file on {address} in clear text: 1 of')
            assert list(await Client(operators).replicas()) == [triton.target]
            assert (await client.generate(prompt="Hi")).error is None
        sent = triton.generations[0].tensors
        assert (sent["max_tokens"], sent["temperature"]) == ([4], [0.5])
        await terminal.sees('"method": "draftgate.v1.GenerationService/Generate"')

        other = settings.replace("temperature: 0.5", "temperature: 0.25")
        file.write_text(f"{other}grace_s: 1\nmax_choices: 2\n")
        os.kill(terminal.process.pid, signal.SIGHUP)
        await terminal.sees("reloaded; only a restart changes grace_s\n")
        async with grpc.aio.insecure_channel(address) as channel:
            model = await Client(channel).get_model()
        assert (model.defaults.sampling.temperature, model.limits.max_choices) == (0.25, 2)
        # What options and the environment say still goes first.
        assert model.defaults.max_tokens == 4

        missing = tmp_path / "missing"
        file.write_text(f"{settings}max_choices: 1\nsecurity: {{tenants_file: {missing}}}\n")
        os.kill(terminal.process.pid, signal.SIGHUP)
        await terminal.sees(f"not reloaded, all stays as it was: {missing} cannot be read: ")
        file.write_text(f"{settings}max_choices: 0\n")
        os.kill(terminal.process.pid, signal.SIGHUP)
        await terminal.sees("not reloaded, all stays as it was: max_choices: Input should be ")
        assert '"level": "ERROR", "logger": "draftgate.cli.reloading"' in terminal.screen
        async with grpc.aio.insecure_channel(address) as channel:
            assert (await Client(channel).get_model()).limits.max_choices == 2
        terminal.type("\x03")
        assert await terminal.ends() == 0


async def test_what_cannot_be_is_one_clear_line(tmp_path: Path) -> None:
    nowhere = await run_in_pipe(["gateway", "--model-name", "m"])
    assert nowhere.code == 1
    assert "--triton, or triton in the settings, is needed" in nowhere.err
    open_to_all = ["gateway", "--triton", "127.0.0.1:1", "--model-name", "m"]
    refused = await run_in_pipe([*open_to_all, "--listen", "0.0.0.0:0"])
    assert (refused.code, "allow it with --insecure" in refused.err) == (1, True)
    file = tmp_path / "gateway.yaml"
    file.write_text("triton: 10.0.0.1:8001")
    meant_otherwise = await run_in_pipe(["serve", "--config", str(file)])
    assert meant_otherwise.code == 1
    assert "triton: it is for `draftgate gateway`" in meant_otherwise.err
    for command in (["gateway", "--triton", "127.0.0.1:1"], ["config", "check", str(file)]):
        misspelt = await run_in_pipe(command, env={"DRAFTGATE_LISTN": "127.0.0.1:1"})
        assert (misspelt.code, misspelt.out) == (1, "")
        assert misspelt.err == (
            "error: DRAFTGATE_LISTN: it names no setting; the nearest is DRAFTGATE_LISTEN "
            "(environment)\n"
        )
    nameless = await run_in_pipe(["gateway", "--triton", "127.0.0.1:1"])
    assert nameless.code == 1
    assert "--model-name or --model-dir is needed" in nameless.err
    wrong = await run_in_pipe(["gateway", "--triton", "nonsense", "--model-name", "m"])
    assert wrong.code == 1
    assert "triton_target: got 'nonsense', allowed: HOST:PORT" in wrong.err
