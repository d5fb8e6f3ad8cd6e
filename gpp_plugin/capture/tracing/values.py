"""Values of a batch's integers while a model is traced: what Python reads of them, and whether another batch has the same.

A capture holds one shape. A model whose Python reads values (``grid_thw.tolist()``, ``if mask.all()``,
``hidden[mask]``) has another graph for other values, so a capture of it holds its *readings* too. While the model
runs on fake tensors, `ReadingMode` computes beside each one whatever can be computed of the batch's integers alone:

    input_ids   fake [2, 8]     real [2, 8]
    is_image    fake [2, 8]     real input_ids == 63        computed beside
    count       fake []         real is_image.sum()         computed beside
    int(count)                  10, a reading               a constant of the graph
    hidden      fake [2, 8, 4]  unknown
    hidden[is_image]            10, a reading               indexed by nonzero_static(is_image, size=10): only the
                                                            number is frozen, the places are found at run time

A `Recording` keeps the readings and the few operations that made them (the tape). Before another batch runs on the
same code, the tape is run on its integers: where all readings are the same, so is the graph. What depends on a weight,
a floating-point input or a random number is not known, and a read of it fails as it does without this mode.

Source: this project
Tests: tests/capture/test_values.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

MOST_ELEMENTS = 1 << 24
"""Larger tensors are not computed beside; a read of what is made of them is refused."""
_PYTHON = frozenset(
    ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__contains__", "equal", "allclose")
    + ("is_nonzero", "numpy", "__array__")
)
"""Functions that hand values to Python."""
_TEXT = frozenset(("__format__", "__repr__", "__str__"))
"""Functions that make words of values, for messages that nobody reads."""
_WHOLE = frozenset(("unique", "unique_consecutive", "bincount", "_unique2", "unique_dim", "tensor_split", "one_hot"))
"""Functions whose result has a size that values decide, and is frozen as it is."""
_SIZES = frozenset(
    ("arange", "linspace", "zeros", "ones", "full", "empty", "view", "reshape", "expand", "repeat", "split", "narrow")
    + ("tile", "pad", "interpolate", "new_zeros", "new_ones", "new_full", "new_empty", "split_with_sizes", "unflatten")
    + ("select", "eye", "tril_indices", "triu_indices", "roll", "chunk", "unfold", "fill_diagonal_", "adaptive_avg_pool2d")
)
"""Functions that take sizes; a size that is a tensor is read."""
_RANDOM = ("rand", "normal", "bernoulli", "multinomial", "dropout", "uniform", "exponential", "poisson", "geometric")


@dataclass(frozen=True, slots=True)
class _Slot:
    """A tensor on the tape."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One operation of the tape.

    Args:
        results: slots of its results.
        storages: numbers of the storages that it reads or makes, and of those that it writes.
        reading: what it handed to Python, where ``is_read``.
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
    _slots: Mapping[str, int] = field(default_factory=dict)

    def matches(self, batch: Mapping[str, Any]) -> bool:
        """Return whether the model would read the same of another batch of the same shapes."""
        slots: dict[int, Any] = {}
        for key, slot in self._slots.items():
            if key in self.keys:
                slots[slot] = batch[key].detach().cpu().clone()
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for call in self._tape:
                # up to the first reading that differs, everything was computed as it was then: nothing can fail
                result = call.function(*_filled(call.args, slots), **_filled(call.kwargs, slots))
                if call.is_read:
                    if _frozen(result) != call.reading:
                        return False
                    continue
                for slot, tensor in zip(call.results, _tensors(result), strict=True):
                    slots[slot] = tensor
        return True


def _filled(value: Any, slots: Mapping[int, Any]) -> Any:
    return tree_map(lambda leaf: slots[leaf.number] if isinstance(leaf, _Slot) else leaf, value)


def _frozen(value: Any) -> Any:
    """Return what was read as something to compare: NaN equals itself, lists are tuples."""
    if isinstance(value, Tensor):
        return tuple(value.shape), str(value.dtype), _frozen(value.tolist())
    if hasattr(value, "dtype") and hasattr(value, "tolist"):  # numpy's
        return tuple(value.shape), str(value.dtype), _frozen(value.tolist())
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(part) for part in value)
    return repr(value) if isinstance(value, float) else value


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


@dataclass(slots=True)
class _Known:
    """The real values of a fake tensor, which is held so that its id stays its own."""

    fake: Tensor
    real: Tensor
    slot: int


