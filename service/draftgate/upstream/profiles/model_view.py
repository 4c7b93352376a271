"""What profiles want to know of a Triton model's configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from draftgate._pb.inference import grpc_service_pb2 as pb

__all__ = ["ModelView"]


@dataclass(frozen=True)
class ModelView:
    """One model: its tensors as they stand in requests, and how it answers."""

    name: str
    inputs: Mapping[str, str]
    """The data type of each input, for instance BYTES."""
    outputs: Mapping[str, str]
    """The data type of each output."""
    max_batch_size: int
    """0: tensors have no batch dimension."""
    decoupled: bool
    """Whether one request may get any number of responses. Of an ensemble, which only computes it
    from its steps, it says nothing."""
    parameters: Mapping[str, str]
    steps: tuple[str, ...]
    """The models of an ensemble, in its order."""

    @classmethod
    def of(cls, config: pb.ModelConfig) -> ModelView:
        """The view of a configuration as Triton tells it."""
        return cls(
            name=config.name,
            inputs=_datatypes(config.input),
            outputs=_datatypes(config.output),
            max_batch_size=config.max_batch_size,
            decoupled=config.model_transaction_policy.decoupled,
            parameters={key: value.string_value for key, value in config.parameters.items()},
            steps=tuple(step.model_name for step in config.ensemble_scheduling.step),
        )

    def parameter(self, name: str) -> str:
        """A parameter of the model; empty if it has none, or if its template was never filled."""
        value = self.parameters.get(name, "")
        return "" if value.startswith("${") else value

    def has_inputs(self, *names: str) -> bool:
        return all(name in self.inputs for name in names)

    def has_outputs(self, *names: str) -> bool:
        return all(name in self.outputs for name in names)


def _datatypes(tensors: Iterable[pb.ModelInput] | Iterable[pb.ModelOutput]) -> Mapping[str, str]:
    # The shipped configuration of one ensemble lists an output twice.
    return {tensor.name: _datatype(tensor.data_type) for tensor in tensors}


def _datatype(number: pb.DataType.ValueType) -> str:
    name = pb.DataType.Name(number).removeprefix("TYPE_")
    return "BYTES" if name == "STRING" else name
