"""HuggingFace's side of weights: initialisers, values its constructors set, names in its checkpoints, its files.

Imports transformers only where a model of it is at hand, so that plain models need none of it. Reads of
transformers' internals are gathered here: ``_init_weights``, ``all_tied_weights_keys``,
``get_model_conversion_mapping``, ``rename_source_key``, ``revert_weight_conversion`` (transformers 5.x).
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gpp_plugin.errors import CheckpointError
from gpp_plugin.ir.serialize import write_text_whole
from gpp_plugin.runtime.ranks.collectives import Collectives

logger = logging.getLogger(__name__)

T = TypeVar("T")
Sizes = dict[str, tuple[int, str]]
"""First name -> (bytes, dtype)."""
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


def is_pretrained_model(model: nn.Module) -> bool:
    """Return whether ``model`` is a transformers ``PreTrainedModel``."""
    return is_of_package(model, "transformers", "PreTrainedModel")


def is_of_package(value: object, package: str, kind: str) -> bool:
    """Return whether a package's class named ``kind`` is among an object's, without importing the package.

    A module in `sys.modules` is no help: transformers imports its parts when they are first requested, and where one of
    them is broken (torchvision of another torch) the question itself would fail, for models that have nothing of it.

    >>> is_of_package(torch.nn.Linear(1, 1), "torch", "Module"), is_of_package(1, "transformers", "PreTrainedModel")
    (True, False)
    """
    return any(
        base.__name__ == kind and base.__module__.partition(".")[0] == package for base in type(value).__mro__
    )


# ---- ties ------------------------------------------------------------------------------------------------


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return every parameter and buffer name -> the first name of the same tensor.

    The first name is the one ``named_parameters`` gives. Ties are found by identity and, where copies to the
    meta device have lost it, by HuggingFace's ``all_tied_weights_keys``.
    """
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    for name, tensor in (*parameters, *model.named_buffers(remove_duplicate=False)):
        names[name] = first.setdefault(id(tensor), name)
    # A copy to the meta device makes two tensors of one: GPT-2's lm_head.weight and wte.weight. Of a declared
    # tie the name that comes first in the model is the home of both, as `named_parameters` would have it.
    order = {name: i for i, name in enumerate(names)}
    for target, source in declared_ties(model).items():
        if target in names and source in names and names[target] != names[source]:
            canonical, dropped = sorted((names[target], names[source]), key=order.__getitem__)
            names = {name: canonical if home == dropped else home for name, home in names.items()}
    return names


def declared_ties(model: nn.Module) -> dict[str, str]:
    """Return tied name -> the name HuggingFace saves and initialises it under; empty for other models."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {}) if is_pretrained_model(model) else {}


def saved_names(model: nn.Module) -> dict[str, str]:
    """Return first name -> name in saved files: the source of a declared tie, else the first name."""
    names = tied_names(model)
    saved = {first: first for first in names.values()}
    sources = set(declared_ties(model).values())
    for name, first in names.items():
        if name in sources and saved[first] not in sources:
            saved[first] = name
    return saved


# ---- initialisers ----------------------------------------------------------------------------------------


def initialisers(model: nn.Module, name: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield (what, call) for every initialiser that may set parameter ``name``, in the order they apply.

    A module's children are initialised before it and it may set theirs again, so these are the initialisers of
    the owner and of its ancestors, innermost first. In a ``PreTrainedModel`` each module is initialised by the
    ``_init_weights`` of the innermost ``PreTrainedModel`` around it; elsewhere by its ``reset_parameters`` or
    ``_reset_parameters``, where it has one.
    """
    path: list[tuple[str, nn.Module]] = [("", model)]
    for part in name.split(".")[:-1]:
        prefix, module = path[-1]
        path.append((f"{prefix}.{part}" if prefix else part, module.get_submodule(part)))
    # For "text_model.layers.0.fc1.bias", innermost first: fc1, layers.0, layers,
    # text_model, the model itself.
    for depth in range(len(path) - 1, -1, -1):
        prefix, module = path[depth]
        home = next((m for _, m in reversed(path[: depth + 1]) if is_pretrained_model(m)), None)
        what = f"{prefix or 'the model'} ({type(module).__name__})"
        if home is not None:
            initialise: Any = home
            yield f"_init_weights of {what}", lambda h=initialise, m=module: h._init_weights(m)  # type: ignore[misc]
            continue
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset):
            yield f"{reset.__name__} of {what}", reset


