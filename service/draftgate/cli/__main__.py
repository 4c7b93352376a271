"""`python -m draftgate.cli`: the same as `draftgate`."""

from __future__ import annotations

from draftgate.cli import main

main()
