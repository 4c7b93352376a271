"""Stands in for postprocessing: as the real one it decodes every response's ids alone."""

from __future__ import annotations

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        ids = pb_utils.get_input_tensor_by_name(request, "TOKENS_BATCH").as_numpy().ravel()
        text = bytes(ids.tolist()).decode(errors="replace")
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUTPUT", np.array([text.encode()], np.object_))]
        )
