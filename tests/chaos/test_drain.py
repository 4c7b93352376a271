"""A gateway that is told to end cuts nothing."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from draftgate.text import Tokenizer
from tests.chaos.conftest import begun, check_same, run_all, streams
from tests.support.gateway import Client

pytestmark = [pytest.mark.triton, pytest.mark.slow, pytest.mark.timeout(600)]


@contextmanager
def served(model_dir: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`draftgate serve` as a process of its own."""
    command = [
        *(sys.executable, "-m", "draftgate.cli", "serve", "--listen", "127.0.0.1:0"),
        *("--model-dir", str(model_dir), "--dtype", "float32", "--threads", "1"),
        *("--gate", "fixed", "--draft-len", "2", "--kv-cache-mib", "64", "--grace", "120"),
        *("--policy-file", str(log.with_suffix(".policy"))),
    ]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def address_of(process: subprocess.Popen[bytes], log: Path) -> str:
    while "Ctrl-C stops" not in log.read_text():
        assert process.poll() is None, log.read_text()
        await asyncio.sleep(0.1)
    [address] = re.findall(r"gateway on (\S+),", log.read_text())
    return str(address)


async def test_sigterm_with_32_streams_cuts_none(
    model_dir: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with served(model_dir, log) as process:
        address = await address_of(process, log)
        async with grpc.aio.insecure_channel(address) as channel:
            client = Client(channel)
            undisturbed = streams(32, 200, tokenizer)
            await run_all(client, undisturbed)
            found = streams(32, 200, tokenizer)
            running = asyncio.create_task(run_all(client, found))
            await begun(found, 5)
            process.terminate()
            await running
        check_same(found, undisturbed)
        assert await asyncio.to_thread(process.wait, 60) == 0, log.read_text()
