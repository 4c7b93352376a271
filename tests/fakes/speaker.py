"""What fake Tritons answer when several have to answer alike: each next token is a function of all
tokens before it, as a real engine's is when it is greedy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from draftgate.text import Tokenizer, parse_messages
from tests.fakes.triton import FakeTriton, Received, Script, Step, words

__all__ = ["Speaker"]


@dataclass
class Speaker:
    """Answers for every fake that it is given, text and ids."""

    tokenizer: Tokenizer
    delay_s: float = 0.0
    """Between two chunks."""
    faults: list[Callable[[Script], Script]] = field(default_factory=list)
    """What becomes of the next scripts, one each."""
    asked: list[Received] = field(default_factory=list)
    """Every generation, at whichever fake it arrived, but for the trials of an ejected one."""

    def speak_through(self, *tritons: FakeTriton) -> None:
        for triton in tritons:
            triton.description = {**triton.description, "vocab_size": 256}
            triton.script_for = self._script

    def answer(self, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], str]:
        """The ids and the text of an undisturbed generation."""
        ids = list(prompt)
        while len(ids) < len(prompt) + max_tokens:
            ids.append(_next(ids))
        emitted = ids[len(prompt) :]
        return emitted, self.tokenizer.decode(emitted)

    def _script(self, received: Received) -> Script:
        if received.id.startswith("trial-"):
            return words("a")
        self.asked.append(received)
        script = self._undisturbed(received.tensors)
        return self.faults.pop(0)(script) if self.faults else script

    def _undisturbed(self, tensors: dict[str, Any]) -> Script:
        if "input_ids" in tensors:
            ids = list(tensors["input_ids"])
        elif "messages" in tensors:
            ids = self.tokenizer.encode_chat(parse_messages(tensors["messages"]))
        else:
            ids = self.tokenizer.encode_prompt(tensors["text_input"])
        (resume_len,) = tensors.get("resume_len", (0,))
        (max_tokens,) = tensors["max_tokens"]
        emitted = ids[len(ids) - resume_len :] if resume_len else []
        report: dict[str, Any] = {
            "prompt_len": len(ids) - resume_len,
            "cached_len": 0,
            "queue_us": 1,
            "prefill_us": 1,
        }
        steps = []
        while len(emitted) < max_tokens:
            size = min(1 + len(ids) % 3, max_tokens - len(emitted))
            new: list[int] = []
            for _ in range(size):
                new.append(_next(ids))
                ids.append(new[-1])
            context = emitted[self.tokenizer.context_start(emitted) :]
            last = len(emitted) + size == max_tokens
            text = self.tokenizer.delta(context, new, final=last)
            values = {"output_ids": new, "text_output": text, **report}
            report = {}
            emitted += new
            steps.append(Step(values, self.delay_s))
        return Script(steps)

    @staticmethod
    def failing(after: int, **how: Any) -> Callable[[Script], Script]:
        """A fault: so many steps, and then a failure as in Script."""
        return lambda script: replace(script, steps=script.steps[:after], **how)

    @staticmethod
    def silent(after: int, *, deaf: bool = True) -> Callable[[Script], Script]:
        """A fault: so many steps, and then nothing, not even an answer to a stop."""
        never = Step(delay_s=3600.0)
        return lambda script: replace(script, steps=[*script.steps[:after], never], deaf=deaf)


def _next(ids: Sequence[int]) -> int:
    # Now and then a character of several bytes, whole or broken.
    mixed = (sum(ids) * 31 + len(ids) * 17 + ids[-1] * 7) % 4096
    return mixed % 256 if mixed % 3 else 32 + mixed % 95
