"""A source written out as an ordinary, unquantised Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from draftgate.checkpoint.architectures import tensor_shapes
from draftgate.checkpoint.files import write_json
from draftgate.checkpoint.progress import Progress
from draftgate.checkpoint.source import Source

if TYPE_CHECKING:
    import torch

__all__ = ["write_plain"]

_SHARD_BYTES = 2 << 30
"""Tensors kept in memory before they are written."""


def write_plain(source: Source, folder: Path, *, progress: Progress) -> None:
    """Write config, tokenizer and weights in the precision that `source.tensors()` gives."""
    write_json(folder / "config.json", dict(source.config))
    write_json(folder / "generation_config.json", dict(source.generation_config))
    source.write_tokenizer(folder)
    progress.stage("converting", len(tensor_shapes(source.shape)))
    shards = _Shards(folder)
    for name, tensor in source.tensors():
        shards.add(name, tensor)
        progress.advance()
    shards.finish()


class _Shards:
    """Collects tensors and writes them out whenever a file is full."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._total_bytes = 0
        self._weight_map: dict[str, str] = {}
        self._files = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._pending_bytes + tensor.nbytes > _SHARD_BYTES and self._pending:
            self._write(f"model-{self._files + 1:05}.safetensors")
        self._pending[name] = tensor
        self._pending_bytes += tensor.nbytes

    def finish(self) -> None:
        if self._files == 0:
            self._write("model.safetensors")
            return
        self._write(f"model-{self._files + 1:05}.safetensors")
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": self._weight_map}
        write_json(self._folder / "model.safetensors.index.json", index)

    def _write(self, file_name: str) -> None:
        from safetensors.torch import save_file

        save_file(self._pending, self._folder / file_name, metadata={"format": "pt"})
        self._weight_map.update(dict.fromkeys(self._pending, file_name))
        self._total_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0
        self._files += 1
