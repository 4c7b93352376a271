"""`draftgate config` and `draftgate keys`."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
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
    assert done.err == "".join(
        f"error: {name}: {path}: No such file or directory\n"
        for name, path in (("cert_file", cert), ("key_file", key))
    )
    Authority().issue("server").write(cert, key)
    done = await run_in_pipe(["config", "check", str(file)])
    assert (done.code, done.out, done.err) == (0, f"{file}: nothing wrong\n", "")


async def test_all_that_is_wrong_is_told_a_line_each(tmp_path: Path) -> None:
    file = tmp_path / "draftgate.yaml"
    there, missing = tmp_path / "there", tmp_path / "missing"
    there.write_text("{not: {what: it}, should: be}")
    folder = tmp_path / "model"
    folder.mkdir()
    file.write_text(
        f"""
        listen: 0.0.0.0:1
        admin_listen: here
        triton: nonsense
        tokenizer_dir: {folder}
        grace_s: -1
        defaults: {{max_tokens: 9, top_p: 0}}
        max_output_tokens: 8
        security:
          tls: {{cert_file: {there}, key_file: {missing}, client_ca_file: {there}}}
          tenants_file: {there}
          jwt: {{jwks_file: {missing}, issuer: i, audience: a}}
        """
    )
    done = await run_in_pipe(["config", "check", str(file)], env={"DRAFTGATE_LISTN": "x"})
    assert (done.code, done.out) == (1, "")
    expected = [
        "DRAFTGATE_LISTN: it names no setting; the nearest is DRAFTGATE_LISTEN (environment)",
        f"grace_s: Input should be greater than or equal to 0 ({file})",
        f"defaults.top_p: got 0.0, allowed: a finite number above 0 to 1 ({file})",
        f"defaults.max_tokens: got 9, allowed: at most max_output_tokens, 8 ({file})",
        "cannot listen on here: give host:port with a port from 0 to 65535",
        "triton: got 'nonsense', allowed: HOST:PORT or dns:///NAME:PORT, several separated by ",
        f"cannot read {folder / 'tokenizer.json'}: No such file or directory",
        f"key_file: {missing}: No such file or directory",
        f"client_ca_file: {there}: no certificate",
        f"{there}: tenants: Field required; not: Extra inputs are not permitted; should: Extra ",
        f"jwks_file: {missing}: No such file or directory",
    ]
    told = done.err.splitlines()
    assert len(told) == len(expected)
    for line, begins in zip(told, expected, strict=True):
        assert line.startswith(f"error: {begins}")


async def test_an_address_is_not_blamed_for_certificates_that_are_wrong(tmp_path: Path) -> None:
    file = tmp_path / "draftgate.yaml"
    file.write_text("listen: 0.0.0.0:50999\nsecurity: {tls: {cert_file: a.crt}}")
    done = await run_in_pipe(["config", "check", str(file)])
    assert done.err == "error: security.tls.key_file: Field required\n"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ("listen: 0.0.0.0:50999", "cannot listen on 0.0.0.0:50999: other machines could reach it"),
        ("listen: here", "cannot listen on here: give host:port with a port from 0 to 65535"),
        ("listen: 127.0.0.1:99999", "cannot listen on 127.0.0.1:99999: give host:port"),
        (
            "{listen: 127.0.0.1:5, admin_listen: 127.0.0.1:5}",
            "admin_listen: got '127.0.0.1:5', allowed: another port than listen's",
        ),
        ("triton: nonsense", "triton: got 'nonsense', allowed: HOST:PORT or dns:///NAME:PORT"),
        ("listen: a:1\nlisten: b:1", "{file}: a key that stands twice at line 2, column 1"),
        ("admission: {max_waiting: 1, max_waiting: 2}", "{file}: a key that stands twice at line"),
    ],
)
async def test_what_would_keep_it_from_starting_is_found(
    tmp_path: Path, settings: str, problem: str
) -> None:
    file = tmp_path / "draftgate.yaml"
    file.write_text(settings)
    done = await run_in_pipe(["config", "check", str(file)])
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"error: {problem.format(file=file)}")


async def test_an_address_that_is_in_use_is_no_fault_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "draftgate.yaml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        file.write_text(f"listen: 127.0.0.1:{taken.getsockname()[1]}")
        done = await run_in_pipe(["config", "check", str(file)])
    assert (done.code, done.err) == (0, "")


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
