"""What it costs to enter Triton at the ensemble, and at the engine with text made in the gateway.

A real tritonserver runs the model repository with a stand-in for the engine that sends a token
every so often and computes nothing, so that only the way of the tokens costs. The same streams run
through a gateway for each entry, in turn. Tokens of every stream and both entries are the same.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import grpc.aio
import numpy as np

from common import Goal, Machine, Spread, benchmark_parser, conclude
from draftgate._pb.draftgate.v1.generation_pb2 import GenerateRequest
from draftgate._pb.draftgate.v1.generation_pb2_grpc import GenerationServiceStub
from draftgate.gateway import Gateway, GatewayConfig
from draftgate.upstream.tritonserver import TritonServer, TritonServerConfig

_ROOT = Path(__file__).parent.parent
_ENTRIES = ("ensemble", "engine")
_PROMPT = "The quick brown fox jumps over the lazy dog. " * 4

# Stands in for the engine: the ids of the prompt again and again, one at a time.
_ENGINE = """
import os
import sys
import threading
import time

sys.path[:0] = os.environ["DRAFTGATE_PYTHONPATH"].split(os.pathsep)

from draftgate.backend.environment import model_dir
from draftgate.backend.tensors import Inputs, load_pb_utils, response
from draftgate.contract import ENGINE_INPUTS, ENGINE_OUTPUTS
from draftgate.text import Tokenizer

INTERVAL_S = {interval_s}
DESCRIPTION = '''{description}'''


class TritonPythonModel:
    def initialize(self, args):
        self.pb_utils = load_pb_utils()
        self.tokenizer = Tokenizer.load(model_dir())

    def execute(self, requests):
        for request in requests:
            inputs = Inputs(self.pb_utils, request, ENGINE_INPUTS)
            sender = request.get_response_sender()
            wanted = request.requested_output_names()
            if inputs.has("control") or inputs.has("stop"):
                values = {{"control_result": DESCRIPTION}}
                self.send(sender, values, wanted, last=True)
                continue
            ids, count = inputs.integers("input_ids"), inputs.integer("max_tokens")
            arguments = (sender, wanted, ids, count)
            threading.Thread(target=self.play, args=arguments, daemon=True).start()

    def play(self, sender, wanted, ids, count):
        due_s = time.monotonic()
        for index in range(count):
            values = {{
                "output_ids": [ids[index % len(ids)]],
                "chunk_index": index,
                "finish_reason": "length" if index == count - 1 else "",
            }}
            self.send(sender, values, wanted, last=index == count - 1)
            due_s += INTERVAL_S
            time.sleep(max(0.0, due_s - time.monotonic()))

    def send(self, sender, values, wanted, last):
        flags = self.pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0
        sender.send(response(self.pb_utils, ENGINE_OUTPUTS, values, wanted), flags=flags)
"""
_DESCRIPTION = (
    '{"name": "paced", "architecture": "", "quantization": "", "compute_dtype": "",'
    ' "vocab_size": 49152, "max_sequence_tokens": 8192, "eos_token_ids": [], "drafter": "",'
    ' "has_chat_template": true, "max_draft_len": 0, "max_batch_rows": 64}'
)


@dataclass(frozen=True)
class EntryCost:
    """What one entry cost."""

    gateway_us_per_token: float
    """CPU time of the gateway's process."""
    triton_us_per_token: float
    """CPU time of all of Triton's processes."""
    first_token: Spread
    gap: Spread
    """Between two events of one stream."""

    @property
    def us_per_token(self) -> float:
        return self.gateway_us_per_token + self.triton_us_per_token


@dataclass(frozen=True)
class Report:
    machine: Machine
    streams: int
    tokens: int
    """Of each stream."""
    interval_ms: float
    """Between two tokens of a stream, as the engine sends them."""
    entries: Mapping[str, EntryCost]


class Measured:
    """Sums of one entry over its rounds."""

    def __init__(self) -> None:
        self.gateway_s = self.triton_s = 0.0
        self.tokens = 0
        self.first_s: list[float] = []
        self.gaps_s: list[float] = []

    def cost(self) -> EntryCost:
        return EntryCost(
            gateway_us_per_token=1e6 * self.gateway_s / self.tokens,
            triton_us_per_token=1e6 * self.triton_s / self.tokens,
            first_token=Spread.of(self.first_s),
            gap=Spread.of(self.gaps_s),
        )


def main() -> int:
    parser = benchmark_parser(__doc__ or "", quick="fewer rounds and tokens")
    parser.add_argument("--model-dir", type=Path, required=True, help="for its tokenizer")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--interval-ms", type=float, default=20.0)
    options = parser.parse_args()
    rounds, tokens = (2, 100) if options.quick else (6, 250)
    entries = asyncio.run(
        measure(options.model_dir, options.streams, tokens, rounds, options.interval_ms / 1e3)
    )
    report = Report(Machine.this(), options.streams, tokens, options.interval_ms, entries)
    saved = 1 - entries["engine"].us_per_token / entries["ensemble"].us_per_token
    goals = [Goal("CPU per token saved by entering at the engine", saved, 0.0, float("inf"))]
    return conclude(options, report, goals, lambda: show(report))


