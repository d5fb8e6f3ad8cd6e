"""Plans for stages without gradients on backends: measured, planned once more, chosen by simulation.

A plan is made with the times of torch's operators. Then rank 0 measures the stages of it that train nothing, and what
of its other stages no gradient passes, on the requested backends; the planner runs once more with these
times, and what it answers is measured in turn. Both plans are simulated with what their own stages took, and the second
one is taken if its step is shorter by more than noise. So it is never worse than the first by the simulator, and as
nothing is planned a third time.

    plan 1   tower 8 ms on 2 ranks | head            tower measured: 0.4 of what torch takes
    plan 2   tower on 1 rank | head on 3 ranks       made with 0.4 for the tower's blocks, measured: 0.42
    1 and 2 simulated with 0.4 and 0.42: the shorter step

Source: this project; selection by measurement after Collage (PACT 2022, arXiv 2111.00655)
Tests: tests/model/test_backend_planning.py, tests/integrations/test_backend_training.py,
    tests/backends/test_compiled_blocks.py, tests/integrations/test_compiled_training.py
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gpp_plugin.backends.compiled_blocks import BlockCompiler, CutCode, compare_results, run_both
from gpp_plugin.backends.forward_code import ForwardCode, forward_code
from gpp_plugin.backends.measured_backends import BackendLog, place_key, time_in_turn
from gpp_plugin.backends.place_forward import LEAST_GAIN
from gpp_plugin.backends.stage_backends import Asked, choose_backend, examples_of
from gpp_plugin.capture.captured_graph import CapturedGraph
from gpp_plugin.capture.eager.trial_run import refuse_lost_device
from gpp_plugin.errors import BackendRefused, CaptureError, ConfigError, PlanError, first_line, nearest
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.plan import PipelinePlan, Stage, forward_only_stages
from gpp_plugin.ir.profile import BlockCost, CompiledCost, StageBackend
from gpp_plugin.ir.serialize import load, save
from gpp_plugin.model.graph.captured_part import CapturedPart
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.estimate import with_cost
from gpp_plugin.plan.make import stage_edges
from gpp_plugin.plugins import find_schedule
from gpp_plugin.profile.block_survey import BlockCode, BlockSurvey
from gpp_plugin.profile.timing import Operands, SavedStorages
from gpp_plugin.report.plan_text import format_ranks
from gpp_plugin.report.progress import step
from gpp_plugin.report.units import format_ms
from gpp_plugin.runtime.batches import Batch
from gpp_plugin.runtime.random_streams import restored_streams
from gpp_plugin.runtime.stage_module import Reference, StageFunction

# Plans that know what blocks cost compiled: each distinct one measured beside torch's, before stages are cut.
#
# The blocks that planners place are those that are compiled, so rank 0 does with each distinct one what stages will
# do: it compiles it at one loss unit, holds outputs and gradients against torch's, times both in turn, forward, and
# forward with backward, and counts what each keeps. The profile is then that of the compiled blocks; planners, memory
# and simulation know nothing else of it.
#
#     profile    layer  forward 4.0 ms  backward 8.0 ms   18 MB a sample
#     measured   layer  forward 0.9 x   both 0.8 x        saved 0.7 x
#     planned    layer  forward 3.6 ms  backward 6.0 ms   12.6 MB a sample


CompiledBlocksOption = bool | str | Mapping[str, bool]
"""The value of ``graph_pipeline.compile``."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompiledBlocks:
    """What blocks cost compiled, and which of them are.

    Args:
        costs: of each distinct block that was requested -> the blocks like it, and what they cost.
        taken: the blocks that run compiled.
    """

    costs: tuple[tuple[tuple[str, ...], CompiledCost], ...] = ()
    taken: frozenset[str] = frozenset()

    def scaled(self, costs: Iterable[BlockCost]) -> tuple[BlockCost, ...]:
        """Return the costs of blocks, those of compiled ones as they were measured beside torch's."""
        of_block = {block: cost for blocks, cost in self.costs for block in blocks if block in self.taken}
        return tuple(_scaled(own, of_block[own.block]) if own.block in of_block else own for own in costs)

    def lines(self) -> list[str]:
        """Return a line for each distinct block: what it gains, what it keeps, why it stays on torch."""
        found = []
        for blocks, cost in self.costs:
            name = blocks[0] if len(blocks) == 1 else f"{blocks[0]} and {len(blocks) - 1} like it"
            if cost.refused:
                found.append(f"compile: {name} stays on torch: {cost.refused}")
                continue
            place = "compiled" if blocks[0] in self.taken else "stays on torch"
            found.append(
                f"compile: {name} {place}: forward and backward {cost.both_us / 1e3:.2f} ms, on torch "
                f"{cost.torch_both_us / 1e3:.2f} ({cost.gain:.2f} x as fast), {_share(cost):.2f} x the bytes saved, "
                f"{cost.build_s:.0f} s to compile"
            )
        return found

    def noted(self, plan: PipelinePlan) -> PipelinePlan:
        """Return a plan whose stages say which of their blocks are compiled.

        Raises:
            PlanError: a stage with compiled blocks cuts its forwards or backwards, or has tensor or context ranks.
        """
        stages = []
        for stage in plan.stages:
            compiled = tuple(block for block in stage.blocks if block in self.taken)
            if compiled:
                _check_stage(stage)
            stages.append(dataclasses.replace(stage, compiled=compiled))
        lines = self.lines()
        if self.taken:
            lines.append("compile: memory.recompute and memory.swap are off, and forwards are not sliced")
        return dataclasses.replace(plan, stages=tuple(stages), notes=(*plan.notes, *lines))


