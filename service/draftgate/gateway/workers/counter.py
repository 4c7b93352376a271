"""Where one worker asks for places: its side of the admission for all workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from draftgate.errors import DraftgateError, ErrorCode
from draftgate.gateway.admission import Admission, Ask
from draftgate.gateway.workers.messages import Admitted, Enter, Failure, Leave, Refused

__all__ = ["Counter"]

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Seat:
    """What became of one request."""

    used_tokens: asyncio.Future[int] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Done when the worker gives the place back."""
    admitted: bool = False
    task: asyncio.Task[None] | None = None


class Counter:
    """Each request holds its place in a task of its own, so that one place can be given back, or
    all of them, whatever state they are in."""

    def __init__(self, admission: Admission, send: Callable[[Admitted | Refused], None]) -> None:
        """`admission` is shared with other counters."""
        self._admission = admission
        self._send = send
        self._seats: dict[int, _Seat] = {}

    def enter(self, message: Enter) -> None:
        """Ask for a place; it is said when there is one, or why there is none."""
        seat = self._seats[message.seat] = _Seat()
        seat.task = asyncio.create_task(self._hold(message.seat, message.ask, seat))
        # Not at the end of `_hold`: one that is cancelled at once never begins.
        seat.task.add_done_callback(lambda _: self._seats.pop(message.seat, None))

    def leave(self, message: Leave) -> None:
        """Give a place back, or wait for one no more. Without effect for one that was refused while
        this was on its way."""
        seat = self._seats.pop(message.seat, None)
        if seat is None:
            return
        if seat.admitted:
            seat.used_tokens.set_result(message.used_tokens)
        elif seat.task is not None:
            seat.task.cancel()

    def close(self) -> None:
        """The worker is gone: give all of its places back. What its generations used beyond their
        prompts is not known, and not charged."""
        for seat in self._seats.values():
            if seat.task is not None:
                seat.task.cancel()

    async def _hold(self, number: int, ask: Ask, seat: _Seat) -> None:
        try:
            async with self._admission.admitted(ask) as place:
                seat.admitted = True
                self._send(Admitted(number, place.waited_s))
                place.used_tokens = await seat.used_tokens
        except DraftgateError as error:
            self._send(Refused(number, Failure.of(error)))
        except Exception:  # noqa: BLE001 - logged with its traceback
            # Not foreseen, but a request that got no answer would wait for ever.
            _log.exception("giving a place failed")
            failure = Failure(ErrorCode.INTERNAL, "internal error")
            self._send(Refused(number, failure))
