"""Stages that train, compiled block by block: each distinct block once, its parameters as arguments.

A stage's generated code is cut at the borders of its blocks; what lies between them (masks, made of inputs alone) stays
as it is. Blocks of equal code, shapes, types and gradients share what was compiled, with its backward:

    stage code   mask = ...; h1 = layer(w0, h0, mask); h2 = layer(w1, h1, mask); loss = head(w2, h2)
    cut          mask = ...; h1 = A(w0, h0, mask);     h2 = A(w1, h1, mask);     loss = B(w2, h2)

Blocks that draw random numbers are not compiled, so that the only difference to torch's operators is sums in another
order.

Source: this project; regional compilation as of `torch.compile` on repeated layers
Tests: tests/backends/test_compiled_blocks.py, tests/integrations/test_compiled_training.py
"""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import networkx as nx
import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks

from gpp_plugin.backends.forward_code import (
    READS_VALUES,
    module_in_use,
    named_operator,
    operator_name,
    structure_of,
)
from gpp_plugin.backends.measured_backends import compare_outputs
from gpp_plugin.capture.eager.opaque_call import OpaqueCall
from gpp_plugin.capture.eager.trial_run import refuse_lost_device
from gpp_plugin.capture.layouts import is_random
from gpp_plugin.errors import BackendRefused, first_line
from gpp_plugin.ir.plan import Stage
from gpp_plugin.relative_errors import least_scale
from gpp_plugin.runtime.random_streams import restored_streams
from gpp_plugin.runtime.stage_module import StageCode, StageFunction

Compile = Callable[[fx.GraphModule, list[Tensor]], Callable[..., Sequence[Tensor]]]
"""Returns what computes a module on tensors like these, whose gradients flow back through it."""


