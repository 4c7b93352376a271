"""Requests that no client should send, all the way to the real engine: it serves on."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from draftgate._pb.draftgate.v1 import gate_pb2
from tests.integration.conftest import FIXED, Served
from tests.support.fuzzer import Fuzzer
from tests.support.gateway import Client
from tests.support.good_requests import WORDS, good_requests
from tests.support.reflected import reflected_methods

pytestmark = [pytest.mark.triton, pytest.mark.slow, pytest.mark.timeout(900)]

NO_WAY_BACK = "/draftgate.v1.AdminService/Drain"


async def test_no_request_breaks_the_engine(served: Served) -> None:
    async with grpc.aio.insecure_channel(served.address) as channel:
        client = Client(channel)
        methods = [
            method
            for method in await reflected_methods(channel)
            # What Triton makes of its own protocol is Triton's.
            if method.service.startswith("draftgate.") and method.path != NO_WAY_BACK
        ]
        fuzzer = Fuzzer(methods, good_requests(), WORDS, seed=7)
        await fuzzer.run([channel], 2000)
        assert fuzzer.wrong == []
        assert fuzzer.codes["Generate OK"] > 0
        await client.gate.SetPolicy(gate_pb2.SetPolicyRequest(policy=FIXED))
        async with asyncio.timeout(60):
            while True:
                state = (await client.gate.GetState(gate_pb2.GetStateRequest())).state
                if not (state.running_rows or state.waiting_rows or state.kv_used_tokens):
                    break
                await asyncio.sleep(0.1)
        outcome = await client.generate(prompt="1, 2, 3,", max_tokens=4)
        assert outcome.code is grpc.StatusCode.OK
