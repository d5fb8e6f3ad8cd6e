"""A rank's own stage: made by its factory, moved and cast, under its stage's name, written to files of its own."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.capture.tracing.meta_copy import describe_parameters, set_modes
from gpp_plugin.errors import CheckpointError, ConfigError, GppError, describe_error
from gpp_plugin.ir.block_graph import Parameter
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.serialize import escape_name, whole_file
from gpp_plugin.model.graph.resolve import GraphStage, ResolvedGraph
from gpp_plugin.model.graph.stage_graph import StageContext
from gpp_plugin.runtime.random_streams import restored_streams, seed_streams_of
from gpp_plugin.runtime.ranks.collectives import exchange
from gpp_plugin.runtime.stage_module import StageModule, owner_of


class UserModule(StageModule):
    """The user's module as a stage: its parameters are called "<stage>.<parameter>".

    A parameter that is tied to another stage's is called as the first of them, on every stage that has it.

    Args:
        tied: this stage's names of tied parameters -> what they are called.
    """

    def __init__(self, stage: str, module: nn.Module, *, tied: Mapping[str, str]) -> None:
        super().__init__(tensors={}, parameters=())
        parameters = dict(module.named_parameters(remove_duplicate=False))
        for own, name in tied.items():  # registered first: `named_parameters` calls it so
            if name != own:
                owner, leaf = owner_of(self, name)
                owner.register_parameter(leaf, parameters[own.partition(".")[2]])
        self.add_module(stage, module)
        self._stage = stage

    @property
    def user_module(self) -> nn.Module:
        """Return the user's module."""
        return self.get_submodule(self._stage)


def make_module(stage: GraphStage, context: StageContext, *, seed: int) -> nn.Module:
    """Return the stage's module where and as it will train; a factory draws from a seed of its stage.

    Raises:
        ConfigError: the factory raised, made no module, or left weights unmade.
    """
    make = stage.spec.make
    if isinstance(make, nn.Module):
        module = make
    else:
        with restored_streams(context.device):
            seed_streams_of(context.device, seed)
            try:
                module = call_factory(stage.name, make, context)
            except GppError:
                raise
            except Exception as error:  # whatever it is: every rank must hear of it
                raise ConfigError(
                    f"stage {stage.name!r}: its factory failed on rank {context.rank}: {describe_error(error)}"
                ) from error
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"stage {stage.name!r}: its factory returned a {type(module).__name__}; return a torch module"
        )
    unmade = [name for name, tensor in module.named_parameters() if tensor.is_meta]
    if unmade:
        raise ConfigError(
            f"stage {stage.name!r}: parameter {unmade[0]!r} is on the meta device; make real weights in a factory, "
            "which is called on the stage's ranks only"
        )
    set_modes(module, training=True)
    module.to(context.device)
    for parameter in module.parameters():
        if parameter.is_floating_point() and parameter.dtype != context.dtype:
            parameter.data = parameter.data.to(context.dtype)
    return module


def call_factory(stage: str, make: Callable[..., nn.Module], context: StageContext) -> nn.Module:
    """Call a factory with the context, or without where it takes nothing.

    Raises:
        ConfigError: it must be called with something else.
    """
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):  # written in C: it says when it is called
        return make(context)
    parameters = signature.parameters.values()
    arguments = (context,) if any(map(_may_be_context, parameters)) else ()
    try:
        signature.bind(*arguments)
    except TypeError:
        raise ConfigError(
            f"stage {stage!r}: its factory takes {signature}; it is called with one StageContext, or with nothing: "
            "bind the rest (functools.partial, or lambda context: ...)"
        ) from None
    return make(*arguments)


def _may_be_context(parameter: inspect.Parameter) -> bool:
    """Return whether a factory wants the context for a parameter: one called so, or without a default."""
    is_open = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    return is_open or parameter.name == "context"


def tied_names(graph: ResolvedGraph) -> dict[str, str]:
    """Return "stage.parameter" -> what it is called, for every tied parameter: the first stage's name of it."""
    place = {stage.name: i for i, stage in enumerate(graph.stages)}
    return {
        name: min(group, key=lambda other: place[other.partition(".")[0]])
        for group in graph.ties
        for name in group
    }


def describe_tensors(stage: str, module: nn.Module) -> tuple[Parameter, ...]:
    """Return the parameters and buffers of a stage's module as this rank holds them, under "<stage>.<name>"."""
    return tuple(
        dataclasses.replace(p, name=f"{stage}.{p.name}", aliases=tuple(f"{stage}.{n}" for n in p.aliases))
        for p in describe_parameters(module)
    )


