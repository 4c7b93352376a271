"""FP8 checkpoints: made from a GGUF file or a Hugging Face folder, cached, checked, inspected.

Importing this package needs neither torch nor the tools of the `prepare` extra; they are imported
when a checkpoint has to be made.
"""

from __future__ import annotations

from draftgate.checkpoint.check import check_checkpoint
from draftgate.checkpoint.comparison import Agreement, Scorer, compare_with_source
from draftgate.checkpoint.inspection import CheckpointReport, inspect_checkpoint
from draftgate.checkpoint.packaged import packaged_source
from draftgate.checkpoint.progress import ConsoleProgress, Progress, SilentProgress
from draftgate.checkpoint.store import ensure_checkpoint, prepare
from draftgate.checkpoint.vocabulary import vocabulary_digest

__all__ = [
    "Agreement",
    "CheckpointReport",
    "ConsoleProgress",
    "Progress",
    "Scorer",
    "SilentProgress",
    "check_checkpoint",
    "compare_with_source",
    "ensure_checkpoint",
    "inspect_checkpoint",
    "packaged_source",
    "prepare",
    "vocabulary_digest",
]
