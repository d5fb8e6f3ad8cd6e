"""Real tensors for the parameters one rank needs, and none for the others; those of its stages in the user's module.

A model with real weights gives its own tensors. A model on the meta device gets them from a safetensors directory,
read tensor by tensor, or from its own initialisers: each parameter is made alone, everything else staying on the
meta device, under a random seed derived from (seed, first name of the parameter). So a value depends on neither
rank nor partition; replicas and ties agree bit by bit, and no rank makes a weight that it does not hold. (It differs
from what one `torch.manual_seed` before the constructor gives, where every value depends on all drawn before.)
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor, nn

from gpp_plugin.capture.tracing.carried_state import initial_values
from gpp_plugin.config.block import GraphPipelineConfig
from gpp_plugin.errors import CheckpointError, ReadError
from gpp_plugin.integrations.huggingface.hf_weights import (
    INDEX_NAME,
    SINGLE_NAME,
    checkpoint_keys,
    declared_ties,
    initialisers,
    rebuild_constants,
    tied_names,
)
from gpp_plugin.ir.analysis import TensorShard
from gpp_plugin.ir.block_graph import Parameter, is_carried
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.ir.serialize import MAX_BYTES, read_json
from gpp_plugin.ir.typed_leaves import show
from gpp_plugin.runtime.memory.counting import storage_bytes
from gpp_plugin.runtime.random_streams import restored_streams, seed_streams_of
from gpp_plugin.runtime.ranks.placement_of_ranks import Setting
from gpp_plugin.runtime.stage_module import Reference, StageModule, joined_module
from gpp_plugin.runtime.tensor_ranks import mark_part, own_part, parameter_shards, partial_parameters

Finish = Callable[[str, Tensor], Tensor]
"""Moves and casts the tensor of a first name."""


def materialize_parameters(
    model: nn.Module,
    names: Iterable[str],
    *,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    weights: str | Path | None = None,
    cuts: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Return real tensors for these parameters and buffers.

    A tensor requested under several tied names is made once and returned under each of them. The model is left as
    it was; its own tensors are returned without a copy where they are real and already of that device and dtype.

    Args:
        names: HuggingFace names of parameters and buffers.
        dtype: of floating-point parameters; that of the model's if None. Buffers keep their dtype.
        seed: of the initialisers, for parameters on the meta device.
        weights: a safetensors file, or a directory with one or with shards and an index; it takes precedence over
            initialisers for parameters and persistent buffers on the meta device.
        cuts: name -> what takes this rank's part out of the whole tensor; one whole tensor is held at a time.

    Raises:
        CheckpointError: a name is not the model's, not in ``weights``, of another shape there, or has no initialiser.
    """
    # From names to tensors by way of homes, the first name of each tensor, so that a tie is made once:
    #
    #   wanted   lm_head.weight, wte.weight, ln_f.bias      first   lm_head.weight -> wte.weight, ...
    #   groups   wte.weight: [wte.weight, lm_head.weight]   ln_f.bias: [ln_f.bias]
    #   made     wte.weight, ln_f.bias                      each from the first source that has it:
    #
    # files, if any, for what a state dict has; then initialisers; then the model's own tensors. A group
    # is on meta only if all its names are: one real tensor among tied ones is the value of all.
    wanted = list(names)
    first, groups = _homes(model, wanted)
    tensors = _tensors_of(model)
    parameter_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    own_part = {first[name]: cut for name, cut in cuts.items()}
    on_meta = dict.fromkeys(
        first[name] for name in wanted if all(tensors[n].is_meta for n in groups[first[name]])
    )

    def finish(home: str, tensor: Tensor) -> Tensor:
        """Move one tensor to where it will live as soon as it is made, so that only one is ever held twice."""
        if home in own_part:
            tensor = own_part[home](tensor)
        return tensor.to(device, dtype if home in parameter_names and tensor.is_floating_point() else None)

    made: dict[str, Tensor] = {}
    if on_meta and weights is not None:
        # Buffers outside the state dict (rotary frequencies) are in no file; the constructor sets them.
        persistent = set(model.state_dict(keep_vars=True))
        from_files = {home: groups[home] for home in on_meta if persistent.intersection(groups[home])}
        made.update(_read_weights(model, weights, from_files, tensors, finish))
    unmade = [home for home in on_meta if home not in made]
    # On the CPU, wherever the caller makes tensors by default: values do not depend on the device they are for; the
    # device's own generator is seeded as well, for an initialiser that draws there all the same.
    with restored_streams(device), torch.device("cpu"):
        made.update(_initialise(model, unmade, groups, _Draw(seed, torch.device(device)), finish))
    for home in dict.fromkeys(first[name] for name in wanted):
        if home not in made:
            real = next(tensors[name] for name in groups[home] if not tensors[name].is_meta)
            made[home] = finish(home, real.detach())
    return {name: made[first[name]] for name in wanted}


