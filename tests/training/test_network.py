"""The head that is trained and the head that the engine runs are one function."""

from __future__ import annotations

import pytest
import torch

from draftgate.engine import EngineConfig, Target, load_target
from draftgate.engine.attention import RowSpan
from draftgate.engine.drafters import EagleHead
from draftgate.engine.kv_cache import KVCache
from tests.support.tiny_models import TINY, write_checkpoint
from training.export import export
from training.network import EagleNetwork, Unrolled

VOCABULARY = torch.tensor([*range(3, 90, 3), 95])
STEPS = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    config = TINY | {"num_hidden_layers": 8}
    return load_target(write_checkpoint(tmp_path_factory.mktemp("model"), config), torch.float32)


@pytest.fixture(scope="module")
def network(target: Target) -> EagleNetwork:
    """With weights that bf16 holds exactly, as they are shipped."""
    torch.manual_seed(3)
    made = EagleNetwork(target.config.shape, 3, len(VOCABULARY))
    with torch.no_grad():
        for parameter in made.parameters():
            spread = 0.3 if parameter.dim() == 1 else parameter.shape[1] ** -0.5
            centre = 1.0 if parameter.dim() == 1 else 0.0
            parameter.copy_((centre + spread * torch.randn(parameter.shape)).bfloat16())
    return made


@pytest.fixture(scope="module")
def head(
    target: Target, network: EagleNetwork, tmp_path_factory: pytest.TempPathFactory
) -> EagleHead:
    folder = tmp_path_factory.mktemp("drafter")
    export(network, VOCABULARY, target, folder)
    return EagleHead(folder, target)


def test_the_draft_vocabulary_comes_back(head: EagleHead) -> None:
    assert head.vocabulary.tolist() == VOCABULARY.tolist()
    assert head.config.taps == (2, 4, 5)


@pytest.mark.parametrize("base", [0, 1, 7, 20])
def test_chains_have_the_same_logits(
    target: Target, network: EagleNetwork, head: EagleHead, base: int
) -> None:
    generator = torch.Generator().manual_seed(base)
    ids = torch.randint(0, 96, (30,), generator=generator)
    features = target.features(ids.tolist(), head.config.taps)
    with torch.no_grad():
        embedded = target.embedded(ids)
        unrolled = Unrolled(
            features=features[None, :-1],
            next_embeddings=embedded[None, 1:],
            bases=torch.tensor([[base]]),
            chain_embeddings=embedded[None, None, base + 2 : base + 1 + STEPS],
        )
        wanted = [network.lm_head(x)[0, 0] for x in network(unrolled, STEPS)]

    config = EngineConfig(max_batch_rows=1, kv_cache_bytes=1 << 20)
    [store] = KVCache([head.kv_shape], config, 64, torch.float32, torch.device("cpu")).stores
    with torch.inference_mode():
        positions = torch.arange(base + 1)
        hidden = head.fused(features[: base + 1])
        inputs = head.take_in(ids[1 : base + 2], hidden, positions, positions, store)
        inputs, hidden = inputs[-1:], hidden[-1:]
        for step in range(STEPS):
            at = torch.tensor([base + step])
            if step:
                inputs = head.take_in(ids[at + 1], hidden, at, at, store)
            plan = head.plan([RowSpan(0, base + step, 1)])
            hidden, logits = head.read_out(inputs, hidden, at, plan, store)
            torch.testing.assert_close(logits[0], wanted[step], rtol=1e-4, atol=1e-4)
