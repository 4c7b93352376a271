"""`draftgate doctor` as a program."""

from __future__ import annotations

import json
from pathlib import Path

from tests.conftest import DRAFTER_DIR
from tests.fakes.triton import FakeTriton
from tests.support.gateway import connected, running_gateway
from tests.support.terminal import on_terminal, run_in_pipe


async def test_a_machine_that_can_serve(checkpoint_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "draftgate.yaml"
    file.write_text("{listen: '127.0.0.1:0', admin_listen: '127.0.0.1:0'}")
    done = await run_in_pipe(
        [
            *("doctor", "--config", str(file), "--model-dir", str(checkpoint_dir)),
            *("--drafter-dir", str(DRAFTER_DIR)),
        ]
    )
    assert (done.code, done.err) == (0, "")
    rows = [line.split("\t") for line in done.out.splitlines()]
    assert [name for _, name, _, _ in rows] == [
        *("settings", "python", "packages", "cores", "numpy", "engine", "preparing", "triton"),
        *("model", "memory", "drafter", "listen", "admin listen", "open files", "certificates"),
        "tenants",
    ]
    assert {verdict for verdict, _, _, _ in rows} <= {"ok", "warn"}
    assert all(remedy for verdict, _, _, remedy in rows if verdict == "warn")


async def test_what_fails_is_the_exit_code_and_one_line(tmp_path: Path) -> None:
    file = tmp_path / "draftgate.yaml"
    file.write_text("listn: 1")
    done = await run_in_pipe(["doctor", "--config", str(file)])
    assert (done.code, done.err) == (1, "error: 1 of 4 checks failed: settings\n")
    assert done.out.startswith(f"fail\tsettings\tlistn: Extra inputs are not permitted ({file})\t")


async def test_a_running_gateway_as_json(triton: FakeTriton) -> None:
    async with running_gateway(triton.target) as gateway:
        async with connected(gateway) as client:
            await client.wait_serving()
        done = await run_in_pipe(["doctor", gateway.address, "--json"])
        assert (done.code, done.err) == (0, "")
        checks = json.loads(done.out)["checks"]
        assert {each["verdict"] for each in checks} == {"ok"}
        assert set(checks[0]) == {"name", "verdict", "found", "remedy"}
        address = gateway.address
    done = await run_in_pipe(["doctor", address, "--json"])
    assert (done.code, done.err) == (1, "error: 1 of 1 checks failed: reachable\n")
    [check] = json.loads(done.out)["checks"]
    assert check["remedy"].startswith("start one with `draftgate serve`")


async def test_a_terminal_gets_columns_and_colours(tmp_path: Path) -> None:
    async with on_terminal("doctor", "127.0.0.1:1") as terminal:
        assert await terminal.ends() == 1
    assert "\x1b[31mfail\x1b[0m  reachable     nothing listens on 127.0.0.1:1" in terminal.screen
    assert "→ start one with `draftgate serve`" in terminal.screen


async def test_an_address_that_is_none_is_wrong_usage() -> None:
    for arguments in (["nonsense"], ["a:1", "--admin", "b"]):
        done = await run_in_pipe(["doctor", *arguments])
        assert done.code == 2
        assert "is no HOST:PORT" in done.err


async def test_settings_of_a_gateway_alone_have_their_tritons_looked_at(
    triton: FakeTriton, tmp_path: Path
) -> None:
    file = tmp_path / "draftgate.yaml"

    async def look() -> dict[str, list[tuple[str, str]]]:
        done = await run_in_pipe(["doctor", "--config", str(file)])
        assert done.code == 1
        found: dict[str, list[tuple[str, str]]] = {}
        for line in done.out.splitlines():
            verdict, name, text, _ = line.split("\t")
            found.setdefault(name, []).append((verdict, text))
        return found

    async with running_gateway(triton.target) as gateway:
        targets = f"{triton.target},127.0.0.1:1"
        file.write_text(f"{{triton: '{targets}', listen: '{gateway.address}'}}")
        found = await look()
        (first, second) = found["triton"]
        assert first == ("ok", f"{triton.target}: ready, draftgate, entered at ensemble")
        assert second[0] == "fail"
        assert "engine" not in found
        # The port is not free, and that is right.
        shown = f"a gateway serves on {gateway.address}: `draftgate doctor {gateway.address}` "
        assert found["listen"] == [("ok", f"{shown}looks at it")]
    triton.not_ready_models.add("engine")
    file.write_text(f"{{triton: '{triton.target}', listen: '127.0.0.1:0'}}")
    assert (await look())["triton"] == [("fail", f"{triton.target}: models not ready: engine")]
