"""`draftgate serve` with certificates and keys, from a file of settings."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.certificates import Authority
from tests.support.footprint import Footprint
from tests.support.serving import address_of, serving
from tests.support.tenants import TenantsFile
from tests.support.terminal import run_in_pipe

pytestmark = pytest.mark.triton


async def test_it_serves_who_has_a_key_and_reloads(
    footprint: Footprint, checkpoint_dir: Path, tmp_path: Path
) -> None:
    authority = Authority()
    cert, key, ca = (tmp_path / name for name in ("a.crt", "a.key", "ca.crt"))
    authority.issue("server").write(cert, key)
    ca.write_bytes(authority.certificate)
    tenants = TenantsFile(tmp_path / "tenants.yaml")
    first = tenants.add("acme")
    file = tmp_path / "draftgate.yaml"
    settings = (
        f"security: {{tls: {{cert_file: {cert}, key_file: {key}}}, "
        f"tenants_file: {tenants.path}, reload_interval_s: 3600}}\n"
        "entry: engine\nadmin_listen: 127.0.0.1:0\nmodel_name: named-here\n"
    )
    file.write_text(settings)
    options = ("--model-dir", str(checkpoint_dir), "--config", str(file), "--gate", "fixed")
    async with serving(footprint, *options) as terminal:
        address = await address_of(terminal)
        ask = ["generate", "Name a colour.", "--max-tokens", "4", "--server", address]
        trusting = {"DRAFTGATE_CA_FILE": str(ca)}
        done = await run_in_pipe(ask, env={**trusting, "DRAFTGATE_API_KEY": first})
        assert done.code == 0
        assert done.out.strip()
        done = await run_in_pipe(ask, env=trusting)
        assert done.code == 1
        assert done.err.startswith("error: no credentials: ")

        [admin] = re.findall(r"operators on (\S+)", terminal.screen)
        boss = tenants.add("boss", scopes=["generate", "admin"])
        os.kill(terminal.process.pid, signal.SIGHUP)
        await terminal.sees("draftgate: reloaded\n")
        env = {**trusting, "DRAFTGATE_API_KEY": boss}
        done = await run_in_pipe(["doctor", address, "--admin", admin, "--json"], env=env)
        assert done.code == 0, done.out
        checks = {each["name"]: each for each in json.loads(done.out)["checks"]}
        # The certificate lasts for an hour.
        assert {name for name, each in checks.items() if each["verdict"] != "ok"} == {"encryption"}
        assert checks["model"]["found"].startswith("named-here (FP8; drafter ngram)")
        assert checks["replicas"]["found"] == "1 of 1 ready"

        second = tenants.add("other")
        file.write_text(f"{settings}grace_s: 1\n")
        os.kill(terminal.process.pid, signal.SIGHUP)
        await terminal.sees("reloaded; only a restart changes grace_s")
        done = await run_in_pipe(ask, env={**trusting, "DRAFTGATE_API_KEY": second})
        assert done.code == 0

        file.write_text("listn: 1")
        os.kill(terminal.process.pid, signal.SIGHUP)
        await terminal.sees("not reloaded, all stays as it was: listn: ")
        assert first not in terminal.screen
        assert second not in terminal.screen
        terminal.type("\x03")
        assert await terminal.ends() == 0


async def test_other_machines_are_not_served_in_clear_text_by_accident(
    footprint: Footprint, checkpoint_dir: Path
) -> None:
    options = ["serve", "--listen", "0.0.0.0:0", "--model-dir", str(checkpoint_dir)]
    done = await run_in_pipe(options, env=footprint.env)
    assert done.code == 1
    assert done.err.startswith("error: cannot listen on 0.0.0.0:0: other machines could reach it")


async def test_it_serves_with_one_process(
    footprint: Footprint, checkpoint_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "draftgate.yaml"
    file.write_text("workers: 4")
    options = ["serve", "--config", str(file), "--model-dir", str(checkpoint_dir)]
    done = await run_in_pipe(options, env=footprint.env)
    assert done.code == 1
    allowed = "1; `draftgate gateway` serves with several"
    assert done.err == f"error: workers: got 4, allowed: {allowed}\n"
