"""Who asks for places, and holds them."""

from __future__ import annotations

import asyncio

from draftgate.gateway.admission import Admission, AdmissionConfig, Ask, Capacity, Priority
from draftgate.gateway.team import Admits
from draftgate.gateway.tenant import ANONYMOUS, Tenant

__all__ = ["Holder", "admission", "ask"]


def ask(tenant: Tenant = ANONYMOUS, request_id: str = "") -> Ask:
    return Ask(tenant, Priority.INTERACTIVE, 10, "prompt", 90, request_id=request_id)


def admission(rows: int, **config: float) -> Admission:
    made = Admission(AdmissionConfig(**config))  # type: ignore[arg-type]
    made.set_capacity(Capacity(rows))
    return made


class Holder:
    """Holds a place until told to leave."""

    def __init__(self, where: Admits, given: Ask | None = None, used: int = 0) -> None:
        self.inside = asyncio.Event()
        self.leave = asyncio.Event()
        self.task = asyncio.create_task(self._hold(where, given or ask(), used))

    async def _hold(self, where: Admits, given: Ask, used: int) -> float:
        async with where.admitted(given) as place:
            self.inside.set()
            await self.leave.wait()
            place.used_tokens = used
            return place.waited_s

    async def goes(self) -> float:
        """Leave; how long it had waited."""
        self.leave.set()
        return await self.task

    async def is_cancelled(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})
