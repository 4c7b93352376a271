"""The life of `draftgate serve`: prepare, start Triton, start the gateway, warm up, stay, drain.

Whatever happens, and whenever, the end is the same: `_Service.shut_down` runs, and afterwards no
process and no temporary file of it is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from draftgate._pb.draftgate.v1.generation_pb2 import GenerateRequest
from draftgate._pb.draftgate.v1.model_pb2 import Model
from draftgate.cli.answer import Answer
from draftgate.cli.client import GatewayClient
from draftgate.cli.heap import freeze_heap
from draftgate.cli.options import DEFAULT_SERVER
from draftgate.cli.preparation import Preparation
from draftgate.cli.reloading import Reloading
from draftgate.cli.render import Renderer, say
from draftgate.cli.stop import Stop
from draftgate.config import Settings, gateway_config
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.gateway.listen import check_listen
from draftgate.gateway.local import LocalClient
from draftgate.gateway.server import Gateway
from draftgate.upstream.tritonserver import ServerState, TritonServer, TritonServerConfig

__all__ = ["ServeConfig", "run_until_stopped"]

_STOPPED = 0
_INTERRUPTED = 130
"""Also for SIGTERM: the service was asked to stop before it was one."""

_WARM_UP_PROMPT = "Why is the sky blue?"
_WARM_UP_TOKENS = 32
_WARM_UP_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class ServeConfig:
    """What to serve, and where."""

    settings: Settings
    """Of the gateway, and of the service's end."""
    model_repository: Path
    """Triton's models."""
    model_dir: Path
    """The checkpoint folder."""
    source: Path | None
    """What to prepare the checkpoint from; None serves `model_dir` as it is."""
    engine_settings: Mapping[str, object]
    """Settings of the engine that differ from its defaults."""
    triton_port: int | None
    """Triton's port on loopback; None takes a free one."""
    reread: Callable[[], Settings] | None = None
    """The settings as their sources are now, for SIGHUP."""


async def run_until_stopped(config: ServeConfig) -> int:
    """Serve until SIGINT or SIGTERM, or SIGHUP if that does not reload; returns the exit code.

    Raises DraftgateError when the service cannot start, or when Triton is lost for good.
    """
    stop = Stop()
    service = _Service(config, stop)
    with stop.on_signals(), service.reloading.on_signal():
        job = asyncio.create_task(service.run())
        requested = asyncio.create_task(stop.requested.wait())
        try:
            await asyncio.wait({job, requested}, return_when=asyncio.FIRST_COMPLETED)
            if job.done():
                job.result()
            say("stopping; once more ends everything at once")
            job.cancel()
            await asyncio.wait({job})
        finally:
            requested.cancel()
            await service.shut_down()
    return _STOPPED if service.ready else _INTERRUPTED


