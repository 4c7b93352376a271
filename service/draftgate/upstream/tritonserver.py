"""A supervised tritonserver: started, kept running, and stopped without a trace."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from draftgate.backend.environment import ENGINE_SETTINGS, MODEL_DIR
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.upstream.triton_install import Installation, find_installation
from draftgate.upstream.triton_process import HealthLimits, TritonProcess

__all__ = ["ServerState", "TritonServer", "TritonServerConfig"]

_LOG = logging.getLogger(__name__)

_HOST = "127.0.0.1"

_EXIT_MARGIN_S = 5.0
"""What tritonserver needs beyond its exit timeout to unload the models and end."""


@dataclass(frozen=True)
class TritonServerConfig:
    """What to serve, and how patiently."""

    model_repository: Path
    """The folder with Triton's models."""
    model_dir: Path
    """The checkpoint folder, handed to the models as DRAFTGATE_MODEL_DIR."""
    engine_settings: Mapping[str, Any] = field(default_factory=dict)
    """The engine's settings, handed to it as JSON in DRAFTGATE_ENGINE; none takes its defaults."""
    grpc_port: int | None = None
    """The loopback port to listen on; None takes a free one."""
    start_timeout_s: float = 300.0
    """How long a start may take, loading the models included."""
    exit_timeout_s: int = 10
    """How long requests in flight may run on when the server is stopped."""
    health: HealthLimits = field(default_factory=HealthLimits)
    """When a server that does not die counts as hung, and is restarted."""
    min_backoff_s: float = 0.5
    """The pause before the first restart; it doubles with every failure in a row."""
    max_backoff_s: float = 30.0
    """The longest pause before a restart."""
    stable_s: float = 60.0
    """A server that stayed ready this long starts from `min_backoff_s` again when it dies."""


