"""Which rank of a replica runs which module of a model, and what the others do in its place.

A module is owned where one rank of the replica holds all its parameters. The largest such modules run there, on the
weights in training, with ordinary tensors inside; on the other ranks the same Python runs on shapes, so that caches
have their lengths and outputs their shapes everywhere. What lies between them (a model's own forward, a sum of two
branches) runs on all ranks, on `StageTensor`s.

    LlamaForCausalLM              all ranks
      LlamaModel                  all ranks: embeddings, masks, positions
        embed_tokens              rank 0
        layers.0 .. layers.3      rank 0      its caches lie there
        layers.4 .. layers.7      rank 1
        norm                      rank 1
      lm_head                     rank 1      the logits are broadcast to all ranks

Source: this project
Tests: tests/integrations/test_generation.py, tests/model/test_generator.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.samples import even_ranges
from gpp_plugin.model.generation.micro_batches import ReplicaStopped
from gpp_plugin.model.generation.shape_memory import ShapeMemory
from gpp_plugin.model.generation.stage_tensors import ReplicaRun, StageTensor, real_values

# Which ranks generate together, from which prompts, and what they draw: replicas, and their parts of the prompts.


def replicas_of(plan: PipelinePlan) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each replica: one rank of every stage, each rank once.

    Stages of two ranks each make two replicas: ranks ``0 1 | 2 3`` become ``(0, 2)`` and ``(1, 3)``. Of stages with
    two and one ranks there is one replica, and a rank is idle. Where stages share ranks so that two replicas would
    overlap, or be of different ranks, there is one replica. Tensor ranks have their stage's weights whole meanwhile,
    and are like data-parallel ones.
    """
    # A rank in two replicas would have to run two generations at once. Ranks at one position of all replicas
    # must hold the same stages, for they share these stages' caches where caches are cut.
    number = min(len(stage.ranks) for stage in plan.stages)
    replicas = tuple(
        tuple(dict.fromkeys(stage.ranks[replica] for stage in plan.stages)) for replica in range(number)
    )
    used = [rank for replica in replicas for rank in replica]
    are_alike = len({len(replica) for replica in replicas}) == 1
    return replicas if are_alike and len(used) == len(set(used)) else replicas[:1]


