"""The backends of a job: chosen together before the first mini-batch, built where a stage first runs, checked there.

    choose        each forward-only stage is measured on its first rank, one rank after the other while the rest wait;
                  every rank gets all choices
    run           at each shape the first micro-batch runs on torch; the backend is built, must give the same, and
                  takes over with the next one

A built forward holds copies of the weights: where these were written since (a checkpoint was loaded) it is built anew.
A failure, or a result that differs, leaves the stage on torch at that shape, with one warning.

Source: this project
Tests: tests/backends/test_backends.py, tests/integrations/test_backend_training.py
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_plugin.backends.compiled_blocks import CompiledStages, try_code
from gpp_plugin.backends.forward_code import ForwardCode, ForwardRunner, forward_code, module_in_use
from gpp_plugin.backends.measured_backends import (
    TORCH,
    BackendLog,
    BuiltForward,
    build_checked,
    build_forward,
)
from gpp_plugin.backends.place_forward import UNMATCHED, CuttableForward, place_forward
from gpp_plugin.errors import BackendRefused, ConfigError, nearest
from gpp_plugin.ir.plan import PipelinePlan, Stage, forward_only_stages
from gpp_plugin.ir.profile import PlacedGroup, StageBackend
from gpp_plugin.ir.tensors import TensorSpec
from gpp_plugin.plugins import BACKENDS, find_backend, named_backends
from gpp_plugin.report.progress import step
from gpp_plugin.runtime.batches import Batch, ones_among
from gpp_plugin.runtime.random_streams import restored_streams
from gpp_plugin.runtime.rank_runner import RankRunner
from gpp_plugin.runtime.ranks.collectives import exchange
from gpp_plugin.runtime.stage_module import StageCode, StageFunction

logger = logging.getLogger(__name__)

MOST_SHAPES = 8
"""Shapes of a stage that are built for: building takes seconds, and a stage of many shapes is better off on torch."""

Asked = str | Sequence[str] | Mapping[str, str]
"""``off``, ``auto``, a list of backends, or the backend of each stage: the value of ``graph_pipeline.backends``."""


def requested_backends(requested: Asked, stage: str) -> tuple[str, ...]:
    """Return the backends that a stage may run on beside torch; one that the user names for it is taken as it is."""
    if isinstance(requested, str):
        usable = [name for name in BACKENDS.names() if not find_backend(name).missing()]
        return () if requested == "off" else tuple(name for name in usable if name != TORCH)
    if isinstance(requested, Mapping):
        return (requested[stage],) if stage in requested else ()
    return tuple(name for name in requested if name != TORCH)


def check_backends_installed(requested: Asked) -> None:
    """Refuse backends whose packages are not there, before a model is captured.

    Raises:
        ConfigError: names the backend, and what to install.
    """
    for name in named_backends(requested):
        reason = find_backend(name).missing()
        if reason:
            raise ConfigError(f"graph_pipeline.backends: backend {name!r} {reason}, or leave it out")


def check_stages(requested: Asked, forward_only: Sequence[str], trained: Sequence[str]) -> None:
    """Refuse stages that are none, or that train.

    Raises:
        ConfigError: names the stage.
    """
    for stage, backend in requested.items() if isinstance(requested, Mapping) else ():
        if stage in forward_only or backend == TORCH and stage in trained:
            continue
        where = f"graph_pipeline.backends: {stage!r}: {backend!r}"
        if stage in trained:
            raise ConfigError(
                f"{where}: the stage trains, and backends run stages without gradients alone; freeze its parameters "
                "(requires_grad_(False)) or remove it"
            )
        known = (*forward_only, *trained)
        raise ConfigError(f"{where}: no such stage{nearest(stage, known)}; stages are {', '.join(known)}")


def choose_backend(
    requested: Asked, stage: str, make_code: Callable[[], ForwardCode], log: BackendLog
) -> StageBackend:
    """Return the backend of a stage: the one that the user names, or the fastest of those that may be used.

    Args:
        make_code: the stage's code, made where it is measured.
    """
    names = requested_backends(requested, stage)
    if isinstance(requested, Mapping) or not names:
        return StageBackend(stage=stage, groups=(PlacedGroup(backend=names[0] if names else TORCH),))
    return place_forward(make_code(), names, log=log)


class BackendForward:
    """A stage's forward on its backend, called as the stage's code is; the first call at a shape runs that code.

    Args:
        chosen: the stage's backends.
        function: the stage's code; ``parameters`` are its first arguments.
        built: the forwards built of the stage, shared by all its runners.
    """

    def __init__(
        self, chosen: StageBackend, function: StageFunction, parameters: Sequence[Tensor], built: BuiltOfStage
    ) -> None:
        self._chosen = chosen
        self._shared = built
        self._function = function
        self._parameters = tuple(parameters)
        self._reads_weights = all(find_backend(group.backend).reads_weights for group in chosen.groups)
        # by the id of the code's version (attention with or without masks): the version, which is held so that no later
        # one gets its id; what runs it, None on torch; and the state of the weights that this holds for
        self._built: dict[int, tuple[torch.fx.GraphModule, BuiltForward | None, int]] = {}

    @torch.no_grad()
    def __call__(self, *args: Tensor) -> tuple[Tensor, ...]:
        """Run the forward."""
        version = module_in_use(self._function)
        _, forward, writes = self._built.get(id(version), (None, None, None))
        if writes is None or (not self._reads_weights and writes != self._writes()):
            return self._take_over(version, args)
        if forward is None:
            return self._function.call(*args)
        return forward(*args[len(self._parameters) :])

    @property
    def is_taken(self) -> bool:
        """Return whether the backend has taken over at any version of the code."""
        return any(forward is not None for _, forward, _ in self._built.values())

    def _writes(self) -> int:
        """Return a number that changes with each write into the weights, and with their addresses."""
        return hash(tuple((tensor.data_ptr(), tensor._version) for tensor in self._parameters))

    def _take_over(self, module: torch.fx.GraphModule, args: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run on torch; the backend takes over from the next micro-batch on if it gives the same."""
        # 1st micro-batch   torch's result is used; the backend is built, runs twice, and is compared
        # 2nd and later     the backend computes, or torch for good, at this shape and with these weights
        tensors = args[len(self._parameters) :]
        before = self._writes()
        outputs = self._function.call(*args)
        code = forward_code(self._chosen.stage, self._function, self._parameters, tensors)
        forward: BuiltForward | None = None
        try:
            reason = code.refusal()
            if reason:
                raise BackendRefused(reason)
            if self._writes() != before:
                raise BackendRefused("it writes its buffers")
            forward = self._shared.build(code, before, lambda: self._build(code), outputs)
        except BackendRefused as error:
            self._shared.refused = str(error)
            logger.warning(
                "stage %s stays on torch instead of %s: %s", self._chosen.stage, self._chosen.backend, error
            )
        self._built[id(module)] = module, forward, self._writes()
        return outputs

    def _build(self, code: ForwardCode) -> Callable[..., Sequence[Tensor]]:
        groups = self._chosen.groups
        if len(groups) == 1 and not groups[0].operators:
            return build_forward(groups[0].backend, code)
        forward = CuttableForward(code)
        return forward.build(forward.groups(groups), build_forward)


