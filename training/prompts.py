"""The prompts that the target answers: three tasks, topics kept apart for judging.

Their text comes from the topic lists beside this file (Apache-2.0, like all of this repository) and
from the documentation and source code that every Python carries (PSF License 2.0).
"""

from __future__ import annotations

import ast
import hashlib
import random
import re
import sysconfig
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from pydoc_data import topics as python_topics

__all__ = ["TASKS", "Prompt", "make_prompts"]

TASKS = ("chat", "code", "rewrite")

_HELD_OUT = 12
"""One topic in so many is never trained on."""

_CHAT = (
    "Explain {topic} in simple terms.",
    "What should I know about {topic}?",
    "Write a short story about {topic}.",
    "Give me five tips about {topic}.",
    "Write a poem about {topic}.",
    "What are the advantages and disadvantages of {topic}?",
    "Summarize the history of {topic} in one paragraph.",
    "Why do people care about {topic}?",
    "I am new to {topic}. Where do I start?",
    "Write an email to a friend about {topic}.",
    "List the most important facts about {topic}.",
    "How would you tell a ten-year-old about {topic}?",
    "What mistakes do people make with {topic}?",
    "Compare {topic} and {other}.",
    "Write a dialogue between two people who talk about {topic}.",
    "Ask me three quiz questions about {topic} and give the answers.",
    "Write a blog post introduction about {topic}.",
    "What would you say about {topic} in two sentences?",
    "Tell me something surprising about {topic}.",
    "I have to give a talk on {topic}. Help me with an outline.",
    "How did {topic} change over the last hundred years?",
    "Is there a connection between {topic} and {other}?",
)
_CODE = (
    "Write a Python function that {topic}.",
    "Write a Python function that {topic}. Add a docstring and type hints.",
    "Write a Python program that {topic}.",
    "Write a {language} function that {topic}.",
    "Implement a {language} program that {topic}, with comments.",
    "Write a Python class with a method that {topic}.",
    "Write unit tests for a Python function that {topic}.",
    "Show me code that {topic} and explain it line by line.",
    "Write a Python script that {topic} and then {other}.",
    "How do I write code that {topic}? Give an example in {language}.",
)
_LANGUAGES = ("JavaScript", "Java", "C", "C++", "Go", "Rust", "TypeScript", "Ruby", "SQL", "Bash")
_READ_CODE = (
    "Explain what this Python function does:\n\n```python\n{code}\n```",
    "Write a docstring for this function:\n\n```python\n{code}\n```",
    "Write a test for this function:\n\n```python\n{code}\n```",
)
_REWRITE = (
    "Repeat the following text exactly:\n\n{text}",
    "Copy this text word for word:\n\n{text}",
    "Fix the spelling of this text and change nothing else:\n\n{text}",
    "Rewrite this text in the past tense:\n\n{text}",
    "Write this text again as a list with one sentence per line:\n\n{text}",
    "Quote the following passage, then say in one sentence what it is about:\n\n{text}",
    "Edit this text so that it reads better:\n\n{text}",
    "Proofread this and give me the corrected version:\n\n{text}",
)
_REWRITE_CODE = (
    "Print this code again without changes:\n\n```python\n{code}\n```",
    "Add comments to this code and print all of it:\n\n```python\n{code}\n```",
    "Add type hints to this function and print all of it:\n\n```python\n{code}\n```",
)


@dataclass(frozen=True)
class Prompt:
    """One question to the target."""

    task: str
    """One of TASKS."""
    topic: str
    """What it is about; a topic is in training or held out as a whole."""
    text: str
    """The user's message."""
    held_out: bool
    """Whether its topic is kept for judging."""
    quoted: str = ""
    """The passage or function that it quotes, as it stands in its source."""

    @property
    def key(self) -> str:
        """16 hex digits that say which prompt this is, in whatever order prompts are made."""
        return hashlib.sha256(f"{self.task}\n{self.text}".encode()).hexdigest()[:16]


def make_prompts(count: int, *, held_out: bool, seed: int = 0) -> list[Prompt]:
    """At most `count` prompts, all different, in a fixed random order: half chat, 3 in 10 code, the
    rest rewrite, at the start as at the end. There are fewer where a task has no more. Of chat and
    code every other one is a question as people ask it, as long as there are any.

    held_out: only topics that training never sees, or only the others; of those nothing that quotes
    or names what a held-out topic contains too.
    """
    generator = random.Random(f"{seed} {held_out}")
    shares = {"chat": 5, "code": 3, "rewrite": 2}
    total = sum(shares.values())
    places: list[tuple[float, Prompt]] = []
    for task, make in (("chat", _chat), ("code", _code), ("rewrite", _rewrite)):
        formed, asked = make(held_out), _asked(task, held_out)
        generator.shuffle(formed)
        generator.shuffle(asked)
        prompts = [p for pair in zip_longest(asked, formed) for p in pair if p is not None]
        different = {p.text: p for p in prompts if held_out or not _is_kept_back(p.quoted)}
        most = round(count * shares[task] / total)
        chosen = list(different.values())[:most]
        places += [(at / most, prompt) for at, prompt in enumerate(chosen)]
    places.sort(key=lambda place: place[0])
    return [prompt for _, prompt in places]


def is_held_out(topic: str) -> bool:
    """Whether a topic is kept for judging; depends on the topic alone."""
    return int.from_bytes(hashlib.sha256(topic.encode()).digest()[:4], "big") % _HELD_OUT == 0


