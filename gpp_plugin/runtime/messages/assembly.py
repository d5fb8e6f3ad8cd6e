"""Makes the tensors that a task reads out of received pieces, and those of a message out of what tasks made.

Which pieces and rows these are was resolved before (`routes`); a reading becomes one callable. Gradients that several
consumers send for one tensor are summed in the order of the groups, whatever order they arrived in.

Source: this project
Tests: tests/runtime/test_tensor_grids.py, tests/runtime/test_traces.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from gpp_plugin.errors import RuntimeFailure
from gpp_plugin.runtime.messages.routes import Parcel, Piece, Reading, RowSource

Take = Callable[[], Tensor]
Inbox = list[list[Tensor]]
"""The buffers of each message that the rank receives, by its number."""

_TAKEN = torch.empty(0)


def compile_reading(reading: Reading, inbox: Inbox, device: torch.device) -> Take:
    """Return what makes a tensor: pieces of a group joined by rows or placed, groups summed in order.

    Args:
        inbox: filled with buffers when the callable is called, which lets go of those that nobody reads afterwards.
    """
    if not reading.groups:
        return lambda: torch.empty(reading.shape, dtype=reading.dtype, device=device)
    groups = [_compile_group(pieces, reading, inbox, device) for pieces in reading.groups]
    if len(groups) == 1:
        return groups[0]

    def read() -> Tensor:
        total: Tensor | None = None
        for join in groups:
            part = join()
            total = part if total is None else total + part
        assert total is not None
        return total

    return read


def _compile_group(pieces: Sequence[Piece], reading: Reading, inbox: Inbox, device: torch.device) -> Take:
    axis = reading.axis
    takes = [_compile_piece(piece, axis, inbox) for piece in pieces]
    if len(takes) == 1:
        return takes[0]
    if not any(piece.place for piece in pieces):
        return lambda: torch.cat([take() for take in takes], dim=axis)

    def join() -> Tensor:
        whole = torch.empty(reading.shape, dtype=reading.dtype, device=device)
        for piece, take in zip(pieces, takes, strict=True):
            part = whole
            for cut in piece.place:
                part = part.narrow(cut.axis, cut.first, cut.count)
            part.copy_(take())
        return whole

    return join


def _compile_piece(piece: Piece, axis: int, inbox: Inbox) -> Take:
    number, position = piece.number, piece.position

    def take() -> Tensor:
        buffers = inbox[number]
        tensor = buffers[position]
        if piece.is_last:  # let go of it here
            buffers[position] = _TAKEN
        if piece.num_rows < 0:
            return tensor
        # captured code may view what it gets, which rows cut behind the first axis do not allow
        return tensor.narrow(axis, piece.first_row, piece.num_rows).contiguous()

    return take


def pack_parcel(parcel: Parcel, made: Mapping[int, Sequence[Tensor]]) -> Tensor:
    """Return one tensor of a message, contiguous, as its receiver expects it.

    Args:
        made: what tasks made, by slot.

    Raises:
        RuntimeFailure: it is not of the shape or dtype that the plan was compiled for.
    """
    wire = parcel.wire
    tensor = _join_rows(parcel.sources, wire.axis, made)
    for cut in wire.cuts:
        if tensor.shape[cut.axis] != cut.size:
            raise RuntimeFailure(
                f"{wire.name} is {tuple(tensor.shape)}; by the plan each tensor rank holds {cut.size} elements "
                f"of it along axis {cut.axis}"
            )
        tensor = tensor.narrow(cut.axis, cut.first, cut.count)
    if tensor.shape != wire.shape or tensor.dtype != wire.dtype:
        raise RuntimeFailure(
            f"{wire.name} is {tuple(tensor.shape)} {tensor.dtype}, the plan was compiled for "
            f"{wire.shape} {wire.dtype}; its shape depends on the data"
        )
    return tensor.contiguous()


def _join_rows(sources: Sequence[RowSource], axis: int, made: Mapping[int, Sequence[Tensor]]) -> Tensor:
    """Return the rows to send, out of one task or joined out of both halves."""
    tensors = []
    for source in sources:
        tensor = made[source.slot][source.position].detach()
        if axis >= 0 and tensor.shape[axis] != source.num_rows:
            tensor = tensor.narrow(axis, source.first_row, source.num_rows)
        tensors.append(tensor)
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=axis)
