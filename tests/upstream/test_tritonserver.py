"""The supervised tritonserver, always a real one."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import draftgate
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.upstream.triton_process import HealthLimits, TritonProcess
from draftgate.upstream.tritonserver import ServerState, TritonServer
from tests.support.infer import InferError, infer

pytestmark = pytest.mark.triton

MakeRepository = Callable[..., Path]
MakeServer = Callable[..., TritonServer]
TracesOf = Callable[[int | None], Any]

SLOW_START = """
    def initialize(self, args):
        time.sleep(120)
"""

PARENT = """
import asyncio, sys
from pathlib import Path
from draftgate.upstream.tritonserver import TritonServer, TritonServerConfig

async def main():
    server = TritonServer(TritonServerConfig(Path(sys.argv[1]), Path(sys.argv[2])))
    await server.start()
    print(server.process_group, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""

FAILS_TWICE = """
    def initialize(self, args):
        with open({starts!r}, "a+") as starts:
            starts.write("x")
            starts.seek(0)
            if starts.read() in ("xx", "xxx"):
                raise RuntimeError("not this time")
"""


async def echo(server: TritonServer, *values: int) -> list[int]:
    def ask() -> list[int]:
        inputs = {"x": np.array(values, np.int32)}
        return infer(server.grpc_target, "probe", inputs, timeout_s=10)["y"].tolist()

    return await asyncio.to_thread(ask)


async def begin(server: TritonServer) -> asyncio.Task[None]:
    """A start under way, with a process already there."""
    starting = asyncio.create_task(server.start())
    while server.process_group is None:
        await asyncio.sleep(0.01)
    return starting


async def has_stub(traces: Any) -> None:
    """Wait until the process of the model runs."""
    while "triton_python_backend_stub" not in map(os.path.basename, traces.processes().values()):
        await asyncio.sleep(0.02)


async def restarted(server: TritonServer) -> None:
    await server.wait_for(ServerState.RESTARTING)
    await server.wait_for(ServerState.READY)


async def test_serves_and_leaves_nothing_behind(
    make_repository: MakeRepository, make_server: MakeServer, traces_of: TracesOf
) -> None:
    server = make_server(make_repository())
    assert server.state is ServerState.STOPPED
    await server.start()
    assert server.state is ServerState.READY
    assert await echo(server, 1, 2, 3) == [1, 2, 3]
    assert await echo(server) == []
    traces = traces_of(server.process_group)
    assert len(traces.processes()) == 3
    assert traces.shared_memory()
    await server.stop()
    assert server.state is ServerState.STOPPED
    traces.assert_gone()

    await server.start()
    assert await echo(server, 4) == [4]


async def test_models_see_the_checkpoint_and_the_settings(
    make_repository: MakeRepository, make_server: MakeServer, tmp_path: Path
) -> None:
    body = """
    def initialize(self, args):
        print("model_dir", os.environ["DRAFTGATE_MODEL_DIR"], flush=True)
        print("engine", os.environ["DRAFTGATE_ENGINE"], flush=True)
        print("python path", os.environ["DRAFTGATE_PYTHONPATH"].split(os.pathsep)[0], flush=True)
"""
    server = make_server(make_repository(body), engine_settings={"draft_len": 4})
    await server.start()
    assert f"model_dir {tmp_path}" in server.log_lines
    assert 'engine {"draft_len": 4}' in server.log_lines
    assert f"python path {Path(draftgate.__file__).parents[1]}" in server.log_lines


@pytest.mark.parametrize("victim", ["tritonserver", "triton_python_backend_stub"])
async def test_a_killed_process_is_replaced(
    make_repository: MakeRepository, make_server: MakeServer, traces_of: TracesOf, victim: str
) -> None:
    server = make_server(make_repository())
    await server.start()
    target = server.grpc_target
    traces = traces_of(server.process_group)
    os.kill(traces.pid_of(victim), signal.SIGKILL)
    await restarted(server)
    assert server.restarts == 1
    assert server.grpc_target == target
    assert server.last_error is not None
    assert "killed" in server.last_error.message or "died" in server.last_error.message
    assert await echo(server, 5) == [5]
    traces.assert_gone()


async def test_survives_the_death_of_its_guardian(
    make_repository: MakeRepository, make_server: MakeServer, traces_of: TracesOf
) -> None:
    server = make_server(make_repository())
    await server.start()
    traces = traces_of(server.process_group)
    assert server.process_group is not None
    os.kill(server.process_group, signal.SIGKILL)
    await restarted(server)
    assert await echo(server, 6) == [6]
    traces.assert_gone(within_s=30.0)


async def test_one_that_hangs_is_replaced(
    make_repository: MakeRepository, make_server: MakeServer, traces_of: TracesOf
) -> None:
    health = HealthLimits(interval_s=0.1, timeout_s=1.0, misses=2)
    server = make_server(make_repository(), health=health)
    await server.start()
    traces = traces_of(server.process_group)
    os.kill(traces.pid_of("tritonserver"), signal.SIGSTOP)
    await restarted(server)
    assert server.last_error is not None
    assert server.last_error.message == "tritonserver hangs: 2 health checks in a row failed"
    assert await echo(server, 7) == [7]
    traces.assert_gone()


async def test_one_that_only_paused_is_left_alone(
    make_repository: MakeRepository, make_server: MakeServer, traces_of: TracesOf
) -> None:
    """Failed health checks count only in a row."""
    health = HealthLimits(interval_s=0.05, timeout_s=0.5, misses=3)
    server = make_server(make_repository(), health=health)
    await server.start()
    pid = traces_of(server.process_group).pid_of("tritonserver")
    for _ in range(4):
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(0.7)
        os.kill(pid, signal.SIGCONT)
        assert await echo(server, 8) == [8]
        await asyncio.sleep(0.3)
    assert (server.state, server.restarts, server.last_error) == (ServerState.READY, 0, None)


async def test_keeps_trying_when_a_restart_breaks(
    make_repository: MakeRepository,
    make_server: MakeServer,
    traces_of: TracesOf,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever goes wrong in a try, also what nobody foresaw: the next one is made."""
    server = make_server(make_repository())
    await server.start()
    ready = TritonProcess.ready
    broken: list[TritonProcess] = []

    async def breaks(process: TritonProcess, *arguments: Any) -> None:
        if len(broken) < 2:
            broken.append(process)
            raise RuntimeError("not foreseen")
        await ready(process, *arguments)

    monkeypatch.setattr(TritonProcess, "ready", breaks)
    os.kill(traces_of(server.process_group).pid_of("tritonserver"), signal.SIGKILL)
    await restarted(server)
    assert server.restarts == 1
    assert caplog.text.count("RuntimeError: not foreseen") == 2
    assert await echo(server, 9) == [9]
    for process in broken:
        assert not Path(f"/proc/{process.pid}").exists()


async def test_a_start_that_breaks_is_told(
    make_repository: MakeRepository, make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def breaks(*arguments: Any) -> None:
        raise RuntimeError("not foreseen")

    monkeypatch.setattr(TritonProcess, "ready", breaks)
    server = make_server(make_repository())
    with pytest.raises(DraftgateError, match="RuntimeError: not foreseen") as caught:
        await server.start()
    assert caught.value.code is ErrorCode.INTERNAL
    assert server.state is ServerState.FAILED


async def test_stop_during_start(
    make_repository: MakeRepository, make_server: MakeServer, traces_of: TracesOf
) -> None:
    server = make_server(make_repository(SLOW_START))
    starting = await begin(server)
    traces = traces_of(server.process_group)
    await has_stub(traces)
    await server.stop()
    with pytest.raises(DraftgateError, match="stopped while it started") as caught:
        await starting
    assert caught.value.code is ErrorCode.CANCELLED
    traces.assert_gone()


async def test_cancelling_the_start_stops_it(
    make_repository: MakeRepository, make_server: MakeServer, traces_of: TracesOf
) -> None:
    server = make_server(make_repository(SLOW_START))
    starting = await begin(server)
    traces = traces_of(server.process_group)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert server.state is ServerState.STOPPED
    traces.assert_gone()


async def test_stop_at_once(make_repository: MakeRepository, make_server: MakeServer) -> None:
    server = make_server(make_repository())
    starting = asyncio.create_task(server.start())
    await asyncio.sleep(0)
    await asyncio.gather(server.stop(), server.stop())
    with pytest.raises(DraftgateError):
        await starting
    assert server.state is ServerState.STOPPED


async def test_stop_while_it_waits_to_restart(
    make_repository: MakeRepository, make_server: MakeServer, traces_of: TracesOf
) -> None:
    server = make_server(make_repository(), min_backoff_s=1000.0, max_backoff_s=1000.0)
    await server.start()
    traces = traces_of(server.process_group)
    os.kill(traces.pid_of("tritonserver"), signal.SIGKILL)
    await server.wait_for(ServerState.RESTARTING)
    await server.stop()
    assert server.state is ServerState.STOPPED
    traces.assert_gone()


async def test_keeps_trying_when_a_restart_fails(
    make_repository: MakeRepository, make_server: MakeServer, traces_of: TracesOf, tmp_path: Path
) -> None:
    starts = tmp_path / "starts"
    server = make_server(make_repository(FAILS_TWICE.format(starts=str(starts))))
    await server.start()
    os.kill(traces_of(server.process_group).pid_of("tritonserver"), signal.SIGKILL)
    await restarted(server)
    assert server.last_error is not None
    assert server.last_error.message.endswith("RuntimeError: not this time")
    assert starts.read_text() == "xxxx"


@pytest.mark.parametrize(
    ("body", "imports", "code", "message"),
    [
        (
            """
    def initialize(self, args):
        raise pb_utils.TritonModelException(
            "[draftgate:FAILED_PRECONDITION:] cannot read /x/config.json: No such file"
        )
""",
            "",
            ErrorCode.FAILED_PRECONDITION,
            "cannot read /x/config.json: No such file",
        ),
        (
            "    pass\n",
            "import no_such_module",
            ErrorCode.UNAVAILABLE,
            "cannot load model 'probe': Internal: "
            "ModuleNotFoundError: No module named 'no_such_module'",
        ),
        (
            """
    def initialize(self, args):
        os.kill(os.getpid(), 9)
""",
            "",
            ErrorCode.UNAVAILABLE,
            "the process of model 'probe' died while it loaded, most likely for lack of memory",
        ),
    ],
    ids=["own error", "import", "killed"],
)
async def test_a_model_that_does_not_load_fails_the_start_with_one_clear_line(
    make_repository: MakeRepository,
    make_server: MakeServer,
    body: str,
    imports: str,
    code: ErrorCode,
    message: str,
) -> None:
    server = make_server(make_repository(body, imports=imports))
    with pytest.raises(DraftgateError) as caught:
        await server.start()
    assert (caught.value.code, caught.value.message) == (code, message)
    assert server.state is ServerState.FAILED
    assert server.last_error is caught.value
    await server.stop()
    assert server.state is ServerState.FAILED


async def test_a_start_has_a_deadline(
    make_repository: MakeRepository, make_server: MakeServer
) -> None:
    server = make_server(make_repository(SLOW_START), start_timeout_s=1.0)
    with pytest.raises(DraftgateError, match=r"not ready after 1 s; .*probe") as caught:
        await server.start()
    assert caught.value.code is ErrorCode.DEADLINE_EXCEEDED


async def test_a_port_in_use_is_named_before_anything_is_started(
    make_repository: MakeRepository, make_server: MakeServer
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = make_server(make_repository(), grpc_port=port)
        with pytest.raises(DraftgateError, match=f":{port}: Address already in use") as caught:
            await server.start()
    assert caught.value.code is ErrorCode.FAILED_PRECONDITION
    assert server.process_group is None
    await server.start()
    assert server.grpc_target == f"127.0.0.1:{port}"


async def test_a_request_that_does_not_end_cannot_hold_up_the_stop(
    make_repository: MakeRepository, make_server: MakeServer, traces_of: TracesOf
) -> None:
    body = """
    def execute(self, requests):
        print("executing", flush=True)
        time.sleep(120)
"""
    server = make_server(make_repository(body), exit_timeout_s=1)
    await server.start()
    traces = traces_of(server.process_group)
    asking = asyncio.create_task(echo(server, 1))
    while "executing" not in server.log_lines:
        await asyncio.sleep(0.02)
    await server.stop()
    traces.assert_gone()
    with pytest.raises(InferError):
        await asking


async def test_processes_that_a_model_started_are_ended_too(
    make_repository: MakeRepository, make_server: MakeServer, tmp_path: Path
) -> None:
    body = f"""
    def initialize(self, args):
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        with open({str(tmp_path / "child")!r}, "w") as file:
            file.write(str(child.pid))
"""
    server = make_server(make_repository(body))
    await server.start()
    child = Path("/proc", (tmp_path / "child").read_text())
    assert child.exists()
    await server.stop()
    assert not child.exists()


async def test_dies_with_its_parent(
    make_repository: MakeRepository, traces_of: TracesOf, tmp_path: Path
) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(draftgate.__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(make_repository()), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as parent:
        assert parent.stdout is not None
        line = await asyncio.to_thread(parent.stdout.readline)
        traces = traces_of(int(line))
        assert len(traces.processes()) == 3
        parent.kill()
    traces.assert_gone(within_s=30.0)
