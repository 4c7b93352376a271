"""A tokenizer whose tokens are the 256 bytes."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

__all__ = ["write_byte_tokenizer"]


def write_byte_tokenizer(folder: Path) -> Path:
    """The tokenizer, and a chat template that says what the first message says."""
    folder.mkdir(exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return folder