class _EmptyOnMeta(TorchFunctionMode):
    """Puts what ``torch.empty`` makes on the meta device and leaves tensors with values where they are."""

    _FACTORIES = frozenset({torch.empty, torch.empty_strided})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._FACTORIES:
            kwargs["device"] = torch.device("meta")
        return func(*args, **kwargs)


def rebuild_constants(model: nn.Module) -> nn.Module | None:
    """Return the model constructed anew with real tensors only where its constructor gives values.

    Tables (position ids, rotary frequencies) and explicit values (CLIP's ``logit_scale``) are real; weights
    that wait for an initialiser stay on the meta device. None where the model is not built from a config.
    """
    if not is_pretrained_model(model):
        return None
    from transformers.initialization import no_init_weights

    build: Any = type(model)
    with _EmptyOnMeta(), no_init_weights():
        try:
            return build(copy.deepcopy(model.config))
        except Exception as error:  # constructors of custom models may do anything
            logger.warning("%s cannot be rebuilt from its config: %s", type(model).__name__, error)
            return None


# ---- names in checkpoints --------------------------------------------------------------------------------


def checkpoint_keys(model: nn.Module, keys: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Match checkpoint keys to the model's names as ``from_pretrained`` does.

    Returns:
        model name -> key for plain renames, and model name (or pattern) -> key where HuggingFace converts
        tensors on loading (splits, merges), which a lazy read of single tensors cannot do.
    """
    keys = list(keys)
    if not is_pretrained_model(model):
        return {key: key for key in keys}, {}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    expected = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    transforms: Sequence[Any] = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    plain: dict[str, str] = {}
    converted: dict[str, str] = {}
    for key in keys:
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, expected)
        (plain if pattern is None else converted)[name] = key
    return plain, converted


# ---- adapters ----------------------------------------------------------------------------------------------
#
# Adapters (LoRA and its like) in the files that peft reads: which tensors they are, and how they are written.
#
# peft itself chooses the tensors, names them and writes the files; here it only must not read the model's own
# weights, which may be on the meta device and on no one rank.

CONFIG_NAME = "adapter_config.json"
"""What makes a directory one of an adapter; in a directory of its name below for each but the first."""


def has_adapters(model: nn.Module) -> bool:
    """Return whether ``model`` is a ``PeftModel``, or a transformers model with adapters added to it."""
    return is_of_package(model, "peft", "PeftModel") or bool(getattr(model, "_hf_peft_config_loaded", False))


def adapter_tensors(model: nn.Module) -> set[str]:
    """Return the names, in the model, of the tensors that its adapters' files hold.

    Raises:
        CheckpointError: the adapter is a prompt, which is computed when it is saved, from weights that no rank holds.
    """
    any_model: Any = model
    for name, config in any_model.peft_config.items():
        if config.is_prompt_learning:
            raise CheckpointError(
                f"adapter {name!r} is of type {getattr(config.peft_type, 'value', config.peft_type)}, a learnt prompt; "
                "save_pretrained() writes adapters made of weights (LoRA and its like); take gather_state_dict()"
            )
    # Empty tensors stand for the weights: those that peft hands back are the ones it would write, by whatever name.
    stand_ins = {name: torch.empty(0, device="meta") for name in model.state_dict(keep_vars=True)}
    if is_of_package(model, "peft", "PeftModel"):
        from peft import get_peft_model_state_dict

        read = functools.partial(get_peft_model_state_dict, model)
        states = [read(state_dict=dict(stand_ins), adapter_name=name) for name in any_model.peft_config]
    else:  # a `PeftModel` has what the model inside it has, this too
        states = [any_model.get_adapter_state_dict(state_dict=stand_ins)]
    taken = {id(value) for state in states for value in state.values()}
    return {name for name, value in stand_ins.items() if id(value) in taken}


def move_adapters(staging: Path, target: Path) -> None:
    """Put what was written in place of an older save; a directory's configuration is removed first and added last."""
    files = [path.relative_to(staging) for path in sorted(staging.rglob("*")) if path.is_file()]
    configs = [path for path in files if path.name == CONFIG_NAME]
    for path in configs:
        (target / path).unlink(missing_ok=True)
    for path in [*(path for path in files if path not in configs), *configs]:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (staging / path).replace(target / path)


# ---- files: the whole model's weights, out of what each stage holds; no rank gathers them ------------------


# Five phases; behind each that may fail all ranks agree that none has, so that all return or all raise:
#
#   1  each writer   sizes of what it holds               -> every rank has who holds what
#   2  everyone      who writes which tensor (computed alike, no messages)
#   3  first writer  an empty staging directory beside the target
#   4  writers       a shard each; the first one the configuration
#   5  first writer  index, rename into place
#
# Three stages, the embedding tied to the head of the last: stage 0 writes it, stage 2 does not, and the
# index has it under the name that HuggingFace saves.
def save_pretrained(
    directory: str | Path,
    *,
    model: nn.Module,
    states: Mapping[int, Mapping[str, Tensor]],
    num_stages: int,
    group: dist.ProcessGroup | None = None,
    timeout: float = 600.0,
) -> None:
    """Write the model as HuggingFace files, one shard a stage, without gathering weights.

    Every rank of ``group`` calls this; the rank that passes a stage's state writes
    ``model-0000i-of-0000N.safetensors``; the first of them adds config, generation config and, last, the index. A
    tensor that several stages pass is written by the
    first of these stages, under the name HuggingFace saves it. All files are written beside ``directory`` and moved
    into it when every rank has succeeded; where the directory exists already, its index is removed before the shards
    are replaced and the new one put in after, so that a torn save cannot be loaded.

    Of a model with peft's adapters these alone are written, as peft's own ``save_pretrained`` does: small, so that one
    rank gathers and writes them.

    Args:
        model: gives names, ties and config; its weights are not read and may be on the meta device.
        states: parameters and buffers by name of those stages that this rank writes, by their index; each stage is
            written by exactly one rank.
        group: a group whose backend handles CPU tensors (gloo); None for a single process.
        timeout: seconds to wait for the slowest rank.

    Raises:
        CheckpointError: a rank failed to write, or the stages do not hold all of the model; on every rank.
        CommTimeout: a rank did not answer in time.
    """
    stages = ", ".join(map(str, sorted(states))) or "no stage"
    who = f"rank {dist.get_rank()}, which writes {stages}" if group is not None else "the process"
    collectives = Collectives(group=group, who=who, timeout_s=timeout)
    target = Path(directory)
    staging = target.parent / f".{target.name}.saving"
    if has_adapters(model):
        _save_adapters(staging, target, model, states, collectives)
        return
    # the phases above; an old export is touched in the last only
    sizes = _together(collectives, lambda: {s: _saved_sizes(model, state) for s, state in states.items()})
    everyone = [pair for of_rank in sizes for pair in of_rank.items()]
    shards = _assign_shards(model, everyone, num_stages)
    is_first = min(shards) in states
    _together(collectives, lambda: _prepare_directory(staging, target) if is_first else None)

    def write() -> dict[int, dict[str, int]]:
        if is_first:
            _write_configs(staging, model, _commonest_dtype(sizes for _, sizes in everyone))
        own = {stage: shards[stage] for stage in states if stage in shards}
        return {s: _write_shard(staging / name, model, states[s], owned) for s, (name, owned) in own.items()}

    try:
        # Whatever fails here or on another rank, the target is untouched until `_commit`, and
        # nothing is left beside it.
        maps = [pair for of_rank in _together(collectives, write) for pair in of_rank.items()]
        _together(
            collectives, lambda: _commit(staging, target, _index(model, maps, shards)) if is_first else None
        )
    finally:
        if is_first:
            shutil.rmtree(staging, ignore_errors=True)


def _save_adapters(
    staging: Path,
    target: Path,
    model: nn.Module,
    states: Mapping[int, Mapping[str, Tensor]],
    collectives: Collectives,
) -> None:
    """Gather the adapters' tensors, small beside the model, on the first rank, which writes them."""

    names: set[str] = set()
    tensors: dict[str, Tensor] = {}

    def read() -> None:
        # stages know a tied tensor by its first name only, and a state dict has it under all
        names.update(adapter_tensors(model))
        first = tied_names(model)
        held = {name: tensor for state in states.values() for name, tensor in state.items()}
        tensors.update((name, _packed(held[first[name]])) for name in names if first[name] in held)

    _together(collectives, read)
    gathered = collectives.gather_on_first(tensors, "the adapters' weights")

    def write() -> None:
        if gathered is None:
            return
        together = {name: tensor for part in gathered for name, tensor in part.items()}
        if names - together.keys():
            raise CheckpointError(
                f"no stage holds {len(names - together.keys())} tensors of the adapters: "
                f"{sorted(names - together.keys())[:4]}; pass every stage's whole state"
            )
        _prepare_directory(staging, target)
        any_model: Any = model
        any_model.save_pretrained(str(staging), state_dict=together)
        if target.exists():
            move_adapters(staging, target)
        else:
            staging.rename(target)

    try:
        _together(collectives, write)
    finally:
        if gathered is not None:
            shutil.rmtree(staging, ignore_errors=True)


def _saved_sizes(model: nn.Module, state: Mapping[str, Tensor]) -> Sizes:
    names = tied_names(model)
    unknown = sorted(set(state) - set(names))
    if unknown:
        raise CheckpointError(f"the stage's state has {unknown[:3]}, which {type(model).__name__} has not")
    transient = _not_saved(model)
    sizes: Sizes = {}
    for name, tensor in state.items():
        if tensor.is_meta:
            raise CheckpointError(f"{name!r} is on the meta device; materialise the stage before saving")
        if name not in transient:
            sizes[names[name]] = (tensor.nbytes, str(tensor.dtype).removeprefix("torch."))
    return sizes


def _not_saved(model: nn.Module) -> set[str]:
    """Return names the state dict leaves out: non-persistent buffers, and keys HuggingFace ignores."""
    in_state_dict = set(model.state_dict(keep_vars=True))
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    names |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    return (names - in_state_dict) | ignored


def _assign_shards(
    model: nn.Module, writers: Sequence[tuple[int, Sizes]], num_stages: int
) -> dict[int, tuple[str, set[str]]]:
    """Return stage -> (file name, first names it writes); each tensor is written by the first stage that holds it.

    Every rank computes the same from the same answers, and so raises the same.
    """
    # E.g. stages 0 {wte, h.0}, 1 {h.1}, 2 {wte, ln_f}: 0 -> 00001-of-00003 {wte, h.0}, 1 -> 00002 {h.1}, 2 ->
    # 00003 {ln_f}. A stage whose tensors are all taken writes no file, and the numbers do not count it.
    stages = sorted(stage for stage, _ in writers)
    if stages != list(range(num_stages)):
        raise CheckpointError(
            f"stages {stages} write the model, of {num_stages} stages; pass each stage's state on exactly one rank"
        )
    owned: dict[int, set[str]] = {}
    taken: set[str] = set()
    for stage, sizes in sorted(writers, key=lambda writer: writer[0]):
        if set(sizes) - taken:
            owned[stage] = set(sizes) - taken
        taken |= set(sizes)
    transient = _not_saved(model)
    missing = sorted({first for name, first in tied_names(model).items() if name not in transient} - taken)
    if missing:
        raise CheckpointError(
            f"no stage holds {len(missing)} tensors of the model: {missing[:4]}; pass every stage's whole state"
        )
    return {
        stage: (f"model-{i:05d}-of-{len(owned):05d}.safetensors", names)
        for i, (stage, names) in enumerate(owned.items(), start=1)
    }


def _commonest_dtype(everyone: Iterable[Sizes]) -> str:
    # By bytes, not by tensors: float32 norms in a bf16 model are many and small.
    totals: dict[str, int] = {}
    for sizes in everyone:
        for num_bytes, dtype in sizes.values():
            if "float" in dtype:
                totals[dtype] = totals.get(dtype, 0) + num_bytes
    return max(totals, key=totals.__getitem__, default="float32")


def _prepare_directory(staging: Path, target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"{target} is a file; give a directory")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)