def _check_stage(stage: Stage) -> None:
    reasons = {
        f"schedule {stage.schedule!r} makes its backwards in two parts": find_schedule(
            stage.schedule
        ).splits_backward,
        "it swaps, recomputes or slices forwards": stage.memory is not None or stage.num_sliced > 0,
        f"{stage.tensor} tensor ranks share it out": stage.tensor > 1,
        f"{stage.context} context ranks have parts of its positions": stage.context > 1,
    }
    what = next((reason for reason, holds in reasons.items() if holds), "")
    if what:
        raise PlanError(
            f'stage {stage.name!r}: its blocks are compiled, and {what}; plan again, or set "compile" to false'
        )


def _scaled(cost: BlockCost, compiled: CompiledCost) -> BlockCost:
    # A forward of 4.0 and both of 12.0 on torch, 3.6 and 9.6 compiled: forwards x 0.9, backwards x (9.6 - 3.6) / 8 =
    # 0.75, at all numbers of samples, though they were measured at one.
    forward = compiled.forward_us / compiled.torch_forward_us if compiled.torch_forward_us else 1.0
    own, torchs = (
        max(both - alone, 0.0)
        for both, alone in (
            (compiled.both_us, compiled.forward_us),
            (compiled.torch_both_us, compiled.torch_forward_us),
        )
    )
    backward = own / torchs if torchs else 1.0
    share = _share(compiled)
    return dataclasses.replace(
        cost,
        forward_us=tuple(us * forward for us in cost.forward_us),
        backward_us=tuple(us * backward for us in cost.backward_us),
        saved_bytes_per_sample=cost.saved_bytes_per_sample * share,
        saved_bytes_fixed=cost.saved_bytes_fixed * share,
    )


def _share(cost: CompiledCost) -> float:
    return cost.saved_bytes / cost.torch_saved_bytes if cost.torch_saved_bytes else 1.0


def is_requested(requested: CompiledBlocksOption, block: str) -> bool:
    """Return whether a block is requested: all are, or it lies in a module that is named.

    >>> is_requested({"language_model": True}, "model.language_model.layers.0")
    True
    """
    if not isinstance(requested, Mapping):
        return bool(requested)
    return any(wanted and f".{path}." in f".{block}." for path, wanted in requested.items())