def _homes(model: nn.Module, wanted: Iterable[str]) -> tuple[Mapping[str, str], dict[str, list[str]]]:
    """Return name -> first name of the same tensor, and first name -> all its names, of the whole model.

    Raises:
        CheckpointError: a name that is wanted is not the model's.
    """
    first = tied_names(model)
    unknown = [name for name in wanted if name not in first]
    if unknown:
        raise CheckpointError(f"{type(model).__name__} has no {unknown[0]!r}{_nearest(unknown[0], first)}")
    groups: dict[str, list[str]] = {}
    for name, home in first.items():
        groups.setdefault(home, []).append(name)
    return first, groups


def release_parameters(model: nn.Module, keep: Iterable[str] = ()) -> int:
    """Replace parameters and buffers outside ``keep`` by tensors on the meta device and return the bytes let go.

    A tied tensor stays where any of its names is in ``keep``; so do ties, ``requires_grad`` and attributes.
    Memory is freed when nothing else refers to the old tensors (an optimizer made before, a list of parameters).
    """
    first = tied_names(model)
    keeping = {first.get(name, name) for name in keep}
    replaced: dict[int, Tensor] = {}
    released: dict[int, int] = {}
    for owner, leaf, tensor, name in _slots(model):
        if first[name] in keeping or tensor.is_meta:
            continue
        released[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        # One meta tensor for one real one, wherever it is used: ties stay ties.
        if id(tensor) not in replaced:
            replaced[id(tensor)] = _meta_like(tensor)
        _set(owner, leaf, replaced[id(tensor)])
    return sum(released.values())


def resident_bytes(model: nn.Module) -> int:
    """Return the bytes of all real parameters and buffers of a module, shared storages once."""
    return storage_bytes(tensor for _, _, tensor, _ in _slots(model) if not tensor.is_meta)


# ---- reading and replacing a module's tensors ---------------------------------------------------------------


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for _, _, tensor, name in _slots(model)}


def _slots(model: nn.Module) -> list[tuple[nn.Module, str, Tensor, str]]:
    """Return (owner, leaf, tensor, name) of every place that holds a parameter or buffer."""
    found = []
    for path, module in model.named_modules(remove_duplicate=False):
        for table in (module._parameters, module._buffers):
            for leaf, tensor in table.items():
                if tensor is not None:
                    found.append((module, leaf, tensor, f"{path}.{leaf}" if path else leaf))
    return found


def _set(owner: nn.Module, leaf: str, tensor: Tensor) -> None:
    if leaf in owner._parameters:
        assert isinstance(tensor, nn.Parameter)
        owner._parameters[leaf] = tensor
    else:
        owner._buffers[leaf] = tensor


