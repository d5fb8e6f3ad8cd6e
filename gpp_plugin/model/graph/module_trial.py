"""Calls of a stage's module: names to arguments, results to named outputs, and trial runs that are undone.

Source: this project
Tests: tests/stage_graph/test_equality.py, tests/stage_graph/test_engine.py
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from gpp_plugin.capture.tracing.carried_state import without_history
from gpp_plugin.capture.tracing.meta_copy import rebind_hooks, set_modes, switch_off_caches
from gpp_plugin.capture.tracing.sample_batches import WholeUnit, resize_batch, rows_per_sample
from gpp_plugin.errors import ConfigError, GppError, describe_error
from gpp_plugin.ir.tensors import DTYPE_BYTES, UNIFORM, UNIT, Layout, LayoutKind, TensorSpec, batch_layout
from gpp_plugin.model.graph.resolve import GraphStage
from gpp_plugin.model.materialize import materialize_parameters
from gpp_plugin.runtime.batches import Batch
from gpp_plugin.runtime.random_streams import restored_streams, seed_streams_of
from gpp_plugin.runtime.stage_module import StageFunction

aten = torch.ops.aten

HALF = (torch.bfloat16, torch.float16)

# What is known of a stage graph's tensors: shape, type and layout of every output, by what the stages really made.


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One output as a stage made it from some number of samples."""

    dtype: str
    shape: tuple[int, ...]
    requires_grad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The tensors of a stage graph at one shape of its batches.

    Args:
        num_samples: samples that the specs are of.
        tensors: every output, as "stage.output".
        inputs: every batch key that holds a tensor.
    """

    num_samples: int
    tensors: Mapping[str, TensorSpec]
    inputs: Mapping[str, TensorSpec]


def layout_of(
    stage: GraphStage, node: str, small: Seen, large: Seen, counts: tuple[int, int], *, is_coupled: bool
) -> Layout:
    """Return how an output depends on the samples, from its shapes at two numbers of them.

    Args:
        counts: those numbers, increasing.
        is_coupled: the stage computes on whole loss units.

    Raises:
        ConfigError: it is not what the user said, or fits no layout.
    """
    # An axis is of samples where its length is the same whole number of rows a sample at both counts. With 2 and 4:
    #
    #     [2, 7, 64]  and [4, 7, 64]     batch, axis 0, one row a sample
    #     [14, 64]    and [28, 64]       batch, axis 0, seven rows a sample: tokens of all samples one after another
    #     [7, 64]     and [7, 64]        uniform: the same for every sample (positions, say); a unit if coupled
    #     [2, 2]      and [4, 4]         two such axes, a similarity of all pairs: a unit, and only where it is coupled
    #
    # Two counts are needed, as [2, 7] alone may have two samples or two of something else. The user's word comes
    # before what is seen, and must not contradict it.
    declared = dict(stage.spec.layouts).get(node.rpartition(".")[2])
    shapes = f"{list(small.shape)} of {counts[0]} samples and {list(large.shape)} of {counts[1]}"
    if declared == "uniform":
        if small.shape != large.shape:
            raise ConfigError(f"stage {stage.name!r}: output {node!r} is said to be uniform and is {shapes}")
        return UNIFORM
    axes = _scaling_axes(small.shape, large.shape, counts)
    if isinstance(declared, int):
        if declared not in axes:
            raise ConfigError(
                f"stage {stage.name!r}: output {node!r} is said to have its samples along axis {declared} and is "
                f"{shapes}; axes that grow with the samples: {axes or 'none'}"
            )
        axes = [declared]
    same = [(a, b) for i, (a, b) in enumerate(zip(small.shape, large.shape, strict=False)) if i not in axes]
    others = [a for a, b in same if a != b]
    if len(axes) == 1 and not others:
        rows = small.shape[axes[0]] // counts[0]
        return batch_layout(axes[0], rows)
    if is_coupled:
        return UNIT
    if small.shape == large.shape:
        return UNIFORM
    raise ConfigError(
        f"stage {stage.name!r}: output {node!r} is {shapes}, which has no one batch axis; return one row a sample, "
        f"name its axis with layouts={{{node.rpartition('.')[2]!r}: axis}}, or set coupled=True for what mixes samples"
    )


def _scaling_axes(small: Sequence[int], large: Sequence[int], counts: tuple[int, int]) -> list[int]:
    """Return the axes whose length is a whole number of rows a sample."""
    if len(small) != len(large):
        return []
    return [
        axis
        for axis, (a, b) in enumerate(zip(small, large, strict=True))
        if a != b and a % counts[0] == 0 and a * counts[1] == b * counts[0]
    ]


def spec_of(stage: GraphStage, node: str, seen: Seen, layout: Layout, num_samples: int) -> TensorSpec:
    """Return the spec of an output.

    Raises:
        ConfigError: its type cannot be sent.
    """
    if seen.dtype not in DTYPE_BYTES:
        raise ConfigError(
            f"stage {stage.name!r}: output {node!r} is of type {seen.dtype}, which cannot be sent; the types are "
            f"{', '.join(DTYPE_BYTES)}"
        )
    return TensorSpec(
        name=node,
        dtype=seen.dtype,
        shape=seen.shape,
        num_samples=num_samples,
        layout=layout,
        requires_grad=seen.requires_grad,
    )


def at_new_shape(stage: GraphStage, known: TensorSpec, seen: Seen, num_samples: int) -> TensorSpec:
    """Return the spec of an output at another shape of the batch, its layout being known.

    Raises:
        ConfigError: it no longer fits its layout.
    """
    layout = known.layout
    if len(seen.shape) != len(known.shape) or seen.dtype != known.dtype:
        raise ConfigError(
            f"stage {stage.name!r}: output {known.name!r} was {list(known.shape)} {known.dtype} and is "
            f"{list(seen.shape)} {seen.dtype} for another batch; its form depends on the data"
        )
    if layout.kind is batch_layout().kind:
        rows = seen.shape[layout.axis]
        if rows % num_samples:
            raise ConfigError(
                f"stage {stage.name!r}: output {known.name!r} has {rows} rows of {num_samples} samples along axis "
                f"{layout.axis}; return whole rows a sample"
            )
        layout = batch_layout(layout.axis, rows // num_samples)
    return spec_of(stage, known.name, seen, layout, num_samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where this rank computes.

    Args:
        group: a CPU group of all ranks; None for a single rank.
        dtype: floating batch entries are cast to it.
        stages: the stage of each rank, for messages.
        backend: of groups whose collectives take the device's tensors.
    """

    rank: int
    device: torch.device
    dtype: torch.dtype
    group: dist.ProcessGroup | None
    stages: tuple[str, ...] = ()
    backend: str = "gloo"