def check_replicas(graph: ResolvedGraph, held: Sequence[Mapping[str, Sequence[Parameter]]]) -> None:
    """Refuse a stage whose data positions hold different parameters: their gradients are summed.

    Args:
        held: by rank, by stage.

    Raises:
        ConfigError: names stage, rank and parameter.
    """
    for stage in graph.stages:
        ranks, tensor = stage.spec.ranks, stage.spec.tensor
        for position, rank in enumerate(ranks):
            first = ranks[position % tensor]
            theirs, own = _trained(held[first][stage.name]), _trained(held[rank][stage.name])
            name = next((n for n in (*theirs, *own) if theirs.get(n) != own.get(n)), None)
            if name is not None:
                raise ConfigError(
                    f"stage {stage.name!r}: parameter {name!r} is {theirs.get(name, 'missing')} on rank {first} and "
                    f"{own.get(name, 'missing')} on rank {rank}, which is to hold a copy; its factory must make the "
                    "same of every StageContext but for tensor_rank"
                )


def _trained(tensors: Sequence[Parameter]) -> dict[str, str]:
    return {
        p.name: f"{list(p.shape)} {p.dtype}{'' if p.requires_grad else ', frozen'}"
        for p in tensors
        if not p.is_buffer
    }


def check_ties(graph: ResolvedGraph, known: Mapping[str, Sequence[Parameter]]) -> None:
    """Refuse ties of parameters that do not exist or are not alike.

    Args:
        known: stage -> what its ranks hold.

    Raises:
        ConfigError: names the parameter.
    """
    # Every name a parameter has finds it, those that its own module ties included. graph.tie("text.wte", "head.out")
    # with 512 x 64 weights on both sides passes; refused are a name that is none, two parameters of one stage (which
    # would have to be one tensor there, as only the module can make them), and 512 x 64 with 64 x 512: gradients are
    # summed element by element, so a tie between stages cannot transpose.
    by_name = {
        name: p
        for tensors in known.values()
        for p in tensors
        for name in (p.name, *p.aliases)
        if not p.is_buffer
    }
    for group in graph.ties:
        for name in group:
            if name not in by_name:
                stage = name.partition(".")[0]
                there = [p.name for p in known[stage] if not p.is_buffer]
                raise ConfigError(
                    f"graph.tie: {name!r} is no parameter of stage {stage!r}; it has {', '.join(there[:8])}"
                )
        first = by_name[group[0]]
        of_stage: dict[str, Parameter] = {}
        for name in group:
            other = by_name[name]
            before = of_stage.setdefault(name.partition(".")[0], other)
            if before is not other:
                raise ConfigError(
                    f"graph.tie: {before.name!r} and {name!r} are two parameters of one stage; make them one in its "
                    "module, and name either here"
                )
            if (other.shape, other.dtype) != (first.shape, first.dtype):
                raise ConfigError(
                    f"graph.tie: {group[0]!r} is {list(first.shape)} {first.dtype} on a rank and {name!r} is "
                    f"{list(other.shape)} {other.dtype}; tied parameters have one shape"
                )


# Weights of a stage graph for use without this package: a safetensors file a stage, under its module's own names.
#
# <dir>/vision.safetensors                              `vision.load_state_dict(load_file(...))`
# <dir>/language-tensor-0.safetensors, -tensor-1...     each tensor rank's shards
# <dir>/tower.0-1.safetensors, tower.2-3.safetensors    a captured part in two stages
#
# Characters of a stage's name that are not safe in one are escaped: ``tower.3%2Bhead%2Bloss.safetensors``.


def save_stages(
    directory: str | Path,
    *,
    states: Mapping[int, tuple[str, Mapping[str, Tensor]]],
    plan: PipelinePlan,
    rank: int,
    group: dist.ProcessGroup | None,
) -> None:
    """Write every stage's weights; collective over all ranks.

    Args:
        states: of this rank's stages, by their index in the plan: the name of the stage as the user gave it, which is
            what the names of its tensors begin with, and its tensors.

    Raises:
        CheckpointError: a rank could not write; on every rank.
    """
    # Data and context positions hold copies, so the first one writes; tensor ranks hold shards, so each writes its own.
    # A stage "language" on ranks 2 to 5 with tensor=2:
    #
    #     rank 2, (data 0, tensor 0)   language-tensor-0.safetensors      rank 4, (1, 0)   nothing
    #     rank 3, (0, 1)               language-tensor-1.safetensors      rank 5, (1, 1)   nothing
    #
    # All ranks come to the exchange: if one cannot write, all say so.
    from safetensors.torch import save_file

    def write() -> None:
        for index, (name, state) in states.items():
            stage = plan.stages[index]
            if rank not in stage.tensor_ranks(0):
                continue
            suffix = "" if stage.tensor == 1 else f"-tensor-{stage.tensor_position(rank)}"
            own = {
                key.removeprefix(f"{name}."): value.detach().cpu().contiguous().clone()
                for key, value in state.items()
                if key.startswith(f"{name}.")
            }
            try:
                path = Path(directory) / f"{escape_name(stage.name)}{suffix}.safetensors"
                with whole_file(path) as temporary:
                    save_file(own, temporary, metadata={"format": "pt"})
            except OSError as error:
                raise CheckpointError(
                    f"rank {rank} cannot write stage {stage.name!r} to {directory}: {error}"
                ) from error

    names = [plan.names_on_rank(each) for each in range(plan.num_ranks)]
    exchange(write, what="save_pretrained", group=group, stages=names)
