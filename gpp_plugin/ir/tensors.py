"""What is known of a tensor before it exists: dtype, shape, and how its rows belong to samples; ranges of samples."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass

from gpp_plugin.ir.typed_leaves import Count, Index

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex64": 8, "complex128": 16,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip

TRAINING_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""What a model may be trained in, as descriptions of devices name it -> as a `TensorSpec` does."""


def element_bytes(dtype: str) -> int:
    """Return the bytes of a number of one of `TRAINING_DTYPES`."""
    return DTYPE_BYTES[TRAINING_DTYPES[dtype]]


class LayoutKind(enum.Enum):
    """How a tensor depends on the samples of a micro-batch."""

    BATCH = "batch"
    """One block of rows a sample along one axis; may be split and concatenated there."""
    UNIFORM = "uniform"
    """The same for every sample (T5's position bias); sent once a micro-batch, gradients summed."""
    UNIT = "unit"
    """One value a loss unit (a mean over the samples); consumers compute on the same whole units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the samples of a tensor lie.

    Args:
        axis: the batch axis of a BATCH tensor.
        rows_per_sample: length of that axis over the number of samples, e.g. heads x 1 after a view.
    """

    kind: LayoutKind
    axis: Index = 0
    rows_per_sample: Index = 1


UNIFORM = Layout(kind=LayoutKind.UNIFORM)
UNIT = Layout(kind=LayoutKind.UNIT)


def batch_layout(axis: int = 0, rows_per_sample: int = 1) -> Layout:
    """Return the layout of a tensor whose samples lie along ``axis``."""
    return Layout(kind=LayoutKind.BATCH, axis=axis, rows_per_sample=rows_per_sample)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Name, dtype and shape of one tensor as captured with ``num_samples`` samples.

    Args:
        shape: sizes at ``num_samples`` samples; a BATCH axis scales with the samples.
        requires_grad: whether a gradient flows back through this tensor in training.
    """

    name: str
    dtype: str
    shape: tuple[Index, ...]
    num_samples: Count
    layout: Layout
    requires_grad: bool = False

    def shape_for(self, num_samples: int) -> tuple[int, ...]:
        """Return the shape when computed on ``num_samples`` samples."""
        if self.layout.kind is not LayoutKind.BATCH:
            return self.shape
        # [16, 7, 32] at 8 samples with axis 0 and 2 rows a sample (two images each): [6, 7, 32] at 3
        axis = self.layout.axis
        rows = num_samples * self.layout.rows_per_sample
        return (*self.shape[:axis], rows, *self.shape[axis + 1 :])

    def bytes_for(self, num_samples: int) -> int:
        """Return the size in bytes when computed on ``num_samples`` samples."""
        return math.prod(self.shape_for(num_samples)) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class SampleRange:
    """``num_samples`` consecutive samples of a mini-batch, from ``first_sample`` on."""

    first_sample: int
    num_samples: int

    @property
    def end(self) -> int:
        """Return the first sample after the range."""
        return self.first_sample + self.num_samples

    def overlap(self, other: SampleRange) -> SampleRange | None:
        """Return the samples in both ranges, or None."""
        # This one comparison is all of resharding: what rank a made and rank b needs, whatever their stages'
        # micro-batches and degrees, is the overlap of two ranges. [0, 8) and [6, 12) have [6, 8) in common; [0, 4)
        # and [4, 8) nothing.
        first = max(self.first_sample, other.first_sample)
        end = min(self.end, other.end)
        return SampleRange(first_sample=first, num_samples=end - first) if first < end else None

    def first(self) -> SampleRange:
        """Return the range of only the first sample."""
        return SampleRange(first_sample=self.first_sample, num_samples=1)

    def halves(self) -> tuple[SampleRange, SampleRange]:
        """Return the first and the second half; of an odd number the second is the longer one."""
        middle = self.num_samples // 2
        return (
            SampleRange(first_sample=self.first_sample, num_samples=middle),
            SampleRange(first_sample=self.first_sample + middle, num_samples=self.num_samples - middle),
        )


def nearest_divisors(number: int, wanted: int) -> tuple[int, ...]:
    """Return the divisors of ``number`` next below and next above ``wanted``, as far as there are any.

    >>> nearest_divisors(64, 10), nearest_divisors(64, 100)
    ((8, 16), (64,))
    """
    below = [d for d in divisors(number) if d < wanted][-1:]
    above = [d for d in divisors(number) if d > wanted][:1]
    return (*below, *above)


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, increasing."""
    # they come in pairs d, number / d, of which one is at most the root
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def merged_ranges(ranges: Iterable[SampleRange]) -> tuple[SampleRange, ...]:
    """Return the samples of all these ranges as ranges with gaps between them, in order.

    >>> pairs = [SampleRange(first_sample=first, num_samples=2) for first in (6, 0, 2)]
    >>> [(merged.first_sample, merged.end) for merged in merged_ranges(pairs)]
    [(0, 4), (6, 8)]
    """
    merged: list[SampleRange] = []
    for each in sorted(ranges):
        if merged and each.first_sample <= merged[-1].end:
            first = merged[-1].first_sample
            merged[-1] = SampleRange(first_sample=first, num_samples=max(merged[-1].end, each.end) - first)
        else:
            merged.append(each)
    return tuple(merged)


def even_ranges(count: int, number: int) -> list[range]:
    """Return ``number`` runs of neighbours among so many, the first ones one longer.

    >>> even_ranges(5, 2)
    [range(0, 3), range(3, 5)]
    """
    ends = [at * (count // number) + min(at, count % number) for at in range(number + 1)]
    return [range(first, behind) for first, behind in zip(ends[:-1], ends[1:], strict=True)]


def part_range(length: int, number: int, part: int) -> range:
    """Return which elements of an axis part ``part`` of ``number`` holds; a part is empty where there are fewer.

    Unlike those of `even_ranges`, parts of two numbers nest: of 2 and 4, parts 0 and 1 of 4 are part 0 of 2.

    >>> [part_range(7, 3, part) for part in range(3)]
    [range(0, 2), range(2, 4), range(4, 7)]
    """
    return range(length * part // number, length * (part + 1) // number)


def adam_bytes(dtype: str) -> int:
    """Return what Adam holds of a trained parameter: two fp32 moments, and fp32 weights beside those of half precision.

    >>> adam_bytes("fp32"), adam_bytes("bf16")
    (8, 12)
    """
    return 8 if dtype == "fp32" else 12
