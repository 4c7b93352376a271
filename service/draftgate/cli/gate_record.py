"""`draftgate gate record`: what becomes of a server's steps, one JSON line each."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, TextIO

import typer

from draftgate._pb.draftgate.v1 import gate_pb2
from draftgate._pb.draftgate.v1.model_pb2 import Model
from draftgate.cli import options
from draftgate.cli.client import GatewayClient
from draftgate.cli.gate_words import reason_name
from draftgate.cli.render import print_note, writing
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.speculation.record import STEPS_FORMAT

__all__ = ["record"]

_INTERVAL_MS = 200
_CONNECT_TIMEOUT_S = 10.0


def record(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write.", show_default=False)],
    server: options.Server = options.DEFAULT_SERVER,
    steps: Annotated[int | None, typer.Option(min=1, help="End after so many.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.001, help="End after so long.")] = None,
) -> None:
    """Write down every step from now on: load, draft length, reason, acceptance, times.

    JSON lines: a header, then one line a step, and {"lost": N} where N steps could not be read in
    time. No text and no tokens. Ctrl-C ends it.
    """
    recording = _Recording(out, steps)
    try:
        asyncio.run(recording.follow(server, seconds))
    except KeyboardInterrupt:
        if not recording.begun:
            raise
    finally:
        if recording.begun:
            print_note(recording.summary())


class _Recording:
    """One file in the making."""

    def __init__(self, path: Path, most: int | None) -> None:
        self._path = path
        self._most = most
        self._began_s = 0.0
        self._lost = self._written = 0
        self.begun = False

    async def follow(self, server: str, seconds: float | None) -> None:
        """Record until there are enough steps, or for so long."""
        async with GatewayClient(server) as client:
            model = await client.model(timeout_s=_CONNECT_TIMEOUT_S)
            async with aclosing(client.watch_steps(interval_ms=_INTERVAL_MS)) as batches:
                await anext(batches)  # it says from when on
                with self._open() as file:
                    self._write(file, [_header(model)])
                    self.begun, self._began_s = True, time.monotonic()
                    print_note(f"Recording to {self._path}; Ctrl-C ends it.")
                    try:
                        async with asyncio.timeout(seconds):
                            async for batch in batches:
                                if self._take(file, batch):
                                    return
                    except TimeoutError:
                        return

    def summary(self) -> str:
        took_s = time.monotonic() - self._began_s
        steps = "step" if self._written == 1 else "steps"
        return f"{self._written} {steps} in {took_s:.1f} s, {self._lost} lost: {self._path}"

    def _open(self) -> TextIO:
        try:
            return self._path.open("w", encoding="utf-8")
        except OSError as error:
            raise DraftgateError(
                ErrorCode.FAILED_PRECONDITION, f"cannot write {self._path}: {error.strerror}"
            ) from error

    def _take(self, file: TextIO, batch: gate_pb2.WatchStepsResponse) -> bool:
        """Write a batch; whether there are enough steps now."""
        left = None if self._most is None else self._most - self._written
        steps = batch.steps[:left]
        lines = [_line(step) for step in steps]
        self._write(file, [{"lost": batch.lost}, *lines] if batch.lost else lines)
        self._lost += batch.lost
        self._written += len(steps)
        return self._written == self._most

    def _write(self, file: TextIO, lines: list[dict[str, object]]) -> None:
        with writing(file, str(self._path)):
            file.write("".join(json.dumps(line) + "\n" for line in lines))
            file.flush()


def _header(model: Model) -> dict[str, object]:
    return {
        "format": STEPS_FORMAT,
        "model": model.name,
        "quantization": model.quantization,
        "compute_dtype": model.compute_dtype,
        "drafter": model.drafter,
        "max_draft_len": model.max_draft_len,
        "max_batch_rows": model.max_batch_rows,
        "recorded_at_s": round(time.time(), 3),
    }


def _line(step: gate_pb2.GateStep) -> dict[str, object]:
    return {
        "step": step.step,
        "time_s": round(step.time_s, 6),
        "rows": step.rows,
        "prefill_tokens": step.prefill_tokens,
        "kv_tokens": step.kv_tokens,
        "draft_len": step.draft_len,
        "reason": reason_name(step.reason),
        "drafted": step.drafted_tokens,
        "accepted": step.accepted_tokens,
        "outcomes": [
            [each.draft_source, each.drafted_tokens, each.accepted_tokens] for each in step.outcomes
        ],
        "expected_ms": round(step.expected_ms, 4) if step.HasField("expected_ms") else None,
        "measured_ms": round(step.measured_ms, 4),
    }
