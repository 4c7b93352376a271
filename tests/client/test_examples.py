"""The examples, run as a user runs them."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from draftgate.gateway import Gateway
from draftgate.gateway.auth import SecurityConfig
from tests.fakes.triton import FakeTriton, Script, Step
from tests.support.clients import opened
from tests.support.gateway import MODEL, running_gateway
from tests.support.tenants import TenantsFile

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

SPECULATED = Script(
    [
        Step({"output_ids": [10], "text_output": "The "}),
        Step(
            {
                "output_ids": [11, 12],
                "text_output": "sky is ",
                "draft_lens": [4],
                "accepted_lens": [1],
                "draft_source": [2],
            }
        ),
        Step({"output_ids": [2], "text_output": "blue."}),
    ],
    finish_reason="eos",
)


@pytest.fixture
async def address(triton: FakeTriton, gateway: Gateway) -> str:
    """Of a gateway that has one thing to say."""
    triton.default = SPECULATED
    found = f"127.0.0.1:{gateway.port}"
    async with opened("asyncio", found) as client:
        await client.wait_serving(timeout_s=30)
    return found


async def run(
    *command: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        subprocess.run,
        command,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=280,
    )


async def test_the_python_client(address: str) -> None:
    example = EXAMPLES / "python_client.py"
    ran = await run(sys.executable, example, "Why?", "--server", address)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == (
        "The sky is blue.\n"
        "4 tokens · 25% of 4 drafts accepted, 2.00 tokens a pass · ended by eos\n"
        f"{MODEL}: 'The sky is blue.'\n"
    )


async def test_the_python_client_says_what_is_wrong(triton: FakeTriton, tmp_path: Path) -> None:
    tenants = TenantsFile(tmp_path / "tenants.yaml")
    tenants.add("acme")
    security = SecurityConfig(tenants_file=tenants.path)
    async with running_gateway(triton.target, security=security) as gateway:
        ran = await run(
            sys.executable,
            EXAMPLES / "python_client.py",
            *("Why?", "--server", f"127.0.0.1:{gateway.port}"),
            env={"DRAFTGATE_API_KEY": "nonsense"},
        )
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("UNAUTHENTICATED: ")


@pytest.fixture
async def node(tmp_path: Path) -> Path:
    """The Node example with its packages and stubs, in a folder of its own."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("npm is not installed")
    folder = tmp_path / "examples" / "node"
    kept = shutil.ignore_patterns("node_modules", "generated")
    shutil.copytree(EXAMPLES / "node", folder, ignore=kept)
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    for command in (("ci", "--no-audit", "--no-fund"), ("run", "generate")):
        ran = await run(npm, *command, cwd=folder)
        assert ran.returncode == 0, ran.stderr
    return folder


@pytest.mark.slow
async def test_the_node_client(node: Path, address: str) -> None:
    ran = await run("node", "stream.js", "Why?", "--server", f"http://{address}", cwd=node)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == (
        "The sky is blue.\n4 tokens, 1 of them drafted · acceptance 25% · ended by eos\n"
    )
    wrong = ("--max-tokens", "0", "--server", f"http://{address}")
    ran = await run("node", "stream.js", "Why?", *wrong, cwd=node)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("InvalidArgument: max_tokens: got 0, allowed: ")


def test_the_lock_file_names_no_registry() -> None:
    assert '"resolved"' not in (EXAMPLES / "node" / "package-lock.json").read_text()
