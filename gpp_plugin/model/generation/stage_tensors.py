"""Tensors that one rank of a replica holds: what a model's own Python sees of them on the other ranks.

Every rank of a replica runs the same Python. A tensor there is one of two:

    an ordinary tensor     the same bits on every rank: token ids, masks, positions, logits
    a `StageTensor`        made by a stage: real on the rank that holds it, shape and type alone (meta) elsewhere

An operator on stage tensors runs on the ranks that hold them, and on shapes elsewhere. Where its operands lie on
several ranks, they are transferred to one of these, which then holds a copy. What reads values (``item``, ``nonzero``)
is broadcast to all ranks; it is an ordinary tensor from then on. Either happens once, at the same place of the
program on every rank.

    rank 0 (embedding, layers 0-5)     hidden: real      hidden + residual: computed      sent to 1
    rank 1 (layers 6-11, head)         hidden: shape     hidden + residual: shape         layer 6 reads it
    rank 2                             hidden: shape     hidden + residual: shape         continues, on shapes

Source: this project
Tests: tests/model/test_stage_tensors.py, tests/integrations/test_generation.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gpp_plugin.errors import CaptureError
from gpp_plugin.model.generation.micro_batches import ReplicaLink, ReplicaStopped

aten = torch.ops.aten

READS_VALUES = frozenset(
    {
        aten._local_scalar_dense.default,
        aten.nonzero.default,
        aten.masked_select.default,
        aten.equal.default,
        aten._unique2.default,
        aten.unique_dim.default,
        aten.unique_consecutive.default,
        aten.repeat_interleave.Tensor,
        aten.bincount.default,
    }
)
"""Operators whose result, or its shape, depends on values: every rank must have them."""


class StageTensor(Tensor):
    """A tensor that some ranks of a replica hold.

    Args:
        value: the tensor on those ranks; elsewhere one on the meta device.
        holders: their positions in the replica, first the one that made it; several for a parameter that is tied, and
            of what was transferred.
        run: what the operators on it belong to.
    """

    value: Tensor
    holders: tuple[int, ...]
    run: ReplicaRun
    full: Tensor | None
    is_weight: bool

    @staticmethod
    def __new__(
        cls, value: Tensor, holders: tuple[int, ...], run: ReplicaRun, is_weight: bool = False
    ) -> StageTensor:
        """Return a tensor that looks as if it were on the replica's device."""
        made: StageTensor = Tensor._make_wrapper_subclass(
            cls,
            value.shape,
            strides=value.stride(),
            storage_offset=value.storage_offset(),
            dtype=value.dtype,
            device=run.link.device,
        )
        made.value, made.holders, made.run = value, holders, run
        made.full, made.is_weight = None, is_weight
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator where its operands lie."""
        options = dict(kwargs or {})
        found = next(_stage_tensors((args, options)))
        return found.run.operate(func, args, options)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return where it lies, and its shape: most ranks know no more."""
        return f"StageTensor(shape={tuple(self.shape)}, dtype={self.dtype}, positions={self.holders})"


