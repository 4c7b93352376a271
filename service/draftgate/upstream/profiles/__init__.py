"""The kinds of model repository that the gateway can stand in front of."""

from __future__ import annotations

from draftgate.upstream.profiles.base import Profile, Reader
from draftgate.upstream.profiles.detection import detect
from draftgate.upstream.profiles.draftgate import DraftgateProfile
from draftgate.upstream.profiles.model_view import ModelView

__all__ = ["DraftgateProfile", "ModelView", "Profile", "Reader", "detect"]
