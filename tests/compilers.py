"""A compiler of blocks that takes no seconds: AOTAutograd's forward and backward, run operator by operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx


def compile_plainly(module: fx.GraphModule, tensors: list[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """Return a module's forward, whose backward is one function, for these strides alone, as inductor's is."""
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.aot_autograd import aot_module_simplified

    def keep(graph: fx.GraphModule, examples: Any) -> Any:
        return make_boxed_func(graph.forward)

    compiled: Callable[..., Sequence[Tensor]] = aot_module_simplified(
        module, tensors, fw_compiler=keep, bw_compiler=keep
    )
    strides = [tensor.stride() for tensor in tensors]

    def run(*given: Tensor) -> Sequence[Tensor]:
        assert [tensor.stride() for tensor in given] == strides, "what is given lies otherwise"
        return compiled(*given)

    return run
