"""One call that a captured graph holds as a single operator: a module that runs as it is, or a custom function.

A graph's node has an `OpaqueCall` as its target and tensors alone as arguments: the module's own parameters and
buffers, then the tensors among what it was called with. Everything else (flags, lists, None) is frozen in the call.
On real tensors it runs the user's code under autograd, dropout, custom backwards and all; on fake ones it makes
results like those that were seen when the code was tried (`trial_run`), and autograd saves as much.

Source: this project
Tests: tests/capture/test_eager.py
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from gpp_plugin.capture.tracing.sample_batches import TracedRecords, cut_records
from gpp_plugin.errors import RuntimeFailure
from gpp_plugin.ir.analysis import CarriedState

# Arguments and results of a call as a list of their tensors, and a pattern with everything else.

Rebuild = Callable[[Sequence[Any]], Any]

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.layout, torch.Size)
"""What is compared where a call returns it, and what a custom autograd function may take beside tensors."""


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """Where a tensor stood."""

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class Container:
    """Something that held tensors, and how it is made again of its parts."""

    rebuild: Rebuild
    parts: tuple[Any, ...]


MAX_DEPTH = 3
"""How many objects inside each other are looked into; a configuration may refer to itself."""


def extract_tensors(value: Any, tensors: list[Tensor], depth: int = 0) -> Any:
    """Return the pattern of a value, its tensors appended to ``tensors``.

    Looks into tuples, lists, mappings, dataclasses and other objects with attributes; what holds no tensor is part of
    the pattern as it is. Of ``(x, {"mask": m, "causal": True})`` tensors are [x, m], and the pattern is a container of
    `Slot(0)` and a container of `Slot(1)` and True.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return Slot(len(tensors) - 1)
    if isinstance(value, PLAIN) or isinstance(value, (type, nn.Module, torch.device)):
        return value
    is_object = not isinstance(value, (tuple, list, Mapping))
    if is_object and depth == MAX_DEPTH:
        return value
    before = len(tensors)
    rebuild, parts = _open(value)
    taken = tuple(extract_tensors(part, tensors, depth + is_object) for part in parts)
    holds_device = any(isinstance(part, (torch.device, Container)) for part in taken)
    return Container(rebuild, taken) if len(tensors) > before or holds_device else value


Moved = tuple[str, torch.device]
"""A type of devices, and the device that stands for each of that type."""


def insert_tensors(pattern: Any, tensors: Sequence[Any], moved: Moved | None = None) -> Any:
    """Return the value of a pattern with these tensors.

    Args:
        moved: what becomes of devices in the pattern; None leaves them.
    """
    if isinstance(pattern, Slot):
        return tensors[pattern.index]
    if isinstance(pattern, Container):
        return pattern.rebuild([insert_tensors(part, tensors, moved) for part in pattern.parts])
    if isinstance(pattern, torch.device) and moved is not None and pattern.type == moved[0]:
        return moved[1]
    return pattern


def plain_values(pattern: Any) -> tuple[Any, ...]:
    """Return the numbers, texts and the like in a pattern, in order, to be compared with another call's."""
    if isinstance(pattern, Container):
        return tuple(value for part in pattern.parts for value in plain_values(part))
    return (pattern,) if isinstance(pattern, (*PLAIN, Slot)) else ()


def is_plain(pattern: Any) -> bool:
    """Return whether a pattern holds plain values and tensors only: no modules, no functions, no other objects."""
    if isinstance(pattern, Mapping):
        pattern = tuple(pattern.values())
    if isinstance(pattern, Container):
        pattern = pattern.parts
    if isinstance(pattern, (tuple, list, set, frozenset)):
        return all(map(is_plain, pattern))
    return isinstance(pattern, (*PLAIN, Slot, torch.device))


