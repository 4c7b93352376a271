"""`draftgate config` and `draftgate keys`."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from draftgate.gateway.auth import Authenticator, SecurityConfig
from tests.support.certificates import Authority
from tests.support.terminal import run_in_pipe


async def test_settings_are_listed_with_where_they_come_from(tmp_path: Path) -> None:
    file = tmp_path / "draftgate.yaml"
    file.write_text("admission: {max_waiting: 3}")
    done = await run_in_pipe(
        ["config", "show", "--config", str(file)], env={"DRAFTGATE_GRACE_S": "5"}
    )
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert f"admission.max_waiting\t3\t{file}" in lines
    assert "grace_s\t5.0\tenvironment" in lines
    assert "listen\t127.0.0.1:50051\tdefault" in lines


async def test_a_file_is_checked_with_the_files_that_it_names(tmp_path: Path) -> None:
    file, cert, key = (tmp_path / name for name in ("draftgate.yaml", "a.crt", "a.key"))
    file.write_text(f"security: {{tls: {{cert_file: {cert}, key_file: {key}}}}}")
    done = await run_in_pipe(["config", "check", str(file)])
    assert (done.code, done.out) == (1, "")
    assert done.err == f"error: cert_file: {cert}: No such file or directory\n"
    Authority().issue("server").write(cert, key)
    done = await run_in_pipe(["config", "check", str(file)])
    assert (done.code, done.out, done.err) == (0, f"{file}: nothing wrong\n", "")


async def test_a_wrong_setting_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "draftgate.yaml"
    file.write_text("listn: 1")
    for command in (["config", "check", str(file)], ["serve", "--config", str(file)]):
        done = await run_in_pipe(command)
        assert (done.code, done.out) == (1, "")
        assert done.err == f"error: listn: Extra inputs are not permitted ({file})\n"


async def test_a_new_key_works_when_its_entry_is_put_into_the_file(tmp_path: Path) -> None:
    done = await run_in_pipe(["keys", "new", "--tenant", "acme@example.com"])
    assert (done.code, done.err) == (0, "")
    [key] = re.findall(r"dg_\w+", done.out)
    assert key not in str(yaml.safe_load(done.out))
    file = tmp_path / "tenants.yaml"
    file.write_text(done.out)
    tenant = Authenticator(SecurityConfig(tenants_file=file)).tenant({"x-api-key": key})
    assert tenant.name == "acme@example.com"
    again = await run_in_pipe(["keys", "new", "--tenant", "acme@example.com"])
    assert again.out != done.out


async def test_a_tenant_needs_a_name_that_the_file_may_hold() -> None:
    done = await run_in_pipe(["keys", "new", "--tenant", "a b"])
    assert done.code == 2
    assert "is no name" in done.err
