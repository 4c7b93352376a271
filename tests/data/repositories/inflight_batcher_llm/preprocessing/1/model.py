"""Stands in for preprocessing: an id for every byte of the prompt."""

from __future__ import annotations

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        query = pb_utils.get_input_tensor_by_name(request, "QUERY").as_numpy()
        asked = pb_utils.get_input_tensor_by_name(request, "REQUEST_OUTPUT_LEN").as_numpy()
        ids = np.frombuffer(query.ravel()[0], np.uint8).astype(np.int32)[None]
        word_list = np.array([[[0], [-1]]], np.int32)
        values = {
            "INPUT_ID": ids,
            "REQUEST_INPUT_LEN": np.array([[ids.shape[1]]], np.int32),
            "DECODER_INPUT_ID": np.array([[0]], np.int32),
            "REQUEST_DECODER_INPUT_LEN": np.array([[1]], np.int32),
            "REQUEST_OUTPUT_LEN": asked,
            "STOP_WORDS_IDS": word_list,
            "BAD_WORDS_IDS": word_list,
            "EMBEDDING_BIAS": np.array([[0]], np.float32),
            "OUT_END_ID": np.array([[2]], np.int32),
            "OUT_PAD_ID": np.array([[2]], np.int32),
            "OUT_PROMPT_TABLE_EXTRA_IDS": np.array([[0]], np.uint64),
        }
        wanted = request.requested_output_names()
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, value) for name, value in values.items() if name in wanted]
        )