def check_paths(requested: CompiledBlocksOption, blocks: Sequence[str]) -> None:
    """Refuse paths of which no block is.

    Raises:
        ConfigError: names the path, and the nearest there is.
    """
    for path in requested if isinstance(requested, Mapping) else ():
        if not any(is_requested({path: True}, block) for block in blocks):
            parts = dict.fromkeys(
                ".".join(b.split(".")[:n]) for b in blocks for n in range(1, b.count(".") + 2)
            )
            raise ConfigError(
                f"graph_pipeline.compile.{path}: no block of the model lies in a module of that path"
                f"{nearest(path, list(parts))}; blocks are {', '.join(list(blocks)[:4])}, ..."
            )


def measure_compiled(
    captured: CapturedGraph,
    graph: BlockGraph,
    *,
    state: Mapping[str, Tensor],
    batch: Mapping[str, Any],
    requested: CompiledBlocksOption,
    log: BackendLog,
    compiler: BlockCompiler | None = None,
) -> CompiledBlocks:
    """Return what the blocks that are requested cost compiled, and which are taken.

    Args:
        captured: in training, at one loss unit; ``graph`` its blocks.
        state, batch: as of `profile_blocks`.
        log: what it has is not compiled here.

    Raises:
        ConfigError: a path is named in which no block lies.
    """
    # One walk over the blocks, on what those before made of a real batch; of 24 equal layers the trial sees the first.
    # Blocks are taken by signature: {"A": layers.0 to layers.23, "B": head}; "auto" those whose gain is above noise.
    check_paths(requested, [block.name for block in graph.blocks])
    costs: dict[str, CompiledCost] = {}
    used = compiler or BlockCompiler()

    def visit(code: BlockCode, operands: Operands) -> None:
        """Measure a block that is requested and trains, or look up what it was measured at."""
        flags = (*(p.requires_grad for p in operands.parameters), *operands.takes_gradient)
        if code.signature in costs or not is_requested(requested, code.block) or not any(flags):
            return
        key: dict[str, object] = {
            "compiled block": code.signature,
            "compiler": used.name,
            "torch": str(torch.__version__),
            **place_key(captured.device),
        }
        cost = log.look_up(key, functools.partial(load, CompiledCost))
        if cost is None:
            cost = measure_block(code.block, code.function, operands, used)
            if not cost.refused:  # a compiler that is missing today may be there tomorrow
                log.keep(key, functools.partial(save, cost))
        costs[code.signature] = cost

    with step("compile blocks"), restored_streams(captured.device):
        survey = BlockSurvey(
            captured=captured,
            block_graph=graph,
            state=state,
            batch=batch,
            repeats=1,
            share_identical=True,
            with_peak=False,
            with_split=False,
            visit=visit,
        )
        survey.run(lambda done, total, text: None)
    return _chosen(costs, survey.signatures, requested)


def _chosen(
    costs: Mapping[str, CompiledCost], signatures: Mapping[str, str], requested: CompiledBlocksOption
) -> CompiledBlocks:
    """Return which of the blocks that are requested run compiled."""
    blocks: dict[str, list[str]] = {}
    for block, signature in signatures.items():
        if signature in costs and is_requested(requested, block):
            blocks.setdefault(signature, []).append(block)
    taken: set[str] = set()
    for signature, own in blocks.items():
        cost = costs[signature]
        if not cost.refused and (requested != "auto" or cost.gain >= LEAST_GAIN):
            taken.update(own)
        if cost.refused and requested != "auto":
            logger.warning("block %s stays on torch instead of compiled code: %s", own[0], cost.refused)
    found = tuple((tuple(own), costs[signature]) for signature, own in blocks.items())
    return CompiledBlocks(costs=found, taken=frozenset(taken))


