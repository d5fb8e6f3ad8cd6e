"""How many samples a batch holds, and batches of another number of samples; loss units that are never cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad

from gpp_plugin.config.key_names import name_of, place_of
from gpp_plugin.errors import CaptureError, ConfigError

# How long the sequences of a batch are, and the same batch with longer or shorter ones.
#
# A length is the last axis of an entry. An entry that is named, or one that texts have, is an *anchor*; integer
# entries as long as it go with it:
#
#   input_ids [4, 512]   attention_mask [4, 512]   labels [4, 128]   image_grid_thw [6, 3]   pixel_values [4, 3, 20, 20]
#     anchors input_ids and labels: input_ids -> (input_ids, attention_mask), labels -> (labels); the others stay

ANCHORS = ("input_ids", "decoder_input_ids", "labels")
"""Entries that have a length where none is named."""

LengthOf = int | Mapping[str, int]
"""The length of all texts, or of the entries that are named."""


def length_entries(batch: Mapping[str, Any], requested: LengthOf) -> dict[str, tuple[str, ...]]:
    """Return each anchor with the entries that are as long as it, itself included.

    Args:
        requested: a number, or an object whose keys are the anchors.

    Raises:
        ConfigError: an entry that is named is not there, or none is a text.
    """
    texts = {
        key: value.shape[-1]
        for key, value in batch.items()
        if isinstance(value, Tensor) and value.ndim >= 2 and not value.is_floating_point()
    }
    if isinstance(requested, Mapping):
        named = {k: v.shape[-1] for k, v in batch.items() if isinstance(v, Tensor) and v.ndim >= 2}
        missing = sorted(requested.keys() - named.keys())
        if missing:
            raise ConfigError(
                f"{place_of('lengths')}: {missing[0]!r} is no entry of the batch with a length; give some of "
                f"{', '.join(sorted(named))}"
            )
        anchors = {key: named[key] for key in requested}
    else:
        anchors = {key: texts[key] for key in ANCHORS if key in texts}
        # other names than HuggingFace's: the longest text
        if not anchors and texts:
            longest = max(texts, key=lambda key: texts[key])
            anchors = {longest: texts[longest]}
    if not anchors:
        raise ConfigError(
            f"{place_of('lengths')}: no entry of the batch ({', '.join(sorted(batch))}) holds texts; name those that "
            'have a length, as {"max": {"input_values": 16000}}, or remove the key'
        )
    found: dict[str, tuple[str, ...]] = {}
    for anchor, size in anchors.items():
        taken = {key for keys in found.values() for key in keys} | anchors.keys()
        found[anchor] = (anchor, *(k for k, length in texts.items() if length == size and k not in taken))
    return found


def length_of(requested: LengthOf, anchor: str) -> int:
    """Return the length that is requested for an anchor."""
    return requested[anchor] if isinstance(requested, Mapping) else requested


def with_lengths(batch: Mapping[str, Any], lengths: Mapping[str, int]) -> dict[str, Any]:
    """Return a batch whose entries have these lengths: cut at their ends, or their last column repeated.

    Nothing that stands for something else (the place of an image) is there more often than before.

    Args:
        lengths: by entry; others stay as they are.
    """
    # ids [[5, 6, 7]] to 5: [[5, 6, 7, 7, 7]]; the mask of a padded row continues with 0, that of another with 1
    found = dict(batch)
    for key, length in lengths.items():
        value: Tensor = batch[key]
        known = value.shape[-1]
        if length <= known:
            found[key] = value[..., :length].contiguous()
        else:
            last = value[..., -1:].expand(*value.shape[:-1], length - known)
            found[key] = torch.cat([value, last], dim=-1)
    return found


def sample_with_lengths(batch: Mapping[str, Any], typical: tuple[LengthOf, ...]) -> dict[str, Any]:
    """Return a sample batch with the typical lengths that are nearest to their mean.

    Raises:
        ConfigError: as `length_entries`.
    """
    entries = length_entries(batch, typical[0])
    means = {anchor: sum(length_of(one, anchor) for one in typical) / len(typical) for anchor in entries}
    nearest = min(
        typical, key=lambda one: sum(abs(length_of(one, a) / mean - 1) for a, mean in means.items())
    )
    lengths = {key: length_of(nearest, anchor) for anchor, keys in entries.items() for key in keys}
    return with_lengths(batch, lengths)


class WholeUnit(dict[str, Any]):
    """The tensors of one loss unit that is never cut: no axis of them need hold samples.

    ``pixel_values [40, 96]`` of all images' patches beside ``input_ids [2, 20]`` is one of two samples.

    Args:
        num_samples: of the unit.
        readings: what Python reads of it, where that is known already; its tensors may lack values then.
    """

    def __init__(
        self, batch: Mapping[str, Any], *, num_samples: int, readings: tuple[Any, ...] | None = None
    ) -> None:
        super().__init__(batch)
        self.num_samples = num_samples
        self.readings = readings


def as_unit(batch: Mapping[str, Any], num_samples: int) -> WholeUnit:
    """Return the batch as one loss unit of ``num_samples`` samples."""
    return batch if isinstance(batch, WholeUnit) else WholeUnit(batch, num_samples=num_samples)


def is_counted(batch: Mapping[str, Any]) -> bool:
    """Return whether samples lie along axis 0 of the batch's tensors, whole rows of each."""
    try:
        count_samples(batch)
    except CaptureError:
        return False
    return True


