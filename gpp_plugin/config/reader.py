"""Reads options: the ``graph_pipeline`` block of the DeepSpeed JSON, and the same keys from a command line or Python.

A wrong configuration is refused with one line per problem: the key as the user wrote it, the value, the nearest right
name, and what to write instead. A key is accepted with a value other than its default only if this release does what it
says.
"""

from __future__ import annotations

import base64
import contextlib
import difflib
import functools
import json
import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from gpp_plugin.config.block import (
    BLOCK,
    MEMORY_WAYS,
    PLAN_DEFAULTS,
    REMOVED_KEYS,
    RENAMED_KEYS,
    GraphPipelineConfig,
    LengthsConfig,
    PlanOptions,
)
from gpp_plugin.config.deepspeed_keys import home_of, sequence_size
from gpp_plugin.config.key_names import SchemaKey, all_keys, name_of, place_of, setting_of
from gpp_plugin.errors import ConfigError, ReadError
from gpp_plugin.ir import serialize
from gpp_plugin.ir.serialize import SMALL_BYTES, parse_json, shown_path
from gpp_plugin.ir.tensors import nearest_divisors
from gpp_plugin.ir.typed_leaves import MOST_COUNT, show
from gpp_plugin.plugins import SCHEDULES, find_schedule

logger = logging.getLogger(__name__)

# A DeepSpeed configuration as a dict, from all that `deepspeed.initialize` takes.

_WHAT = "a DeepSpeed configuration"
_MOST_COMMENTED = 256 << 10
"""Characters of JSON with comments, whose reader is slow."""


