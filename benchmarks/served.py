"""Draftgate's commands that serve, as a benchmark needs them: started, asked where they listen,
stopped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Served", "running", "serving"]


@dataclass(frozen=True)
class Served:
    """A process that serves."""

    pid: int
    address: str
    """Where its gateway listens."""

    @property
    def resident_bytes(self) -> int:
        """Memory that is its own."""
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8")
        (found,) = re.findall(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
        return int(found) * 1024


@contextmanager
def serving(model_dir: Path, options: Sequence[str], *, cache: Path) -> Iterator[str]:
    """The address of the gateway of `draftgate serve`, for as long as the context lasts. options:
    of `serve`. cache: the folder where it keeps what steps cost.

    Raises RuntimeError with what it printed when it ends before it is ready.
    """
    arguments = ("serve", "--listen", "127.0.0.1:0", "--model-dir", str(model_dir), *options)
    with running(arguments, {"XDG_CACHE_HOME": str(cache)}) as served:
        yield served.address


@contextmanager
def running(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[Served]:
    """`draftgate ARGUMENTS`, for as long as the context lasts. environment: beside this one's.

    Raises RuntimeError with what it printed when it ends before it is ready.
    """
    command = (sys.executable, "-m", "draftgate.cli", *arguments)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
            )
        try:
            yield Served(process.pid, _address(process, log))
        finally:
            process.terminate()
            process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    while True:
        text = log.read_text(encoding="utf-8")
        found = re.search(r"gateway on (\S+), Triton", text)
        if found and "Ctrl-C stops" in text:
            return found[1]
        try:
            process.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
        raise RuntimeError(f"draftgate ended early:\n{text}")