def _meta_like(tensor: Tensor) -> Tensor:
    return _like(tensor, torch.empty_like(tensor, device="meta"))


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    """Return ``value`` as a parameter or buffer that takes the place of ``tensor``."""
    if not isinstance(tensor, nn.Parameter):
        return value
    parameter = nn.Parameter(value, requires_grad=False)
    parameter.requires_grad_(tensor.requires_grad)
    parameter.__dict__.update({k: v for k, v in tensor.__dict__.items() if k != "_is_hf_initialized"})
    return parameter


# ---- initialisers -------------------------------------------------------------------------------------------


def _initialise(
    model: nn.Module, homes: list[str], groups: dict[str, list[str]], draw: _Draw, finish: Finish
) -> dict[str, Tensor]:
    if not homes:
        return {}
    sources = set(declared_ties(model).values())
    made: dict[str, Tensor] = {}
    constants: _Constants = _Constants(model, draw)
    # Everything is on meta but the one tensor in question, so an initialiser that sets a whole module costs
    # nothing for the rest of it, and draws for that tensor start at its own seed whatever else a rank makes.
    with _nothing_real(model), torch.no_grad():
        slots: dict[str, list[tuple[nn.Module, str, Tensor]]] = {}
        for owner, leaf, tensor, name in _slots(model):
            slots.setdefault(name, []).append((owner, leaf, tensor))
        for home in homes:
            # Of tied names the declared source, which HuggingFace initialises: the
            # embedding, say, not the head.
            name = next((n for n in groups[home] if n in sources), home)
            places = [slot for alias in groups[home] for slot in slots[alias]]
            made[home] = finish(home, _initialise_one(model, name, home, places, draw, constants))
    return made


class _Constants:
    """The model rebuilt with the values its constructor sets, when first requested."""

    def __init__(self, model: nn.Module, draw: _Draw) -> None:
        self._model, self._draw = model, draw
        self._values: dict[str, Tensor] | None = None

    def find(self, name: str) -> Tensor | None:
        if self._values is None:
            self._draw.start("constructor")
            rebuilt = rebuild_constants(self._model)
            self._values = {} if rebuilt is None else _tensors_of(rebuilt)
        value = self._values.get(name)
        return None if value is None or value.is_meta else value.detach()


@dataclass(frozen=True, slots=True)
class _Draw:
    """Where random numbers start: each parameter's at a seed of its own."""

    seed: int
    device: torch.device

    def start(self, name: str) -> None:
        """Draw from now on what ``name`` is made of."""
        seed_streams_of(self.device, derive_seed(self.seed, name))


