"""The text of single tokens, for callers who want to show where each came from."""

from __future__ import annotations

from collections.abc import Sequence

from draftgate.text import Detokenizer, Tokenizer

__all__ = ["TokenTexts"]


class TokenTexts:
    """Follows one generation; the texts of all tokens joined are its text."""

    def __init__(self, tokenizer: Tokenizer, emitted_ids: Sequence[int]) -> None:
        """`emitted_ids` are those of an earlier run that this generation resumes."""
        self._tokenizer = tokenizer
        self._stream = Detokenizer(tokenizer)
        self._stream.push(emitted_ids)
        self._context = list(emitted_ids)
        """The ids on which the next text depends."""

    def tokens(self, ids: Sequence[int], *, last: bool) -> list[str]:
        """The text that each new token completed; `last` adds what was held back."""
        texts = [self._stream.push([token]) for token in ids]
        if last and texts:
            texts[-1] += self._stream.flush()
        self._context += ids
        self._context = self._context[self._tokenizer.context_start(self._context) :]
        return texts

    def drafts(self, ids: Sequence[int], *, before: Sequence[int]) -> tuple[str, ...]:
        """The text that drafts would have added after `before`, new tokens not handed in yet."""
        stream = Detokenizer(self._tokenizer)
        stream.push((*self._context, *before))
        texts = [stream.push([token]) for token in ids]
        if texts:
            texts[-1] += stream.flush()
        return tuple(texts)
