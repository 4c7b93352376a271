"""Talk to a Draftgate gateway from Python: a chat that streams, then one answer in one piece.

    python examples/python_client.py "Why is the sky blue?" --server 127.0.0.1:50051

DRAFTGATE_API_KEY may hold a key, DRAFTGATE_CA_FILE name the certificates to trust.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from typing import Any

from draftgate.client import (
    AsyncClient,
    CallError,
    Client,
    Finished,
    Message,
    RetryPolicy,
    Tls,
    Tokens,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt")
    parser.add_argument("--server", default="127.0.0.1:50051", help="host:port of the gateway")
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()

    ca_file = os.environ.get("DRAFTGATE_CA_FILE")
    access = {
        "credentials": os.environ.get("DRAFTGATE_API_KEY"),
        "tls": Tls(ca_file) if ca_file else None,
        # A server that is full says when to come back; this is how often and how long we follow.
        "retry": RetryPolicy(max_attempts=5, max_delay_s=10),
    }
    messages = [Message("user", arguments.prompt)]
    try:
        asyncio.run(stream(arguments.server, access, messages, arguments.max_tokens))
        whole(arguments.server, access, messages, arguments.max_tokens)
    except CallError as error:
        print(f"{error.code}: {error.message}", file=sys.stderr)
        return 1
    return 0


async def stream(
    server: str, access: dict[str, Any], messages: list[Message], max_tokens: int
) -> None:
    """Print the text as it comes, and in the end how many of the drafts were accepted."""
    async with (
        AsyncClient(server, **access) as client,
        # Leaving early, by an error or Ctrl-C say, ends the generation on the server.
        client.generate(messages, max_tokens=max_tokens, temperature=0, timeout_s=120) as answer,
    ):
        async for event in answer:
            if isinstance(event, Tokens):
                print(event.text, end="", flush=True)
            elif isinstance(event, Finished):
                print(f"\n{summary(event)}")


def whole(server: str, access: dict[str, Any], messages: list[Message], max_tokens: int) -> None:
    """Without asyncio, and without a stream."""
    with Client(server, timeout_s=120, **access) as client:
        answer = client.generate_once(messages, max_tokens=max_tokens, seed=1)
        print(f"{client.model().name}: {answer.text!r}")


def summary(finished: Finished) -> str:
    counts = finished.speculation
    parts = [f"{finished.usage.output_tokens} tokens"]
    if counts is not None and counts.acceptance_rate is not None:
        parts.append(
            f"{counts.acceptance_rate:.0%} of {counts.drafted_tokens} drafts accepted, "
            f"{counts.mean_acceptance_length:.2f} tokens a pass"
        )
    parts.append(f"ended by {finished.finish_reason}")
    return " · ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
