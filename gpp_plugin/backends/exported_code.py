"""What backends outside of torch have in common: exported programs, float32 on the CPU, absent packages."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import warnings
from collections.abc import Iterator, Sequence

import torch

from gpp_plugin.backends.forward_code import ForwardCode
from gpp_plugin.doors import Backend
from gpp_plugin.errors import BackendRefused


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
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


@torch.no_grad()
def exported(code: ForwardCode) -> torch.export.ExportedProgram:
    """Return the frozen code as converters read it.

    Raises:
        BackendRefused: a tensor that it is given is not read by any operator.
    """
    unread = [node.name for node in code.frozen.graph.nodes if node.op == "placeholder" and not node.users]
    if unread:
        raise BackendRefused(f"tensor {unread[0]} of stage {code.name!r} is read by no operator")
    return torch.export.export(code.frozen, code.examples, strict=False)