def derive_seed(seed: int, name: str) -> int:
    """Return the seed of the parameter, or of the factory of a stage, called ``name``: 63 bits of a hash of both."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _initialise_one(
    model: nn.Module,
    name: str,
    home: str,
    places: list[tuple[nn.Module, str, Tensor]],
    draw: _Draw,
    constants: _Constants,
) -> Tensor:
    """Return the value the model's initialisers give ``name``.

    What they leave unset shows, and takes the value the model's constructor gives: floating tensors start as NaN,
    others are initialised twice from different values.
    """
    # How "nothing sets it" is found out, without knowing the initialiser. CLIP's logit_scale, say: started
    # as NaN, still NaN after all initialisers, so its value is the constructor's. LayerNorm's weight:
    # ones, no NaN, done. Integers have no NaN: what comes out of zeros and of ones is equal only if
    # something set every element.
    like = places[0][2]
    # Drawn in float32 and rounded, so that a bf16 model is the fp32 model rounded: the same
    # seed, the same model.
    is_low = like.dtype.is_floating_point and torch.finfo(like.dtype).bits < 32
    dtype = torch.float32 if is_low else like.dtype

    def run(start: Tensor) -> tuple[Tensor, list[str]]:
        # Seeded once, before all initialisers: an ancestor's draws on where the owner's stopped, in every run alike.
        draw.start(home)
        return _run_initialisers(model, name, start, places)

    if dtype.is_floating_point or dtype.is_complex:
        value, tried = run(torch.full(like.shape, float("nan"), dtype=dtype))
        is_set = not bool(value.isnan().any())
    else:
        value, tried = run(torch.zeros(like.shape, dtype=dtype))
        is_set = torch.equal(value, run(torch.ones(like.shape, dtype=dtype))[0])
    if not is_set:
        start = constants.find(name)
        if start is None or start.shape != like.shape:
            raise CheckpointError(
                f"{type(model).__name__} is on the meta device and nothing sets {name!r} "
                f"({_tried(tried)}); build the model with real weights, pass a safetensors directory, or give "
                "the module that owns it a reset_parameters() method"
            )
        # Initialisers once more, on top of the constructor's value: they may set a part of it (a
        # padding row of zeros).
        value, _ = run(start.to(dtype, copy=True))
    return value.to(like.dtype)


def _tried(calls: list[str]) -> str:
    return "tried " + ", ".join(dict.fromkeys(calls)) if calls else "its module has no initialiser"


def _run_initialisers(
    model: nn.Module, name: str, start: Tensor, places: list[tuple[nn.Module, str, Tensor]]
) -> tuple[Tensor, list[str]]:
    """Return what becomes of ``start`` in the place of ``name``, and which initialisers were called."""
    tried = []
    standing = _like(places[0][2], start)
    for owner, leaf, _ in places:
        _set(owner, leaf, standing)
    try:
        for what, call in initialisers(model, name):
            tried.append(what)
            try:
                call()
            except Exception as error:  # an initialiser that reads other weights finds them on meta
                raise CheckpointError(
                    f"{what} cannot set {name!r} alone, with the other weights on the meta device: {error}; build the "
                    "model with real weights or pass a safetensors directory"
                ) from error
        value = model.get_submodule(name.rpartition(".")[0])
        return getattr(value, name.rpartition(".")[2]).detach(), tried
    finally:
        for owner, leaf, tensor in places:
            _set(owner, leaf, tensor)


@contextmanager
def _nothing_real(model: nn.Module) -> Iterator[None]:
    """Keep the model's real tensors out of reach of initialisers, which would set them anew."""
    replaced: dict[int, Tensor] = {}
    before = [(owner, leaf, tensor) for owner, leaf, tensor, _ in _slots(model)]
    try:
        for owner, leaf, tensor in before:
            if id(tensor) not in replaced:
                replaced[id(tensor)] = _meta_like(tensor)
            _set(owner, leaf, replaced[id(tensor)])
        yield
    finally:
        for owner, leaf, tensor in before:
            _set(owner, leaf, tensor)


# ---- safetensors --------------------------------------------------------------------------------------------


def _read_weights(
    model: nn.Module,
    weights: str | Path,
    groups: dict[str, list[str]],
    tensors: dict[str, Tensor],
    finish: Finish,
) -> dict[str, Tensor]:
    """Read one tensor for each group of tied names, lazily."""
    from safetensors import safe_open

    files = _files_of(Path(weights))
    keys, converted = checkpoint_keys(model, files)
    # File by file, tensor by tensor: a shard is mapped once, and no more than one tensor is in memory twice.
    by_file: dict[Path, list[tuple[str, str]]] = {}
    for home, names in groups.items():
        key = next((keys[name] for name in names if name in keys), None)
        if key is None:
            clash = next((converted[name] for name in names if name in converted), None)
            if clash is not None:
                raise CheckpointError(
                    f"{weights}: {home!r} is made from {clash!r} by a conversion; load the model with from_pretrained "
                    "once, save it with save_original_format=False and pass that directory"
                )
            raise CheckpointError(f"{weights} has no {home!r}{_nearest(home, keys)}")
        by_file.setdefault(files[key], []).append((home, key))
    made: dict[str, Tensor] = {}
    for path, entries in by_file.items():
        with safe_open(path, framework="pt", device="cpu") as reader:
            for home, key in entries:
                value: Tensor = reader.get_tensor(key)
                if value.shape != tensors[home].shape:
                    raise CheckpointError(
                        f"{path}: {key!r} has shape {tuple(value.shape)}, the model wants {tuple(tensors[home].shape)}"
                    )
                made[home] = finish(home, value.to(tensors[home].dtype))
    return made


