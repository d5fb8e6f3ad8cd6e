"""What only HuggingFace knows: initialisers, values its constructors set, checkpoint names, `save_pretrained`.

Imports transformers only where a model of it is at hand, so that plain models need none of it. Reads of
transformers' internals are gathered here: ``_init_weights``, ``all_tied_weights_keys``,
``get_model_conversion_mapping``, ``rename_source_key``, ``revert_weight_conversion`` (transformers 5.x).
"""

from __future__ import annotations

import copy
import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gpp_plugin.errors import CheckpointError, CommTimeout
from gpp_plugin.ir.op_graph import Parameter
from gpp_plugin.ir.serialize import write_text_whole

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


def is_pretrained_model(model: nn.Module) -> bool:
    """Return whether ``model`` is a transformers ``PreTrainedModel``."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


# ---- ties ------------------------------------------------------------------------------------------------


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return every parameter and buffer name -> the first name of the same tensor.

    The first name is the one ``named_parameters`` gives. Ties are found by identity and, where copies to the
    meta device have lost it, by HuggingFace's ``all_tied_weights_keys``.
    """
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for named in (
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    ):
        for name, tensor in named:
            names[name] = first.setdefault(id(tensor), name)
    order = {name: i for i, name in enumerate(names)}
    for target, source in declared_ties(model).items():
        if target in names and source in names and names[target] != names[source]:
            kept, dropped = sorted((names[target], names[source]), key=order.__getitem__)
            names = {name: kept if home == dropped else home for name, home in names.items()}
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


def rebuild_constants(model: nn.Module, seed: int) -> nn.Module | None:
    """Return the model constructed anew with real tensors only where its constructor gives values.

    Tables (position ids, rotary frequencies) and explicit values (CLIP's ``logit_scale``) are real; weights
    that wait for an initialiser stay on the meta device. None where the model is not built from a config.
    """
    if not is_pretrained_model(model):
        return None
    from transformers.initialization import no_init_weights

    build: Any = type(model)
    with torch.random.fork_rng(devices=[]), _EmptyOnMeta(), no_init_weights():
        torch.manual_seed(seed)
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


# ---- saving ----------------------------------------------------------------------------------------------


def save_pretrained(
    directory: str | Path,
    *,
    model: nn.Module,
    state: Mapping[str, Tensor],
    stage_index: int,
    num_stages: int,
    is_writer: bool,
    group: dist.ProcessGroup | None = None,
    timeout: float = 600.0,
) -> None:
    """Write the model as HuggingFace files, one shard a stage, without gathering weights.

    Every rank of ``group`` calls this; one rank of each stage writes ``model-0000i-of-0000N.safetensors``; the first
    of them adds config, generation config and, last, the index. A tensor that several stages pass is written by the
    first of these stages, under the name HuggingFace saves it. All files are written beside ``directory`` and moved
    into it when every rank has succeeded; where the directory exists already, its index is removed before the shards
    are replaced and the new one put in after, so that a torn save cannot be loaded.

    Args:
        model: gives names, ties and config; its weights are not read and may be on the meta device.
        state: this stage's parameters and buffers by name; not read where ``is_writer`` is false.
        is_writer: True on exactly one rank of each stage.
        group: a group whose backend handles CPU tensors (gloo); None for a single process.
        timeout: seconds to wait for the slowest rank.

    Raises:
        CheckpointError: a rank failed to write, or the stages do not hold all of the model; on every rank.
        CommTimeout: a rank did not answer in time.
    """
    target = Path(directory)
    staging = target.parent / f".{target.name}.saving"
    sizes: Sizes = {}
    problem: str | None = None
    if is_writer:
        sizes, problem = _attempt(lambda: _saved_sizes(model, state), sizes)
    everyone = _agree(problem, group, timeout, (stage_index if is_writer else None, sizes))
    shards = _assign_shards(model, [entry for entry in everyone if entry[0] is not None], num_stages)
    is_first = is_writer and stage_index == min(shards)
    _, problem = _attempt(lambda: _prepare_directory(staging, target) if is_first else None, None)
    _agree(problem, group, timeout)

    def write() -> dict[str, int]:
        if is_first:
            _write_configs(staging, model, _commonest_dtype([sizes for _, sizes in everyone]))
        if not is_writer or stage_index not in shards:
            return {}
        name, owned = shards[stage_index]
        return _write_shard(staging / name, model, state, owned)

    nothing: dict[str, int] = {}
    written, problem = _attempt(write, nothing)
    try:
        maps = _agree(problem, group, timeout, (stage_index, written))
        _, problem = _attempt(
            lambda: _commit(staging, target, _index(model, maps, shards)) if is_first else None, None
        )
        _agree(problem, group, timeout)
    finally:
        if is_first:
            shutil.rmtree(staging, ignore_errors=True)


