"""What a forward costs on a backend, and which backend each stage was given."""

from __future__ import annotations

from dataclasses import dataclass

from gpp_plugin.ir.typed_leaves import Micros, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendCost:
    """One backend on one forward, or part of one.

    Args:
        us: median of the forward, at the shapes it was measured at.
        build_s: seconds it took to build, and the first call.
        error: largest difference to torch of any output, by the norm of the tensor.
        refused: why it cannot be used, in one line; times mean nothing then.
    """

    backend: str
    us: Micros = 0.0
    build_s: Work = 0.0
    error: Work = 0.0
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedGroup:
    """Operators of a stage, by their names in its graph, on a backend; none: all of them."""

    backend: str
    operators: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBackend:
    """The backend of a stage that takes no gradients.

    Args:
        groups: in the order in which they run; one for a stage that runs on one backend.
        us: of the forward on it, ``torch_us`` on torch's operators; 0 where it was not measured.
        costs: of all that were measured.
        notes: lines for the user.
    """

    stage: str
    groups: tuple[PlacedGroup, ...]
    us: Micros = 0.0
    torch_us: Micros = 0.0
    costs: tuple[BackendCost, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def backend(self) -> str:
        """Return the backends' names: ``openvino``, or of a mix ``openvino + torch``."""
        return " + ".join(dict.fromkeys(group.backend for group in self.groups))

    @property
    def is_torch(self) -> bool:
        """Return whether it runs as it would without any backend."""
        return self.backend == "torch"
