"""From the user's batches to the rows each task reads: collecting, checking, slicing.

A mini-batch is a dict of tensors whose leading dimensions hold B samples, ``rows_per_sample`` rows
each; entries that are not tensors are constants of the capture.

Source: this project
Tests: tests/runtime/test_float_inputs.py
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.plan import Stage
from gpp_plugin.ir.samples import SampleRange
from gpp_plugin.ir.tensors import LayoutKind, TensorSpec

Batch = Mapping[str, Any]


def collect_mini_batch(batches: Iterable[Batch], mini_batch: int, count: Any) -> dict[str, Any]:
    """Take batches until they hold ``mini_batch`` samples and join them.

    Args:
        batches: an iterator; only as many batches as needed are taken from it.
        count: function from a batch to its number of samples.

    Raises:
        StopIteration: the iterator ended before the first batch.
        ConfigError: it ended early, a batch does not fit, or shapes differ within the mini-batch.
    """
    iterator = iter(batches)
    taken: list[Batch] = [check_batch(next(iterator))]
    total = count(taken[0])
    while total < mini_batch:
        try:
            taken.append(check_batch(next(iterator)))
        except StopIteration:
            raise ConfigError(
                f"the data iterator ended after {total} of train_batch_size={mini_batch} samples; drop the last "
                "incomplete mini-batch or repeat the data"
            ) from None
        total += count(taken[-1])
    if total != mini_batch:
        raise ConfigError(
            f"the data iterator's batches hold {[count(b) for b in taken]} samples, which do not sum to "
            f"train_batch_size={mini_batch}; choose a loader batch size that divides it"
        )
    return join_batches(taken)


def check_batch(batch: Any) -> Batch:
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


def join_batches(batches: Sequence[Batch]) -> dict[str, Any]:
    """Concatenate batches along the leading dimension; constants must agree.

    Raises:
        ConfigError: keys differ, or tensors are padded to different lengths within one mini-batch.
    """
    if len(batches) == 1:
        return dict(batches[0])
    joined: dict[str, Any] = {}
    if any(batch.keys() != batches[0].keys() for batch in batches):
        raise ConfigError(
            f"batches of one mini-batch have unlike keys {sorted({tuple(sorted(b)) for b in batches})}; "
            "collate all of them alike"
        )
    for key, value in batches[0].items():
        parts = [batch[key] for batch in batches]
        if not isinstance(value, Tensor):
            if any(isinstance(part, Tensor) or part != value for part in parts):
                raise ConfigError(
                    f"{key} has values {parts} within one mini-batch; what is no tensor must be the same in all its "
                    "batches"
                )
            joined[key] = value
            continue
        shapes = {tuple(p.shape[1:]) if isinstance(p, Tensor) else None for p in parts}
        if len(shapes) > 1:
            raise ConfigError(
                f"{key} has shapes {sorted(map(str, shapes))} within one mini-batch; collate the whole mini-batch "
                "at once (or pad to a fixed length), so that padding is the same for all its samples"
            )
        joined[key] = torch.cat([part for part in parts if part is not None])
    return joined


def slice_batch(
    batch: Batch,
    keys: Sequence[str],
    *,
    stage: Stage,
    rank: int,
    num_micro_batches: int,
    specs: Mapping[str, TensorSpec],
    device: torch.device,
    dtype: torch.dtype | None,
) -> list[tuple[Tensor, ...]]:
    """Return the rows ``rank`` reads in each micro-batch of its stage, in the order of ``keys``.

    All are contiguous, as in the capture: where an operator had to copy them first, autograd would keep the copy, and
    what a stage keeps would depend on how the user's batch lies in memory.

    Args:
        specs: the captured model inputs by batch key (their layouts).
        dtype: floating inputs are cast to it; None keeps them.
    """
    # Stage of micro-batches of 4 samples on 2 ranks, mini-batch 8: rank 1 of the stage reads samples 2..3 and 6..7.
    # Of an input with 3 rows a sample (three images, say) that is rows 6..11 and 18..23.
    samples = [stage.samples(micro_batch, rank) for micro_batch in range(num_micro_batches)]
    columns = [_rows(batch[key], specs[key], samples, device, dtype) for key in keys]
    return [tuple(column[i] for column in columns) for i in range(num_micro_batches)]


def _rows(
    tensor: Tensor,
    spec: TensorSpec,
    samples: Sequence[SampleRange],
    device: torch.device,
    dtype: torch.dtype | None,
) -> list[Tensor]:
    """Return the rows of each range; what has no batch axis is one tensor for all of them."""
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    is_async = device.type == "cuda"  # to the host, a copy must be finished before it is read

    def moved(part: Tensor) -> Tensor:
        return part.to(device=device, dtype=wanted, non_blocking=is_async).contiguous()

    if spec.layout.kind is not LayoutKind.BATCH:
        return [moved(tensor)] * len(samples)
    axis, rows = spec.layout.axis, spec.layout.rows_per_sample
    return [moved(tensor.narrow(axis, s.first_sample * rows, s.num_samples * rows)) for s in samples]


def take_samples(batch: Batch, first: int, count: int, total: int) -> dict[str, Any]:
    """Return ``count`` samples of a batch of ``total`` from ``first`` on; what has no row a sample stays whole."""

    def rows(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim == 0 or value.shape[0] % total:
            return value
        per_sample = value.shape[0] // total
        return value[first * per_sample : (first + count) * per_sample]

    return {key: rows(value) for key, value in batch.items()}


def shape_key(batch: Batch, num_samples: int) -> tuple[Any, ...]:
    """Return what a compiled shape depends on: dtypes, shapes beyond the samples, constants."""
    # Rows are told by sample, not as they are: 8 images at 4 samples and 16 at 8 are one shape, (.., 2.0, ..), as the
    # code of a stage is for a number of samples of its own, however many the mini-batch has.
    parts: list[Any] = []
    for key in sorted(batch):
        value = batch[key]
        if isinstance(value, Tensor):
            rows = value.shape[0] / num_samples if value.ndim else 0.0
            parts.append((key, str(value.dtype), rows, tuple(value.shape[1:])))
        else:
            parts.append((key, repr(value)))
    return tuple(parts)


def batch_checksum(batch: Batch) -> int:
    """Return a number that tells different mini-batches apart (up to 64 KiB of each tensor).

    It is below 2^20, so that fp64 holds the sum of its squares over 8,192 ranks exactly.
    """
    checksum = 0
    for key in sorted(batch):
        value = batch[key]
        if isinstance(value, Tensor) and value.numel():
            flat = value.detach().reshape(-1)
            step = max(1, flat.numel() * flat.element_size() // 65536)
            data = flat[::step].contiguous().cpu().view(torch.uint8).numpy().tobytes()
            checksum = zlib.crc32(data, checksum)
    return checksum & 0xFFFFF
