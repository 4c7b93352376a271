"""Text in and out of the model: chat template, tokenizer, exact incremental detokenisation."""

from __future__ import annotations

from draftgate.text.chat import ROLES, Message, parse_messages
from draftgate.text.tokenizer import Detokenizer, Tokenizer

__all__ = ["ROLES", "Detokenizer", "Message", "Tokenizer", "parse_messages"]
