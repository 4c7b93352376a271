"""The EAGLE-3 head: a fusion of target features, one decoder layer, a reduced vocabulary.

The architecture is EAGLE-3's (arXiv 2503.01840, section 3) in the Hugging Face layout that
TensorRT-LLM, vLLM and SGLang load: `fc`, `midlayer.*`, `norm`, `lm_head`, `d2t`, `t2d`.

The head's position i takes in the target's features at position i and the embedding of token
i + 1; it foretells token i + 2. Beyond the last token that the target computed, its own output
stands in for the features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from draftgate.checkpoint.architectures import ModelShape, model_shape
from draftgate.engine.attention import AttentionPlan, RowSpan, plan_attention
from draftgate.engine.drafters.fit import check_sizes, check_vocabulary, unfit
from draftgate.engine.kv_cache import KVShape, KVStore
from draftgate.engine.linear import Linear, padded
from draftgate.engine.model import Target
from draftgate.engine.rope import RopeTable, rotate_
from draftgate.engine.weights import CheckpointReader
from draftgate.jsonfile import read_object

__all__ = ["EagleConfig", "EagleHead", "default_taps"]


def default_taps(layers: int) -> tuple[int, int, int]:
    """The layers of a target whose inputs are tapped where a folder names none.

    As in TensorRT-LLM, vLLM and SGLang: the outputs of layers 1, n / 2 - 1 and n - 4.
    """
    return 2, layers // 2, layers - 3


@dataclass(frozen=True)
class EagleConfig:
    """An EAGLE-3 folder's `config.json`."""

    shape: ModelShape
    """The decoder layer's sizes; `vocab_size` is the target's."""
    draft_vocab_size: int
    """Tokens that it can foretell."""
    taps: tuple[int, ...]
    """Layers of the target whose inputs are fused."""
    norm_before_residual: bool
    """Whether the residual starts from the normalised features."""

    @classmethod
    def load(cls, folder: Path, target_layers: int) -> EagleConfig:
        """Raises DraftgateError when the folder holds no EAGLE-3 drafter, naming what differs."""
        raw = read_object(folder / "config.json")
        if "draft_vocab_size" not in raw:
            raise unfit(f"{folder}: config.json has no draft_vocab_size: not an EAGLE-3 drafter")
        size = raw["draft_vocab_size"]
        if type(size) is not int or size < 1:
            raise unfit(f"{folder}: draft_vocab_size is {size!r}, not an integer above 0")
        shape = model_shape({**raw, "architectures": ["LlamaForCausalLM"], "model_type": "llama"})
        if shape.layers != 1:
            raise unfit(f"{folder}: num_hidden_layers is {shape.layers}, EAGLE-3 has 1")
        if shape.qkv_bias or shape.output_bias:
            raise unfit(f"{folder}: attention_bias is set, EAGLE-3 heads have no biases")
        return cls(
            shape=replace(shape, tied_embeddings=False),
            draft_vocab_size=size,
            taps=_taps(folder, raw, target_layers),
            norm_before_residual=bool(raw.get("norm_before_residual", False)),
        )


