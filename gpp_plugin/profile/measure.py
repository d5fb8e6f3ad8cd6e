"""Measured costs: every distinct block is run on the device at hand, forward and backward, at a few sizes.

Blocks run one at a time, in order, on what the blocks before them made from a real batch; values are dropped
after their last reader. Blocks with the same operators, shapes and gradient flags (encoder layers 0 to 23) are
measured once and share the result unless asked otherwise. Parameters on the meta device get random values for
as long as their block is measured.

What a block saves for backward is counted by storage: parameters and model inputs, which are there anyway, never,
and a tensor that several blocks keep (an encoder's output under every cross-attention, a mask) once, at the first
block. `Profile.shared` says who else keeps it, so that the bytes of any stage's blocks add up to the stage's.
"""

from __future__ import annotations

import functools
import logging
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpp_plugin.capture.graph import CapturedGraph
from gpp_plugin.capture.samples import resize_batch
from gpp_plugin.errors import GppError, ProfileError
from gpp_plugin.ir.block_graph import Block, BlockGraph
from gpp_plugin.ir.op_graph import OpGraph, Parameter
from gpp_plugin.ir.profile import BlockCost, Profile, SharedStorage
from gpp_plugin.ir.serialize import fingerprint
from gpp_plugin.profile.analytic import (
    ADAM_STATE_BYTES,
    default_sample_counts,
    tied_costs,
    validate_sample_counts,
)
from gpp_plugin.profile.code import BlockCode, block_codes
from gpp_plugin.profile.split_cost import CANNOT_SPLIT, NOT_MEASURED, SplitCost, measure_split_cost
from gpp_plugin.profile.store import CostStore
from gpp_plugin.profile.timing import Measurement, Operands, measure
from gpp_plugin.runtime.stage_module import StageFunction

logger = logging.getLogger(__name__)

BLOCK_REPEATS = 7
SPLIT_REPEATS = 3
"""Fewest timed runs of a split backward: one number is wanted for each block, not one for each size."""

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
    device: torch.device | str | None = None,
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
        captured: the graph ``block_graph`` was made from.
        model_state: parameters and buffers by HuggingFace name; those on the meta device get random values.
        batch: a real batch; as many samples as needed are taken from it, repeated where it is short.
        capture_at: returns the graph captured at a number of samples; needed for counts other than the captured.
        sample_counts: samples at which to time, increasing; powers of two up to the captured number by default.
        device: where to measure; the device of the capture by default.
        threads: CPU threads while measuring (what one rank will have); unchanged if None.
        repeats: fewest timed runs of which the median counts; fast blocks are run more often.
        optimizer_bytes_per_parameter: optimizer state for each trainable parameter (8: Adam in fp32; 12: Adam
            with an fp32 master copy).
        share_identical: measure one of each group of identical blocks.
        cache_dir: directory of the `CostStore`; its default if None.
        use_cache: look a stored profile up first, and store what is measured.
        with_split: time backwards in two parts too, at the largest number of samples, for zero-bubble schedules.

    Raises:
        ProfileError: a block cannot be run; the message names it.
        ValueError: ``sample_counts`` is not increasing and positive, or needs ``capture_at``.
    """
    captured_samples = captured.op_graph.num_samples
    counts = _sample_counts(sample_counts, captured_samples, has_capture_at=capture_at is not None)
    where = captured.device if device is None else torch.device(device)
    num_threads = threads or torch.get_num_threads()
    name = describe_device(where, num_threads)

    survey = functools.partial(
        _Survey,
        block_graph=block_graph,
        state=model_state,
        batch=batch,
        device=where,
        repeats=repeats,
        share_identical=share_identical,
    )

    def measure_all() -> Profile:
        with _undisturbed(where, num_threads):
            results, held = _survey_all(survey, captured, counts, capture_at, with_split, progress)
        costs = tuple(
            _block_cost(
                block,
                counts,
                [at_n[block.name] for at_n in results],
                round(_trainable_parameters(block, captured.op_graph) * optimizer_bytes_per_parameter),
                unit=captured_samples,
            )
            for block in block_graph.blocks
        )
        return Profile(
            graph=fingerprint(block_graph),
            device=name,
            source="measured",
            costs=costs,
            shared=_shared_storages(counts, held, captured_samples),
            tied=tied_costs(block_graph, captured.op_graph, optimizer_bytes_per_parameter),
        )

    if not use_cache:
        return measure_all()
    key = {
        "graph": fingerprint(block_graph),
        "operators": fingerprint(captured.op_graph),
        "is_training": captured.is_training,
        "samples": list(counts),
        "device": name,
        "processor": processor_name(),
        "torch": str(torch.__version__),
        "optimizer_bytes_per_parameter": optimizer_bytes_per_parameter,
        "share_identical": share_identical,
        "repeats": repeats,
        "with_split": with_split,
        # what the bytes are of: older files count otherwise
        "counts": "shared storages and ties, no model inputs (contiguous), what is received",
    }
    return CostStore(cache_dir).find_or_measure(key, measure_all)


def _survey_all(
    survey: Callable[..., _Survey],
    captured: CapturedGraph,
    counts: Sequence[int],
    capture_at: Callable[[int], CapturedGraph] | None,
    with_split: bool,
    progress: Progress | None,
) -> tuple[list[dict[str, _BlockResult]], list[_Held]]:
    """Return what every block costs, and what is kept, at each number of samples; peaks and splits at the largest."""
    results, held = [], []
    for position, n in enumerate(counts):
        at_n = captured if n == captured.op_graph.num_samples else _capture(capture_at, n)
        is_largest = n == counts[-1]
        taken = survey(captured=at_n, with_peak=is_largest, with_split=with_split and is_largest)
        results.append(taken.run(_report_from(progress, position, len(counts))))
        held.append(taken.held)
    return results, held


def describe_device(device: torch.device, threads: int) -> str:
    """Return the device as a `Profile` names it, e.g. ``cpu (2 threads)``."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{device.type} ({threads} thread{'s' if threads != 1 else ''})"


