"""Stands in for the LLM API model: plays the script, in JSON, that is the prompt.

As the real one it sends the whole text so far in every response, reasons as the text None until the
end, and every number as text. It notes in `events.jsonl` what it was asked for and how each ended.
"""

from __future__ import annotations

import json
import os
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def texts(*values):
    return np.array([str(value) for value in values], np.object_)


class TritonPythonModel:
    def initialize(self, args):
        path = os.path.join(args["model_repository"], "events.jsonl")
        self._events = open(path, "a", buffering=1)  # noqa: SIM115

    def execute(self, requests):
        for request in requests:
            inputs = {}
            for tensor in request.inputs():
                value = tensor.as_numpy().item()
                inputs[tensor.name()] = value.decode() if isinstance(value, bytes) else value
            wanted = set(request.requested_output_names())
            arguments = (inputs, wanted, request.get_response_sender())
            threading.Thread(target=self._play, args=arguments).start()

    def _play(self, inputs, wanted, sender):
        prompt = inputs.pop("text_input")
        script = json.loads(prompt)
        self._note(asked=inputs)
        if script.get("error"):
            self._fail(sender, wanted, script["error"])
            return
        echo = "" if inputs.get("sampling_param_exclude_input_from_output") else prompt
        words = [
            bytes(word) if isinstance(word, list) else word.encode() for word in script["words"]
        ]
        spoken, index = echo.encode(), 0
        while index < len(words) or script.get("endless"):
            time.sleep(script.get("delay_s", 0.0))
            if sender.is_cancelled():
                error = pb_utils.TritonError("Request cancelled", pb_utils.TritonError.CANCELLED)
                sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)
                self._note(ended="cancelled")
                return
            spoken += words[min(index, len(words) - 1)]
            index += 1
            last = index == len(words) and not script.get("endless")
            if not last and not inputs.get("streaming"):
                continue
            values = self._values(spoken, script, inputs, last=last)
            sender.send(self._response(values, wanted), flags=FINAL if last else 0)
        self._note(ended="finished")

    def _values(self, spoken, script, inputs, *, last):
        values = {"text_output": texts(spoken.decode(errors="replace"))}
        if inputs.get("return_finish_reason"):
            values["finish_reason"] = texts(script.get("finish_reason", "length") if last else None)
        if inputs.get("return_stop_reason"):
            values["stop_reason"] = texts(script.get("stop_reason") if last else None)
        if inputs.get("sampling_param_return_perf_metrics") and last:
            metrics = script.get("metrics", {})
            values |= {name: texts(value) for name, value in metrics.items()}
        return values

    def _response(self, values, wanted):
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, value) for name, value in values.items() if name in wanted]
        )

    def _fail(self, sender, wanted, message):
        error = pb_utils.TritonError(f"Error generating request: {message}")
        tensors = [pb_utils.Tensor("text_output", texts("N/A"))]
        sender.send(pb_utils.InferenceResponse(tensors, error=error), flags=FINAL)

    def _note(self, **event):
        self._events.write(json.dumps(event) + "\n")
