"""Check the .proto files with buf and generate the Python code of `draftgate._pb` from them.

Run as `python scripts/generate_protos.py [--out DIR]`; DIR takes the place of `service/`.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
PACKAGE = Path("draftgate/_pb")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "service", help="import root to write")
    out: Path = parser.parse_args().out
    try:
        check()
        generate(out)
    except subprocess.CalledProcessError as error:
        return int(error.returncode)
    return 0


def check() -> None:
    """Lint the .proto files and require buf's own formatting."""
    for command in (["lint"], ["format", "--diff", "--exit-code"]):
        subprocess.run([_tool("buf"), *command], cwd=PROTOS, check=True)


def generate(out: Path) -> None:
    """Write modules and type stubs under `out`/draftgate/_pb, replacing what was there."""
    target = out / PACKAGE
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as copied:
        _compile(Path(copied), out)
    for folder in (target, *(path for path in target.rglob("*") if path.is_dir())):
        (folder / "__init__.py").touch()


def _compile(copied: Path, out: Path) -> None:
    """Where the files lie for protoc decides what the generated code imports: copied under the
    package's path it is absolute, `from draftgate._pb.draftgate.v1 import generation_pb2`."""
    sources = []
    for path in sorted(PROTOS.rglob("*.proto")):
        source = PACKAGE / path.relative_to(PROTOS)
        (copied / source).parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8")
        text = text.replace('import "draftgate/', f'import "{PACKAGE}/draftgate/')
        (copied / source).write_text(text, encoding="utf-8")
        sources.append(str(source))
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"--proto_path={copied}",
            f"--proto_path={resources.files('grpc_tools') / '_proto'}",
            f"--plugin=protoc-gen-mypy={_tool('protoc-gen-mypy')}",
            f"--plugin=protoc-gen-mypy_grpc={_tool('protoc-gen-mypy_grpc')}",
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_out=quiet:{out}",
            f"--mypy_grpc_out=quiet:{out}",
            *sources,
        ],
        check=True,
    )


def _tool(name: str) -> str:
    """Path of a command installed beside the running interpreter, or else on the PATH."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        sys.exit(f"{name} is not installed: run `make setup`")
    return found


if __name__ == "__main__":
    sys.exit(main())
