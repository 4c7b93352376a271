"""One run of tritonserver, under a guardian that leaves nothing of it behind."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from draftgate.errors import DraftgateError, ErrorCode
from draftgate.upstream import guardian
from draftgate.upstream.triton_install import Installation, lay_out, server_environment
from draftgate.upstream.triton_log import SERVING_LINE, TritonLog

__all__ = ["HealthLimits", "TritonProcess"]

_CHANNEL_OPTIONS = (("grpc.enable_http_proxy", 0),)
_PROBE_INTERVAL_S = 0.05
_PROBE_TIMEOUT_S = 10.0

_GUARDIAN_MARGIN_S = 15.0
"""What the guardian may need beyond the grace: killed processes may take 10 s to disappear."""


@dataclass(frozen=True)
class HealthLimits:
    """When a server that runs counts as hung."""

    interval_s: float = 5.0
    """The pause before each health check."""
    timeout_s: float = 5.0
    """How long the answer to one may take."""
    misses: int = 3
    """How many in a row have to fail."""


class TritonProcess:
    """A started tritonserver. Whoever starts one must `end` it."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        *,
        grace_s: float,
        shm_prefix: str,
        state_dir: Path,
    ) -> None:
        self._process = process
        self._grace_s = grace_s
        self._shm_prefix = shm_prefix
        self._state_dir = state_dir
        self._log = TritonLog()
        self._serving = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls,
        installation: Installation,
        flags: Sequence[str],
        environment: Mapping[str, str],
        *,
        grace_s: float,
    ) -> TritonProcess:
        """Start the server with `flags` and the variables of `environment` added to this process's.

        `grace_s` is how long it may take to end after SIGTERM.
        Raises DraftgateError(FAILED_PRECONDITION) if it cannot be started at all.
        """
        # Names this run's shared memory, and nobody else's.
        shm_prefix = f"draftgate-{uuid.uuid4().hex[:12]}-"
        state_dir: Path | None = None
        try:
            state_dir = Path(tempfile.mkdtemp(prefix="draftgate-triton-"))
            lay_out(installation, state_dir)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", guardian.__file__),
                *(str(grace_s), shm_prefix, str(state_dir)),
                str(installation.server),
                f"--backend-directory={state_dir / 'backends'}",
                f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
                *flags,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={**server_environment(installation, state_dir), **environment},
                # Out of the terminal's reach: Ctrl-C is for the parent, which stops the server.
                start_new_session=True,
            )
        except OSError as error:
            if state_dir is not None:
                shutil.rmtree(state_dir, ignore_errors=True)
            raise DraftgateError(
                ErrorCode.FAILED_PRECONDITION,
                f"cannot start tritonserver: {error.strerror}: {error.filename}",
            ) from error
        return cls(process, grace_s=grace_s, shm_prefix=shm_prefix, state_dir=state_dir)

    @property
    def log_lines(self) -> tuple[str, ...]:
        """The last lines that the server wrote."""
        return self._log.lines

    @property
    def pid(self) -> int:
        """The guardian's process id, which is also the process group of everything in this run."""
        return self._process.pid

    async def ready(self, target: str, timeout_s: float) -> None:
        """Wait until all models are loaded and the server at `target` says that it is ready.

        Raises DraftgateError: what the log says if the server ends first, DEADLINE_EXCEEDED if
        `timeout_s` passes.
        """
        if not await self._before_it_ends(self._serves(target), timeout_s):
            raise DraftgateError(
                ErrorCode.DEADLINE_EXCEEDED,
                f"tritonserver was not ready after {timeout_s:g} s; its last line: "
                + next((line for line in reversed(self._log.lines) if line.strip()), "none"),
            )

    async def watch(self, target: str, health: HealthLimits) -> DraftgateError:
        """Wait until the server, which was ready, has ended by itself or hangs; why, in one line.
        One that hangs is still to be ended."""
        try:
            await self._before_it_ends(self._hangs(target, health), timeout_s=None)
        except DraftgateError as error:
            return error
        return DraftgateError(
            ErrorCode.UNAVAILABLE,
            f"tritonserver hangs: {health.misses} health checks in a row failed",
        )

    async def end(self) -> None:
        """Let requests in flight finish within the grace, then leave no process and no shared
        memory. Does nothing if the server has ended."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(self._grace_s + _GUARDIAN_MARGIN_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
        await self._ended()

    async def _ended(self) -> int:
        """Wait for the end of the guardian; its exit status."""
        status = await self._process.wait()
        if status < 0:
            # The guardian itself was killed, so what it is for is left to do.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            guardian.remove_files(self._shm_prefix, str(self._state_dir))
        await asyncio.wait({self._reading})
        return status

    async def _read(self) -> None:
        assert self._process.stdout is not None
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while piece := await self._process.stdout.read(65536):
            for line in self._log.feed(decoder.decode(piece)):
                if SERVING_LINE in line:
                    self._serving.set()

    async def _before_it_ends(
        self, work: Coroutine[None, None, None], timeout_s: float | None
    ) -> bool:
        """Whether `work` was done within `timeout_s`; raises what it raised, and DraftgateError,
        what the log says, if the server ends first."""
        working = asyncio.create_task(work)
        ending = asyncio.create_task(self._process.wait())
        try:
            done, _ = await asyncio.wait(
                {working, ending}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for task in (working, ending):
                task.cancel()
            await asyncio.wait({working, ending})
        if ending in done:
            raise self._log.failure(exit_status=await self._ended())
        if working in done:
            working.result()
        return working in done

    async def _serves(self, target: str) -> None:
        """Wait until the server says that it serves."""
        # Not before the log says so: until then, whatever answers there is another server.
        await self._serving.wait()
        async with _health_stub(target) as stub:
            while not await _says_serving(stub, _PROBE_TIMEOUT_S):  # noqa: ASYNC110 - another process
                await asyncio.sleep(_PROBE_INTERVAL_S)

    async def _hangs(self, target: str, health: HealthLimits) -> None:
        """Wait until the server failed so many health checks in a row."""
        misses = 0
        async with _health_stub(target) as stub:
            while misses < health.misses:
                await asyncio.sleep(health.interval_s)
                misses = 0 if await _says_serving(stub, health.timeout_s) else misses + 1


@asynccontextmanager
async def _health_stub(target: str) -> AsyncIterator[HealthStub]:
    async with grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS) as channel:
        yield HealthStub(channel)


async def _says_serving(stub: HealthStub, timeout_s: float) -> bool:
    try:
        answer = await stub.Check(HealthCheckRequest(), timeout=timeout_s)
    except grpc.aio.AioRpcError:
        # Whatever the status: it did not say so.
        return False
    return bool(answer.status == HealthCheckResponse.SERVING)
