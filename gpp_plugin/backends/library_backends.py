"""The backends that come with the plugin: torch and its compiler, ONNX Runtime, OpenVINO."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from gpp_plugin.backends.forward_code import ForwardCode, ForwardRunner
from gpp_plugin.errors import BackendRefused
from gpp_plugin.plugins import Backend

# ONNX Runtime on the CPU, of the model that `torch.onnx` exports. What backends outside of torch have in common:
# exported programs, float32 on the CPU, absent packages.

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
    """Silence a converter but for its error: its prints and warnings are of no use beside a table."""
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


def _arrays(tensors: Sequence[Tensor], read: Sequence[int]) -> list[Any]:
    return [tensors[index].detach().contiguous().numpy() for index in read]


@torch.no_grad()
def exported(code: ForwardCode) -> tuple[torch.export.ExportedProgram, tuple[int, ...]]:
    """Return the frozen code as converters read it, and which of the tensors that change it takes.

    Some converters leave out what no operator reads (the mask of a batch that is not padded), others do not. Here all
    of it is left out, so that a backend takes only what is read.
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


def _check_inputs(left: int, read: Sequence[int]) -> None:
    if left != len(read):
        raise BackendRefused(f"{left} inputs are left of {len(read)}")


MOST_BYTES = 1 << 31
"""What a model may hold in memory: its format takes no more without files beside it."""


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
        names = [each.name for each in session.get_inputs()]
        _check_inputs(len(names), read)

        def run(*tensors: Tensor) -> Sequence[Tensor]:
            inputs = dict(zip(names, _arrays(tensors, read), strict=True))
            return [torch.from_numpy(array) for array in session.run(None, inputs)]

        return run


ONNXRUNTIME = OnnxRuntimeBackend()


# OpenVINO on the CPU, which reads torch's exported programs itself.


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
        _check_inputs(len(compiled.inputs), read)
        request = compiled.create_infer_request()

        def run(*tensors: Tensor) -> Sequence[Tensor]:
            # the results lie in the request, which the next call writes: `BuiltForward` copies them
            found = request.infer(_arrays(tensors, read), share_inputs=True, share_outputs=True)
            return [torch.from_numpy(found[i]) for i in range(len(compiled.outputs))]

        return run


OPENVINO = OpenVinoBackend()


# The backends that come with torch: its operators one by one, and its compiler.


class TorchBackend(Backend):
    """Torch's operators one by one, as stages run without any backend."""

    reads_weights = True

    def version(self) -> str:
        """Return torch's."""
        return str(torch.__version__)

    def build(self, code: ForwardCode) -> ForwardRunner:
        """Return the generated code as it is."""
        return code.run


class InductorBackend(TorchBackend):
    """`torch.compile` with weights frozen into the code, for the shapes of the examples alone."""

    reads_weights = False

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