def load_deepspeed_json(ds_config: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """Return a DeepSpeed configuration as a dict, from what `deepspeed.initialize` accepts.

    Raises:
        ConfigError: it is neither a dict, nor a readable JSON file, nor base64 of JSON.
    """
    if isinstance(ds_config, Mapping):
        return dict(ds_config)
    if not isinstance(ds_config, (str, os.PathLike)):
        raise ConfigError(f"config: expected a dict or a file name, found {type(ds_config).__name__}")
    try:
        text = serialize.read_text(ds_config, what=_WHAT)
    except ReadError as error:
        try:
            text = base64.urlsafe_b64decode(str(ds_config)).decode("utf-8")
        except ValueError:  # neither base64 nor a text
            raise error from error.__cause__
    name = shown_path(ds_config)
    try:
        plain = parse_json(text, what=_WHAT, max_bytes=SMALL_BYTES)
    except ReadError as error:
        plain = _from_hjson(text) if isinstance(error.__cause__, json.JSONDecodeError) else None
        if plain is None:
            raise ReadError(f"{name}: {error}") from error.__cause__
    if not isinstance(plain, dict):
        raise ReadError(f"{name}: holds a {type(plain).__name__}; a DeepSpeed configuration is an object")
    return plain


def _from_hjson(text: str) -> Any | None:
    """Read JSON with comments, which DeepSpeed's own reader takes."""
    try:
        # DeepSpeed parses with hjson, so comments and trailing commas are no errors to its users.
        import hjson
    except ImportError:  # comes with deepspeed; without it the strict reader's message stands
        return None
    if len(text) > _MOST_COMMENTED:
        return None
    try:
        plain = hjson.loads(text, object_pairs_hook=dict)
        return parse_json(hjson.dumpsJSON(plain), what=_WHAT)
    except (ValueError, RecursionError):
        return None


def read_config(ds_config: Mapping[str, Any] | str | Path) -> GraphPipelineConfig | None:
    """Return the checked ``graph_pipeline`` block, or None where there is none or it is not enabled.

    Args:
        ds_config: the DeepSpeed configuration: a dict, a file name, or base64 text (as its launcher
            passes it).
    Raises:
        ConfigError: one line per problem, among them a top-level key that looks like a mistyped
            ``graph_pipeline``.
    """
    plain = load_deepspeed_json(ds_config)
    # DeepSpeed ignores keys that it does not know: a block called "graphPipeline" would train without
    # a pipeline, without a word. So keys near the name are refused, also where the right one is there as well.
    mistyped = [
        f"{key}: unknown key, and DeepSpeed would ignore it; did you mean {BLOCK!r}?"
        for key in plain
        if _looks_like_block(key)
    ]
    if mistyped:
        raise ConfigError("\n".join(mistyped))
    if BLOCK not in plain:
        return None
    block = plain[BLOCK]
    if not isinstance(block, Mapping):
        raise ConfigError(
            f"{BLOCK}: {show(block)} is not an object; write {{}} for the defaults or remove the key"
        )
    with _one_line_a_problem():
        config = GraphPipelineConfig.model_validate(_with_new_names(block))
    own = config.sequence_parallel if "sequence_parallel" in config.model_fields_set else None
    size = sequence_size(plain, own)
    config = config if size is None else config.model_copy(update={"sequence_parallel": size})
    config = _check_together(config)
    zero = plain.get("zero_optimization")
    if isinstance(zero, Mapping) and zero.get("stage") is not None:
        config = config.model_copy(update={"zero": None})  # what is named there holds
    return config if config.enabled else None


def _with_new_names(block: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a block whose keys of earlier releases have the names of this one.

    Raises:
        ConfigError: both are there.
    """
    found = {str(key): value for key, value in block.items()}
    for old, new in RENAMED_KEYS.items():
        if old in found and new in found:
            raise ConfigError(f"{BLOCK}.{old}: is now {new}, which is there as well; remove {old}")
        if old in found:
            _advise(f"{BLOCK}.{old}: is now {new}; the old name is read in this release alone")
            found[new] = found.pop(old)
    return found


@functools.cache
def _advise(line: str) -> None:
    """Log a line once a process."""
    logger.warning(line)


def read_options(options: Mapping[str, Any]) -> PlanOptions:
    """Return the checked options of a plan that is made without a job.

    Args:
        options: by path (``memory.limit_gb``), argument (``memory_limit_gb``) or key of DeepSpeed's
            (``train_batch_size``); one that is None is left at its default.

    Raises:
        ConfigError: one line per problem.
    """
    # Twice: contradictions are of what the user said; what is left out then gets the defaults of planning, which
    # need not go together with everything (in mode async no size of a micro-batch is searched in a job).
    leaves = flat_keys((find_key(name, v).path, v) for name, v in options.items() if v is not None)
    for path, value in leaves.items():
        _check_plans(path, value)
    with _one_line_a_problem():
        _check_together(PlanOptions.model_validate(nested_keys(leaves)))
        return PlanOptions.model_validate(nested_keys({**PLAN_DEFAULTS, **leaves}))


def find_key(name: str, value: Any) -> SchemaKey:
    """Return the key that a name means: a path, an argument, or a key of DeepSpeed's.

    Raises:
        ConfigError: there is none; names the nearest.
    """
    keys = all_keys()
    found = keys.get(RENAMED_KEYS.get(name, name)) or next(
        (k for k in keys.values() if name in (k.argument, k.json)), None
    )
    if found is None:
        names = [*keys, *(key.argument for key in keys.values())]
        raise ConfigError(f"{place_of('', name)}: {_unknown_key(name, value, names=names)}")
    return found


def flat_keys(options: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return path -> value of every leaf.

    >>> flat_keys([("stages", 2), ("memory", {"limit_gb": 8})])
    {'stages': 2, 'memory.limit_gb': 8}

    Raises:
        ConfigError: a leaf has two values.
    """
    found: dict[str, Any] = {}
    for path, value in options:
        key = all_keys().get(path)
        if isinstance(value, Collection) and not isinstance(value, (str, dict)):
            value = dict(value) if isinstance(value, Mapping) else list(value)
        if path == "memory" and isinstance(value, list):  # `MemoryConfig` reads one
            with _one_line_a_problem():
                memory = PlanOptions.model_validate({path: value}).memory
            value = {way: getattr(memory, way) for way in MEMORY_WAYS}
        is_object = key is not None and key.model is not None and isinstance(value, dict)
        leaves = flat_keys((f"{path}.{k}", v) for k, v in value.items()) if is_object else {path: value}
        for leaf in leaves.keys() & found.keys():
            raise ConfigError(
                f"{place_of(leaf)}: {show(found[leaf])} and {show(leaves[leaf])}; give one value"
            )
        found.update(leaves)
    return found


def nested_keys(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object that path -> value stands for.

    >>> nested_keys({"stages": 2, "memory.limit_gb": 8})
    {'stages': 2, 'memory': {'limit_gb': 8}}
    """
    found: dict[str, Any] = {}
    for path, value in leaves.items():
        *outer, last = path.split(".")
        inside = found
        for name in outer:
            inside = inside.setdefault(name, {})
        inside[last] = value
    return found


def read_text(path: str, text: str) -> Any:
    """Return the value of a key from a command line: JSON, a text, ``a,b`` for a list or ``a=1,b=2`` for an object.

    Raises:
        ConfigError: it is none that the key may have.
    """
    # Of the forms that a text may have the first one counts that the schema takes: 8 is a number for stages, and a name
    # for a file.
    parts = [part.strip() for part in text.split(",")]
    forms = [from_json(text), text, [from_json(part) for part in parts], parts]
    if all("=" in part for part in parts):
        forms.append({name: from_json(value) for name, _, value in (part.rpartition("=") for part in parts)})
    for form in forms:
        with contextlib.suppress(ValidationError):
            PlanOptions.model_validate(nested_keys({path: form}))
            return form
    with _one_line_a_problem():
        PlanOptions.model_validate(nested_keys({path: forms[0]}))
    raise AssertionError(f"{path} takes a value that it refused")


def from_json(text: str) -> Any:
    """Return the value of JSON, or what is none as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _check_plans(path: str, value: Any) -> None:
    """Refuse a key on which no plan depends, and values that only a job can have."""
    key = all_keys().get(path)
    if key is None:  # an entry of an object that has none of the name
        return
    if not key.extra.get("plans"):
        raise ConfigError(
            f"{place_of(path)}: no plan depends on it; leave it out, and write it into {BLOCK} of the job that trains"
        )
    if value in key.choices and value not in key.plan_choices:
        raise ConfigError(
            f"{place_of(path)}: {show(value)} is for training; give one of {', '.join(key.plan_choices)}"
        )
    if path.startswith("lengths."):
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, Mapping):
                raise ConfigError(
                    f"{place_of(path)}: {show(one)} is for training; give a whole number of at least 1"
                )


def _looks_like_block(key: Any) -> bool:
    """Say whether a top-level key other than ``graph_pipeline`` was probably meant to be it."""
    if not isinstance(key, str) or key == BLOCK:
        return False
    words = re.sub(r"([a-z])([A-Z])", r"\1_\2", key).lower()
    # "pipeline-graph" and "GraphPipeline" have the same words; what is left are typing
    # errors, "grpah_pipeline".
    if sorted(re.split(r"[^a-z0-9]+", words)) == sorted(BLOCK.split("_")):
        return True
    letters = re.sub(r"[^a-z0-9]", "", words)
    return difflib.SequenceMatcher(None, letters, BLOCK.replace("_", "")).ratio() >= 0.8


def check_ranks(config: GraphPipelineConfig, num_ranks: int) -> None:
    """Refuse a block that needs more ranks than there are.

    Raises:
        ConfigError: a data-parallel degree above the ranks.
    """
    # What no plan could have; whether the rest can be used is the planner's. A rank may hold several stages, so their
    # number is no bound where they share ranks: 8 stages of 2 ranks are two on each of 4 groups of 8 ranks.
    degree = config.data_parallel
    if isinstance(degree, int) and degree > num_ranks:
        raise ConfigError(
            f"{place_of('data_parallel')}: {degree} ranks is more than the {num_ranks} there are; lower it or start "
            "more"
        )


# ---- wrong values --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _one_line_a_problem() -> Iterator[None]:
    """Raise what pydantic finds as a `ConfigError`, one line per wrong key."""
    try:
        yield
    except ValidationError as error:
        raise ConfigError("\n".join(_problems_of(error))) from None


def _problems_of(error: ValidationError) -> list[str]:
    # Pydantic says of {"micro_batch_sizes": {"loss": 0}} once for each form the value may have:
    #
    #   ("micro_batch_sizes", "literal['auto','search']")             not one of them
    #   ("micro_batch_sizes", "constrained-int")                      no whole number
    #   ("micro_batch_sizes", "dict[...]", "loss", "constrained-int") not at least 1
    #   ("micro_batch_sizes", "dict[...]", "loss", "literal['full']") not "full"
    #
    # Without the union's tags these are two places, the whole and its entry "loss"; the longer one says where it is.
    lines: dict[tuple[str, ...], str] = {}
    for item in error.errors(include_url=False):
        *outer, last = item["loc"]
        if item["type"] == "extra_forbidden":
            parent = ".".join(map(str, outer))
            place = place_of(parent, str(last))
            lines[parent, str(last)] = f"{place}: {_unknown_key(str(last), item['input'], parent)}"
            continue
        key, inner = _locate(item["loc"])
        text = f"{place_of(key.path, *inner)}: {_wrong_value(key, inner, item['input'], error.title)}"
        lines.setdefault((key.path, *inner), text)
    # A union complains about the whole value too, once for each form it may have.
    return [line for at, line in lines.items() if not any(other[: len(at)] == at != other for other in lines)]


def _locate(loc: Sequence[int | str]) -> tuple[SchemaKey, tuple[str, ...]]:
    """Return the key of a pydantic location without union tags, and which entry of its object is meant."""
    keys = all_keys()
    paths = [".".join(map(str, loc[: end + 1])) for end in range(len(loc))]
    depth = sum(path in keys for path in paths)
    key = keys[paths[depth - 1]]
    rest = [str(part) for part in loc[depth:]]
    has_entries = "inner" in key.extra and len(rest) > 1 and rest[0].startswith(("dict[", "list["))
    return key, (rest[1],) if has_entries else ()


def _unknown_key(name: str, value: Any, parent: str = "", names: Sequence[str] = ()) -> str:
    """Return what is wrong with a name that is no key.

    Args:
        parent: the object that it stands in; empty for the block.
        names: of its siblings, where these are not those of the block or the object.
    """
    # "limit_gb" written beside "memory" instead of in it is nearer to a key of the memory object than to its
    # own siblings, so that is looked for first, with a stricter likeness.
    keys = all_keys()
    if not parent and name in REMOVED_KEYS:
        return f"{REMOVED_KEYS[name]} (value {show(value)})"
    is_json = not parent and not names
    if is_json and (home := home_of(name, alone=False)):
        return _of_deepspeed(home, value)
    model = keys[parent].model if parent else GraphPipelineConfig
    assert model is not None
    siblings = names or list(model.model_fields)
    elsewhere = {
        path.rpartition(".")[2]: path
        for path, key in keys.items()
        if "." in path or "json" in key.extra and " " not in key.json
    }
    inner = difflib.get_close_matches(name.rpartition(".")[2], elsewhere, n=1, cutoff=0.8)
    if inner and not parent:
        return f"unknown key (value {show(value)}); write {setting_of(elsewhere[inner[0]], value, is_whole=True)}"
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.84)
    if not near and is_json and (home := home_of(name, joined=False)):
        return _of_deepspeed(home, value)
    near = near or difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(model.model_fields)}"
    return f"unknown key (value {show(value)}); {hint}"


