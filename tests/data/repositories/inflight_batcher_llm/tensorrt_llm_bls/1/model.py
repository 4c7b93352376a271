"""Stands in for the BLS model with `accumulate_tokens`: every response decodes all ids so far."""

from __future__ import annotations

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

RENAMED = {"top_k": "runtime_top_k", "top_p": "runtime_top_p", "stream": "streaming"}
HANDED_ON = (
    *("temperature", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("return_perf_metrics", "return_num_input_tokens", "return_num_output_tokens"),
    "exclude_input_in_output",
)
METRICS = (
    *("num_input_tokens", "num_output_tokens"),
    *("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens"),
)


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            self._answer(request, request.get_response_sender())

    def _answer(self, request, sender):
        given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        ids = np.frombuffer(given["text_input"].ravel()[0], np.uint8).astype(np.int32)[None]
        inputs = {
            "input_ids": ids,
            "input_lengths": np.array([[ids.shape[1]]], np.int32),
            "request_output_len": given["max_tokens"],
        }
        for name in (*RENAMED, *HANDED_ON):
            if name in given:
                inputs[RENAMED.get(name, name)] = given[name].reshape(1, 1)
        inner = pb_utils.InferenceRequest(
            model_name="tensorrt_llm",
            request_id=request.request_id(),
            requested_output_names=["output_ids", *METRICS],
            inputs=[pb_utils.Tensor(name, value) for name, value in inputs.items()],
        )
        wanted = request.requested_output_names()
        spoken = b""
        for response in inner.exec(decoupled=True):
            if response.has_error():
                sender.send(pb_utils.InferenceResponse(error=response.error()), flags=FINAL)
                return
            tensors = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
            if not tensors:
                continue
            spoken += bytes(tensors.pop("output_ids").ravel().tolist())
            text = spoken.decode(errors="replace").encode()
            outputs = [pb_utils.Tensor("text_output", np.array([[text]], np.object_))]
            outputs += [
                pb_utils.Tensor(name, value) for name, value in tensors.items() if name in wanted
            ]
            sender.send(pb_utils.InferenceResponse(outputs))
        sender.send(flags=FINAL)
