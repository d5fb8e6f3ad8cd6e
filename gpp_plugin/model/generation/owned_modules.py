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
Tests: tests/integrations/test_generation.py, tests/model/test_generator.py, tests/model/test_shape_memory.py,
    tests/model/test_lanes.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gpp_plugin.errors import ConfigError
from gpp_plugin.integrations.huggingface.generate_calls import cache_layers
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.tensors import even_ranges
from gpp_plugin.model.generation.micro_batches import ReplicaStopped
from gpp_plugin.model.generation.stage_tensors import (
    ReplicaRun,
    StageTensor,
    map_leaves,
    map_tensors,
    real_values,
)

# Which ranks generate together, from which prompts, and what they draw: replicas, and their parts of the prompts.


def replicas_of(plan: PipelinePlan) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each replica: one rank of every stage, each rank once.

    Stages of two ranks each make two replicas: ranks ``0 1 | 2 3`` become ``(0, 2)`` and ``(1, 3)``. Of stages with
    two and one ranks there is one replica, and a rank is idle. Where stages share ranks so that two replicas would
    overlap, or be of different ranks, there is one replica. Tensor ranks have their stage's weights whole meanwhile,
    context ranks always, and both are like data-parallel ones.
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
        for module in model.modules():
            undo.callback(setattr, module, "training", module.training)
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
            own = (f"{child_path}.{name}" for name, _ in child.named_parameters(remove_duplicate=False))
            names = [weights.names.get(n, n) for n in own]
            common = set.intersection(*(set(weights.holders[n]) for n in names)) if names else set()
            is_called = type(child).forward is not nn.Module.forward  # a ModuleList is not
            if common and is_called:
                found.setdefault(id(child), (child_path, child, tuple(sorted(common))))
            elif names:
                descend(child, child_path)

    descend(model, "")
    return list(found.values())


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


# What modules of other ranks return, by the shapes of what they are called with: so that they run on shapes seldom.
#
# A module that another rank runs returns shapes here and grows its caches. Both were the same at the last two tokens,
# or they depend on how long the sequences are; so a call is looked up:
#
#     key      shapes of the stage tensors, and what else is no number        decides about the result
#     state    shapes of ordinary tensors, numbers, lengths of the caches;    differs from token to token
#              without a cache also the numbers in small tensors of integers,
#              but for embeddings, which choose a row by each
#
#     known    the same key and state; or two states of the same key that gave the same, with caches as full or empty
#
# Where there are no stage tensors (a tower's inputs are pixels and sizes of images), the state belongs to the key.
# It is remembered beyond a generation, and for all its micro-batches: to run forty layers of other ranks on shapes
# three times takes as long as many tokens. Where a module keeps notes in a cache of which lengths say nothing (sliding
# windows, linear attention), another cache is met anew.


_Place = tuple[int, int]

_MAX_KEYS = 64
"""Kinds of calls of a module that are remembered, the last ones."""

_MAX_VALUES = 256
"""Elements up to which a tensor of integers (sizes of images, lengths) may decide about the shape of a result."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """A tensor that was returned."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Growth:
    """What a layer of a cache took up: [rows, heads, positions, size] of keys and values."""

    place: _Place
    keys: tuple[int, ...]
    values: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Seen:
    state: tuple[Any, ...]
    were_empty: tuple[bool, ...]
    result: Any
    growth: tuple[_Growth, ...]