class ServerState(StrEnum):
    """Where a `TritonServer` stands."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    """It died or hung and is being started again, or waits for the next try."""
    STOPPING = "stopping"
    FAILED = "failed"
    """It did not start, or is not kept running any more."""


class TritonServer:
    """Runs tritonserver; restarts it when it hangs or when it or the process of a model dies.

    Use it from one event loop. After `stop` it may be started again.
    """

    def __init__(self, config: TritonServerConfig) -> None:
        self._config = config
        self._state = ServerState.STOPPED
        # Set and replaced at every change of state.
        self._changed = asyncio.Event()
        self._port = config.grpc_port
        self._supervision: asyncio.Task[None] | None = None
        self._process: TritonProcess | None = None
        self._last_error: DraftgateError | None = None
        self._restarts = 0

    @property
    def grpc_target(self) -> str:
        """Where its gRPC service listens, also after a restart. Known once `start` was called."""
        if self._port is None:
            raise RuntimeError("start the server first")
        return f"{_HOST}:{self._port}"

    @property
    def state(self) -> ServerState:
        return self._state

    @property
    def last_error(self) -> DraftgateError | None:
        """Why it last failed to start, died or hung."""
        return self._last_error

    @property
    def restarts(self) -> int:
        """How often it was restarted successfully."""
        return self._restarts

    @property
    def process_group(self) -> int | None:
        """The process group of all processes of the current or latest run."""
        return None if self._process is None else self._process.pid

    @property
    def log_lines(self) -> tuple[str, ...]:
        """The last lines that the current or latest run wrote."""
        return () if self._process is None else self._process.log_lines

    async def wait_for(self, *states: ServerState) -> ServerState:
        """Wait until it is in one of these states; which one. A state that it is in for a moment
        only may be missed."""
        while self._state not in states:
            await self._changed.wait()
        return self._state

    async def start(self) -> None:
        """Start the server and return when all models are ready; from then on it is kept running.

        Raises DraftgateError with one clear line if it cannot start, and leaves nothing behind:
        FAILED_PRECONDITION for a missing part or a port in use, DEADLINE_EXCEEDED after
        `start_timeout_s`, the model's own error if one does not load, else UNAVAILABLE.
        CANCELLED if `stop` was called meanwhile.
        """
        if self._supervision is not None:
            raise RuntimeError("the server was started already")
        self._enter(ServerState.STARTING)
        self._last_error = None
        self._supervision = asyncio.create_task(self._supervise())
        try:
            state = await self.wait_for(ServerState.READY, ServerState.FAILED, ServerState.STOPPED)
        except asyncio.CancelledError:
            await self.stop()
            raise
        if state is ServerState.FAILED:
            self._supervision = None
            assert self._last_error is not None
            raise self._last_error
        if state is ServerState.STOPPED:
            raise DraftgateError(ErrorCode.CANCELLED, "the server was stopped while it started")

    async def stop(self) -> None:
        """Stop the server, whatever it is doing, and return when nothing of it is left: no process
        and no shared memory. Requests in flight may finish within `exit_timeout_s`."""
        supervision, self._supervision = self._supervision, None
        if supervision is None or self._state is ServerState.FAILED:
            if self._state is ServerState.STOPPING:
                await self.wait_for(ServerState.STOPPED)
            return
        self._enter(ServerState.STOPPING)
        supervision.cancel()
        await asyncio.wait({supervision})
        if not supervision.cancelled():
            supervision.result()

    async def _supervise(self) -> None:
        """Start it, keep it running until cancelled, and leave nothing behind."""
        outcome = ServerState.FAILED
        try:
            installation = await asyncio.to_thread(find_installation)
            self._choose_port()
            await self._launch(installation)
            self._enter(ServerState.READY)
            await self._keep_running(installation)
        except asyncio.CancelledError:
            outcome = ServerState.STOPPED
            raise
        except DraftgateError as error:
            self._last_error = error
        except Exception as error:  # noqa: BLE001 - logged with its traceback, told by the state
            _LOG.exception("keeping tritonserver running failed")
            self._last_error = _unforeseen(error)
        finally:
            try:
                if self._process is not None:
                    await self._process.end()
            finally:
                self._enter(outcome)

    async def _keep_running(self, installation: Installation) -> None:
        failures = 0
        while True:
            ready_since = time.monotonic()
            assert self._process is not None
            self._last_error = await self._process.watch(self.grpc_target, self._config.health)
            _LOG.error("restarting tritonserver: %s", self._last_error)
            self._enter(ServerState.RESTARTING)
            if time.monotonic() - ready_since >= self._config.stable_s:
                failures = 0
            # Dead or not: it may hang.
            await self._process.end()
            while not await self._relaunch(installation, failures):
                failures += 1
            failures += 1
            self._restarts += 1
            self._enter(ServerState.READY)

    async def _relaunch(self, installation: Installation, failures: int) -> bool:
        # The exponent is bounded so that the power stays a number.
        pause_s = self._config.min_backoff_s * 2.0 ** min(failures, 32)
        await asyncio.sleep(min(pause_s, self._config.max_backoff_s))
        try:
            await self._launch(installation)
        except DraftgateError as error:
            self._last_error = error
            _LOG.error("tritonserver did not start again: %s", error)
            return False
        except Exception as error:  # noqa: BLE001 - logged with its traceback
            # Not foreseen, but the next try may go well, and nobody else would make it.
            self._last_error = _unforeseen(error)
            _LOG.exception("tritonserver did not start again")
            return False
        _LOG.warning("tritonserver was started again")
        return True

    async def _launch(self, installation: Installation) -> None:
        """Start one run and wait until it is ready; ends it if it does not get there."""
        starting = asyncio.create_task(
            TritonProcess.start(
                installation,
                self._flags(),
                self._environment(),
                grace_s=self._config.exit_timeout_s + _EXIT_MARGIN_S,
            )
        )
        try:
            self._process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # A process that is half started could not be ended.
            self._process = await starting
            raise
        try:
            await self._process.ready(self.grpc_target, self._config.start_timeout_s)
        except Exception:
            await self._process.end()
            raise

    def _flags(self) -> list[str]:
        return [
            f"--model-repository={self._config.model_repository.absolute()}",
            f"--grpc-address={_HOST}",
            f"--grpc-port={self._port}",
            "--allow-http=false",
            "--allow-metrics=false",
            "--disable-auto-complete-config",
            # Pinned memory is for copies to a GPU, which the models do themselves.
            "--pinned-memory-pool-byte-size=0",
            f"--exit-timeout-secs={self._config.exit_timeout_s}",
            f"--backend-config=python,stub-timeout-seconds={round(self._config.start_timeout_s)}",
        ]

    def _environment(self) -> dict[str, str]:
        environment = {MODEL_DIR: str(self._config.model_dir.absolute())}
        if self._config.engine_settings:
            environment[ENGINE_SETTINGS] = json.dumps(dict(self._config.engine_settings))
        return environment

    def _choose_port(self) -> None:
        """Raises DraftgateError(FAILED_PRECONDITION) if the configured port is in use, which
        tritonserver itself would notice only after it has loaded the models."""
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((_HOST, self._config.grpc_port or 0))
            except OSError as error:
                raise DraftgateError(
                    ErrorCode.FAILED_PRECONDITION,
                    f"cannot listen on {_HOST}:{self._config.grpc_port}: {error.strerror}",
                ) from error
            self._port = probe.getsockname()[1]

    def _enter(self, state: ServerState) -> None:
        self._state = state
        self._changed.set()
        self._changed = asyncio.Event()


def _unforeseen(error: Exception) -> DraftgateError:
    return DraftgateError(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")
