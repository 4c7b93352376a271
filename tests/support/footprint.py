"""What a program and all that it starts own on this machine, to be checked when it has ended."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Footprint"]

_SHM_OPTION = "--backend-config=python,shm-region-prefix-name="


class Footprint:
    """Run the program with `env`: every process of it carries the mark, every file is in `tmp`."""

    def __init__(self, tmp: Path) -> None:
        # Not DRAFTGATE_...: that would be a setting which there is not.
        self._mark = f"TEST_RUN_OF_DRAFTGATE={uuid.uuid4().hex}"
        self._tmp = tmp
        self._shm_prefixes: set[str] = set()
        name, _, value = self._mark.partition("=")
        # Torch keeps a cache of compiled code there, which is meant to stay.
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp.parent / "inductor")}
        self.env = {name: value, "TMPDIR": str(tmp), **cache}

    def processes(self) -> dict[int, str]:
        """The processes that run, and the name of the program in each."""
        found = {}
        for pid, arguments in self._marked():
            found[pid] = Path(arguments[0]).name
            for argument in arguments:
                if argument.startswith(_SHM_OPTION):
                    self._shm_prefixes.add(argument.removeprefix(_SHM_OPTION))
        return found

    def kill(self, program: str) -> None:
        """SIGKILL the one process of `program`."""
        [pid] = [pid for pid, name in self.processes().items() if name == program]
        os.kill(pid, signal.SIGKILL)

    def assert_gone(self) -> None:
        """Nothing is left: no process, no temporary file, no shared memory."""
        assert self.processes() == {}
        assert list(self._tmp.iterdir()) == []
        for prefix in self._shm_prefixes:
            assert list(Path("/dev/shm").glob(prefix + "*")) == []

    def _marked(self) -> Iterator[tuple[int, list[str]]]:
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                environment = Path("/proc", entry, "environ").read_bytes()
                command = Path("/proc", entry, "cmdline").read_text()
            except OSError:
                continue  # it ended in this moment
            if self._mark.encode() in environment.split(b"\0"):
                yield int(entry), command.split("\0")