Values = dict[tuple[str, int], Tensor]
"""(output, number of samples) -> its values, of outputs that are not floating-point."""


def call_stage(stage: GraphStage, module: nn.Module, arguments: dict[str, Tensor]) -> dict[str, Tensor]:
    """Call a stage's module and return its outputs by "stage.output".

    Raises:
        ConfigError: it fails, or returns something else; names the stage, what it received, and the edges.
    """
    try:
        returned = module(**arguments)
    except GppError:
        raise
    except Exception as error:  # whatever it is: every rank must hear of it
        edges = dict(stage.received)
        shapes = ", ".join(
            f"{name} {list(t.shape)} {str(t.dtype).removeprefix('torch.')}"
            + (f" (edge {edges[name]} -> {stage.name})" if name in edges else "")
            for name, t in arguments.items()
        )
        raise ConfigError(
            f"stage {stage.name!r}: its module fails on {shapes or 'no inputs'}: {describe_error(error)}"
        ) from error
    return named_outputs(stage.name, stage.nodes, returned)


def stage_arguments(
    stage: GraphStage,
    batch: Batch,
    num_samples: int,
    place: Place,
    *,
    tensors: Mapping[str, TensorSpec],
    values: Values,
    largest: int,
) -> dict[str, Tensor]:
    """Return inputs for a run of a stage: rows of the batch, integers of other stages, random numbers.

    Args:
        tensors: specs of what earlier stages make.
        largest: the largest number of samples of these runs: the first samples are the same at every number.
    """
    rows = resize_batch(batch, num_samples)
    arguments: dict[str, Tensor] = {}
    for keyword, key in stage.batch_inputs:
        tensor = rows[key]
        wanted = place.dtype if tensor.is_floating_point() else tensor.dtype
        arguments[keyword] = tensor.to(device=place.device, dtype=wanted, copy=True).contiguous()
    for keyword, node in stage.received:
        spec = tensors[node]
        if (node, num_samples) in values:
            arguments[keyword] = own_shard(values[node, num_samples], stage, keyword, place.rank).to(
                place.device
            )
            continue
        made = _random(spec, largest)
        if spec.layout.kind is LayoutKind.BATCH:
            made = made.narrow(spec.layout.axis, 0, num_samples * spec.layout.rows_per_sample).contiguous()
        made = own_shard(made, stage, keyword, place.rank)
        arguments[keyword] = made.to(place.device).requires_grad_(spec.requires_grad)
    return {keyword: arguments[keyword] for keyword, _ in stage.spec.inputs if keyword in arguments}


