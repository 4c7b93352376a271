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
from collections.abc import Mapping, Sequence
from pathlib import Path

import grpc.aio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from draftgate.errors import DraftgateError, ErrorCode
from draftgate.upstream import guardian
from draftgate.upstream.triton_install import Installation, lay_out, server_environment
from draftgate.upstream.triton_log import SERVING_LINE, TritonLog

__all__ = ["TritonProcess"]

_CHANNEL_OPTIONS = (("grpc.enable_http_proxy", 0),)
_PROBE_INTERVAL_S = 0.05
_PROBE_TIMEOUT_S = 10.0

_GUARDIAN_MARGIN_S = 15.0
"""What the guardian may need beyond the grace: killed processes may take 10 s to disappear."""


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
        probing = asyncio.create_task(self._probe(target))
        ending = asyncio.create_task(self._process.wait())
        try:
            done, _ = await asyncio.wait(
                {probing, ending}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for task in (probing, ending):
                task.cancel()
            await asyncio.wait({probing, ending})
        if ending in done:
            raise await self.failure()
        if probing not in done:
            raise DraftgateError(
                ErrorCode.DEADLINE_EXCEEDED,
                f"tritonserver was not ready after {timeout_s:g} s; its last line: "
                + next((line for line in reversed(self._log.lines) if line.strip()), "none"),
            )
        probing.result()

    async def failure(self) -> DraftgateError:
        """Wait until the server has ended by itself; why it did."""
        return self._log.failure(exit_status=await self._ended())

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

    async def _probe(self, target: str) -> None:
        # Not before the log says so: until then, whatever answers there is another server.
        await self._serving.wait()
        async with grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS) as channel:
            stub = HealthStub(channel)
            while True:
                try:
                    answer = await stub.Check(HealthCheckRequest(), timeout=_PROBE_TIMEOUT_S)
                    if answer.status == HealthCheckResponse.SERVING:
                        return
                except grpc.aio.AioRpcError as error:
                    if error.code() not in (
                        grpc.StatusCode.UNAVAILABLE,
                        grpc.StatusCode.DEADLINE_EXCEEDED,
                    ):
                        raise
                await asyncio.sleep(_PROBE_INTERVAL_S)