class BuiltOfStage:
    """The forwards built of a stage, by operators and shapes: training and evaluation may share one.

    Args:
        most: shapes that are built for.
    """

    def __init__(self, most: int = MOST_SHAPES) -> None:
        self._most = most
        # by signature: the constants inside, the state of the weights inside, and the forward
        self._built: dict[str, tuple[Sequence[Tensor | int], int, BuiltForward]] = {}
        self.refused = ""
        """Why the last shape stayed on torch; empty where none did."""

    @property
    def is_left(self) -> bool:
        """Return whether the backend was refused and runs no shape."""
        return bool(self.refused) and not self._built

    def build(
        self, code: ForwardCode, writes: int, build: Callable[[], ForwardRunner], expected: Sequence[Tensor]
    ) -> BuiltForward:
        """Return code built with weights in this state, and checked; an earlier build is checked again.

        Raises:
            BackendRefused: as of `build_checked`, or there are as many shapes as are built for.
        """
        key = code.signature
        if key not in self._built and len(self._built) >= self._most:
            raise BackendRefused(
                f"it has met {self._most} shapes, each of which is built for anew; pad to a few lengths"
            )

        def again() -> ForwardRunner:
            if key in self._built:
                # sizes are part of the signature; constants of equal shapes (masks) may have other values
                bound, writes_then, forward = self._built[key]
                if writes_then == writes and all(
                    torch.equal(own, other)
                    for own, other in zip(bound, code.bound, strict=True)
                    if isinstance(own, Tensor) and isinstance(other, Tensor)
                ):
                    return forward.run
            return build()

        # building may draw random numbers (examples, tuning), which must not change training's
        with restored_streams(expected[0].device):
            found = build_checked(again, code.examples, expected)
        self._built[key] = code.bound, writes, found
        return found