def own_shard(tensor: Tensor, stage: GraphStage, keyword: str, rank: int) -> Tensor:
    """Return what ``rank`` has of an argument: the whole, or its shard where tensor ranks share it out.

    Raises:
        ConfigError: the axis does not exist, or the tensor ranks do not divide it.
    """
    axis = dict(stage.spec.sharded_inputs).get(keyword)
    if axis is None:
        return tensor
    size = stage.spec.tensor
    if axis >= tensor.dim() or tensor.shape[axis] % size:
        raise ConfigError(
            f"stage {stage.name!r}: {size} tensor ranks cannot share out input {keyword!r} {list(tensor.shape)} along "
            f"axis {axis}; change sharded_inputs, tensor, or the length"
        )
    return tensor.chunk(size, dim=axis)[stage.spec.ranks.index(rank) % size].contiguous()


def _random(spec: TensorSpec, num_samples: int) -> Tensor:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    generator = torch.Generator().manual_seed(zlib.crc32(spec.name.encode()))
    shape = spec.shape_for(num_samples)
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.zeros(shape, dtype=dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def input_specs(batch: Batch, num_samples: int) -> dict[str, TensorSpec]:
    """Return the specs of a batch's tensors at ``num_samples`` samples."""
    rows = rows_per_sample(batch)
    resized = resize_batch(batch, num_samples)
    return {
        key: TensorSpec(
            name=key,
            dtype=str(resized[key].dtype).removeprefix("torch."),
            shape=tuple(resized[key].shape),
            num_samples=num_samples,
            layout=batch_layout(0, count) if count else UNIT if isinstance(batch, WholeUnit) else UNIFORM,
        )
        for key, count in rows.items()
    }


@contextmanager
def undisturbed(module: nn.Module, *, is_training: bool, device: torch.device) -> Iterator[None]:
    """Run a module as it is, or in evaluation; leave buffers, gradients, modes and random states as they were."""
    modes = {part: part.training for part in module.modules()}
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    set_modes(module, training=is_training)
    try:
        with restored_streams(device):
            yield
    finally:
        for part, mode in modes.items():
            part.training = mode
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if name in buffers and buffers[name].shape == buffer.shape:  # else a cache that has grown
                    buffer.copy_(buffers[name])
        for parameter in module.parameters():
            parameter.grad = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTrial:
    """A stage's module and what it is called with, at one number of samples."""

    stage: GraphStage
    module: nn.Module
    device: torch.device
    arguments: Mapping[str, Tensor]

    def forward(self) -> tuple[list[Tensor], list[Tensor]]:
        """Run a forward; return what its backward starts from, and the received tensors that take a gradient."""
        fresh = {name: t.detach().requires_grad_(t.requires_grad) for name, t in self.arguments.items()}
        outputs = call_stage(self.stage, self.module, fresh)
        roots = [tensor for tensor in outputs.values() if tensor.requires_grad]
        return roots, [tensor for tensor in fresh.values() if tensor.requires_grad]

    def undisturbed(self) -> AbstractContextManager[None]:
        """Train within and leave the module as it is."""
        return undisturbed(self.module, is_training=True, device=self.device)


def named_outputs(stage: str, nodes: Sequence[tuple[str, str]], returned: Any) -> dict[str, Tensor]:
    """Return what a stage's module returned as "stage.output" -> tensor.

    Args:
        nodes: (field of what the module returns, "stage.output").

    Raises:
        ConfigError: it is not what the stage's outputs say.
    """
    # By key where it returns a dict, which may have more than is requested; by position otherwise, where the number
    # must be right. With nodes (("h", "tower.hidden"), ("loss", "tower.loss")):
    #
    #     {"h": x, "loss": y, "aux": z}   {"tower.hidden": x, "tower.loss": y}
    #     (x, y)                          the same: fields are only names then
    #     x                               refused: "returned one tensor"
    #
    # It is checked at every call: a module may return something else for another batch.
    fields = [field for field, _ in nodes]
    listed = ", ".join(map(repr, fields))
    if isinstance(returned, Tensor):
        values: list[Any] = [returned]
    elif isinstance(returned, Mapping):
        missing = [field for field in fields if field not in returned]
        if missing:
            raise ConfigError(
                f"stage {stage!r}: its module returned no {missing[0]!r}, only {', '.join(map(str, returned))}; "
                f"its outputs are {listed}"
            )
        values = [returned[field] for field in fields]
    elif isinstance(returned, (tuple, list)):
        values = list(returned)
    else:
        raise ConfigError(
            f"stage {stage!r}: its module returned a {type(returned).__name__}; return a tensor, a tuple or a "
            f"dict of its outputs {listed}"
        )
    if len(values) != len(fields):
        raise ConfigError(f"stage {stage!r}: its module returned {_count(values)}; its outputs are {listed}")
    for field, value in zip(fields, values, strict=True):
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"stage {stage!r}: output {field!r} is a {type(value).__name__}; outputs are tensors"
            )
    return {node: value for (_, node), value in zip(nodes, values, strict=True)}


