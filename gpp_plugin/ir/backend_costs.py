"""What a forward costs on a backend, the backend of each stage, and what blocks that train cost compiled."""

from __future__ import annotations

from dataclasses import dataclass

from gpp_plugin.ir.typed_leaves import Bytes, Micros, Work


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledCost:
    """A block that trains, compiled and on torch's operators, at the shapes it was measured at.

    Args:
        forward_us, both_us: medians of a forward, and of a forward with its backward.
        saved_bytes: held from forward to backward.
        build_s: seconds that compiling took, and the first forward and backward.
        error: largest difference of an output or a gradient, by the norm of the tensor.
        refused: why it cannot be used, in one line; the rest means nothing then.
    """

    forward_us: Micros = 0.0
    both_us: Micros = 0.0
    saved_bytes: Bytes = 0
    torch_forward_us: Micros = 0.0
    torch_both_us: Micros = 0.0
    torch_saved_bytes: Bytes = 0
    build_s: Work = 0.0
    error: Work = 0.0
    refused: str = ""

    @property
    def gain(self) -> float:
        """Return how many times as fast as torch's operators it is; 0 where it cannot be used."""
        return self.torch_both_us / self.both_us if self.both_us and not self.refused else 0.0
