"""The service's settings: one YAML file, the environment and flags, in rising order."""

from __future__ import annotations

from draftgate.config.load import Loaded, changed, load
from draftgate.config.settings import Settings, gateway_config

__all__ = ["Loaded", "Settings", "changed", "gateway_config", "load"]