def _write_shard(
    path: Path, model: nn.Module, state: Mapping[str, Tensor], owned: set[str]
) -> dict[str, int]:
    """Write this stage's tensors and return saved name -> bytes."""
    from safetensors.torch import save_file

    first, saved = tied_names(model), saved_names(model)
    # transformers 5 may hold a checkpoint's tensors joined (experts, query-key-value); files keep the
    # original ones, which ``from_pretrained`` of any release reads.
    tensors = {saved[first[name]]: _packed(tensor) for name, tensor in state.items() if first[name] in owned}
    if is_pretrained_model(model):
        from transformers.core_model_loading import revert_weight_conversion

        tensors = {name: _packed(tensor) for name, tensor in revert_weight_conversion(model, tensors).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return {name: tensor.nbytes for name, tensor in tensors.items()}


def _packed(tensor: Tensor) -> Tensor:
    """Return the tensor on the CPU in storage of its own size (parameters may be views of a flat buffer)."""
    packed = tensor.detach().to("cpu").contiguous()
    needed = packed.nbytes
    return packed.clone() if packed.untyped_storage().nbytes() != needed else packed


def _write_configs(staging: Path, model: nn.Module, dtype: str) -> None:
    if not is_pretrained_model(model):
        logger.warning(
            "%s is not a transformers PreTrainedModel: the files hold its weights under their module paths, without "
            "a config; read them with safetensors and load_state_dict",
            type(model).__name__,
        )
        return
    any_model: Any = model
    config = copy.deepcopy(any_model.config)
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    config.save_pretrained(staging)
    if any_model.can_generate() and any_model.generation_config is not None:
        any_model.generation_config.save_pretrained(staging)


def _index(
    model: nn.Module, maps: Sequence[tuple[int, dict[str, int]]], shards: Mapping[int, tuple[str, set[str]]]
) -> str:
    weight_map = {name: shards[stage][0] for stage, written in maps for name in written}
    metadata: dict[str, Any] = {"total_size": sum(size for _, written in maps for size in written.values())}
    if not is_pretrained_model(model):
        metadata["note"] = "weights by module path; no transformers config"
    return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"


def _commit(staging: Path, target: Path, index: str) -> None:
    if not target.exists():
        write_text_whole(staging / INDEX_NAME, index)
        staging.rename(target)
        return
    # An index names the shards of one save. Without it the directory is no model, so the order is:
    #
    #   old index | remove index | replace shards | new index
    #   loads old |        cannot be loaded       | loads new
    #
    # Shards of the old save that the new one does not have (more stages then) would only waste space.
    new = {path.name for path in staging.iterdir()}
    (target / INDEX_NAME).unlink(missing_ok=True)
    (target / SINGLE_NAME).unlink(missing_ok=True)
    for stale in target.glob("model-*-of-*.safetensors"):
        if stale.name not in new:
            stale.unlink()
    for name in sorted(new):
        (staging / name).replace(target / name)
    write_text_whole(target / INDEX_NAME, index)
    staging.rmdir()


def _together(collectives: Collectives, action: Callable[[], T]) -> list[T]:
    """Return what every rank's action returns, or raise on all ranks if one fails."""
    result: Any = None
    problem = None
    try:
        result = action()
    except Exception as error:  # the other ranks must hear of it, whatever it is
        problem = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    answers = collectives.gather((problem, result), "saving the model")
    failures = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text is not None]
    if failures:
        raise CheckpointError("the model was not saved; " + "; ".join(dict.fromkeys(failures)))
    return [value for _, value in answers]
