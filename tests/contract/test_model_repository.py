from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftgate import contract
from draftgate.contract import MODELS, DataType, TensorSpec

REPOSITORY = Path(__file__).parents[2] / "model_repository"

PYTHON_MODELS = sorted(MODELS.keys() - {contract.ENSEMBLE_MODEL})


# Stock Triton's own descriptors know every field; they cannot share a process with ours.
PARSE = """
import json, pathlib, sys
from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2

def parse(path):
    config = text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())
    return json_format.MessageToDict(config, preserving_proto_field_name=True)

paths = pathlib.Path(sys.argv[1]).glob("*/config.pbtxt")
print(json.dumps({path.parent.name: parse(path) for path in paths}))
"""


@functools.cache
def configs() -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-c", PARSE, str(REPOSITORY)]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def specs(tensors: list[dict[str, Any]]) -> tuple[TensorSpec, ...]:
    def dtype(tensor: dict[str, Any]) -> DataType:
        name = tensor["data_type"].removeprefix("TYPE_")
        return DataType.STRING if name == "STRING" else DataType(name)

    return tuple(
        TensorSpec(
            tensor["name"],
            dtype(tensor),
            tuple(map(int, tensor["dims"])),
            optional=tensor.get("optional", False),
        )
        for tensor in tensors
    )


def test_the_repository_holds_exactly_the_models_of_the_contract() -> None:
    assert {path.name for path in REPOSITORY.iterdir() if path.is_dir()} == MODELS.keys()


@pytest.mark.parametrize("name", MODELS)
def test_tensors_equal_the_contract(name: str) -> None:
    config = configs()[name]
    inputs, outputs = MODELS[name]
    assert config["name"] == name
    assert "max_batch_size" not in config  # 0: no batch dimension
    assert specs(config["input"]) == inputs
    assert specs(config["output"]) == outputs


@pytest.mark.parametrize("name", PYTHON_MODELS)
def test_python_models_run_as_one_unbatched_instance(name: str) -> None:
    config = configs()[name]
    assert config["backend"] == "python"
    assert [group["count"] for group in config["instance_group"]] == [1]
    assert "dynamic_batching" not in config
    decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
    assert decoupled == (name == contract.ENGINE_MODEL)


def test_the_ensemble_wires_every_tensor() -> None:
    steps = configs()[contract.ENSEMBLE_MODEL]["ensemble_scheduling"]["step"]
    known = {spec.name for spec in contract.ENSEMBLE_INPUTS}
    for step in steps:
        inputs, outputs = MODELS[step["model_name"]]
        alone = {contract.STOP, contract.CONTROL, contract.CONTROL_RESULT}
        assert step["input_map"].keys() == {spec.name for spec in inputs} - alone
        assert step["output_map"].keys() == {spec.name for spec in outputs} - alone
        assert set(step["input_map"].values()) <= known
        known |= set(step["output_map"].values())
    assert {spec.name for spec in contract.ENSEMBLE_OUTPUTS} <= known
    engine = steps[1]
    assert engine["input_map"]["input_ids"] == "prompt_ids"
    renamed = {key: value for key, value in engine["input_map"].items() if key != value}
    assert renamed == {"input_ids": "prompt_ids"}
    assert all(key == value for key, value in engine["output_map"].items())


@pytest.mark.parametrize("name", PYTHON_MODELS)
def test_model_files_are_shims(name: str) -> None:
    """They define nothing, so that all logic is importable and tested."""
    tree = ast.parse((REPOSITORY / name / "1" / "model.py").read_text())
    defined = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    assert not [node for node in defined if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    assert len(defined) < 10
