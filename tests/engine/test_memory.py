"""Memory: the weights once, and nothing left behind by requests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from draftgate.engine import Target

_LOAD = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from pathlib import Path
from tests.support.process_memory import resident_bytes
from draftgate.engine import load_target

warm = torch.ones(256, 256, dtype=torch.bfloat16)
warm @ warm
before = resident_bytes()
target = load_target(Path(sys.argv[2]), torch.bfloat16)
held = resident_bytes() - before
target.score([1, 2, 3])
print(held, resident_bytes() - before)
"""


def output_of(script: str, folder: Path) -> str:
    """What a script prints in a process of its own: what else has run in this one has left kernels
    and freed memory behind."""
    command = [sys.executable, "-c", script, str(Path(__file__).parents[2]), str(folder)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_weights_are_resident_once(checkpoint_dir: Path) -> None:
    """SmolLM2-135M in bf16 and no copy of it: 134.5 million weights, of which the embedding table
    stays a mapped file and is packed once as the output projection."""
    loaded_bytes, used_bytes = map(int, output_of(_LOAD, checkpoint_dir).split())
    weights_bytes = 134_515_008 * 2
    assert weights_bytes * 0.9 < loaded_bytes < weights_bytes * 1.1
    assert used_bytes < weights_bytes * 1.2


_SERVE = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from pathlib import Path
from draftgate.engine import load_target
from draftgate.engine.linear import pass_rows
from tests.support.engine import greedy, running, sampled
from tests.support.process_memory import resident_bytes

target = load_target(Path(sys.argv[2]), torch.float32)
for size in {pass_rows(tokens, target.device, target.dtype) for tokens in range(1, 700)}:
    target.score([1] * size)  # The kernels for passes of every size, which are kept.

with running(target, ngram_min=1, max_waiting=1000, max_batch_rows=16) as engine:

    def serve(first: int, last: int) -> None:
        streams = []
        for n in range(first, last):
            ids = [(n * i + i * i) % 96 for i in range(1 + n % 50)]
            settings = {"logprobs": 2, "frequency_penalty": 0.1}
            params = (greedy if n % 2 else sampled)(1 + n % 12, **settings)
            streams.append(engine.submit(f"{n}", ids, params))
            if n % 7 == 0:
                engine.engine.stop(f"{n}")
                engine.engine.stop(f"{n} never comes")
        for stream in streams:
            stream.wait()

    serve(0, 500)
    before = resident_bytes()
    for first in range(500, 2500, 500):
        serve(first, first + 500)
    print(resident_bytes() - before)
    counters = engine.engine.counters()
print(counters.emitted_tokens)
print(counters.kv_used_blocks, counters.running_rows, counters.waiting_rows)
"""


def test_two_thousand_requests_leave_nothing(tiny: Target) -> None:
    grown_bytes, emitted, *left = map(int, output_of(_SERVE, tiny.config.folder).split())
    assert grown_bytes < 4 << 20
    assert emitted > 8000
    assert left == [0, 0, 0]
