"""What this process holds for callers: tasks, file descriptors, and objects of ours.

Taken before and after, it says what a caller left behind, to the byte as far as Python goes: a
prompt, a chunk or a buffer is held by an object of ours that is counted here.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace

__all__ = ["Holdings", "at_rest", "settled"]

_OURS = "draftgate."
_FEW = 4
"""As many may be more of a class, or of descriptors: gRPC keeps hold of the call that failed last,
and wakes its threads through descriptors of its own."""


@dataclass(frozen=True)
class Holdings:
    """How many of each."""

    tasks: Counter[str]
    """Of this event loop, by their coroutine."""
    descriptors: int
    objects: Counter[str] = field(default_factory=Counter)
    """By their class."""

    @classmethod
    def now(cls) -> Holdings:
        """Looks at every object there is, which holds up the event loop."""
        gc.collect()
        objects = Counter(
            f"{kind.__module__}.{kind.__qualname__}"
            for kind in map(type, gc.get_objects())
            if str(kind.__module__).startswith(_OURS)
        )
        return replace(cls.at_work(), objects=objects)

    @classmethod
    def at_work(cls) -> Holdings:
        """Without objects."""
        tasks = Counter(_name(task.get_coro()) for task in asyncio.all_tasks())
        return cls(tasks, len(os.listdir("/proc/self/fd")))

    def beyond(self, before: Holdings, allowed: Collection[str] = ()) -> dict[str, int]:
        """What there is more of than before, and how much more."""
        more = dict(self.tasks - before.tasks)
        objects = self.objects - before.objects
        more |= {name: count for name, count in objects.items() if count > _FEW}
        if self.descriptors > before.descriptors + _FEW:
            more["file descriptors"] = self.descriptors - before.descriptors
        return {
            name: count for name, count in more.items() if name.rpartition(".")[2] not in allowed
        }


async def at_rest() -> Holdings:
    """What is held once that changes no more: what a call held goes a little after its end."""
    found = Holdings.now()
    async with asyncio.timeout(30):
        while True:
            await asyncio.sleep(0.3)
            before, found = found, Holdings.now()
            if found == before:
                return found


async def settled(before: Holdings, *allowed: str, within_s: float = 30.0) -> None:
    """Wait until nothing is held beyond what was held before, but for what has these names, the
    last parts of them. Fails with what still is."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + within_s
    # Objects are looked at when all else is over: doing it again and again would delay that.
    while more := (
        Holdings.at_work().beyond(before, allowed) or Holdings.now().beyond(before, allowed)
    ):
        assert loop.time() < end_s, f"left after {within_s:g} s: {more}"
        await asyncio.sleep(0.1)


def _name(coroutine: object) -> str:
    return str(getattr(coroutine, "__qualname__", coroutine))
