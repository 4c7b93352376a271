"""`draftgate serve` as a program: it starts, it stops, and it leaves nothing behind."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from draftgate.checkpoint import packaged_source
from draftgate.cli.serve import DrafterName
from draftgate.engine.drafters import DRAFTERS
from draftgate.engine.linear import compute_dtype, dtype_name
from tests.support.eagle import write_drafter
from tests.support.footprint import Footprint
from tests.support.serving import address_of, serving
from tests.support.terminal import DRAFTGATE, environment, run_in_pipe
from tests.support.tiny_models import TINY

pytestmark = pytest.mark.triton

# A draftgate whose supervision breaks, with a message that would paint the terminal.
BROKEN_SUPERVISION = """
from draftgate.cli import main
from draftgate.upstream.triton_process import TritonProcess

watches = TritonProcess.watch

async def watch(*arguments):
    if not {at_once}:
        await watches(*arguments)
    raise RuntimeError("\\x1b[41m\\x9b5mboom")

TritonProcess.watch = watch
main()
"""

STORY = ["generate", "Tell me a long story.", "--max-tokens", "2000", "--ignore-eos"]


async def runs(footprint: Footprint, program: str) -> None:
    while program not in footprint.processes().values():
        await asyncio.sleep(0.02)


async def story(address: str) -> asyncio.subprocess.Process:
    """A client in the middle of a long answer."""
    client = await asyncio.create_subprocess_exec(
        *DRAFTGATE, *STORY, "--server", address,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment(),
    )  # fmt: skip
    assert client.stdout is not None
    await client.stdout.readexactly(20)
    return client


async def test_it_serves_until_ctrl_c_and_cuts_streams_after_the_grace(
    footprint: Footprint, checkpoint_dir: Path
) -> None:
    async with serving(footprint, "--model-dir", str(checkpoint_dir), "--grace", "0") as terminal:
        address = await address_of(terminal)
        assert re.search(r"warming up: .*\n.+\n.*32 tokens · TTFT \d+ ms", terminal.screen)
        dtype = dtype_name(compute_dtype("auto", torch.device("cpu")))
        assert f"(FP8, {dtype}; drafter ngram, up to 4 a step)" in terminal.screen
        [shown] = re.findall(r"try: (.+)", terminal.screen)
        assert shown.endswith(f"--server {address}")

        done = await run_in_pipe(
            [
                "generate",
                "Name a colour.",
                "--server",
                address,
                "--max-tokens",
                "8",
                "--temperature",
                "0",
            ]
        )
        assert (done.code, done.out.count("\n")) == (0, 1)
        assert "8 tokens" in done.err

        client = await story(address)
        assert "tritonserver" in footprint.processes().values()
        terminal.type("\x03")
        assert await terminal.ends() == 0
        footprint.assert_gone()
        _, err = await client.communicate()
    assert client.returncode == 1
    assert err.decode().splitlines()[-1].startswith("error: ")
    assert "Traceback" not in terminal.screen + err.decode()


async def test_a_second_ctrl_c_waits_for_nobody(footprint: Footprint, checkpoint_dir: Path) -> None:
    options = ("--model-dir", str(checkpoint_dir), "--grace", "100000")
    async with serving(footprint, *options) as terminal:
        client = await story(await address_of(terminal))
        footprint.processes()
        terminal.type("\x03")
        await terminal.sees("once more ends everything at once")
        terminal.type("\x03")
        assert await terminal.ends() == 0
        footprint.assert_gone()
        await client.communicate()
    assert client.returncode == 1


async def test_ctrl_c_while_triton_is_dead_or_restarting(
    footprint: Footprint, checkpoint_dir: Path
) -> None:
    async with serving(footprint, "--model-dir", str(checkpoint_dir)) as terminal:
        await address_of(terminal)
        footprint.kill("tritonserver")
        await terminal.sees("restarting tritonserver")
        await runs(footprint, "tritonserver")
        terminal.process.terminate()
        assert await terminal.ends() == 0
        footprint.assert_gone()
    assert "Traceback" not in terminal.screen


@pytest.mark.parametrize("moment", ["before it is ready", "while it serves"])
async def test_it_ends_with_one_line_when_nobody_restarts_triton_any_more(
    footprint: Footprint, checkpoint_dir: Path, moment: str
) -> None:
    at_once = moment == "before it is ready"
    program = (sys.executable, "-c", BROKEN_SUPERVISION.format(at_once=at_once))
    options = ("--model-dir", str(checkpoint_dir))
    async with serving(footprint, *options, program=program) as terminal:
        if not at_once:
            await address_of(terminal)
            footprint.kill("tritonserver")
        assert await terminal.ends() == 1
        footprint.assert_gone()
    log = terminal.screen
    assert ("ready in" in log) is not at_once
    assert "ERROR draftgate.upstream.tritonserver: keeping tritonserver running failed" in log
    assert "RuntimeError: [41m5mboom" in log
    assert "\x9b" not in log
    errors = [line for line in log.splitlines() if line.startswith("\x1b[31merror: ")]
    assert len(errors) == 1
    assert "Triton is not kept running any more: RuntimeError: [41m5mboom" in errors[0]


@pytest.mark.parametrize("moment", ["starting Triton", "a model loads", "warming up"])
async def test_ctrl_c_during_the_start(
    footprint: Footprint, checkpoint_dir: Path, moment: str
) -> None:
    async with serving(footprint, "--model-dir", str(checkpoint_dir)) as terminal:
        if moment == "a model loads":
            await runs(footprint, "triton_python_backend_stub")
        else:
            await terminal.sees(moment)
        footprint.processes()
        terminal.type("\x03")
        assert await terminal.ends() == 130
        footprint.assert_gone()
    assert "ready in" not in terminal.screen
    assert "Traceback" not in terminal.screen


async def test_ctrl_c_during_the_preparation(footprint: Footprint, tmp_path: Path) -> None:
    out = tmp_path / "models" / "smol"
    options = ("--from", str(packaged_source()), "--model-dir", str(out))
    async with serving(footprint, *options) as terminal:
        await terminal.sees("converting")
        assert len(footprint.processes()) >= 2
        terminal.type("\x03")
        assert await terminal.ends() == 130
        footprint.assert_gone()
    assert [path.name for path in out.parent.iterdir()] == [".smol.lock"]
    assert "Traceback" not in terminal.screen


async def test_a_port_in_use_is_one_line(footprint: Footprint, checkpoint_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = await run_in_pipe(
            ["serve", "--listen", address, "--model-dir", str(checkpoint_dir)], env=footprint.env
        )
    assert (done.code, done.out) == (1, "")
    port = address.rpartition(":")[2]
    assert done.err == (
        f"error: cannot listen on {address}: port {port} is in use; "
        "stop what uses it or choose another port\n"
    )
    footprint.assert_gone()


@pytest.mark.parametrize("listen", ["50051", "localhost:", "host:port", "127.0.0.1:70000"])
async def test_an_address_that_is_none_is_one_line(
    footprint: Footprint, checkpoint_dir: Path, listen: str
) -> None:
    done = await run_in_pipe(
        ["serve", "--listen", listen, "--model-dir", str(checkpoint_dir)], env=footprint.env
    )
    assert done.code == 1
    assert done.err.startswith(f"error: cannot listen on {listen}: ")
    assert done.err.count("\n") == 1


async def test_a_folder_without_checkpoint_is_one_line(
    footprint: Footprint, tmp_path: Path
) -> None:
    done = await run_in_pipe(["serve", "--model-dir", str(tmp_path)], env=footprint.env)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"error: {tmp_path} holds no checkpoint")
    assert done.err.count("\n") == 1


async def test_a_source_that_is_missing_is_one_line(footprint: Footprint, tmp_path: Path) -> None:
    done = await run_in_pipe(
        ["serve", "--listen", "127.0.0.1:0", "--from", str(tmp_path / "none.gguf"),
         "--model-dir", str(tmp_path / "out")],
        env=footprint.env,
    )  # fmt: skip
    assert (done.code, done.out) == (1, "")
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "none.gguf" in errors[0]


async def test_a_damaged_checkpoint_is_one_line(
    footprint: Footprint, checkpoint_dir: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoint_dir, damaged)
    (weights,) = damaged.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    done = await run_in_pipe(
        ["serve", "--listen", "127.0.0.1:0", "--model-dir", str(damaged)], env=footprint.env
    )
    assert done.code == 1
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert weights.name in errors[0]
    assert "Traceback" not in done.err
    footprint.assert_gone()


async def test_an_option_out_of_range_is_wrong_usage(footprint: Footprint) -> None:
    done = await run_in_pipe(["serve", "--draft-len", "1000"], env=footprint.env)
    assert done.code == 2
    assert "--draft-len" in done.err
    footprint.assert_gone()


async def test_a_setting_that_the_engine_refuses_is_one_line(
    footprint: Footprint, checkpoint_dir: Path
) -> None:
    done = await run_in_pipe(
        ["serve", "--listen", "127.0.0.1:0", "--model-dir", str(checkpoint_dir),
         "--kv-cache-mib", "1"],
        env=footprint.env,
    )  # fmt: skip
    assert done.code == 1
    [line] = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: kv_cache_bytes: 1048576 holds ")
    footprint.assert_gone()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--drafter", "draft-model"], "--drafter draft-model needs --drafter-dir, its weights"),
        (["--drafter", "eagle"], "--drafter eagle needs --drafter-dir, its weights"),
        (["--drafter-dir", "/none"], "--drafter-dir: /none holds no drafter (no config.json)"),
        (["--drafter", "ngram", "--drafter-dir", "/none"], "--drafter-dir: --drafter ngram has no"),
    ],
)
async def test_a_drafter_without_its_weights_is_one_line(
    footprint: Footprint, checkpoint_dir: Path, options: list[str], why: str
) -> None:
    done = await run_in_pipe(
        ["serve", "--model-dir", str(checkpoint_dir), *options], env=footprint.env
    )
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"error: {why}")
    assert done.err.count("\n") == 1
    footprint.assert_gone()


async def test_a_drafter_for_another_model_is_one_line(
    footprint: Footprint, checkpoint_dir: Path, tmp_path: Path
) -> None:
    write_drafter(tmp_path / "drafter", TINY, draft_vocab=40)
    done = await run_in_pipe(
        ["serve", "--listen", "127.0.0.1:0", "--model-dir", str(checkpoint_dir),
         "--drafter-dir", str(tmp_path / "drafter")],
        env=footprint.env,
    )  # fmt: skip
    assert done.code == 1
    [line] = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert line.endswith("the drafter's hidden_size is 48, the target's is 576")
    footprint.assert_gone()


def test_the_command_and_the_engine_know_the_same_drafters() -> None:
    assert set(DrafterName) == {*DRAFTERS, "none"}


async def test_a_full_disk_is_one_line(footprint: Footprint, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    # A mount of its own, gone with the program.
    private = ("unshare", "--map-root-user", "--mount", "sh", "-c")
    if subprocess.run([*private, f"mount -t tmpfs tmpfs {small}"], check=False).returncode:
        pytest.skip("no mount namespaces here")
    command = [*DRAFTGATE, "serve", "--listen", "127.0.0.1:0"]
    process = await asyncio.create_subprocess_exec(
        *private, f'mount -t tmpfs -o size=8m tmpfs {small} && exec "$@"', "-",
        *command, "--from", str(packaged_source()), "--model-dir", str(small / "out"),
        stderr=asyncio.subprocess.PIPE, env=environment(footprint.env),
    )  # fmt: skip
    _, err = await process.communicate()
    assert process.returncode == 1
    errors = [line for line in err.decode().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "free" in errors[0]
    footprint.assert_gone()
