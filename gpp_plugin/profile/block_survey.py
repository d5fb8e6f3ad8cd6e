"""One pass over all blocks at one number of samples: each is run on what the blocks before it made.

Source: this project
Tests: tests/profile/test_measure.py
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpp_plugin.capture.captured_graph import CapturedGraph
from gpp_plugin.capture.eager.keep_whole import hooks_at_rest
from gpp_plugin.capture.eager.trial_run import CheckedOnCpu, refuse_lost_device
from gpp_plugin.capture.mask_values import without_choices
from gpp_plugin.capture.tracing.meta_copy import dtype_name
from gpp_plugin.capture.tracing.sample_batches import resize_batch
from gpp_plugin.config.key_names import name_of
from gpp_plugin.errors import GppError, ProfileError, first_line
from gpp_plugin.ir.block_graph import Block, BlockGraph, Parameter, is_carried
from gpp_plugin.ir.profile import SharedStorage
from gpp_plugin.profile.timing import (
    HeadStart,
    Lap,
    Measurement,
    Operands,
    Stopwatch,
    measure,
    repeat_runs,
    time_chain,
    with_seeds,
)
from gpp_plugin.runtime.split import BackwardSplitter
from gpp_plugin.runtime.stage_module import StageFunction, build_stage_function

# What splitting a backward costs: its two parts timed against the whole, on the device at hand.


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCost:
    """Median times of a backward, and of its two parts where it is split."""

    backward_us: float
    input_gradient_us: float
    weight_gradient_us: float

    @property
    def factor(self) -> float:
        """Return the time of both parts over that of the whole."""
        both = self.input_gradient_us + self.weight_gradient_us
        return both / self.backward_us if self.backward_us > 0 else 1.0

    @property
    def input_share(self) -> float:
        """Return the share of the first part in both."""
        both = self.input_gradient_us + self.weight_gradient_us
        return self.input_gradient_us / both if both > 0 else 0.5


NOT_MEASURED = SplitCost(backward_us=0.0, input_gradient_us=0.0, weight_gradient_us=0.0)

CANNOT_SPLIT = SplitCost(backward_us=1.0, input_gradient_us=1e6, weight_gradient_us=1e6)
"""A backward that fails in two parts: a cost at which no schedule that splits it wins."""

UNSPLITTABLE = 1e3
"""Factor from which a backward counts as one that cannot be split."""


def measure_split_cost(operands: Operands, *, device: torch.device, repeats: int = 7) -> SplitCost:
    """Time the backward of one piece of code whole and in two parts, alternated.

    Args:
        operands: the code of a stage or a block; ``takes_gradient`` says whose gradients the first part makes.
        repeats: fewest timed runs; fast code is run more often.
    """
    # A run is [whole, first part, second part] in microseconds; alternated, so that a machine that slows down slows all
    # three. The split itself is found in the first run and only executed later (`BackwardSplitter`).
    splitter = BackwardSplitter()
    whole, parts = HeadStart(), HeadStart()

    def run() -> list[Lap]:
        return [*_backward_laps(operands, device, whole), *_backward_laps(operands, device, parts, splitter)]

    # medians of columns: of [[9, 5, 5], [8, 5, 4], [30, 6, 4]] they are 9, 5 and 4, a factor of 1.0
    backward_us, input_us, weight_us = (typical.us for typical in repeat_runs(run, repeats=repeats))
    return SplitCost(backward_us=backward_us, input_gradient_us=input_us, weight_gradient_us=weight_us)


def _backward_laps(
    operands: Operands, device: torch.device, head_start: HeadStart, splitter: BackwardSplitter | None = None
) -> list[Lap]:
    """Return the lap of a whole backward, or with a splitter the laps of its two parts."""
    outputs, leaves = operands.forward()
    roots, seeds = with_seeds(outputs)
    watch = Stopwatch(device, head_start)
    if splitter is not None:
        _, pending = splitter.split(roots, [leaf for leaf in leaves if leaf.requires_grad], seeds)
        watch.mark()
        pending.run()
    elif roots:
        torch.autograd.backward(roots, seeds)
    watch.mark()
    return watch.laps()


# What is measured: a block's generated code, and the signature by which identical blocks are known.


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCode:
    """One block ready to run.

    Args:
        replicas: code of the replicated nodes it is the first to read, or None.
        signature: equal for blocks with the same operators, shapes, dtypes and gradient flags.
    """

    block: str
    function: StageFunction
    replicas: StageFunction | None
    signature: str


def block_codes(captured: CapturedGraph, block_graph: BlockGraph) -> list[BlockCode]:
    """Generate the code of every block, in block order.

    Raises:
        CaptureError: a block names nodes that ``captured`` lacks.
    """
    # A replicated operator (a mask) is in no block. Here it is charged to the first block that reads it, in code of its
    # own; on a plan's stages it runs once a stage, which is a little more than once in all.
    owned = {name for block in block_graph.blocks for name in block.nodes}
    has_tensor = {node.name for node in captured.op_graph.nodes if node.output is not None}
    ones = captured.analysis.unpadded
    replicated = {node.name for node in captured.op_graph.nodes if node.is_replicable} - owned
    # ``where(mask, zeros, least)``, replicated, of T5's cross attention: a stage has zeros, once for all its blocks
    captured = dataclasses.replace(
        captured, graph=without_choices(captured.graph, captured.masks, ones, of=replicated)
    )
    made: set[str] = set()
    signer = BlockSigner(captured)
    codes = []
    for block in block_graph.blocks:
        outputs = _outputs(captured, block_graph, block)
        function = build_stage_function(captured, block.nodes, outputs, with_replicated=False, ones=ones)
        read = replicated.intersection(function.received)  # no mask that attention does without
        new = captured.replicated_closure(read) - owned - made
        made |= new
        replicas = None
        if new:
            replicas = build_stage_function(captured, new, sorted(new & has_tensor), with_replicated=False)
        signature = signer.sign(block.nodes, outputs)
        codes.append(BlockCode(block=block.name, function=function, replicas=replicas, signature=signature))
    return codes


def _outputs(captured: CapturedGraph, graph: BlockGraph, block: Block) -> list[str]:
    """Return what leaves the block: tensors on its edges, the loss, named outputs; else its last tensor."""
    crossing = {name for edge in graph.edges if edge.src == block.name for name in edge.tensors}
    op_graph = captured.op_graph
    crossing |= {name for name in (op_graph.loss, *op_graph.outputs.values()) if name is not None}
    outputs = [name for name in block.nodes if name in crossing]
    if outputs:
        return outputs
    tensors = {node.name for node in op_graph.nodes if node.output is not None}
    return [name for name in block.nodes if name in tensors][-1:]


class BlockSigner:
    """Signs blocks of one capture: by operators, literals, shapes, dtypes and gradient flags, whatever their names."""

    def __init__(self, captured: CapturedGraph) -> None:
        self._captured = captured
        self._nodes = {node.name: (i, node) for i, node in enumerate(captured.graph.nodes)}
        self._specs = {node.name: node.output for node in captured.op_graph.nodes}
        self._specs.update({spec.name: spec for spec in captured.op_graph.inputs})
        self._parameters = {n: p for p in captured.op_graph.parameters for n in (p.name, *p.aliases)}

    def sign(self, names: Iterable[str], outputs: Sequence[str]) -> str:
        """Return the signature of the block of these nodes."""
        # The text of a block, with numbers for names; hashed. Of linear(h, w, b) with h received:
        #     0 = tensor (8, 16, 32) float32 True
        #     1 = parameter (64, 32) float32 True
        #     2 = parameter (64,) float32 True
        #     3 = tensor (8, 16, 64) float32 True
        #     %3 <- aten.linear.default ((%0, %1, %2), {})
        #     return [3]
        numbers: dict[str, int] = {}
        lines: list[str] = []

        def number(node: torch.fx.Node) -> _Reference:
            if node.name not in numbers:
                numbers[node.name] = len(numbers)
                lines.append(f"{numbers[node.name]} = {self._describe(node)}")
            return _Reference(f"%{numbers[node.name]}")

        for _, node in sorted((self._nodes[name] for name in names), key=lambda entry: entry[0]):
            arguments: Any = torch.fx.node.map_arg((node.args, node.kwargs), number)
            lines.append(f"{number(node)} <- {node.target} {arguments}")
        lines.append(f"return {[numbers[name] for name in outputs]}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def _describe(self, node: torch.fx.Node) -> str:
        captured = self._captured
        if node.name in captured.parameters:
            parameter = self._parameters[captured.parameters[node.name]]
            return f"parameter {parameter.shape} {parameter.dtype} {parameter.requires_grad}"
        if node.name in captured.constants:
            constant = captured.constants[node.name]
            return f"constant {tuple(constant.shape)} {constant.dtype}"
        spec = self._specs.get(captured.inputs.get(node.name, node.name))
        if spec is None:
            return f"{node.op} {node.target}" if node.op == "get_attr" else "several"
        kind = "input" if node.name in captured.inputs else "tensor"
        return f"{kind} {spec.shape} {spec.dtype} {spec.requires_grad}"


class _Reference(str):
    """Prints without quotes, so that a node never looks like a literal."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