class ReplicaRun:
    """One generation, as one rank of its replica takes part in it.

    Args:
        link: joins the ranks.
    """

    def __init__(self, link: ReplicaLink) -> None:
        self.link = link
        self.failure: Exception | None = None
        """What a module of this rank raised; from then on it has shapes only, until all ranks hear of it."""
        self._has_heard = (
            False  # that a module of another rank, or of another micro-batch, failed; then as above
        )
        self._inside: str = ""

    @property
    def position(self) -> int:
        """Return this rank's position in the replica."""
        return self.link.position

    def computes(self, holders: tuple[int, ...]) -> bool:
        """Return whether this rank has the values of what lies on some positions.

        In the place of another rank's module it has none, not even of a tied weight: what fails there fails on the rank
        that runs it.
        """
        return self.position in holders and not self.has_failed and not self._inside

    @property
    def has_failed(self) -> bool:
        """Return whether this rank has shapes only, and reports that where others read of it."""
        return self.failure is not None or self._has_heard

    @contextmanager
    def inside(self, module: str) -> Iterator[None]:
        """Run a module in the place of the rank that runs it really, which sends nothing meanwhile."""
        before, self._inside = self._inside, module
        try:
            yield
        finally:
            self._inside = before

    def broadcast(self, tensor: StageTensor) -> Tensor:
        """Return the tensor as an ordinary one, on all ranks of the replica; every rank comes here.

        Raises:
            ReplicaStopped: the rank that makes it has failed.
            CaptureError: a module that another rank runs looks at values.
        """
        self._refuse_inside()
        if tensor.full is None:
            source = tensor.holders[0]
            readers = [position for position in range(len(self.link.ranks)) if position != source]
            tensor.full = self._broadcast_value(tensor.value, source, readers)
            if tensor.full is None:
                raise ReplicaStopped
        return tensor.full

    def hand_over(self, tensor: StageTensor, reader: int) -> None:
        """Let one more position hold a tensor; every rank comes here.

        Raises:
            CaptureError: as `broadcast`.
        """
        # The reader of a rank that failed continues with shapes, and its readers do, until all ranks hear of it by what
        # is broadcast to all: the logits at the latest.
        self._refuse_inside()
        value = self._broadcast_value(tensor.value, tensor.holders[0], (reader,))
        if reader == self.position and value is not None:
            tensor.value = value
        tensor.holders = (*tensor.holders, reader)

    def _broadcast_value(self, value: Tensor, source: int, readers: Sequence[int]) -> Tensor | None:
        turns = self.link.turns
        if turns is not None and turns.is_stopping:
            self._has_heard = True
        full = self.link.broadcast(value, source=source, readers=readers, has_failed=self.has_failed)
        if full is None:
            self._has_heard = True
            if turns is not None:
                turns.is_stopping = True
        return full

    def _refuse_inside(self) -> None:
        if self._inside:
            raise CaptureError(
                f"engine.generate: {self._inside} decides by the values of its tensors, which only the rank that holds "
                "it has; such a model generates on one rank alone"
            )

    def full(self, values: Any) -> Any:
        """Return a structure with all its stage tensors broadcast."""
        return map_tensors(values, lambda t: self.broadcast(t) if isinstance(t, StageTensor) else t)

    def owner_of(self, values: Any, among: tuple[int, ...]) -> int:
        """Return which of the positions that hold a module's weights runs it: the one that has its input."""
        having = [p for t in _stage_tensors(values) if not t.is_weight for p in t.holders]
        return next((p for p in reversed(having) if p in among), among[0])

    def _holders_of(self, values: Any) -> tuple[int, ...]:
        """Return where an operator runs: wherever all operands are, or with the weights, or where the last was made."""
        # hidden (1) + residual (1)           there: 1
        # hidden (2) @ tied weight (0, 2)     there: 2, nothing is transferred
        # hidden (1) @ weight (2)             2: the hidden states are transferred, not the weight
        # hidden (0, 1) + residual (0, 1)     both: what was transferred once need not be again
        # image (0), text (1) in masked_scatter   1: the image is transferred
        found = list(_stage_tensors(values))
        common = set.intersection(*(set(t.holders) for t in found))
        if common:
            return tuple(sorted(common))
        weights = [t for t in found if t.is_weight]
        if weights:  # of a tied weight the copy beside the other operand
            others = {p for t in found if not t.is_weight for p in t.holders}
            return (next((p for p in weights[0].holders if p in others), weights[0].holders[0]),)
        return (max(t.holders[0] for t in found),)  # later stages mostly read of earlier ones

    def bring(self, values: Any, holders: tuple[int, ...]) -> Any:
        """Return a structure that all these positions have, after what they lack is sent; by the whole replica."""

        def moved(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, StageTensor):
                return tensor
            missing = [position for position in holders if position not in tensor.holders]
            if missing and tensor.full is not None:
                return tensor.full
            for position in missing:
                self.hand_over(tensor, position)
            return tensor

        return map_tensors(values, moved)

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on stage tensors and return what it returns, as stage tensors."""
        # 1. what needs values on all ranks: they are broadcast, and the operator runs on ordinary tensors. So
        #    does what writes into an ordinary tensor, which must stay the same on all ranks.
        is_written = func._schema.is_mutable
        if func in READS_VALUES or (is_written and not isinstance(args[0], StageTensor)):
            args, kwargs = self.full((args, kwargs))
            return func(*args, **kwargs)
        if func is aten.index.Tensor:
            args = (args[0], [one for index in args[1] for one in _positions(self.full(index))])
            if not isinstance(args[0], StageTensor):
                return func(*args, **kwargs)
        # 2. where it runs, and what must be transferred for that: all ranks say the same, by what all of them know
        holders = args[0].holders if is_written else self._holders_of((args, kwargs))
        args, kwargs = self.bring((args, kwargs), holders)
        # 3. on values there, on shapes elsewhere; "cuda:0" or "cpu" means the device of the values, so a shape has none
        if self.computes(holders):
            result = func(*real_values(args), **real_values(kwargs))
        else:
            if kwargs.get("device") is not None:
                kwargs["device"] = torch.device("meta")
            result = func(*_shapes(args), **_shapes(kwargs))
        # 4. an operator in place returns its own argument, and what was broadcast of it before is out of date
        if is_written:
            args[0].full = None
            return args[0]
        return map_tensors(result, lambda t: StageTensor(t, holders, self))

    def as_made_on(self, values: Any, owner: int) -> Any:
        """Return what a module returned as stage tensors of the rank that ran it, on all ranks alike."""
        is_here = self.computes((owner,))

        def wrapped(tensor: Tensor) -> Tensor:
            if isinstance(tensor, StageTensor):
                return tensor
            return StageTensor(tensor if is_here else tensor.to("meta"), (owner,), self)

        return map_tensors(values, wrapped)


# ---- structures ----------------------------------------------------------------------------------------------


def map_tensors(values: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return nested tuples, lists and dicts with their tensors changed; caches and other objects stay as they are."""
    return map_leaves(values, Tensor, change)


