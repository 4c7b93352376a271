"""Cost tables that come with the package: what steps took on machines that most do not have."""

from __future__ import annotations

from pathlib import Path

from draftgate.errors import invalid_argument
from draftgate.speculation.costs import CostTable

__all__ = ["find_costs", "grid_names"]

_FOLDER = Path(__file__).parent


def grid_names() -> list[str]:
    """What `find_costs` knows by name."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def find_costs(name: str) -> CostTable:
    """A table by its name here, or by the path of a file.

    Raises DraftgateError: INVALID_ARGUMENT where it is neither or the file is not right,
    FAILED_PRECONDITION where it cannot be read.
    """
    if name in grid_names():
        return CostTable.load(_FOLDER / f"{name}.json")
    if not Path(name).exists():
        raise invalid_argument("costs", name, f"a file, or one of {', '.join(grid_names())}")
    return CostTable.load(Path(name))
