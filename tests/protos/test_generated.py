"""The committed code under `draftgate._pb` is what the .proto files generate."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "generate_protos.py"
COMMITTED = ROOT / "service" / "draftgate" / "_pb"


def test_committed_code_is_what_the_protos_generate(tmp_path: Path) -> None:
    # The script also runs `buf lint` and `buf format --exit-code`, and fails with them.
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    generated = _contents(tmp_path / "draftgate" / "_pb")
    assert any(name.endswith("generation_pb2.py") for name in generated)
    committed = _contents(COMMITTED)
    assert sorted(committed) == sorted(generated), "run `make proto`"
    changed = [name for name, content in generated.items() if committed[name] != content]
    assert changed == [], "run `make proto`"


def _contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix in {".py", ".pyi"}
    }