def _of_deepspeed(home: str, value: Any) -> str:
    """Return what is wrong with a key of DeepSpeed's in the block."""
    does = f"write {home}" if "." in home else "move it"
    return f"unknown key (value {show(value)}); it is DeepSpeed's: {does} beside {BLOCK}"


def _wrong_value(key: SchemaKey, inner: Sequence[str], value: Any, model: str) -> str:
    """Return what is wrong with a value, and the possible ones in a block or, of `PlanOptions`, without a job."""
    expected = key.inner_values if inner else key.values
    if not inner and model == PlanOptions.__name__ and key.plan_choices != key.choices:
        expected = f"one of {', '.join(key.plan_choices)}"
    with contextlib.suppress(ValidationError):
        PlanOptions.model_validate(nested_keys({key.path: [value]}))
        return f"{show(value)} is not valid; give a list: {show([value])}"
    words = [word for word in re.findall(r"\w+", expected.removeprefix("one of ")) if not word.isdigit()]
    # of a list the first item that is nothing like what it may be
    text = next((one for one in value if one not in words), "") if isinstance(value, list) else value
    is_text = isinstance(text, str)
    near = (
        difflib.get_close_matches(text.lower(), sorted({*words} - {text}), n=1, cutoff=0.6) if is_text else []
    )
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{show(value)} is not valid; give {expected}{hint}"


