"""Checks of the model servers that `draftgate gateway` stands in front of."""

from __future__ import annotations

import asyncio

from draftgate.cli.doctor.result import Result, fail, ok
from draftgate.config import Settings
from draftgate.errors import DraftgateError
from draftgate.upstream.addresses import parse_addresses, resolve
from draftgate.upstream.client import TritonClient, TritonClientConfig
from draftgate.upstream.probe import not_ready_reason

__all__ = ["check_upstreams"]


async def check_upstreams(settings: Settings, timeout_s: float) -> list[Result]:
    """A result for each Triton in the settings."""
    try:
        addresses = parse_addresses(settings.triton or "")
        found = [await resolve(name, timeout_s) for name in addresses.names]
    except DraftgateError as error:
        return [fail("triton", error.message)]
    targets = [*addresses.static, *(target for each in found for target in each)]
    return await asyncio.gather(*(_check(each, settings.entry, timeout_s) for each in targets))


async def _check(target: str, entry: str | None, timeout_s: float) -> Result:
    client = TritonClient(TritonClientConfig(target, entry_model=entry))
    try:
        profile = await client.find_profile(timeout_s)
        reason = await not_ready_reason(client, timeout_s)
    except DraftgateError as error:
        reason = error.message
    finally:
        await client.close()
    if reason:
        return fail("triton", f"{target}: {reason}", "start it, or take it out of the settings")
    return ok("triton", f"{target}: ready, {profile.name}, entered at {profile.entry}")
