"""Text in and out of the model: chat template, tokenizer, exact incremental detokenisation,
stop strings."""

from __future__ import annotations

from draftgate.text.chat import ROLES, Message, parse_messages
from draftgate.text.stop_strings import MAX_STOP_STRING_BYTES, MAX_STOP_STRINGS, StopStrings
from draftgate.text.tokenizer import Detokenizer, Tokenizer

__all__ = [
    "MAX_STOP_STRINGS",
    "MAX_STOP_STRING_BYTES",
    "ROLES",
    "Detokenizer",
    "Message",
    "StopStrings",
    "Tokenizer",
    "parse_messages",
]
