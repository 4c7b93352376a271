"""FP8 with NVIDIA Model-Optimizer: E4M3 weights, per-tensor scales of weights and inputs."""

from __future__ import annotations

import copy
import importlib.metadata
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftgate.checkpoint.files import bad_file, read_json, write_json
from draftgate.checkpoint.progress import Progress
from draftgate.checkpoint.source import Source, import_prepare_tool

if TYPE_CHECKING:
    import torch

__all__ = ["CALIBRATION_TEXT", "quantise", "tool_versions"]

CALIBRATION_TEXT = "calibration.txt"
_CALIBRATION_TOKENS = 256
"""Tokens in one calibration forward. Scales are maxima, so more of the same changes little."""
_KNOWN_WARNINGS: tuple[tuple[type[Warning], str], ...] = (
    # modelopt.torch.export copies scales with torch.tensor(tensor).
    (UserWarning, "To copy construct from a tensor"),
    # modelopt's kernels are scripted on import.
    (DeprecationWarning, r"`torch\.jit\.script"),
    # Said beside an error that is raised all the same, such as a full disk.
    (UserWarning, "Cannot export model to the model_config"),
)


def quantise(source: Source, folder: Path, *, progress: Progress) -> None:
    """Write `source` into `folder` as an FP8 checkpoint in ModelOpt's layout, with its tokenizer.

    Linear layers become E4M3 with a fp32 `weight_scale` and, from running the calibration text,
    an `input_scale`; embeddings, norms, biases and lm_head stay bf16. Needs the memory of the
    bf16 model and of its FP8 copy.
    """
    progress.stage("loading tools", 1)
    torch = import_prepare_tool("torch")
    transformers = import_prepare_tool("transformers")
    with _quiet_tools(transformers):
        quantization = import_prepare_tool("modelopt.torch.quantization")
        export = import_prepare_tool("modelopt.torch.export")
        progress.advance()

        model = _build_model(transformers, source, _read_tensors(source, progress))
        source.write_tokenizer(folder)
        batches = _calibration_batches(folder / "tokenizer.json", source.shape.max_positions)
        progress.stage("quantising", len(batches))

        def run_calibration(model: Any) -> None:
            with torch.no_grad():
                for ids in batches:
                    model(input_ids=ids, use_cache=False)
                    progress.advance()

        quantization.quantize(model, quantization.FP8_DEFAULT_CFG, run_calibration)
        progress.stage("writing", 1)
        export.export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=folder)
    _write_configs(source, folder)
    progress.advance()


def tool_versions() -> dict[str, str]:
    """Versions of the packages that decide the bytes of a checkpoint."""
    names = ("nvidia-modelopt", "torch", "transformers", "gguf", "tokenizers", "safetensors")
    return {name: importlib.metadata.version(name) for name in names}


def _read_tensors(source: Source, progress: Progress) -> dict[str, torch.Tensor]:
    import torch

    from draftgate.checkpoint.architectures import tensor_shapes

    progress.stage("converting", len(tensor_shapes(source.shape)))
    state = {}
    for name, tensor in source.tensors():
        state[name] = tensor.to(torch.bfloat16)
        if not state[name].isfinite().all():
            raise bad_file(source.path, f"tensor {name} is not finite in bf16")
        progress.advance()
    return state


def _build_model(transformers: Any, source: Source, state: dict[str, torch.Tensor]) -> Any:
    import torch

    model_class = getattr(transformers, source.shape.architecture)
    # transformers writes into the dictionaries it is given.
    config = model_class.config_class.from_dict(copy.deepcopy(dict(source.config)))
    generation = transformers.GenerationConfig.from_dict(dict(source.generation_config))
    model = model_class.from_pretrained(None, config=config, state_dict=state, dtype=torch.bfloat16)
    model.generation_config = generation
    return model.eval()


def _calibration_batches(tokenizer_file: Path, max_positions: int) -> list[torch.Tensor]:
    """The calibration text as [1, tokens] batches."""
    import torch
    from tokenizers import Tokenizer

    text = resources.files("draftgate.checkpoint").joinpath("data", CALIBRATION_TEXT)
    ids = Tokenizer.from_file(str(tokenizer_file)).encode(text.read_text(encoding="utf-8")).ids
    size = min(_CALIBRATION_TOKENS, max_positions)
    return [torch.tensor([ids[start : start + size]]) for start in range(0, len(ids), size)]


def _write_configs(source: Source, folder: Path) -> None:
    """Our own config.json with ModelOpt's quantisation section: it loads in transformers 4 too."""
    exported = read_json(folder / "config.json")
    config = {**source.config, "dtype": "bfloat16"}
    config.pop("torch_dtype", None)
    config["quantization_config"] = exported["quantization_config"]
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", dict(source.generation_config))


@contextmanager
def _quiet_tools(transformers: Any) -> Iterator[None]:
    """Keep the tools' own chatter and progress bars away, and their known warnings only."""
    log = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    ties = logging.getLogger("modelopt.torch.export.quant_utils")
    ties.addFilter(_is_not_about_ties)
    try:
        with redirect_stdout(io.StringIO()), warnings.catch_warnings():
            for category, message in _KNOWN_WARNINGS:
                warnings.filterwarnings("ignore", message, category)
            yield
    finally:
        ties.removeFilter(_is_not_about_ties)
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()


def _is_not_about_ties(record: logging.LogRecord) -> bool:
    """Dropping the alias of tied embeddings is what we want."""
    return not record.getMessage().startswith("Tied weight (declared)")