def measure_block(
    name: str, function: StageFunction, operands: Operands, compiler: BlockCompiler
) -> CompiledCost:
    """Return what a block costs compiled and on torch's operators; says why where it cannot be compiled."""
    module = function.module if function.choice is None else function.choice.module
    if module is None:
        return CompiledCost(refused="a module of yours, run as it is")
    # The block is a stage of one block: cut as stages are, so that its code, and the compiler's file, is the stage's.
    # All that is timed is timed in turn with torch: a slow moment of the machine hits both.
    bound = function.bound
    calls = [node.name for node in module.graph.nodes if node.op == "call_function"]
    leaves = [
        tensor.detach().requires_grad_(flag)
        for tensor, flag in zip(operands.received, operands.takes_gradient, strict=True)
    ]
    parameters, tensors = operands.parameters, (*operands.inputs, *leaves)
    try:
        forward = CutCode(module, {name: calls}, compiler).forward

        def compiled(*args: Tensor) -> tuple[Tensor, ...]:
            outputs: tuple[Tensor, ...] = forward(*bound, *args)
            return outputs

        right = run_both(operands.call, parameters, tensors)
        start = time.perf_counter()
        own = run_both(compiled, parameters, tensors)
        build_s = time.perf_counter() - start
        error = compare_results(own, right)
    except BackendRefused as problem:
        return CompiledCost(refused=str(problem))
    except Exception as problem:  # whatever compiled code raises
        refuse_lost_device(problem)
        return CompiledCost(refused=f"its first run failed: {type(problem).__name__}: {first_line(problem)}")
    calls_of = {"compiled": compiled, "torch": operands.call}
    alone = time_in_turn({k: functools.partial(call, *parameters, *tensors) for k, call in calls_of.items()})
    both = time_in_turn(
        {k: functools.partial(_forward_backward, call, parameters, tensors) for k, call in calls_of.items()}
    )
    saved = {k: _saved_bytes(call, operands, leaves) for k, call in calls_of.items()}
    return CompiledCost(
        forward_us=alone["compiled"],
        both_us=both["compiled"],
        saved_bytes=saved["compiled"],
        torch_forward_us=alone["torch"],
        torch_both_us=both["torch"],
        torch_saved_bytes=saved["torch"],
        build_s=build_s,
        error=error,
    )


def _forward_backward(
    call: Callable[..., Sequence[Tensor]], parameters: Sequence[Tensor], tensors: Sequence[Tensor]
) -> None:
    outputs = [output for output in call(*parameters, *tensors) if output.requires_grad]
    leaves = [tensor for tensor in (*parameters, *tensors) if tensor.requires_grad]
    if outputs:
        torch.autograd.grad(outputs, leaves, list(map(torch.ones_like, outputs)), allow_unused=True)


def _saved_bytes(call: Callable[..., Sequence[Tensor]], operands: Operands, leaves: Sequence[Tensor]) -> int:
    saved = SavedStorages(exclude=(*operands.parameters, *operands.inputs, *operands.constants))
    with saved.recording():
        call(*operands.parameters, *operands.inputs, *leaves)
    return saved.total_bytes


logger = logging.getLogger(__name__)

LEAST_STEP_GAIN = 1.02
"""How many times as long as the plan cut again the plan before must take by the simulator: less is noise."""

Measure = Callable[[PipelinePlan, int], StageBackend | None]
"""Measures what a stage of a plan takes on its backends; None where it cannot be measured."""