def compile_with_inductor(module: fx.GraphModule, tensors: list[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """Return the module compiled by inductor, for these shapes, strides and gradients alone."""
    import torch._inductor

    # no Dynamo: the code is a graph already, of one shape, and has no guards to be looked at in each micro-batch
    compiled: Callable[..., Sequence[Tensor]] = torch._inductor.compile(
        module, [*tensors], options={"fallback_random": True}
    )
    return compiled


class BlockCompiler:
    """Compiles blocks, each distinct one once.

    Args:
        compile: the compiler; None: inductor.
    """

    def __init__(self, compile: Compile | None = None) -> None:
        self._compile = compile or compile_with_inductor
        self._known: dict[tuple[object, ...], Callable[..., Sequence[Tensor]]] = {}
        self.name: str = getattr(self._compile, "__name__", "")
        self.seconds = 0.0
        """What compiling took in all; backwards are compiled when they first run, and are not in it."""

    @property
    def num_compiled(self) -> int:
        """Return how many were compiled."""
        return len(self._known)

    def compiled(self, module: fx.GraphModule, tensors: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
        """Return a block compiled for tensors like these.

        Raises:
            BackendRefused: it cannot be compiled; names the operator.
        """
        layouts = ((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors)
        key = (structure_of(module), *layouts)
        found = self._known.get(key)
        if found is None:
            start = time.perf_counter()
            # new leaves with the same layout: tracing reads shapes, strides and flags, and writes nothing
            examples = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
            try:
                # tracing may draw random numbers, which must not change training's. Code that an evaluation runs first
                # is compiled with its backward, as training may run it next.
                with (
                    torch.enable_grad(),
                    restored_streams(tensors[0].device if tensors else torch.device("cpu")),
                ):
                    found = self._compile(fx.GraphModule(module, module.graph), examples)
            except Exception as error:  # whatever a compiler raises
                calls = [node for node in module.graph.nodes if node.op == "call_function"]
                raise BackendRefused(named_operator(calls, error)) from error
            self._known[key] = found
            self.seconds += time.perf_counter() - start
        return found


def refusal(nodes: Iterable[fx.Node]) -> str:
    """Return why a block of these operators cannot be compiled, in one line; empty where it can be tried."""
    for node in nodes:
        if isinstance(node.target, OpaqueCall):
            return f"{node.name} runs a module as it is"
        if is_random(node):
            return f"{node.name} ({node.target}) draws random numbers; set dropout to 0 to have it compiled"
        if any(read.op == "get_attr" for read in node.all_input_nodes):
            return f"{node.name} calls code of its own"
        if node.op == "call_function" and operator_name(node) in READS_VALUES:
            return f"{node.name} ({node.target}) depends on values"
    return ""


class CutCode:
    """A stage's code with some of its blocks cut out, each to be compiled where it first runs.

    Args:
        module: the stage's code.
        blocks: block -> its operators, by the names that ``module`` has.

    Raises:
        BackendRefused: a block cannot be cut out, or not be compiled.
    """

    def __init__(
        self, module: fx.GraphModule, blocks: Mapping[str, Iterable[str]], compiler: BlockCompiler
    ) -> None:
        # One walk over units: blocks, or single operators between them. Of the figure in the module's docstring:
        #
        #     unit              reads      becomes
        #     [mask ops]        -          the same operators
        #     layer 0's ops     w0 h0 mask block_1(w0, h0, mask)[0]
        #     layer 1's ops     w1 h1 mask block_2(w1, h1, mask)[0]     equal code: the compiler has it already
        owner = {name: block for block, names in blocks.items() for name in names}
        root = nn.Module()
        for node in module.graph.find_nodes(op="get_attr"):  # code of control flow that is in no block
            name = str(node.target).partition(".")[0]
            setattr(root, name, getattr(module, name))
        self.blocks: dict[str, _Block] = {}
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        for unit in _in_order(module.graph, owner):
            block = " and ".join(dict.fromkeys(owner[node.name] for node in unit if node.name in owner))
            if not block:
                mapping[unit[0]] = graph.node_copy(unit[0], lambda n: mapping[n])
                continue
            reason = refusal(unit)
            if reason:
                raise BackendRefused(f"block {block!r}: {reason}")
            inside = set(unit)
            reads = list(dict.fromkeys(n for node in unit for n in node.all_input_nodes if n not in inside))
            makes = [node for node in unit if not inside.issuperset(node.users)]
            own = self.blocks[block] = _Block(_module_of(unit, reads, makes), compiler)
            place = f"block_{len(self.blocks)}"
            root.add_module(place, own)
            call = graph.call_module(place, tuple(mapping[read] for read in reads))
            for i, made in enumerate(makes):
                mapping[made] = graph.call_function(operator.getitem, (call, i))
        self.forward = fx.GraphModule(root, graph).forward


def _in_order(graph: fx.Graph, owner: Mapping[str, str]) -> list[list[fx.Node]]:
    """Return a graph's nodes, those of a block together, each group behind what it reads."""
    # The capture's order may mix two branches: a1 b1 a2 b2, where a2 reads a1 alone; a block is put where the inputs of
    # all its operators are there. What reads its results and is read by it joins it, be it another block: the
    # first block of a T5 decoder makes a position bias, masks are added to that outside, and it reads the sum.
    group_of = {node: owner.get(node.name, node) for node in graph.nodes}
    reads = nx.DiGraph()
    reads.add_nodes_from(group_of.values())
    reads.add_edges_from(
        (group_of[read], group_of[node]) for node in graph.nodes for read in node.all_input_nodes
    )
    joined = nx.condensation(reads)
    units: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        units.setdefault(joined.graph["mapping"][group_of[node]], []).append(node)
    by_first = {unit: i for i, unit in enumerate(units)}
    return [units[unit] for unit in nx.lexicographical_topological_sort(joined, key=by_first.__getitem__)]


def _module_of(
    nodes: Sequence[fx.Node], reads: Sequence[fx.Node], makes: Sequence[fx.Node]
) -> fx.GraphModule:
    # numbered names: blocks of equal code are equal texts, to torch's cache on disk as well
    graph = fx.Graph()
    mapping = {read: graph.placeholder(f"input_{i}") for i, read in enumerate(reads)}
    for i, node in enumerate(nodes):
        mapping[node] = graph.node_copy(node, lambda n: mapping[n])
        mapping[node].name = f"made_{i}"
    graph.output(tuple(mapping[made] for made in makes))
    return fx.GraphModule(nn.Module(), graph)


class _Block(nn.Module):
    """A block of a stage's code: compiled at its first call, for the operands of that call."""

    def __init__(self, module: fx.GraphModule, compiler: BlockCompiler) -> None:
        super().__init__()
        self.code = [module]  # in a list: its operators are no parts of the stage's module
        self._compiler = compiler
        self._run: Callable[..., Sequence[Tensor]] | None = None

    def forward(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Run the block."""
        # once: this code runs at one shape, on operands with the layout of the first call
        if self._run is None:
            if not all(isinstance(tensor, Tensor) for tensor in tensors):
                raise BackendRefused("a block takes numbers beside tensors")
            self._run = self._compiler.compiled(self.code[0], tensors)
        return self._run(*tensors)


# The compiled stages of a job: called as their code is, compiled and held against torch before the first mini-batch.
#
#     at start    each rank runs a forward and a backward of its stages on both, one rank after the other: results and
#                 gradients must be torch's to rounding, or the stage stays on torch with one warning
#     training    code for another shape, or without attention's masks, is compiled where it first runs, and compared
#                 with torch there on copies of its operands, and the log says so; code for all lengths stays on torch

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
