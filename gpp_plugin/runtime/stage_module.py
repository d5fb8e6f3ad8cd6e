"""Generated stage code: the operators of a stage's blocks as one function of parameters and inputs.

A `StageModule` holds a stage's parameters under their HuggingFace names, whatever shapes it runs at.
A `StageFunction` is the code for one shape: captured at one number of samples (and, say, one sequence
length), it takes parameters, model inputs and received tensors, and returns what other stages need.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gpp_plugin.capture.captured_graph import CapturedGraph
from gpp_plugin.capture.coarsen import coarsen
from gpp_plugin.capture.mask_values import Mask, drop_operators, sizes_of_bias, without_masks
from gpp_plugin.capture.tracing.clean import on_device, placed_body
from gpp_plugin.capture.tracing.symbolic_sizes import sizes_in, with_sizes
from gpp_plugin.errors import CaptureError, ConfigError
from gpp_plugin.ir.analysis import Analysis
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.ir.tensors import TensorSpec
from gpp_plugin.runtime.batches import Batch
from gpp_plugin.runtime.memory.segments import StageOperators


class Shell(nn.Module):
    """A module that holds a stage's tensors and is never called."""

    def refuse_hooks(self) -> None:
        """Refuse hooks from now on, on this module and the shells in it: nothing would call them."""
        for module in self.modules():
            if isinstance(module, Shell):
                for name in dir(nn.Module):
                    if name.startswith("register_") and name.endswith("hook") and "state_dict" not in name:
                        module.__dict__[name] = _refuse_hook


def _refuse_hook(*given: Any, **named: Any) -> Any:
    raise ConfigError(
        "engine.module holds a stage's parameters and is never called, so that no hook on it would be; register hooks "
        "on the model before deepspeed.initialize, or on a parameter (parameter.register_hook)"
    )