def processor_name() -> str:
    """Return the CPU's model; a home directory, and the store in it, may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.processor()} x {os.cpu_count()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockResult:
    """What was measured of one block at one number of samples."""

    forward_us: float
    backward_us: float
    saved_bytes: int
    transient_bytes: int
    split: SplitCost


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """One piece of code as it was measured."""

    whole: Measurement
    split: SplitCost


class _Survey:
    """One pass over all blocks at one number of samples."""

    def __init__(
        self,
        *,
        captured: CapturedGraph,
        block_graph: BlockGraph,
        state: Mapping[str, Tensor],
        batch: Mapping[str, Any],
        device: torch.device,
        repeats: int,
        share_identical: bool,
        with_peak: bool,
        with_split: bool,
    ) -> None:
        self._captured = captured
        self._num_samples = captured.op_graph.num_samples
        self._state = state
        self._device = device
        self._repeats = repeats
        self._share = share_identical
        self._with_peak = with_peak
        self._with_split = with_split and captured.is_training
        self._codes = block_codes(captured, block_graph)
        resized = resize_batch(batch, self._num_samples)
        self._inputs = {
            spec.name: resized[spec.name].to(device=device, dtype=getattr(torch, spec.dtype)).contiguous()
            for spec in captured.op_graph.inputs
        }
        self._parameters = {n: p for p in captured.op_graph.parameters for n in (p.name, *p.aliases)}
        self._takes_gradient = {
            node.name: captured.is_training and node.output is not None and node.output.requires_grad
            for node in captured.op_graph.nodes
        }
        received = {name: self._inputs[name] for name in captured.op_graph.received}
        self._takes_gradient |= {
            spec.name: captured.is_training and spec.requires_grad
            for spec in captured.op_graph.inputs
            if spec.name in received
        }
        self._values: dict[str, Tensor] = dict(received)
        self._last_reader = _last_readers(self._codes)
        self._shared: dict[tuple[str, tuple[object, ...]], _Measured] = {}
        self._recurs = Counter(code.signature for code in self._codes)
        self.held = _Held()

    def run(self, report: Callable[[int, int, str], None]) -> dict[str, _BlockResult]:
        """Return what was measured of every block."""
        results = {}
        for position, code in enumerate(self._codes):
            report(position, len(self._codes), f"{code.block} at {self._num_samples} samples")
            saved, replica_us = 0, 0.0
            try:
                if code.replicas is not None:
                    replica = self._run(code.replicas).whole
                    replica_us = replica.forward_us
                    saved = self._keep(code.block, code.replicas, replica, replica.outputs)
                key = (code.signature, self._placement(code.function))
                block = self._shared.get(key)
                if block is None:
                    block = self._run(code.function)
                    outputs = block.whole.outputs
                else:
                    outputs = block.whole.copied_outputs()
            except GppError:
                raise
            except Exception as error:  # whatever an operator raises must say which block it was in
                raise ProfileError(
                    f"block {code.block!r} cannot be run at {self._num_samples} samples on {self._device}: "
                    f"{type(error).__name__}: {error}; lower the largest micro-batch if memory is short"
                ) from error
            if self._share and self._recurs[code.signature] > 1 and block.whole.has_own_outputs:
                self._shared[key] = block
            saved += self._keep(code.block, code.function, block.whole, outputs)
            results[code.block] = _BlockResult(
                forward_us=replica_us + block.whole.forward_us,
                backward_us=block.whole.backward_us,
                saved_bytes=saved,
                transient_bytes=block.whole.transient_bytes,
                split=block.split,
            )
            self._drop(position)
        return results

    def _placement(self, function: StageFunction) -> tuple[object, ...]:
        """Return how the received tensors lie in memory; operators take longer on some placements."""
        received = [self._values[name] for name in function.received]
        return tuple((tensor.stride(), tensor.untyped_storage().nbytes()) for tensor in received)

    def _run(self, function: StageFunction) -> _Measured:
        parameters = tuple(self._materialise(self._parameters[name]) for name in function.tensors)
        operands = Operands(
            call=function.call,
            parameters=parameters,
            inputs=tuple(self._inputs[key] for key in function.batch_inputs),
            received=tuple(self._values[name] for name in function.received),
            takes_gradient=tuple(self._takes_gradient[name] for name in function.received),
            is_training=self._captured.is_training,
            constants=function.constants,
        )
        whole = measure(operands, device=self._device, repeats=self._repeats, with_peak=self._with_peak)
        split = NOT_MEASURED
        if self._with_split and whole.backward_us > 0.0:
            try:
                split = measure_split_cost(operands, device=self._device, repeats=SPLIT_REPEATS)
            except RuntimeError as error:  # an operator that gives its gradients only once, all together
                logger.info("the backward of %s cannot be split: %s", function.outputs, error)
                split = CANNOT_SPLIT
        return _Measured(whole=whole, split=split)

    def _materialise(self, parameter: Parameter) -> Tensor:
        """Return the tensor to measure with: the real one detached, or random values for a meta one."""
        names = (parameter.name, *parameter.aliases)
        tensor = next((self._state[name] for name in names if name in self._state), None)
        if tensor is None:
            raise ProfileError(
                f"model_state has no {parameter.name!r}; pass all parameters and buffers of the model"
            )
        dtype: torch.dtype = getattr(torch, parameter.dtype)
        if tensor.is_meta:
            shape = parameter.shape
            if dtype.is_floating_point or dtype.is_complex:
                value = torch.randn(shape, dtype=dtype, device=self._device).mul_(0.02)
            else:
                value = torch.zeros(shape, dtype=dtype, device=self._device)
        else:
            value = tensor.detach().to(device=self._device, dtype=dtype)
            if parameter.is_mutated and value.data_ptr() == tensor.data_ptr():
                value = value.clone()
        trains = self._captured.is_training and parameter.requires_grad and not parameter.is_buffer
        return value.requires_grad_(trains)

    def _keep(
        self, block: str, function: StageFunction, measured: Measurement, outputs: Sequence[Tensor]
    ) -> int:
        """Store the outputs and return the bytes that this code is the first to save."""
        self._values.update(zip(function.outputs, outputs, strict=True))
        return self.held.add(block, function, measured)

    def _drop(self, position: int) -> None:
        for name in [n for n in self._values if self._last_reader.get(n, -1) <= position]:
            del self._values[name]


class _Held:
    """Which blocks keep which storages for backward; a storage is known by the first tensor that lies in it."""

    def __init__(self) -> None:
        self._root: dict[str, str] = {}
        self.keepers: dict[str, list[str]] = {}
        self.bytes_of: dict[str, int] = {}

    def add(self, block: str, function: StageFunction, measured: Measurement) -> int:
        """Return the bytes ``block`` saves that no earlier one does."""
        total = measured.saved_inside
        for name, num_bytes in zip(function.received, measured.saved_received, strict=True):
            root = self._root.get(name, name)
            if num_bytes and not _is_held_anyway(root) and self._keep(root, block, num_bytes):
                total += num_bytes
        for name, tensor, origin, is_saved in zip(
            function.outputs, measured.outputs, measured.output_origin, measured.is_output_saved, strict=True
        ):
            source = name if origin is None else _operands(function)[origin[0]][origin[1]]
            root = self._root[name] = self._root.get(source, source)
            if is_saved:
                self._keep(root, block, tensor.untyped_storage().nbytes())
        return total

    def _keep(self, root: str, block: str, num_bytes: int) -> bool:
        """Note that a block keeps a storage, and return whether it is the first."""
        is_first = root not in self.keepers
        keepers = self.keepers.setdefault(root, [])
        self.bytes_of.setdefault(root, num_bytes)
        if block not in keepers:
            keepers.append(block)
        return is_first


def _operands(function: StageFunction) -> dict[str, tuple[str, ...]]:
    """Return the names of a function's operands and results by kind (`Origin`)."""
    return {
        "received": function.received,
        "input": tuple(f"{_BATCH}{key}" for key in function.batch_inputs),
        "parameter": tuple(f"{_PARAMETER}{key}" for key in function.tensors),
        "output": function.outputs,
    }


