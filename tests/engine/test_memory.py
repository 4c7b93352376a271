"""Memory: the weights once, and nothing left behind by requests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from draftgate.engine import Target
from tests.support.engine import greedy, running, sampled
from tests.support.process_memory import resident_bytes

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


def test_weights_are_resident_once(checkpoint_dir: Path) -> None:
    """SmolLM2-135M in bf16 and no copy of it: 134.5 million weights, of which the embedding table
    stays a mapped file and is packed once as the output projection."""
    command = [sys.executable, "-c", _LOAD, str(Path(__file__).parents[2]), str(checkpoint_dir)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    loaded_bytes, used_bytes = map(int, output.split())
    weights_bytes = 134_515_008 * 2
    assert weights_bytes * 0.9 < loaded_bytes < weights_bytes * 1.1
    assert used_bytes < weights_bytes * 1.2


def test_two_thousand_requests_leave_nothing(tiny: Target) -> None:
    with running(tiny, ngram_min=1, max_waiting=1000, max_batch_rows=16) as engine:

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
        assert resident_bytes() - before < 4 << 20
        counters = engine.engine.counters()
    assert counters.emitted_tokens > 8000
    assert (counters.kv_used_blocks, counters.running_rows, counters.waiting_rows) == (0, 0, 0)
