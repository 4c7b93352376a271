"""`draftgate serve` as a benchmark needs it: started, asked where it listens, stopped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = ["serving"]


@contextmanager
def serving(model_dir: Path, options: Sequence[str], *, cache: Path) -> Iterator[str]:
    """The address of its gateway, for as long as the context lasts. options: of `serve`. cache:
    the folder where it keeps what steps cost.

    Raises RuntimeError with what it printed when it ends before it is ready.
    """
    command = [
        *(sys.executable, "-m", "draftgate.cli", "serve", "--listen", "127.0.0.1:0"),
        *("--model-dir", str(model_dir), *options),
    ]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment
            )
        try:
            yield _address(process, log)
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
        raise RuntimeError(f"draftgate serve ended early:\n{text}")
