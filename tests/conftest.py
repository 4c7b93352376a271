"""Fixtures that every area shares."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from draftgate.checkpoint import SilentProgress, ensure_checkpoint, packaged_source
from tests.fakes.triton import FakeTriton
from tests.support.exporters import exporters

DRAFTER_DIR = Path(__file__).parent.parent / "drafters" / "smollm2-135m-instruct-eagle3"
"""The drafter that is shipped for the packaged model."""

_BUILD = Path(__file__).parent.parent / "build"
_CACHE = _BUILD / "test-checkpoint"

# What servers started by tests measure and keep is theirs, not the user's. A policy that is saved
# goes to a file of the test's own.
os.environ["XDG_CACHE_HOME"] = str(_BUILD / "test-cache")
os.environ["XDG_STATE_HOME"] = str(_BUILD / "test-state")


# How fast a machine is, or how busy, is nothing that a test finds out.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


def _keep_to_own_cores() -> None:
    """Several processes of tests share the cores out: threads that wait for each other (OpenMP) are
    many times slower where two processes have theirs on one core. What a test starts inherits it.
    """
    number = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= count:
        os.sched_setaffinity(0, cores[int(number) :: count])


_keep_to_own_cores()

# Started in the background, by a CI runner say, we inherit that Ctrl-C is ignored, and so would the
# programs whose answer to it is tested.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_exporter_is_left_behind() -> Iterator[None]:
    """One that retries draws from `random` behind the back of whatever test runs by then."""
    yield
    for thread in exporters():
        thread.join(1)  # It may have told that it is done, and be about to end.
    assert not exporters()


@pytest.fixture(scope="session")
def checkpoint_dir() -> Path:
    """The packaged model prepared in FP8, kept between runs."""
    return ensure_checkpoint(packaged_source(), _CACHE / "smollm2-fp8", progress=SilentProgress())


@pytest.fixture
async def triton() -> AsyncIterator[FakeTriton]:
    """A stand-in for Triton, for what stands in front of it."""
    fake = FakeTriton()
    await fake.start()
    yield fake
    await fake.stop()
