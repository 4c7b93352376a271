"""The packaged model, its drafter, and prompts on topics that the drafter never trained on."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from draftgate.text import Message, Tokenizer

__all__ = ["add_folders", "held_out_prompts"]

_ROOT = Path(__file__).parent.parent
_MODEL_DIR = _ROOT / "models" / "smollm2-135m-instruct-fp8"
_DRAFTER_DIR = _ROOT / "drafters" / "smollm2-135m-instruct-eagle3"
_PROMPTS = Path(__file__).parent / "data" / "held_out.json"


def add_folders(parser: argparse.ArgumentParser) -> None:
    """Options for a model and a drafter other than the packaged ones."""
    parser.add_argument("--model-dir", type=Path, default=_MODEL_DIR, help="checkpoint folder")
    parser.add_argument("--drafter-dir", type=Path, default=_DRAFTER_DIR, help="drafter's folder")


def held_out_prompts(model_dir: Path) -> list[tuple[str, list[int]]]:
    """Each prompt's task and, as one turn of a chat, token ids; tasks mixed."""
    tokenizer = Tokenizer.load(model_dir)
    return [
        (prompt["task"], tokenizer.encode_chat([Message("user", prompt["text"])]))
        for prompt in json.loads(_PROMPTS.read_text(encoding="utf-8"))
    ]