class _Service:
    """The parts, in the order in which they start."""

    def __init__(self, config: ServeConfig, stop: Stop) -> None:
        self._config = config
        self._stop = stop
        self._triton: TritonServer | None = None
        self._gateway: Gateway | None = None
        self.reloading = Reloading(config.settings, config.reread)
        self.ready = False

    async def run(self) -> NoReturn:
        """Start every part, show that they work together, and stay.

        Raises DraftgateError if a part cannot start, or nobody restarts Triton any more.
        """
        config = self._config
        began_s = time.monotonic()
        security = config.settings.security
        for listen in filter(None, (config.settings.listen, config.settings.admin_listen)):
            check_listen(listen, secured=bool(security.tls) or security.insecure)
        if config.source is not None:
            await Preparation(config.source, config.model_dir).run(self._stop.forced)
        say(f"starting Triton with {config.model_dir.name}")
        self._triton = TritonServer(
            TritonServerConfig(
                config.model_repository,
                config.model_dir,
                config.engine_settings,
                grpc_port=config.triton_port,
            )
        )
        await self._start_triton(self._triton)
        lost = asyncio.create_task(self._triton.wait_for(ServerState.FAILED))
        serving = asyncio.create_task(self._serve(self._triton, began_s))
        try:
            await asyncio.wait({serving, lost}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
                await lost
        finally:
            lost.cancel()
            serving.cancel()
            await asyncio.wait({lost, serving})
        raise DraftgateError(
            ErrorCode.UNAVAILABLE, f"Triton is not kept running any more: {self._triton.last_error}"
        )

    async def _serve(self, triton: TritonServer, began_s: float) -> None:
        """Start the gateway and show that everything works together."""
        config = self._config
        gateway = Gateway(
            gateway_config(
                config.settings,
                triton_target=triton.grpc_target,
                model_name=config.settings.model_name or config.model_dir.resolve().name,
                tokenizer_dir=config.model_dir,
            )
        )
        await gateway.start()
        self._gateway = self.reloading.gateway = gateway
        if config.settings.security.tls or config.settings.security.tenants_file:
            model = await _first_answer(gateway.local)
        else:
            async with GatewayClient(gateway.address) as client:
                model = await _first_answer(client)
        self.ready = True
        freeze_heap()
        _announce(model, gateway, triton.grpc_target, time.monotonic() - began_s)

    async def shut_down(self) -> None:
        """Stop every part that was started: running streams may finish first, unless forced."""
        if self._gateway is not None:
            await self._stop.run(self._gateway.drain(self._config.settings.grace_s))
        if self._triton is not None:
            stopping = asyncio.create_task(self._triton.stop())
            await self._until_done_or_killed(stopping, self._triton)

    async def _start_triton(self, triton: TritonServer) -> None:
        starting = asyncio.create_task(triton.start())
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            # A start that is cancelled stops the server again, which takes its time.
            starting.cancel()
            await self._until_done_or_killed(starting, triton)
            raise

    async def _until_done_or_killed(self, ending: asyncio.Task[None], triton: TritonServer) -> None:
        """Wait for the end of `ending`, in which Triton stops; kill Triton once that is forced."""
        forced = asyncio.create_task(self._stop.forced.wait())
        await asyncio.wait({ending, forced}, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done() and triton.process_group is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(triton.process_group, signal.SIGKILL)
        forced.cancel()
        await asyncio.wait({ending})
        if not ending.cancelled():
            ending.result()


async def _first_answer(client: GatewayClient | LocalClient) -> Model:
    """Wait until the service serves, and show that it does; what it serves."""
    await client.serving(timeout_s=_WARM_UP_TIMEOUT_S)
    model = await client.model(timeout_s=_WARM_UP_TIMEOUT_S)
    await _warm_up(client, model)
    return model


async def _warm_up(client: GatewayClient | LocalClient, model: Model) -> None:
    """Stream one short answer to the terminal, the way that any client gets it."""
    request = GenerateRequest(max_tokens=_WARM_UP_TOKENS, return_token_text=True)
    request.sampling.temperature = 0.0
    if model.has_chat_template:
        request.messages.add(role="user", content=_WARM_UP_PROMPT)
    else:
        request.prompt = _WARM_UP_PROMPT
    say(f"warming up: {_WARM_UP_PROMPT}")
    answer = Answer(Renderer(sys.stdout, show_speculation=True))
    await answer.follow(client.generate(request, timeout_s=_WARM_UP_TIMEOUT_S))
    say(answer.summary())


def _announce(model: Model, gateway: Gateway, triton_target: str, took_s: float) -> None:
    drafter = f"drafter {model.drafter}, up to {model.max_draft_len} a step"
    say(
        f"ready in {took_s:.1f} s: {model.name} ({model.quantization or 'not quantised'}, "
        f"{model.compute_dtype}; {drafter if model.drafter else 'no drafter'})"
    )
    say(f"gateway on {gateway.address}, Triton on {triton_target}")
    if gateway.admin_address:
        say(f"operators on {gateway.admin_address}")
    server = "" if gateway.address == DEFAULT_SERVER else f" --server {gateway.address}"
    say(f'try: {_own_command()} generate "Tell me a story." --show-speculation{server}')
    say("Ctrl-C stops")


def _own_command() -> str:
    """How the user can call this program again."""
    program = Path(sys.argv[0])
    if program.name != "draftgate":
        return f"{shlex.quote(sys.executable)} -m draftgate.cli"
    return shlex.quote(
        os.path.relpath(program) if program.is_relative_to(Path.cwd()) else str(program)
    )