class StageModule(Shell):
    """The parameters and buffers of one stage under their HuggingFace names.

    Args:
        tensors: name -> tensor.
        parameters: which names are parameters; one that is an `nn.Parameter` already is taken as it is.
        frozen: names of parameters that take no gradient.
    """

    def __init__(
        self,
        *,
        tensors: Mapping[str, Tensor],
        parameters: Iterable[str],
        frozen: frozenset[str] = frozenset(),
        persistent: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        parameter_names = set(parameters)
        for name, tensor in tensors.items():
            owner, leaf = owner_of(self, name)
            if name in parameter_names:
                if isinstance(tensor, nn.Parameter):
                    owner.register_parameter(leaf, tensor)
                    continue
                parameter = nn.Parameter(tensor.detach(), requires_grad=False)
                parameter.requires_grad_(name not in frozen)
                owner.register_parameter(leaf, parameter)
            else:
                owner.register_buffer(leaf, tensor.detach(), persistent=name in persistent)

    def add_buffers(self, tensors: Mapping[str, Tensor]) -> None:
        """Add buffers that no state dict holds (what only evaluation reads)."""
        for name, tensor in tensors.items():
            owner, leaf = owner_of(self, name)
            owner.register_buffer(leaf, tensor.detach(), persistent=False)

    def named_tensors(self) -> dict[str, Tensor]:
        """Return parameters and buffers by name."""
        found: dict[str, Tensor] = dict(self.named_parameters())
        found.update(self.named_buffers())
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: a stage is run by the executor, micro-batch by micro-batch."""
        raise RuntimeError("a stage module is not called; use engine.train_batch() or engine.eval_batch()")


def joined_module(stages: Sequence[nn.Module]) -> nn.Module:
    """Return one module with the parameters and buffers of several stages, the first one's where two hold a name.

    They are those of the stages, not copies; of one stage it is the stage itself.
    """
    if len(stages) == 1:
        return stages[0]
    joined = StageModule(tensors={}, parameters=())
    for stage in reversed(stages):
        persistent = set(stage.state_dict(keep_vars=True))
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            owner, leaf = owner_of(joined, name)
            owner.register_parameter(leaf, parameter)
        for name, buffer in stage.named_buffers(remove_duplicate=False):
            owner, leaf = owner_of(joined, name)
            owner.register_buffer(leaf, buffer, persistent=name in persistent)
    return joined


def owner_of(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that a dotted name's tensor belongs to, made where it is missing, and its last part."""
    *path, leaf = name.split(".")
    module = root
    for part in path:
        child = module._modules.get(part)
        if child is None:
            child = Shell()
            module.add_module(part, child)
        module = child
    return module, leaf


class SizeArguments:
    """The sizes that generated code takes as arguments, in front of all others: each of them once.

    Args:
        key: what equal sizes have in common.
        finish: gives code the names by which it is known.
    """

    def __init__(self, key: Callable[[Any], Any]) -> None:
        self._key = key
        self._names: dict[Any, str] = {}
        self.sizes: list[Any] = []

    def add(self, graph: torch.fx.Graph) -> None:
        """Make arguments of all symbolic sizes in a graph, and of those that its `MaskChoice` may need."""
        found = [size for node in graph.nodes for size in (*sizes_in(node), *sizes_of_bias(node))]
        first = next(iter(graph.nodes))
        with graph.inserting_before(first):
            for size in found:
                if self._key(size) not in self._names:
                    self._names[self._key(size)] = graph.placeholder(f"size_{len(self.sizes)}").name
                    self.sizes.append(size)
        self.bind(graph)

    def bind(self, graph: torch.fx.Graph) -> None:
        """Let the operators of a graph, or of a version of it, read the arguments instead of symbols."""
        known = {node.name: node for node in graph.nodes if node.op == "placeholder"}

        def argument(size: Any) -> torch.fx.Node:
            return known[self._names[self._key(size)]]

        for node in graph.nodes:
            node.args = with_sizes(node.args, argument)
            node.kwargs = with_sizes(node.kwargs, argument)


class MaskChoice:
    """Generated code whose attention has masks, or has none where eager models look at their values and leave them out.

    All versions take and return the same; each is made when it is first asked for. Inputs count as padded until `use`
    says otherwise.

    Args:
        versions: the code by the masks that it leaves out (node name, whether it is causal): that with all masks is
            there. Where sizes were left open it is shared by the code at all sizes.
        bound: the code's first arguments.
        masks: of attention, made of the code's own inputs or of sizes alone.
        arguments: take the sizes that were left open; None where none were.
    """

    def __init__(
        self,
        versions: dict[frozenset[tuple[str, bool]], torch.fx.GraphModule],
        bound: tuple[Tensor | int, ...],
        masks: Mapping[str, Mask],
        arguments: SizeArguments | None = None,
    ) -> None:
        self._bound = bound
        self._masks = masks
        self._arguments = arguments
        self.inputs = frozenset(key for mask in masks.values() for key in mask.inputs)
        # by what each mask that is left out is, too: at another length it may be something else
        self._versions = versions
        self._wanted: frozenset[str] | None = None
        self.use(())

    def use(self, ones: Iterable[str]) -> None:
        """Use the code for batches whose inputs ``ones`` hold ones only, from now on."""
        wanted = self.inputs.intersection(ones)
        if wanted == self._wanted:
            return
        self._wanted = wanted
        version = frozenset((n, mask.is_causal) for n, mask in self._masks.items() if mask.inputs <= wanted)
        if version not in self._versions:
            masked = self._versions[frozenset()]
            graph, unread = without_masks(masked.graph, self._masks, wanted)
            drop_operators(graph, unread)
            if self._arguments is not None:
                self._arguments.bind(graph)
            self._versions[version] = torch.fx.GraphModule(masked, graph)
        self.module = self._versions[version]
        self._forward = self.module.forward

    def __call__(self, *args: Tensor) -> tuple[Tensor, ...]:
        """Run the code."""
        outputs: tuple[Tensor, ...] = self._forward(*self._bound, *args)
        return outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFunction:
    """A stage's code at one shape.

    Args:
        call: takes tensors in the order ``tensors + batch_inputs + received`` after ``constants`` are bound,
            returns a tuple in the order of ``outputs``; ``choice`` where that is not None.
        tensors: parameter and buffer names it reads.
        constants: tensors the capture lifted, bound in front of everything else.
        batch_inputs: batch keys it reads; ``received``: node names that other stages make.
        outputs: node names it returns.
        code: the generated Python, for the curious and for error messages.
        sizes: values of the sizes that were left open; the first arguments of code that is for all lengths.
        choice: decides for each mini-batch whether attention has masks; None where that never changes.
        module: what the code was generated from, ``bound`` its first arguments; with all masks where there is a
            choice. None for code of other origin.
        given: the user's module that the code calls; None for generated code.
    """

    call: Callable[..., tuple[Tensor, ...]]
    tensors: tuple[str, ...]
    constants: tuple[Tensor, ...]
    batch_inputs: tuple[str, ...]
    received: tuple[str, ...]
    outputs: tuple[str, ...]
    code: str
    sizes: tuple[int, ...] = ()
    choice: MaskChoice | None = None
    module: torch.fx.GraphModule | None = None
    given: nn.Module | None = None

    @property
    def bound(self) -> tuple[Tensor | int, ...]:
        """Return what generated code takes in front of parameters."""
        return (*self.sizes, *self.constants)


def build_stage_function(
    captured: CapturedGraph,
    nodes: Iterable[str],
    outputs: Sequence[str],
    *,
    with_replicated: bool = True,
    ones: Collection[str] = (),
) -> StageFunction:
    """Generate the code of the given operator nodes, with the replicated nodes they need, for ``captured.device``.

    Masks that hide nothing whatever the batch holds are left out; others are the code's `MaskChoice`.

    Args:
        nodes: names of the operator nodes of the stage's blocks.
        outputs: names of nodes to return.
        with_replicated: compute replicated nodes here; if not, they are received where they are read (profiling times
            them apart).
        ones: inputs that hold ones only in every batch that the code will see.

    Raises:
        CaptureError: an output is not among the stage's nodes.
    """
    kept, groups = _select(captured, nodes, with_replicated=with_replicated)
    module = _generate(captured, kept, groups, outputs, frozenset(ones))
    if not with_replicated:
        # take no arguments that the code does not read
        unread = {n.name for n in module.graph.nodes if n.op == "placeholder" and not n.users}
        drop_operators(module.graph, unread)
        module.recompile()
        groups = {kind: [n for n in own if n.name not in unread] for kind, own in groups.items()}
    masks = _choosable(module, captured, groups)(captured.masks)
    function = _as_function(captured, module, groups, outputs)
    return _bound(function, MaskChoice({frozenset(): module}, function.bound, masks) if masks else None)


def _select(
    captured: CapturedGraph, nodes: Iterable[str], *, with_replicated: bool
) -> tuple[list[torch.fx.Node], dict[str, list[torch.fx.Node]]]:
    """Return the operators that code computes, and what they read from outside by kind."""
    nodes = set(nodes)
    missing = sorted(nodes - {node.name for node in captured.graph.nodes})
    if missing:
        raise CaptureError(
            f"the graph captured at {captured.op_graph.num_samples} samples has no nodes {missing[:4]}; "
            "the model's graph changes with the shape of its inputs, use one shape or pad to a few"
        )
    # What the code computes are the operators of ``wanted``, in the order of the capture; what it takes is whatever
    # they read beside. Of ``linear(hidden, weight) + mask`` in a stage behind another one that makes ``hidden``, with
    # ``mask`` replicated and made of ``attention_mask``: weight is a tensor, attention_mask an input, hidden is
    # received.
    wanted = captured.replicated_closure(nodes) if with_replicated else nodes
    kept = [node for node in captured.graph.nodes if node.name in wanted]
    return kept, _group_sources(captured, kept, wanted)


def _choosable(
    module: torch.fx.GraphModule, captured: CapturedGraph, groups: Mapping[str, Sequence[torch.fx.Node]]
) -> Callable[[Mapping[str, Mask]], dict[str, Mask]]:
    """Return what finds, of some masks, those that a stage's code makes of inputs that it has."""
    # a mask that another stage sends is there for all batches: this one may not see what it is made of
    own = {captured.inputs[source.name] for source in groups["input"]}
    made = {node.name for node in module.graph.nodes if node.op == "call_function"}
    return lambda masks: {n: m for n, m in masks.items() if m.inputs and n in made and m.inputs <= own}


def _as_function(
    captured: CapturedGraph,
    module: torch.fx.GraphModule,
    groups: Mapping[str, Sequence[torch.fx.Node]],
    outputs: Sequence[str],
) -> StageFunction:
    constants = tuple(captured.constants[source.name].to(captured.device) for source in groups["constant"])
    return StageFunction(
        call=module.forward,
        tensors=tuple(captured.parameters[source.name] for source in groups["tensor"]),
        constants=constants,
        batch_inputs=tuple(captured.inputs[source.name] for source in groups["input"]),
        received=tuple(source.name for source in groups["received"]),
        outputs=tuple(outputs),
        code=module.code,
        module=module,
    )


def _bound(function: StageFunction, choice: MaskChoice | None) -> StageFunction:
    """Return code with its first arguments bound."""
    bound, forward = function.bound, function.call
    call = choice or ((lambda *args: forward(*bound, *args)) if bound else forward)
    return replace(function, call=call, choice=choice)


class OpenStage:
    """The code of a stage with sizes left open: generated once, bound to the sizes of each batch.

    Args:
        captured: its graph has symbolic sizes; masks are given with the sizes.
        nodes, outputs: as of `build_stage_function`.
        key: what equal sizes have in common.

    Attributes:
        sizes: the symbolic sizes that the code takes.
        names: what the code makes and takes, by node name.
    """

    def __init__(
        self,
        captured: CapturedGraph,
        nodes: Iterable[str],
        outputs: Sequence[str],
        *,
        key: Callable[[Any], Any],
        finish: Callable[[StageFunction], StageFunction] = lambda function: function,
    ) -> None:
        kept, groups = _select(captured, nodes, with_replicated=True)
        self._arguments = SizeArguments(key)
        module = _generate(captured, kept, groups, outputs, frozenset(), self._arguments)
        self._choosable = _choosable(module, captured, groups)
        self._function = finish(_as_function(captured, module, groups, outputs))
        self.sizes: Sequence[Any] = self._arguments.sizes
        self.names = frozenset(node.name for node in module.graph.nodes)
        self._versions = {frozenset[tuple[str, bool]](): module}

    def at(self, sizes: Sequence[int], masks: Mapping[str, Mask]) -> StageFunction:
        """Return the code at these values of `sizes`.

        Args:
            masks: what attention's masks are at these sizes.
        """
        function = replace(self._function, sizes=tuple(sizes))
        # made of sizes alone, a mask is known, whoever makes it
        known = {n: m for n, m in masks.items() if not m.inputs and n in self.names}
        known |= self._choosable(masks)
        choice = None
        if known:
            choice = MaskChoice(self._versions, function.bound, known, self._arguments)
        return _bound(function, choice)


_ARGUMENTS = ("constant", "tensor", "input", "received")
"""What a stage's code takes, in this order."""


def _group_sources(
    captured: CapturedGraph, kept: Sequence[torch.fx.Node], wanted: Set[str]
) -> dict[str, list[torch.fx.Node]]:
    """Return what the operators ``kept`` read from outside, by kind; a ``helper`` is no tensor (a sub-graph's code)."""
    sources = dict.fromkeys(
        source for node in kept for source in node.all_input_nodes if source.name not in wanted
    )
    groups: dict[str, list[torch.fx.Node]] = {kind: [] for kind in (*_ARGUMENTS, "helper")}
    for source in sources:
        if source.op == "get_attr":
            groups["helper"].append(source)
        elif source.name in captured.constants:
            groups["constant"].append(source)
        elif source.name in captured.parameters:
            groups["tensor"].append(source)
        elif source.name in captured.inputs and source.name not in captured.op_graph.received:
            groups["input"].append(source)
        else:
            groups["received"].append(source)
    return groups


def _generate(
    captured: CapturedGraph,
    kept: Sequence[torch.fx.Node],
    groups: Mapping[str, Sequence[torch.fx.Node]],
    outputs: Sequence[str],
    ones: frozenset[str],
    arguments: SizeArguments | None = None,
) -> torch.fx.GraphModule:
    """Return the code that runs ``kept``, without the masks that hide nothing where the inputs ``ones`` hold ones.

    Args:
        arguments: takes the sizes that were left open.

    Raises:
        CaptureError: an output is not among what it computes or takes.
    """
    graph = torch.fx.Graph()
    mapping = {source: graph.placeholder(source.name) for kind in _ARGUMENTS for source in groups[kind]}
    root: dict[str, Any] = {}
    for source in groups["helper"]:
        root[str(source.target)] = placed_body(captured.attributes[str(source.target)], captured.device)
        mapping[source] = graph.node_copy(source)
    for node in kept:
        copied = mapping[node] = graph.node_copy(node, lambda n: mapping[n])
        copied.args = on_device(copied.args, captured.device)
        copied.kwargs = on_device(copied.kwargs, captured.device)
    made = {source.name: copy for source, copy in mapping.items()}
    absent = [name for name in outputs if name not in made]
    if absent:
        raise CaptureError(f"stage outputs {absent} are not computed by its blocks")
    graph.output(tuple(made[name] for name in outputs))
    if arguments is not None:
        arguments.add(graph)
        return torch.fx.GraphModule(_root_module(root), graph)
    graph, unread = without_masks(graph, captured.masks, ones)
    drop_operators(graph, unread)
    return torch.fx.GraphModule(_root_module(root), graph)


def _root_module(attributes: Mapping[str, Any]) -> nn.Module:
    root = nn.Module()
    for name, value in attributes.items():
        owner, leaf = owner_of(root, name)
        setattr(owner, leaf, value)
    return root


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A model as captured once, in one mode: what was found out, and its blocks."""

    analysis: Analysis
    block_graph: BlockGraph
    granularity: str


def make_reference(analysis: Analysis, granularity: str) -> Reference:
    """Coarsen what a capture found out to blocks."""
    graph = coarsen(analysis, granularity=granularity)
    return Reference(analysis=analysis, block_graph=graph, granularity=granularity)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCode:
    """A stage at one shape.

    Args:
        tensors: every tensor that crosses a stage's boundary, at that shape.
        inputs: the model's inputs by batch key.
        loss: which of the function's outputs is the loss, if the stage yields one.
        outputs: named output of the model -> which of the function's outputs it is.
        operators: what the code is made of; None where it is not captured.
        is_for_lengths: bound to this shape from code that holds for others: at another length that is all to be done.
    """

    function: StageFunction
    tensors: Mapping[str, TensorSpec]
    inputs: Mapping[str, TensorSpec]
    loss: str | None
    outputs: Mapping[str, str]
    operators: StageOperators | None = None
    is_for_lengths: bool = False


NO_CODE = StageCode(
    function=StageFunction(
        call=lambda: (), tensors=(), constants=(), batch_inputs=(), received=(), outputs=(), code=""
    ),
    tensors={},
    inputs={},
    loss=None,
    outputs={},
)
"""Of a rank that has nothing to run."""


class StageSource(Protocol):
    """Gives a rank the code of its stage."""

    def stage_code(
        self, reference: Reference, plan: PipelinePlan, stage: int, batch: Batch, num_samples: int
    ) -> StageCode:
        """Return a stage's code for ``num_samples`` samples of the shapes of ``batch``.

        Args:
            reference: of the mode the code is for.
            plan: on ``reference.block_graph``.
        """


class StageForwards(Protocol):
    """Runs the forwards of stages on something else than torch's operators."""

    def forward(
        self, stage: str, function: StageFunction, parameters: Sequence[Tensor]
    ) -> Callable[..., tuple[Tensor, ...]] | None:
        """Return what is called as ``function`` is and gives the same, of a stage that has no backwards.

        None: the function itself runs.
        """

    def trained(
        self, stage: Stage, function: StageFunction, code: StageCode
    ) -> Callable[..., tuple[Tensor, ...]] | None:
        """Return the same of a stage that has backwards, which flow back through what is returned.

        Args:
            code: what ``function`` is of, at these samples or at twice as many.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedModule:
    """A captured module as its user holds it.

    Args:
        prefix: what stages put before its own names of tensors.
        eager: its modules that run as they are.
        trace: traces it as it is, on this rank alone: returns all that two traces can differ in, and which attributes
            of which modules (by path) were read.
    """

    module: nn.Module
    prefix: str
    eager: tuple[str, ...]
    trace: Callable[[], tuple[str, frozenset[tuple[str, str]]]]
