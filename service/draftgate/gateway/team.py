"""The gateways that share the work with this one."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from draftgate.gateway.admission import AdmissionConfig, Ask, Capacity, Place
from draftgate.gateway.orders import Order

__all__ = ["Admits", "Team"]


class Admits(Protocol):
    """Who gives places to generations: `Admission`, here or in another process."""

    def admitted(self, ask: Ask) -> AbstractAsyncContextManager[Place]:
        """See `Admission.admitted`."""

    def set_capacity(self, capacity: Capacity) -> None:
        """See `Admission.set_capacity`."""

    def configure(self, config: AdmissionConfig) -> None:
        """See `Admission.configure`."""

    def close(self) -> None:
        """See `Admission.close`."""


class Team(Protocol):
    """What a gateway that is one of several has in common with the others."""

    @property
    def admission(self) -> Admits:
        """Of all of them together."""

    async def tell(self, order: Order) -> int:
        """Have every one of them, this one too, carry out an order.

        Returns how many generations run on all of them. Raises DraftgateError of the first that
        could not.
        """
