"""Real tritonservers with a tiny model, and streams through a gateway while they suffer."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from draftgate._pb.draftgate.v1 import admin_pb2
from draftgate._pb.draftgate.v1 import generation_pb2 as pb
from draftgate.gateway import Gateway
from draftgate.text import Tokenizer
from draftgate.upstream.replica import ReplicaLimits
from draftgate.upstream.replicas import ReplicaSetConfig
from draftgate.upstream.tritonserver import TritonServer, TritonServerConfig
from tests.support.gateway import Client, Outcome, connected, running_gateway
from tests.support.processes import processes_of_group
from tests.support.spoken import write_spoken_model

REPOSITORY = Path(__file__).parents[2] / "model_repository"
STALL_S = 3.0

_ENGINE = {
    "dtype": "float32",
    "threads": 1,
    "kv_cache_bytes": 64 << 20,
    "max_batch_rows": 64,
    "gate": "fixed",
    "draft_len": 2,
}
_PROMPTS = ["Why is the sky blue?", "Grüße, 你好", "one two three one two three one two", "x = [1,"]


@dataclass
class Replicas:
    """Supervised tritonservers, and a gateway in front of them."""

    servers: list[TritonServer]
    gateway: Gateway
    client: Client

    def kill(self, index: int) -> None:
        """kill -9 of its tritonserver."""
        self._signal(index, signal.SIGKILL, ("tritonserver",))

    def freeze(self, index: int) -> None:
        """SIGSTOP of its tritonserver and the processes of its models."""
        self._signal(index, signal.SIGSTOP, ("tritonserver", "triton_python_backend_stub"))

    def thaw(self, index: int) -> None:
        self._signal(index, signal.SIGCONT, ("tritonserver", "triton_python_backend_stub"))

    async def state_of(self, index: int) -> admin_pb2.Replica:
        return (await self.client.replicas())[self.servers[index].grpc_target]

    async def all_ready(self) -> None:
        """Wait until every replica may be used."""
        async with asyncio.timeout(180):
            while not all(
                replica.state in (admin_pb2.REPLICA_STATE_READY, admin_pb2.REPLICA_STATE_PROBATION)
                for replica in (await self.client.replicas()).values()
            ):
                await asyncio.sleep(0.1)

    def _signal(self, index: int, number: int, programs: tuple[str, ...]) -> None:
        group = self.servers[index].process_group
        assert group is not None
        running = processes_of_group(group)
        pids = [pid for pid, path in running.items() if Path(path).name in programs]
        assert pids
        for pid in pids:
            os.kill(pid, number)


@dataclass
class Stream:
    """One generation that is read as it comes."""

    fields: dict[str, Any]
    outcome: Outcome = field(default_factory=Outcome)
    tokens: int = 0

    async def run(self, client: Client) -> None:
        call = client.generation.Generate(pb.GenerateRequest(**self.fields))
        try:
            async for event in call:
                self.outcome.events.append(event)
                self.tokens += len(event.tokens.tokens)
        except grpc.aio.AioRpcError as error:
            self.outcome.error = error


def asked(number: int, tokens: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """The request of stream `number`: greedy and seeded, given in each of the three ways."""
    prompt = f"{_PROMPTS[number % len(_PROMPTS)]} ({number})"
    sampling = pb.SamplingParameters(temperature=0.0)
    if number % 2:
        sampling = pb.SamplingParameters(temperature=0.9, top_p=0.95, seed=number)
    given: dict[str, Any] = [
        {"prompt": prompt},
        {"messages": [pb.ChatMessage(role="user", content=prompt)]},
        {"input_ids": tokenizer.encode_prompt(prompt)},
    ][number % 3]
    return {**given, "sampling": sampling, "max_tokens": tokens}


def streams(count: int, tokens: int, tokenizer: Tokenizer) -> list[Stream]:
    return [Stream(asked(number, tokens, tokenizer)) for number in range(count)]


async def run_all(client: Client, found: list[Stream]) -> None:
    await asyncio.gather(*(stream.run(client) for stream in found))


async def begun(found: list[Stream], tokens: int) -> None:
    """Wait until every stream has so many tokens."""
    async with asyncio.timeout(120):
        while any(stream.tokens < tokens for stream in found):
            await asyncio.sleep(0.02)


def check_same(found: list[Stream], undisturbed: list[Stream]) -> None:
    """No token lost, none twice, and the text is that of an undisturbed run."""
    for stream, other in zip(found, undisturbed, strict=True):
        assert stream.outcome.code is grpc.StatusCode.OK, stream.outcome.message
        assert stream.tokens == stream.fields["max_tokens"]
        ids = [token.id for token in stream.outcome.tokens]
        assert ids == [token.id for token in other.outcome.tokens]
        assert stream.outcome.text == other.outcome.text
        assert stream.outcome.finished.usage.output_tokens == stream.tokens


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_spoken_model(tmp_path_factory.mktemp("chaos") / "spoken")


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


@asynccontextmanager
async def running_replicas(model_dir: Path, count: int) -> AsyncIterator[Replicas]:
    config = TritonServerConfig(REPOSITORY, model_dir, _ENGINE, exit_timeout_s=2, min_backoff_s=0.1)
    servers = [TritonServer(config) for _ in range(count)]
    limits = ReplicaLimits(stall_s=STALL_S, slow_start_s=0.0)
    try:
        for server in servers:
            await server.start()
        async with (
            running_gateway(
                ",".join(server.grpc_target for server in servers),
                tokenizer_dir=model_dir,
                probe_interval_s=0.2,
                replicas=ReplicaSetConfig(limits=limits),
            ) as gateway,
            connected(gateway) as client,
        ):
            found = Replicas(servers, gateway, client)
            await found.all_ready()
            yield found
    finally:
        for server in servers:
            await server.stop()
