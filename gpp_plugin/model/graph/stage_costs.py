"""What each stage costs: timed on its own ranks, stage after stage, so that none disturbs another.

Source: this project
Tests: tests/stage_graph/test_equality.py, tests/stage_graph/test_engine.py, tests/stage_graph/test_module_cost.py
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import logging
import platform
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.profile import BlockCost, ModuleMemory, Profile, SharedStorage, TiedCost
from gpp_plugin.model.graph.captured_part import CapturedPart
from gpp_plugin.model.graph.module_cost import Measuring, measure_module, profile_part
from gpp_plugin.model.graph.module_trial import Place
from gpp_plugin.model.graph.probe import Survey
from gpp_plugin.model.graph.resolve import GraphStage, ResolvedGraph
from gpp_plugin.model.graph.user_module import UserModule
from gpp_plugin.profile.machine import CostStore, describe_device, processor_name
from gpp_plugin.profile.timing import clock_of
from gpp_plugin.runtime.batches import Batch
from gpp_plugin.runtime.ranks.collectives import broadcast_result, exchange

# Profiles of users' modules on disk: looked up before a stage is timed, stored after, under what the module is.
#
# What a module is is described as JSON types (`describe_module`): whoever has the same description computes the same
# operators. A module is described by its classes, their parameters' shapes and all attributes down to plain values,
# and by the source of every Python module that the code it names can reach (torch and Python itself by their versions,
# elsewhere). Where an attribute says nothing of what it does (an object of compiled code, something typed into a
# session), there is no description, rather than one that two different modules share.


FORM = "kept storages by number, split backwards compared"
"""What such profiles hold; older files hold something else."""


def profile_key(
    stage: GraphStage,
    own: UserModule,
    place: Place,
    survey: Survey,
    counts: Sequence[int],
    options: Mapping[str, Any],
) -> dict[str, Any] | None:
    """Return under what the profile of a stage's module is stored; None where nothing identifies the module.

    Args:
        options: what else times depend on: how it is measured.
    """
    # The key is all that times and bytes depend on, as JSON types: what the module is, what it is called with and
    # returns, how many ranks share it, on what machine, and how it is measured (``options``). The values of its
    # weights are not in it, nor its rank numbers, so that a trained tower on other ranks is found again.
    #
    #     inputs {"x": float32 [8, 64], batch axis 0}   grid [4 ranks, tensor 2]   counts [1, 4, 8]   torch 2.6 ...
    try:
        description = describe_module(own.user_module)
    except (NotDescribed, OSError) as error:
        logger.info(
            "stage %s: its profile is not stored, but measured each time: nothing distinguishes one such module "
            "from another, as %s",
            stage.name,
            error,
        )
        return None
    shapes = survey.shapes
    inputs = {keyword: shapes.tensors[node] for keyword, node in stage.received}
    inputs |= {keyword: shapes.inputs[key] for keyword, key in stage.batch_inputs}
    return {
        "stage": stage.name,
        "module": description,
        "inputs": {keyword: dataclasses.asdict(spec) for keyword, spec in inputs.items()},
        "outputs": [list(node) for node in stage.nodes],
        "losses": list(stage.losses),
        "sharded": [list(stage.spec.sharded_inputs), list(stage.spec.sharded_outputs)],
        "grid": [len(stage.spec.ranks), stage.spec.tensor],
        "counts": list(counts),
        "dtype": str(place.dtype),
        "device": describe_device(place.device, torch.get_num_threads()),
        "processor": processor_name(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "form": FORM,
        **clock_of(place.device.type),
        **options,
    }


KNOWN_BY_VERSION = frozenset({"torch", "numpy"}) | frozenset(sys.stdlib_module_names)
"""Top-level packages whose source is not read."""
PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type(Ellipsis),
    torch.dtype,
    torch.device,
    torch.layout,
)
REGISTERED = ("_parameters", "_buffers", "_modules")


class NotDescribed(Exception):
    """Something says nothing of what it does; the text names it."""


def describe_module(module: nn.Module) -> dict[str, Any]:
    """Return the description of a module: its structure and the digest of the source it can reach.

    Raises:
        NotDescribed: part of it cannot be described.
    """
    found = _Description()
    structure = found.of(module, "module")
    return {"structure": structure, "source": _source_digest(found.modules)}


class _Description:
    def __init__(self) -> None:
        self.modules: set[str] = set()
        self._seen: dict[int, int] = {}
        self._held: list[Any] = []  # so that no identity recurs

    def of(self, value: Any, path: str) -> Any:
        """Return a value in JSON types; what was described before by its number."""
        if isinstance(value, PLAIN):
            # of a device its type alone: a profile that was measured on cuda:0 is that of a stage on cuda:3
            text = value.type if isinstance(value, torch.device) else str(value)
            return [type(value).__name__, text]
        if isinstance(value, Tensor):
            return ["tensor", str(value.dtype), list(value.shape), value.requires_grad]
        if isinstance(value, enum.Enum):
            return ["enum", self._name(type(value)), value.name]
        if id(value) in self._seen:
            return ["again", self._seen[id(value)]]
        self._seen[id(value)] = len(self._held)
        self._held.append(value)
        if isinstance(value, Mapping):
            rows = [[self.of(k, path), self.of(v, f"{path}[{k!r}]")] for k, v in value.items()]
            return ["dict", self._name(type(value)), rows]
        if isinstance(value, (set, frozenset)):
            return ["set", sorted(map(str, (self.of(v, path) for v in value)))]
        if isinstance(value, (list, tuple)):
            return [
                "list",
                self._name(type(value)),
                [self.of(v, f"{path}[{i}]") for i, v in enumerate(value)],
            ]
        if isinstance(value, nn.Module):
            return self._module(value, path)
        if isinstance(value, dist.ProcessGroup):
            return ["group", value.size()]
        if (
            callable(value)
            and not hasattr(value, "__dict__")
            or isinstance(value, (type, types.FunctionType))
        ):
            return self._code(value, path)
        return self._object(value, path)

    def _name(self, thing: Any) -> str:
        module = getattr(thing, "__module__", None) or "builtins"
        self.modules.add(module)
        return f"{module}.{getattr(thing, '__qualname__', type(thing).__name__)}"

    def _module(self, module: nn.Module, path: str) -> Any:
        own: list[Any] = []
        for name, value in sorted(vars(module).items()):
            if name in REGISTERED:
                rows = {k: v for k, v in value.items() if v is not None}
                own.append([name, [[k, self.of(v, f"{path}.{k}")] for k, v in rows.items()]])
            elif name.endswith("_hooks"):  # by numbers that grow with every hook of the process
                own.append([name, [self.of(hook, f"{path}.{name}") for hook in value.values()]])
            elif name != "training":
                own.append([name, self.of(value, f"{path}.{name}")])
        return ["module", self._name(type(module)), own]

    def _code(self, value: Any, path: str) -> Any:
        """Return a class by its name, a function by its name and what it closes over: their source is read."""
        name = self._name(value)
        if not isinstance(value, types.FunctionType):
            return ["code", name]
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        bound = [value.__defaults__, value.__kwdefaults__, cells]
        return ["function", name, _code_digest(value.__code__), self.of(bound, path)]

    def _object(self, value: Any, path: str) -> Any:
        if isinstance(value, functools.partial):
            return ["partial", self.of([value.func, value.args, value.keywords], path)]
        if isinstance(value, types.MethodType):
            return ["method", self.of([value.__func__, value.__self__], path)]
        if dataclasses.is_dataclass(value):
            fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
        elif hasattr(value, "__dict__") and type(value).__flags__ & _IS_HEAP_TYPE:
            fields = vars(value)
        else:
            raise NotDescribed(f"{path} is a {type(value).__module__}.{type(value).__qualname__}")
        rows = [[name, self.of(item, f"{path}.{name}")] for name, item in sorted(fields.items())]
        return ["object", self._name(type(value)), rows]


def _code_digest(code: types.CodeType) -> str:
    """Return what distinguishes functions of one name: two lambdas of a line."""
    constants = [
        _code_digest(c)
        if isinstance(c, types.CodeType)
        else sorted(map(repr, c))
        if isinstance(c, frozenset)  # whose order is another one in every process
        else repr(c)
        for c in code.co_consts
    ]
    return hashlib.sha256(code.co_code + repr((code.co_names, constants)).encode()).hexdigest()


_IS_HEAP_TYPE = 1 << 9
"""Of a class made by Python code, not by an extension."""


def _source_digest(names: Iterable[str]) -> str:
    """Return a digest of the source of modules, and of all that these name, and so on.

    Raises:
        NotDescribed: one has no file.
    """
    own = set(names)
    waiting, done = sorted(own), set[str]()
    digest = hashlib.sha256()
    files: dict[str, str] = {}
    while waiting:
        name = waiting.pop()
        if name in done or name.partition(".")[0] in KNOWN_BY_VERSION:
            continue
        done.add(name)
        module = sys.modules.get(name)
        if module is None or (name == "__main__" and name not in own):
            continue  # named, and not loaded: nothing of it runs; picklers (dill) name the program that runs
        path = getattr(module, "__file__", None)
        if path is None and not hasattr(module, "__path__"):
            raise NotDescribed(f"module {name} has no file")
        if path is not None:
            files[name] = path
        for value in list(vars(module).values()):
            found = (
                value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
            )
            if isinstance(found, str):
                waiting.append(found)
    for name, path in sorted(files.items()):
        digest.update(name.encode() + b"\0" + hashlib.sha256(Path(path).read_bytes()).digest())
    return digest.hexdigest()


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """What all blocks of a stage graph cost.

    Args:
        shared, tied: as of `Profile`, of captured parts.
        by_stage: stage, as the user gave it -> the costs of its blocks.
        modules: as of `Profile`, of all other stages.
    """

    shared: tuple[SharedStorage, ...]
    tied: tuple[TiedCost, ...]
    by_stage: Mapping[str, tuple[BlockCost, ...]]
    modules: tuple[ModuleMemory, ...]

    def with_blocks(self, change: Callable[[Sequence[BlockCost]], tuple[BlockCost, ...]]) -> StageCosts:
        """Return what all blocks cost if each stage's cost something else."""
        return dataclasses.replace(
            self, by_stage={stage: change(costs) for stage, costs in self.by_stage.items()}
        )

    def profile(self, graph: BlockGraph, *, device: str, stage: str | None = None) -> Profile:
        """Return them as the profile of the whole graph, or of one captured part."""
        stages = self.by_stage if stage is None else {stage: self.by_stage[stage]}
        blocks = {block.name for block in graph.blocks}
        return Profile(
            graph=graph.fingerprint,
            device=device,
            source="measured",
            costs=tuple(cost for costs in stages.values() for cost in costs),
            shared=tuple(storage for storage in self.shared if blocks.issuperset(storage.blocks)),
            tied=tuple(tie for tie in self.tied if blocks.issuperset(tie.blocks)),
            modules=tuple(module for module in self.modules if module.block in blocks),
        )


