"""The service's settings: one YAML file, the environment and flags, in rising order."""

from __future__ import annotations

from draftgate.config.load import Examined, Loaded, changed, examine, load
from draftgate.config.settings import Settings, gateway_config

__all__ = ["Examined", "Loaded", "Settings", "changed", "examine", "gateway_config", "load"]