# ---- contradictions ------------------------------------------------------------------------------------------


def _check_together(config: GraphPipelineConfig) -> GraphPipelineConfig:
    """Return the block with what follows from its keys, once none of them contradicts another.

    Raises:
        ConfigError: two do; says which, and what to write.
    """
    for key, why, *other in _contradictions(config):
        write = f"write {setting_of(*other[0])} or " if other else ""
        value = show(getattr(config, key))
        raise ConfigError(f"{place_of(key)}: {value} {why}; {write}remove it")
    if config.lengths is not None:
        _check_lengths(config.lengths)
    if config.compile is not False:
        _check_compile(config)
        # whole forwards and backwards alone are compiled
        alone = config.memory.model_copy(update={"recompute": "off", "swap": "off"})
        config = config.model_copy(update={"memory": alone, "slicing": "off"})
    # a half of a unit is cut
    return config if config.units is None else config.model_copy(update={"slicing": "off"})


def _contradictions(c: GraphPipelineConfig) -> Iterator[tuple[Any, ...]]:
    """Yield a key whose value does not go with others, why, and what may be written instead of removing it."""
    sync, is_async = ("mode", "sync"), c.mode == "async"
    if c.vertical_sync and not is_async:
        yield "vertical_sync", "has no meaning in mode sync, where all stages step at once", ("mode", "async")
    if c.frozen_prefetch == 1 and is_async:
        yield "frozen_prefetch", "is not possible in mode async, whose pipeline never drains", sync
    if c.loss_mean == "tokens" and is_async:
        yield "loss_mean", "is a mean over the mini-batch, and in mode async each micro-batch is a step", sync
    for key, allowed in (("schedule", ("auto", "1f1b")), ("slicing", ("auto", "off"))):
        if is_async and getattr(c, key) not in allowed:
            yield key, "is not possible in mode async, which runs 1F1B of whole micro-batches", sync
    if is_async and not (isinstance(c.micro_batch_sizes, int) or c.micro_batch_sizes == "auto"):
        why = "is not possible in mode async, where each micro-batch is one optimizer step of every stage"
        yield "micro_batch_sizes", f"{why}; give one number", sync
    for key, default in (("virtual_stages", 1), ("colocate", "off")):
        if getattr(c, key) != default and is_async:
            why = 'puts several stages on a rank by the times of mini-batches that end, and mode "async" has none'
            yield key, f"{why}; say in a plan which ranks each stage has", sync
        if getattr(c, key) != default and c.p2p != "native":
            why = f"puts several stages on a rank, which p2p {show(c.p2p)} cannot run"
            yield key, why, ("p2p", "native")
    if c.locate_nan and c.backends != "off":
        why = f"looks at what every operator returns, and {setting_of('backends', c.backends)} runs them out of sight"
        yield "locate_nan", why, ("backends", "off")
    if c.zero == "auto" and (c.backends != "off" or c.planner == "stock_1f1b"):
        key = "planner" if c.backends == "off" else "backends"
        why = f"may choose ZeRO 3, which {setting_of(key, getattr(c, key))} cannot run"
        yield "zero", f"{why}; name a stage in zero_optimization"
    whole = (("micro_batch_sizes", "auto"), ("slicing", "auto", "off"), ("mode", "sync"), ("p2p", "native"))
    for key, *values in whole if c.units is not None else ():
        if getattr(c, key) not in values:
            why = (
                f"is not possible with {name_of('units')}, of which every rank runs one whole unit at a time"
            )
            yield key, why, (key, values[0])


