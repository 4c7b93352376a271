"""What it costs to enter Triton at the ensemble, and straight at the engine.

A real tritonserver runs the model repository and the real engine. Two gateways stand in front of
it: one enters at the ensemble, whose Triton models make ids of text and text of ids, the other at
the engine, and makes the text itself. The same greedy streams run through either in turn, a round
each, and the order changes from round to round. Nothing is drafted, so that every token is a
response of its own: the most that the way can cost. The engine's own process computes the same on
both ways and is counted apart, since what it does for a token hides what the way costs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import statistics
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import grpc.aio

from common import Goal, Machine, benchmark_parser, conclude
from draftgate._pb.draftgate.v1 import generation_pb2 as pb
from draftgate._pb.draftgate.v1.generation_pb2_grpc import GenerationServiceStub
from draftgate.gateway import Gateway, GatewayConfig
from draftgate.upstream.tritonserver import TritonServer, TritonServerConfig

ENTRIES = ("ensemble", "engine")

_ROOT = Path(__file__).parent.parent
_MODEL_DIR = _ROOT / "models" / "smollm2-135m-instruct-fp8"
_PROMPT = "The quick brown fox jumps over the lazy dog, said number {0}. " * 4
_ENGINE = {"gate": "fixed", "draft_len": 0, "drafter": "none"}
_START_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Plan:
    """How much is run."""

    streams: int
    tokens: int
    """Of each stream."""
    rounds: int
    """That count; one more warms up."""


@dataclass(frozen=True)
class Round:
    """What one entry did in one round."""

    gateway_us: float
    """CPU time of the gateway's process, for each token."""
    triton_us: float
    """That of Triton's processes but the engine's."""
    engine_us: float
    """That of the engine's."""
    first_ms: float
    """Median over the streams, from the request to the first token."""
    gap_ms: float
    """Median over all gaps between two events with tokens."""

    @property
    def way_us(self) -> float:
        """What brings a token to the client, and its prompt to the engine."""
        return self.gateway_us + self.triton_us


@dataclass(frozen=True)
class Report:
    machine: Machine
    model: str
    plan: Plan
    entries: Mapping[str, Sequence[Round]]

    def median(self, entry: str, of: Callable[[Round], float]) -> float:
        """Over the rounds."""
        return statistics.median(of(each) for each in self.entries[entry])

    def ratio(self, of: Callable[[Round], float]) -> float:
        """The engine entry's over the ensemble's: the median of the rounds' own ratios."""
        pairs = zip(*(self.entries[entry] for entry in ENTRIES), strict=True)
        return statistics.median(of(engine) / of(ensemble) for ensemble, engine in pairs)


def main() -> int:
    parser = benchmark_parser(__doc__ or "", quick="fewer rounds, streams and tokens")
    parser.add_argument("--model-dir", type=Path, default=_MODEL_DIR, help="the checkpoint")
    parser.add_argument("--streams", type=int, help="at once; 16, or 8 with --quick")
    options = parser.parse_args()
    report = asyncio.run(measure(options.model_dir.resolve(), plan(options)))
    return conclude(options, report, goals(report), lambda: show(report))


def plan(options: argparse.Namespace) -> Plan:
    """What the options ask for."""
    usual = Plan(8, 24, 3) if options.quick else Plan(16, 64, 5)
    return Plan(options.streams or usual.streams, usual.tokens, usual.rounds)


def goals(report: Report) -> list[Goal]:
    """Entering at the engine saves the two hops, and costs no time."""
    none = float("-inf")
    return [
        Goal("CPU of the way, engine over ensemble", report.ratio(lambda r: r.way_us), none, 0.9),
        Goal("time to first token, likewise", report.ratio(lambda r: r.first_ms), none, 1.1),
        Goal("time between tokens, likewise", report.ratio(lambda r: r.gap_ms), none, 1.05),
    ]


async def measure(model_dir: Path, wanted: Plan) -> Report:
    """Run the load through each entry, in turn."""
    rounds: dict[str, list[Round]] = {entry: [] for entry in ENTRIES}
    server = TritonServer(
        TritonServerConfig(
            _ROOT / "model_repository",
            model_dir,
            {**_ENGINE, "max_batch_rows": wanted.streams},
        )
    )
    async with AsyncExitStack() as stack:
        await server.start()
        stack.push_async_callback(server.stop)
        group = server.process_group
        assert group is not None
        gateways = {
            entry: await stack.enter_async_context(gateway(server.grpc_target, entry, model_dir))
            for entry in ENTRIES
        }
        for number in range(wanted.rounds + 1):
            for entry in ENTRIES if number % 2 else reversed(ENTRIES):
                process, address = gateways[entry]
                found = await run_round(address, process, group, wanted)
                if number:
                    rounds[entry].append(found)
    return Report(Machine.this(), model_dir.name, wanted, rounds)


