from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer

from draftgate.checkpoint import SilentProgress, prepare
from draftgate.checkpoint.plain import write_plain
from draftgate.checkpoint.source import open_source
from draftgate.errors import DraftgateError, ErrorCode

MODELS = [
    pytest.param("LlamaForCausalLM", {}, id="llama"),
    pytest.param(
        "LlamaForCausalLM", {"attention_bias": True, "tie_word_embeddings": True}, id="llama-bias"
    ),
    pytest.param("Qwen2ForCausalLM", {"tie_word_embeddings": True}, id="qwen2"),
    pytest.param("Qwen3ForCausalLM", {}, id="qwen3"),
]


@pytest.mark.parametrize(("architecture", "changes"), MODELS)
def test_gguf_comes_back_as_the_model_it_was_written_from(
    architecture: str,
    changes: dict[str, Any],
    make_hf: Callable[..., Path],
    make_gguf: Callable[..., Path],
    tmp_path: Path,
) -> None:
    original, plain = make_hf(architecture, **changes), tmp_path / "plain"
    plain.mkdir()

    write_plain(open_source(make_gguf(original)), plain, progress=SilentProgress())

    expected, got = (
        load_file(original / "model.safetensors"),
        load_file(plain / "model.safetensors"),
    )
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(got[name], values, rtol=0, atol=0, msg=name)
    ids = torch.tensor([[5, 77, 130, 9, 201, 42]])
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (original, plain)
    ]
    with torch.no_grad():
        torch.testing.assert_close(models[0](ids).logits, models[1](ids).logits)


def test_mistral_is_read_under_the_name_that_gguf_gives_it(
    make_hf: Callable[..., Path], make_gguf: Callable[..., Path]
) -> None:
    folder = make_hf("LlamaForCausalLM")
    path = make_gguf(folder, metadata={"llama.attention.sliding_window": 128})

    source = open_source(path)

    assert source.shape.architecture == "LlamaForCausalLM"
    assert source.shape.max_positions == 128


def llama3_table(head_dim: int, factor: float) -> np.ndarray[Any, Any]:
    """Divisors as llama.cpp writes them, from the published Llama 3.1 rule."""
    table = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * 500000.0 ** (index / head_dim)
        if wavelength < 8192 / 4:
            table.append(1.0)
        elif wavelength > 8192:
            table.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            table.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(table, dtype=np.float32)


def test_llama3_scaling_is_recovered_from_its_table(
    make_hf: Callable[..., Path], make_gguf: Callable[..., Path]
) -> None:
    folder = make_hf("LlamaForCausalLM")
    path = make_gguf(
        folder,
        metadata={"llama.rope.freq_base": 500000.0},
        tensors={"rope_freqs.weight": llama3_table(32, 32.0)},
    )

    rope = open_source(path).shape.rope

    assert (rope.kind, rope.theta, rope.factor) == ("llama3", 500000.0, 32.0)
    assert (rope.low_freq_factor, rope.high_freq_factor) == (1.0, 4.0)
    assert rope.original_max_positions == 8192


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_is_read(
    kind: str, make_hf: Callable[..., Path], make_gguf: Callable[..., Path]
) -> None:
    path = make_gguf(
        make_hf("Qwen2ForCausalLM"),
        metadata={
            "qwen2.rope.scaling.type": kind,
            "qwen2.rope.scaling.factor": 4.0,
            "qwen2.rope.scaling.original_context_length": 64,
        },
    )

    rope = open_source(path).shape.rope

    assert (rope.kind, rope.factor) == (kind, 4.0)
    if kind == "yarn":
        assert rope.original_max_positions == 64
        assert rope.attention_factor == pytest.approx(0.1 * math.log(4.0) + 1)