class StageTrials:
    """Measures stages of plans that are not run yet, on the rank that has the capture.

    Args:
        part: the model; what is tried of it leaves no trace in it.
        batch: the sample batch.
    """

    def __init__(
        self, part: CapturedPart, reference: Reference, batch: Batch, *, requested: Asked, log: BackendLog
    ) -> None:
        self._part = part.clone()
        self._reference = reference
        self._batch = batch
        self._requested = requested
        self._log = log
        self._state: dict[str, Tensor] = dict(part.model.named_parameters(remove_duplicate=False))
        self._state.update(part.model.named_buffers(remove_duplicate=False))
        self._dtypes = {p.name: p.dtype for p in reference.analysis.op_graph.parameters}

    @torch.no_grad()
    def measure(self, plan: PipelinePlan, index: int) -> StageBackend | None:
        """Return what a stage takes on its backends, at its own number of samples; None: it cannot be captured so."""
        stage, device = plan.stages[index], self._part.device
        samples = stage.local_batch_size
        try:
            code = self._part.stage_code(
                self._reference, plan, index, self._batch, samples, keeps_capture=True
            )
        except CaptureError as error:
            logger.info("stage %s is not measured on backends: %s", stage.name, first_line(error))
            return None
        if code.function.module is None and code.function.choice is None:
            return None
        weights = [self._weight(name) for name in code.function.tensors]

        def make_code() -> ForwardCode:
            tensors = examples_of(code, self._batch, samples, device)
            return forward_code(stage.name, code.function, weights, tensors)

        with restored_streams(device):
            return choose_backend(self._requested, stage.name, make_code, self._log)

    def _weight(self, name: str) -> Tensor:
        """Return a weight as the stage will have it; one that is loaded later, random: time does not depend on it."""
        tensor, dtype = self._state[name], getattr(torch, self._dtypes[name])
        device = self._part.device
        if not tensor.is_meta:
            return tensor.detach().to(device=device, dtype=dtype)
        if not dtype.is_floating_point:
            return torch.zeros(tensor.shape, device=device, dtype=dtype)
        generator = torch.Generator().manual_seed(0)
        return torch.randn(tensor.shape, generator=generator).mul_(0.02).to(device=device, dtype=dtype)


def plan_with_backends(
    plan: PipelinePlan,
    graph: BlockGraph,
    costs: CostModel,
    *,
    measure: Measure,
    plan_again: Callable[[Mapping[str, float]], PipelinePlan] | None,
) -> PipelinePlan:
    """Return the plan with what its stages take on backends, or another one, cut for that, whose step is shorter.

    Args:
        plan: made with the times of torch's operators.
        costs: those times.
        plan_again: returns the plan with other times of some blocks' forwards, block -> times what torch takes
            (`Profile.backends`); None: the stages are explicit.
    """
    frozen = blocks_without_gradients(graph)
    found = {index: measure(plan, index) for index in sorted(forward_only_stages(plan))}
    before = _timed(plan, costs, {index: one for index, one in found.items() if share_of(one) != 1.0})
    if plan_again is None:
        return before
    shares = {
        block: share
        for index, one in found.items()
        for block in plan.stages[index].blocks
        if (share := share_of(one)) != 1.0 and block in frozen
    }
    shares |= _shares_within(plan, graph, frozen, measure)
    if not shares:
        return before
    try:
        again = plan_again(shares)
    except PlanError as error:
        logger.info("stages are not cut again for their backends: %s", first_line(error))
        return before
    if _cut_of(again) == _cut_of(plan):
        return _noted(
            before, f"{_step_text(before, plan)}; cut again with these times, the stages are the same"
        )
    after = _timed(again, costs, {i: measure(again, i) for i in sorted(forward_only_stages(again))})
    if after.iteration_us * LEAST_STEP_GAIN > before.iteration_us:
        text = f"{_step_text(before, plan)}; cut again it would be {format_ms(after.iteration_us)} ms: the stages stay"
        return _noted(before, text)
    return _noted(
        after,
        f"{_step_text(after, plan)}, {format_ms(before.iteration_us)} ms in the stages it would have on torch; "
        f"cut again: {_cut_text(plan)} became {_cut_text(after)}",
    )


def blocks_without_gradients(graph: BlockGraph) -> frozenset[str]:
    """Return the blocks that send no tensor whose gradient flows back, and yield no loss."""
    trained = {
        edge.src for edge in graph.edges if any(graph.tensors[name].requires_grad for name in edge.tensors)
    }
    return frozenset(block.name for block in graph.blocks) - trained - set(graph.loss_blocks)