def map_leaves(values: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return nested tuples, lists and dicts with what is of a kind changed.

    A dict that builds itself from its entries (an output of HuggingFace's) stays one of its class.
    """
    if isinstance(values, kind):
        return change(values)
    if isinstance(values, tuple):
        changed = [map_leaves(each, kind, change) for each in values]
        return type(values)(*changed) if hasattr(values, "_fields") else tuple(changed)
    if isinstance(values, list):
        return [map_leaves(each, kind, change) for each in values]
    if isinstance(values, dict):
        entries = {key: map_leaves(each, kind, change) for key, each in values.items()}
        return entries if type(values) is dict else type(values)(**entries)
    return values


def _stage_tensors(values: Any) -> Iterator[StageTensor]:
    if isinstance(values, StageTensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for each in values:
            yield from _stage_tensors(each)
    elif isinstance(values, dict):
        for each in values.values():
            yield from _stage_tensors(each)


def real_values(values: Any) -> Any:
    """Return a structure with stage tensors as they are on the rank that holds them."""
    return map_tensors(values, lambda t: t.value if isinstance(t, StageTensor) else t)


def _shapes(values: Any) -> Any:
    """Return a structure on the meta device: a rank that failed has real values, and others have ordinary tensors."""
    return map_tensors(values, lambda t: (t.value if isinstance(t, StageTensor) else t).to("meta"))


def _positions(index: Any) -> list[Any]:
    """Return an index of an axis; of a mask, whose shape says nothing of how many it picks, where it is true."""
    if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
        return list(index.nonzero(as_tuple=True))
    return [index]
