"""The history of a chat, kept within the model's context."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from draftgate._pb.draftgate.v1.generation_pb2 import ChatMessage

__all__ = ["Conversation"]

_TEMPLATE_TOKENS = 16
"""More than a chat template puts around one message."""


@dataclass(frozen=True)
class Turn:
    """A question and its answer."""

    user: str
    assistant: str
    tokens: int
    """What the turn takes of the context."""


class Conversation:
    """Turns, oldest first; the oldest are dropped to make room for a new one.

    Sizes of past turns come from the server's own counts; what the chat template says before the
    first message is counted with the first turn. The size of text that the server has not seen is
    bounded by its bytes: a byte-level tokenizer never makes more tokens than that.
    """

    def __init__(self, *, context_tokens: int, answer_tokens: int, system: str | None) -> None:
        """`answer_tokens` of the model's `context_tokens` are kept free for the next answer."""
        self._limit = context_tokens - min(answer_tokens, context_tokens // 2)
        self._turns: deque[Turn] = deque()
        self.system = system
        """The system message, or None for the chat template's own."""

    def __len__(self) -> int:
        return len(self._turns)

    def make_room(self, text: str) -> int:
        """Drop the oldest turns until `text` fits as the next question; returns how many."""
        wanted = _bound(text) + (_bound(self.system) if self.system else 0)
        dropped = 0
        while self._turns and self._history_tokens() + wanted > self._limit:
            self._turns.popleft()
            dropped += 1
        return dropped

    def messages(self, text: str) -> list[ChatMessage]:
        """The conversation with `text` as its next question."""
        messages = []
        if self.system:
            messages.append(ChatMessage(role="system", content=self.system))
        for turn in self._turns:
            messages.append(ChatMessage(role="user", content=turn.user))
            messages.append(ChatMessage(role="assistant", content=turn.assistant))
        messages.append(ChatMessage(role="user", content=text))
        return messages

    def add(self, text: str, answer: str, total_tokens: int) -> None:
        """Remember one turn; `total_tokens` is the server's count of prompt and answer."""
        self._turns.append(Turn(text, answer, total_tokens - self._history_tokens()))

    def clear(self) -> None:
        """Forget every turn; the system message stays."""
        self._turns.clear()

    def _history_tokens(self) -> int:
        return sum(turn.tokens for turn in self._turns)


def _bound(text: str) -> int:
    return len(text.encode()) + _TEMPLATE_TOKENS