def test_end_of_turn_ends_a_generation_too(
    make_hf: Callable[..., Path], make_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    path = make_gguf(make_hf("LlamaForCausalLM"), metadata={"tokenizer.ggml.eot_token_id": 0})

    assert open_source(path).generation_config["eos_token_id"] == [1, 0]


REFUSED: list[Any] = [
    ({"general.architecture": "gemma2"}, {}, "GGUF architecture 'gemma2'"),
    ({"split.count": 3}, {}, "one of 3 parts"),
    ({"llama.expert_count": 8}, {}, "mixture of experts"),
    ({"llama.rope.dimension_count": 16}, {}, "partial rotary"),
    ({"llama.attention.value_length": 16}, {}, "values of 16 dimensions"),
    ({"llama.attention.head_count_kv": [2, 1]}, {}, "differs between layers"),
    ({"llama.feed_forward_length": [96, 48]}, {}, "differs between layers"),
    ({"llama.block_count": None}, {}, "llama.block_count is missing"),
    ({"llama.block_count": 3}, {}, "blk.2.attn_norm.weight is missing"),
    ({"llama.rope.scaling.type": "longrope"}, {}, "rope scaling 'longrope'"),
    ({"tokenizer.ggml.model": "llama"}, {}, "tokenizer 'llama'"),
    ({"tokenizer.ggml.pre": "deepseek-llm"}, {}, "pre-tokenizer 'deepseek-llm'"),
    ({"tokenizer.ggml.pre": None}, {}, "pre-tokenizer 'none'"),
    ({"tokenizer.ggml.eos_token_id": None}, {}, "eos_token_id"),
    ({}, {"blk.1.ffn_up.weight": None}, "blk.1.ffn_up.weight is missing"),
    ({}, {"output_norm.weight": np.ones(32, np.float32)}, r"shape \[32\], .* implies \[64\]"),
    ({}, {"blk.0.ffn_gate_inp.weight": np.ones((4, 64), np.float32)}, "ffn_gate_inp"),
    ({}, {"rope_freqs.weight": np.linspace(1, 9, 16, dtype=np.float32)}, "not llama3"),
]


@pytest.mark.parametrize(("metadata", "tensors", "message"), REFUSED)
def test_what_cannot_be_carried_is_refused_by_name(
    metadata: dict[str, Any],
    tensors: dict[str, Any],
    message: str,
    make_hf: Callable[..., Path],
    make_gguf: Callable[..., Path],
) -> None:
    path = make_gguf(make_hf("LlamaForCausalLM"), metadata=metadata, tensors=tensors)

    with pytest.raises(DraftgateError, match=message) as refusal:
        open_source(path)
    assert refusal.value.code in (ErrorCode.UNIMPLEMENTED, ErrorCode.FAILED_PRECONDITION)


def test_a_tensor_type_that_cannot_be_read_is_refused_by_name(
    make_hf: Callable[..., Path], make_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    integers = {"output_norm.weight": np.ones(64, np.int32)}
    path = make_gguf(make_hf("LlamaForCausalLM"), tensors=integers)

    with pytest.raises(DraftgateError, match="GGUF tensor type I32 is not supported"):
        prepare(path, tmp_path / "out", progress=SilentProgress())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kept", [0, 3, 4, 20, 100, 5_000, -1, -5_000])
def test_a_truncated_file_is_refused(
    kept: int, make_hf: Callable[..., Path], make_gguf: Callable[..., Path]
) -> None:
    path = make_gguf(make_hf("LlamaForCausalLM"))
    path.write_bytes(path.read_bytes()[:kept])

    with pytest.raises(DraftgateError, match=r"not a GGUF file|truncated or damaged"):
        open_source(path)


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(1000))

    with pytest.raises(DraftgateError, match=r"is not a GGUF file; give a \.gguf file"):
        open_source(path)


PIECES: list[Any] = [
    ("gpt-2", "I've 1234 x", ["I", "'ve", " 1234", " x"]),
    ("smollm", "I've 1234 x", ["I", "'ve", " ", "1", "2", "3", "4", " x"]),
    ("llama-bpe", "I'VE 1234 x", ["I", "'VE", " ", "123", "4", " x"]),
    ("qwen2", "I'VE 1234 x", ["I", "'VE", " ", "1", "2", "3", "4", " x"]),
    ("tekken", "aBc 12 x/\n", ["a", "Bc", " ", "1", "2", " x", "/\n"]),
]


@pytest.mark.parametrize(("pre", "text", "pieces"), PIECES)
def test_text_is_split_by_the_rule_that_the_file_names(
    pre: str,
    text: str,
    pieces: list[str],
    make_hf: Callable[..., Path],
    make_gguf: Callable[..., Path],
    tmp_path: Path,
) -> None:
    open_source(make_gguf(make_hf("LlamaForCausalLM"), pre=pre)).write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))

    split = tokenizer.pre_tokenizer.pre_tokenize_str(text)

    assert [text[start:end] for _, (start, end) in split] == pieces
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


@pytest.mark.parametrize(
    ("pre", "stated", "first"),
    [("gpt-2", None, []), ("gpt-2", True, [0]), ("llama-bpe", None, [0]), ("llama-bpe", False, [])],
)
def test_bos_begins_a_text_where_the_model_wants_it(
    pre: str,
    stated: bool | None,
    first: list[int],
    make_hf: Callable[..., Path],
    make_gguf: Callable[..., Path],
    tmp_path: Path,
) -> None:
    metadata = {"tokenizer.ggml.add_bos_token": stated}
    path = make_gguf(make_hf("LlamaForCausalLM"), pre=pre, metadata=metadata)
    open_source(path).write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))

    plain = tokenizer.encode("the", add_special_tokens=False).ids

    assert tokenizer.encode("the").ids == first + plain


def test_unused_vocabulary_rows_are_no_tokens(
    make_hf: Callable[..., Path], make_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    source = open_source(make_gguf(make_hf("LlamaForCausalLM")))
    source.write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))

    assert source.shape.vocab_size == 300
    assert tokenizer.get_vocab_size() == 262
    assert tokenizer.encode("[unused3]").ids == [
        tokenizer.token_to_id(character) for character in "[unused3]"
    ]


def test_gguf_source_is_quantised(
    make_hf: Callable[..., Path], make_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    prepare(make_gguf(make_hf("Qwen2ForCausalLM")), tmp_path / "out", progress=SilentProgress())

    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["model.layers.1.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn
    assert stored["model.layers.1.self_attn.q_proj.bias"].dtype == torch.bfloat16