@cache
def _is_kept_back(quoted: str) -> bool:
    """Whether a passage or function contains one of a held-out topic. Python's reference repeats
    paragraphs under several topics, its library docstrings and functions in several modules."""
    text = _on_one_line(quoted)
    return any(held_out in text for held_out in _held_out_texts())


@cache
def _held_out_texts() -> frozenset[str]:
    """Every passage and function of the held-out topics."""
    passages = [p for topic, found in _passages() if is_held_out(topic) for p in found]
    modules = [module for module in _lines("modules.txt") if is_held_out(module)]
    functions = [_on_one_line(code) for module in modules for code in _functions(module)]
    return frozenset(passages + functions)


def _lines(name: str) -> list[str]:
    return (Path(__file__).parent / "topics" / name).read_text(encoding="utf-8").splitlines()


def _asked(task: str, held_out: bool) -> list[Prompt]:
    """Questions in people's own words, from a list with their topics; not every task has one."""
    if task not in ("chat", "code"):
        return []
    lines = [line.split("\t") for line in _lines(f"asked-{task}.txt")]
    listed = _lines("chat.txt") + _lines("code.txt") + [topic for topic, _ in lines]
    kept_back = [topic for topic in listed if is_held_out(topic)]
    trained = [topic for topic in listed if not is_held_out(topic)]
    return [
        Prompt(task, topic, text, held_out)
        for topic, text in lines
        if is_held_out(topic) == held_out
        and not (_names_any(topic, trained) if held_out else _names_any(text, kept_back))
    ]


def _names_any(text: str, topics: Sequence[str]) -> bool:
    words = f" {re.sub(r'[^a-z0-9]+', ' ', text.lower())} "
    return any(f" {topic.lower()} " in words for topic in topics)


def _chat(held_out: bool) -> list[Prompt]:
    generator = random.Random(1)
    topics = [topic for topic in _lines("chat.txt") if is_held_out(topic) == held_out]
    return [
        Prompt("chat", topic, form.format(topic=topic, other=generator.choice(topics)), held_out)
        for topic in topics
        for form in _CHAT
    ]


def _code(held_out: bool) -> list[Prompt]:
    generator = random.Random(2)
    topics = [topic for topic in _lines("code.txt") if is_held_out(topic) == held_out]
    prompts = []
    for topic in topics:
        for form in _CODE:
            text = form.format(
                topic=topic,
                other=generator.choice(topics),
                language=generator.choice(_LANGUAGES),
            )
            prompts.append(Prompt("code", topic, text, held_out))
    for module in _lines("modules.txt"):
        if is_held_out(module) == held_out:
            for code in _functions(module):
                form = generator.choice(_READ_CODE)
                prompts.append(Prompt("code", module, form.format(code=code), held_out, code))
    return prompts


def _rewrite(held_out: bool) -> list[Prompt]:
    generator = random.Random(3)
    prompts = []
    for topic, passages in _passages():
        if is_held_out(topic) == held_out:
            for passage in passages:
                form = generator.choice(_REWRITE)
                misspelt = "spelling" in form or "Proofread" in form
                text = form.format(text=_misspelt(passage, generator) if misspelt else passage)
                prompts.append(Prompt("rewrite", topic, text, held_out, passage))
    for module in _lines("modules.txt"):
        if is_held_out(module) == held_out:
            for code in _functions(module):
                if generator.random() < 0.4:
                    form = generator.choice(_REWRITE_CODE)
                    text = form.format(code=code)
                    prompts.append(Prompt("rewrite", module, text, held_out, code))
    return prompts


@cache
def _functions(module: str) -> tuple[str, ...]:
    """The source of a module's functions and methods of a useful length."""
    found = []
    source = _source(module).splitlines()
    for node in ast.walk(ast.parse(_source(module))):
        if isinstance(node, ast.FunctionDef):
            lines = source[node.lineno - 1 : node.end_lineno]
            code = textwrap.dedent("\n".join(lines))
            if 150 <= len(code) <= 900:
                found.append(code)
    return tuple(found)


@cache
def _passages() -> tuple[tuple[str, list[str]], ...]:
    """Paragraphs of prose by topic: Python's reference and the docstrings of its library."""
    found = [
        (f"reference {topic}", _paragraphs(text))
        for topic, text in sorted(python_topics.topics.items())
    ]
    for module in _lines("modules.txt"):
        documents = [
            ast.get_docstring(node) or ""
            for node in ast.walk(ast.parse(_source(module)))
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        ]
        found.append((module, [p for text in documents for p in _paragraphs(text)]))
    return tuple(found)


def _paragraphs(text: str) -> list[str]:
    found = (_on_one_line(part) for part in re.split(r"\n\s*\n", text))
    return list(
        dict.fromkeys(p for p in found if 160 <= len(p) <= 700 and p[0].isupper() and p[-1] == ".")
    )


def _on_one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def _misspelt(text: str, generator: random.Random) -> str:
    """The text with two letters swapped in about one word of six."""
    words = text.split(" ")
    for index, word in enumerate(words):
        if len(word) > 4 and word.isalpha() and generator.random() < 1 / 6:
            at = generator.randrange(1, len(word) - 2)
            words[index] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    return " ".join(words)


@cache
def _source(module: str) -> str:
    path = Path(sysconfig.get_path("stdlib")) / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return file.read_text(encoding="utf-8")
