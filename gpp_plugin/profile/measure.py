"""Measured costs: every distinct block is run on the device at hand, forward and backward, at a few sizes.

Blocks run one at a time, in order, on what the blocks before them made from a real batch; values are dropped
after their last reader. Blocks with the same operators, shapes and gradient flags (encoder layers 0 to 23) are
measured once and share the result unless ``share_identical`` is off. Parameters on the meta device get random values
for as long as their block is measured.

What a block saves for backward is counted by storage: parameters and model inputs, which are there anyway, never,
and a tensor that several blocks save (an encoder's output under every cross-attention, a mask) once, at the first
block. `Profile.shared` lists the other blocks that save it, so that the bytes of any stage's blocks add up to the
stage's.

Source: this project
Tests: tests/profile/test_measure.py
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpp_plugin.capture.captured_graph import CapturedGraph
from gpp_plugin.errors import ProfileError
from gpp_plugin.ir.block_graph import Block, BlockGraph, OpGraph
from gpp_plugin.ir.profile import BlockCost, Profile
from gpp_plugin.ir.serialize import fingerprint
from gpp_plugin.profile.analytic_costs import (
    ADAM_STATE_BYTES,
    default_sample_counts,
    pending_bytes,
    tied_costs,
    validate_sample_counts,
)
from gpp_plugin.profile.block_survey import BlockResult, BlockSurvey, HeldStorages, fit_bytes, shared_storages
from gpp_plugin.profile.machine import CostStore, describe_device, processor_name
from gpp_plugin.profile.timing import clock_of
from gpp_plugin.runtime.random_streams import restored_streams

logger = logging.getLogger(__name__)

BLOCK_REPEATS = 7
NODE_REPEATS = 50
"""Operators are quick and their times noisy: the paper's number of timed runs (DawnPiper, C.1)."""

Progress = Callable[[int, int, str], None]
"""Called with (blocks done, blocks in all, what comes next)."""


def profile_blocks(
    captured: CapturedGraph,
    block_graph: BlockGraph,
    *,
    model_state: Mapping[str, Tensor],
    batch: Mapping[str, Any],
    capture_at: Callable[[int], CapturedGraph] | None = None,
    sample_counts: Sequence[int] | None = None,
    threads: int | None = None,
    repeats: int = BLOCK_REPEATS,
    optimizer_bytes_per_parameter: float = ADAM_STATE_BYTES,
    share_identical: bool = True,
    cache_dir: str | Path | None = None,
    use_cache: bool = True,
    with_split: bool = False,
    progress: Progress | None = None,
) -> Profile:
    """Measure every block of ``block_graph`` and return its costs.

    Args:
        captured: the graph ``block_graph`` was made from; it is measured on its device.
        model_state: parameters and buffers by HuggingFace name; those on the meta device get random values.
        batch: a real batch; as many samples as needed are taken from it, repeated where it is short.
        capture_at: returns the graph captured at a number of samples; needed for counts other than the captured.
        sample_counts: samples at which to time, increasing; powers of two up to the captured number by default.
        threads: CPU threads while measuring (what one rank will have); unchanged if None.
        repeats: fewest timed runs of which the median counts; fast blocks are run more often.
        optimizer_bytes_per_parameter: of a trainable parameter's state (8: Adam; 12: with an fp32 master copy).
        share_identical: measure one of each group of identical blocks.
        cache_dir: directory of the `CostStore`; its default if None.
        use_cache: look a stored profile up first, and store what is measured.
        with_split: time backwards in two parts too, at the largest number of samples, for zero-bubble schedules.

    Raises:
        ProfileError: a block cannot be run; the message names it.
        ValueError: ``sample_counts`` is not increasing and positive, or needs ``capture_at``.
    """
    # Counts (1, 8, 64) of a 12-block model: three walks over the blocks, one a capture, with times of each block and
    # bytes of each storage at 1, 8 and 64 samples; then one `BlockCost` a block, with all three.
    captured_at, has_capture_at = captured.op_graph.num_samples, capture_at is not None
    counts = _sample_counts(sample_counts, captured_at, has_capture_at=has_capture_at)
    where = captured.device
    num_threads = threads or torch.get_num_threads()
    name = describe_device(where, num_threads)
    how: dict[str, Any] = {"repeats": repeats, "share_identical": share_identical}
    survey = functools.partial(BlockSurvey, block_graph=block_graph, state=model_state, batch=batch, **how)

    def measure_all() -> Profile:
        with _undisturbed(where, num_threads):
            found = _survey_all(survey, captured, counts, capture_at, with_split, progress)
        return _make_profile(captured, block_graph, name, counts, *found, optimizer_bytes_per_parameter)

    how |= {"optimizer_bytes_per_parameter": optimizer_bytes_per_parameter, "with_split": with_split}
    key = _store_key(captured, block_graph, counts, device=name, **how, **clock_of(where.type))
    return CostStore(cache_dir).find_or_measure(key, measure_all) if use_cache else measure_all()


