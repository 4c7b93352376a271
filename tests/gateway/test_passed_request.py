"""What is read of requests in Triton's own protocol."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate._pb.inference import grpc_service_pb2 as pb
from draftgate.gateway.admission import Priority
from draftgate.gateway.passed_request import PassedRequest, leave_of_limits, read_request
from draftgate.gateway.tenant import ANONYMOUS
from draftgate.upstream.balance import prefix_key
from draftgate.upstream.types import TextPrompt, TokenPrompt
from tests.support.passing import add, request

PARAMETERS = ("priority", "timeout", "sequence_id", "sequence_start", "sequence_end", "other")
NAMES = (
    *("text_input", "messages", "input_ids", "max_tokens", "request_output_len"),
    *("stop", "deadline_ms", "other"),
)
DATATYPES = ("BYTES", "INT32", "INT64", "UINT64", "UINT8", "BOOL", "FP32", "", "ODD")

parameters = st.one_of(
    st.builds(pb.InferParameter),
    st.builds(pb.InferParameter, bool_param=st.booleans()),
    st.builds(pb.InferParameter, int64_param=st.integers(-(2**63), 2**63 - 1)),
    st.builds(pb.InferParameter, uint64_param=st.integers(0, 2**64 - 1)),
    st.builds(pb.InferParameter, string_param=st.text()),
    st.builds(pb.InferParameter, double_param=st.floats()),
)
contents = st.builds(
    pb.InferTensorContents,
    bool_contents=st.lists(st.booleans(), max_size=3),
    int_contents=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3),
    uint64_contents=st.lists(st.integers(0, 2**64 - 1), max_size=3),
    bytes_contents=st.lists(st.binary(), max_size=3),
)
tensors = st.builds(
    pb.ModelInferRequest.InferInputTensor,
    name=st.sampled_from(NAMES),
    datatype=st.sampled_from(DATATYPES),
    shape=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3),
    contents=contents,
)
requests = st.builds(
    pb.ModelInferRequest,
    parameters=st.dictionaries(st.sampled_from(PARAMETERS), parameters),
    inputs=st.lists(tensors, max_size=6),
    raw_input_contents=st.lists(st.binary(max_size=40), max_size=8),
)


def read(asked: pb.ModelInferRequest, **given: Any) -> PassedRequest:
    fields = {"tenant": ANONYMOUS, "time_left_ms": None, "longest": None} | given
    return read_request(asked, **fields)


@given(requests, st.none() | st.integers(1, 2**31 - 1), st.none() | st.integers(1, 2**20))
def test_whatever_it_holds_it_is_read(
    asked: pb.ModelInferRequest, time_left_ms: int | None, longest: int | None
) -> None:
    before = asked.SerializeToString(deterministic=True)
    found = read(asked, time_left_ms=time_left_ms, longest=longest)
    assert asked.SerializeToString(deterministic=True) == before
    assert found.ask.prompt_tokens >= 0
    assert 0 <= found.ask.max_tokens <= (longest or 2**31 - 1)
    assert found.timeout_s is None or found.timeout_s > 0
    if time_left_ms is not None:
        assert found.ask.deadline_ms is not None
        assert found.ask.deadline_ms <= time_left_ms


@given(st.text(), st.integers(0, 2**31 - 1))
def test_text_is_measured_in_bytes(text: str, max_tokens: int) -> None:
    ask = read(request(text, max_tokens=max_tokens)).ask
    assert ask.prompt_tokens == -(-len(text.encode()) // 4)
    assert ask.max_tokens == max_tokens


@given(st.text(min_size=1, max_size=5000))
def test_text_has_the_key_of_our_own_prompts(text: str) -> None:
    assert read(request(text)).key == prefix_key(TextPrompt(text))


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=400), st.sampled_from("iq"))
def test_ids_are_counted_and_have_the_key_of_our_own_prompts(ids: list[int], code: str) -> None:
    asked = pb.ModelInferRequest()
    add(
        asked,
        "input_ids",
        {"i": "INT32", "q": "INT64"}[code],
        struct.pack(f"<{len(ids)}{code}", *ids),
    )
    typed = pb.ModelInferRequest()
    typed.inputs.add(name="input_ids", datatype="INT32").contents.int_contents.extend(ids)
    for each in (asked, typed):
        found = read(each)
        assert (found.ask.prompt_tokens, found.ask.prompt_field) == (len(ids), "input_ids")
        assert found.key == prefix_key(TokenPrompt(tuple(ids)))


def test_nothing_known_has_no_key() -> None:
    found = read(pb.ModelInferRequest())
    assert (found.key, found.ask.tokens, found.sequence, found.stops) == (b"", 0, None, False)


@pytest.mark.parametrize("name", ["max_tokens", "request_output_len", "sampling_param_max_tokens"])
@pytest.mark.parametrize(
    ("datatype", "content", "expected"),
    [
        ("INT32", struct.pack("<i", 70), 70),
        ("INT64", struct.pack("<q", 2**40), 100),
        ("UINT32", struct.pack("<I", 50), 50),
        ("INT32", struct.pack("<i", -5), 0),
        ("INT32", b"\x01", 0),
        ("FP32", struct.pack("<f", 5.0), 0),
    ],
)
def test_how_much_may_come(name: str, datatype: str, content: bytes, expected: int) -> None:
    asked = pb.ModelInferRequest()
    add(asked, name, datatype, content)
    assert read(asked, longest=100).ask.max_tokens == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Priority.INTERACTIVE),
        ({"int64_param": 0}, Priority.INTERACTIVE),
        ({"int64_param": 1}, Priority.INTERACTIVE),
        ({"uint64_param": 2}, Priority.BATCH),
        ({"int64_param": 9}, Priority.BATCH),
        ({"string_param": "2"}, Priority.INTERACTIVE),
    ],
)
def test_larger_priorities_are_lower(given: dict[str, Any], expected: Priority) -> None:
    asked = pb.ModelInferRequest()
    asked.parameters["priority"].CopyFrom(pb.InferParameter(**given))
    assert read(asked).ask.priority is expected


@pytest.mark.parametrize(
    ("content", "stops"), [(b"\1", True), (b"\0", False), (b"", False), (b"\0\1", True)]
)
def test_a_stop_is_one_if_it_says_so(content: bytes, stops: bool) -> None:
    asked = request()
    add(asked, "stop", "BOOL", content)
    assert read(asked).stops is stops
    typed = pb.ModelInferRequest()
    typed.inputs.add(name="stop", datatype="BOOL").contents.bool_contents.append(stops)
    assert read(typed).stops is stops


def test_the_earlier_limit_is_the_deadline() -> None:
    asked = request(timeout=1_500_000)
    assert read(asked).timeout_s == 1.5
    assert read(asked, time_left_ms=1000).ask.deadline_ms == 1000
    assert read(asked, time_left_ms=9000).ask.deadline_ms == 1500
    assert read(request()).ask.deadline_ms is None
    add(asked, "deadline_ms", "INT32", struct.pack("<i", 700))
    assert read(asked, time_left_ms=1000).ask.deadline_ms == 700


@given(requests, st.floats(0, 1e4))
def test_what_the_wait_left_is_all_that_changes(asked: pb.ModelInferRequest, wait_s: float) -> None:
    before = read(asked).ask
    leave_of_limits(asked, wait_s)
    after = read(asked).ask
    assert replace(before, deadline_ms=None) == replace(after, deadline_ms=None)
    if before.deadline_ms is None or after.deadline_ms is None:
        assert after.deadline_ms == before.deadline_ms or before.deadline_ms == 0
    else:
        assert 0 <= after.deadline_ms <= before.deadline_ms
        assert after.deadline_ms >= before.deadline_ms - wait_s * 1000 - 1


def test_a_deadline_in_the_wrong_kind_of_contents_is_left_alone() -> None:
    asked = pb.ModelInferRequest()
    tensor = asked.inputs.add(name="deadline_ms", datatype="INT32", shape=[1])
    tensor.contents.uint64_contents.append(5000)
    before = asked.SerializeToString()
    leave_of_limits(asked, 1.0)
    assert asked.SerializeToString() == before
    assert read(asked).ask.deadline_ms is None


@pytest.mark.parametrize("typed", [False, True])
def test_the_engine_is_left_what_the_wait_left_of_its_deadline(typed: bool) -> None:
    asked = pb.ModelInferRequest()
    if typed:
        tensor = asked.inputs.add(name="deadline_ms", datatype="INT32", shape=[1])
        tensor.contents.int_contents.append(5000)
    else:
        add(asked, "deadline_ms", "INT32", struct.pack("<i", 5000))
    leave_of_limits(asked, 1.25)
    assert read(asked).ask.deadline_ms == 3750
    leave_of_limits(asked, 10.0)
    assert read(asked).ask.deadline_ms == 1
