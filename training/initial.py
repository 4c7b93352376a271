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
    """Set every weight. Give the head the target's last layer, and let the fusion hand it the highest tap.

    At the start it so computes what the target would from its last layers alone; the half of the
    attention's input that reads the next token's embedding begins near nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    shape, prefix = network.shape, f"model.layers.{layers - 1}."
    hidden = shape.hidden_size

    def weight(name: str, *size: int) -> torch.Tensor:
        return reader.weight(prefix + name + ".weight", size)

    torch.nn.init.normal_(network.fc.weight, std=0.002, generator=generator)
    network.fc.weight[:, -hidden:] += torch.eye(hidden)
    layer = network.midlayer
    for name, module in layer.self_attn.items():
        if name == "o_proj":
            module.weight.copy_(weight("self_attn.o_proj", *module.weight.shape))
            continue
        own = weight(f"self_attn.{name}", module.weight.shape[0], hidden)
        torch.nn.init.normal_(module.weight[:, :hidden], std=0.02, generator=generator)
        module.weight[:, hidden:] = own
    for name, module in layer.mlp.items():
        module.weight.copy_(weight(f"mlp.{name}", *module.weight.shape))
    layer.hidden_norm.weight.copy_(weight("input_layernorm", hidden))
    layer.post_attention_layernorm.weight.copy_(weight("post_attention_layernorm", hidden))
    layer.input_layernorm.weight.fill_(1.0)
    network.norm.weight.copy_(teacher.norm)
    network.lm_head.weight.copy_(teacher.head.float())