def _files_of(path: Path) -> dict[str, Path]:
    """Return key -> file for a safetensors file, or a directory with one file or an index."""
    from safetensors import safe_open

    if path.is_dir():
        index = path / INDEX_NAME
        if index.exists():
            return _indexed_files(index)
        singles = (
            [path / SINGLE_NAME] if (path / SINGLE_NAME).exists() else sorted(path.glob("*.safetensors"))
        )
        if len(singles) != 1:
            raise CheckpointError(
                f"{path} holds neither {INDEX_NAME} nor {SINGLE_NAME} nor one *.safetensors file; give a directory "
                "that save_pretrained wrote"
            )
        path = singles[0]
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give a safetensors file or a directory of them")
    try:
        with safe_open(path, framework="pt", device="cpu") as reader:
            return dict.fromkeys(reader.keys(), path)
    except Exception as error:  # safetensors raises its own type, not exported everywhere
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from error


def _indexed_files(index: Path) -> dict[str, Path]:
    try:
        content = read_json(index, what="an index of safetensors files", max_bytes=MAX_BYTES)
    except ReadError as error:
        raise CheckpointError(str(error)) from error
    where = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(where, dict):
        raise CheckpointError(f"{index} is not an index of safetensors files: it has no object weight_map")
    files: dict[str, Path] = {}
    for key, name in where.items():
        # a name and nothing else, as save_pretrained writes it: no way out of the directory, whoever wrote the index
        if not isinstance(name, str) or name in ("", ".", "..") or re.search(r"[/\\\0]", name):
            raise CheckpointError(
                f"{index}: weight_map.{key}: {show(name)} is no name of a file beside it; give one without a directory"
            )
        files[key] = index.parent / name
    # `os.path`: of a name that is too long for a file `Path.exists` raises, before Python 3.12
    absent = sorted({path.name for path in files.values() if not os.path.exists(path)})
    if absent:
        raise CheckpointError(
            f"{index} names files that are not there: {', '.join(map(show, absent[:3]))}; the checkpoint is incomplete"
        )
    return files


def _nearest(name: str, candidates: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(candidates), n=3, cutoff=0.5)
    return f"; the nearest names are {close}" if close else ""


def materialize_for(
    model: nn.Module,
    names: Iterable[str],
    *,
    setting: Setting,
    config: GraphPipelineConfig,
    cuts: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Return real tensors of these parameters and buffers, where and as this job computes with them.

    Args:
        cuts: as of `materialize_parameters`.
    """
    return materialize_parameters(
        model,
        names,
        device=setting.device,
        dtype=setting.dtype,
        seed=config.seed,
        weights=config.weights,
        cuts=cuts,
    )


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
        modules = []
        for index, of_stage, own, cut in zip(held, names, parts, shards, strict=True):
            module = StageModule(
                # a user's parameter is the first stage's that holds it
                tensors={n: own[n] if n in own else taken.pop(n, tensors[n]) for n in of_stage},
                parameters=[name for name in of_stage if not known[name].is_buffer],
                frozen=frozenset(n for n in of_stage if not known[n].requires_grad or n not in used),
                persistent=frozenset(n for n in of_stage if known[n].is_persistent),
            )
            for name, shard in cut.items():
                mark_part(module.get_parameter(name), shard)
            for name in partial_parameters(reference, plan, index):
                module.get_parameter(name).sequence_parallel = True  # type: ignore[attr-defined]
            modules.append(module)
        return tuple(modules)

    def _own_parts(self, shards: Mapping[str, TensorShard], stage: Stage) -> dict[str, Tensor]:
        """Return this rank's parts of what a stage's tensor ranks share out."""
        position = stage.tensor_position(self._setting.rank)

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
