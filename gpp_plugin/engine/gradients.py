"""The gradients of one stage between backward and step: adding up micro-batches, summing over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn


class StageGradients(Protocol):
    """What a stage does with its gradients, whether each rank keeps all of them or its partition."""

    parameters: dict[str, nn.Parameter]

    def accumulate(self) -> None:
        """Take up what a micro-batch's backward left in ``parameter.grad``."""

    def reduce_data(self) -> None:
        """Sum them over the stage's ranks; collective over those."""

    def reduce_tied(self, names: Sequence[str], *, group: dist.ProcessGroup | int) -> None:
        """Sum those of ``names`` over the ranks of several stages, after `reduce_data`; collective over them."""

    def sum_tensor(self, names: Sequence[str], *, group: dist.ProcessGroup | int) -> None:
        """Sum those of ``names`` over the tensor ranks of a data position, after `reduce_data`; collective."""

    def squared_norm(self, *, without: Iterable[str], precision: torch.dtype) -> Tensor:
        """Return this rank's share of the squared L2 norm, of all parameters but ``without``."""

    def norms(self, names: Sequence[str]) -> Tensor:
        """Return the L2 norm of each gradient of ``names`` as this rank has it, in double precision on the host."""

    def gather(self) -> dict[str, Tensor]:
        """Return whole gradients, fp32, by name; those that no loss reached are left out."""

    def is_empty(self) -> bool:
        """Return whether no loss reached any parameter."""

    def held_bytes(self) -> int:
        """Return the bytes of all gradients held now."""

    def clear(self) -> None:
        """Forget them."""