def share_of(chosen: StageBackend | None) -> float:
    """Return how many times what torch takes a stage takes on its backend; 1 on torch, or where it was not measured."""
    if chosen is None or chosen.is_torch or not chosen.us or not chosen.torch_us:
        return 1.0
    return chosen.us / chosen.torch_us


def _shares_within(
    plan: PipelinePlan, graph: BlockGraph, frozen: frozenset[str], measure: Measure
) -> dict[str, float]:
    """Return the shares of blocks that train nothing and lie in stages that do: what they would take by themselves."""
    # Stages {t0, t1} and {t2, head}: t2 is measured as if it were a stage, {t0, t1}, {t2}, {head}; the edges between
    # those say which of t2's tensors leave it. Such a plan is never run, so that it need not have an order.
    forward_only = forward_only_stages(plan)
    parts: list[tuple[int, tuple[str, ...]]] = []
    for index, stage in enumerate(plan.stages):
        own = tuple(block for block in stage.blocks if block in frozen)
        rest = tuple(block for block in stage.blocks if block not in frozen)
        is_mixed = bool(own and rest) and index not in forward_only
        parts += [(index, blocks) for blocks in ((own, rest) if is_mixed else (stage.blocks,))]
    if len(parts) == len(plan.stages):
        return {}
    standalone = dataclasses.replace(
        plan,
        stages=tuple(
            dataclasses.replace(plan.stages[index], blocks=blocks, memory=None) for index, blocks in parts
        ),
        edges=stage_edges(
            graph, [blocks for _, blocks in parts], [plan.stages[index].context for index, _ in parts]
        ),
        memory=(),
    )
    sending = {edge.src for edge in standalone.edges}
    shares: dict[str, float] = {}
    for position, (index, blocks) in enumerate(parts):
        if index in forward_only or not frozen.issuperset(blocks) or position not in sending:
            continue
        share = share_of(measure(standalone, position))
        shares |= dict.fromkeys(blocks, share) if share != 1.0 else {}
    return shares


def _timed(plan: PipelinePlan, costs: CostModel, found: Mapping[int, StageBackend | None]) -> PipelinePlan:
    """Return the plan with what its forward-only stages were measured to take, and its step simulated with that."""
    stages = list(plan.stages)
    for index, one in found.items():
        stage, share = stages[index], share_of(one)
        rows, local = costs.indices(stage.blocks), stage.local_batch_size
        # all plans from torch's times: the planner's times for compiled blocks were of other stages
        changes: dict[str, Any] = {
            "forward_us": share * costs.on(stage).stage_times(rows, local, stage.ranks)[0]
        }
        if stage.half_forward_us:
            changes["half_forward_us"] = share * costs.on(stage).stage_times(rows, local / 2, stage.ranks)[0]
        stages[index] = dataclasses.replace(stage, **changes)
    timed = dataclasses.replace(plan, stages=tuple(stages))
    if timed == plan:
        return plan
    return with_cost(timed, costs)


def _cut_of(plan: PipelinePlan) -> list[tuple[tuple[str, ...], tuple[int, ...], int]]:
    return [(stage.blocks, stage.ranks, stage.micro_batch_size) for stage in plan.stages]


def _noted(plan: PipelinePlan, text: str) -> PipelinePlan:
    return dataclasses.replace(plan, notes=(*plan.notes, f"with backends {text}"))


def _step_text(plan: PipelinePlan, on_torch: PipelinePlan) -> str:
    return f"a step takes {format_ms(plan.iteration_us)} ms simulated, on torch {format_ms(on_torch.iteration_us)}"


def _cut_text(plan: PipelinePlan) -> str:
    parts: Sequence[str] = [f"{stage.name} ({format_ranks(stage)})" for stage in plan.stages]
    return ", ".join(parts)