def _count(values: Sequence[Any]) -> str:
    return "one tensor" if len(values) == 1 else f"{len(values)} values"


def loss_node(stage: GraphStage) -> str | None:
    """Return what a stage's loss is called: an output, or the sum of several."""
    if not stage.losses:
        return None
    return stage.losses[0] if len(stage.losses) == 1 else " + ".join(stage.losses)


def stage_function(
    stage: GraphStage, module: nn.Module, outputs: Sequence[str], *, tensors: Mapping[str, Tensor]
) -> StageFunction:
    """Return the module as the code of a stage, which computes with the tensors it receives, as captured code does.

    Those are the module's own, but for older versions of its weights (asynchronous mode).

    Args:
        tensors: its parameters and buffers, by what they are called in the graph.
        outputs: which of its outputs, and its `loss_node`, the code returns.
    """
    batch_inputs = tuple(dict.fromkeys(key for _, key in stage.batch_inputs))
    received = tuple(dict.fromkeys(node for _, node in stage.received))
    order = {("batch", key): i for i, key in enumerate(batch_inputs)}
    order |= {("node", node): len(batch_inputs) + i for i, node in enumerate(received)}
    places = [(keyword, order["batch", key]) for keyword, key in stage.batch_inputs]
    places += [(keyword, order["node", node]) for keyword, node in stage.received]
    total = loss_node(stage)
    wanted, count = tuple(outputs), len(tensors)
    local = {id(t): name for name, t in module.named_parameters()}
    # buffers are the module's own, which it may bind anew, whatever version of its weights it computes with
    names = [local.get(id(tensor)) for tensor in tensors.values()]
    # versions replace trained parameters: one of them marks that
    trained = [
        (i, t) for i, t in enumerate(tensors.values()) if isinstance(t, nn.Parameter) and t.requires_grad
    ]
    marker, own = trained[0] if trained else (0, None)

    def call(*operands: Tensor) -> tuple[Tensor, ...]:
        arguments = {keyword: operands[count + place] for keyword, place in places}
        if own is None or operands[marker] is own:
            returned = module(**arguments)
        else:
            weights = {name: t for name, t in zip(names, operands[:count], strict=True) if name is not None}
            returned = functional_call(module, weights, kwargs=arguments)
        found = named_outputs(stage.name, stage.nodes, returned)
        if total is not None and total not in found:
            found[total] = sum(found[node] for node in stage.losses)  # type: ignore[assignment]
        return tuple(found[name] for name in wanted)

    return StageFunction(
        call=call,
        tensors=tuple(tensors),
        constants=(),
        batch_inputs=batch_inputs,
        received=received,
        outputs=wanted,
        code=f"{type(module).__name__}({', '.join(keyword for keyword, _ in places)})",
        given=module,
    )