def measure_stages(
    graph: ResolvedGraph,
    own: Mapping[str, UserModule | CapturedPart],
    place: Place,
    batch: Batch,
    survey: Survey,
    *,
    counts: Mapping[str, Sequence[int]],
    measuring: Measuring,
) -> StageCosts:
    """Return the costs of every stage, the same on every rank; collective over all ranks.

    Args:
        own: this rank's stages, by name.
        counts: stage -> numbers of samples to time it at, increasing; those that its module cannot do are left
            out, but for the largest.

    Raises:
        ConfigError: a stage fails at its largest number of samples.
    """
    store = CostStore(measuring.cache_dir)
    keys = _own_keys(graph, own, place, survey, counts, measuring)
    stored = exchange(
        lambda: {name: _find(store, name, key) for name, key in keys.items()},
        what="the stored profiles of stages",
        group=place.group,
        stages=place.stages,
    )
    found: dict[str, Profile] = {}
    # Stages take turns, and all other ranks wait meanwhile: on shared cores and links, stages that are timed side by
    # side would measure each other. With stages a (ranks 0, 1; captured) and b (ranks 2, 3; a user's module):
    #   rank 0   profile a | .         | .
    #   rank 1   .         | .         | .          a captured part's blocks run on its first rank alone
    #   rank 2   .         | profile b |            b has collectives inside: its ranks run it in step
    #   rank 3   .         | profile b |
    for stage in graph.stages:

        def time_own(stage: GraphStage = stage) -> Profile:
            module, at = own[stage.name], counts[stage.name]
            if isinstance(module, CapturedPart):
                return profile_part(module, place, batch, survey, counts=at, measuring=measuring)
            return measure_module(stage, module, place, batch, survey, counts=at, measuring=measuring)

        first = stage.spec.ranks[0]
        known = stored[first].get(stage.name)
        found[stage.name] = profile = _agreed(stage, place, time_own, known)
        if stage.name in keys and known is None:
            store.put(keys[stage.name], profile)
        if place.rank == 0:
            longest = sum(cost.forward_us[-1] for cost in profile.costs)
            logger.info("profiling: stage %s, a forward of %.0f us", stage.name, longest)
    profiles = found.values()
    return StageCosts(
        shared=tuple(storage for profile in profiles for storage in profile.shared),
        tied=tuple(tie for profile in profiles for tie in profile.tied),
        by_stage={name: profile.costs for name, profile in found.items()},
        modules=tuple(module for profile in profiles for module in profile.modules),
    )


