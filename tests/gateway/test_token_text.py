"""The text of single tokens: joined it is the text of the stream."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.gateway.token_text import TokenTexts
from draftgate.text import Tokenizer
from tests.fakes.triton import DESCRIPTION, FakeTriton, Script, Step
from tests.support.gateway import connected, running_gateway

TEXT = "Grüße, 你好 👩‍👩‍👧 — naïve café\n\tx = [1, 2]"


@pytest.fixture(scope="session")
def tokenizer(checkpoint_dir: Path) -> Tokenizer:
    return Tokenizer.load(checkpoint_dir)


def scripted(tokenizer: Tokenizer, ids: Sequence[int], emitted: Sequence[int] = ()) -> Script:
    """What the engine and postprocessing answer: up to three ids a step, each step speculated."""
    steps = []
    context = list(emitted)
    for start in range(0, len(ids), 3):
        new = list(ids[start : start + 3])
        last = start + 3 >= len(ids)
        drafts = [*new[:-1], new[0]]
        steps.append(
            Step(
                {
                    "output_ids": new,
                    "text_output": tokenizer.delta(context, new, final=last),
                    "draft_lens": [len(drafts)],
                    "accepted_lens": [len(new) - 1],
                    "draft_source": [2],
                    "draft_ids": drafts,
                }
            )
        )
        context += new
    return Script(steps)


@pytest.mark.parametrize("resumed", [0, 1, 4, 5, 6])
async def test_token_texts_join_to_the_text(
    triton: FakeTriton, tokenizer: Tokenizer, checkpoint_dir: Path, resumed: int
) -> None:
    ids = tokenizer.encode_prompt(TEXT)
    emitted, rest = ids[:resumed], ids[resumed:]
    triton.description = {**DESCRIPTION, "vocab_size": tokenizer.vocab_size}
    triton.scripts = [scripted(tokenizer, rest, emitted)]
    async with (
        running_gateway(triton.target, tokenizer_dir=checkpoint_dir) as gateway,
        connected(gateway) as client,
    ):
        await client.wait_serving()
        outcome = await client.generate(
            input_ids=[1, *emitted],
            resume_len=resumed,
            return_token_text=True,
            return_drafts=True,
        )
    assert outcome.error is None
    assert "".join(token.text for token in outcome.tokens) == outcome.text
    assert tokenizer.delta((), emitted, final=False) + outcome.text == TEXT
    assert all(token.HasField("text") for token in outcome.tokens)
    for chunk in outcome.chunks:
        (step,) = chunk.verify_steps
        accepted = [draft.text for draft in step.drafts[: step.accepted]]
        assert accepted == [token.text for token in chunk.tokens[: step.accepted]]
        assert all(draft.HasField("text") for draft in step.drafts)


async def test_without_asking_there_is_no_token_text(
    triton: FakeTriton, tokenizer: Tokenizer, checkpoint_dir: Path
) -> None:
    triton.scripts = [scripted(tokenizer, tokenizer.encode_prompt("Hello"))]
    async with (
        running_gateway(triton.target, tokenizer_dir=checkpoint_dir) as gateway,
        connected(gateway) as client,
    ):
        await client.wait_serving()
        outcome = await client.generate(prompt="Hi", return_drafts=True)
    assert not any(token.HasField("text") for token in outcome.tokens)
    assert not any(
        draft.HasField("text")
        for chunk in outcome.chunks
        for step in chunk.verify_steps
        for draft in step.drafts
    )


@given(data=st.data())
def test_any_ids_in_any_chunks_join_to_their_text(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    id_strategy = st.integers(0, tokenizer.vocab_size - 1)
    emitted = data.draw(st.lists(id_strategy, max_size=6))
    chunks = data.draw(
        st.lists(st.lists(id_strategy, min_size=1, max_size=4), min_size=1, max_size=6)
    )
    texts = TokenTexts(tokenizer, emitted)
    found = ""
    for index, ids in enumerate(chunks):
        texts.drafts(ids, before=())
        found += "".join(texts.tokens(ids, last=index == len(chunks) - 1))
    new = [each for ids in chunks for each in ids]
    assert found == tokenizer.delta(emitted, new, final=True)