def holds_symbols(pattern: Any) -> bool:
    """Return whether a pattern holds numbers that are symbols while tracing."""
    if isinstance(pattern, Container):
        pattern = pattern.parts
    if isinstance(pattern, (tuple, list)):
        return any(map(holds_symbols, pattern))
    return isinstance(pattern, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _open(value: Any) -> tuple[Rebuild, list[Any]]:
    """Return how a value is made of its parts, and those."""
    kind = type(value)
    if isinstance(value, tuple):
        is_named = hasattr(kind, "_fields")
        return (lambda parts: kind(*parts)) if is_named else (lambda parts: kind(parts)), list(value)
    if isinstance(value, TracedRecords):
        fields, tensors = value.fields, [t for pair in value.tensors.values() for t in pair]
        return (lambda parts: cut_records(fields, parts)), tensors
    if isinstance(value, list):
        return (lambda parts: kind(parts)), list(value)
    if isinstance(value, Mapping):
        keys = list(value)
        if dataclasses.is_dataclass(kind):  # a HuggingFace output: both, made by its fields
            return (lambda parts: kind(**dict(zip(keys, parts, strict=True)))), [value[k] for k in keys]
        if isinstance(value, MutableMapping):

            def refilled(parts: Sequence[Any]) -> Any:
                made = copy.copy(value)
                made.update(zip(keys, parts, strict=True))
                return made

            return refilled, [value[k] for k in keys]
    attributes = getattr(value, "__dict__", None)
    if callable(value) or not attributes:
        return (lambda parts: value), []
    names = list(attributes)

    # any other object: a copy of it with its attributes replaced; its tensors must not stay in the pattern
    hollow = copy.copy(value)
    for name in names:
        if isinstance(attributes[name], Tensor):
            object.__setattr__(hollow, name, None)

    def rebuild(parts: Sequence[Any]) -> Any:
        made = copy.copy(hollow)
        for name, part in zip(names, parts, strict=True):
            object.__setattr__(made, name, part)
        return made

    return rebuild, [attributes[name] for name in names]


_HOOKS: ContextVar[tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None] = ContextVar(
    "_HOOKS", default=None
)


@contextmanager
def saving_separately(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Iterator[None]:
    """Pass what opaque calls save for backward through these hooks, whatever hooks there are around the calls.

    Where saved tensors are followed by position (a plan that swaps or recomputes), those of a call must not be among
    them: with other values it may save more of them, or fewer.
    """
    token = _HOOKS.set((pack, unpack))
    try:
        yield
    finally:
        _HOOKS.reset(token)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultSpec:
    """A tensor that a call returns."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What a trial of a call showed.

    Args:
        results: the tensors it returned; ``values`` the numbers and texts beside them, which must never change.
        keeps: what autograd saved: ("argument", its position), ("result", its number), or ("inside", bytes).
        written: positions of the arguments that it writes into.
        draws_outside: it drew from Python's or numpy's generator.
    """

    results: tuple[ResultSpec, ...]
    values: tuple[Any, ...] = ()
    keeps: tuple[tuple[str, int], ...] = ()
    written: tuple[int, ...] = ()
    flops: float = 0.0
    is_random: bool = False
    draws_outside: bool = False


@dataclass
class Callee:
    """What an opaque call runs: a plain function of its arguments, without tensors of its own."""

    function: Callable[..., Any]

    def bound(self, tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Put the function's own tensors in place."""
        assert not tensors, "a function has none"
        return nullcontext()


@dataclass
class ModuleCallee(Callee):
    """A module whose parameters and buffers are put in place for each call.

    Args:
        function: its own ``forward``; hooks on the module itself are traced around the call.
        places: of each of its tensors, the modules and tables that hold it, and under which names: several where it is
            tied inside the module.
        states: what it leaves behind for the next call, in attributes of which modules; its tensors are among those.
        stays_bound: the module keeps the tensors after a call, for a backward that calls it again.
    """

    places: tuple[tuple[tuple[nn.Module, str], ...], ...]
    states: tuple[tuple[nn.Module, CarriedState], ...] = ()
    stays_bound: bool = False

    @contextmanager
    def bound(self, tensors: Sequence[Tensor]) -> Any:
        """Put these in place of the module's parameters and buffers; what replaces them is written into them."""
        before = self._set(tensors)
        homes = [tensor.data for tensor in tensors]
        before_call = [dict(vars(module)) for module, _ in self.states]
        try:
            for module, state in self.states:
                vars(module)[state.name.rpartition(".")[2]] = self._read(module, state)
            yield
            for module, state in self.states:
                self._write(module, state)
            for places, tensor, home in zip(self.places, tensors, homes, strict=True):
                if tensor.data_ptr() != home.data_ptr():  # ``weight.data = ...``
                    home.copy_(tensor.data)
                    tensor.data = home
                for module, name in places:
                    found = module._buffers.get(name, tensor)
                    if found is not tensor and found is not None:
                        with torch.no_grad():
                            tensor.copy_(found)  # ``self.count = self.count + 1``
        finally:
            for (module, state), attributes in zip(self.states, before_call, strict=True):
                leaf = state.name.rpartition(".")[2]
                vars(module)[leaf] = attributes.get(leaf)
            if not self.stays_bound:
                self._set(before)

    @staticmethod
    def _buffers_of(module: nn.Module, state: CarriedState) -> list[Tensor]:
        return [module.get_buffer(tensor.name.rpartition(".")[2]) for tensor in state.tensors]

    def _read(self, module: nn.Module, state: CarriedState) -> Any:
        """Return an attribute as Python has it, of the buffers that carry it."""
        leaves: list[Any] = [
            {"int": int, "float": float}.get(tensor.number, torch.clone)(buffer)
            for tensor, buffer in zip(state.tensors, self._buffers_of(module, state), strict=True)
        ]
        return pytree.tree_unflatten(leaves, pytree.treespec_loads(state.structure))

    @torch.no_grad()
    def _write(self, module: nn.Module, state: CarriedState) -> None:
        """Put what a call left in an attribute into the buffers that carry it.

        Raises:
            RuntimeFailure: it is of another structure than before.
        """
        left, spec = pytree.tree_flatten(vars(module)[state.name.rpartition(".")[2]])
        if pytree.treespec_dumps(spec) != state.structure:
            raise RuntimeFailure(f"{state.name} is of another structure than in the sample batch's forward")
        for buffer, value in zip(self._buffers_of(module, state), left, strict=True):
            value = value if isinstance(value, Tensor) else torch.tensor(value, dtype=buffer.dtype)
            if value.shape != buffer.shape:
                raise RuntimeFailure(
                    f"{state.name} has shape {list(buffer.shape)} and is left with {list(value.shape)}"
                )
            buffer.copy_(value)

    def _set(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        before: list[Tensor | None] = []
        for places, tensor in zip(self.places, tensors, strict=True):
            for number, (module, name) in enumerate(places):
                table: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
                if number == 0:
                    before.append(table[name])
                table[name] = tensor
        return before


@dataclass(eq=False)
class OpaqueCall:
    """The target of a graph's node: called with tensors, it returns a tuple of tensors.

    Args:
        title: "eager <module>" or "function <class>"; the same at all shapes.
        where: the module, for messages.
        num_own: how many of its arguments, the first ones, are tensors that the callee has itself.
        pattern: of (arguments, keyword arguments).
        is_function: a custom autograd function, which may be tried on slices of samples.
        home: the type of device it was traced on: such a device in ``pattern`` becomes that of its tensors.
    """

    title: str
    where: str
    callee: Callee
    num_own: int
    pattern: Any
    observed: Observed
    is_function: bool = False
    home: str = "cpu"
    __name__: str = field(default="opaque_call", init=False)

    def __str__(self) -> str:
        return self.title

    def __deepcopy__(self, memo: dict[int, Any]) -> OpaqueCall:
        return self

    @property
    def is_random(self) -> bool:
        """Return whether it may draw random numbers; of a module that runs as it is that is unknown."""
        return self.observed.is_random or not self.is_function

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the user's code, or stand for it on fake tensors.

        Raises:
            RuntimeFailure: it returned something else than when it was captured.
        """
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            made: tuple[Tensor, ...] = _Stand.apply(self, *tensors)  # type: ignore[no-untyped-call]
            return made
        results, values = self.run(tensors)
        expected = self.observed
        if values != expected.values or [(r.shape, r.dtype) for r in results] != [
            (r.shape, r.dtype) for r in expected.results
        ]:
            raise RuntimeFailure(
                f"{self.where}, which runs as it is, returned {_described(results, values)} and was captured with "
                f"{_described(expected.results, expected.values)}: what it returns depends on values; name a module "
                'around it that returns one shape in "eager", or pad its input'
            )
        return results

    def run(self, tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        """Return the tensors that the user's code returns for real ones, and the plain values beside them."""
        own, operands = tensors[: self.num_own], tensors[self.num_own :]
        hooks = _HOOKS.get()
        saving = nullcontext() if hooks is None else saved_tensors_hooks(*hooks)
        with self._drawing(), self.callee.bound(own), saving:
            args, kwargs = insert_tensors(self.pattern, operands, (self.home, tensors[0].device))
            returned = self.callee.function(*args, **kwargs)
        results: list[Tensor] = []
        pattern = extract_tensors(returned, results)
        # no result shares memory with an argument: the graph takes it for a tensor of its own
        storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        return tuple(
            r.clone() if r.untyped_storage()._cdata in storages else r for r in results
        ), plain_values(pattern)

    def run_with_gradients(
        self, tensors: Sequence[Tensor], wanted: Sequence[bool]
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Return its results, and the gradients of the arguments ``wanted`` for a gradient that follows the results.

        For trials on slices: what a custom backward does with one sample must not depend on the others either.
        """
        with torch.enable_grad():
            leaves = [
                t.detach().requires_grad_(is_wanted and t.is_floating_point())
                for t, is_wanted in zip(tensors, wanted, strict=True)
            ]
            results, _ = self.run([leaf.clone() for leaf in leaves])
            roots = [r for r in results if r.requires_grad]
            trained = [leaf for leaf in leaves if leaf.requires_grad]
            if not roots or not trained:
                return results, []
            # a gradient that differs from element to element and is cut as the result is: 0.5 + the result's cosine
            seeds = [root.detach().cos() + 0.5 for root in roots]
            found = torch.autograd.grad(roots, trained, seeds, allow_unused=True)
        gradients = [torch.zeros_like(t) if g is None else g for t, g in zip(trained, found, strict=True)]
        return tuple(r.detach() for r in results), gradients

    @contextmanager
    def _drawing(self) -> Any:
        """Seed Python's and numpy's generators from torch's, where the code draws from them.

        A rank's torch generator is seeded by the job and restored before anything runs again, so that a second forward
        draws the same.
        """
        if not self.observed.draws_outside:
            yield
            return
        before = random.getstate(), numpy.random.get_state()
        seed = int(torch.randint(2**31, (), device="cpu"))
        random.seed(seed)
        numpy.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            numpy.random.set_state(before[1])


class _Stand(torch.autograd.Function):
    """Stands for a call on fake tensors: results of the shapes seen, and as much saved for backward."""

    @staticmethod
    def forward(ctx: Any, call: OpaqueCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Make the results."""
        device = tensors[0].device
        made = tuple(
            torch.empty_strided(r.shape, r.strides, dtype=r.dtype, device=device)
            for r in call.observed.results
        )
        ctx.mark_non_differentiable(
            *(m for m, r in zip(made, call.observed.results, strict=True) if not r.requires_grad)
        )
        saved = []
        for kind, number in call.observed.keeps:
            if kind == "inside":
                saved.append(torch.empty(number, dtype=torch.uint8, device=device))
            else:
                saved.append((tensors if kind == "argument" else made)[number])
        ctx.save_for_backward(*saved)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Refuse: what is only looked at has no backward."""
        raise AssertionError("what is only looked at has no backward")


def _described(results: Sequence[Any], values: tuple[Any, ...]) -> str:
    shapes = [f"{list(r.shape)} {str(r.dtype).removeprefix('torch.')}" for r in results]
    others = [v for v in values if isinstance(v, (bool, int, float, str))]
    return ", ".join(shapes + [repr(v) for v in others]) or "nothing"