class StageBackends:
    """The backends of a job's stages, once they are chosen; makes the forwards of stage runners.

    Args:
        choices: by the stage's name.
    """

    def __init__(self, choices: Mapping[str, StageBackend] | None = None) -> None:
        self.choices = dict(choices or {})
        self.compiled = CompiledStages()
        self._built: dict[str, BuiltOfStage] = {}

    def in_use(self) -> dict[str, StageBackend]:
        """Return the backend of each stage, by name; torch for stages of this rank whose backend does not run."""
        left = {stage: built for stage, built in self._built.items() if built.is_left}
        return self.choices | {
            stage: StageBackend(
                stage=stage,
                groups=(PlacedGroup(backend=TORCH),),
                notes=(f"instead of {self.choices[stage].backend}: {built.refused}",),
            )
            for stage, built in left.items()
        }

    def forward(
        self, stage: str, function: StageFunction, parameters: Sequence[Tensor]
    ) -> Callable[..., tuple[Tensor, ...]] | None:
        """Return the callable that runs a stage's forward at a shape; None: its code.

        Args:
            parameters: none of them takes a gradient, or the stage stays as it is.
        """
        chosen = self.choices.get(stage)
        if chosen is None or chosen.is_torch or function.module is None:
            return None
        if any(tensor.requires_grad for tensor in parameters):
            return None
        built = self._built.setdefault(stage, BuiltOfStage())
        return BackendForward(chosen, function, parameters, built)

    def trained(
        self, stage: Stage, function: StageFunction, code: StageCode
    ) -> Callable[..., tuple[Tensor, ...]] | None:
        """Return the stage's code with those of its blocks compiled that the plan says; None: its code runs."""
        return self.compiled.code(stage, function, code)


# Chosen: one rank measures at a time, and all ranks get the choice.