class EagleHead:
    """The head's weights and its two halves: taking a position in, and reading the next token."""

    def __init__(self, folder: Path, target: Target) -> None:
        """Raises DraftgateError(FAILED_PRECONDITION) when it is not a drafter for this target."""
        wanted = target.config.shape
        self.config = config = EagleConfig.load(folder, wanted.layers)
        _check_fit(folder, config, target)
        self._device, self._dtype = target.device, target.dtype
        self._target = target
        reader = CheckpointReader(folder, prepared=False)
        shape, hidden = config.shape, config.shape.hidden_size
        query_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        layer, attention = "midlayer.", "midlayer.self_attn."

        def vector(name: str) -> torch.Tensor:
            return reader.weight(name, (hidden,)).to(self._dtype).to(self._device)

        def linear(parts: Sequence[tuple[str, int]], width: int) -> Linear:
            weights = [reader.weight(f"{name}.weight", (out, width)) for name, out in parts]
            return Linear(torch.cat(weights).to(self._dtype).to(self._device).contiguous())

        self._fuse = linear([("fc", hidden)], hidden * len(config.taps))
        self._embedding_norm = vector(layer + "input_layernorm.weight")
        self._hidden_norm = vector(layer + "hidden_norm.weight")
        self._query = linear([(attention + "q_proj", query_width)], 2 * hidden)
        self._key_value = linear(
            [(attention + "k_proj", kv_width), (attention + "v_proj", kv_width)], 2 * hidden
        )
        self._output = linear([(attention + "o_proj", hidden)], query_width)
        self._feed_forward_norm = vector(layer + "post_attention_layernorm.weight")
        self._gate = linear([(layer + "mlp.gate_proj", shape.intermediate_size)], hidden)
        self._up = linear([(layer + "mlp.up_proj", shape.intermediate_size)], hidden)
        self._down = linear([(layer + "mlp.down_proj", hidden)], shape.intermediate_size)
        self._norm = vector("norm.weight")
        self._head = linear([("lm_head", config.draft_vocab_size)], hidden)
        self._rope = RopeTable(
            shape.rope, shape.head_dim, wanted.max_positions, self._dtype, self._device
        )
        self.vocabulary = self._vocabulary(folder, reader).to(self._device)
        """[draft vocab] int64: the target's ids of the tokens it can foretell."""

    @property
    def kv_shape(self) -> KVShape:
        """What the head keeps for a position."""
        shape = self.config.shape
        return KVShape(1, shape.kv_heads, shape.head_dim)

    def plan(self, spans: Sequence[RowSpan]) -> AttentionPlan:
        """How attention runs over these rows."""
        shape = self.config.shape
        return plan_attention(
            spans,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=self._dtype,
            device=self._device,
        )

    def fused(self, features: torch.Tensor) -> torch.Tensor:
        """features [tokens, taps * hidden] to hidden states [tokens, hidden]."""
        return self._fuse(padded(features))[: len(features)]

    def take_in(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        index: torch.Tensor,
        store: KVStore,
    ) -> torch.Tensor:
        """Write the keys and values of some positions; they depend on no other position.

        token_ids: [n] the tokens one further on; hidden: [n, hidden] fused features, or what
        `read_out` gave; index: [n] where in the store. Returns the layer's inputs [n, 2 * hidden].
        """
        embedded = self._normed(self._target.embedded(token_ids), self._embedding_norm)
        inputs = torch.cat((embedded, self._normed(hidden, self._hidden_norm)), dim=1)
        kv = self._key_value(padded(inputs))[: len(inputs)]
        shape = self.config.shape
        keys = kv.view(len(kv), -1, shape.head_dim)[:, : shape.kv_heads]
        rotate_(keys, *self._rope.at(positions))
        store.write(0, index, kv)
        return inputs

    def read_out(
        self,
        inputs: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        plan: AttentionPlan,
        store: KVStore,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One position a row: inputs from `take_in` and its hidden [rows, hidden].

        Returns the layer's output [rows, hidden] and logits [rows, draft vocab].
        """
        rows, shape = len(inputs), self.config.shape
        if self.config.norm_before_residual:
            hidden = inputs[:, shape.hidden_size :]
        query = self._query(padded(inputs))[:rows].view(rows, shape.heads, shape.head_dim)
        rotate_(query, *self._rope.at(positions))
        context = padded(plan.attend(query, store, 0))
        x = self._output.plus(context, padded(hidden))
        h = self._normed(x, self._feed_forward_norm)
        x = self._down.plus(self._up.times(h, self._gate.silu(h)), x)
        return x[:rows], self._head(self._normed(x, self._norm))[:rows]

    def _vocabulary(self, folder: Path, reader: CheckpointReader) -> torch.Tensor:
        """`d2t` holds what to add to a draft id to get the target's."""
        offsets = reader.stored("d2t").long()
        size, vocab = self.config.draft_vocab_size, self.config.shape.vocab_size
        if tuple(offsets.shape) != (size,):
            raise unfit(
                f"{folder}: d2t has shape {list(offsets.shape)}, draft_vocab_size is {size}"
            )
        ids = torch.arange(size) + offsets
        if bool((ids < 0).any()) or bool((ids >= vocab).any()):
            raise unfit(
                f"{folder}: d2t maps to ids from {int(ids.min())} to {int(ids.max())}, "
                f"the target has 0 to {vocab - 1}"
            )
        distinct = len(set(ids.tolist()))
        if distinct < size:
            raise unfit(f"{folder}: d2t maps {size} tokens to {distinct} ids")
        if (
            "t2d" in reader
            and sorted(ids.tolist()) != reader.stored("t2d").nonzero()[:, 0].tolist()
        ):
            raise unfit(f"{folder}: d2t and t2d name different tokens of the target")
        return ids

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.shape.norm_eps)


def _taps(folder: Path, raw: Mapping[str, Any], target_layers: int) -> tuple[int, ...]:
    """What the folder names, as vLLM reads it: the layers whose inputs are fused."""
    name = "eagle_aux_hidden_state_layer_ids"
    eagle = raw.get("eagle_config") or {}
    named = eagle.get(name) if isinstance(eagle, dict) else None
    if named is None:
        return tuple(sorted(default_taps(target_layers)))
    if not isinstance(named, list) or not named or any(type(layer) is not int for layer in named):
        raise unfit(f"{folder}: {name} is {named!r}, not a list of layer numbers")
    return tuple(sorted(named))


def _check_fit(folder: Path, config: EagleConfig, target: Target) -> None:
    """Compare what must agree with the target's."""
    wanted = target.config.shape
    check_sizes(
        folder,
        {
            "hidden_size": (config.shape.hidden_size, wanted.hidden_size),
            "vocab_size": (config.shape.vocab_size, wanted.vocab_size),
        },
    )
    if config.taps[0] < 0 or config.taps[-1] > wanted.layers:
        raise unfit(
            f"{folder}: the drafter taps layers {list(config.taps)}, "
            f"the target has 0 to {wanted.layers}"
        )
    if len(set(config.taps)) < len(config.taps):
        raise unfit(f"{folder}: the drafter taps layers {list(config.taps)}, one of them twice")
    check_vocabulary(folder, target)
