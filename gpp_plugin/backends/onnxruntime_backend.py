"""ONNX Runtime on the CPU, of the model that `torch.onnx` exports."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpp_plugin.backends.exported_code import ExportedBackend, exported, quiet
from gpp_plugin.backends.forward_code import ForwardCode, ForwardRunner
from gpp_plugin.errors import BackendRefused

MOST_BYTES = 1 << 31
"""What a model may hold in memory: its format has no room for more without files beside it."""


class OnnxRuntimeBackend(ExportedBackend):
    """ONNX Runtime's CPU provider, on as many threads as torch has."""

    packages = ("onnxruntime", "onnxscript", "onnx")
    extra = "onnxruntime"

    def build(self, code: ForwardCode) -> ForwardRunner:
        """Return a session's run."""
        import onnxruntime

        held = sum(t.nbytes for t in (*code.parameters, *code.bound) if isinstance(t, Tensor))
        if held >= MOST_BYTES:
            raise BackendRefused(f"stage {code.name!r} holds {held} bytes, and a model may hold {MOST_BYTES}")
        with quiet():
            traced, read = exported(code)
            program = torch.onnx.export(traced, dynamo=True, optimize=True, verbose=False)
        assert program is not None, "with dynamo it returns the program"
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        # operators one after the other, each on the rank's threads
        options.inter_op_num_threads = 1
        # a thread that spins for work takes the core of another rank
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(
            program.model_proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        names = [given.name for given in session.get_inputs()]
        if len(names) != len(read):
            raise BackendRefused(f"{len(names)} inputs are left of {len(read)}")

        def run(*tensors: Tensor) -> Sequence[Tensor]:
            given = {
                name: tensors[index].detach().contiguous().numpy()
                for name, index in zip(names, read, strict=True)
            }
            return [torch.from_numpy(array) for array in session.run(None, given)]

        return run


ONNXRUNTIME = OnnxRuntimeBackend()
