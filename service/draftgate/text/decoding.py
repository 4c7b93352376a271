"""From token ids to text, piece by piece, exactly as the whole would decode.

Two families cover the supported models. In both, text that later ids could still change is held
back, and the state after any ids depends only on a short suffix of them. So a piece can be decoded
without state: hand over that suffix as context, then the new ids.
"""

from __future__ import annotations

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from draftgate.errors import DraftgateError, ErrorCode

__all__ = ["IdDecoder", "TextStream", "make_decoder"]


class TextStream(ABC):
    """Decodes one sequence of ids as it comes."""

    @abstractmethod
    def push(self, ids: Iterable[int]) -> str:
        """The text that is certain now and was not before."""

    @abstractmethod
    def flush(self) -> str:
        """The text held back, decoded as if no id followed; ends the stream."""


class IdDecoder(ABC):
    """Decodes the ids of one tokenizer. Ids that it does not know, and special tokens, have no
    text."""

    @abstractmethod
    def stream(self) -> TextStream:
        """A stream at the start of a sequence."""

    @abstractmethod
    def context_start(self, ids: Sequence[int]) -> int:
        """The index from which `ids` bring a new stream into the state that all of them would."""


def make_decoder(description: Mapping[str, Any] | None, tokens: Mapping[int, str]) -> IdDecoder:
    """The decoder that a `tokenizer.json` describes.

    `tokens` holds the token of every id that has text: special tokens are left out.
    Raises DraftgateError(UNIMPLEMENTED) naming a decoder other than byte-level BPE and
    SentencePiece with byte fallback.
    """
    steps = _steps(description)
    names = [step["type"] for step in steps]
    if names == ["ByteLevel"]:
        return _ByteLevel(tokens)
    if names[:3] == ["Replace", "ByteFallback", "Fuse"] and steps[0] == _SPACE_MARK:
        if names[3:] == []:
            return _SentencePiece(tokens, strips_first_space=False)
        if steps[3:] == [_FIRST_SPACE]:
            return _SentencePiece(tokens, strips_first_space=True)
    raise DraftgateError(
        ErrorCode.UNIMPLEMENTED,
        f"tokenizer.json: decoder {' + '.join(names) or 'none'} is not supported, only ByteLevel "
        "and SentencePiece with byte fallback (Replace + ByteFallback + Fuse [+ Strip])",
    )


_SPACE_MARK = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
_FIRST_SPACE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def _steps(description: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if description is None:
        return []
    if description["type"] == "Sequence":
        return list(description["decoders"])
    return [description]


class _ByteLevel(IdDecoder):
    """Byte-level BPE: every token is a string of bytes, the text is their UTF-8 decoding with each
    maximal ill-formed part replaced by U+FFFD. Only an unfinished character is held back."""

    def __init__(self, tokens: Mapping[int, str]) -> None:
        alphabet = _byte_level_alphabet()
        self._bytes = {
            token_id: _byte_level_bytes(token, alphabet) for token_id, token in tokens.items()
        }

    def stream(self) -> TextStream:
        return _ByteLevelStream(self._bytes)

    def context_start(self, ids: Sequence[int]) -> int:
        # An unfinished character is a lead byte and at most two continuation bytes. UTF-8 is
        # self-synchronising: decoding from that lead byte on gives the same state.
        tail = b""
        for index in range(len(ids) - 1, -1, -1):
            tail = self._bytes.get(ids[index], b"") + tail
            lead = _last_lead(tail)
            if lead is not None:
                return index if _is_unfinished(tail[lead:]) else len(ids)
            if len(tail) >= 3:
                return len(ids)
        return len(ids)


class _ByteLevelStream(TextStream):
    def __init__(self, id_bytes: Mapping[int, bytes]) -> None:
        self._id_bytes = id_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        return self._utf8.decode(b"".join(self._id_bytes.get(token_id, b"") for token_id in ids))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _SentencePiece(IdDecoder):
    """SentencePiece with byte fallback: a token is a piece of text or one byte. A run of bytes is
    text as a whole or, if it is not UTF-8, one U+FFFD for every byte. So a run is held back until a
    piece ends it. Some models drop the first character of the whole text if it is a space."""

    def __init__(self, tokens: Mapping[int, str], *, strips_first_space: bool) -> None:
        self._strips_first_space = strips_first_space
        self._pieces = {token_id: _piece(token) for token_id, token in tokens.items() if token}

    def stream(self) -> TextStream:
        return _SentencePieceStream(self._pieces, strips_first_space=self._strips_first_space)

    def context_start(self, ids: Sequence[int]) -> int:
        # The run at the end, and one piece before it so that a space after it is not the first.
        for index in range(len(ids) - 1, -1, -1):
            if isinstance(self._pieces.get(ids[index]), str):
                return index
        return 0


class _SentencePieceStream(TextStream):
    def __init__(self, pieces: Mapping[int, str | bytes], *, strips_first_space: bool) -> None:
        self._pieces = pieces
        self._strip_next = strips_first_space
        self._run = bytearray()

    def push(self, ids: Iterable[int]) -> str:
        text: list[str] = []
        for token_id in ids:
            piece = self._pieces.get(token_id)
            if piece is None:
                continue
            if isinstance(piece, bytes):
                self._run += piece
            else:
                text += (self._end_run(), piece)
        return self._strip("".join(text))

    def flush(self) -> str:
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return "\N{REPLACEMENT CHARACTER}" * len(run)

    def _strip(self, text: str) -> str:
        if not text or not self._strip_next:
            return text
        self._strip_next = False
        return text.removeprefix(" ")


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _piece(token: str) -> str | bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ")


def _byte_level_alphabet() -> dict[str, int]:
    """The characters that stand for the 256 bytes in byte-level BPE (GPT-2's table): printable
    Latin-1 stands for itself, the rest is moved up to U+0100 in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + offset): byte for offset, byte in enumerate(moved)
    }


def _byte_level_bytes(token: str, alphabet: Mapping[str, int]) -> bytes:
    """A token added beside the BPE vocabulary may be plain text outside the alphabet."""
    if all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return token.encode("utf-8")


def _last_lead(tail: bytes) -> int | None:
    """Where the last byte of `tail` that is not a continuation byte stands."""
    for index in range(len(tail) - 1, max(len(tail) - 4, -1), -1):
        if tail[index] & 0xC0 != 0x80:
            return index
    return None


def _is_unfinished(tail: bytes) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(tail)
    return bool(decoder.getstate()[0])
