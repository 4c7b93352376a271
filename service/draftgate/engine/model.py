"""The target: a Llama-family decoder over packed tokens and the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from draftgate.checkpoint.architectures import ModelShape
from draftgate.engine.allocator import keep_freed_memory, return_freed_memory
from draftgate.engine.attention import AttentionPlan, RowSpan, plan_attention
from draftgate.engine.config import EngineConfig, ModelConfig
from draftgate.engine.kv_cache import BLOCK_TOKENS, KVCache, KVShape, KVStore
from draftgate.engine.linear import Linear, padded
from draftgate.engine.rope import RopeTable, rotate_
from draftgate.engine.weights import CheckpointReader

__all__ = ["Pass", "Target", "load_target", "packed_places", "sequence_limit"]


@dataclass(frozen=True)
class _Layer:
    """One decoder layer's parameters."""

    attention_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Linear
    feed_forward_norm: torch.Tensor
    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True)
class Pass:
    """What one pass gives."""

    logits: torch.Tensor
    """[wanted tokens, vocab], in the compute dtype."""
    features: torch.Tensor | None
    """[tokens, taps * hidden]: the tapped layers' inputs side by side; None without taps."""


class Target:
    """The target model, its weights resident once."""

    def __init__(
        self,
        config: ModelConfig,
        reader: CheckpointReader,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Raises DraftgateError when a tensor is missing or has the wrong shape."""
        self.config = config
        self.dtype = dtype
        self.device = device
        shape = config.shape
        loader = _Loader(shape, reader, dtype, device)
        self._embedding = loader.embedding()
        self._layers = [loader.layer(index) for index in range(shape.layers)]
        self._norm = loader.vector("model.norm.weight", shape.hidden_size)
        self._head = loader.head()
        self._rope = RopeTable(shape.rope, shape.head_dim, shape.max_positions, dtype, device)

    @property
    def kv_shape(self) -> KVShape:
        """What the model keeps for a position."""
        shape = self.config.shape
        return KVShape(shape.layers, shape.kv_heads, shape.head_dim)

    def plan(self, spans: Sequence[RowSpan]) -> AttentionPlan:
        """How attention runs for a step of these rows."""
        return plan_attention(
            spans,
            heads=self.config.shape.heads,
            kv_heads=self.config.shape.kv_heads,
            head_dim=self.config.shape.head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    def forward(
        self,
        token_ids: torch.Tensor,
        spans: Sequence[RowSpan],
        store: KVStore,
        wanted: torch.Tensor,
        taps: Sequence[int] = (),
    ) -> Pass:
        """One pass over packed tokens; their keys and values go into the store.

        token_ids: [tokens] int64, packed in the order of `spans`. wanted: [n] int64, the packed
        tokens whose logits are needed. taps: rising numbers of layers whose inputs a drafter
        reads; as many as there are layers is the output of the last.
        """
        index, positions = packed_places(spans, store, self.device)
        cos, sin = self._rope.at(positions)
        plan = self.plan(spans)
        x = padded(self.embedded(token_ids))
        tapped = []
        for number, layer in enumerate(self._layers):
            if number in taps:
                tapped.append(x[: len(index)])
            x = self._layer(x, number, layer, cos, sin, index, plan, store)
        if len(self._layers) in taps:
            tapped.append(x[: len(index)])
        last = padded(x.index_select(0, wanted))
        logits = self._head(self.normed(last))[: len(wanted)]
        return Pass(logits, torch.cat(tapped, dim=1) if tapped else None)

    def embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The embeddings [tokens, hidden] of token_ids [tokens], in the compute dtype."""
        return self._embedding[token_ids].to(self.dtype)

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """The last layer's output [n, hidden] after the final norm: what the head reads."""
        return self._normed(hidden, self._norm)

    def score(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits [tokens, vocab] in fp32 after each of these tokens."""
        with torch.inference_mode():
            everything = torch.arange(len(ids), device=self.device)
            return self._lone_pass(ids, everything, ()).logits.float()

    def features(self, ids: Sequence[int], taps: Sequence[int]) -> torch.Tensor:
        """What a pass over these tokens taps, [tokens, taps * hidden] in the compute dtype."""
        with torch.inference_mode():
            nothing = torch.empty(0, dtype=torch.long, device=self.device)
            found = self._lone_pass(ids, nothing, taps).features
        assert found is not None
        return found

    def _lone_pass(self, ids: Sequence[int], wanted: torch.Tensor, taps: Sequence[int]) -> Pass:
        """One pass over a sequence that nothing else shares, with a cache of its own."""
        lone = EngineConfig(max_batch_rows=1, kv_cache_bytes=1 << 62)
        room = len(ids) + BLOCK_TOKENS
        cache = KVCache([self.kv_shape], lone, room, self.dtype, self.device)
        tokens = torch.tensor(ids, device=self.device)
        span = RowSpan(slot=0, start=0, count=len(ids))
        return self.forward(tokens, [span], cache.stores[0], wanted, taps)

    def _layer(
        self,
        x: torch.Tensor,
        number: int,
        layer: _Layer,
        cos: torch.Tensor,
        sin: torch.Tensor,
        index: torch.Tensor,
        plan: AttentionPlan,
        store: KVStore,
    ) -> torch.Tensor:
        # x has rows of padding beyond the tokens: they pass through the linears and nothing else.
        config, tokens = self.config.shape, len(index)
        query_width = config.heads * config.head_dim
        rotated_heads = config.heads + config.kv_heads
        qkv = layer.qkv(self._normed(x, layer.attention_norm))[:tokens]
        heads = qkv.view(tokens, -1, config.head_dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            heads[:, : config.heads] = self._normed(heads[:, : config.heads], layer.query_norm)
            keys = heads[:, config.heads : rotated_heads]
            heads[:, config.heads : rotated_heads] = self._normed(keys, layer.key_norm)
        rotate_(heads[:, :rotated_heads], cos, sin)
        store.write(number, index, qkv[:, query_width:])
        context = padded(plan.attend(heads[:, : config.heads], store, number))
        x = layer.output.plus(context, x)
        h = self._normed(x, layer.feed_forward_norm)
        return layer.down.plus(layer.up.times(h, layer.gate.silu(h)), x)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.shape.norm_eps)


def packed_places(
    spans: Sequence[RowSpan], store: KVStore, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each packed token's place in the store and position in its text: [tokens] each."""
    where: list[int] = []
    positions: list[int] = []
    for span in spans:
        first = store.index_of(span.slot, span.start)
        where.extend(range(first, first + span.count))
        positions.extend(span.positions)
    return torch.tensor(where, device=device), torch.tensor(positions, device=device)


def load_target(model_dir: Path, dtype: torch.dtype, device: torch.device | None = None) -> Target:
    """Load a checkpoint folder, FP8 or plain. Raises DraftgateError if it is not one."""
    config = ModelConfig.load(model_dir)
    target = Target(config, CheckpointReader(model_dir), dtype, device or torch.device("cpu"))
    return_freed_memory()
    keep_freed_memory()
    return target


class _Loader:
    """Builds the parameters from the checkpoint, one tensor at a time."""

    def __init__(
        self,
        shape: ModelShape,
        reader: CheckpointReader,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._shape = shape
        self._reader = reader
        self._dtype = dtype
        self._device = device

    def embedding(self) -> torch.Tensor:
        """[vocab, hidden]. On a CPU it stays a mapped file: a step looks up a few rows of it."""
        name, shape = "model.embed_tokens.weight", (self._shape.vocab_size, self._shape.hidden_size)
        stored = self._reader.stored(name)
        if self._device.type == "cpu" and tuple(stored.shape) == shape and stored.itemsize > 1:
            return stored
        return self._placed(self._reader.weight(name, shape))

    def head(self) -> Linear:
        name = "model.embed_tokens" if self._shape.tied_embeddings else "lm_head"
        return self._linear([(name, self._shape.vocab_size)], self._shape.hidden_size)

    def layer(self, number: int) -> _Layer:
        shape, prefix = self._shape, f"model.layers.{number}."
        attention, feed_forward = prefix + "self_attn.", prefix + "mlp."
        query_width = shape.heads * shape.head_dim
        kv_width = shape.kv_heads * shape.head_dim
        return _Layer(
            attention_norm=self.vector(prefix + "input_layernorm.weight", shape.hidden_size),
            qkv=self._linear(
                [
                    (attention + "q_proj", query_width),
                    (attention + "k_proj", kv_width),
                    (attention + "v_proj", kv_width),
                ],
                shape.hidden_size,
                bias=shape.qkv_bias,
            ),
            query_norm=self._head_norm(attention + "q_norm.weight"),
            key_norm=self._head_norm(attention + "k_norm.weight"),
            output=self._linear(
                [(attention + "o_proj", shape.hidden_size)], query_width, bias=shape.output_bias
            ),
            feed_forward_norm=self.vector(
                prefix + "post_attention_layernorm.weight", shape.hidden_size
            ),
            gate=self._linear(
                [(feed_forward + "gate_proj", shape.intermediate_size)], shape.hidden_size
            ),
            up=self._linear(
                [(feed_forward + "up_proj", shape.intermediate_size)], shape.hidden_size
            ),
            down=self._linear(
                [(feed_forward + "down_proj", shape.hidden_size)], shape.intermediate_size
            ),
        )

    def vector(self, name: str, width: int) -> torch.Tensor:
        return self._placed(self._reader.weight(name, (width,)))

    def _head_norm(self, name: str) -> torch.Tensor | None:
        return self.vector(name, self._shape.head_dim) if self._shape.qk_norm else None

    def _linear(self, parts: list[tuple[str, int]], width: int, *, bias: bool = False) -> Linear:
        """One linear layer from the modules in `parts` (name, output width), stacked."""
        weights = [self._reader.weight(f"{name}.weight", (out, width)) for name, out in parts]
        weight = self._placed(torch.cat(weights) if len(weights) > 1 else weights[0])
        if not bias:
            return Linear(weight)
        biases = [self._reader.weight(f"{name}.bias", (out,)) for name, out in parts]
        return Linear(weight, self._placed(torch.cat(biases)))

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._dtype).to(self._device).contiguous()


def sequence_limit(model: ModelConfig, engine: EngineConfig) -> int:
    """Longest prompt plus output that this engine takes, in tokens."""
    longest = model.shape.max_positions
    return min(engine.max_sequence_tokens or longest, longest)
