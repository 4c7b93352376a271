"""The embedded engine: a target model on torch, in-flight batching, drafters and verification."""

from __future__ import annotations

from draftgate.engine.config import EngineConfig, ModelConfig
from draftgate.engine.engine import Engine
from draftgate.engine.model import Target, load_target
from draftgate.engine.request import EngineCounters, Output, Request, Sink, VerifyStep

__all__ = [
    "Engine",
    "EngineConfig",
    "EngineCounters",
    "ModelConfig",
    "Output",
    "Request",
    "Sink",
    "Target",
    "VerifyStep",
    "load_target",
]