_BATCH, _PARAMETER = "batch ", "parameter "


def _is_held_anyway(root: str) -> bool:
    """Return whether a storage is a model input's or a parameter's."""
    return root.startswith((_BATCH, _PARAMETER))


def _last_readers(codes: Sequence[BlockCode]) -> dict[str, int]:
    last: dict[str, int] = {}
    for position, code in enumerate(codes):
        for function in (code.replicas, code.function):
            if function is not None:
                last.update(dict.fromkeys(function.received, position))
    return last


def _block_cost(
    block: Block, counts: tuple[int, ...], results: list[_BlockResult], optimizer_bytes: int, *, unit: int
) -> BlockCost:
    """Return the costs of a block from those at each number of samples."""
    per_sample, fixed = _fit(counts, [result.saved_bytes for result in results], unit)
    return BlockCost(
        block=block.name,
        samples=counts,
        forward_us=tuple(result.forward_us for result in results),
        backward_us=tuple(result.backward_us for result in results),
        saved_bytes_per_sample=per_sample,
        saved_bytes_fixed=fixed,
        parameter_bytes=block.parameter_bytes,
        gradient_bytes=block.trainable_bytes,
        optimizer_bytes=optimizer_bytes,
        transient_bytes_per_sample=results[-1].transient_bytes / counts[-1],
        split_factor=results[-1].split.factor,
        input_share=results[-1].split.input_share,
    )


