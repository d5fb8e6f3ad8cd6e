"""Batch entries that are lists of dicts of tensors, one a sample (a detector's labels), as padded tensors.

``labels = [{"boxes": [3, 4]}, {"boxes": [1, 4]}]`` becomes entries with the samples along axis 0, which travel, are cut
and joined like any other, and a constant that says what they were:

    "labels"              RecordKeys(("boxes",))
    "labels.boxes"        [2, 4, 4]    padded with zeros; the first axis of a tensor to a power of two
    "labels.boxes.shape"  [2, 2]       (3, 4) and (1, 4)

While a model is traced such an entry is a `TracedRecords`, of which nothing can be read: only a module or a loss that
is kept whole gets the list of dicts again, cut to each tensor's own shape.

Source: this project
Tests: tests/capture/test_eager.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad

from gpp_plugin.errors import CaptureError, ConfigError

SHAPE = "shape"


@dataclass(frozen=True, slots=True)
class RecordKeys:
    """Stands for an entry in a batch; its tensors are entries of their own."""

    keys: tuple[str, ...]

    def entries(self, key: str) -> tuple[str, ...]:
        """Return the names of the tensors of the entry ``key``."""
        return tuple(name for field in self.keys for name in (f"{key}.{field}", f"{key}.{field}.{SHAPE}"))


def pad_records(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch with its lists of dicts of tensors as padded tensors.

    Raises:
        ConfigError: dicts of one entry have unlike keys, or tensors of unlike numbers of axes.
    """
    padded: dict[str, Any] = {}
    for key, value in batch.items():
        if _are_records(value):
            fields = tuple(value[0])
            padded[key] = RecordKeys(fields)
            for field in fields:
                padded |= _pad_field(key, field, value)
        else:
            padded[key] = value
    return padded


def _are_records(value: Any) -> bool:
    is_list = isinstance(value, (list, tuple)) and len(value) > 0
    return is_list and all(
        isinstance(record, Mapping)
        and len(record) > 0
        and all(isinstance(part, Tensor) for part in record.values())
        for record in value
    )


def _pad_field(key: str, field: str, records: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    if any(record.keys() != records[0].keys() for record in records):
        raise ConfigError(
            f"batch entry {key!r}: its dicts have unlike keys {sorted({tuple(sorted(r)) for r in records})}; give all "
            "samples the same"
        )
    tensors = [record[field] for record in records]
    if len({(t.dim(), t.dtype) for t in tensors}) > 1:
        raise ConfigError(
            f"batch entry {key!r}: {field!r} has shapes {[list(t.shape) for t in tensors]} and types "
            f"{sorted({str(t.dtype) for t in tensors})}; give all samples tensors of as many axes and one type"
        )
    axes = tensors[0].dim()
    sizes = [max(t.shape[axis] for t in tensors) for axis in range(axes)]
    if axes:
        sizes[0] = 1 << max(sizes[0] - 1, 0).bit_length()  # few widths: each is a shape of its own
    return {
        f"{key}.{field}": torch.stack([_padded(t, sizes) for t in tensors]),
        f"{key}.{field}.{SHAPE}": torch.tensor([list(t.shape) for t in tensors]).reshape(len(tensors), axes),
    }


def _padded(tensor: Tensor, sizes: Sequence[int]) -> Tensor:
    missing = [size - own for size, own in zip(sizes, tensor.shape, strict=True)]
    return pad(tensor, [n for size in reversed(missing) for n in (0, size)]) if any(missing) else tensor


def widen(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return padded tensors of several batches, padded to one width behind the samples."""
    sizes = [max(t.shape[axis] for t in tensors) for axis in range(1, tensors[0].dim())]
    return [_padded(t, [t.shape[0], *sizes]) for t in tensors]


def is_padded(key: str, batch: Mapping[str, Any]) -> bool:
    """Return whether an entry of a batch is a padded tensor of records."""
    owner = key.partition(".")[0]
    return isinstance(batch.get(owner), RecordKeys) and key in batch[owner].entries(owner)


class TracedRecords(list[Any]):
    """An entry while a model is traced: its padded tensors, of which the model can read nothing.

    Args:
        tensors: field -> (padded values, shapes).
    """

    def __init__(self, key: str, tensors: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.key = key
        self.tensors = dict(tensors)

    def _refuse(self, *_: Any) -> NoReturn:
        raise UnreadRecords(
            f"batch entry {self.key!r} is a list of dicts, which only a module or a loss that runs as it is can read"
        )

    __iter__ = __getitem__ = __len__ = __bool__ = _refuse


class UnreadRecords(CaptureError):
    """Code that is traced reads a list of dicts: the module whose code it is must be kept whole."""


def with_records(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a model is called with: lists of dicts, real ones of real tensors, in place of padded tensors."""
    found = dict(entries)
    for key, value in entries.items():
        if isinstance(value, RecordKeys):
            for name in value.entries(key):
                found.pop(name, None)
            found[key] = TracedRecords(
                key, {f: (entries[f"{key}.{f}"], entries[f"{key}.{f}.{SHAPE}"]) for f in value.keys}
            )
    return found


def cut_records(fields: Sequence[str], tensors: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """Return the list of dicts of padded tensors.

    Args:
        tensors: values and shapes of each field in turn.
    """
    columns: list[list[Tensor]] = []
    for values, shapes in zip(tensors[::2], tensors[1::2], strict=True):
        cut = []
        for value, shape in zip(values, shapes.tolist(), strict=True):
            for axis, size in enumerate(shape):
                value = value.narrow(axis, 0, size)
            cut.append(value)
        columns.append(cut)
    return [dict(zip(fields, row, strict=True)) for row in zip(*columns, strict=True)]