class ReadingMode(TorchFunctionMode):
    """Computes beside a model on fake tensors what its Python reads of the batch's integers.

    Args:
        batch: key -> (the fake tensor, its values).
    """

    def __init__(self, batch: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._known: dict[int, _Known] = {}
        self._tape: list[_Call] = []
        self._slots: dict[str, int] = {}
        self._count = 0
        self._storages: dict[int, int] = {}
        self._held: list[Tensor] = []
        self.has_read = False
        with _plainly():
            for key, (fake, value) in batch.items():
                if value.device.type == "meta" or value.is_floating_point() or value.is_complex():
                    continue
                self._slots[key] = self._learn(fake, value.detach().cpu().clone())

    def recording(self) -> Recording:
        """Return what was read, with the part of the tape that made it."""
        wanted: set[int] = set()
        kept: list[_Call] = []
        # Backwards: an operation counts if it was a read, or makes or writes memory that a later one of these reads.
        for call in reversed(self._tape):
            if call.is_read or call.makes & wanted:
                kept.append(call)
                wanted |= call.reads | call.makes
        needed = {leaf.number for call in kept for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, _Slot)}
        tape = tuple(reversed(kept))
        return Recording(
            values=tuple(call.reading for call in tape if call.is_read),
            keys=tuple(sorted(key for key, slot in self._slots.items() if slot in needed)),
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
        if name == "__get__" and not self._makes_tensor(func):
            return func(*args, **kwargs)
        tensors = _tensors((args, kwargs))
        is_known = all(self._is_known(t) for t in tensors) and not any(word in name for word in _RANDOM)
        if name in _PYTHON and tensors and is_known:
            return self._read(func, args, kwargs)
        if name in _TEXT and tensors and is_known:
            with _plainly():
                return func(*self._real(args), **self._real(kwargs))
        args, kwargs = self._with_sizes(name, args, kwargs)
        replaced = self._with_places(name, func, args, kwargs)
        if replaced is not None:
            return replaced
        if name in _WHOLE and tensors and is_known:
            return self._constants(self._read(func, args, kwargs, keeps=True), tensors[0])
        if not is_known:
            return self._call_unknown(func, args, kwargs, tensors)
        return self._call_known(func, args, kwargs, is_iterator=name == "__iter__")

    def _call_unknown(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
        """Call it; what was known, and is written with what is not, is no longer."""
        before = [t._version for t in tensors]
        result = func(*args, **kwargs)
        for tensor, version in zip(tensors, before, strict=True):
            if tensor._version != version and self._is_known(tensor):
                storage = self._storage_of(self._known[id(tensor)].real)
                for key in [k for k, v in self._known.items() if self._storage_of(v.real) == storage]:
                    del self._known[key]
        return result

    def _call_known(self, func: Any, args: Any, kwargs: Any, *, is_iterator: bool) -> Any:
        """Call it on fake tensors and on the values; learn the values of its results."""
        result = func(*args, **kwargs)
        if is_iterator:
            result = list(result)
        fakes = _tensors(result)
        if not fakes and not _tensors((args, kwargs)):
            return result
        sizes = [size for fake in fakes for size in fake.shape]
        if any(not isinstance(size, int) for size in sizes) or sum(f.numel() for f in fakes) > MOST_ELEMENTS:
            return result
        call = self._plain(func, is_iterator)
        given = _tensors((args, kwargs))
        with _plainly():
            real_args, real_kwargs = self._real(args), self._real(kwargs)
            owned = _tensors((real_args, real_kwargs))
            before = [t._version for t in owned]
            real = call(*real_args, **real_kwargs)
            written = [t for t, version in zip(owned, before, strict=True) if t._version != version]
            made = _tensors(real)
            if not made and not written:
                return iter(result) if is_iterator else result
            assert len(made) == len(fakes), f"{func} makes other results of values than of shapes"
            slotted = self._slotted((args, kwargs))
            reads = frozenset(self._storage_of(self._known[id(t)].real) for t in given)
            slots = tuple(self._learn(f, r) for f, r in zip(fakes, made, strict=True))
            makes = frozenset(self._storage_of(r) for r in (*made, *written))
        self._tape.append(
            _Call(function=call, args=slotted[0], kwargs=slotted[1], results=slots, reads=reads, makes=makes)
        )
        return iter(result) if is_iterator else result

    def _read(self, func: Any, args: Any, kwargs: Any, *, keeps: bool = False) -> Any:
        """Return what Python reads, and note it.

        Args:
            keeps: the result is made of tensors; the graph has it as constants.
        """
        with _plainly():
            value = func(*self._real(args), **self._real(kwargs))
            reading = _frozen(value)
        given = _tensors((args, kwargs))
        slotted = self._slotted((args, kwargs))
        reads = frozenset(self._storage_of(self._known[id(t)].real) for t in given)
        self._tape.append(
            _Call(function=func, args=slotted[0], kwargs=slotted[1], reads=reads, is_read=True, reading=reading)
        )
        self.has_read = True
        return value

    # ---- sizes and places ------------------------------------------------------------------------

    def _with_sizes(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments with Python's integers for sizes, bounds and indices that are known tensors."""
        if name in ("__getitem__", "__setitem__"):
            owner, index, *rest = args
            parts = index if isinstance(index, tuple) else (index,)
            changed = tuple(self._bounds(part) for part in parts)
            return (owner, changed if isinstance(index, tuple) else changed[0], *rest), kwargs
        if name not in _SIZES:
            return args, kwargs
        # the first argument of a method is what it is called on, not a size
        first = args[:1] if args and isinstance(args[0], Tensor) and args[0].dim() else ()
        change = self._number
        return (*first, *tree_map(change, args[len(first) :])), tree_map(change, kwargs)

    def _bounds(self, part: Any) -> Any:
        if isinstance(part, slice):
            return slice(self._number(part.start), self._number(part.stop), self._number(part.step))
        return self._number(part)

    def _number(self, value: Any) -> Any:
        """Return a known tensor of one integer as that integer."""
        if not isinstance(value, Tensor) or value.dim() or value.dtype is torch.bool or not self._is_known(value):
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
            with self:
                for part in parts:
                    found.extend(self._places(part).unbind(1) if self._is_mask(part) else (part,))
                return owner[tuple(found)]
        if name in ("nonzero", "argwhere") and self._is_known(args[0]):
            with self:
                places = self._places(args[0])
                return places.unbind(1) if kwargs.get("as_tuple") else places
        if name == "where" and len(args) == 1 and self._is_known(args[0]):
            with self:
                return self._places(args[0]).unbind(1)
        if name == "masked_select" and self._is_mask(args[1] if len(args) > 1 else kwargs.get("mask")):
            mask = args[1] if len(args) > 1 else kwargs["mask"]
            with self:
                owner, mask = torch.broadcast_tensors(args[0], mask)
                return owner[mask]
        if name == "repeat_interleave":
            return self._repeated(func, args, kwargs)
        if name in ("tensor", "as_tensor") and args and isinstance(args[0], (list, tuple)):
            # a list of numbers that are tensors: export would ask each for its value
            parts = list(args[0])
            if parts and all(isinstance(p, Tensor) and p.dim() == 0 and self._is_known(p) for p in parts):
                with self:
                    return torch.stack(parts).to(dtype=kwargs.get("dtype"), device=kwargs.get("device"))
        return None

    def _repeated(self, func: Any, args: Any, kwargs: Any) -> Any:
        repeats = args[1] if len(args) > 1 else kwargs.get("repeats")
        alone = repeats is None and len(args) == 1
        repeats = args[0] if alone else repeats
        if not isinstance(repeats, Tensor) or not self._is_known(repeats) or kwargs.get("output_size") is not None:
            return None
        with self:
            total = repeats.sum()
            if repeats.dim() and not alone and repeats.numel() == 1:
                dim = args[2] if len(args) > 2 else kwargs.get("dim")
                length = args[0].numel() if dim is None else args[0].shape[dim]
                return func(*args, **kwargs, output_size=int(total) * length)
            return func(*args, **kwargs, output_size=int(total))

    def _places(self, mask: Tensor) -> Tensor:
        with self:
            return torch.nonzero_static(mask, size=int((mask != 0).sum()))

    def _is_mask(self, value: Any) -> bool:
        return (
            isinstance(value, Tensor)
            and value.dtype in (torch.bool, torch.uint8)
            and value.dim() > 0
            and self._is_known(value)
        )

    # ---- small helpers ---------------------------------------------------------------------------

    def _is_known(self, tensor: Tensor) -> bool:
        return id(tensor) in self._known

    def _learn(self, fake: Tensor, real: Tensor) -> int:
        self._count += 1
        self._known[id(fake)] = _Known(fake, real, self._count)
        return self._count

    def _storage_of(self, real: Tensor) -> int:
        """Return the number of a tensor's storage; all that were numbered are held, so that no address recurs."""
        address = real.untyped_storage()._cdata
        if address not in self._storages:
            self._held.append(real)
            self._storages[address] = len(self._storages)
        return self._storages[address]

    def _real(self, value: Any) -> Any:
        """Return arguments with values for fake tensors, on the CPU."""

        def change(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self._known[id(leaf)].real
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

        return tree_map(change, value)

    def _slotted(self, value: Any) -> Any:
        def change(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return _Slot(self._known[id(leaf)].slot)
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

        return tree_map(change, value)

    @staticmethod
    def _plain(func: Any, is_iterator: bool) -> Callable[..., Any]:
        return (lambda *args, **kwargs: list(func(*args, **kwargs))) if is_iterator else func

    @staticmethod
    def _makes_tensor(func: Any) -> bool:
        return getattr(getattr(func, "__self__", None), "__name__", "") in ("T", "mT", "H", "mH", "data", "real")

    def _constants(self, values: Any, like: Tensor) -> Any:
        """Return tensors of what was read, as the model would make them of numbers."""

        def change(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            with self:
                made = torch.tensor(leaf.flatten().tolist(), dtype=leaf.dtype, device=like.device)
                return made.reshape(leaf.shape)

        return tree_map(change, values)


class _plainly:
    """Compute on real tensors, whatever modes are on."""

    def __enter__(self) -> None:
        self._parts = [_disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad()]
        for part in self._parts:
            part.__enter__()

    def __exit__(self, *error: Any) -> None:
        for part in reversed(self._parts):
            part.__exit__(None, None, None)
