"""Several processes that serve on one port: `Fleet` starts and keeps them, `run_worker` is one.

What may run is decided in the process of the `Fleet`, for all of them together.
"""

from __future__ import annotations

from draftgate.gateway.workers.fleet import Fleet, FleetLimits
from draftgate.gateway.workers.messages import Begin
from draftgate.gateway.workers.worker import run_worker

__all__ = ["Begin", "Fleet", "FleetLimits", "run_worker"]