def _check_compile(config: GraphPipelineConfig) -> None:
    """Refuse, with compiled stages, what looks into a stage's code or cuts its tasks."""
    memory, lengths = config.memory, config.lengths
    tensor, sequence = config.tensor_parallel, config.sequence_parallel
    splits = config.schedule in SCHEDULES and find_schedule(config.schedule).splits_backward
    divides, cuts = (
        any(size != 1 for size in (sizes.values() if isinstance(sizes, dict) else [sizes]))
        for sizes in (tensor, sequence)
    )
    halves = config.slicing not in ("auto", "off")
    recomputes = memory.recompute == "full"
    refused = [
        ("memory.recompute", "full", recomputes, "what is compiled is not run again in parts"),
        ("schedule", config.schedule, splits, "a compiled backward is not made in two parts"),
        ("slicing", config.slicing, halves, "halves would be compiled beside the whole"),
        ("mode", "async", config.mode == "async", "its weights change between a forward and its backward"),
        ("lengths.max", lengths and lengths.max, lengths is not None, "what is compiled is for one length"),
        ("units", config.units, config.units is not None, "each shape of a unit would be compiled"),
        ("locate_nan", True, config.locate_nan, "operators of compiled code are out of sight"),
        ("tensor_parallel", tensor, divides, "what tensor ranks share out is not compiled"),
        ("sequence_parallel", sequence, cuts, "parts of the positions are not compiled"),
        ("granularity", "node", config.granularity == "node", "compiling single operators gains nothing"),
    ]
    for key, value, is_wrong, reason in refused:
        if is_wrong:
            raise ConfigError(
                f"{place_of('compile')}: {show(config.compile)} does not go with {setting_of(key, value)}: {reason}; "
                "remove one of them"
            )


