"""Stop strings: where a text ends, found while it comes piece by piece.

A text ends where the first stop string in it is complete. Of several that are complete in the same
place the longest counts, so that nothing of it is shown. Characters are compared as they are, code
point by code point.

Every stop string is followed by a Knuth-Morris-Pratt automaton: how much of the string the text
ends with at the moment is just what has to be held back for it.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["MAX_STOP_STRINGS", "MAX_STOP_STRING_BYTES", "StopStrings"]

MAX_STOP_STRINGS = 16
"""Most stop strings of one generation: each costs time for every character."""

MAX_STOP_STRING_BYTES = 256
"""Longest stop string in UTF-8 bytes: as much text may be held back."""


class StopStrings:
    """Follows one text. The pieces that `push` and `flush` give joined are the text before the
    stop string, or the whole text if there is none in it."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` may be empty; none of them is."""
        self._followers = [_Follower(stop) for stop in stops]
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text; what comes behind it has no effect."""

    def push(self, text: str) -> str:
        """The text that no stop string can be a part of any more."""
        if not self._followers:
            return text
        if self.matched is not None:
            return ""
        held = self._held + text
        for end, character in enumerate(text, len(self._held) + 1):
            complete = [each.stop for each in self._followers if each.completes(character)]
            if complete:
                self.matched = max(complete, key=len)
                self._held = ""
                return held[: end - len(self.matched)]
        certain = len(held) - max(each.seen for each in self._followers)
        self._held = held[certain:]
        return held[:certain]

    def flush(self) -> str:
        """What is held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


class _Follower:
    """How much of one stop string the text so far ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.seen = 0
        self._borders = _borders(stop)

    def completes(self, character: str) -> bool:
        """Follow the text by a character; whether the stop string is complete with it."""
        seen = self.seen
        while seen and self.stop[seen] != character:
            seen = self._borders[seen - 1]
        self.seen = seen + (self.stop[seen] == character)
        return self.seen == len(self.stop)


def _borders(stop: str) -> list[int]:
    """For each prefix of `stop` the length of its longest proper suffix that is a prefix too."""
    borders = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = borders[length - 1]
        length += stop[index] == stop[length]
        borders[index] = length
    return borders
