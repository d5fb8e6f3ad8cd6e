"""OpenVINO on the CPU, which reads torch's exported programs itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpp_plugin.backends.exported_code import ExportedBackend, exported, quiet
from gpp_plugin.backends.forward_code import ForwardCode, ForwardRunner
from gpp_plugin.errors import BackendRefused


class OpenVinoBackend(ExportedBackend):
    """OpenVINO's CPU device, one stream, on as many threads as torch has, in float32."""

    packages = ("openvino",)
    extra = "openvino"

    def build(self, code: ForwardCode) -> ForwardRunner:
        """Return the inference of a compiled model."""
        import openvino

        with quiet():
            traced, read = exported(code)
            model = openvino.convert_model(traced)
        settings = {
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "NUM_STREAMS": 1,
            "INFERENCE_PRECISION_HINT": "f32",  # by default some processors get half precision
        }
        compiled = openvino.Core().compile_model(model, "CPU", settings)
        if len(compiled.inputs) != len(read):
            raise BackendRefused(f"{len(compiled.inputs)} inputs are left of {len(read)}")
        request = compiled.create_infer_request()
        count = len(compiled.outputs)

        def run(*tensors: Tensor) -> Sequence[Tensor]:
            given = [tensors[index].detach().contiguous().numpy() for index in read]
            # what it returns lies in the request, which the next call writes: copied by whoever keeps it
            found = request.infer(given, share_inputs=True, share_outputs=True)
            return [torch.from_numpy(found[i]) for i in range(count)]

        return run


OPENVINO = OpenVinoBackend()
