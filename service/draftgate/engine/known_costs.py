"""Where an engine's table of step costs comes from: a file, an earlier start, or measuring."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from draftgate.engine.cost_profile import hardware, measure_costs
from draftgate.errors import DraftgateError
from draftgate.speculation import CostTable

if TYPE_CHECKING:
    from draftgate.engine.engine import Engine

__all__ = ["costs_file", "known_costs"]

_PROFILE_S = 10.0
"""How long measuring may take."""

_LOG = logging.getLogger(__name__)


def known_costs(engine: Engine) -> CostTable:
    """What steps cost here: as configured, or from an earlier start, or measured now."""
    if engine.config.costs_file:
        return CostTable.load(Path(engine.config.costs_file))
    try:
        path = costs_file(engine)
        if path.exists():
            return CostTable.load(path)
    except RuntimeError:
        path = None
    except DraftgateError as error:
        _LOG.warning("the costs are measured again: %s", error.message)
    _LOG.info("measuring what steps cost here, for the gate: about 10 s, at the first start only")
    begun_s = time.monotonic()
    costs = measure_costs(engine, _PROFILE_S)
    took_s = time.monotonic() - begun_s
    _LOG.info("measured what steps cost in %.1f s", took_s)
    if took_s > 2 * _PROFILE_S:
        _LOG.warning("the machine was busy: what steps cost is measured again at the next start")
    elif path is None:
        _LOG.warning("the costs are not kept: there is no home directory")
    else:
        _keep(costs, path)
    return costs


def _keep(costs: CostTable, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        costs.save(path)
    except OSError as error:
        _LOG.warning("the costs are not kept: %s", error)


def costs_file(engine: Engine) -> Path:
    """Where the table of such an engine on such a machine is kept, in the user's cache.

    Raises RuntimeError where the user has none.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    config = engine.config
    told = {
        "hardware": hardware(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "model": [str(engine.target.config.folder.resolve()), engine.target.config.quantization],
        "dtype": config.dtype,
        "drafter": [config.drafter, config.drafter_dir, config.draft_len, config.draft_width],
        "rows": engine.max_batch_rows,
        "positions": engine.max_sequence_tokens,
    }
    key = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]
    return cache / "draftgate" / "costs" / f"{key}.json"
