from __future__ import annotations

from pathlib import Path


def test_the_packaged_model_is_prepared(checkpoint_dir: Path) -> None:
    assert (checkpoint_dir / "hf_quant_config.json").is_file()
