"""Whether Triton is ready to generate."""

from __future__ import annotations

import asyncio

from draftgate.errors import DraftgateError
from draftgate.upstream.client import TritonClient

__all__ = ["not_ready_reason"]


async def not_ready_reason(client: TritonClient, timeout_s: float) -> str:
    """Empty if the server and every model are ready, else one line that says what is not."""
    models = client.profile.models
    try:
        if not await client.server_ready(timeout_s):
            return "the model server is not ready"
        ready = await asyncio.gather(*(client.model_ready(name, timeout_s) for name in models))
    except DraftgateError as error:
        return error.message
    waiting = [name for name, is_ready in zip(models, ready, strict=True) if not is_ready]
    return f"models not ready: {', '.join(waiting)}" if waiting else ""
