"""One model's tokenizer: text to ids and back, whole or piece by piece."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from draftgate.errors import DraftgateError, ErrorCode
from draftgate.jsonfile import read_object
from draftgate.text.chat import ChatTemplate, Message, check_text, load_chat_template
from draftgate.text.decoding import IdDecoder, make_decoder

__all__ = ["Detokenizer", "Tokenizer"]

_LONG = 2048
"""From this many characters or ids on, the library's calls for a batch are used: unlike those for a
single text they let go of the interpreter's lock, so that other threads go on meanwhile."""


class Tokenizer:
    """The tokenizer and chat template of a Hugging Face folder. Safe to share between threads."""

    def __init__(
        self, fast: FastTokenizer, decoder: IdDecoder, chat_template: ChatTemplate | None
    ) -> None:
        self._fast = fast
        self._decoder = decoder
        self._chat_template = chat_template
        self._vocab_size: int = 1 + max(fast.get_vocab(with_added_tokens=True).values())

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """Read `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`; the last two
        may be missing.

        Raises DraftgateError: FAILED_PRECONDITION for a file that is missing or cannot be read,
        UNIMPLEMENTED for a tokenizer whose decoder is not supported.
        """
        description = read_object(model_dir / "tokenizer.json")
        config_path = model_dir / "tokenizer_config.json"
        config = read_object(config_path) if config_path.is_file() else {}
        # Truncation and padding are left from training; a prompt is taken as it stands.
        description |= {"truncation": None, "padding": None}
        fast = _parse(description, model_dir)
        special = {token["id"] for token in description.get("added_tokens", ()) if token["special"]}
        tokens = {
            token_id: token
            for token, token_id in fast.get_vocab(with_added_tokens=True).items()
            if token_id not in special
        }
        decoder = make_decoder(description.get("decoder"), tokens)
        return cls(fast, decoder, load_chat_template(model_dir, config))

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self._vocab_size

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a raw prompt, with the special tokens that the model's tokenizer adds.

        Raises DraftgateError(INVALID_ARGUMENT) for text that has no UTF-8 form.
        """
        check_text("text_input", text)
        return self._encode(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The ids of the prompt for the assistant's next turn. The template itself writes the
        special tokens.

        Raises DraftgateError: FAILED_PRECONDITION if the model has no chat template,
        INVALID_ARGUMENT if the template refuses the messages.
        """
        return self._encode(self.render_chat(messages), add_special_tokens=False)

    def render_chat(self, messages: Sequence[Message]) -> str:
        """The text of the prompt for the assistant's next turn. Raises as `encode_chat` does."""
        if self._chat_template is None:
            raise DraftgateError(
                ErrorCode.FAILED_PRECONDITION,
                "messages: this model has no chat template, send text_input or input_ids",
                field="messages",
            )
        return self._chat_template.render(messages)

    def chat_as_raw_prompt(self, messages: Sequence[Message]) -> str:
        """The same for who will tokenise it as a raw prompt: a special token that the tokenizer
        then puts first does not stand there twice. Raises as `encode_chat` does."""
        text = self.render_chat(messages)
        added = self._fast.encode("", add_special_tokens=True).tokens
        return text.removeprefix(added[0]) if added else text

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a whole sequence, special tokens skipped."""
        if len(ids) < _LONG:
            return str(self._fast.decode(list(ids), skip_special_tokens=True))
        [text] = self._fast.decode_batch([list(ids)], skip_special_tokens=True)
        return str(text)

    def context_start(self, ids: Sequence[int]) -> int:
        """The index into `ids`, all ids emitted so far, from which `delta` needs them as context.
        It is `len(ids)` if none are needed."""
        return self._decoder.context_start(ids)

    def delta(self, context_ids: Iterable[int], new_ids: Iterable[int], *, final: bool) -> str:
        """The text that `new_ids` add after `context_ids`, never half a character. `final` adds
        what was held back because later ids could have changed it.

        Over any cutting of a sequence, the deltas joined equal `decode` of the whole.
        """
        stream = self._decoder.stream()
        stream.push(context_ids)
        text = stream.push(new_ids)
        return text + stream.flush() if final else text

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) < _LONG:
            return list(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)
        [found] = self._fast.encode_batch([text], add_special_tokens=add_special_tokens)
        return list(found.ids)


class Detokenizer:
    """Turns one generation's ids into text as they come; the texts joined equal
    `Tokenizer.decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._stream = tokenizer._decoder.stream()

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete."""
        return self._stream.push(ids)

    def flush(self) -> str:
        """What is held back, at the end of the generation."""
        return self._stream.flush()


def _parse(description: Mapping[str, Any], model_dir: Path) -> FastTokenizer:
    try:
        return FastTokenizer.from_str(json.dumps(description))
    except Exception as error:  # the library raises no narrower type
        raise DraftgateError(
            ErrorCode.FAILED_PRECONDITION,
            f"{model_dir / 'tokenizer.json'} is not a tokenizer: {error}",
        ) from error