class ShapeMemory:
    """Remembers one module.

    Args:
        chooses_rows: the module returns a row for each number that it receives (an embedding), whatever the number.
    """

    def __init__(self, *, chooses_rows: bool = False) -> None:
        self._chooses_rows = chooses_rows
        self._seen: dict[Any, list[_Seen]] = {}
        self._touched: set[_Place] = set()
        self._are_lengths_all = True  # that a cache says of itself
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # of caches, where they are not
        self._met = 0

    def call(
        self,
        run: ReplicaRun,
        forward: Callable[..., Any],
        owner: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return what the module returns on shapes, as tensors of the rank that runs it; caches have grown.

        Args:
            run: of this rank's replica, which the returned tensors are of.
            owner: the position that runs the module really.
        """
        key: list[Any] = []
        state: list[Any] = []
        caches: list[Any] = []
        plain: list[Tensor] = []
        _describe((args, kwargs), key, state, caches, plain)
        # A layer with a cache runs for each token, and its tensors are masks and positions; token ids choose rows.
        if not caches and not self._chooses_rows:
            state += [tuple(t.flatten().tolist()) for t in plain if _may_be_sizes(t)]
        if not any(isinstance(part, _Shape) for part in key):
            key.append(tuple(state))
        if not self._are_lengths_all:
            key += [self._number_of(cache) for cache in caches]
        layers = dict(place for cache in caches for place in cache_layers(cache))
        lengths = {place: _length(layers.get(place)) for place in sorted(self._touched)}
        now = (*state, *lengths.values())
        were_empty = tuple(length == 0 for length in lengths.values())
        seen = self._seen.setdefault(tuple(key), [])
        if len(self._seen) > _MAX_KEYS:
            del self._seen[next(iter(self._seen))]
        known = _find(seen, now, were_empty)
        if known is None:
            # arguments as the owner's alone: of what was transferred, copies lie on several ranks
            args, kwargs = map_leaves(
                (args, kwargs), StageTensor, lambda t: StageTensor(t.value.to("meta"), (owner,), run)
            )
            made = self._observe(forward, args, kwargs, seen, state, caches)
        else:
            made = known.result
            for growth in known.growth:
                _grow(caches, layers.get(growth.place), growth, owner, run)
        return map_leaves(
            made,
            _Shape,
            lambda s: StageTensor(torch.empty(s.shape, dtype=s.dtype, device="meta"), (owner,), run),
        )

    def _number_of(self, cache: Any) -> int:
        if cache not in self._numbers:
            self._met += 1
            self._numbers[cache] = self._met
        return self._numbers[cache]

    def _observe(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        seen: list[_Seen],
        state: list[Any],
        caches: list[Any],
    ) -> Any:
        """Run the module on shapes, take note of what came of it, and return the shapes."""
        from gpp_plugin.integrations.huggingface.sequence_cache import grows_by_joining

        before = {place: _length(layer) for cache in caches for place, layer in cache_layers(cache)}
        made = map_tensors(forward(*args, **kwargs), lambda t: _Shape(tuple(t.shape), t.dtype))
        # Some caches make their layers when they are first written to.
        layers = dict(place for cache in caches for place in cache_layers(cache))
        grown = {place: _length(layer) - before.get(place, 0) for place, layer in layers.items()}
        self._touched.update(place for place, more in grown.items() if more)
        touched = sorted(self._touched)
        if caches and not (any(grown.values()) and all(grows_by_joining(layers[p]) for p in touched)):
            self._are_lengths_all = False
        lengths = [before.get(place, 0) for place in touched]
        growth = tuple(_growth(place, layers[place], grown[place]) for place in touched if grown.get(place))
        seen.append(
            _Seen(
                (*state, *lengths),
                tuple(length == 0 for length in lengths),
                made,
                growth,
            )
        )
        del seen[:-4]  # of states that are never alike, as where an output grows with the cache, the last few
        return made


def _find(seen: list[_Seen], now: tuple[Any, ...], were_empty: tuple[bool, ...]) -> _Seen | None:
    """Return what a call will come to; None where that is not known.

    A first token fills the cache of what is attended to across, later ones find it full: calls are alike only where
    the same layers were empty.
    """
    alike = [one for one in seen if one.were_empty == were_empty]
    for one in alike:
        if one.state == now:
            return one
    if len(alike) >= 2:
        last, other = alike[-1], alike[-2]
        # two lengths, one result: it does not depend on them
        if last.state != other.state and (last.result, last.growth) == (other.result, other.growth):
            return last
    return None


def _may_be_sizes(tensor: Tensor) -> bool:
    is_whole = not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
    return is_whole and not tensor.is_meta and tensor.numel() <= _MAX_VALUES


def _describe(values: Any, key: list[Any], state: list[Any], caches: list[Any], plain: list[Tensor]) -> None:
    """Add to a call's key, state, caches and ordinary tensors what its arguments say."""
    if isinstance(values, StageTensor):
        key.append(_Shape(tuple(values.shape), values.dtype))
    elif isinstance(values, Tensor):
        state.append((tuple(values.shape), values.dtype))
        plain.append(values)
    elif isinstance(values, (tuple, list)):
        key.append(len(values))
        for each in values:
            _describe(each, key, state, caches, plain)
    elif isinstance(values, dict):
        key.append(tuple(values))
        for each in values.values():
            _describe(each, key, state, caches, plain)
    elif isinstance(values, (int, float)) and not isinstance(values, bool):
        state.append(values)
    elif hasattr(values, "layers") or hasattr(values, "self_attention_cache"):
        key.append(type(values))
        caches.append(values)
    else:
        key.append(values if isinstance(values, (bool, str, type(None))) else type(values))


def _length(layer: Any) -> int:
    return 0 if layer is None else int(layer.get_seq_length())


def _growth(place: _Place, layer: Any, more: int) -> _Growth:
    keys, values = tuple(layer.keys.shape), tuple(layer.values.shape)
    return _Growth(place, (*keys[:2], more, keys[3]), (*values[:2], more, values[3]), layer.keys.dtype)


def _grow(caches: list[Any], layer: Any, growth: _Growth, owner: int, run: ReplicaRun) -> None:
    """Let a layer of a cache take up new positions, as shapes.

    Args:
        layer: None where the cache has not made it yet.
    """
    from gpp_plugin.integrations.huggingface.sequence_cache import grows_by_joining

    new = [
        StageTensor(torch.empty(shape, dtype=growth.dtype, device="meta"), (owner,), run)
        for shape in (growth.keys, growth.values)
    ]
    number, across = growth.place
    if across:  # what is attended to across was read
        for cache in caches:
            cache.is_updated[number] = True
    if layer is None:
        name = ("self_attention_cache", "cross_attention_cache")[across]
        getattr(caches[-1], name, caches[-1]).update(*new, number)
    elif grows_by_joining(layer) and isinstance(layer.keys, StageTensor):
        # what `update` would do, without two operators a layer and token
        length = layer.keys.shape[2] + growth.keys[2]
        layer.keys, layer.values = (
            StageTensor(t.value.new_empty((*t.shape[:2], length, t.shape[3])), (owner,), run) for t in new
        )
    else:
        layer.update(*new)
