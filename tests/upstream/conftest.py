"""Small model repositories for a real tritonserver, and a look at what a server leaves behind."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from draftgate.upstream.tritonserver import TritonServer, TritonServerConfig
from tests.support.processes import processes_of_group

ECHO = """
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(request, "x").as_numpy())]
            )
            for request in requests
        ]
"""

CONFIG = """
backend: "python"
max_batch_size: 0
input [ { name: "x", data_type: TYPE_INT32, dims: [ -1 ] } ]
output [ { name: "y", data_type: TYPE_INT32, dims: [ -1 ] } ]
instance_group [ { kind: KIND_CPU, count: 1 } ]
"""


class Traces:
    """What one run of a server owns on this machine, to be checked after it is gone."""

    def __init__(self, process_group: int) -> None:
        self._group = process_group
        # The guardian's command line names the run's shared memory and state directory.
        arguments = Path(f"/proc/{self._group}/cmdline").read_text().split("\0")
        self._shm_prefix, self._state_dir = arguments[5:7]
        assert self._shm_prefix.startswith("draftgate-")
        assert Path(self._state_dir).is_dir()

    def processes(self) -> dict[int, str]:
        """The run's processes, zombies included, and what each runs."""
        return processes_of_group(self._group)

    def pid_of(self, program: str) -> int:
        [pid] = [pid for pid, path in self.processes().items() if Path(path).name == program]
        return pid

    def shared_memory(self) -> list[Path]:
        return list(Path("/dev/shm").glob(self._shm_prefix + "*"))

    def assert_gone(self, within_s: float = 0.0) -> None:
        deadline = time.monotonic() + within_s
        while self._left() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not self._left()

    def _left(self) -> list[object]:
        state_dir = Path(self._state_dir)
        return [*self.processes(), *self.shared_memory(), *([state_dir] * state_dir.exists())]


@pytest.fixture
def make_repository(tmp_path: Path) -> Callable[..., Path]:
    """A repository with one model, `probe`, whose class body is given."""

    def make(body: str = ECHO, *, imports: str = "") -> Path:
        version = tmp_path / "repository" / "probe" / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(CONFIG)
        (version / "model.py").write_text(
            "import os, subprocess, time\nimport triton_python_backend_utils as pb_utils\n"
            f"{imports}\nclass TritonPythonModel:\n{body}"
        )
        return tmp_path / "repository"

    return make


@pytest.fixture
async def make_server(tmp_path: Path) -> AsyncIterator[Callable[..., TritonServer]]:
    """Servers that are stopped at the end of the test, whatever it did to them."""
    servers: list[TritonServer] = []

    def make(repository: Path, **settings: Any) -> TritonServer:
        defaults: dict[str, Any] = {
            "model_dir": tmp_path,
            "start_timeout_s": 60.0,
            "exit_timeout_s": 2,
            "min_backoff_s": 0.1,
        }
        server = TritonServer(TritonServerConfig(repository, **(defaults | settings)))
        servers.append(server)
        return server

    yield make
    for server in servers:
        await server.stop()


@pytest.fixture
def traces_of() -> Callable[[int], Traces]:
    return Traces
