"""Values of a batch while a model is traced: what Python reads of them, and whether it reads the same of another one.

A capture holds one shape. A model whose Python reads values (``grid_thw.tolist()``, ``if mask.all()``,
``hidden[mask]``) has another graph for other values, so a capture of it holds its *readings* too. While the model
runs on fake tensors, `ReadingMode` computes beside each one whatever can be computed of the batch alone:

    input_ids   fake [2, 8]     real [2, 8]
    is_image    fake [2, 8]     real input_ids == 63        computed beside
    count       fake []         real is_image.sum()         computed beside
    int(count)                  10, a reading               a constant of the graph
    hidden      fake [2, 8, 4]  unknown
    hidden[is_image]            10, a reading               indexed by nonzero_static(is_image, size=10): only the
                                                            number is frozen, the places are found at run time

A `Recording` keeps the readings and the few operations that made them (the tape). Before another batch runs on the
same code, the tape is run on it: where all readings are the same, so is the graph. A rank that lacks the batch receives
the readings, and its trace replays them in order. What depends on a weight or a random number is not known, and a read
of it fails as it does without this mode.

Source: this project
Tests: tests/capture/test_values.py
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from gpp_plugin.capture.tracing.symbolic_sizes import Bounds, made_of_a_shape, tensors_in
from gpp_plugin.errors import CaptureError

MOST_ELEMENTS = 1 << 24
"""Larger tensors are not computed beside; a read of what is made of them is refused."""
_PYTHON = frozenset(
    ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__contains__", "equal", "allclose")
    + ("is_nonzero",)
)
"""Functions that pass values to Python."""
_TEXT = frozenset(("__format__", "__repr__", "__str__"))
"""Functions that make words of values, for messages."""
_WHOLE = frozenset(
    ("unique", "unique_consecutive", "bincount", "_unique2", "unique_dim", "tensor_split", "one_hot")
)
"""Functions whose result has a size that values decide, and is frozen as it is."""
_SIZES = frozenset(
    "arange linspace zeros ones full empty view reshape expand repeat split narrow tile pad interpolate new_zeros "
    "new_ones new_full new_empty split_with_sizes unflatten select eye tril_indices triu_indices roll chunk unfold "
    "multinomial randperm randint topk".split()
)
"""Functions that take sizes; a size that is a tensor is read."""
_OTHERS = "the model's Python reads other values of this batch than the recording has"
_RANDOM = tuple("rand normal bernoulli multinomial dropout uniform exponential poisson geometric".split())


@dataclass(frozen=True, slots=True)
class _Slot:
    """A tensor on the tape."""

    number: int


@dataclass(frozen=True, slots=True)
class _Listed:
    """A function that returns an iterator, as one that returns a list."""

    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Return all results."""
        return list(self.function(*args, **kwargs))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One operation of the tape.

    Args:
        results: slots of its results.
        storages: numbers of the storages that it reads or makes, and of those that it writes.
        reading: what it passed to Python, where ``is_read``.
    """

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    results: tuple[int, ...] = ()
    reads: frozenset[int] = frozenset()
    makes: frozenset[int] = frozenset()
    is_read: bool = False
    reading: Any = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recording:
    """What Python read of a batch.

    Args:
        values: the readings in order.
        keys: the batch's entries that they were made of.
    """

    values: tuple[Any, ...]
    keys: tuple[str, ...]
    _tape: tuple[_Call, ...] = ()
    _slots: Mapping[str, tuple[int, torch.dtype]] = field(default_factory=dict)

    def matches(self, batch: Mapping[str, Any]) -> bool:
        """Return whether the model would read the same of another batch of the same shapes."""
        slots: dict[int, Any] = {}
        for key in self.keys:
            slot, dtype = self._slots[key]
            slots[slot] = batch[key].detach().to(device="cpu", dtype=dtype, copy=True)
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for call in self._tape:
                # up to the first reading that differs, everything was computed as it was then: nothing can fail
                result = call.function(*_filled(call.args, slots), **_filled(call.kwargs, slots))
                if call.is_read:
                    if _frozen(result) != call.reading:
                        return False
                    continue
                for slot, tensor in zip(call.results, tensors_in(result), strict=True):
                    slots[slot] = tensor
        return True

    def is_made_as(self, other: Recording) -> bool:
        """Return whether the same operations, with the same numbers among their arguments, led to the same readings."""
        # sizes of a batch would be among these numbers, where they matter: two lengths show it
        tapes = [[(c.function, c.args, c.kwargs, c.results) for c in each._tape] for each in (self, other)]
        return self.values == other.values and self.keys == other.keys and tapes[0] == tapes[1]

    def holds_for(self, batch: Mapping[str, Any]) -> bool:
        """Return whether the model would read the same of a batch of other lengths; False where that is unknown."""
        try:
            return self.matches(batch)
        except (
            RuntimeError,
            IndexError,
            ValueError,
        ):  # an operation of the tape that does not suit these shapes
            return False


def _filled(value: Any, slots: Mapping[int, Any]) -> Any:
    """Return arguments with tensors for their slots; the containers that torch's functions take, as most are short."""
    if isinstance(value, _Slot):
        return slots[value.number]
    if type(value) in (tuple, list):
        return type(value)([_filled(part, slots) for part in value])
    if type(value) is dict:
        return {key: _filled(part, slots) for key, part in value.items()}
    if value is None or isinstance(value, (int, float, str, slice, torch.dtype, torch.device)):
        return value
    return tree_map(lambda leaf: slots[leaf.number] if isinstance(leaf, _Slot) else leaf, value)


