"""Takes what a rank's stages hold out of the user's module, under the names that the graph has for it.

Source: this project
Tests: tests/stage_graph/test_part.py, tests/stage_graph/test_captured.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.capture.tracing.carried_state import initial_values
from gpp_plugin.config.block import GraphPipelineConfig
from gpp_plugin.errors import CheckpointError
from gpp_plugin.integrations.huggingface.hf_weights import tied_names
from gpp_plugin.ir.analysis import TensorShard
from gpp_plugin.ir.block_graph import Parameter, is_carried
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.ir.serialize import escape_name, whole_file
from gpp_plugin.model.graph.captured_part import CapturedPart, owner_of_block
from gpp_plugin.model.materialize import release_parameters
from gpp_plugin.model.preparation import Setting, materialize_for
from gpp_plugin.runtime.rank_runner import RankRunner
from gpp_plugin.runtime.ranks.collectives import exchange
from gpp_plugin.runtime.stage_module import Reference, StageFunction, StageModule, joined_module
from gpp_plugin.runtime.tensor_ranks import mark_part, own_part, parameter_shards

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

    # Data positions hold copies, so position 0 writes; tensor ranks hold shards, so each of its ranks writes its own.
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
            data, tensor = stage.position(rank)
            if data:
                continue
            suffix = "" if stage.tensor == 1 else f"-tensor-{tensor}"
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


class ModuleHolder:
    """A captured module and those of its stages that this rank runs.

    Args:
        prefix: what the graph puts before the module's own names; a part of a stage graph has its name there.
        called: names of the module with the prefix, of parameters that other stages have too -> what the graph calls
            them.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        config: GraphPipelineConfig,
        setting: Setting,
        prefix: str = "",
        called: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._module = module
        self._config = config
        self._setting = setting
        self._prefix = prefix
        own = {name: name.removeprefix(prefix) for name in called}
        self._called = {own[name]: called[name] for name in called}
        self._own = {called[name]: own[name] for name in called}
        self._states: dict[str, Parameter] = {}
        # a tied tensor has one name in a stage, the first
        self._first = tied_names(module)

    def make_modules(
        self, reference: Reference, plan: PipelinePlan, held: Mapping[int, Sequence[str]]
    ) -> tuple[StageModule, ...]:
        """Return stages of these parameters and buffers; the user's module keeps those only, and its buffers.

        A stage trains the user's own parameters, so that what is written to them, or read of them, holds; where two
        stages hold one, the first has it, and the other one its memory. Of what a stage's tensor ranks share out it
        has this rank's part.

        Args:
            held: stage of the plan -> the names of what it holds.
        """
        names = list(held.values())
        known = {p.name: p for p in reference.analysis.op_graph.parameters}
        self._states |= {name: p for name, p in known.items() if is_carried(name)}
        used = {name for block in reference.block_graph.blocks for name in block.parameters}
        shards = [parameter_shards(reference, plan, index) for index in held]
        tensors = self._materialize(
            dict.fromkeys(
                n for of_stage, cut in zip(names, shards, strict=True) for n in of_stage if n not in cut
            )
        )
        parts = [self._own_parts(cut, plan.stages[index]) for cut, index in zip(shards, held, strict=True)]
        theirs = dict(self._module.named_parameters(remove_duplicate=False))
        taken: dict[str, nn.Parameter] = {}
        for name, tensor in tensors.items():
            parameter = theirs.get(self._local(name))
            # what no block reads trains nothing, whatever its owner requests: the stage has a parameter of its own
            if parameter is None or (name not in used and parameter.requires_grad):
                continue
            if not parameter.is_meta and torch._has_compatible_shallow_copy_type(parameter, tensor):
                parameter.grad = None
                parameter.data = tensor
                taken[name] = parameter
        # what was cast is a copy: the module keeps only what the stage shares with it
        local = {self._local(name): tensor for name, tensor in tensors.items()}
        shared = {name for name, tensor in local.items() if name in theirs and _is_same(theirs[name], tensor)}
        buffers = {self._local(n) for n, p in known.items() if p.is_buffer and n.startswith(self._prefix)}
        release_parameters(self._module, keep=shared | buffers)

        def held_by(of_stage: Sequence[str], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
            # a user's parameter is the first stage's that holds it
            return {n: own[n] if n in own else taken.pop(n, tensors[n]) for n in of_stage}

        return tuple(
            _marked(
                StageModule(
                    tensors=held_by(of_stage, own),
                    parameters=[name for name in of_stage if not known[name].is_buffer],
                    frozen=frozenset(n for n in of_stage if not known[n].requires_grad or n not in used),
                    persistent=frozenset(n for n in of_stage if known[n].is_persistent),
                ),
                cut,
            )
            for of_stage, own, cut in zip(names, parts, shards, strict=True)
        )

    def _own_parts(self, shards: Mapping[str, TensorShard], stage: Stage) -> dict[str, Tensor]:
        """Return this rank's parts of what a stage's tensor ranks share out."""
        position = stage.position(self._setting.rank)[1]

        def cut_of(shard: TensorShard) -> Callable[[Tensor], Tensor]:
            return lambda whole: own_part(whole, shard, position, stage.tensor)

        return self._materialize(shards, cuts={self._local(n): cut_of(shard) for n, shard in shards.items()})

    def complete_module(self, module: StageModule, names: Iterable[str]) -> None:
        """Give the stage those tensors of ``names`` that only evaluation reads."""
        held = module.named_tensors()
        missing = [name for name in names if name not in held]
        if missing:
            module.add_buffers(self._materialize(missing))

    def all_buffers(self, live: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """Return all buffers of the module on a device, those of this rank's stages as they are in training.

        Args:
            live: the stages' buffers, under the names of the graph.
        """
        own = {name: buffer for name, buffer in self._module.named_buffers(remove_duplicate=False)}
        missing = [name for name, buffer in own.items() if buffer.is_meta and self._prefix + name not in live]
        made = self._materialize([self._prefix + name for name in missing])
        held = {**made, **live}
        return {
            name: held[self._prefix + name] if self._prefix + name in held else buffer.to(device)
            for name, buffer in own.items()
        }

    def share_weights(self, modules: Sequence[StageModule]) -> None:
        """Let the user's module have the stages' parameters and buffers as its own, but for parts of them.

        What is written to them, or registered on them, is then of the stage; parameters that were on the meta device
        are replaced, others are the stage's already.
        """
        stages = joined_module(modules)
        for held, kind in ((stages.named_parameters, "_parameters"), (stages.named_buffers, "_buffers")):
            known: dict[str, Tensor] = dict(held(remove_duplicate=False))
            for path, module in self._module.named_modules(remove_duplicate=False):
                table: dict[str, Tensor | None] = getattr(module, kind)
                for leaf, tensor in table.items():
                    name = f"{path}.{leaf}" if path else leaf
                    own = known.get(self._called.get(name, self._prefix + self._first.get(name, name)))
                    if tensor is None or own is None or own is tensor or own.shape != tensor.shape:
                        continue
                    if kind == "_buffers" or own.requires_grad or not tensor.requires_grad:
                        own._backward_hooks = tensor._backward_hooks or own._backward_hooks
                        table[leaf] = own

    def _materialize(
        self, names: Iterable[str], *, cuts: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({})
    ) -> dict[str, Tensor]:
        local = {self._local(name): name for name in names}
        states = [
            dataclasses.replace(self._states[name], name=own)
            for own, name in local.items()
            if name in self._states
        ]
        tensors = {
            name: value.to(self._setting.device)
            for name, value in initial_values(self._module, states).items()
        }
        own = [name for name in local if name not in tensors]
        tensors |= materialize_for(self._module, own, setting=self._setting, config=self._config, cuts=cuts)
        return {local[name]: tensor for name, tensor in tensors.items()}

    def _local(self, name: str) -> str:
        """Return what the module calls a tensor of the graph."""
        return self._own.get(name, name.removeprefix(self._prefix))


def _marked(module: StageModule, shards: Mapping[str, TensorShard]) -> StageModule:
    for name, shard in shards.items():
        mark_part(module.get_parameter(name), shard)
    return module


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same memory."""
    return not tensor.is_meta and tensor.data_ptr() == other.data_ptr()


@torch.no_grad()
def separate_copies(stages: Sequence[StageModule]) -> None:
    """Give each stage of a rank its own memory for what an earlier one holds too: each trains its own copy."""
    seen: set[int] = set()
    for module in stages:
        tensors = [t for t in module.named_tensors().values() if t.numel() and not t.is_meta]
        for tensor in tensors:
            if tensor.data_ptr() in seen:
                tensor.data = tensor.data.clone()
        seen.update(tensor.data_ptr() for tensor in tensors)


def names_held(
    part: CapturedPart, runner: RankRunner, stage: int, function: StageFunction
) -> tuple[str, ...]:
    """Return what a stage of a captured part holds on this rank.

    What no block of the part reads must still be in files: it rests on the part's last stage.
    """
    graph, op_graph = runner.reference.block_graph, runner.reference.analysis.op_graph
    own = set(runner.plan.stages[stage].blocks)
    names = [*function.tensors]
    names += [n for block in graph.blocks if block.name in own for n in block.parameters]
    is_alone, name = part.stage.is_alone, part.stage.name
    mine = {block.name for block in graph.blocks if is_alone or owner_of_block(block.name) == name}
    last = max(i for i, other in enumerate(runner.plan.stages) if not mine.isdisjoint(other.blocks))
    if last == stage:
        used = {n for block in graph.blocks for n in block.parameters}
        names += [
            p.name
            for p in op_graph.parameters
            if p.name.startswith(part.stage.prefix)
            and p.name not in used
            and (p.is_persistent or not p.is_buffer)
        ]
    return tuple(dict.fromkeys(names))
