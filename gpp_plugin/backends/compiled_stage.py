"""The compiled stages of a job: called as their code is, compiled and held against torch before the first mini-batch.

    at start    each rank runs a forward and a backward of its stages on both, one rank after the other: results and
                gradients must be torch's to rounding, or the stage stays on torch with one warning
    training    code for another shape, or without attention's masks, is compiled where it first runs, and compared
                with torch there on copies of its operands, and the log says so; code for all lengths stays on torch

Source: this project
Tests: tests/backends/test_compiled_blocks.py, tests/integrations/test_compiled_training.py
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks

from gpp_plugin.backends.compiled_blocks import BlockCompiler, CutCode
from gpp_plugin.backends.forward_code import module_in_use
from gpp_plugin.backends.measured_backends import compare_outputs
from gpp_plugin.capture.eager.trial_run import refuse_lost_device
from gpp_plugin.errors import BackendRefused, first_line
from gpp_plugin.ir.plan import Stage
from gpp_plugin.relative_errors import least_scale
from gpp_plugin.runtime.random_streams import restored_streams
from gpp_plugin.runtime.stage_module import StageCode, StageFunction

logger = logging.getLogger(__name__)

MOST_VERSIONS = 4
"""Versions of a stage's code (shapes, masks) that are compiled: each takes seconds, and where there are many, torch is
better."""


Results = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""Outputs, and gradients of what takes one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledCode:
    """A stage's code whose blocks are compiled: called as the code is.

    Args:
        stage: the state of the stage's code at all its shapes.
        blocks: those to be compiled -> their operators.
    """

    stage: CompiledStage
    function: StageFunction
    blocks: Mapping[str, Sequence[str]]

    def __call__(self, *args: Tensor) -> tuple[Tensor, ...]:
        """Run the code."""
        function, count = self.function, len(self.function.tensors)
        module = module_in_use(function)
        if self.stage.is_new(module):
            # separate hooks: those around a forward count the tensors its backward saves, and these backwards free them
            with self.stage.logging_times(), saved_tensors_hooks(lambda t: t, lambda t: t):
                try_code(self, args[:count], args[count:])
        forward = self.stage.forward_of(module, self.blocks)
        if forward is None:
            return function.call(*args)
        # compiled for operands with the layout of the first call, which were contiguous
        operands = (tensor.contiguous() for tensor in args[count:])
        try:
            outputs: tuple[Tensor, ...] = forward(*function.bound, *args[:count], *operands)
        except BackendRefused as error:
            self.stage.refuse(str(error))
            return function.call(*args)
        return outputs


class CompiledStage:
    """The compiled versions of a stage's code; shared by all runners of the stage.

    Args:
        name: the stage's, for messages.
    """

    def __init__(self, name: str, compiler: BlockCompiler) -> None:
        self._name = name
        self._compiler = compiler
        # holds the module: another one made later may have its id
        self._cuts: dict[int, tuple[fx.GraphModule, Callable[..., tuple[Tensor, ...]] | None]] = {}
        self._tried: set[tuple[int, bool]] = set()
        self.is_under_way = False
        """Whether training has begun: from now on other ranks wait while this one compiles."""
        self._is_refused = self._has_warned = False

    def refuse(self, reason: str) -> None:
        """Leave the stage on torch, with one warning."""
        if not self._is_refused:
            logger.warning("stage %s stays on torch instead of compiled code: %s", self._name, reason)
        self._is_refused = True

    def leave(self, reason: str) -> None:
        """Warn once why some of its code is not compiled."""
        if not self._has_warned:
            logger.warning("stage %s: %s", self._name, reason)
        self._has_warned = True

    def forward_of(
        self, module: fx.GraphModule, blocks: Mapping[str, Sequence[str]]
    ) -> Callable[..., tuple[Tensor, ...]] | None:
        """Return the compiled forward of a version of the code; None: the code itself runs."""
        if self._is_refused:
            return None
        if id(module) not in self._cuts:
            if len(self._cuts) >= MOST_VERSIONS:  # further ones are not even noted
                self.leave(
                    f"further shapes run on torch's operators: {MOST_VERSIONS} are compiled; pad to a few lengths"
                )
                return None
            self._cuts[id(module)] = module, None
            try:
                self._cuts[id(module)] = module, CutCode(module, blocks, self._compiler).forward
            except BackendRefused as error:
                self.refuse(str(error))
        return self._cuts[id(module)][1]

    def is_new(self, module: fx.GraphModule) -> bool:
        """Return, once, whether training has begun and this version, with or without gradients, was not run before."""
        version = id(module), torch.is_grad_enabled()
        is_left = self._is_refused or (id(module) not in self._cuts and len(self._cuts) >= MOST_VERSIONS)
        if is_left or version in self._tried:
            return False
        self._tried.add(version)
        return self.is_under_way

    @contextmanager
    def logging_times(self) -> Iterator[None]:
        """Log how long compiling took inside the context."""
        start, before = time.perf_counter(), self._compiler.num_compiled
        yield
        number = self._compiler.num_compiled - before
        if number and not self._is_refused:  # a refusal is logged already
            logger.warning(
                "stage %s met a new shape: %d blocks compiled in %.1f s; pad to a few lengths, or set compile to false",
                self._name,
                number,
                time.perf_counter() - start,
            )


class CompiledStages:
    """The compiled stages of a rank, by name."""

    def __init__(self) -> None:
        self.compiler = BlockCompiler()
        self._stages: dict[str, CompiledStage] = {}

    def code(self, stage: Stage, function: StageFunction, code: StageCode) -> CompiledCode | None:
        """Return a stage's code with those of its blocks compiled that the plan says; None: none of them."""
        if not stage.compiled or function.module is None or code.operators is None:
            return None
        known = self._stages.setdefault(stage.name, CompiledStage(stage.name, self.compiler))
        if code.is_for_lengths:
            known.leave(
                "lengths change: at others than the sample batch's it runs on torch's operators; pad to one length, or "
                "set compile to false"
            )
            return None
        blocks = {name: code.operators.blocks[name] for name in stage.compiled}
        return CompiledCode(stage=known, function=function, blocks=blocks)

    def start(self) -> None:
        """Note that training begins: from now on other ranks wait for what is compiled."""
        for stage in self._stages.values():
            stage.is_under_way = True