def _frozen(value: Any) -> Any:
    """Return what was read as something to compare and to write down: numbers, strings and tuples.

    A tensor [[1, 2]] is ("tensor", "int64", (1, 2), (1, 2)): its type, shape and elements; NaN is "nan".
    """
    if isinstance(value, Tensor):
        elements = _frozen(value.flatten().tolist())
        return "tensor", str(value.dtype).removeprefix("torch."), tuple(value.shape), elements
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(part) for part in value)
    return repr(value) if isinstance(value, float) and value != value else value


def _thawed(reading: Any) -> Any:
    """Return what Python gets of a reading: lists for tuples, tensors for what was one."""
    if isinstance(reading, tuple) and reading[:1] == ("tensor",):
        _, dtype, shape, elements = reading
        return torch.tensor(_thawed(elements), dtype=getattr(torch, dtype)).reshape(shape)
    if isinstance(reading, tuple):
        return [_thawed(part) for part in reading]
    return float(reading) if reading == "nan" else reading


@dataclass(slots=True)
class _Known:
    """A fake tensor whose values follow from the batch, held so that its id stays its own.

    Args:
        real: its values; None where readings are replayed.
    """

    fake: Tensor
    real: Tensor | None
    slot: int


class ReadingMode(TorchFunctionMode):
    """Computes beside a model on fake tensors what its Python reads of the batch, or replays what was read before.

    Args:
        batch: key -> the fake tensor.
        values: key -> its values; None replays ``readings``.
        readings: what an earlier run read of a batch of these values, in order.
    """

    _is_paused = False

    def __init__(
        self, batch: Mapping[str, Tensor], values: Mapping[str, Tensor] | None, readings: Sequence[Any] = ()
    ) -> None:
        super().__init__()
        self._known: dict[int, _Known] = {}
        self._bounds = Bounds(self._is_known)
        self._tape: list[_Call] = []
        self._slots: dict[str, tuple[int, torch.dtype]] = {}
        self._count = 0
        self._storages: dict[int, int] = {}
        self._replays = values is None
        self._remaining = deque(readings)
        with _plainly():
            for key, fake in batch.items():
                real = None if values is None else values[key].detach().to("cpu", fake.dtype, copy=True)
                self._slots[key] = self._learn(fake, real), fake.dtype

    @classmethod
    @contextmanager
    def paused(cls) -> Iterator[None]:
        """Let a module run on made-up tensors: what it reads of them is no reading."""
        before, ReadingMode._is_paused = ReadingMode._is_paused, True
        try:
            yield
        finally:
            ReadingMode._is_paused = before

    def recording(self) -> Recording:
        """Return what was read, with the part of the tape that made it.

        Raises:
            CaptureError: readings were left over.
        """
        if self._remaining:
            raise CaptureError(_OTHERS)
        wanted: set[int] = set()
        calls: list[_Call] = []
        # Backwards: an operation counts if it was a read, or makes or writes memory that a later one of these reads.
        for call in reversed(self._tape):
            if call.is_read or call.makes & wanted:
                calls.append(call)
                wanted |= call.reads | call.makes
        leaves = (leaf for call in calls for leaf in tree_leaves((call.args, call.kwargs)))
        needed = {leaf.number for leaf in leaves if isinstance(leaf, _Slot)}
        tape = tuple(reversed(calls))
        return Recording(
            values=tuple(call.reading for call in tape if call.is_read),
            keys=tuple(sorted(key for key, (slot, _) in self._slots.items() if slot in needed)),
            _tape=tape,
            _slots=self._slots,
        )

    # ---- what is called --------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch on fake tensors, and beside them on those values that are known."""
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if ReadingMode._is_paused or (name == "__get__" and not self._makes_tensor(func)):
            return func(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        is_known = all(self._is_known(t) for t in tensors) and not any(word in name for word in _RANDOM)
        if tensors and is_known:
            if name in _PYTHON:
                return self._read(func, args, kwargs)
            if name in _TEXT:
                return "a value of the batch"
            if name in _WHOLE:
                return self._constants(self._read(func, args, kwargs), tensors[0])
        args, kwargs = self._with_sizes(name, args, kwargs)
        with self:
            found = self._with_places(name, func, args, kwargs)
        if found is not None:
            return found
        if not is_known:
            return self._call_unknown(name, func, args, kwargs)
        return self._call_known(func, args, kwargs, is_iterator=name == "__iter__")

    def _call_unknown(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Call it; what was known, and is written with what is not, is no longer."""
        with self:
            made = made_of_a_shape(name, args, kwargs)
            found = made if made is not None else self._bounds.compare(name, args)
        if found is not None:
            return found
        tensors = tensors_in((args, kwargs))
        before = [t._version for t in tensors]
        is_alike = self._bounds.is_written_alike(name, (args, kwargs))
        result = func(*args, **kwargs)
        written = _written(tensors, before)
        for tensor in written:
            if self._is_known(tensor):
                storage = self._storage_of(tensor)
                for key in [k for k, v in self._known.items() if self._storage_of(v.fake) == storage]:
                    del self._known[key]
        if written and not is_alike:
            self._bounds.forget(written)
        with self:
            self._bounds.follow(name, func, (args, kwargs), result)
        return result

    def _call_known(self, func: Any, args: Any, kwargs: Any, *, is_iterator: bool) -> Any:
        """Call it on fake tensors and on the values; learn the values of its results."""
        operands = tensors_in((args, kwargs))
        before = [t._version for t in operands]
        result = func(*args, **kwargs)
        if is_iterator:
            result = list(result)
        fakes, written = tensors_in(result), _written(operands, before)
        answer = iter(result) if is_iterator else result
        is_large = any(map(free_unbacked_symbols, fakes)) or sum(map(_extent, fakes)) > MOST_ELEMENTS
        if is_large or not (fakes or written):
            return answer
        call = _Listed(func) if is_iterator else func
        made: Sequence[Tensor | None] = [None] * len(fakes)
        slotted = self._slotted((args, kwargs))
        if not self._replays:
            with _plainly():
                made = tensors_in(call(*self._real(args), **self._real(kwargs)))
            assert len(made) == len(fakes), f"{func} makes other results of values than of shapes"
        slots = tuple(self._learn(f, r) for f, r in zip(fakes, made, strict=True))
        self._tape.append(
            _Call(
                function=call,
                args=slotted[0],
                kwargs=slotted[1],
                results=slots,
                reads=frozenset(self._storage_of(t) for t in operands),
                makes=frozenset(self._storage_of(t) for t in (*fakes, *written)),
            )
        )
        return answer

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what Python reads, and note it.

        Raises:
            CaptureError: there is no reading left to replay.
        """
        if self._replays:
            if not self._remaining:
                raise CaptureError(_OTHERS)
            reading = self._remaining.popleft()
        else:
            with _plainly():
                reading = _frozen(func(*self._real(args), **self._real(kwargs)))
        own, named = self._slotted((args, kwargs))
        reads = frozenset(self._storage_of(t) for t in tensors_in((args, kwargs)))
        call = _Call(function=func, args=own, kwargs=named, reads=reads, is_read=True, reading=reading)
        self._tape.append(call)
        with _plainly():
            return _thawed(reading)

    # ---- sizes and places ------------------------------------------------------------------------

    def _with_sizes(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments with Python's integers for sizes, bounds and indices that are known tensors."""
        if name in ("__getitem__", "__setitem__"):
            owner, index, *rest = args
            parts = index if isinstance(index, tuple) else (index,)
            changed = tuple(self._index(part) for part in parts)
            return (owner, changed if isinstance(index, tuple) else changed[0], *rest), kwargs
        if name not in _SIZES:
            return args, kwargs
        # the first argument of a method is what it is called on, not a size
        first = args[:1] if args and isinstance(args[0], Tensor) and args[0].dim() else ()
        change = self._number
        return (*first, *tree_map(change, args[len(first) :])), tree_map(change, kwargs)

    def _index(self, part: Any) -> Any:
        if isinstance(part, slice):
            return slice(self._number(part.start), self._number(part.stop), self._number(part.step))
        return self._stacked(part) if isinstance(part, (list, tuple)) else self._number(part)

    def _stacked(self, numbers: Sequence[Any]) -> Any:
        """Return a list of numbers that are known tensors as one tensor; of others as it is."""
        # export would ask each for its value, and it would be frozen
        if numbers and all(isinstance(n, Tensor) and n.dim() == 0 and self._is_known(n) for n in numbers):
            with self:
                return torch.stack(list(numbers))
        return numbers

    def _number(self, value: Any) -> Any:
        """Return a known tensor of one integer as that integer."""
        is_number = isinstance(value, Tensor) and not value.dim() and self._is_known(value)
        if not is_number or value.dtype is torch.bool or value.is_floating_point():
            return value
        return self._read(torch.Tensor.item, (value,), {})

    def _with_places(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of a function whose size is the number of places that a known mask holds, or None.

        The number is read; the places are found at run time, by an operator whose result has that size.
        """
        if name == "__getitem__":
            owner, index = args
            parts = index if isinstance(index, tuple) else (index,)
            if not any(self._is_mask(part) for part in parts):
                return None
            found: list[Any] = []
            for part in parts:
                found.extend(self._places(part).unbind(1) if self._is_mask(part) else (part,))
            return owner[tuple(found)]
        if name in ("nonzero", "argwhere") and self._is_known(args[0]):
            places = self._places(args[0])
            return places.unbind(1) if kwargs.get("as_tuple") else places
        if name == "where" and len(args) == 1 and not kwargs and self._is_known(args[0]):
            return self._places(args[0]).unbind(1)
        if name == "masked_select" and self._is_mask(args[1] if len(args) > 1 else kwargs.get("mask")):
            # each by itself: of what is broadcast together nothing is known where one of them is not
            owner, mask = args[0], args[1] if len(args) > 1 else kwargs["mask"]
            shape = torch.broadcast_shapes(owner.shape, mask.shape)
            return owner.expand(shape)[mask.expand(shape)]
        if name == "repeat_interleave":
            return self._repeated(func, args, kwargs)
        if name in ("tensor", "as_tensor") and args and isinstance(args[0], (list, tuple)):
            stacked = self._stacked(args[0])
            if isinstance(stacked, Tensor):
                return stacked.to(dtype=kwargs.get("dtype"), device=kwargs.get("device"))
        return None

    def _repeated(self, func: Any, args: Any, kwargs: Any) -> Any:
        repeats = args[1] if len(args) > 1 else kwargs.get("repeats")
        is_alone = repeats is None and len(args) == 1
        repeats = args[0] if is_alone else repeats
        if not isinstance(repeats, Tensor) or not self._is_known(repeats) or "output_size" in kwargs:
            return None
        total = int(repeats.sum())
        if not is_alone and repeats.numel() == 1:
            # one number for all elements of the axis
            dim = args[2] if len(args) > 2 else kwargs.get("dim")
            total *= args[0].numel() if dim is None else args[0].shape[dim]
        return func(*args, **kwargs, output_size=total)

    def _places(self, mask: Tensor) -> Tensor:
        return torch.nonzero_static(mask, size=int((mask != 0).sum()))

    def _is_mask(self, value: Any) -> bool:
        is_tensor = isinstance(value, Tensor) and value.dtype in (torch.bool, torch.uint8)
        return is_tensor and value.dim() > 0 and self._is_known(value)

    # ---- small helpers ---------------------------------------------------------------------------

    def _is_known(self, tensor: Tensor) -> bool:
        return id(tensor) in self._known

    def _learn(self, fake: Tensor, real: Tensor | None) -> int:
        self._count += 1
        self._known[id(fake)] = _Known(fake, real, self._count)
        return self._count

    def _storage_of(self, fake: Tensor) -> int:
        """Return the number of a tensor's storage; known tensors are held, so that no address recurs."""
        return self._storages.setdefault(fake.untyped_storage()._cdata, len(self._storages))

    def _real(self, value: Any) -> Any:
        """Return arguments with values for fake tensors, on the CPU."""
        return _with_leaves(value, lambda tensor: self._known[id(tensor)].real)

    def _slotted(self, value: Any) -> Any:
        return _with_leaves(value, lambda tensor: _Slot(self._known[id(tensor)].slot))

    @staticmethod
    def _makes_tensor(func: Any) -> bool:
        return getattr(getattr(func, "__self__", None), "__name__", "") in (
            "T",
            "mT",
            "H",
            "mH",
            "data",
            "real",
        )

    def _constants(self, values: Any, like: Tensor) -> Any:
        """Return tensors of what was read, made as the model would make them of numbers."""

        def change(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            with _plainly():
                elements, shape = leaf.flatten().tolist(), tuple(leaf.shape)
            with self:
                return torch.tensor(elements, dtype=leaf.dtype, device=like.device).reshape(shape)

        return tree_map(change, values)


def _with_leaves(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return arguments with their tensors changed, and the CPU for every device."""

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    return tree_map(changed, value)


def _extent(fake: Tensor) -> int:
    """Return the elements of a fake tensor; with sizes left open those that it has in this trace."""
    return math.prod(size if isinstance(size, int) else int(size.node.hint) for size in fake.shape)


def _written(tensors: Sequence[Tensor], before: Sequence[int]) -> list[Tensor]:
    return [t for t, version in zip(tensors, before, strict=True) if t._version != version]


@contextmanager
def _plainly() -> Iterator[None]:
    """Compute on real tensors, whatever modes are on."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield
