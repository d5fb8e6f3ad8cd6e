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

import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, fx, nn

from gpp_plugin.backends.forward_code import READS_VALUES, named_operator, operator_name, structure_of
from gpp_plugin.capture.eager.opaque_call import OpaqueCall
from gpp_plugin.capture.layouts import is_random
from gpp_plugin.errors import BackendRefused
from gpp_plugin.runtime.random_streams import restored_streams

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
            block = owner.get(unit[0].name)
            if block is None:
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
    """Return a graph's nodes, those of a block together, each behind what it reads.

    Raises:
        BackendRefused: a block reads what another operator makes of its results.
    """
    # The capture's order may mix two branches: a1 b1 a2 b2, where a2 reads a1 alone. Blocks are put where their last
    # operator's inputs are there: depth first from the output, a block with all that its operators read.
    units: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        units.setdefault(f"block {owner[node.name]}" if node.name in owner else node.name, []).append(node)
    key_of = {node: key for key, nodes in units.items() for node in nodes}
    done: dict[str, None] = {}
    for first in units:
        waiting, under_way = [(first, False)], set[str]()
        while waiting:
            key, is_ready = waiting.pop()
            if key in done:
                continue
            if is_ready:
                done[key] = None
                continue
            if key in under_way:
                raise BackendRefused(f"{key} reads what is made of its own results")
            under_way.add(key)
            waiting.append((key, True))
            needed = {key_of[read]: None for node in units[key] for read in node.all_input_nodes}
            waiting += [(other, False) for other in reversed(needed) if other != key and other not in done]
    return [units[key] for key in done]


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
