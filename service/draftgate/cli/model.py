"""`draftgate model`: prepare an FP8 checkpoint, and look into one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from draftgate.checkpoint import (
    Agreement,
    CheckpointReport,
    ConsoleProgress,
    Scorer,
    compare_with_source,
    ensure_checkpoint,
    inspect_checkpoint,
)
from draftgate.checkpoint.inspection import ScaleRange
from draftgate.cli.rows import print_rows

__all__ = ["model_app"]

model_app = typer.Typer(help="Prepare FP8 checkpoints and look into them.", no_args_is_help=True)

_ARITHMETIC = (
    "Both were computed in fp32 with the FP8 weights dequantised and activations left as they are, "
    "as the CPU engine does in bf16; a GPU that also quantises activations differs more."
)


@model_app.command()
def prepare(
    source: Annotated[
        Path,
        typer.Option("--from", help="A GGUF file or a Hugging Face folder.", show_default=False),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder to make.", show_default=False)],
) -> None:
    """Quantise a model to FP8 in ModelOpt's layout, which TensorRT-LLM and Draftgate both load.

    Does nothing but check when OUT already holds the checkpoint of this source.
    """
    errors = Console(stderr=True)
    with ConsoleProgress(errors) as progress:
        ensure_checkpoint(source, out, progress=progress)
    typer.echo(f"{out} is ready. See what is in it: draftgate model inspect {out}")


@model_app.command()
def inspect(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A prepared checkpoint.", show_default=False)
    ],
    source: Annotated[
        Path | None,
        typer.Option(help="What it was prepared from: also measure how far FP8 is from it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print what is in a checkpoint and, given its source, how well FP8 agrees with it."""
    report = inspect_checkpoint(folder)
    measured = None
    if source is not None:
        with ConsoleProgress(Console(stderr=True)) as progress:
            measured = compare_with_source(folder, source, _load, progress=progress)
    if as_json:
        content = asdict(report)
        if measured is not None:
            content["agreement"] = {**asdict(measured), "arithmetic": _ARITHMETIC}
        typer.echo(json.dumps(content, indent=2))
        return
    print_rows(_report_rows(report), str(folder))
    if measured is not None:
        typer.echo()
        print_rows(_agreement_rows(measured), "FP8 against the source")
        typer.echo(_ARITHMETIC)


def _load(folder: Path) -> Scorer:
    import torch

    from draftgate.engine import load_target

    return load_target(folder, torch.float32).score


def _report_rows(report: CheckpointReport) -> list[tuple[str, str]]:
    shape, tokenizer = report.shape, report.tokenizer
    rope = f"{shape.rope.kind}, base {shape.rope.theta:g}"
    if shape.rope.kind != "default":
        rope += f", factor {shape.rope.factor:g}"
    extras = [
        name
        for name, present in (
            ("q/k/v bias", shape.qkv_bias),
            ("output bias", shape.output_bias),
            ("q/k norm", shape.qk_norm),
        )
        if present
    ]
    excluded = ", ".join(report.excluded_modules) or "none"
    rows = [
        ("architecture", shape.architecture),
        ("layers", f"{shape.layers}"),
        ("hidden size", f"{shape.hidden_size}, {shape.intermediate_size} in the MLP"),
        ("heads", f"{shape.heads} of {shape.head_dim}, {shape.kv_heads} for keys and values"),
        ("attention extras", ", ".join(extras) or "none"),
        ("vocabulary", f"{shape.vocab_size:,}"),
        ("context", f"{shape.max_positions:,} tokens"),
        ("rope", rope),
        ("embeddings", "tied" if shape.tied_embeddings else "not tied"),
        ("parameters", f"{report.parameters:,}"),
        *((f"bytes in {dtype}", f"{count:,}") for dtype, count in report.bytes_by_dtype.items()),
        ("quantisation", f"{report.quantization}, {report.quantized_layers} linear layers"),
        ("excluded from it", excluded),
        ("weight scales", _range_text(report.weight_scales)),
        ("input scales", _range_text(report.input_scales)),
        (
            "tokenizer",
            f"{tokenizer.kind}, {tokenizer.tokens:,} tokens, {tokenizer.special_tokens} special",
        ),
        ("chat template", "yes" if tokenizer.has_chat_template else "no"),
    ]
    if report.source_name:
        rows.append(("source", f"{report.source_name}, SHA-256 {report.source_sha256}"))
    return rows


def _agreement_rows(measured: Agreement) -> list[tuple[str, str]]:
    return [
        ("positions compared", f"{measured.tokens}"),
        ("same top token", f"{measured.top1:.1%}"),
        ("mean KL", f"{measured.mean_kl_nats:.4f} nats/token"),
    ]


def _range_text(scales: ScaleRange | None) -> str:
    if scales is None:
        return "none"
    return f"{scales.smallest:.3g} to {scales.largest:.3g} ({scales.count})"