def rows_of(samples: int, replicas: int, replica: int, *, is_cut: bool) -> list[int]:
    """Return the prompts of a replica: neighbours, the first replicas one more.

    Replicas whose caches are cut have equally many, the last ones copies of the first prompt.

    >>> [rows_of(5, 2, each, is_cut=False) for each in (0, 1)], [rows_of(5, 2, each, is_cut=True) for each in (0, 1)]
    ([[0, 1, 2], [3, 4]], [[0, 1, 2], [3, 4, 0]])
    """
    if is_cut:
        each = -(-samples // replicas)
        return [row if row < samples else 0 for row in range(replica * each, (replica + 1) * each)]
    return list(even_ranges(samples, replicas)[replica])


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPart:
    """What a replica generates from: its part of a micro-batch of the prompts.

    Args:
        number: of the micro-batch, whose ``samples`` prompts begin at ``first`` of all ``whole``.
        replica: of ``replicas``.
        is_cut: the replicas' caches are cut along the sequence, so that they go in step.
    """

    number: int
    samples: int
    first: int
    whole: int
    replica: int
    replicas: int
    is_cut: bool

    @property
    def is_whole(self) -> bool:
        """Return whether it is all there is; then prompts need not be numbered."""
        return self.replicas == 1 and self.samples == self.whole

    @property
    def rows(self) -> list[int]:
        """Return the numbers of its prompts in the micro-batch."""
        return rows_of(self.samples, self.replicas, self.replica, is_cut=self.is_cut)

    @property
    def drawn_rows(self) -> list[int]:
        """Return the numbers of its prompts in all."""
        return [self.first + row for row in self.rows]

    def real_rows(self, rows: int) -> int:
        """Return how many sequences of a micro-batch are no copies, where this part's replica made so many."""
        return rows // len(self.rows) * self.samples


class DrawsOfAll(TorchFunctionMode):
    """Makes a part sample as one process with all prompts would: it draws for all of them, and uses its own rows.

    Args:
        rows: of the part, of ``samples``.
    """

    number: int = 0
    """How often it drew."""

    def __init__(self, rows: Sequence[int], samples: int) -> None:
        super().__init__()
        self._rows = list(rows)
        self._samples = samples

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Draw; everything else continues as it is."""
        kwargs = kwargs or {}
        if func is not torch.multinomial:
            return func(*args, **kwargs)
        return self._draw(*args, **kwargs)

    def _draw(self, probabilities: Tensor, num_samples: int) -> Tensor:
        # As torch draws without replacement: the most probable of p / q, q exponential. A prompt may have several rows
        # (beams, several sequences): as many in the replica as in the whole.
        each = probabilities.shape[0] // len(self._rows)
        self.number += 1
        whole = probabilities.new_empty(self._samples * each, probabilities.shape[1]).exponential_(1)
        own = whole.view(self._samples, each, -1)[self._rows].view_as(probabilities)
        return (probabilities / own).topk(num_samples, dim=-1).indices


_Slot = tuple[dict[str, Any], str]
"""A table of a module's parameters or buffers, and a name in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The model's parameters and buffers as a replica holds them.

    Args:
        holders: name of a parameter -> the positions in the replica that hold it.
        live: what this rank holds in training, by name.
        buffers: all buffers, by name; those that are not in ``live`` are the same on all ranks.
        names: every name that a tensor has in the module that generates -> the one that it has here.
    """

    holders: Mapping[str, tuple[int, ...]]
    live: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    names: Mapping[str, str]


@contextmanager
def on_all_ranks(
    model: nn.Module, weights: Weights, run: ReplicaRun | None, memories: MutableMapping[str, ShapeMemory]
) -> Iterator[None]:
    """Let the model run on the replica's weights, in evaluation; afterwards it is as it was.

    Args:
        run: of the replica; None where this rank holds all there is.
        memories: by a module's path, what is known of it on ranks that do not run it; grows.

    Raises:
        ConfigError: a parameter lies on no stage.
    """
    with ExitStack() as undo:
        undo.callback(_restore_modes, [(module, module.training) for module in model.modules()])
        model.eval()
        slots = _set_tensors(model, weights, run, undo)
        if run is not None:
            for path, module, holders in _owned(model, weights):
                chooses_rows = isinstance(module, nn.Embedding)
                memory = memories.setdefault(path, ShapeMemory(chooses_rows=chooses_rows))
                _intercept(module, _Owned(module, holders, run, slots, memory), undo)
            hook = model.register_forward_hook(functools.partial(_broadcast_logits, run))
            undo.callback(hook.remove)
        yield


def _restore_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training


def _broadcast_logits(run: ReplicaRun, module: nn.Module, args: Any, output: Any) -> Any:
    """Give every rank the logits: each of them chooses the next tokens, by the same bits."""
    if isinstance(getattr(output, "logits", None), StageTensor):
        output.logits = run.full(output.logits)
    elif isinstance(output, tuple):
        output = run.full(output)
    return output


# ---- tensors -------------------------------------------------------------------------------------------------


def _set_tensors(
    model: nn.Module, weights: Weights, run: ReplicaRun | None, undo: ExitStack
) -> dict[int, list[tuple[_Slot, Tensor, Tensor]]]:
    """Put the replica's weights in the model's places; return by module what its rank puts there while it runs.

    A parameter stands in all places as a `StageTensor`, on its own rank too: what reads it beside its module (a shared
    embedding, a table of positions) finds the same on all ranks.
    """
    # Three kinds of places, on a rank that holds `a` and not `b`, of a replica of several:
    #
    #     parameter a    a StageTensor over the live weight; the weight itself while its module runs really
    #     parameter b    a StageTensor over its shape
    #     buffers        real everywhere: rotary frequencies, masks, biases of logits
    #
    # One StageTensor stands for a tied weight in all its places, with all positions that hold a copy.
    by_module: dict[int, list[tuple[_Slot, Tensor, Tensor]]] = {}
    made: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for leaf, old in module._parameters.items():
            if old is None:
                continue
            name = _name_of(path, leaf, weights)
            if name not in weights.holders:
                raise ConfigError(f"engine.generate: no stage holds the parameter {name!r}")
            live = weights.live.get(name)
            if run is None:
                assert live is not None, "this rank holds all there is"
                _set(undo, module._parameters, leaf, live)
                continue
            if name not in made:
                value = (old if live is None else live).detach()
                made[name] = StageTensor(
                    value if live is not None else value.to("meta"),
                    weights.holders[name],
                    run,
                    is_weight=True,
                )
            _set(undo, module._parameters, leaf, made[name])
            if live is not None:
                slot = (module._parameters, leaf)
                by_module.setdefault(id(module), []).append((slot, live, made[name]))
        for leaf, old in module._buffers.items():
            if old is not None:
                _set(undo, module._buffers, leaf, weights.buffers[_name_of(path, leaf, weights)])
    return by_module


def _name_of(path: str, leaf: str, weights: Weights) -> str:
    name = f"{path}.{leaf}" if path else leaf
    return weights.names.get(name, name)


def _set(undo: ExitStack, table: dict[str, Any], leaf: str, tensor: Tensor) -> None:
    undo.callback(table.__setitem__, leaf, table[leaf])
    table[leaf] = tensor


# ---- modules -------------------------------------------------------------------------------------------------


def _owned(model: nn.Module, weights: Weights) -> list[tuple[str, nn.Module, tuple[int, ...]]]:
    """Return the largest modules whose parameters lie on one rank, with paths, and positions that hold them all."""
    # From the model's children on: the model itself is never owned, as its logits are for all. A module without
    # parameters of its own runs wherever it is called, on whatever it receives.
    found: dict[int, tuple[str, nn.Module, tuple[int, ...]]] = {}

    def descend(module: nn.Module, path: str) -> None:
        for child_name, child in module.named_children():
            child_path = f"{path}.{child_name}" if path else child_name
            names = [weights.names.get(n, n) for n in _parameter_names(child, child_path)]
            common = set.intersection(*(set(weights.holders[n]) for n in names)) if names else set()
            is_called = type(child).forward is not nn.Module.forward  # a ModuleList is not
            if common and is_called:
                found.setdefault(id(child), (child_path, child, tuple(sorted(common))))
            elif names:
                descend(child, child_path)

    descend(model, "")
    return list(found.values())


def _parameter_names(module: nn.Module, path: str) -> list[str]:
    return [f"{path}.{name}" for name, _ in module.named_parameters(remove_duplicate=False)]


class _Owned:
    """A module that one rank runs."""

    def __init__(
        self,
        module: nn.Module,
        holders: tuple[int, ...],
        run: ReplicaRun,
        slots: Mapping[int, list[tuple[_Slot, Tensor, Tensor]]],
        memory: ShapeMemory,
    ) -> None:
        self._forward = module.forward
        self._holders = holders
        self._run = run
        self._memory = memory
        self._slots = [slot for inner in module.modules() for slot in slots.get(id(inner), ())]
        self._name = type(module).__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # All ranks come here at the same place of the model's Python, and choose the same owner. What is broadcast
        # below comes from a rank that all others wait for. Inside, the owner has ordinary tensors, and sends nothing.
        run = self._run
        owner = run.owner_of((args, kwargs), self._holders)
        args, kwargs = run.bring((args, kwargs), (owner,))
        if run.computes((owner,)):
            try:
                made = self._really(*real_values(args), **real_values(kwargs))
            except ReplicaStopped:
                raise
            except Exception as error:
                # The next tensor of this rank carries the failure to the others; until then it has shapes only.
                run.failure = error
            else:
                return run.as_made_on(made, owner)
        with run.inside(self._name):
            return self._memory.call(run, self._forward, owner, args, kwargs)

    def _really(self, *args: Any, **kwargs: Any) -> Any:
        # Some ten places of a layer, set and set back: about as long as one operator takes.
        for (table, leaf), real, _ in self._slots:
            table[leaf] = real
        try:
            return self._forward(*args, **kwargs)
        finally:
            for (table, leaf), _, stand_in in self._slots:
                table[leaf] = stand_in


def _intercept(module: nn.Module, owned: _Owned, undo: ExitStack) -> None:
    """Call a module by its owner; its signature stays, which HuggingFace reads."""
    before: Callable[..., Any] | None = module.__dict__.get("forward")
    original = module.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return owned(*args, **kwargs)

    module.__dict__["forward"] = forward

    def restore() -> None:
        if before is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = before

    undo.callback(restore)
