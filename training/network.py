"""The EAGLE-3 head as torch trains it, its parameters named as in the Hugging Face layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from draftgate.checkpoint.architectures import ModelShape
from draftgate.engine.rope import RopeTable

__all__ = ["EagleNetwork", "Unrolled", "rows_at"]


@dataclass(frozen=True)
class Unrolled:
    """Some sequences, padded to one length each way."""

    features: torch.Tensor
    """[batch, tokens, taps * hidden] the target's, of every token but the last."""
    next_embeddings: torch.Tensor
    """[batch, tokens, hidden] of the token after each."""
    bases: torch.Tensor
    """[batch, answers] positions from which chains are drafted."""
    chain_embeddings: torch.Tensor
    """[batch, answers, steps, hidden] of the tokens that follow the one after each base."""


class EagleNetwork(nn.Module):
    """Fusion, one decoder layer and a reduced head."""

    def __init__(self, shape: ModelShape, taps: int, draft_vocab_size: int) -> None:
        super().__init__()
        self.shape = shape
        hidden = shape.hidden_size
        self.fc = nn.Linear(taps * hidden, hidden, bias=False)
        self.midlayer = _MidLayer(shape)
        self.norm = _Norm(hidden, shape.norm_eps)
        self.lm_head = nn.Linear(hidden, draft_vocab_size, bias=False)
        self._rope = RopeTable(
            shape.rope, shape.head_dim, shape.max_positions, torch.float32, torch.device("cpu")
        )

    def forward(self, batch: Unrolled, steps: int) -> list[torch.Tensor]:
        """Chains of `steps` drafts from every base, the true tokens fed back after each.

        This is EAGLE-3's training-time test (arXiv 2503.01840, section 3.2): the first draft reads
        the target's features, each later one the head's own output of the one before, as at run
        time. Returns hidden states after the last norm, [batch, answers, hidden] a step.
        """
        fused = self.fc(batch.features)
        tokens = fused.shape[1]
        inputs = self.midlayer.inputs(batch.next_embeddings, fused)
        keys, values = self.midlayer.keys_values(inputs)
        keys = self._rotated(keys, torch.arange(tokens).expand(len(fused), -1))
        seen = torch.arange(tokens) <= batch.bases.unsqueeze(-1)  # [batch, answers, tokens]
        mask = torch.zeros(seen.shape, dtype=fused.dtype).masked_fill_(~seen, float("-inf"))
        hidden = rows_at(fused, batch.bases)
        inputs = rows_at(inputs, batch.bases)
        chain: list[tuple[torch.Tensor, torch.Tensor]] = []
        outputs = []
        for step in range(steps):
            if step:
                inputs = self.midlayer.inputs(batch.chain_embeddings[:, :, step - 1], hidden)
                key, value = self.midlayer.keys_values(inputs)
                chain.append((self._rotated(key, batch.bases + step), value))
            query = self._rotated(self.midlayer.query(inputs), batch.bases + step)
            context = _attend(query, keys, values, mask, chain)
            hidden = self.midlayer.output(context, hidden)
            outputs.append(self.norm(hidden))
        return outputs

    def _rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [batch, tokens, heads, head_dim] turned by its positions [batch, tokens]."""
        cos, signed_sin = self._rope.cos[positions], self._rope.signed_sin[positions]
        half = x.shape[-1] // 2
        swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
        return (x * cos.unsqueeze(2) + swapped * signed_sin.unsqueeze(2)).to(x.dtype)


class _Norm(nn.RMSNorm):
    """In fp32 inside autocast too, where torch would warn of the weight's dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float()).to(x.dtype)


class _MidLayer(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        hidden = shape.hidden_size
        self._head_dim = shape.head_dim
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(2 * hidden, shape.heads * shape.head_dim, bias=False),
                "k_proj": nn.Linear(2 * hidden, shape.kv_heads * shape.head_dim, bias=False),
                "v_proj": nn.Linear(2 * hidden, shape.kv_heads * shape.head_dim, bias=False),
                "o_proj": nn.Linear(shape.heads * shape.head_dim, hidden, bias=False),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(hidden, shape.intermediate_size, bias=False),
                "up_proj": nn.Linear(hidden, shape.intermediate_size, bias=False),
                "down_proj": nn.Linear(shape.intermediate_size, hidden, bias=False),
            }
        )
        self.input_layernorm = _Norm(hidden, shape.norm_eps)
        self.hidden_norm = _Norm(hidden, shape.norm_eps)
        self.post_attention_layernorm = _Norm(hidden, shape.norm_eps)

    def inputs(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), dim=-1)

    def query(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._heads(self.self_attn["q_proj"](inputs))

    def keys_values(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        attention = self.self_attn
        return self._heads(attention["k_proj"](inputs)), self._heads(attention["v_proj"](inputs))

    def output(self, context: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = hidden + self.self_attn["o_proj"](context)
        h = self.post_attention_layernorm(x)
        mlp = self.mlp
        fed: torch.Tensor = mlp["down_proj"](F.silu(mlp["gate_proj"](h)) * mlp["up_proj"](h))
        return x + fed

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], -1, self._head_dim)


def rows_at(x: torch.Tensor, bases: torch.Tensor) -> torch.Tensor:
    """x [batch, tokens, width] at bases [batch, answers]."""
    return x.gather(1, bases.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    chain: list[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """query [batch, answers, heads, head_dim] over the sequence's keys up to its base, and over its
    own chain's keys [batch, answers, kv_heads, head_dim] since. Returns [batch, answers, width]."""
    batch, answers, heads, head_dim = query.shape
    group = heads // keys.shape[2]

    def shared(x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(group, dim=2).transpose(1, 2)  # [batch, heads, tokens, head_dim]

    q = query.transpose(1, 2) * head_dim**-0.5
    scores = [q @ shared(keys).transpose(-1, -2) + mask.unsqueeze(1)]
    own = [(shared(key), shared(value)) for key, value in chain]
    scores += [(q * key).sum(-1, keepdim=True) for key, _ in own]
    weights = torch.cat(scores, dim=-1).float().softmax(-1).to(q.dtype)
    tokens = keys.shape[1]
    context = weights[..., :tokens] @ shared(values)
    for index, (_, value) in enumerate(own):
        context = context + weights[..., tokens + index, None] * value
    return context.transpose(1, 2).reshape(batch, answers, heads * head_dim)
