from __future__ import annotations

import ast
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from draftgate import contract
from draftgate.contract import DataType, TensorSpec

REPOSITORY = Path(__file__).parents[2] / "model_repository"

MODELS = {
    contract.ENSEMBLE_MODEL: (contract.ENSEMBLE_INPUTS, contract.ENSEMBLE_OUTPUTS),
    contract.PREPROCESSING_MODEL: (contract.PREPROCESSING_INPUTS, contract.PREPROCESSING_OUTPUTS),
    contract.ENGINE_MODEL: (contract.ENGINE_INPUTS, contract.ENGINE_OUTPUTS),
    contract.POSTPROCESSING_MODEL: (
        contract.POSTPROCESSING_INPUTS,
        contract.POSTPROCESSING_OUTPUTS,
    ),
}
PYTHON_MODELS = sorted(MODELS.keys() - {contract.ENSEMBLE_MODEL})


def load(name: str) -> model_config_pb2.ModelConfig:
    text = (REPOSITORY / name / "config.pbtxt").read_text()
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def specs(tensors, *, inputs: bool) -> tuple[TensorSpec, ...]:
    def dtype(tensor) -> DataType:
        name = model_config_pb2.DataType.Name(tensor.data_type).removeprefix("TYPE_")
        return DataType.STRING if name == "STRING" else DataType(name)

    return tuple(
        TensorSpec(
            tensor.name, dtype(tensor), tuple(tensor.dims), optional=inputs and tensor.optional
        )
        for tensor in tensors
    )


def test_the_repository_holds_exactly_the_models_of_the_contract() -> None:
    assert {path.name for path in REPOSITORY.iterdir() if path.is_dir()} == MODELS.keys()


@pytest.mark.parametrize("name", MODELS)
def test_tensors_equal_the_contract(name: str) -> None:
    config = load(name)
    inputs, outputs = MODELS[name]
    assert config.name == name
    assert config.max_batch_size == 0
    assert specs(config.input, inputs=True) == inputs
    assert specs(config.output, inputs=False) == outputs


@pytest.mark.parametrize("name", PYTHON_MODELS)
def test_python_models_run_as_one_unbatched_instance(name: str) -> None:
    config = load(name)
    assert config.backend == "python"
    assert [group.count for group in config.instance_group] == [1]
    assert not config.HasField("dynamic_batching")
    assert config.model_transaction_policy.decoupled == (name == contract.ENGINE_MODEL)


def test_the_ensemble_wires_every_tensor() -> None:
    config = load(contract.ENSEMBLE_MODEL)
    known = {spec.name for spec in contract.ENSEMBLE_INPUTS}
    for step in config.ensemble_scheduling.step:
        inputs, outputs = MODELS[step.model_name]
        alone = {contract.STOP, contract.CONTROL, contract.CONTROL_RESULT}
        assert step.input_map.keys() == {spec.name for spec in inputs} - alone
        assert step.output_map.keys() == {spec.name for spec in outputs} - alone
        assert set(step.input_map.values()) <= known
        known |= set(step.output_map.values())
    assert {spec.name for spec in contract.ENSEMBLE_OUTPUTS} <= known
    engine = config.ensemble_scheduling.step[1]
    assert engine.input_map["input_ids"] == "prompt_ids"
    renamed = {key: value for key, value in engine.input_map.items() if key != value}
    assert renamed == {"input_ids": "prompt_ids"}
    assert all(key == value for key, value in engine.output_map.items())


@pytest.mark.parametrize("name", PYTHON_MODELS)
def test_model_files_are_shims(name: str) -> None:
    """They define nothing, so that all logic is importable and tested."""
    tree = ast.parse((REPOSITORY / name / "1" / "model.py").read_text())
    defined = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    assert not [node for node in defined if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    assert len(defined) < 10