async def run_round(address: str, process: int, group: int, wanted: Plan) -> Round:
    """All streams at once, each to its end."""
    gateway_s, triton_s = cpu_s(process), group_cpu_s(group)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = GenerationServiceStub(channel)
        streams = await asyncio.gather(
            *(stream(stub, number, wanted.tokens) for number in range(wanted.streams))
        )
    tokens = wanted.streams * wanted.tokens
    gateway_s = cpu_s(process) - gateway_s
    triton_s = {role: used - triton_s[role] for role, used in group_cpu_s(group).items()}
    return Round(
        gateway_us=1e6 * gateway_s / tokens,
        triton_us=1e6 * triton_s["other"] / tokens,
        engine_us=1e6 * triton_s["engine"] / tokens,
        first_ms=1e3 * statistics.median(times[0] for times in streams),
        gap_ms=1e3 * statistics.median(gap for times in streams for gap in times[1:]),
    )


async def stream(stub: GenerationServiceStub, number: int, tokens: int) -> list[float]:
    """The time to the first event with tokens, and those between two of them.

    Raises RuntimeError if it brings another number of tokens.
    """
    request = pb.GenerateRequest(prompt=_PROMPT.format(number), max_tokens=tokens)
    request.sampling.temperature = 0.0
    request.sampling.ignore_eos = True
    times: list[float] = []
    count = 0
    last_s = time.perf_counter()
    async for event in stub.Generate(request):
        if event.HasField("tokens"):
            now_s = time.perf_counter()
            times.append(now_s - last_s)
            last_s = now_s
            count += len(event.tokens.tokens)
    if count != tokens:
        raise RuntimeError(f"a stream brought {count} tokens, not {tokens}")
    return times


@asynccontextmanager
async def gateway(target: str, entry: str, model_dir: Path) -> AsyncIterator[tuple[int, str]]:
    """A gateway in a process of its own, once it serves: its process id and address."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=serve, args=(theirs, target, entry, model_dir))
    process.start()
    try:
        assert process.pid is not None
        address = await asyncio.to_thread(ours.recv)
        yield process.pid, address
        ours.send("stop")
        await asyncio.to_thread(process.join, 10)
    finally:
        process.kill()
        process.join()


def serve(connection: Connection, target: str, entry: str, model_dir: Path) -> None:
    """Run a gateway until told to stop; tell where it listens once it serves."""
    import uvloop  # as `draftgate gateway` does

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(connection, target, entry, model_dir))


async def _serve(connection: Connection, target: str, entry: str, model_dir: Path) -> None:
    running = Gateway(
        GatewayConfig(
            triton_target=target,
            model_name="model",
            listen="127.0.0.1:0",
            entry=entry,
            tokenizer_dir=model_dir,
        )
    )
    await running.start()
    await running.local.serving(timeout_s=_START_TIMEOUT_S)
    connection.send(running.address)
    await asyncio.to_thread(connection.recv)
    await running.drain(1.0)


def cpu_s(process: int) -> float:
    """CPU time that the threads of a process have used: in nanoseconds, where its `stat` counts in
    ticks of 10 ms."""
    used = 0
    for thread in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it ended in this moment
            used += int((thread / "schedstat").read_text(encoding="utf-8").split()[0])
    return used / 1e9


def group_cpu_s(group: int) -> dict[str, float]:
    """CPU time of the processes of Triton's group: the engine's, and all others together."""
    used = {"engine": 0.0, "other": 0.0}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.getpgid(int(entry)) == group:
                command = Path(f"/proc/{entry}/cmdline").read_text(encoding="utf-8")
                role = "engine" if "/engine/" in command and "stub" in command else "other"
                used[role] += cpu_s(int(entry))
        except (ProcessLookupError, FileNotFoundError):
            continue  # it ended in this moment
    return used


def show(report: Report) -> None:
    wanted = report.plan
    print(
        f"{report.model} on {report.machine.cpu}, {report.machine.cores} cores: "
        f"{wanted.streams} streams of {wanted.tokens} tokens, {wanted.rounds} rounds\n"
    )
    print("            CPU a token, us                          ms")
    print("entry       gateway  Triton  both  the engine's      first token  between tokens")
    for entry in ENTRIES:
        gateway_us = report.median(entry, lambda r: r.gateway_us)
        triton_us = report.median(entry, lambda r: r.triton_us)
        way_us = report.median(entry, lambda r: r.way_us)
        engine_us = report.median(entry, lambda r: r.engine_us)
        first_ms = report.median(entry, lambda r: r.first_ms)
        gap_ms = report.median(entry, lambda r: r.gap_ms)
        print(
            f"{entry:<10} {gateway_us:>8.0f} {triton_us:>7.0f} {way_us:>5.0f} {engine_us:>13.0f}"
            f" {first_ms:>16.1f} {gap_ms:>15.2f}"
        )
    print(
        f"{'ratio':<10} {report.ratio(lambda r: r.gateway_us):>8.2f}"
        f" {report.ratio(lambda r: r.triton_us):>7.2f} {report.ratio(lambda r: r.way_us):>5.2f}"
        f" {report.ratio(lambda r: r.engine_us):>13.2f}"
        f" {report.ratio(lambda r: r.first_ms):>16.2f} {report.ratio(lambda r: r.gap_ms):>15.2f}\n"
    )


if __name__ == "__main__":
    raise SystemExit(main())
