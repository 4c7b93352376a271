"""What goes between the parent and its workers."""

from __future__ import annotations

import asyncio
import itertools
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from draftgate.errors import DraftgateError, ErrorCode, Refusal
from draftgate.gateway import GatewayConfig
from draftgate.gateway.admission import AdmissionConfig, Ask
from draftgate.gateway.auth import JwtConfig, SecurityConfig, TlsConfig
from draftgate.gateway.orders import DrainReplica, Nothing, RefuseNew, Reload, SetLogLevel
from draftgate.gateway.tenant import Scope, Tenant, TenantLimits
from draftgate.gateway.workers.link import MAX_MESSAGE_BYTES, Link, Messages
from draftgate.gateway.workers.messages import (
    FROM_WORKER,
    TO_WORKER,
    Admitted,
    Begin,
    CarriedOut,
    CarryOut,
    End,
    Enter,
    Failed,
    Failure,
    Holds,
    Leave,
    Listening,
    Refused,
    TellAll,
    ToldAll,
)
from draftgate.upstream.replica import ReplicaLimits
from draftgate.upstream.replicas import ReplicaSetConfig

text = st.text(st.characters(codec="utf-8"), max_size=20)
numbers = st.integers(0, 2**53)
seconds = st.floats(0, 1e6)
limits = st.builds(
    TenantLimits,
    weight=st.floats(0.01, 100),
    max_concurrency=st.none() | numbers,
    tokens_per_minute=st.none() | numbers,
    max_prompt_tokens=st.none() | numbers,
)
tenants = st.builds(Tenant, text, limits, st.frozensets(st.sampled_from(Scope)))
asks = st.builds(Ask, tenant=tenants, prompt_tokens=numbers, prompt_field=text, max_tokens=numbers,
                 deadline_ms=st.none() | numbers, request_id=text)  # fmt: skip
failures = st.builds(
    Failure,
    code=st.sampled_from(ErrorCode),
    message=text,
    field=text,
    refusal=st.none() | st.builds(Refusal, text, text, seconds),
)
orders = st.one_of(
    st.just(RefuseNew()),
    st.just(Nothing()),
    st.builds(DrainReplica, text, st.booleans(), st.booleans()),
    st.builds(SetLogLevel, numbers),
    st.builds(
        Reload,
        st.none() | st.builds(AdmissionConfig, max_waiting=st.integers(0, 9)),
    ),
)
from_worker = st.one_of(
    st.just(Listening()),
    st.builds(Failed, failures),
    st.builds(Enter, numbers, asks),
    st.builds(Leave, numbers, numbers),
    st.builds(Holds, numbers, numbers),
    st.builds(TellAll, numbers, orders),
    st.builds(CarriedOut, numbers, st.none() | failures),
)
to_worker = st.one_of(
    st.builds(Admitted, numbers, seconds),
    st.builds(Refused, numbers, failures),
    st.builds(CarryOut, numbers, orders),
    st.builds(ToldAll, numbers, numbers, st.none() | failures),
    st.builds(End, seconds),
)

EVERYTHING = GatewayConfig(
    triton_target="10.0.0.1:8001,dns:///triton:8001",
    model_name="m",
    tokenizer_dir=Path("/models/m"),
    replicas=ReplicaSetConfig(limits=ReplicaLimits(stall_s=3.0)),
    admission=AdmissionConfig(max_concurrency=3, max_waiting=0),
    security=SecurityConfig(
        tls=TlsConfig(Path("a.crt"), Path("a.key")),
        tenants_file=Path("tenants.yaml"),
        jwt=JwtConfig(Path("jwks.json"), "i", "a", ("ES256",)),
    ),
)


def in_pieces(content: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(content), *(cut % (len(content) + 1) for cut in cuts)})
    return [content[a:b] for a, b in itertools.pairwise(places)]


def told(adapter: TypeAdapter[Any], sent: list[Any], cuts: list[int]) -> list[Any]:
    """What arrives of messages whose bytes come in these pieces."""
    content = b"".join(Messages.packed(adapter.dump_json(each)) for each in sent)
    reading = Messages(adapter)
    return [got for piece in in_pieces(content, cuts) for got in reading.push(piece)]


@given(sent=st.lists(from_worker, max_size=5), cuts=st.lists(numbers, max_size=8))
def test_what_a_worker_says_arrives_as_it_was(sent: list[Any], cuts: list[int]) -> None:
    assert told(FROM_WORKER, sent, cuts) == sent


@given(sent=st.lists(to_worker, max_size=5), cuts=st.lists(numbers, max_size=8))
def test_what_a_worker_is_told_arrives_as_it_was(sent: list[Any], cuts: list[int]) -> None:
    assert told(TO_WORKER, sent, cuts) == sent


@pytest.mark.parametrize("config", [GatewayConfig("t:1", "m"), EVERYTHING])
def test_a_worker_gets_its_whole_configuration(config: GatewayConfig) -> None:
    begin = Begin(2, config, {"level": "info"}, (RefuseNew(), DrainReplica("a:1", True)))
    assert told(TO_WORKER, [begin], []) == [begin]


def test_an_error_is_the_same_on_the_other_side() -> None:
    error = DraftgateError(
        ErrorCode.RESOURCE_EXHAUSTED, "full", field="n", refusal=Refusal("QUEUE_FULL", "server", 2)
    )
    again = Failure.of(error).error()
    assert (again.code, again.message) == (error.code, error.message)
    assert (again.field, again.refusal) == (error.field, error.refusal)


@given(content=st.binary(min_size=1, max_size=60), cuts=st.lists(numbers, max_size=4))
def test_bytes_that_are_no_message_are_noticed_or_waited_for(
    content: bytes, cuts: list[int]
) -> None:
    reading = Messages(FROM_WORKER)
    try:
        found = [got for piece in in_pieces(content, cuts) for got in reading.push(piece)]
    except ValueError:
        return
    assert found == []  # No message is that short.


def test_a_message_has_a_largest_size() -> None:
    with pytest.raises(ValueError, match="allowed: 1048576"):
        Messages(FROM_WORKER).push((MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"))


async def test_a_side_that_is_not_understood_is_left(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair()
    ended = asyncio.Event()
    link: Link[Any] = Link(FROM_WORKER, TO_WORKER, lambda _: None, ended.set)
    await link.open(ours)
    with theirs:
        theirs.sendall(Messages.packed(b"{}"))
        await asyncio.wait_for(ended.wait(), 30)
    link.send(End(0.0))  # To nobody.
    assert "do not understand each other" in caplog.text
