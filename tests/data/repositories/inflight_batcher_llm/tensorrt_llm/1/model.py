"""Stands in for an engine: plays the script, in JSON, whose bytes are the prompt's ids.

It notes in `events.jsonl` beside its folder's version what it was asked for and how each ended.
"""

from __future__ import annotations

import json
import os
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

SHAPES = {
    "cum_log_probs": ((1, 1), np.float32),
    "output_log_probs": ((1, 1, 1), np.float32),
    "context_logits": ((1, 1, 1), np.float32),
    "generation_logits": ((1, 1, 1, 1), np.float32),
    "batch_index": ((1, 1), np.int32),
    "sequence_index": ((1, 1), np.int32),
}
"""Outputs without meaning here, sent where they are wanted because an ensemble waits for them."""

METRICS = {
    "kv_cache_alloc_new_blocks": np.int32,
    "kv_cache_reused_blocks": np.int32,
    "kv_cache_alloc_total_blocks": np.int32,
    "arrival_time_ns": np.int64,
    "first_scheduled_time_ns": np.int64,
    "first_token_time_ns": np.int64,
    "last_token_time_ns": np.int64,
    "acceptance_rate": np.float32,
    "total_accepted_draft_tokens": np.int32,
    "total_draft_tokens": np.int32,
}


class TritonPythonModel:
    def initialize(self, args):
        path = os.path.join(args["model_repository"], "events.jsonl")
        self._events = open(path, "a", buffering=1)  # noqa: SIM115
        self._running = {}

    def execute(self, requests):
        for request in requests:
            inputs = self._inputs(request)
            work = self._stop if inputs.pop("stop", False) else self._play
            arguments = (
                request.request_id(),
                inputs,
                set(request.requested_output_names()),
                request.get_response_sender(),
            )
            if work == self._play:
                self._running.setdefault(request.request_id(), threading.Event())
            threading.Thread(target=work, args=arguments).start()

    def _inputs(self, request):
        """The values of the inputs that were given, without their dimensions."""
        found = {}
        for tensor in request.inputs():
            array = tensor.as_numpy()
            found[tensor.name()] = array.ravel().tolist() if array.size > 1 else array.item()
        return found

    def _stop(self, request_id, inputs, wanted, sender):
        if request_id in self._running:
            self._running[request_id].set()
        sender.send(flags=FINAL)

    def _play(self, request_id, inputs, wanted, sender):
        script = json.loads(bytes(inputs.pop("input_ids")))
        self._note(asked=inputs)
        if script.get("error"):
            error = pb_utils.TritonError(script["error"])
            sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)
            return
        ended = self._send_words(request_id, script, inputs, wanted, sender)
        del self._running[request_id]
        self._note(ended=ended)

    def _send_words(self, request_id, script, inputs, wanted, sender):
        words = [
            bytes(word) if isinstance(word, list) else word.encode() for word in script["words"]
        ]
        left = inputs["request_output_len"]
        stopped = self._running[request_id]
        index = 0
        while index < len(words) or script.get("endless"):
            if stopped.wait(script.get("delay_s", 0.0)):
                sender.send(self._response(b"", inputs, wanted, {}), flags=FINAL)
                return "stopped"
            word = words[min(index, len(words) - 1)][:left]
            left -= len(word)
            index += 1
            last = not left or (index == len(words) and not script.get("endless"))
            final = last and not script.get("flag_alone")
            metrics = script.get("metrics", {}) if last else {}
            sender.send(self._response(word, inputs, wanted, metrics), flags=FINAL if final else 0)
            if last:
                break
        if script.get("flag_alone"):
            sender.send(flags=FINAL)
        return "finished"

    def _response(self, word, inputs, wanted, metrics):
        values = {
            "output_ids": np.array([[list(word)]], np.int32),
            "sequence_length": np.array([[len(word)]], np.int32),
        }
        if inputs.get("return_num_input_tokens"):
            values["num_input_tokens"] = np.array([[inputs["input_lengths"]]], np.int32)
        if inputs.get("return_num_output_tokens"):
            values["num_output_tokens"] = np.array([[len(word)]], np.int32)
        for name, (shape, dtype) in SHAPES.items():
            values[name] = np.zeros(shape, dtype)
        if inputs.get("return_perf_metrics"):
            for name, dtype in METRICS.items():
                values[name] = np.array([[metrics.get(name, 0)]], dtype)
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, value) for name, value in values.items() if name in wanted]
        )

    def _note(self, **event):
        self._events.write(json.dumps(event) + "\n")