IDLE = StageFunction(
    call=lambda: (), tensors=(), constants=(), batch_inputs=(), received=(), outputs=(), code=""
)
"""The code of a stage that has nothing to do."""


def copy_model(model: nn.Module, *, device: torch.device, dtype: torch.dtype | None = None) -> nn.Module:
    """Return a copy of a module that can be run without harm: parameters share memory, buffers do not.

    What is on the meta device gets random values, its buffers what the constructor gives them.

    Args:
        dtype: floating parameters become this type, buffers in half precision float32.

    Raises:
        CheckpointError: nothing gives a buffer of a meta module its value.
    """
    # As for tracing (`make_meta_copy`): what `deepcopy` finds in ``memo`` it does not copy, and ties stay ties.
    memo: dict[int, Any] = {**without_history(model)}
    for name, parameter in model.named_parameters():
        wanted = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        value = (
            random_values(name, parameter.shape, wanted, device)
            if parameter.is_meta
            else parameter.detach().to(device, wanted)
        )
        memo[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    buffers = dict(model.named_buffers())
    absent = [name for name, buffer in buffers.items() if buffer.is_meta]
    made = materialize_parameters(model, absent, device=device) if absent else {}
    for name, buffer in buffers.items():
        changed = torch.float32 if dtype is not None and buffer.dtype in HALF else buffer.dtype
        memo[id(buffer)] = made.get(name, buffer).detach().to(device, changed).clone()
    clone = copy.deepcopy(model, memo)
    rebind_hooks(clone, memo)
    # as for tracing: with a cache, which no training reads, transformers' masks would mix samples that lie in one row
    switch_off_caches(clone)
    return clone


def random_values(name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return values as initialisers give: norms near one, everything else of a size that keeps activations finite."""
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    value = torch.randn(shape, dtype=dtype, device=device, generator=generator).mul_(0.02)
    return value.add_(1.0) if len(shape) == 1 and name.endswith("weight") else value


class SameDraws(TorchDispatchMode):
    """Operators draw the same wherever they are called: dropout keeps everything, others start at a seed of their own.

    Dropout on the CPU is a mask ``bernoulli(1 - p) / (1 - p)``; with the mean 1 - p for what is drawn it is ones.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        if func is aten.bernoulli_.float:
            return args[0].fill_(args[1] if len(args) > 1 else 0.5)
        if func is aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        shapes = [tuple(arg.shape) if isinstance(arg, Tensor) else arg for arg in args]
        seed_streams_of(self._device, zlib.crc32(f"{func}{shapes}".encode()))
        return func(*args, **(kwargs or {}))
