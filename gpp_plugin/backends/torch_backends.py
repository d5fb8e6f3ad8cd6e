"""The backends that come with torch: its operators one by one, and its compiler."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpp_plugin.backends.forward_code import ForwardCode, ForwardRunner
from gpp_plugin.plugins import Backend


class TorchBackend(Backend):
    """Torch's operators one by one, as stages run without any backend."""

    reads_weights = True

    def version(self) -> str:
        """Return torch's."""
        return str(torch.__version__)

    def build(self, code: ForwardCode) -> ForwardRunner:
        """Return the generated code as it is."""
        return code.run


class InductorBackend(Backend):
    """`torch.compile` with weights frozen into the code, for the shapes of the examples alone."""

    def version(self) -> str:
        """Return torch's."""
        return str(torch.__version__)

    def build(self, code: ForwardCode) -> ForwardRunner:
        """Return compiled code; compiling takes seconds to minutes, less where torch's own cache has it."""
        # A separate module each time: its forward is its own code, so that torch's limit of recompilations, which
        # counts by code, is never reached; weights are buffers of it, which freezing folds into the kernels' layouts.
        compiled = torch.compile(code.frozen, fullgraph=True, dynamic=False, options={"freezing": True})

        @torch.no_grad()  # with gradients on, nothing would be frozen
        def run(*tensors: Tensor) -> Sequence[Tensor]:
            outputs: Sequence[Tensor] = compiled(*tensors)
            return outputs

        run(*code.examples)  # compiles
        return run


TORCH = TorchBackend()
INDUCTOR = InductorBackend()
