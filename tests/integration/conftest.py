"""The product as it is served: a real tritonserver, the real model in fp32, the gateway."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc

from draftgate._pb.draftgate.v1 import gate_pb2, gate_pb2_grpc
from draftgate.text import Tokenizer
from tests.conftest import DRAFTER_DIR
from tests.support.gateway import Client, connected, running_gateway

ROWS = 32
LONGEST = 4

FIXED = gate_pb2.GatePolicy(mode=gate_pb2.GATE_MODE_FIXED, draft_len=LONGEST)
"""What tests find that have nothing to do with the gate: how much is drafted is certain."""


@dataclass(frozen=True)
class Served:
    """A running `draftgate serve`."""

    address: str
    """Where its gateway listens."""
    triton: str
    """Where its Triton listens."""
    collector: str
    """Where its spans go."""
    spans: Spans
    """What it exports."""
    policy_file: Path
    """Where its gate's policy is kept."""


class Spans(otlp_grpc.TraceServiceServicer):
    """An OTLP collector on a thread, for a service that outlives any test's event loop."""

    def __init__(self) -> None:
        self._spans: list[otlp.ExportTraceServiceRequest] = []
        self._changed = threading.Condition()

    def Export(  # noqa: N802
        self, request: otlp.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> otlp.ExportTraceServiceResponse:
        with self._changed:
            self._spans.append(request)
            self._changed.notify_all()
        return otlp.ExportTraceServiceResponse()

    def of_request(self, request_id: str, timeout_s: float = 30.0) -> dict[str, dict[str, object]]:
        """The attributes of the spans in the trace of this request, by kind of span."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._trace(request_id), timeout_s)
            return self._trace(request_id)

    def _trace(self, request_id: str) -> dict[str, dict[str, object]]:
        spans = [
            span
            for request in self._spans
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        inference = [s for s in spans if _attributes(s).get("gen_ai.response.id") == request_id]
        servers = [
            s for s in spans if s.kind == s.SPAN_KIND_SERVER and s.span_id == _parent(inference)
        ]
        if not inference or not servers:
            return {}
        return {"client": _attributes(inference[0]), "server": _attributes(servers[0])}


def _parent(spans: list[object]) -> bytes:
    return spans[0].parent_span_id if spans else b"none"  # type: ignore[attr-defined]


def _attributes(span: object) -> dict[str, object]:
    def plain(value: object) -> object:
        kind = value.WhichOneof("value")  # type: ignore[attr-defined]
        found = getattr(value, kind)
        return [plain(item) for item in found.values] if kind == "array_value" else found

    return {pair.key: plain(pair.value) for pair in span.attributes}  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def served(checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    spans = Spans()
    collector = grpc.server(futures.ThreadPoolExecutor(2))
    otlp_grpc.add_TraceServiceServicer_to_server(spans, collector)
    port = collector.add_insecure_port("127.0.0.1:0")
    collector.start()
    command = [
        *(sys.executable, "-m", "draftgate.cli", "serve", "--listen", "127.0.0.1:0"),
        *("--model-dir", str(checkpoint_dir), "--dtype", "float32"),
        *("--drafter-dir", str(DRAFTER_DIR)),
        *("--max-batch-rows", str(ROWS), "--otlp-endpoint", f"127.0.0.1:{port}"),
    ]
    folder = tmp_path_factory.mktemp("served")
    log, policy_file = folder / "log", folder / "policy.json"
    command += ["--policy-file", str(policy_file)]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        address, triton = _addresses(process, log)
        set_policy(address, FIXED)
        yield Served(address, triton, f"127.0.0.1:{port}", spans, policy_file)
        process.terminate()
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
        collector.stop(None)


def set_policy(address: str, policy: gate_pb2.GatePolicy) -> None:
    with grpc.insecure_channel(address) as channel:
        request = gate_pb2.SetPolicyRequest(policy=policy)
        gate_pb2_grpc.GateServiceStub(channel).SetPolicy(request, timeout=30)


def _addresses(process: subprocess.Popen[bytes], log: Path) -> tuple[str, str]:
    """Wait until the service is ready; its two addresses."""
    while True:
        text = log.read_text()
        found = re.search(r"gateway on (\S+), Triton on (\S+)", text)
        if found and "Ctrl-C stops" in text:
            return found[1], found[2]
        try:
            process.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
        pytest.fail(f"draftgate serve ended early:\n{text}")


@pytest.fixture(params=["ensemble", "engine"])
async def client(
    request: pytest.FixtureRequest, served: Served, checkpoint_dir: Path
) -> AsyncIterator[Client]:
    """Of the gateway as it is served, which enters at the ensemble, and of another one that enters
    the same Triton's engine straight and makes the text itself."""
    if request.param == "ensemble":
        async with grpc.aio.insecure_channel(served.address) as channel:
            yield Client(channel)
        return
    async with (
        running_gateway(
            served.triton,
            entry="engine",
            tokenizer_dir=checkpoint_dir,
            otlp_endpoint=served.collector,
        ) as gateway,
        connected(gateway) as found,
    ):
        await found.wait_serving()
        yield found


@pytest.fixture(scope="session")
def tokenizer(checkpoint_dir: Path) -> Tokenizer:
    return Tokenizer.load(checkpoint_dir)