def _fit(counts: Sequence[int], num_bytes: Sequence[int], unit: int) -> tuple[float, float]:
    """Return bytes a sample, and bytes whatever their number, that are exact at ``unit`` samples.

    The slope is that between the smallest and the largest count; what grows faster than the samples (a block that
    mixes them keeps their square) counts as proportional.

    Args:
        unit: samples of one loss: what stages compute at a time, unless asked otherwise.
    """
    known = dict(zip(counts, num_bytes, strict=True))
    unit = unit if unit in known else counts[-1]
    slope = (num_bytes[-1] - num_bytes[0]) / max(counts[-1] - counts[0], 1)
    if len(counts) == 1 or slope < 0 or slope * unit > known[unit]:
        return known[unit] / unit, 0.0
    return slope, known[unit] - slope * unit


def _shared_storages(counts: Sequence[int], held: Sequence[_Held], unit: int) -> tuple[SharedStorage, ...]:
    """Return the storages that several blocks keep."""
    shared = []
    for root, keepers in held[-1].keepers.items():
        if len(keepers) > 1:
            per_sample, fixed = _fit(counts, [at_n.bytes_of.get(root, 0) for at_n in held], unit)
            shared.append(
                SharedStorage(blocks=tuple(keepers), bytes_per_sample=per_sample, bytes_fixed=fixed)
            )
    return tuple(shared)


def _trainable_parameters(block: Block, op_graph: OpGraph) -> int:
    names = set(block.parameters)
    return sum(
        torch.Size(p.shape).numel()
        for p in op_graph.parameters
        if p.requires_grad and not p.is_buffer and not names.isdisjoint((p.name, *p.aliases))
    )


def _sample_counts(given: Sequence[int] | None, captured: int, *, has_capture_at: bool) -> tuple[int, ...]:
    if given is None:
        return default_sample_counts(captured) if has_capture_at else (captured,)
    counts = validate_sample_counts(given)
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
            "it must capture at the number it is given"
        )
    return captured


def _report_from(progress: Progress | None, survey: int, num_surveys: int) -> Callable[[int, int, str], None]:
    def report(done: int, total: int, text: str) -> None:
        logger.debug("profiling %s", text)
        if progress is not None:
            progress(survey * total + done, num_surveys * total, text)

    return report


@contextmanager
def _undisturbed(device: torch.device, threads: int) -> Iterator[None]:
    """Measure with ``threads`` CPU threads; leave thread count and random state as they were."""
    before = torch.get_num_threads()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)
