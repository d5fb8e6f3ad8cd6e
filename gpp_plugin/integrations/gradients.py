"""The gradients of one stage between backward and step: adding up micro-batches, summing over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


class GradientStore:
    """Gradients of a stage's trained parameters, by name, scaled by the loss scale.

    Where they are added up in the parameters' own type they stay in ``parameter.grad``, where autograd
    accumulates; otherwise `accumulate` moves them into buffers of ``dtype`` after each micro-batch.

    Args:
        parameters: trained parameters by name, in the same order on every rank of the stage.
        dtype: type in which micro-batches are added up.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, dtype: torch.dtype) -> None:
        self.parameters = dict(parameters)
        self.dtype = dtype
        self._separate = {name for name, p in self.parameters.items() if p.dtype != dtype}
        self._sums: dict[str, Tensor] = {}

    @torch.no_grad()
    def accumulate(self) -> None:
        """Move what autograd left in ``parameter.grad`` into the buffers, where there are buffers."""
        for name in self._separate:
            parameter = self.parameters[name]
            if parameter.grad is None:
                continue
            held = self._sums.get(name)
            if held is None:
                self._sums[name] = parameter.grad.to(self.dtype)
            else:
                held.add_(parameter.grad)
            parameter.grad = None

    def get(self, name: str) -> Tensor | None:
        """Return the gradient of ``name``; None where no loss reached the parameter."""
        return self._sums.get(name) if name in self._separate else self.parameters[name].grad

    def is_empty(self) -> bool:
        """Return whether no loss reached any parameter, as in a stage without backwards."""
        return all(self.get(name) is None for name in self.parameters)

    @torch.no_grad()
    def put(self, name: str, gradient: Tensor) -> None:
        """Replace the gradient of ``name``.

        Raises:
            ValueError: the stage does not train ``name``, or the shape is not the parameter's.
        """
        if name not in self.parameters:
            raise ValueError(f"this stage trains no parameter {name!r}; it trains {sorted(self.parameters)}")
        parameter = self.parameters[name]
        if gradient.shape != parameter.shape:
            raise ValueError(
                f"{name}: gradient of shape {tuple(gradient.shape)}, not {tuple(parameter.shape)}"
            )
        if name in self._separate:
            self._sums[name] = gradient.to(device=parameter.device, dtype=self.dtype, copy=True)
        else:
            parameter.grad = gradient.to(device=parameter.device, dtype=parameter.dtype, copy=True)

    def clear(self) -> None:
        """Forget all gradients."""
        self._sums.clear()
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def all_reduce(
        self,
        names: Sequence[str],
        *,
        group: dist.ProcessGroup | int,
        contribute: bool = True,
        communication_dtype: torch.dtype | None = None,
        bucket_elements: int,
    ) -> None:
        """Sum the gradients of ``names`` over ``group``, in buckets, in the order of ``names``.

        A parameter has a gradient afterwards where any contributing rank had one.

        Args:
            contribute: False adds zeros for this rank (a replica whose sum another rank brings).
            communication_dtype: type on the wire; None: the gradients' own.
            bucket_elements: most elements sent at once (a larger parameter travels alone).
        """
        for bucket in self._buckets(names, bucket_elements):
            self._reduce_bucket(bucket, group, contribute, communication_dtype)

    def _buckets(self, names: Sequence[str], bucket_elements: int) -> Iterator[list[str]]:
        bucket: list[str] = []
        elements = 0
        for name in names:
            parameter = self.parameters[name]
            other_type = bucket and self._held_dtype(name) != self._held_dtype(bucket[0])
            if bucket and (other_type or elements + parameter.numel() > bucket_elements):
                yield bucket
                bucket, elements = [], 0
            bucket.append(name)
            elements += parameter.numel()
        if bucket:
            yield bucket

    def _held_dtype(self, name: str) -> torch.dtype:
        return self.dtype if name in self._separate else self.parameters[name].dtype

    def _reduce_bucket(
        self,
        names: list[str],
        group: dist.ProcessGroup | int,
        contribute: bool,
        communication_dtype: torch.dtype | None,
    ) -> None:
        """All-reduce one flat buffer: the gradients, then one element per parameter that says it has one."""
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
                self.put(name, piece.view(parameter.shape))