def _check_lengths(lengths: LengthsConfig) -> None:
    """Refuse typical lengths that are longer than the longest, or of other keys."""
    longest, at_most = lengths.max, name_of("lengths.max")
    for position, typical in enumerate(lengths.typical):
        place = f"{place_of('lengths.typical')}[{position}]: {show(typical)}"
        if isinstance(typical, int) and isinstance(longest, int):
            is_longer = typical > longest
        elif isinstance(typical, dict) and isinstance(longest, dict) and typical.keys() == longest.keys():
            is_longer = any(size > longest[key] for key, size in typical.items())
        else:
            raise ConfigError(
                f"{place} is not of the form of {at_most}, {show(longest)}; give numbers, or objects with the same "
                "keys"
            )
        if is_longer:
            raise ConfigError(f"{place} is longer than {at_most}, {show(longest)}; raise {at_most}")


_STEPS = "gradient_accumulation_steps"


# ---- the samples of a mini-batch and of a loss, as the configuration says or implies them ----


class BatchSizes(NamedTuple):
    """What the configuration says about the mathematics of a step, in samples.

    Args:
        mini_batch: samples of one optimizer step over the whole graph (B).
        loss_unit: samples one loss is computed on (u); the step's loss is the mean over B/u of them.
        gradient_accumulation_steps: of the JSON; divides B/u.
    """

    mini_batch: int
    loss_unit: int
    gradient_accumulation_steps: int | None