logger = logging.getLogger(__name__)

CHAIN_SHARE = 0.5
"""Of a GPU's memory: what pieces to be timed in a chain may take together with all else that is there."""
SPLIT_REPEATS = 3
"""Fewest timed runs of a split backward: one number is wanted for each block, not one for each size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockResult:
    """What was measured of one block at one number of samples."""

    forward_us: float
    backward_us: float
    saved_bytes: int
    transient_bytes: int
    split: SplitCost


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """One piece of code as it was measured.

    Args:
        place: in the chain of all pieces; -1 where it is not to be timed in one.
    """

    whole: Measurement
    split: SplitCost
    place: int = -1


class BlockSurvey:
    """One pass over all blocks at one number of samples.

    What it holds while it walks over the blocks: ``_values``, results that a later block reads, by name; ``_shared``,
    measurements of code that recurs, by signature and layout of operands; ``held``, which blocks save which storages.
    On CUDA also ``_chain``, the pieces measured, to be timed once more one behind the other: forwards, then backwards.

    Args:
        visit: called with each distinct block as it was measured, and its operands.
    """

    def __init__(
        self,
        *,
        captured: CapturedGraph,
        block_graph: BlockGraph,
        state: Mapping[str, Tensor],
        batch: Mapping[str, Any],
        repeats: int,
        share_identical: bool,
        with_peak: bool,
        with_split: bool,
        visit: Callable[[BlockCode, Operands], None] | None = None,
    ) -> None:
        self._captured = captured
        self._num_samples = captured.op_graph.num_samples
        self._state = state
        self._device = captured.device
        self._repeats = repeats
        self._share = share_identical
        self._with_peak = with_peak
        self._with_split = with_split and captured.is_training
        self._codes = block_codes(captured, block_graph)
        self._visit = visit
        resized = resize_batch(batch, self._num_samples)
        # Contiguous, as a rank has them: slices of a longer batch would count all of it, and lie otherwise in memory.
        self._inputs = {
            spec.name: resized[spec.name]
            .to(device=self._device, dtype=getattr(torch, spec.dtype))
            .contiguous()
            for spec in captured.op_graph.inputs
        }
        self._parameters = {n: p for p in captured.op_graph.parameters for n in (p.name, *p.aliases)}
        self._takes_gradient = {
            node.name: captured.is_training and node.output is not None and node.output.requires_grad
            for node in captured.op_graph.nodes
        }
        # separate storages: a block that saves rows cut off a longer batch would seem to save all of it
        received = {name: self._inputs[name].clone() for name in captured.op_graph.received}
        self._takes_gradient |= {
            spec.name: captured.is_training and spec.requires_grad
            for spec in captured.op_graph.inputs
            if spec.name in received
        }
        self._values: dict[str, Tensor] = dict(received)
        self._last_reader = {
            name: position
            for position, code in enumerate(self._codes)
            for function in (code.replicas, code.function)
            if function is not None
            for name in function.received
        }
        self._shared: dict[tuple[str, tuple[object, ...]], _Measured] = {}
        self._recurs = Counter(code.signature for code in self._codes)
        self.held = HeldStorages()
        self._chain: list[Operands] | None = []

    @hooks_at_rest()
    def run(self, report: Callable[[int, int, str], None]) -> dict[str, BlockResult]:
        """Return what was measured of every block."""
        surveyed: list[tuple[str, int, _Measured | None, _Measured]] = []
        # Example: encoder layers 0 to 23 have one signature. Layer 0 is run; layer 1, on operands that lie like layer
        # 0's, takes its times and copies of its outputs (right in shape, which is all that times depend on). Replicas
        # (a mask that layer 0 is the first to read) are run separately: else layer 0 would differ from all others.
        for position, code in enumerate(self._codes):
            report(position, len(self._codes), f"{code.block} at {self._num_samples} samples")
            saved, replicas = 0, None
            try:
                if code.replicas is not None:
                    replicas = self._run(code.replicas)
                    made = replicas.whole
                    saved = self._store(code.block, code.replicas, made, made.outputs)
                # operators take longer on some placements in memory
                received = [self._values[name] for name in code.function.received]
                lie = tuple((tensor.stride(), tensor.untyped_storage().nbytes()) for tensor in received)
                key = (code.signature, lie)
                block = self._shared.get(key)
                if block is None:
                    block = self._run(code.function)
                    if self._visit is not None:
                        self._visit(code, self._operands(code.function))
                    outputs = block.whole.outputs
                else:
                    outputs = block.whole.copied_outputs()
            except GppError:
                raise
            except Exception as error:  # whatever an operator raises must say which block it was in
                refuse_lost_device(error)
                raise ProfileError(
                    f"block {code.block!r} cannot be run at {self._num_samples} samples on {self._device}: "
                    f"{type(error).__name__}: {first_line(error)}; {self._remedy(code, error)}"
                ) from error
            # an output that is a view of an operand is one of this block's operand, which no copy could stand for
            if self._share and self._recurs[code.signature] > 1 and block.whole.has_own_outputs:
                self._shared[key] = block
            saved += self._store(code.block, code.function, block.whole, outputs)
            surveyed.append((code.block, saved, replicas, block))
            for name in [n for n in self._values if self._last_reader.get(n, -1) <= position]:
                del self._values[name]
        times = self._times_in_chain()
        return {name: _result(saved, replicas, own, times) for name, saved, replicas, own in surveyed}

    def _remedy(self, code: BlockCode, error: Exception) -> str:
        """Return what may be changed where a block cannot be run."""
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "not enough memory" in str(error):
            return f"lower {name_of('loss_unit')} or {name_of('micro_batch_sizes')}: memory is short"
        for name in code.function.tensors:
            parameter = self._parameters[name]
            held = self._held(parameter)
            if "type" in str(error) and held is not None and dtype_name(held.dtype) != parameter.dtype:
                return (
                    f"{name} is {dtype_name(held.dtype)} in the model and {parameter.dtype} in this job, as its "
                    "configuration says: cast to the weight's own type (x.to(weight.dtype)), not to a named one"
                )
        return "call the module by itself on such a batch: what fails there is its own code"

    def _times_in_chain(self) -> list[tuple[Lap, Lap]]:
        """Return what the pieces of the chain take in it; empty where there is none, or too little memory."""
        pieces, self._chain = self._chain, None
        if not pieces:
            return []
        try:
            return time_chain(pieces, device=self._device, repeats=self._repeats)
        except torch.OutOfMemoryError:
            logger.info("not enough memory to time %d pieces in a chain; each is timed alone", len(pieces))
            return []
        finally:
            for piece in pieces:
                for parameter in piece.parameters:
                    parameter.grad = None

    def _join_chain(self, operands: Operands) -> int:
        """Add a piece to the chain, and return its place; -1 where there is no chain."""
        if self._chain is None or not _has_chain_memory(self._device):
            self._chain = None
            return -1
        self._chain.append(operands)
        return len(self._chain) - 1

    @property
    def signatures(self) -> dict[str, str]:
        """Return the signature of each block: those of equal ones are equal."""
        return {code.block: code.signature for code in self._codes}

    def _operands(self, function: StageFunction) -> Operands:
        return Operands(
            call=function.call,
            parameters=tuple(self._materialise(self._parameters[name]) for name in function.tensors),
            inputs=tuple(self._inputs[key] for key in function.batch_inputs),
            received=tuple(self._values[name] for name in function.received),
            takes_gradient=tuple(self._takes_gradient[name] for name in function.received),
            is_training=self._captured.is_training,
            constants=function.constants,
        )

    def _run(self, function: StageFunction) -> _Measured:
        operands = self._operands(function)
        if self._device.type != "cpu":
            # an index beyond its table, at other lengths say, ends all work of a GPU
            with torch.no_grad(), CheckedOnCpu(self._device.type, indices_only=True):
                operands.call(*operands.parameters, *operands.inputs, *operands.received)
        whole = measure(operands, device=self._device, repeats=self._repeats, with_peak=self._with_peak)
        split = NOT_MEASURED
        if self._with_split and whole.backward_us > 0.0:
            try:
                split = measure_split_cost(operands, device=self._device, repeats=SPLIT_REPEATS)
            except RuntimeError as error:  # an operator that gives its gradients only once, all together
                refuse_lost_device(error)
                logger.info("the backward of %s cannot be split: %s", function.outputs, error)
                split = CANNOT_SPLIT
        return _Measured(whole=whole, split=split, place=self._join_chain(operands))

    def _held(self, parameter: Parameter) -> Tensor | None:
        names = (parameter.name, *parameter.aliases)
        return next((self._state[name] for name in names if name in self._state), None)

    def _materialise(self, parameter: Parameter) -> Tensor:
        """Return the tensor to measure with: the real one detached, or random values for a meta one."""
        tensor = self._held(parameter)
        if tensor is None and not is_carried(parameter.name):
            raise ProfileError(
                f"model_state has no {parameter.name!r}; pass all parameters and buffers of the model"
            )
        dtype: torch.dtype = getattr(torch, parameter.dtype)
        # Random values of the size that initialisers give: zeros would make denormal products and infinite norms, and
        # both run at other speeds. What the block writes (running statistics) is a copy, as the model is not to change.
        if tensor is None or tensor.is_meta:
            is_number = dtype.is_floating_point or dtype.is_complex
            value = (torch.randn if is_number else torch.zeros)(
                parameter.shape, dtype=dtype, device=self._device
            )
            value = value.mul_(0.02) if is_number else value
        else:
            value = tensor.detach().to(device=self._device, dtype=dtype)
            if parameter.is_mutated and value.data_ptr() == tensor.data_ptr():
                value = value.clone()
        trains = self._captured.is_training and parameter.requires_grad and not parameter.is_buffer
        return value.requires_grad_(trains)

    def _store(
        self, block: str, function: StageFunction, measured: Measurement, outputs: Sequence[Tensor]
    ) -> int:
        """Store the outputs and return the bytes that this code is the first to save."""
        self._values.update(zip(function.outputs, outputs, strict=True))
        return self.held.add(block, function, measured)


def _has_chain_memory(device: torch.device) -> bool:
    """Return whether there is memory for pieces to be timed in a chain; on a CPU each is timed alone, and the same."""
    if device.type != "cuda":
        return False
    total = torch.cuda.get_device_properties(device).total_memory
    return torch.cuda.memory_allocated(device) <= CHAIN_SHARE * total


def _result(
    saved: int, replicas: _Measured | None, own: _Measured, times: Sequence[tuple[Lap, Lap]]
) -> BlockResult:
    """Return a block's costs: its times in the chain where that was busy, else alone.

    Args:
        saved: bytes that it and its replicas are the first to save.
        replicas: those that it is the first to read.
        times: forward and backward by place; empty where there was no chain.
    """

    def in_chain(measured: _Measured) -> tuple[float, float]:
        alone = measured.whole.forward_us, measured.whole.backward_us
        if not times or measured.place < 0:
            return alone
        forward, backward = (
            lap.us if lap.is_busy else us for lap, us in zip(times[measured.place], alone, strict=True)
        )
        return forward, backward

    forward_us, backward_us = in_chain(own)
    if replicas is not None:  # they take no gradient
        forward_us += in_chain(replicas)[0]
    return BlockResult(
        forward_us=forward_us,
        backward_us=backward_us,
        saved_bytes=saved,
        transient_bytes=own.whole.transient_bytes,
        split=own.split,
    )


# Which blocks save which storages for backward, each counted once; their bytes as a function of samples.

_BATCH, _PARAMETER = "batch ", "parameter "


class HeldStorages:
    """Which blocks save which storages for backward; a storage is known by the first tensor that lies in it.

    Args:
        saved_by: the blocks that save each storage, by its root.
        size_of: bytes of each result by itself, which is all of its storage that travels to another stage.
        maker_of: the block that makes each result.
    """

    def __init__(self) -> None:
        # ``_root``: result -> the first tensor in its storage. In h = linear(x); v = h.view(..); w = v[:, 0], the
        # root of all of h, v and w is h; a block that saves w saves h's storage. Roots "batch ..." and "parameter
        # ..." are storages of model inputs and parameters, which are there anyway.
        self._root: dict[str, str] = {}
        self._saved_as: dict[str, set[str | None]] = {}
        self.saved_by: dict[str, list[str]] = {}
        self.bytes_of: dict[str, int] = {}
        self.size_of: dict[str, int] = {}
        self.maker_of: dict[str, str] = {}

    def add(self, block: str, function: StageFunction, measured: Measurement) -> int:
        """Return the bytes ``block`` saves that no earlier one does."""
        # First what was received: its storage may have been counted with an earlier block. Then what was made here:
        # counted in ``saved_inside`` already, it is only noted, for later blocks that save it too.
        total = measured.saved_inside
        roots = [self._root.get(name, name) for name in function.received]
        for name, root, num_bytes in zip(function.received, roots, measured.saved_received, strict=True):
            if num_bytes and not root.startswith((_BATCH, _PARAMETER)):
                saved_as = name if roots.count(root) == 1 else None
                total += num_bytes if self._note(root, block, num_bytes, saved_as) else 0
        for name, tensor, origin, is_saved in zip(
            function.outputs, measured.outputs, measured.output_origin, measured.is_output_saved, strict=True
        ):
            source = name if origin is None else _names_of(function)[origin[0]][origin[1]]
            root = self._root[name] = self._root.get(source, source)
            self.size_of[name], self.maker_of[name] = tensor.nbytes, block
            if is_saved:
                self._note(root, block, tensor.untyped_storage().nbytes())
        return total

    def received_as(self, root: str) -> str | None:
        """Return the one result, a part of the storage, through which all blocks save it; None if there is none."""
        # A storage hidden [8, 50, 32] of which a head saves hidden[:, 0], 1/50 of it: on the stage that makes hidden
        # the head saves all 50, on another stage it receives, and saves, the one row. That holds only if all blocks
        # that save it have it through that one view, and none of them makes the view itself.
        names = self._saved_as[root]
        name = next(iter(names))
        if len(names) > 1 or name is None or name not in self.maker_of:
            return None
        is_made_again = self.maker_of[name] in self.saved_by[root]  # a mask, say: every stage has its own
        return None if is_made_again or self.size_of[name] == self.bytes_of[root] else name

    def _note(self, root: str, block: str, num_bytes: int, saved_as: str | None = None) -> bool:
        """Note that a block saves a storage, and return whether it is the first.

        Args:
            saved_as: the one result in it that the block receives; None where it has the storage otherwise.
        """
        is_first = root not in self.saved_by
        blocks = self.saved_by.setdefault(root, [])
        self._saved_as.setdefault(root, set()).add(saved_as)
        self.bytes_of.setdefault(root, num_bytes)
        if block not in blocks:
            blocks.append(block)
        return is_first


def _names_of(function: StageFunction) -> dict[str, tuple[str, ...]]:
    """Return the names of a function's operands and results by kind (`Origin`)."""
    return {
        "received": function.received,
        "input": tuple(f"{_BATCH}{key}" for key in function.batch_inputs),
        "parameter": tuple(f"{_PARAMETER}{key}" for key in function.tensors),
        "output": function.outputs,
    }