class GradientStore:
    """Whole gradients of a stage's trained parameters, by name, scaled by the loss scale.

    Where they are added up in the parameters' own type they stay in ``parameter.grad``, where autograd
    accumulates; otherwise `accumulate` moves them into buffers of ``dtype`` after each micro-batch.

    Args:
        parameters: trained parameters by name, in the same order on every rank of the stage.
        dtype: type in which micro-batches are added up; None: each parameter's own.
        bucket_elements: most elements sent at once (a larger parameter travels alone).
        group: the stage's ranks; this one is number ``position`` of ``degree``.
        communication_dtype: type on the wire between the stage's ranks; None: the gradients' own.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        dtype: torch.dtype | None,
        bucket_elements: int,
        group: dist.ProcessGroup | int | None = None,
        position: int = 0,
        degree: int = 1,
        communication_dtype: torch.dtype | None = None,
    ) -> None:
        # Names whose sums are held apart, in another type than autograd adds up in (bf16 parameters, fp32 sums).
        self.parameters = dict(parameters)
        self._separate = {n: dtype for n, p in self.parameters.items() if dtype not in (None, p.dtype)}
        self._bucket_elements = bucket_elements
        self._group = group
        self._position = position
        self._degree = degree
        self._communication_dtype = communication_dtype
        self._sums: dict[str, Tensor] = {}

    def accumulate(self) -> None:
        """Move what autograd left in ``parameter.grad`` into the buffers, where there are buffers."""
        if self._separate:
            self._move_to_buffers()

    @torch.no_grad()
    def _move_to_buffers(self) -> None:
        for name, dtype in self._separate.items():
            parameter = self.parameters[name]
            if parameter.grad is None:
                continue
            held = self._sums.get(name)
            if held is None:
                self._sums[name] = parameter.grad.to(dtype)
            else:
                held.add_(parameter.grad)
            parameter.grad = None

    def get(self, name: str) -> Tensor | None:
        """Return the gradient of ``name``; None where no loss reached the parameter."""
        return self._sums.get(name) if name in self._separate else self.parameters[name].grad

    def is_empty(self) -> bool:
        """Return whether no loss reached any parameter, as in a stage without backwards."""
        return all(self.get(name) is None for name in self.parameters)

    def held_bytes(self) -> int:
        """Return the bytes of all gradients held now."""
        held = [*self._sums.values(), *(p.grad for p in self.parameters.values() if p.grad is not None)]
        return sum(gradient.numel() * gradient.element_size() for gradient in held)

    def clear(self) -> None:
        """Forget all gradients."""
        self._sums.clear()
        for parameter in self.parameters.values():
            parameter.grad = None

    def reduce_data(self) -> None:
        """Sum all gradients over the stage's ranks; collective over those, once a mini-batch."""
        if self._degree > 1:
            assert self._group is not None
            self._all_reduce(list(self.parameters), self._group, dtype=self._communication_dtype)

    def reduce_tied(self, names: Sequence[str], *, group: dist.ProcessGroup | int) -> None:
        """Sum the gradients of ``names`` over the ranks of several stages; collective over them.

        Every rank of a stage holds the stage's sum by then, so one rank of each stage brings it, whatever the
        degrees: no sum is divided again.
        """
        self._all_reduce(names, group, contribute=self._position == 0)

    def sum_tensor(self, names: Sequence[str], *, group: dist.ProcessGroup | int) -> None:
        """Sum the gradients of ``names`` over the tensor ranks of a data position; collective over them."""
        self._all_reduce(names, group)

    def squared_norm(self, *, without: Iterable[str], precision: torch.dtype) -> Tensor:
        """Return this rank's share of the squared L2 norm; the stage's ranks hold the same and share it out."""
        left_out = set(without)
        # Every d-th parameter from this rank's position on: of five parameters on two ranks 0 2 4 and 1 3.
        mine = [name for name in self.parameters if name not in left_out][self._position :: self._degree]
        norms = [
            torch.linalg.vector_norm(gradient, dtype=precision)
            for gradient in map(self.get, mine)
            if gradient is not None
        ]
        if not norms:
            device = next((p.device for p in self.parameters.values()), None)
            return torch.zeros((), dtype=precision, device=device)
        return torch.stack(norms).square().sum()

    def norms(self, names: Sequence[str]) -> Tensor:
        """Return the L2 norm of each gradient of ``names``, in double precision on the host; 0 where there is none."""
        held = [self.get(name) for name in names]
        return torch.tensor(
            [0.0 if g is None else float(g.float().norm()) for g in held], dtype=torch.float64
        )

    def gather(self) -> dict[str, Tensor]:
        """Return copies of the gradients by name, fp32, without those that no loss reached."""
        held = {name: self.get(name) for name in self.parameters}
        return {name: g.float().clone() for name, g in held.items() if g is not None}

    @torch.no_grad()
    def _all_reduce(
        self,
        names: Sequence[str],
        group: dist.ProcessGroup | int,
        *,
        contribute: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Sum the gradients of ``names`` over ``group``, in buckets, in the order of ``names``.

        A parameter has a gradient afterwards where any contributing rank had one.

        Args:
            contribute: False adds zeros for this rank (a replica whose sum another rank brings).
            dtype: type on the wire; None: the gradients' own.
        """
        for bucket in self._buckets(names):
            self._reduce_bucket(bucket, group, contribute, dtype)

    def _buckets(self, names: Sequence[str]) -> Iterator[list[str]]:
        # Neighbours of one type up to the limit: sizes 3, 4 and 9 with 8 a bucket go as [3, 4] and [9]. The order is
        # that of `names`, the same on every rank, or ranks would sum unlike parameters.
        bucket: list[str] = []
        elements = 0
        for name in names:
            parameter = self.parameters[name]
            other_type = bucket and self._held_dtype(name) != self._held_dtype(bucket[0])
            if bucket and (other_type or elements + parameter.numel() > self._bucket_elements):
                yield bucket
                bucket, elements = [], 0
            bucket.append(name)
            elements += parameter.numel()
        if bucket:
            yield bucket

    def _held_dtype(self, name: str) -> torch.dtype:
        return self._separate.get(name) or self.parameters[name].dtype

    def _reduce_bucket(
        self,
        names: list[str],
        group: dist.ProcessGroup | int,
        contribute: bool,
        communication_dtype: torch.dtype | None,
    ) -> None:
        """All-reduce one flat buffer: the gradients, then one element per parameter that says it has one."""
        # flat    | gradient of names[0] | gradient of names[1] | ... | has 0 | has 1 | ... |
        # Micro-batches of one rank may reach a parameter and those of another not: without the flags at the end the
        # latter could not tell a sum of zeros from none, and optimizers treat them differently.
        parameters = [self.parameters[name] for name in names]
        sizes = [p.numel() for p in parameters]
        dtype = communication_dtype or self._held_dtype(names[0])
        flat = torch.zeros(sum(sizes) + len(names), dtype=dtype, device=parameters[0].device)
        *pieces, present = flat.split([*sizes, len(names)])
        missing = [self.get(name) is None for name in names]
        if contribute:
            for name, piece in zip(names, pieces, strict=True):
                gradient = self.get(name)
                if gradient is not None:
                    piece.copy_(gradient.reshape(-1))
            present.copy_(torch.tensor([not absent for absent in missing]))
        dist.all_reduce(flat, group=group)
        # Reading `present` waits for the device, so look only where this rank cannot know.
        found = present.tolist() if any(missing) else [1.0] * len(names)
        for name, parameter, piece, count in zip(names, parameters, pieces, found, strict=True):
            held = self.get(name)
            if held is not None:
                held.copy_(piece.view(parameter.shape))
            elif count:
                self._put(name, piece.view(parameter.shape))

    def _put(self, name: str, gradient: Tensor) -> None:
        dtype = self._held_dtype(name)
        if name in self._separate:
            self._sums[name] = gradient.to(dtype, copy=True)
        else:
            self.parameters[name].grad = gradient.to(dtype, copy=True)
