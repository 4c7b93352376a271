from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from draftgate.errors import DraftgateError, ErrorCode
from draftgate.text import Message, Tokenizer, parse_messages
from draftgate.text.chat import ChatTemplate, load_chat_template

SYSTEM = (
    "<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
)


def rendered(tokenizer: Tokenizer, messages: list[Message]) -> str:
    """What the chat template wrote: the ids turned back with special tokens in place."""
    return tokenizer._fast.decode(tokenizer.encode_chat(messages), skip_special_tokens=False)


def test_the_model_format(tokenizer: Tokenizer) -> None:
    assert tokenizer.has_chat_template
    assert rendered(tokenizer, [Message("user", "Hi 🙂")]) == (
        SYSTEM + "<|im_start|>user\nHi 🙂<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_conversation_with_its_own_system_message(tokenizer: Tokenizer) -> None:
    messages = [
        Message("system", "Be brief."),
        Message("user", "2+2?"),
        Message("assistant", "4"),
        Message("user", "<b>&amp;"),
    ]
    assert rendered(tokenizer, messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
        "<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\n<b>&amp;<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_parses_messages() -> None:
    text = json.dumps([{"role": "user", "content": "é\n"}, {"role": "assistant", "content": ""}])
    assert parse_messages(text) == [Message("user", "é\n"), Message("assistant", "")]


@pytest.mark.parametrize(
    ("text", "field", "fault"),
    [
        ("", "messages", "invalid JSON at character 0"),
        ('[{"role": "user",', "messages", "invalid JSON at character 17"),
        ("[" * 100_000, "messages", "nested too deep"),
        ("null", "messages", "null"),
        ('{"role": "user", "content": "x"}', "messages", "an object"),
        ('"hi"', "messages", "a string"),
        ("[]", "messages", "at least one message"),
        ('["hi"]', "messages[0]", "a string"),
        ('[{"role": "user", "content": "x"}, 7]', "messages[1]", "a number"),
        ('[{"content": "x"}]', "messages[0].role", "nothing"),
        ('[{"role": "user"}]', "messages[0].content", "nothing"),
        ('[{"role": true, "content": "x"}]', "messages[0].role", "a boolean"),
        ('[{"role": "tool", "content": "x"}]', "messages[0].role", "'tool'"),
        ('[{"role": "user", "content": null}]', "messages[0].content", "null"),
        ('[{"role": "user", "content": ["x"]}]', "messages[0].content", "a list"),
        ('[{"role": "user", "content": "x", "name": "y"}]', "messages[0]", "'name'"),
        ('[{"role": "user", "content": "secret \\ud800"}]', "messages[0].content", "character 7"),
    ],
)
def test_names_the_part_at_fault(text: str, field: str, fault: str) -> None:
    with pytest.raises(DraftgateError) as caught:
        parse_messages(text)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert caught.value.field == field
    assert caught.value.message.startswith(f"{field}: got ")
    assert fault in caught.value.message
    assert "secret" not in caught.value.message


def render(source: str, **special_tokens: str) -> str:
    return ChatTemplate(source, special_tokens).render([Message("user", "<é>")])


def test_what_templates_rely_on() -> None:
    assert render("{{ bos_token }}{{ messages[0].content }}", bos_token="<s>") == "<s><é>"
    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "<é>"}]'
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)
    assert render("  {% if add_generation_prompt %}\nyes\n  {% endif %}\nno") == "yes\nno"
    assert (
        render("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}")
        == "1"
    )


def test_a_template_may_refuse_the_messages() -> None:
    with pytest.raises(DraftgateError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert caught.value.field == "messages"


def test_templates_run_in_a_sandbox() -> None:
    with pytest.raises(DraftgateError, match="unsafe"):
        render("{{ messages.__class__.__mro__ }}")
    with pytest.raises(DraftgateError, match="unsafe"):
        render("{{ messages.append(1) }}")


def test_a_template_that_does_not_parse_is_a_fault_of_the_checkpoint() -> None:
    with pytest.raises(DraftgateError, match="does not parse") as caught:
        ChatTemplate("{% if %}", {})
    assert caught.value.code is ErrorCode.FAILED_PRECONDITION


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    def source(config: dict[str, object]) -> str | None:
        template = load_chat_template(tmp_path, config)
        return template and template.render([Message("user", "x")])

    assert source({}) is None
    assert source(
        {"chat_template": "config {{ eos_token }}", "eos_token": {"content": "</s>"}}
    ) == ("config </s>")
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert source({"chat_template": named}) == "d"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert source({"chat_template": "config"}) == "file"