def _agreed(
    stage: GraphStage, place: Place, time_own: Callable[[], Profile], stored: Profile | None
) -> Profile:
    """Return a stage's profile on every rank: the stored one, or what its ranks measure now; collective over all."""
    # A captured part is looked up where it is profiled, by its operators; a user's module has none.
    # So its first rank has looked by a description of it, and spares all its ranks the runs.
    ranks = stage.spec.ranks[:1] if stage.is_captured else stage.spec.ranks

    def take_turn() -> Profile | None:
        return time_own() if place.rank in ranks else None

    what = "profile" if stage.is_alone else f"profile of stage {stage.name!r}"
    if stage.is_captured:
        profile = broadcast_result(
            take_turn, source=ranks[0], what=what, group=place.group, stages=place.stages
        )
        assert profile is not None, "its first rank has measured it"
        return profile
    if stored is not None:
        return stored
    gathered = exchange(take_turn, what=f"the {what}", group=place.group, stages=place.stages)
    return _of_all([answer for answer in gathered if answer is not None])


def _own_keys(
    graph: ResolvedGraph,
    own: Mapping[str, UserModule | CapturedPart],
    place: Place,
    survey: Survey,
    counts: Mapping[str, Sequence[int]],
    measuring: Measuring,
) -> dict[str, dict[str, Any]]:
    """Return the keys of stored profiles, of modules of which this rank is the first."""
    options = dataclasses.asdict(measuring)
    del options["cache_dir"]
    keys = {}
    for name, module in own.items():
        stage = graph.stage(name)
        if isinstance(module, UserModule) and place.rank == stage.spec.ranks[0]:
            key = profile_key(stage, module, place, survey, counts[name], options)
            if key is not None:
                keys[name] = key
    return keys


def _find(store: CostStore, stage: str, key: dict[str, Any]) -> Profile | None:
    found = store.find(key)
    if found is not None:
        logger.info("stage %s: using the profile stored in %s", stage, store.path(key))
    return found


def _of_all(gathered: Sequence[Profile]) -> Profile:
    """Return what a stage's first rank reports; no backward is split that one of its ranks cannot split."""
    first = gathered[0]
    dearest = max(gathered, key=lambda profile: profile.costs[0].split_factor)
    if len(first.costs) > 1 or dearest is first:
        return first
    return dataclasses.replace(first, costs=(dataclasses.replace(
        first.costs[0], split_factor=dearest.costs[0].split_factor, input_share=dearest.costs[0].input_share
    ),))  # fmt: skip
