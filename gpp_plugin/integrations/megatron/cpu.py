"""megatron-core on the CPU: its calls of CUDA, answered for the CPU, in its own modules only.

`torch.cuda` stays as it is for everybody else: a Megatron module that reads the current CUDA device gets another
``torch`` in its namespace, one that differs in `torch.cuda.current_device` alone. `REPLACED` lists all that is
replaced, and why. Process groups are made elsewhere and passed as arguments, but for those of a bridge between
modules, which requests NCCL by name.

Source: Megatron-LM (arXiv 1909.08053)
Tests: tests/integrations/test_megatron.py, tests/integrations/test_megatron_training.py
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

_originals: dict[tuple[str, str], Any] = {}


class Replacement(NamedTuple):
    """One name of one megatron-core module.

    Args:
        make: returns the value for the CPU; called when it is installed.
    """

    module: str
    name: str
    make: Callable[[], Any]


class _Changed(ModuleType):
    """A module with some names of its own, the rest another's."""

    def __init__(self, module: ModuleType, **own: Any) -> None:
        super().__init__(module.__name__)
        self._module = module
        vars(self).update(own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _torch_on_cpu() -> ModuleType:
    """Return the ``torch`` of a module that reads the current CUDA device of it."""
    return _Changed(torch, cuda=_Changed(torch.cuda, current_device=lambda: torch.device("cpu")))


def _distributed_on_cpu() -> ModuleType:
    """Return the ``torch.distributed`` of a module that requests NCCL by name: groups are on the default backend."""

    def new_subgroups(ranks: Sequence[Sequence[int]], **options: Any) -> Any:
        make: Callable[..., Any] = dist.new_subgroups_by_enumeration
        return make(ranks, **{**options, "backend": None})

    return _Changed(dist, new_subgroups_by_enumeration=new_subgroups)


def _get_rng_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _make_tracker() -> Any:
    """Return a tracker whose named streams are states of the CPU's generator.

    Megatron's own would do with the two functions above, but it takes a CPU generator that has moved for a mistake.
    """
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    class RngStatesTracker(CudaRNGStatesTracker):
        def add(self, name: str, seed: int) -> None:
            if seed in self.seeds_ or name in self.states_:
                raise ValueError(f"random stream {name!r}, seed {seed}: taken already")
            self._is_initialized = True
            self.seeds_.add(seed)
            self.states_[name] = torch.Generator().manual_seed(seed).get_state()

        @contextlib.contextmanager
        def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
            # Named streams take turns in the one generator: the stream's state in, run, its new state
            # saved, the old one back.
            before = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(before)

    return RngStatesTracker()


_CORE = "megatron.core"
_BRIDGE = f"{_CORE}.pipeline_parallel.bridge_communicator"
_RANDOM = f"{_CORE}.tensor_parallel.random"
_ON_DEVICE = (
    f"{_CORE}.utils",  # its global buffer
    f"{_CORE}.tensor_parallel.mappings",  # gathering and scattering
    f"{_CORE}.tensor_parallel.layers",  # the sequence-parallel backward of a linear layer
    f"{_CORE}.models.common.embeddings.rotary_pos_embedding",  # what moves rotary frequencies
    f"{_CORE}.pipeline_parallel.p2p_communication",  # a receive
    _BRIDGE,  # a receive
)
"""Modules that allocate on ``torch.cuda.current_device()``."""
REPLACED = (
    *(Replacement(module, "torch", _torch_on_cpu) for module in _ON_DEVICE),
    Replacement(_BRIDGE, "dist", _distributed_on_cpu),  # its groups are made with NCCL by name
    # recomputation keeps CUDA's state
    Replacement(_RANDOM, "_get_cuda_rng_state", lambda: _get_rng_state),
    Replacement(_RANDOM, "_set_cuda_rng_state", lambda: _set_rng_state),
    # attention dropout draws from one of its streams, which are states of a CUDA generator
    Replacement(_RANDOM, "_CUDA_RNG_STATE_TRACKER", _make_tracker),
    Replacement(_RANDOM, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", lambda: True),  # else made anew on first use
)


def install() -> bool:
    """Replace the names of `REPLACED` where there is no CUDA device; return whether this call did.

    Nothing happens where CUDA is available, or where it has been done.
    """
    # Names are looked up in a module when its functions run, so replacing them reaches code that was
    # imported long before; ``from x import name`` elsewhere has a copy of its own, which is why modules
    # are listed one by one.
    if torch.cuda.is_available() or _originals:
        return False
    for replacement in REPLACED:
        module = importlib.import_module(replacement.module)
        _originals[replacement.module, replacement.name] = getattr(module, replacement.name)
        setattr(module, replacement.name, replacement.make())
    return True


def remove() -> None:
    """Put back what `install` replaced."""
    # popitem takes the last first, as a stack: what was replaced twice ends with the first value.
    while _originals:
        (module, name), value = _originals.popitem()
        setattr(importlib.import_module(module), name, value)


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Have it installed inside a ``with`` block only."""
    is_own = install()
    try:
        yield
    finally:
        if is_own:
            remove()
