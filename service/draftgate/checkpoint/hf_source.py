"""A Hugging Face folder with safetensors as a source."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftgate.checkpoint.architectures import (
    ModelShape,
    model_shape,
    tensor_shapes,
    unsupported,
)
from draftgate.checkpoint.files import bad_file, read_json
from draftgate.checkpoint.gguf_tokenizer import CHAT_TEMPLATE_FILE
from draftgate.checkpoint.source import check_shape, import_prepare_tool

if TYPE_CHECKING:
    import torch

__all__ = ["HfSource", "safetensors_files", "source_files"]

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    CHAT_TEMPLATE_FILE,
)
_INDEX = "model.safetensors.index.json"
_DTYPES = ("F32", "BF16", "F16")


class HfSource:
    """A folder with config.json, *.safetensors and tokenizer.json, not quantised.

    Raises `DraftgateError` when something is missing, broken or not supported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / "config.json").is_file():
            raise bad_file(path, "has no config.json; give a GGUF file or a model folder")
        config = read_json(path / "config.json")
        if config.get("quantization_config") or (path / "hf_quant_config.json").exists():
            raise bad_file(path, "is already quantised; give the folder of the original model")
        self.shape: ModelShape = model_shape(config)
        self.config: Mapping[str, Any] = _portable(config)
        if not (path / "tokenizer.json").is_file():
            raise bad_file(
                path,
                "has no tokenizer.json; write one with transformers: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)",
            )
        self._files = self._check_tensors()

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """The folder's own, or the special token ids of config.json."""
        path = self.path / "generation_config.json"
        if path.is_file():
            return read_json(path)
        keys = ("bos_token_id", "eos_token_id", "pad_token_id")
        return {key: self.config[key] for key in keys if self.config.get(key) is not None}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Read one tensor at a time."""
        from safetensors import safe_open

        for name, file in self._files.items():
            with safe_open(file, framework="pt") as opened:
                yield name, opened.get_tensor(name)

    def write_tokenizer(self, folder: Path) -> None:
        """Copy the tokenizer; a template kept in tokenizer_config.json gets its own file too."""
        for name in _TOKENIZER_FILES:
            if (self.path / name).is_file():
                shutil.copyfile(self.path / name, folder / name)
        template = folder / CHAT_TEMPLATE_FILE
        config = self.path / "tokenizer_config.json"
        if template.exists() or not config.is_file():
            return
        inside = read_json(config).get("chat_template")
        if isinstance(inside, list):
            named = {entry.get("name"): entry.get("template") for entry in inside}
            inside = named.get("default")
        if inside:
            template.write_text(inside, encoding="utf-8")

    def _check_tensors(self) -> dict[str, Path]:
        """The file of every wanted tensor, in file order."""
        import_prepare_tool("safetensors")
        from safetensors import SafetensorError, safe_open

        wanted = tensor_shapes(self.shape)
        found: dict[str, Path] = {}
        extra: list[str] = []
        for file in safetensors_files(self.path):
            try:
                with safe_open(file, framework="np") as opened:
                    for name in opened.keys():  # noqa: SIM118 - not a mapping
                        if name not in wanted:
                            extra.append(name)
                            continue
                        tensor = opened.get_slice(name)
                        check_shape(file, name, tuple(tensor.get_shape()), wanted[name])
                        if tensor.get_dtype() not in _DTYPES:
                            raise bad_file(
                                file,
                                f"tensor {name} is {tensor.get_dtype()}, "
                                f"not one of {', '.join(_DTYPES)}",
                            )
                        found[name] = file
            except (SafetensorError, OSError) as error:
                raise bad_file(file, f"cannot be read as safetensors: {error}") from error
        missing = [name for name in wanted if name not in found]
        if missing:
            raise bad_file(self.path, f"tensor {missing[0]} is missing ({len(missing)} in all)")
        extra = [name for name in extra if not _is_redundant(name)]
        if extra:
            raise unsupported(f"a {self.shape.architecture} checkpoint with tensor {extra[0]}")
        return found


def safetensors_files(folder: Path) -> list[Path]:
    """The weight files of a model folder: those of the index, or the single one.

    Raises `DraftgateError` (FAILED_PRECONDITION) if there are none or one is missing.
    """
    if (folder / _INDEX).is_file():
        weight_map = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise bad_file(folder, f"{_INDEX} has no weight_map")
        files = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        files = [folder / "model.safetensors"]
    for file in files:
        if not file.is_file():
            raise bad_file(folder, f"has no {file.name}; only safetensors weights are read")
    return files


def source_files(folder: Path) -> list[Path]:
    """Every file of a model folder that decides what is prepared from it."""
    names = ("config.json", "generation_config.json", _INDEX, *_TOKENIZER_FILES)
    present = [folder / name for name in names if (folder / name).is_file()]
    return present + safetensors_files(folder)


def _portable(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without the writer's paths, with rope as transformers 4 writes it.

    transformers 5 reads both forms; 4, which TensorRT-LLM brings, would silently fall back to a
    base of 10000 on the newer one.
    """
    portable = {key: value for key, value in config.items() if key != "_name_or_path"}
    parameters = dict(portable.pop("rope_parameters", None) or {})
    if parameters:
        portable["rope_theta"] = parameters.pop("rope_theta", portable.get("rope_theta", 10000.0))
        kind = parameters.get("rope_type", "default")
        portable["rope_scaling"] = None if kind == "default" else parameters
    return portable


def _is_redundant(name: str) -> bool:
    """What some writers add: a second copy of tied embeddings, the rotation's own frequencies."""
    return name == "lm_head.weight" or name.endswith(".rotary_emb.inv_freq")
