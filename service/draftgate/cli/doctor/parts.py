"""Checks of what `draftgate serve` runs: Triton, the checkpoint, the drafter."""

from __future__ import annotations

from pathlib import Path

from draftgate.checkpoint import check_checkpoint, vocabulary_digest
from draftgate.checkpoint.architectures import ModelShape, model_shape
from draftgate.cli.doctor.result import Result, fail, ok, warn
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.jsonfile import read_object
from draftgate.upstream.triton_install import find_installation

__all__ = ["check_drafter", "check_model", "check_triton", "memory_needed"]

_KV_CACHE_BYTES = 1 << 30
"""The engine's, unless it is told otherwise."""
_PROCESSES_BYTES = 3 << 29
"""Three Python processes of Triton, one of them with torch, Triton itself, and the gateway."""
_BF16_PER_FP8 = 2
"""The engine computes on weights of twice the size that they have in the checkpoint."""


def check_triton() -> Result:
    """The server, the stub for this Python and the library that the stub links to."""
    try:
        found = find_installation()
    except DraftgateError as error:
        return fail("triton", error.message)
    return ok("triton", f"{found.server}; stub {found.stub.parent.name}; {found.libpython}")


def check_model(folder: Path, *, made_by_serve: bool) -> Result:
    """made_by_serve: whether `serve` would prepare a missing one by itself."""
    try:
        check_checkpoint(folder)
    except DraftgateError as error:
        if made_by_serve and error.code is ErrorCode.NOT_FOUND:
            return warn("model", f"{folder} is not there yet", "the first `serve` prepares it")
        return fail("model", error.message)
    shape = _shape(folder)
    return ok("model", f"{folder}: {shape.architecture}, {shape.layers} layers")


def check_drafter(folder: Path, model_dir: Path) -> Result:
    """Whether its sizes and its tokenizer are the model's, as far as they are told without
    loading the weights."""
    try:
        problem = _unfit(read_object(folder / "config.json"), _shape(model_dir))
        made_for, has = vocabulary_digest(folder), vocabulary_digest(model_dir)
    except DraftgateError as error:
        return fail("drafter", error.message)
    if not list(folder.glob("*.safetensors")):
        problem = problem or "it holds no .safetensors file"
    if made_for and has and made_for != has:
        problem = problem or "it was made for another tokenizer"
    if problem:
        return fail("drafter", f"{folder}: {problem}", "name one made for this model")
    return ok("drafter", f"{folder} fits the model")


def memory_needed(model_dir: Path) -> int:
    """About how many bytes `serve` takes with this model."""
    weights = sum(path.stat().st_size for path in model_dir.glob("*.safetensors"))
    return _BF16_PER_FP8 * weights + _KV_CACHE_BYTES + _PROCESSES_BYTES


def _shape(folder: Path) -> ModelShape:
    return model_shape(read_object(folder / "config.json"))


def _unfit(drafter: dict[str, object], model: ModelShape) -> str:
    """The first size that differs from the model's; empty if all are right."""
    sizes = {"vocab_size": model.vocab_size}
    if "draft_vocab_size" in drafter or "medusa_num_heads" in drafter:
        # Heads on the model's own states; another model has states of its own.
        sizes["hidden_size"] = model.hidden_size
    for name, wanted in sizes.items():
        if drafter.get(name) != wanted:
            return f"its {name} is {drafter.get(name)}, the model's is {wanted}"
    return ""