def is_clearly_counted(batch: Mapping[str, Any]) -> bool:
    """Return whether one size is that of the samples beyond doubt.

    Of a graph with nodes [12, 8], edges [2, 20] and a label [1] it is not: 12, 2 or 1 may be.
    """
    if not is_counted(batch) or isinstance(batch, WholeUnit):
        return isinstance(batch, WholeUnit)
    samples = count_samples(batch)
    return len(likely_counts(batch)) == 1 and (samples == 1 or 1 not in _leading_sizes(batch).values())


def likely_counts(batch: Mapping[str, Any]) -> list[int]:
    """Return the leading sizes that most tensors of a batch share, the smallest first: several where it is a tie."""
    # input_ids [1, 40], labels [1, 40], cu_seq_lens_q [3], cu_seq_lens_k [3]: one row, and where two texts lie in it
    leading = _leading_sizes(batch)
    tables = [v for v in batch.values() if isinstance(v, torch.Tensor) and v.dim() > 1]
    is_one_row = bool(tables) and all(table.shape[0] == 1 for table in tables)
    votes = Counter(size for size in leading.values() if size > 1 or is_one_row) or Counter(leading.values())
    most = max(votes.values(), default=0)
    return sorted(size for size, count in votes.items() if count == most)


def count_samples(batch: Mapping[str, Any]) -> int:
    """Return the number of samples of a batch dict.

    That is the leading size most tensors share (the smallest one on a tie); sizes of one do not count where a tensor of
    two axes or more has another one, so that a single row of positions may accompany the samples.

    Raises:
        CaptureError: no tensor has an axis, or a leading size is no multiple of the samples.
    """
    if isinstance(batch, WholeUnit):
        return batch.num_samples
    # pixel_values [16, 3, 8, 8], input_ids [8, 16], attention_mask [8, 16], position_ids [1, 16]: 8 has two votes, 1
    # none beside larger ones; so 8 samples, and two images (rows) a sample.
    leading = _leading_sizes(batch)
    if not leading:
        raise CaptureError(f"the batch has no tensor with a batch axis; its keys are {sorted(batch)}")
    samples = likely_counts(batch)[0]
    odd = {key: size for key, size in leading.items() if size > 1 and size % samples}
    if odd or samples == 0:
        raise CaptureError(
            f"leading sizes {leading} are not multiples of {samples} samples; every batch tensor needs "
            "one or more whole rows a sample along axis 0"
        )
    return samples


def _leading_sizes(batch: Mapping[str, Any]) -> dict[str, int]:
    return {k: v.shape[0] for k, v in batch.items() if isinstance(v, torch.Tensor) and v.dim() > 0}


def rows_per_sample(batch: Mapping[str, Any]) -> dict[str, int]:
    """Return rows a sample of each tensor entry; 0 for entries without a batch axis.

    Raises:
        CaptureError: as `count_samples`.
    """
    samples = count_samples(batch)
    rows = {}
    for key, value in batch.items():
        if isinstance(value, torch.Tensor):
            is_cut = not isinstance(batch, WholeUnit) and value.dim() > 0 and value.shape[0] % samples == 0
            rows[key] = value.shape[0] // samples if is_cut else 0
    return rows


def resize_batch(batch: Mapping[str, Any], num_samples: int) -> dict[str, Any]:
    """Return the batch with its samples repeated in turn, or cut, to ``num_samples``.

    Raises:
        CaptureError: as `count_samples`.
        ValueError: ``num_samples`` is not positive.
    """
    if num_samples < 1:
        raise ValueError(f"num_samples must be positive, got {num_samples}")
    samples = count_samples(batch)
    if isinstance(batch, WholeUnit):
        if num_samples != samples:
            raise CaptureError(
                f"a model that takes whole loss units of {samples} samples cannot be run on {num_samples}; keep "
                f"{name_of('loss_unit')} as it is"
            )
        return batch
    rows = rows_per_sample(batch)
    # 3 samples a b c to 7: three times a b c, of which a b c a b c a are used.
    times = -(-num_samples // samples)
    resized = dict(batch)
    for key, count in rows.items():
        if count and num_samples != samples:
            value = batch[key]
            repeated = torch.cat([value] * times) if times > 1 else value
            resized[key] = repeated[: num_samples * count]
    return resized


# Batch entries that are lists of dicts of tensors, or of tensors, one a sample, as padded tensors.
#
# ``labels = [{"boxes": [3, 4]}, {"boxes": [1, 4]}]`` becomes entries with the samples along axis 0, which travel, are
# cut and joined like any other, and a constant that says what they were:
#
#     "labels"              RecordKeys(("boxes",))
#     "labels.boxes"        [2, 4, 4]    padded with zeros; the first axis of a tensor to a power of two
#     "labels.boxes.shape"  [2, 2]       (3, 4) and (1, 4)
#
# A list of tensors (a segmenter's masks) is taken for one of dicts with one field, ``tensor``.
#
# While a model is traced such an entry is a `TracedRecords`, of which nothing can be read: only a module or a loss that
# runs as it is gets the list of dicts again, cut to each tensor's own shape.


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


def check_batch(batch: Any) -> Mapping[str, Any]:
    """Return ``batch`` if it is a dict with at least one tensor.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"a batch is a {type(batch).__name__}; give dicts of tensors keyed by the model's argument names, "
            "as HuggingFace collators make them"
        )
    if not any(isinstance(value, Tensor) for value in batch.values()):
        raise ConfigError(f"a batch has no tensors, only {sorted(batch)}; give the model's inputs as tensors")
    return batch
