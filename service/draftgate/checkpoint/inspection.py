"""What is in a prepared checkpoint, or in an ordinary Hugging Face folder."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from draftgate.checkpoint.architectures import ModelShape, model_shape
from draftgate.checkpoint.files import bad_file, read_json
from draftgate.checkpoint.gguf_tokenizer import CHAT_TEMPLATE_FILE
from draftgate.checkpoint.layout import StoredTensor, stored_tensors
from draftgate.checkpoint.manifest import MANIFEST_FILE

__all__ = ["CheckpointReport", "ScaleRange", "TokenizerReport", "inspect_checkpoint"]


@dataclass(frozen=True)
class ScaleRange:
    """The per-tensor scales of one kind over all quantised layers."""

    count: int
    smallest: float
    largest: float


@dataclass(frozen=True)
class TokenizerReport:
    """The tokenizer beside the weights."""

    kind: str
    """Model of tokenizer.json: BPE, Unigram, ..."""
    tokens: int
    """Entries, added ones included; may differ from the rows of the embedding table."""
    special_tokens: int
    has_chat_template: bool


@dataclass(frozen=True)
class CheckpointReport:
    """Everything that `draftgate model inspect` shows of a folder."""

    shape: ModelShape
    parameters: int
    """Weights, tied ones once, scales not counted."""
    bytes_by_dtype: Mapping[str, int]
    """Stored bytes under the name that safetensors gives the dtype."""
    quantization: str
    """`FP8` or `none`."""
    quantized_layers: int
    """Linear layers stored in FP8."""
    excluded_modules: tuple[str, ...]
    weight_scales: ScaleRange | None
    input_scales: ScaleRange | None
    tokenizer: TokenizerReport
    source_name: str
    """File or folder that it was prepared from; empty without a manifest."""
    source_sha256: str
    """Digest of that source; empty without a manifest."""


def inspect_checkpoint(folder: Path) -> CheckpointReport:
    """Read headers, scales and configuration; the weights themselves are not read.

    Raises `DraftgateError`: FAILED_PRECONDITION if it is not a model folder or is damaged,
    UNIMPLEMENTED for an architecture that Draftgate does not run.
    """
    if not (folder / "config.json").is_file():
        raise bad_file(folder, "is not a model folder: it has no config.json")
    tensors = dict(stored_tensors(folder))
    by_dtype: Counter[str] = Counter()
    for tensor in tensors.values():
        by_dtype[tensor.dtype] += tensor.bytes
    scales = {name for name in tensors if name.endswith("_scale")}
    quantization = {}
    if (folder / "hf_quant_config.json").is_file():
        quantization = read_json(folder / "hf_quant_config.json").get("quantization", {})
    source = {}
    if (folder / MANIFEST_FILE).is_file():
        source = read_json(folder / MANIFEST_FILE).get("source", {})
    return CheckpointReport(
        shape=model_shape(read_json(folder / "config.json")),
        parameters=sum(math.prod(tensors[name].shape) for name in tensors.keys() - scales),
        bytes_by_dtype=dict(by_dtype.most_common()),
        quantization=quantization.get("quant_algo") or "none",
        quantized_layers=sum(tensor.dtype == "F8_E4M3" for tensor in tensors.values()),
        excluded_modules=tuple(quantization.get("exclude_modules") or ()),
        weight_scales=_scale_range(tensors, ".weight_scale"),
        input_scales=_scale_range(tensors, ".input_scale"),
        tokenizer=_tokenizer(folder),
        source_name=source.get("name", ""),
        source_sha256=source.get("sha256", ""),
    )


def _scale_range(tensors: Mapping[str, StoredTensor], suffix: str) -> ScaleRange | None:
    values = [
        tensor.value
        for name, tensor in tensors.items()
        if name.endswith(suffix) and tensor.value is not None
    ]
    return ScaleRange(len(values), min(values), max(values)) if values else None


def _tokenizer(folder: Path) -> TokenizerReport:
    if not (folder / "tokenizer.json").is_file():
        raise bad_file(folder, "has no tokenizer.json")
    content = read_json(folder / "tokenizer.json")
    added = content.get("added_tokens") or []
    vocabulary = content.get("model", {}).get("vocab") or {}
    # A mapping for BPE, pairs of token and score for Unigram.
    names = {entry if isinstance(entry, str) else entry[0] for entry in vocabulary}
    return TokenizerReport(
        kind=content.get("model", {}).get("type", "unknown"),
        tokens=len(names | {token["content"] for token in added}),
        special_tokens=sum(bool(token.get("special")) for token in added),
        has_chat_template=(folder / CHAT_TEMPLATE_FILE).is_file(),
    )