def _store_key(
    captured: CapturedGraph, block_graph: BlockGraph, counts: Sequence[int], **options: object
) -> dict[str, object]:
    """Return all that a stored profile depends on.

    Args:
        options: how it is measured.
    """
    return {
        "graph": block_graph.fingerprint,
        "operators": fingerprint(captured.op_graph),
        "unpadded": list(captured.analysis.unpadded),
        "is_training": captured.is_training,
        "samples": list(counts),
        "processor": processor_name(),
        "torch": str(torch.__version__),
        # what the bytes are of: older files count otherwise
        "counts": "shared storages and ties, no model inputs (contiguous), what is received, plain biases, pending",
        **options,
    }


def _survey_all(
    survey: Callable[..., BlockSurvey],
    captured: CapturedGraph,
    counts: Sequence[int],
    capture_at: Callable[[int], CapturedGraph] | None,
    with_split: bool,
    progress: Progress | None,
) -> tuple[list[dict[str, BlockResult]], list[HeldStorages]]:
    """Return what every block costs and saves, at each number of samples; peaks and splits at the largest."""
    # Both lists are by number of samples, as ``counts``: at (1, 8, 64) results[2]["head"] is the head at 64 samples.
    # Peaks and splits take separate runs, and one number of each is needed: the one at full load.
    results, held = [], []
    for position, n in enumerate(counts):
        at_n = captured if n == captured.op_graph.num_samples else _capture(capture_at, n)
        is_largest = n == counts[-1]
        taken = survey(captured=at_n, with_peak=is_largest, with_split=with_split and is_largest)

        def report(done: int, total: int, text: str, survey: int = position) -> None:
            logger.debug("profiling %s", text)
            if progress is not None:
                progress(survey * total + done, len(counts) * total, text)

        results.append(taken.run(report))
        held.append(taken.held)
    return results, held


def _make_profile(
    captured: CapturedGraph,
    block_graph: BlockGraph,
    device: str,
    counts: tuple[int, ...],
    results: Sequence[Mapping[str, BlockResult]],
    held: Sequence[HeldStorages],
    optimizer_bytes_per_parameter: float,
) -> Profile:
    """Put together what was measured at each of ``counts`` samples."""
    unit = captured.op_graph.num_samples
    nodes = {node.name: node for node in captured.op_graph.nodes}
    parameters = {name: p for p in captured.op_graph.parameters for name in (p.name, *p.aliases)}
    costs = []
    for block in block_graph.blocks:
        found = [at_n[block.name] for at_n in results]
        # Bytes saved are a line in the samples, fitted; times stay as they were measured, and are interpolated where
        # read (`BlockCost.forward_us_for`): near one sample a launch dominates, and no line goes through both ends.
        per_sample, fixed = fit_bytes(counts, [result.saved_bytes for result in found], unit)
        trained = _trainable_parameters(block, captured.op_graph)
        pending = pending_bytes([nodes[name] for name in block.nodes], parameters)
        costs.append(
            BlockCost(
                block=block.name,
                samples=counts,
                forward_us=tuple(result.forward_us for result in found),
                backward_us=tuple(result.backward_us for result in found),
                saved_bytes_per_sample=per_sample,
                saved_bytes_fixed=fixed,
                parameter_bytes=block.parameter_bytes,
                gradient_bytes=block.trainable_bytes,
                optimizer_bytes=round(trained * optimizer_bytes_per_parameter),
                transient_bytes_per_sample=found[-1].transient_bytes / counts[-1],
                split_factor=found[-1].split.factor,
                input_share=found[-1].split.input_share,
                pending_bytes_per_sample=pending / unit,
            )
        )
    return Profile(
        graph=block_graph.fingerprint,
        device=device,
        source="measured",
        costs=tuple(costs),
        shared=shared_storages(counts, held, unit),
        tied=tied_costs(block_graph, captured.op_graph, optimizer_bytes_per_parameter),
    )


def _trainable_parameters(block: Block, op_graph: OpGraph) -> int:
    names = set(block.parameters)
    return sum(
        torch.Size(p.shape).numel()
        for p in op_graph.parameters
        if p.requires_grad and not p.is_buffer and not names.isdisjoint((p.name, *p.aliases))
    )


def _sample_counts(wanted: Sequence[int] | None, captured: int, *, has_capture_at: bool) -> tuple[int, ...]:
    if wanted is None:
        return default_sample_counts(captured) if has_capture_at else (captured,)
    counts = validate_sample_counts(wanted)
    if counts != (captured,) and not has_capture_at:
        raise ValueError(
            f"sample_counts {list(counts)} need capture_at; the graph was captured at {captured} only"
        )
    return counts


def _capture(capture_at: Callable[[int], CapturedGraph] | None, num_samples: int) -> CapturedGraph:
    assert capture_at is not None
    captured = capture_at(num_samples)
    if captured.op_graph.num_samples != num_samples:
        raise ProfileError(
            f"capture_at({num_samples}) returned a graph of {captured.op_graph.num_samples} samples; "
            "it must capture at the number that is passed"
        )
    return captured


@contextmanager
def _undisturbed(device: torch.device, threads: int) -> Iterator[None]:
    """Measure with ``threads`` CPU threads; leave thread count and random state as they were."""
    before = torch.get_num_threads()
    with restored_streams(device):
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)
            if device.type == "cuda":
                torch.cuda.empty_cache()  # other ranks, and what comes next, may need what measuring reserved
