"""Tiny EAGLE-3 drafters with random weights, and what such a drafter must hold for its rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draftgate.engine.drafters import EagleDrafter, Settled
from draftgate.engine.kv_cache import KVStore
from tests.support.speculation import PacedDrafter

TAPS = (0, 1, 2)
"""For a target of two layers: every layer's input and the output of the last."""


def drafter_tensors(
    config: Mapping[str, Any], *, draft_vocab: int, taps: int, seed: int, sharpness: float = 1.0
) -> dict[str, torch.Tensor]:
    """Random weights for the sizes of `config`, scaled to keep hidden states the same size."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config["head_dim"]
    query, kv = (config[f"num_{kind}_heads"] * head_dim for kind in ("attention", "key_value"))
    matrices = {
        "fc": (hidden, taps * hidden),
        "midlayer.self_attn.q_proj": (query, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, query),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
        "lm_head": (draft_vocab, hidden),
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator) / shape[1] ** 0.5
        for name, shape in matrices.items()
    }
    for name in (*(f"midlayer.{norm}" for norm in norms), "norm"):
        tensors[f"{name}.weight"] = 1.0 + 0.1 * torch.randn(hidden, generator=generator)
    chosen = torch.randperm(config["vocab_size"], generator=generator)[:draft_vocab].sort().values
    tensors["lm_head.weight"] *= sharpness
    tensors["d2t"] = chosen - torch.arange(draft_vocab)
    tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool)
    tensors["t2d"][chosen] = True
    return tensors


def write_drafter(
    folder: Path,
    target: Path | Mapping[str, Any],
    *,
    draft_vocab: int,
    seed: int = 0,
    taps: Sequence[int] | None = TAPS,
    sharpness: float = 1.0,
    **config: Any,
) -> Path:
    """An EAGLE-3 folder in the Hugging Face layout for a target's folder or `config.json`.

    taps: the tapped layers, None to leave the choice to who loads it. sharpness: how much more it
    likes some tokens than others. config: what differs from the target's `config.json`.
    """
    raw = json.loads((target / "config.json").read_text()) if isinstance(target, Path) else target
    sizes = {key: raw[key] for key in _SIZES if key in raw}
    sizes.setdefault("head_dim", sizes["hidden_size"] // sizes["num_attention_heads"])
    written = {
        **sizes,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocab,
        "tie_word_embeddings": False,
        **({"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(taps)}} if taps else {}),
        **config,
    }
    count = len(taps) if taps else 3
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(written))
    tensors = drafter_tensors(
        written, draft_vocab=draft_vocab, taps=count, seed=seed, sharpness=sharpness
    )
    save_file(tensors, folder / "model.safetensors")
    return folder


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
)


@dataclass(frozen=True)
class Held:
    """What an EAGLE drafter holds for a row once a pass is settled."""

    tokens: tuple[int, ...]
    keys: torch.Tensor
    """[kv_heads, positions, head_dim]: of the tokens but the last."""
    values: torch.Tensor
    inputs: torch.Tensor
    """[2 * hidden] of the last position."""
    hidden: torch.Tensor
    """[hidden] of the last position."""

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        return self.keys, self.values, self.inputs, self.hidden


class WatchedEagle(PacedDrafter):
    """Keeps what an EAGLE drafter holds for each row, as of the row's last pass."""

    inner: EagleDrafter

    def attach(self, store: KVStore) -> None:
        super().attach(store)
        self._store = store
        self.held: dict[int, Held] = {}
        """By row id, that is in the order of arrival."""

    def observe(self, rows: Sequence[Settled], features: torch.Tensor | None) -> None:
        super().observe(rows, features)
        for row in rows:
            self.held[row.row_id] = self._held(row)

    def _held(self, row: Settled) -> Held:
        """What it would have once it had taken in what it keeps for later; that stays as it is."""
        sides = [
            side[0] for side in self._store.read(0, row.slot, row.slot + 1, row.upto - 1)
        ]  # keys and values
        before = [side.clone() for side in sides]
        caught_up, known = copy(self.inner), self.inner._rows[row.row_id]
        caught_up._rows = {row.row_id: replace(known)}
        caught_up._take_in([row])
        newest = caught_up._rows[row.row_id].newest
        assert newest is not None
        keys, values = (side.clone() for side in sides)
        for side, kept in zip(sides, before, strict=True):
            side.copy_(kept)
        inputs, hidden = (each.clone() for each in newest)
        return Held(tuple(row.tokens[: row.upto]), keys, values, inputs, hidden)
