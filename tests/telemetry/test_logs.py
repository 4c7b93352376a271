"""The logs: a record of every call and generation, readable by machines, telling no secret."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.telemetry.logs import JsonLines
from tests.fakes.collector import Collector
from tests.fakes.triton import FakeTriton, Script, Step
from tests.support.gateway import connected, running_gateway

PROMPT, OUTPUT = "the prompt that is nobody's business", "the answer that is nobody's"
SPECULATED = Script(
    [
        Step(
            {
                "output_ids": [10, 11, 12],
                "text_output": OUTPUT,
                "draft_lens": [4],
                "accepted_lens": [2],
                "draft_source": [1],
            }
        ),
        Step({"output_ids": [13], "text_output": "", "finish_reason": "length"}),
    ]
)


class Lines(logging.Handler):
    """Keeps records as the lines they make."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonLines())
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    def of(self, start: str) -> dict[str, object]:
        """The one record whose message starts so."""
        (found,) = [
            each for each in map(json.loads, self.lines) if each["message"].startswith(start)
        ]
        return dict(found)


@pytest.fixture
def lines() -> Iterator[Lines]:
    found = Lines()
    logger = logging.getLogger("draftgate")
    before = logger.level
    logger.addHandler(found)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(found)
    logger.setLevel(before)


async def test_a_generation_and_its_call_are_recorded_with_what_speculation_did(
    triton: FakeTriton, collector: Collector, lines: Lines
) -> None:
    triton.scripts = [SPECULATED]
    async with (
        running_gateway(triton.target, otlp_endpoint=collector.target) as gateway,
        connected(gateway) as client,
    ):
        await client.wait_serving()
        outcome = await client.generate(prompt=PROMPT, request_id="r-1")
        assert outcome.code is grpc.StatusCode.OK
    generation = lines.of("generation r-1: OK, 4 tokens in ")
    assert generation["level"] == "INFO"
    assert generation["logger"] == "draftgate.calls"
    told = {key: generation[key] for key in ("request_id", "finish_reason", "output_tokens")}
    assert told == {"request_id": "r-1", "finish_reason": "length", "output_tokens": 4}
    assert generation["tenant"] == "anonymous"
    told = {key: generation[key] for key in ("drafted_tokens", "accepted_tokens", "verify_steps")}
    assert told == {"drafted_tokens": 4, "accepted_tokens": 2, "verify_steps": 1}
    call = lines.of("draftgate.v1.GenerationService/Generate: OK in ")
    assert (call["code"], call["tenant"]) == ("OK", "anonymous")
    assert isinstance(call["duration_ms"], float)
    (span,) = [each for each in collector.spans if each.name.endswith("/Generate")]
    assert call["trace_id"] == generation["trace_id"] == span.span.trace_id.hex()
    assert call["span_id"] == span.span.span_id.hex()
    assert not [line for line in lines.lines if PROMPT in line or OUTPUT in line]


async def test_it_is_recorded_when_and_where_it_begins_to_serve(
    triton: FakeTriton, lines: Lines
) -> None:
    async with (
        running_gateway(triton.target, admin_listen="127.0.0.1:0") as gateway,
        connected(gateway) as client,
    ):
        await client.wait_serving()
        address, admin_address = gateway.address, gateway.admin_address
        triton.server_ready = False
        await client.wait_serving(False)
    began = lines.of("serving ")
    assert began["message"] == (
        f"serving test-model on {address} in clear text: 1 of 1 replicas ready, entered at "
        "ensemble (draftgate)"
    )
    assert began["level"] == "INFO"
    fields = ("model", "address", "admin_address", "tls")
    assert [began[each] for each in fields] == ["test-model", address, admin_address, False]
    assert began["replicas"] == [
        {"address": triton.target, "state": "ready", "profile": "draftgate", "entry": "ensemble"}
    ]
    ended = lines.of("not serving: ")
    assert (ended["level"], ended["reason"]) == ("WARNING", "the model server is not ready")


async def test_a_refused_call_is_recorded_with_its_status(triton: FakeTriton, lines: Lines) -> None:
    async with running_gateway(triton.target) as gateway, connected(gateway) as client:
        await client.wait_serving()
        outcome = await client.generate(prompt=PROMPT, max_tokens=0)
        assert outcome.code is grpc.StatusCode.INVALID_ARGUMENT
        call = lines.of("draftgate.v1.GenerationService/Generate: INVALID_ARGUMENT in ")
    assert (call["level"], call["code"]) == ("INFO", "INVALID_ARGUMENT")
    assert "trace_id" not in call


async def test_a_fault_of_the_server_is_a_warning(triton: FakeTriton, lines: Lines) -> None:
    triton.scripts = [Script(in_band_error="the engine fell over")]
    async with running_gateway(triton.target) as gateway, connected(gateway) as client:
        await client.wait_serving()
        outcome = await client.generate(prompt=PROMPT)
        assert outcome.code is grpc.StatusCode.INTERNAL
        call = lines.of("draftgate.v1.GenerationService/Generate: INTERNAL in ")
    assert call["level"] == "WARNING"


@given(st.text(), st.dictionaries(st.sampled_from(["request_id", "replica"]), st.text()))
def test_every_record_is_one_line_of_json(message: str, extra: dict[str, str]) -> None:
    record = logging.getLogger("draftgate.some").makeRecord(
        "draftgate.some", logging.ERROR, __file__, 1, "%s", (message,), None, extra=extra
    )
    line = JsonLines().format(record)
    assert "\n" not in line
    told = json.loads(line)
    assert {"time", "level", "logger", "message", "pid"} <= told.keys()
    assert (told["message"], told["level"]) == (message, "ERROR")
    assert {key: told[key] for key in extra} == extra


def test_an_exception_is_told_in_the_same_line() -> None:
    try:
        raise ValueError("no")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.getLogger("x").makeRecord("x", logging.ERROR, "", 1, "failed", (), info)
    told = json.loads(JsonLines().format(record))
    assert told["message"] == "failed"
    assert told["exception"].endswith("ValueError: no")