Sizes = dict[str, tuple[int, str]]
"""First name -> (bytes, dtype)."""


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
            sizes[names[name]] = (
                tensor.numel() * tensor.element_size(),
                str(tensor.dtype).removeprefix("torch."),
            )
    return sizes


def _not_saved(model: nn.Module) -> set[str]:
    """Return names the state dict leaves out: non-persistent buffers, and keys HuggingFace ignores."""
    kept = set(model.state_dict(keep_vars=True))
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    names |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    return (names - kept) | ignored


def _assign_shards(
    model: nn.Module, writers: Sequence[tuple[int, Sizes]], num_stages: int
) -> dict[int, tuple[str, set[str]]]:
    """Return stage -> (file name, first names it writes); each tensor goes to the first stage that holds it.

    Every rank computes the same from the same answers, and so raises the same.
    """
    stages = sorted(stage for stage, _ in writers)
    if stages != list(range(num_stages)):
        raise CheckpointError(
            f"stages {stages} write the model, of {num_stages} stages; pass is_writer=True on exactly one rank of each"
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
    tensors = {saved[first[name]]: _packed(tensor) for name, tensor in state.items() if first[name] in owned}
    if is_pretrained_model(model):
        from transformers.core_model_loading import revert_weight_conversion

        tensors = {name: _packed(tensor) for name, tensor in revert_weight_conversion(model, tensors).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}


def _packed(tensor: Tensor) -> Tensor:
    """Return the tensor on the CPU in storage of its own size (parameters may be views of a flat buffer)."""
    packed = tensor.detach().to("cpu").contiguous()
    needed = packed.numel() * packed.element_size()
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
    metadata = {"total_size": sum(size for _, written in maps for size in written.values())}
    note = {} if is_pretrained_model(model) else {"note": "weights by module path; no transformers config"}
    return (
        json.dumps({"metadata": {**metadata, **note}, "weight_map": weight_map}, indent=2, sort_keys=True)
        + "\n"
    )


def _commit(staging: Path, target: Path, index: str) -> None:
    if not target.exists():
        write_text_whole(staging / INDEX_NAME, index)
        staging.rename(target)
        return
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


T = TypeVar("T")


def _attempt(action: Callable[[], T], otherwise: T) -> tuple[T, str | None]:
    """Return (result, None), or (``otherwise``, what went wrong)."""
    try:
        return action(), None
    except Exception as error:  # the other ranks must hear of it, whatever it is
        return otherwise, str(error) if isinstance(
            error, CheckpointError
        ) else f"{type(error).__name__}: {error}"


def _agree(
    problem: str | None, group: dist.ProcessGroup | None, timeout: float, payload: Any = None
) -> list[Any]:
    """Return every rank's payload, or raise on all ranks if one has a problem."""
    answers = _exchange((problem, payload), group, timeout)
    failures = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text is not None]
    if failures:
        raise CheckpointError("the model was not saved; " + "; ".join(dict.fromkeys(failures)))
    return [value for _, value in answers]


def _exchange(value: Any, group: dist.ProcessGroup | None, timeout: float) -> list[Any]:
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    with _named_timeouts(timeout):
        if dist.get_backend(group) == "gloo":
            dist.monitored_barrier(group, timeout=timedelta(seconds=timeout))
        answers: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(answers, value, group=group)
    return answers


@contextmanager
def _named_timeouts(timeout: float) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CommTimeout(
            f"rank {dist.get_rank()} waited for the other ranks while saving the model (limit {timeout:g} s): {error}"
        ) from error


def gather_state_dict(
    state: Mapping[str, Tensor], *, parameters: Sequence[Parameter], group: dist.ProcessGroup | None
) -> dict[str, Tensor] | None:
    """Return the whole model's state dict on rank 0 (CPU tensors), None elsewhere; collective.

    Args:
        state: what this rank brings of it.
        parameters: of the model; tied ones are returned under all their names.
        group: a CPU group of all ranks; None for a single rank.
    """
    own = {name: value.detach().cpu() for name, value in state.items() if isinstance(value, Tensor)}
    gathered: list[Any] = [own]
    if group is not None:
        slots: list[Any] | None = [None] * dist.get_world_size(group) if dist.get_rank() == 0 else None
        dist.gather_object(own, slots, dst=0, group=group)
        if slots is None:
            return None
        gathered = slots
    whole: dict[str, Tensor] = {}
    for part in gathered:
        whole.update(part)
    for parameter in parameters:
        if parameter.name in whole:
            whole.update(dict.fromkeys(parameter.aliases, whole[parameter.name]))
    return whole