def batch_arithmetic(ds_config: Mapping[str, Any] | str | Path, num_ranks: int) -> BatchSizes:
    """Return mini-batch, loss unit and accumulation steps as the configuration says or implies them.

    ``train_batch_size`` is B. ``train_micro_batch_size_per_gpu`` is the loss unit u; where it is missing,
    u is B / ``gradient_accumulation_steps``, or B where that is missing too. B may be left out only where
    the data-parallel degree is known (one rank, or ``graph_pipeline.data_parallel`` is there).

    Raises:
        ConfigError: a size is no positive whole number, does not divide, or contradicts
            ``graph_pipeline.micro_batch_sizes``.
    """
    # B = train_batch_size, u = train_micro_batch_size_per_gpu, s = gradient_accumulation_steps; a step's loss
    # is the mean of B / u losses of u samples each, on however many ranks (DeepSpeed's B = u * s * ranks is
    # not required, since stages may have different numbers of ranks).
    #
    #   the JSON          B    u    s        the JSON                             B    u
    #   B=64              64   64   -        B=64, loss: "full"                   64   64
    #   B=64 u=4          64   4    -        u=4 s=2, one rank                    8    4
    #   B=64 s=4          64   16   4        u=4 s=2, data_parallel=2             16   4
    #   B=64 u=4 s=3      refused: 3 does not divide the 16 losses
    plain = load_deepspeed_json(ds_config)
    config = read_config(plain) or GraphPipelineConfig()
    mini_batch = _size(plain, "train_batch_size", place_of("mini_batch"))
    unit = _size(plain, "train_micro_batch_size_per_gpu", place_of("loss_unit"))
    steps = _size(plain, _STEPS, _STEPS)
    if config.units is not None:
        return _units_arithmetic(config.units, mini_batch, unit, steps)
    if mini_batch is None:
        mini_batch = _implied_mini_batch(unit, steps, num_ranks, config)
    full_loss = isinstance(config.micro_batch_sizes, dict) and config.micro_batch_sizes.get("loss") == "full"
    if full_loss:
        _check_full_loss(mini_batch, unit, steps)
        unit = mini_batch
    if unit is None:
        if mini_batch % (steps or 1):
            raise ConfigError(
                f"{_STEPS}: {steps} does not divide {name_of('mini_batch')} {mini_batch}; "
                f"{_divisors_to_give(mini_batch, steps or 1)}"
            )
        unit = mini_batch // (steps or 1)
    check_sizes(config, mini_batch, unit)
    if steps is not None and (mini_batch // unit) % steps:
        raise ConfigError(
            f"{_STEPS}: {steps} does not divide the {mini_batch // unit} losses of a step "
            f"({name_of('mini_batch')} {mini_batch} / {name_of('loss_unit')} {unit}); remove it"
        )
    return BatchSizes(mini_batch, unit, steps)


def _units_arithmetic(units: int, mini_batch: int | None, unit: int | None, steps: int | None) -> BatchSizes:
    """Return the sizes of a mini-batch of ``units`` typical units."""
    # units=8 and u=4: B=32, which need not be there; units=8 and B=32: u=4
    if unit is None and mini_batch is None:
        raise ConfigError(
            f"{place_of('loss_unit')}: missing; give the samples of a typical one of the {units} "
            f"{name_of('units')}, which the plan is made for"
        )
    if unit is None and mini_batch is not None:
        unit = mini_batch // units
    assert unit is not None
    if mini_batch not in (None, units * unit) or not unit:
        raise ConfigError(
            f"{place_of('mini_batch')}: {mini_batch} is not {setting_of('units', units)} times "
            f"{name_of('loss_unit')}; remove it, since units may have any number of samples"
        )
    if steps is not None and units % steps:
        raise ConfigError(f"{_STEPS}: {steps} does not divide {setting_of('units', units)}; remove it")
    return BatchSizes(units * unit, unit, steps)


def _size(plain: Mapping[str, Any], key: str, place: str) -> int | None:
    value = plain.get(key)
    if value is None or value == "auto":
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_COUNT:
        most = "" if not isinstance(value, int) or value < 1 else f", at most {MOST_COUNT}"
        raise ConfigError(
            f"{place}: {show(value)} is not valid; give a whole number of samples of at least 1{most}"
        )
    return value


def _implied_mini_batch(
    unit: int | None, steps: int | None, num_ranks: int, config: GraphPipelineConfig
) -> int:
    degree = 1 if num_ranks == 1 else config.data_parallel
    if unit is not None and isinstance(degree, int):
        return unit * (steps or 1) * degree
    raise ConfigError(
        f"{place_of('mini_batch')}: missing; give the samples of one optimizer step over the whole graph "
        "(stages may have different numbers of ranks, so it does not follow from the other sizes)"
    )


def _check_full_loss(mini_batch: int, unit: int | None, steps: int | None) -> None:
    path = f'{place_of("micro_batch_sizes", "loss")}: "full" computes one loss on all {mini_batch} samples'
    if unit is not None and unit != mini_batch:
        raise ConfigError(
            f"{path}, but {name_of('loss_unit')} makes losses of {unit} samples; "
            f"remove it or set it to {mini_batch}"
        )
    if steps is not None and steps != 1:
        raise ConfigError(f"{path}, but {_STEPS} makes {steps} losses a step; remove it")


def check_sizes(config: GraphPipelineConfig, mini_batch: int, unit: int) -> None:
    """Refuse loss units and micro-batches that leave a rest of the mini-batch.

    Raises:
        ConfigError: one line each, with sizes that divide it.
    """
    sizes = config.micro_batch_sizes
    named = sizes.items() if isinstance(sizes, dict) else [("", sizes)]
    wrong = {
        place_of("micro_batch_sizes", *([name] if name else [])): size
        for name, size in named
        if isinstance(size, int) and mini_batch % size
    }
    if mini_batch % unit:
        wrong = {place_of("loss_unit"): unit, **wrong}
    lines = [
        f"{place}: {size} does not divide {name_of('mini_batch')} {mini_batch}; "
        f"{_divisors_to_give(mini_batch, size)}"
        for place, size in wrong.items()
    ]
    if lines:
        raise ConfigError("\n".join(lines))


def _divisors_to_give(number: int, wanted: int) -> str:
    return "give " + " or ".join(map(str, nearest_divisors(number, wanted)))