def try_code(code: CompiledCode, parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Compile a stage's code, forward and backward; it stays on torch, with a warning, where it is not as torch's.

    Args:
        tensors: like those that it will take, each with its flag whether it takes a gradient.
    """
    try:
        with restored_streams(tensors[0].device if tensors else parameters[0].device):
            right = run_both(code.function.call, parameters, tensors)
            compare_results(run_both(code, parameters, tensors), right)
    except BackendRefused as error:
        code.stage.refuse(str(error))
    except Exception as error:  # whatever compiled code raises
        refuse_lost_device(error)
        code.stage.refuse(f"its first run failed: {type(error).__name__}: {first_line(error)}")


def compare_results(own: Results, right: Results) -> float:
    """Return the largest difference of an output or gradient, by its norm; refuse what is beyond rounding.

    Raises:
        BackendRefused: says which.
    """
    if any(bool(tensor.isnan().any()) for tensor in (*right[0], *right[1])):
        raise BackendRefused("torch's own results are not numbers, so nothing is compared")
    worst = compare_outputs(own[0], right[0])
    return max(worst, compare_outputs(own[1], right[1], what="gradient", least=least_scale(right[1])))


def run_both(
    call: Callable[..., Sequence[Tensor]], parameters: Sequence[Tensor], tensors: Sequence[Tensor]
) -> Results:
    """Return what a forward gives, and the gradients that a backward from all its outputs gives.

    What the code writes (running statistics) is a copy, and random numbers begin at the same place each time.

    Args:
        parameters, tensors: each with its flag whether it takes a gradient.
    """
    # Weights that train are leaves over the same memory, which nothing writes. Buffers are copies: a BatchNorm updates
    # them in each forward, and neither the model's nor the second run may see that. What no output depends on has a
    # gradient of zeros on one side and none on the other: both are zeros here.
    operands = [
        tensor.detach().requires_grad_(True) if tensor.requires_grad else tensor.detach().clone()
        for tensor in (*parameters, *tensors)
    ]
    torch.manual_seed(0)
    outputs = tuple(call(*operands))
    roots = [output for output in outputs if output.requires_grad]
    leaves = [tensor for tensor in operands if tensor.requires_grad]
    seeds = [torch.randn_like(root) for root in roots]
    found: Sequence[Tensor | None] = [None] * len(leaves)
    if roots and leaves:
        found = torch.autograd.grad(roots, leaves, seeds, allow_unused=True)
    gradients = tuple(
        torch.zeros_like(leaf) if gradient is None else gradient
        for leaf, gradient in zip(leaves, found, strict=True)
    )
    return tuple(output.detach() for output in outputs), gradients
