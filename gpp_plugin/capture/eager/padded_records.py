"""Batch entries that are lists of dicts of tensors, or of tensors, one a sample, as padded tensors.

``labels = [{"boxes": [3, 4]}, {"boxes": [1, 4]}]`` becomes entries with the samples along axis 0, which travel, are cut
and joined like any other, and a constant that says what they were:

    "labels"              RecordKeys(("boxes",))
    "labels.boxes"        [2, 4, 4]    padded with zeros; the first axis of a tensor to a power of two
    "labels.boxes.shape"  [2, 2]       (3, 4) and (1, 4)

A list of tensors (a segmenter's masks) is taken for one of dicts with one field, ``tensor``.

While a model is traced such an entry is a `TracedRecords`, of which nothing can be read: only a module or a loss that
runs as it is gets the list of dicts again, cut to each tensor's own shape.

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

from gpp_plugin.capture.tracing.sample_batches import count_samples
from gpp_plugin.errors import CaptureError, ConfigError

SHAPE, BARE = "shape", "tensor"


@dataclass(frozen=True, slots=True)
class RecordKeys:
    """Stands for an entry in a batch; its tensors are entries of their own.

    Args:
        is_bare: a list of tensors, not of dicts.
    """

    keys: tuple[str, ...]
    is_bare: bool = False

    def entries(self, key: str) -> tuple[str, ...]:
        """Return the names of the tensors of the entry ``key``."""
        return tuple(name for field in self.keys for name in (f"{key}.{field}", f"{key}.{field}.{SHAPE}"))


def pad_records(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch with its lists of dicts of tensors, one a sample, as padded tensors.

    Raises:
        ConfigError: dicts of one entry have different keys, or tensors of different numbers of axes.
    """
    padded: dict[str, Any] = {}
    for key, value in batch.items():
        records = _records_of(value)
        if records is not None and len(records) == _num_samples(batch):
            padded[key] = RecordKeys(tuple(records[0]), is_bare=records[0] is not value[0])
            for field in records[0]:
                padded |= _pad_field(key, field, records)
        else:
            padded[key] = value
    return padded


def _records_of(value: Any) -> Sequence[Mapping[str, Tensor]] | None:
    """Return the dicts of a list of dicts of tensors, or of one of tensors; None of anything else."""
    if not isinstance(value, (list, tuple)) or not value:
        return None
    if all(isinstance(part, Tensor) for part in value):
        return [{BARE: part} for part in value]
    is_records = all(
        isinstance(record, Mapping) and record and all(isinstance(part, Tensor) for part in record.values())
        for record in value
    )
    return value if is_records else None


def _num_samples(batch: Mapping[str, Any]) -> int:
    """Return the samples of the batch's tensors; of one that has none but in lists, the length of the first list."""
    if any(isinstance(value, Tensor) and value.dim() for value in batch.values()):
        return count_samples(batch)
    return next((len(value) for value in batch.values() if isinstance(value, (list, tuple))), 0)


def _pad_field(key: str, field: str, records: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    if any(record.keys() != records[0].keys() for record in records):
        raise ConfigError(
            f"batch entry {key!r}: its dicts have different keys {sorted({tuple(sorted(r)) for r in records})}; give "
            "all samples the same"
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
        fields: of it, as of the batch's entry.
        tensors: field -> (padded values, shapes).
    """

    def __init__(self, key: str, fields: RecordKeys, tensors: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.key = key
        self.fields = fields
        self.tensors = dict(tensors)

    def _refuse(self, *_: Any) -> NoReturn:
        raise UnreadRecords(
            f"batch entry {self.key!r} is a list of dicts, which only a module or a loss that runs as it is can read"
        )

    __iter__ = __getitem__ = __len__ = __bool__ = _refuse


class UnreadRecords(CaptureError):
    """Code that is traced reads a list of dicts: its module must run as it is."""


def with_records(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a model is called with: lists of dicts, real ones of real tensors, in place of padded tensors."""
    found = dict(entries)
    for key, value in entries.items():
        if isinstance(value, RecordKeys):
            for name in value.entries(key):
                found.pop(name, None)
            tensors = {f: (entries[f"{key}.{f}"], entries[f"{key}.{f}.{SHAPE}"]) for f in value.keys}
            found[key] = TracedRecords(key, value, tensors)
    return found


def cut_records(fields: RecordKeys, tensors: Sequence[Tensor]) -> list[Any]:
    """Return the list of dicts, or of tensors, that was padded.

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
    if fields.is_bare:
        return columns[0]
    return [dict(zip(fields.keys, row, strict=True)) for row in zip(*columns, strict=True)]
