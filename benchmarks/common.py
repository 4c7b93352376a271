"""What every benchmark needs: interleaved timing, memory, goals, the machine, JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from draftgate.engine.linear import compute_dtype, dtype_name

__all__ = [
    "Bandwidth",
    "Goal",
    "Machine",
    "MemoryUse",
    "Spread",
    "bandwidth_of",
    "bandwidth_readers",
    "benchmark_parser",
    "conclude",
    "interleave",
    "memory_use",
]


@dataclass(frozen=True)
class Machine:
    """Where the numbers come from."""

    cpu: str
    cores: int
    torch: str
    threads: int
    """Threads that torch computes with."""
    dtype: str
    """What the engine computes in here if nothing is said."""

    @classmethod
    def this(cls) -> Machine:
        named = [
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ]
        return cls(
            cpu=named[0] if named else platform.machine(),
            cores=len(os.sched_getaffinity(0)),
            torch=torch.__version__,
            threads=torch.get_num_threads(),
            dtype=dtype_name(compute_dtype("auto", torch.device("cpu"))),
        )


@dataclass(frozen=True)
class Spread:
    """A sample's middle and its edges, in milliseconds."""

    median_ms: float
    p10_ms: float
    p90_ms: float

    @classmethod
    def of(cls, samples_s: Sequence[float]) -> Spread:
        low, middle, high = np.percentile(np.array(samples_s) * 1e3, (10, 50, 90))
        return cls(median_ms=float(middle), p10_ms=float(low), p90_ms=float(high))


@dataclass(frozen=True)
class MemoryUse:
    """The process's resident memory."""

    anonymous_bytes: int
    """Its own."""
    file_bytes: int
    """Pages of mapped files: libraries, checkpoints. The system can take them back."""

    @property
    def total_bytes(self) -> int:
        return self.anonymous_bytes + self.file_bytes


@dataclass(frozen=True)
class Bandwidth:
    """How fast the machine reads memory that no cache holds."""

    method: str
    """The fastest of the methods tried."""
    bytes_per_s: float
    """Its median."""
    all_bytes_per_s: Mapping[str, float]
    """The median of each method."""


@dataclass(frozen=True)
class Goal:
    """A number that has to stay within a bound."""

    name: str
    measured: float
    low: float
    high: float

    @property
    def met(self) -> bool:
        return self.low <= self.measured <= self.high

    def __str__(self) -> str:
        bound = f"at most {self.high:g}"
        if self.high == float("inf"):
            bound = f"at least {self.low:g}"
        elif self.low > float("-inf"):
            bound = f"{self.low:g} to {self.high:g}"
        return (
            f"{'met   ' if self.met else 'MISSED'} {self.name}: {self.measured:.3f}, goal {bound}"
        )


def interleave(
    cases: Mapping[str, Callable[[], object]], rounds: int, *, seed: int = 0
) -> dict[str, list[float]]:
    """Run each case once a round, in a new order each time, after one round that is not counted.

    Whatever else the machine does then falls on all cases alike. Returns seconds per call.
    """
    order = list(cases)
    samples_s: dict[str, list[float]] = {name: [] for name in order}
    generator = random.Random(seed)
    for number in range(rounds + 1):
        generator.shuffle(order)
        for name in order:
            begun_s = time.perf_counter()
            cases[name]()
            if number:
                samples_s[name].append(time.perf_counter() - begun_s)
    return samples_s


def bandwidth_readers(size_bytes: int) -> dict[str, Callable[[], object]]:
    """Ways to read a buffer once with all of torch's threads, by name.

    Which of them is the fastest depends on the machine and on the build of torch.
    """
    numbers = torch.ones(size_bytes // 8, dtype=torch.int64)
    floats = numbers.view(torch.float32)
    width = 8192
    table = floats[: len(floats) // width * width].view(-1, width)
    ones = torch.ones(width)
    return {
        "sum int64": numbers.sum,
        "sum fp32": floats.sum,
        "sum fp32 by row": lambda: table.sum(1),
        "amax fp32": floats.amax,
        "dot fp32": lambda: torch.dot(floats, floats),
        "matrix times vector fp32": lambda: torch.mv(table, ones),
    }


def bandwidth_of(samples_s: Mapping[str, Sequence[float]], size_bytes: int) -> Bandwidth:
    """Medians of timed `bandwidth_readers` as bytes per second."""
    rates = {name: size_bytes / float(np.median(times)) for name, times in samples_s.items()}
    method = max(rates, key=rates.__getitem__)
    return Bandwidth(method=method, bytes_per_s=rates[method], all_bytes_per_s=rates)


def memory_use() -> MemoryUse:
    """This process's resident memory now."""
    sizes: dict[str, int] = {}
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name in ("RssAnon", "RssFile"):
            sizes[name] = int(value.split()[0]) * 1024
    return MemoryUse(anonymous_bytes=sizes["RssAnon"], file_bytes=sizes["RssFile"])


def benchmark_parser(description: str, *, quick: str) -> argparse.ArgumentParser:
    """With the options of every benchmark. quick: what `--quick` makes less of."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything there")
    parser.add_argument("--quick", action="store_true", help=f"{quick}, within a minute")
    parser.add_argument("--check", action="store_true", help="exit 1 when a goal is missed")
    return parser


def conclude(
    options: argparse.Namespace, report: object, goals: Sequence[Goal], show: Callable[[], None]
) -> int:
    """Write, print with `show`, and judge a report (a dataclass), as the options say.

    Prints every goal, the missed ones last. Returns the exit status.
    """
    if options.json is not None:
        _write_json(options.json, report, goals)
    show()
    for goal in sorted(goals, key=lambda goal: not goal.met):
        print(goal)
    return 1 if options.check and not all(goal.met for goal in goals) else 0


def _write_json(path: Path, report: object, goals: Sequence[Goal]) -> None:
    """Write a report (a dataclass) with its goals."""
    assert hasattr(report, "__dataclass_fields__")
    content = asdict(report)  # type: ignore[call-overload]
    content["goals"] = [{**asdict(goal), "met": goal.met} for goal in goals]
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
