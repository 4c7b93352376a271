"""How the shipped EAGLE-3 drafter is made: prompts, generations, features, training, report."""

from __future__ import annotations
