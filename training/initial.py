"""Where training starts from: the target's own last layer and output."""

from __future__ import annotations

import torch

from draftgate.engine.weights import CheckpointReader
from training.loss import Teacher
from training.network import EagleNetwork

__all__ = ["initialise"]


@torch.no_grad()
def initialise(
    network: EagleNetwork, reader: CheckpointReader, teacher: Teacher, layers: int, seed: int
) -> None:
    """Give the head the target's last layer, and let the fusion hand it the highest tap.

    At the start it so computes what the target would from its last layers alone; the half of the
    attention's input that reads the next token's embedding begins near nothing.
    Every weight is set; what is drawn, the seed decides.
    """
    generator = torch.Generator().manual_seed(seed)
    shape, prefix = network.shape, f"model.layers.{layers - 1}."
    hidden = shape.hidden_size

    def weight(name: str, *size: int) -> torch.Tensor:
        return reader.weight(prefix + name, size)

    torch.nn.init.normal_(network.fc.weight, std=0.002, generator=generator)
    network.fc.weight[:, -hidden:] += torch.eye(hidden)
    layer = network.midlayer
    for name, parameter in layer.self_attn.named_parameters():
        if name == "o_proj.weight":
            parameter.copy_(weight(f"self_attn.{name}", *parameter.shape))
            continue
        own = weight(f"self_attn.{name}", parameter.shape[0], hidden)
        torch.nn.init.normal_(parameter[:, :hidden], std=0.02, generator=generator)
        parameter[:, hidden:] = own
    for name, parameter in layer.mlp.named_parameters():
        parameter.copy_(weight(f"mlp.{name}", *parameter.shape))
    layer.hidden_norm.weight.copy_(weight("input_layernorm.weight", hidden))
    layer.post_attention_layernorm.weight.copy_(weight("post_attention_layernorm.weight", hidden))
    layer.input_layernorm.weight.fill_(1.0)
    network.norm.weight.copy_(teacher.norm)
    network.lm_head.weight.copy_(teacher.head.float())