async def measure(
    model_dir: Path, streams: int, tokens: int, rounds: int, interval_s: float
) -> Mapping[str, EntryCost]:
    """Run the load through each entry, in turn."""
    sums = {entry: Measured() for entry in _ENTRIES}
    with tempfile.TemporaryDirectory() as folder:
        server = TritonServer(
            TritonServerConfig(repository(Path(folder), interval_s), model_dir, exit_timeout_s=2)
        )
        await server.start()
        try:
            for number in range(rounds + 1):
                for entry in _ENTRIES if number % 2 else reversed(_ENTRIES):
                    # The first round warms up.
                    into = sums[entry] if number else Measured()
                    async with gateway(server.grpc_target, entry, model_dir) as (pid, address):
                        group = server.process_group
                        assert group is not None
                        before = cpu_s(pid), group_cpu_s(group)
                        await load(address, streams, tokens, into)
                        into.gateway_s += cpu_s(pid) - before[0]
                        into.triton_s += group_cpu_s(group) - before[1]
        finally:
            await server.stop()
    return {entry: sums[entry].cost() for entry in _ENTRIES}


def repository(folder: Path, interval_s: float) -> Path:
    """The model repository with the stand-in for the engine."""
    made = folder / "repository"
    shutil.copytree(_ROOT / "model_repository", made)
    engine = _ENGINE.format(interval_s=interval_s, description=_DESCRIPTION)
    (made / "engine" / "1" / "model.py").write_text(engine, encoding="utf-8")
    return made


@asynccontextmanager
async def gateway(target: str, entry: str, model_dir: Path) -> AsyncIterator[tuple[int, str]]:
    """A gateway in a process of its own: its process id and address."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, target, entry, model_dir))
    process.start()
    try:
        address = await asyncio.to_thread(ours.recv)
        assert process.pid is not None
        yield process.pid, address
        ours.send("stop")
    finally:
        await asyncio.to_thread(process.join, 10)
        process.kill()


def serve(connection: Connection, target: str, entry: str, model_dir: Path) -> None:
    """Run a gateway until told to stop; tell where it listens once it serves."""
    asyncio.run(_serve(connection, target, entry, model_dir))


async def _serve(connection: Connection, target: str, entry: str, model_dir: Path) -> None:
    running = Gateway(
        GatewayConfig(
            triton_target=target,
            model_name="paced",
            listen="127.0.0.1:0",
            entry=entry,
            tokenizer_dir=model_dir,
        )
    )
    await running.start()
    address = f"127.0.0.1:{running.port}"
    async with grpc.aio.insecure_channel(address) as channel:
        stub = GenerationServiceStub(channel)
        while True:
            try:
                async for _ in stub.Generate(GenerateRequest(prompt="Hi", max_tokens=1)):
                    pass
                break
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.05)
    connection.send(address)
    await asyncio.to_thread(connection.recv)
    await running.drain(1.0)


async def load(address: str, streams: int, tokens: int, into: Measured) -> None:
    """So many streams at once, each to its end."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = GenerationServiceStub(channel)
        counts = await asyncio.gather(*(one(stub, tokens, into) for _ in range(streams)))
    assert counts == [tokens] * streams
    into.tokens += sum(counts)


async def one(stub: GenerationServiceStub, tokens: int, into: Measured) -> int:
    """One stream; how many tokens it brought."""
    begun_s = last_s = time.perf_counter()
    count = 0
    async for event in stub.Generate(GenerateRequest(prompt=_PROMPT, max_tokens=tokens)):
        if not event.HasField("tokens"):
            continue
        now_s = time.perf_counter()
        if count:
            into.gaps_s.append(now_s - last_s)
        else:
            into.first_s.append(now_s - begun_s)
        count += len(event.tokens.tokens)
        last_s = now_s
    return count


def cpu_s(pid: int) -> float:
    """CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def group_cpu_s(group: int) -> float:
    """CPU time that the processes of a group have used."""
    total = 0.0
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.getpgid(int(entry)) == group:
                total += cpu_s(int(entry))
        except (ProcessLookupError, FileNotFoundError):
            continue  # it ended in this moment
    return total


def show(report: Report) -> None:
    print(f"{report.streams} streams, a token every {report.interval_ms:g} ms\n")
    print("entry      CPU/token: gateway   Triton    both    TTFT p50   p90    gap p50   p90")
    for entry, path in report.entries.items():
        numbers = np.array([path.gateway_us_per_token, path.triton_us_per_token])
        print(
            f"{entry:<10} {numbers[0]:>15.0f} us {numbers[1]:>5.0f} us {numbers.sum():>4.0f} us"
            f" {path.first_token.median_ms:>8.1f} {path.first_token.p90_ms:>6.1f} ms"
            f" {path.gap.median_ms:>6.1f} {path.gap.p90_ms:>6.1f} ms"
        )


if __name__ == "__main__":
    raise SystemExit(main())
