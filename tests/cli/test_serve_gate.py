"""What `draftgate serve` does for its gate: what steps cost, and the policy that was saved."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from draftgate.cli.serve import GateName
from draftgate.engine import EngineConfig
from tests.support.footprint import Footprint
from tests.support.serving import address_of, serving
from tests.support.terminal import Terminal, run_in_pipe

pytestmark = pytest.mark.triton

MEASURING = "draftgate: measuring what steps cost here, for the gate"
OBEYING = "draftgate: the gate obeys the policy saved in"


async def stopped(terminal: Terminal, footprint: Footprint) -> None:
    terminal.type("\x03")
    assert await terminal.ends() == 0
    footprint.assert_gone()


async def policy_at(address: str) -> str:
    """As soon as the gateway reaches the engine."""
    async with asyncio.timeout(60):
        while True:
            done = await run_in_pipe(["gate", "state", "--server", address])
            if done.code == 0:
                return done.out.splitlines()[0]


async def test_the_first_start_measures_what_steps_cost_and_says_so(
    footprint: Footprint, checkpoint_dir: Path, tmp_path: Path
) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    options = ("--model-dir", str(checkpoint_dir), "--max-batch-rows", "1")
    async with serving(footprint, *options, env=env) as terminal:
        address = await address_of(terminal)
        assert MEASURING in terminal.screen
        assert re.search(r"draftgate: measured what steps cost in [\d.]+ s\n", terminal.screen)
        assert await policy_at(address) == "policy\tauto"
        await stopped(terminal, footprint)
    async with serving(footprint, *options, env=env) as terminal:
        await address_of(terminal)
        assert "what steps cost" not in terminal.screen
        await stopped(terminal, footprint)


async def test_a_saved_policy_survives_a_crash_and_a_restart(
    footprint: Footprint, checkpoint_dir: Path, tmp_path: Path
) -> None:
    """By default in the user's folder for such things."""
    env = {"XDG_STATE_HOME": str(tmp_path / "state")}
    options = ("--model-dir", str(checkpoint_dir), "--gate", "fixed", "--draft-len", "3")
    async with serving(footprint, *options, env=env) as terminal:
        address = await address_of(terminal)
        assert "what steps cost" not in terminal.screen
        assert await policy_at(address) == "policy\tfixed, draft_len 3"
        done = await run_in_pipe(
            ["gate", "set", "--mode", "off", "--max-step-ms", "80", "--save", "--server", address]
        )
        assert done.code == 0
        assert OBEYING not in terminal.screen
        footprint.kill("tritonserver")
        await terminal.sees("tritonserver was started again")
        assert await policy_at(address) == "policy\toff, max_step_ms 80"
        assert OBEYING in terminal.screen
        await stopped(terminal, footprint)
    [kept] = (tmp_path / "state" / "draftgate").iterdir()
    assert re.fullmatch(rf"{checkpoint_dir.resolve().name}-[0-9a-f]{{8}}\.policy\.json", kept.name)
    async with serving(footprint, *options, env=env) as terminal:
        address = await address_of(terminal)
        assert f"{OBEYING} {kept}" in terminal.screen
        assert await policy_at(address) == "policy\toff, max_step_ms 80"
        await stopped(terminal, footprint)


async def test_a_policy_file_that_cannot_be_obeyed_is_one_line(
    footprint: Footprint, checkpoint_dir: Path, tmp_path: Path
) -> None:
    policy = tmp_path / "policy.json"
    policy.write_text('{"mode": "fixed", "draft_len": 9}')
    done = await run_in_pipe(
        ["serve", "--listen", "127.0.0.1:0", "--model-dir", str(checkpoint_dir),
         "--gate", "fixed", "--policy-file", str(policy)],
        env=footprint.env,
    )  # fmt: skip
    assert done.code == 1
    [line] = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert line == f"error: {policy}: draft_len: got 9, allowed: an integer 0 to 4"
    footprint.assert_gone()


def test_the_command_and_the_engine_know_the_same_gates() -> None:
    for name in GateName:
        EngineConfig(gate=name.value).validate()
    assert {name.value for name in GateName} == {"auto", "fixed"}
