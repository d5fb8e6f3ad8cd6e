"""What is known of a tensor before it exists: dtype, shape, and how its rows belong to samples."""

from __future__ import annotations

import enum
import math
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
    rows_per_sample: Count = 1


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
