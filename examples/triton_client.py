"""Stream a generation from Draftgate with NVIDIA's own Triton client.

    python examples/triton_client.py --prompt "Once upon a time"

It speaks to the gateway, which passes Triton's protocol through: requests wait for a place, go to
the replica with the least to do, and are traced. Triton's own port takes the same requests. Needs
`pip install tritonclient[grpc]` and nothing of Draftgate.
"""

from __future__ import annotations

import argparse
import queue
import sys
import uuid

import numpy as np
import tritonclient.grpc as triton


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--target",
        default="127.0.0.1:50051",
        help="host:port of the gateway, or of a Triton itself (default: %(default)s)",
    )
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()

    inputs = [
        tensor("text_input", np.array([arguments.prompt.encode()], dtype=object), "BYTES"),
        tensor("max_tokens", np.array([arguments.max_tokens], dtype=np.int32), "INT32"),
        tensor("temperature", np.array([0.0], dtype=np.float32), "FP32"),
    ]
    # A queue of (response, error): Triton's client calls back from a thread of its own.
    answers: queue.SimpleQueue = queue.SimpleQueue()

    with triton.InferenceServerClient(arguments.target) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(
            "ensemble",
            inputs,
            # Unique, because a running generation is named by its request id.
            request_id=str(uuid.uuid4()),
            # Without it there would be no sign of the end when the last response has no tensors.
            enable_empty_final_response=True,
        )
        while True:
            result, error = answers.get()
            if error is not None:
                print(f"error: {error}", file=sys.stderr)
                return 1
            text = result.as_numpy("text_output")
            if text is not None:
                print(text[0].decode(), end="", flush=True)
            if result.get_response().parameters["triton_final_response"].bool_param:
                print()
                return 0


def tensor(name: str, values: np.ndarray, datatype: str) -> triton.InferInput:
    made = triton.InferInput(name, list(values.shape), datatype)
    made.set_data_from_numpy(values)
    return made


if __name__ == "__main__":
    sys.exit(main())