def fit_bytes(counts: Sequence[int], num_bytes: Sequence[int], unit: int) -> tuple[float, float]:
    """Return bytes a sample, and bytes whatever their number, that are exact at ``unit`` samples.

    The slope is that between the smallest and the largest count; what grows faster than the samples (a block that
    mixes them keeps their square) counts as proportional.

    Args:
        unit: samples of one loss: what stages compute at a time, unless configured otherwise.
    """
    # counts (1, 8, 64), bytes (100, 800, 6400): slope 100, nothing fixed. (110, 810, 6410) at unit 8: slope 100,
    # fixed 10. (1, 64, 4096) of a matrix of all pairs at unit 8: the slope, 65, would give 520 at 8 samples where 64
    # are saved and a negative rest; so 64 / 8 = 8 a sample, exact where stages compute, and low beyond.
    known = dict(zip(counts, num_bytes, strict=True))
    unit = unit if unit in known else counts[-1]
    slope = (num_bytes[-1] - num_bytes[0]) / max(counts[-1] - counts[0], 1)
    if len(counts) == 1 or slope < 0 or slope * unit > known[unit]:
        return known[unit] / unit, 0.0
    return slope, known[unit] - slope * unit


def shared_storages(
    counts: Sequence[int], held: Sequence[HeldStorages], unit: int
) -> tuple[SharedStorage, ...]:
    """Return the storages that several blocks save, and those of which another stage would get a part only.

    A view that is sent (`hidden[:, 0]`) arrives in a separate storage: a stage that saves it and does not have
    the block that made it holds less than the whole by what is returned for it, as negative bytes.
    """
    shared = []
    for root, savers in held[-1].saved_by.items():
        if len(savers) > 1:
            per_sample, fixed = fit_bytes(counts, [at_n.bytes_of.get(root, 0) for at_n in held], unit)
            shared.append(SharedStorage(blocks=tuple(savers), bytes_per_sample=per_sample, bytes_fixed=fixed))
        view = held[-1].received_as(root)
        if view is not None:
            less = [at_n.bytes_of.get(root, 0) - at_n.size_of.get(view, 0) for at_n in held]
            per_sample, fixed = fit_bytes(counts, less, unit)
            blocks = (held[-1].maker_of[view], *savers)
            shared.append(SharedStorage(blocks=blocks, bytes_per_sample=-per_sample, bytes_fixed=-fixed))
    return tuple(shared)
