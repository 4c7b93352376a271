"""A chat's history never outgrows the model's context."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from draftgate.cli.conversation import Conversation

CONTEXT = 300
TEMPLATE = 5
"""Tokens that the test's template puts around a message."""

turns = st.lists(st.tuples(st.text(max_size=60), st.text(max_size=60)), max_size=25)


def size(text: str) -> int:
    """Tokens of a tokenizer that is as bad as a byte-level one can be."""
    return len(text.encode()) + TEMPLATE


@given(turns=turns, system=st.none() | st.text(min_size=1, max_size=30))
def test_every_prompt_leaves_room_for_the_answer(
    turns: list[tuple[str, str]], system: str | None
) -> None:
    conversation = Conversation(context_tokens=CONTEXT, answer_tokens=70, system=system)
    for question, answer in turns:
        conversation.make_room(question)
        prompt = sum(size(message.content) for message in conversation.messages(question))
        alone = len(conversation) == 0
        assert alone or prompt <= CONTEXT - 70
        conversation.add(question, answer, prompt + len(answer.encode()))


@given(turns=turns)
def test_nothing_is_dropped_while_everything_fits(turns: list[tuple[str, str]]) -> None:
    conversation = Conversation(context_tokens=1 << 20, answer_tokens=70, system=None)
    for question, answer in turns:
        assert conversation.make_room(question) == 0
        conversation.add(question, answer, 0)
    assert len(conversation) == len(turns)
    said = [message.content for message in conversation.messages("last")]
    assert said == [text for q, a in turns for text in (q, a)] + ["last"]
