"""The tokenizer inside a GGUF file, written as Hugging Face's `tokenizer.json`.

GGUF keeps vocabulary and merges but only names the rule that splits text before merging
(`tokenizer.ggml.pre`). A wrong rule gives plausible text with wrong ids, so an unknown name is
refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftgate.checkpoint.architectures import unsupported
from draftgate.checkpoint.files import bad_file, write_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["CHAT_TEMPLATE_FILE", "SUPPORTED_SPLITS", "GgufTokenizer"]

CHAT_TEMPLATE_FILE = "chat_template.jinja"

# Token types. Type 5, unused, fills the embedding table up and is in no tokenizer.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}"
)


@dataclass(frozen=True)
class _Split:
    pattern: str | None = None
    """Regular expression of the pieces; None for GPT-2's, which ByteLevel has built in."""
    single_digits: bool = False
    """Cut every digit off first."""
    whole_words: bool = False
    """A piece that is in the vocabulary stays whole whatever the merges say."""
    nfc: bool = False
    """Compose characters first."""
    begins_with_bos: bool = False
    """What a file means that does not say whether every text begins with the BOS token."""


SUPPORTED_SPLITS: Mapping[str, _Split] = {
    "gpt-2": _Split(),
    "smollm": _Split(single_digits=True),
    "llama-bpe": _Split(_LLAMA3, whole_words=True, begins_with_bos=True),
    "qwen2": _Split(_QWEN2, nfc=True),
    "tekken": _Split(_TEKKEN, whole_words=True, begins_with_bos=True),
}


class GgufTokenizer:
    """A byte-level BPE tokenizer read from GGUF metadata."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        model = metadata.get("tokenizer.ggml.model")
        if model != "gpt2":
            raise unsupported(
                f"the GGUF tokenizer {model!r} (only byte-level BPE, 'gpt2', is read from GGUF: "
                "give the model's Hugging Face folder, which has a tokenizer.json)"
            )
        split = metadata.get("tokenizer.ggml.pre", "none")
        if split not in SUPPORTED_SPLITS:
            raise unsupported(
                f"the GGUF pre-tokenizer {split!r} (supported: {', '.join(SUPPORTED_SPLITS)}; "
                "else give the model's Hugging Face folder)"
            )
        for key in ("tokens", "token_type", "merges"):
            if f"tokenizer.ggml.{key}" not in metadata:
                raise bad_file(path, f"metadata tokenizer.ggml.{key} is missing")
        self._split = SUPPORTED_SPLITS[split]
        self._metadata = metadata
        self._tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        self._types: list[int] = metadata["tokenizer.ggml.token_type"]
        if len(self._types) != len(self._tokens):
            raise bad_file(
                path, f"has {len(self._tokens)} tokens but {len(self._types)} token types"
            )

    def write(self, folder: Path, *, max_positions: int) -> None:
        """Write tokenizer.json, tokenizer_config.json and the chat template if there is one."""
        text = self._build().to_str(pretty=True)
        (folder / "tokenizer.json").write_text(text, encoding="utf-8")
        template = self._metadata.get("tokenizer.chat_template")
        config: dict[str, Any] = {
            # The class that takes tokenizer.json as it is; model-specific ones rebuild it.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_positions,
            "clean_up_tokenization_spaces": False,
            "add_bos_token": self._bos() is not None,
            "add_prefix_space": False,
        }
        for ours, theirs in (
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("unk_token", "unknown"),
            ("pad_token", "padding"),
        ):
            index = self._metadata.get(f"tokenizer.ggml.{theirs}_token_id")
            if index is not None:
                config[ours] = self._tokens[index]
        if template is not None:
            config["chat_template"] = template
            (folder / CHAT_TEMPLATE_FILE).write_text(template, encoding="utf-8")
        write_json(folder / "tokenizer_config.json", config)

    def _build(self) -> Tokenizer:
        from tokenizers import (
            AddedToken,
            Regex,
            Tokenizer,
            decoders,
            models,
            normalizers,
            pre_tokenizers,
            processors,
        )

        split = self._split
        vocabulary = {
            token: index
            for index, token in enumerate(self._tokens)
            if self._types[index] in (_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED)
        }
        merges = [
            (left, right)
            for left, _, right in (
                merge.partition(" ") for merge in self._metadata["tokenizer.ggml.merges"]
            )
        ]
        tokenizer = Tokenizer(
            models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split.whole_words)
        )
        if split.nfc:
            tokenizer.normalizer = normalizers.NFC()
        steps: list[Any] = []
        if split.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if split.pattern is not None:
            steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
        steps.append(
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None)
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        tokenizer.decoder = decoders.ByteLevel()
        bos = self._bos()
        if bos is not None:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{bos[0]} $A", pair=f"{bos[0]} $A {bos[0]} $B", special_tokens=[bos]
            )
        # Found in the vocabulary, added tokens keep their ids.
        tokenizer.add_tokens(
            [
                AddedToken(token, special=kind == _CONTROL, normalized=False)
                for token, kind in zip(self._tokens, self._types, strict=True)
                if kind in (_CONTROL, _USER_DEFINED)
            ]
        )
        return tokenizer

    def _bos(self) -> tuple[str, int] | None:
        """The token that begins every text, if the model wants one."""
        index = self._metadata.get("tokenizer.ggml.bos_token_id")
        wanted = self._metadata.get("tokenizer.ggml.add_bos_token", self._split.begins_with_bos)
        if index is None or not wanted:
            return None
        return self._tokens[index], index