def choose_backends(
    requested: Asked,
    runner: RankRunner,
    batch: Batch,
    *,
    log: BackendLog,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> dict[str, StageBackend]:
    """Return the backend of each stage that trains nothing, by name, the same on every rank; collective.

    Each stage is measured on its first rank while the others wait: ranks that measure side by side measure each other.

    Args:
        runner: this rank's, bound.
        batch: the sample batch.

    Raises:
        ConfigError: a stage is named that is none, or that trains.
    """
    # Stages 0 and 2 train nothing, on ranks (0, 1) and (3): rank 0 measures stage 0 while 1, 2 and 3 wait in the
    # exchange, then rank 3 measures stage 2 while the others wait. Rank 1 uses rank 0's choice.
    plan = runner.plan
    forward_only = sorted(forward_only_stages(plan))
    names = [stage.name for stage in plan.stages]
    own = [names[index] for index in forward_only]
    check_stages(requested, own, [name for name in names if name not in own])
    chosen: dict[str, StageBackend] = {}
    for index in forward_only:
        stage = names[index]

        def choose(index: int = index, stage: str = stage) -> StageBackend | None:
            if runner.rank != plan.stages[index].ranks[0]:
                return None
            code, weights = runner.runner_of(index).code_and_weights(batch)
            # a unit's tensors are as they are; others may be described at another number of samples
            samples = None if runner.has_ragged_units else plan.stages[index].local_batch_size
            own = plan.stages[index]
            if code.function.module is None or own.model_parallel > 1:
                torch_alone = (PlacedGroup(backend=TORCH),)
                user_module = "a module of yours, run as it is"
                kind = "tensor" if own.tensor > 1 else "context"
                note = f"its {kind} ranks compute together" if own.model_parallel > 1 else user_module
                return StageBackend(stage=stage, groups=torch_alone, notes=(note,))

            def code_of_stage() -> ForwardCode:
                return forward_code(stage, code.function, weights, examples_of(code, batch, samples, device))

            return choose_backend(requested, stage, code_of_stage, log)

        answers = exchange(choose, what=f"measuring backends of stage {stage!r}", group=group)
        found = next(answer for answer in answers if answer is not None)
        chosen[stage] = found
        if runner.rank == 0:
            # a user who lists backends is warned of those that cannot run it or match nothing; "auto" takes what can
            fails = any(cost.refused for cost in found.costs) or any(UNMATCHED in n for n in found.notes)
            level = logging.WARNING if fails and requested != "auto" else logging.INFO
            logger.log(level, "%s", describe(found))
    if not forward_only and runner.rank == 0:
        logger.info("backends: every stage trains, and all of them run on torch")
    return chosen


def compile_stages(
    compiled: CompiledStages,
    runner: RankRunner,
    batch: Batch,
    *,
    whole: AbstractContextManager[None],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> None:
    """Compile the stages whose plan says so, and compare them with torch's operators; collective.

    What rank 0 measured while it planned is in the compiler's cache on disk.

    Args:
        runner: this rank's, bound.
        batch: the sample batch.
        whole: entered where anything is compiled, by all ranks: gathers weights that ranks hold in shards.
    """
    # Stages 0 and 1 on ranks 0 and 1: both compile at the same time, rank 0 finds its blocks on disk, rank 1 those that
    # are like rank 0's. A stage that turns out wrong stays on torch on its own rank alone: plans and programs are the
    # same, and only its times are others than planned.
    plan = runner.plan

    def compile_own() -> None:
        for index in runner.stages:
            stage, own = plan.stages[index], runner.runner_of(index)
            if not stage.compiled:
                continue
            code, weights = own.code_and_weights(batch)
            call = compiled.code(stage, code.function, code)
            if call is None:
                continue
            if (choice := code.function.choice) is not None:  # the version that such batches run
                choice.use(ones_among(batch, choice.inputs))
            tensors = examples_of(code, batch, stage.local_batch_size, device)
            takes = own.gradient_inputs(code)
            names = (*code.function.batch_inputs, *code.function.received)
            for name, tensor in zip(names, tensors, strict=True):
                tensor.requires_grad_(name in takes)
            try_code(call, weights, tensors)

    if any(stage.compiled for stage in plan.stages):
        # a weight between mini-batches has another stride, and no numbers to compare
        with step("compile"), whole:
            exchange(compile_own, what="compiling stages", group=group)
    compiled.start()


def with_backends(plan: PipelinePlan, chosen: Mapping[str, StageBackend]) -> PipelinePlan:
    """Return the plan with what its stages run on, and a line for each in its notes."""
    # what a saved plan ran on elsewhere says nothing of this job
    taken = {name: one for name, one in chosen.items() if not one.is_torch}
    stages = tuple(
        dataclasses.replace(stage, backend=taken[stage.name].backend if stage.name in taken else "")
        for stage in plan.stages
    )
    notes = (*plan.notes, *map(describe, taken.values()))
    return dataclasses.replace(plan, stages=stages, notes=notes)


def describe(chosen: StageBackend) -> str:
    """Return what a stage runs on, and why, in one line."""
    # Not measured (the user named it):   stage vision runs on openvino
    # measured, and another won:          stage vision runs on openvino: a forward takes 5.10 ms, on torch 7.02 (...)
    # measured, and torch won:            stage vision runs on torch: 7.02 ms a forward, the best other 1.03 x ...
    text = f"stage {chosen.stage} runs on {chosen.backend}"
    if chosen.us and chosen.torch_us:
        if chosen.is_torch:
            others = [cost for cost in chosen.costs if cost.backend != TORCH]
            best = min((cost.us for cost in others if not cost.refused), default=0.0)
            ratio = f", the best other {chosen.torch_us / best:.2f} x as fast" if best else ""
            text += f": {chosen.torch_us / 1e3:.2f} ms a forward{ratio}"
        else:
            text += (
                f": a forward takes {chosen.us / 1e3:.2f} ms, on torch {chosen.torch_us / 1e3:.2f} "
                f"({chosen.torch_us / chosen.us:.2f} x as fast)"
            )
    refused = (f"not on {cost.backend}: {cost.refused}" for cost in chosen.costs if cost.refused)
    return "; ".join((text, *refused, *chosen.notes))


def examples_of(code: StageCode, batch: Batch, samples: int | None, device: torch.device) -> list[Tensor]:
    """Return tensors like those that a stage's code takes behind its weights: the sample batch's rows, or made up.

    Args:
        samples: of a micro-batch on one rank; None: as many as each tensor was described with.
    """
    # Time does not depend on values, and whether results are right is seen on a real micro-batch before the backend
    # takes over; but token ids must be there to be looked up, so zeros stand for what is received as whole numbers.
    function = code.function
    tensors = [_example(code.inputs[key], batch.get(key), samples, device) for key in function.batch_inputs]
    return tensors + [_example(code.tensors[name], None, samples, device) for name in function.received]


def _example(spec: TensorSpec, entry: Any, samples: int | None, device: torch.device) -> Tensor:
    """Return a tensor of a shape and type: the first rows of a batch's entry, random numbers, or zeros."""
    dtype = getattr(torch, spec.dtype)
    shape = spec.shape_for(spec.num_samples if samples is None else samples)
    if isinstance(entry, Tensor) and not entry.is_meta:
        sizes = zip(entry.shape, shape, strict=False)
        if entry.ndim == len(shape) and all(there >= wanted for there, wanted in sizes):
            return entry[tuple(slice(size) for size in shape)].to(device, dtype).contiguous()
    if dtype.is_floating_point:
        # a separate generator: what training draws does not depend on what was measured
        generator = torch.Generator().manual_seed(0)
        return torch.randn(shape, generator=generator).to(device, dtype)
    return torch.zeros(shape, dtype=dtype, device=device)
