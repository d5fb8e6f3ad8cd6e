"""What backends outside of torch have in common: exported programs, float32 on the CPU, absent packages."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import logging
import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from gpp_plugin.backends.forward_code import ForwardCode
from gpp_plugin.doors import Backend

_REGISTRY = "torch.onnx._internal.exporter._registration"
"""Logs, with each export, every operator of torchvision where that is not installed; to the real standard error."""


class ExportedBackend(Backend):
    """A backend that converts an exported program, on the CPU, in float32.

    Args:
        packages: what it imports; ``extra`` is what installs them.
    """

    packages: Sequence[str] = ()
    extra: str = ""

    def missing(self) -> str:
        """Return what is to be installed."""
        absent = [name for name in self.packages if importlib.util.find_spec(name) is None]
        return f"needs {' and '.join(absent)}: pip install 'gpp_plugin[{self.extra}]'" if absent else ""

    def version(self) -> str:
        """Return the versions of torch and of the packages."""
        own = [f"{name} {importlib.metadata.version(name)}" for name in self.packages]
        return ", ".join([f"torch {torch.__version__}", *own])

    def refusal(self, code: ForwardCode) -> str:
        """Return why it cannot run this."""
        if code.devices - {"cpu"}:
            return f"runs on the CPU alone, and the stage is on {', '.join(sorted(code.devices))}"
        wrong = code.dtypes - {torch.float32}
        if wrong:
            names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in wrong))
            return f"runs float32 alone, and the stage has {names}"
        return ""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Let a converter say nothing but its error: what it prints and warns of is of no use beside a table."""
    registry = logging.getLogger(_REGISTRY)
    was_disabled, registry.disabled = registry.disabled, True
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        registry.disabled = was_disabled


@torch.no_grad()
def exported(code: ForwardCode) -> tuple[torch.export.ExportedProgram, tuple[int, ...]]:
    """Return the frozen code as converters read it, and which of the tensors that change it takes.

    Converters leave out what no operator reads (the mask of a batch that is not padded), some and not others: here all
    of it is left out, so that a backend is given what is read.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(code.frozen.graph, {}))
    read = []
    for index, node in enumerate(graph.find_nodes(op="placeholder")):
        if node.users:
            read.append(index)
        else:
            graph.erase_node(node)
    module = fx.GraphModule(code.frozen, graph).eval()  # the same weights
    examples = tuple(code.examples[index] for index in read)
    return torch.export.export(module, examples, strict=False), tuple(read)
