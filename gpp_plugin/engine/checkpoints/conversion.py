"""A checkpoint as one process has it, as DeepSpeed's universal checkpoint, and back; in one process, without a job.

Checkpoints of DeepSpeed's `PipelineModule` are read, too. Their names are numbers of layers, which `propose_names` and
`WholeState.renamed` turn into a model's.

    gpp          <dir>/<tag>/            this package's, of any plan
    torch        one file                {"module", "optimizer", "lr_scheduler", "step", "samples"}
    universal    a directory             zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt, module.pt
    pipeline     <dir>/<tag>/            layer_00-model_states.pt ..., mp_rank_00_model_states.pt ...; read alone

All of them hold masters where there are some, else the weights. Parameters of the torch file are numbered in the
model's order, group by group, which is that of ``torch.optim.AdamW(model.parameters())``; its groups name them too
(``param_names``). Files of torch are read with ``weights_only=True``: nothing in them is run.

Source: this project
Tests: tests/checkpoints/test_conversion.py
"""

from __future__ import annotations

import collections
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpp_plugin import __version__
from gpp_plugin.engine.checkpoints import checkpoint_directory as places
from gpp_plugin.engine.checkpoints.checkpoint_files import (
    BUFFER,
    MANIFEST,
    MASTER,
    MOMENTS,
    MOST_DEPTH,
    STATE,
    WEIGHT,
    CheckpointManifest,
    SavedGroup,
    parsing,
    plain_of,
    read_manifest,
    read_text,
    to_json,
)
from gpp_plugin.engine.checkpoints.optimizer_pieces import check_like
from gpp_plugin.engine.checkpoints.save_checkpoint import (
    FileContents,
    PreparedSave,
    RankFiles,
    SaveOptions,
    finish_save,
    write_part,
)
from gpp_plugin.engine.checkpoints.saved_tensors import CheckpointTensors, TensorPlace
from gpp_plugin.errors import CheckpointError
from gpp_plugin.ir.serialize import parse_json

_PARAMETER_NAME = re.compile(r"^[A-Za-z0-9_.]+$")


@dataclass(slots=True, kw_only=True)
class WholeState:
    """A model and its optimizer as one process holds them.

    Args:
        weights, buffers: by name, in the model's order.
        aliases: other names of a parameter.
        optimizer: class of the optimizer; empty where there is none.
        state: by trained parameter, what the optimizer keeps of it.
        groups: names and options.
        step: optimizer steps so far; ``samples`` are those they were of, 0 where that is not known.
        schedule: state of the learning-rate scheduler; None where there is none.
    """

    weights: dict[str, Tensor]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    optimizer: str = ""
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[tuple[list[str], dict[str, Any]]] = field(default_factory=list)
    step: int = 0
    samples: int = 0
    schedule: dict[str, Any] | None = None

    def renamed(self, names: Mapping[str, str]) -> WholeState:
        """Return it with other names.

        Args:
            names: of every weight and buffer: the new one.

        Raises:
            CheckpointError: one is missing or not there, or two get one name.
        """
        own = [*self.weights, *self.buffers]
        new = [names[name] for name in own if name in names]
        twice = [name for name in new if new.count(name) > 1]
        missing, unknown = sorted(set(own) - names.keys()), sorted(names.keys() - set(own))
        for wrong, what in (
            (missing, "lack"), (unknown, "have, and the checkpoint has not,"), (twice, "give twice"),
        ):  # fmt: skip
            if wrong:
                more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
                raise CheckpointError(f"the names {what} {wrong[0]!r}{more}; the checkpoint has {_few(own)}")
        return WholeState(
            weights={names[name]: value for name, value in self.weights.items()},
            buffers={names[name]: value for name, value in self.buffers.items()},
            optimizer=self.optimizer,
            state={names[name]: value for name, value in self.state.items()},
            groups=[([names[name] for name in group], options) for group, options in self.groups],
            step=self.step,
            samples=self.samples,
            schedule=self.schedule,
        )

    def checked(self, source: Path) -> WholeState:
        """Return it, as read of ``source``, where all of it is of its kind.

        Raises:
            CheckpointError: names the file and the value.
        """
        file = str(source)
        for name, tensor in (*self.weights.items(), *self.buffers.items()):
            if not isinstance(tensor, Tensor):
                raise CheckpointError(f"{file}: {name!r} is {str(tensor)[:60]!r}, not a tensor")
        for name, state_of in self.state.items():
            check_like(dict.fromkeys(MOMENTS, self.weights[name]), state_of, f"state of {name}", file=file)
        for names, options in self.groups:
            check_like({"lr": 0.0, "betas": (0.0, 0.0)}, options, f"options of {names[:1]}", file=file)
            if unknown := [name for name in names if name not in self.weights]:
                raise CheckpointError(
                    f"{file}: a parameter group has {str(unknown[0])[:60]!r}, which is no weight"
                )
        for name, number in (("step", self.step), ("samples", self.samples)):
            check_like(0, number, name, file=file, name=name)
        if not isinstance(self.schedule, dict | None):
            raise CheckpointError(
                f"{file}: the state of its scheduler is {str(self.schedule)[:60]!r}, no dict"
            )
        return self


# ---- this package's --------------------------------------------------------------------------------------


def read_checkpoint(path: Path) -> WholeState:
    """Return a checkpoint of any plan; ``path`` is its directory, or one whose ``latest`` names it.

    Raises:
        CheckpointError: it is not there, or broken.
    """
    if not (path / MANIFEST).exists() and (path / places.LATEST).exists():
        path = places.directory_of(path, places.read_latest(path))
    with parsing(str(path)):
        return _read_checkpoint(path).checked(path)


def _read_checkpoint(path: Path) -> WholeState:
    manifest = read_manifest(path)
    saved = CheckpointTensors(path, manifest)
    saved.check_everything()
    order = {name: at for at, name in enumerate(manifest.names)}

    def sorted_names(names: set[str]) -> list[str]:
        return sorted(names, key=lambda name: (order.get(name, len(order)), name))

    def whole(what: str, name: str) -> Tensor:
        shape = saved.shape(what, name)
        return saved.whole(what, name, TensorPlace(stage=0, shape=shape))

    def trained(name: str) -> dict[str, Any]:
        tensors = {what: whole(what, name) for what in saved.tensor_kinds(name)}
        return {**tensors, **saved.shared_state(manifest.numbers[name], of=MANIFEST)}

    text = read_text(path, STATE, expected=manifest.texts[STATE])
    engine = saved.shared_state(parse_json(text, what=STATE, max_depth=MOST_DEPTH)["engine"])
    return WholeState(
        weights={
            name: whole(MASTER if saved.has(MASTER, name) else WEIGHT, name)
            for name in sorted_names(saved.names(WEIGHT))
        },
        buffers={name: whole(BUFFER, name) for name in sorted_names(saved.names(BUFFER))},
        aliases={name: aliases for name, aliases in manifest.names.items() if aliases},
        optimizer=manifest.optimizer,
        state={name: trained(name) for name in sorted_names(set(manifest.numbers))},
        groups=[
            (sorted_names(set(group.names)), saved.shared_state(group.options, of=MANIFEST))
            for group in manifest.groups
            if group.names
        ],
        step=manifest.step,
        samples=engine["counters"]["global_samples"],
        schedule=engine.get("learning_rates", {}).get("scheduler"),
    )


def write_checkpoint(state: WholeState, directory: Path, tag: str) -> Path:
    """Write a checkpoint of one process, which loads on any plan; `latest` names it.

    Raises:
        CheckpointError: something in it cannot be saved.
    """
    # One stage, one rank: the format says where each tensor lies and which slice it is, so that a plan of any shape
    # reads it as it reads one of its own.
    places.check_tag(tag)
    model, optimizer = FileContents(), FileContents()
    for what, tensors in ((WEIGHT, state.weights), (BUFFER, state.buffers)):
        for name, tensor in tensors.items():
            model.add(name, tensor, what=what, name=name, stage=0)
    numbers: dict[str, dict[str, Any]] = {}
    for name, state_of in state.state.items():
        numbers[name] = {}
        for what, value in state_of.items():
            shape = tuple(state.weights[name].shape)
            if not isinstance(value, Tensor) or what == "step" or (value.dim() == 0 and shape):
                numbers[name][what] = to_json(value, path=f"{name}.{what}", tensors={})
                continue
            start = 0 if tuple(value.shape) == shape else None
            optimizer.add(
                f"{what}/{name}",
                value if start is None else value.reshape(-1),
                what=what,
                name=name,
                stage=0,
                start=start,
                **({} if start is None else {"shape": shape}),
            )
    files = {"model-00-whole.safetensors": model}
    if state.optimizer:
        files["optimizer-00-whole-00000.safetensors"] = optimizer
    counters = {"global_steps": state.step, "skipped_steps": 0, "global_samples": state.samples}
    engine: dict[str, Any] = {"counters": counters}
    if state.schedule is not None:
        rates = {"groups": [options for _, options in state.groups], "scheduler": state.schedule}
        engine["learning_rates"] = to_json(rates, path="learning_rates", tensors=None)
    groups = [
        SavedGroup(
            number=number,
            names=tuple(names),
            options=to_json(options, path=f"param_groups.{number}", tensors={}),
        )
        for number, (names, options) in enumerate(state.groups)
    ]
    prepared = PreparedSave(
        directory=directory,
        tag=tag,
        temporary=places.begin(directory, tag),
        files=RankFiles(files=files, optimizer=state.optimizer, numbers=numbers, groups=groups),
        texts={STATE: plain_of({"engine": engine, "client_state": {}, "data": None})},
        head=_head(state),
        options=SaveOptions(),
    )
    try:
        return finish_save(prepared, [write_part(prepared)])
    except BaseException:
        places.abandon(prepared.temporary)
        raise


def _head(state: WholeState) -> CheckpointManifest:
    dtypes = [tensor.dtype for tensor in state.weights.values() if tensor.is_floating_point()]
    return CheckpointManifest(
        stages=(),
        num_ranks=1,
        dtype=str(max(set(dtypes), key=dtypes.count, default=torch.float32)).removeprefix("torch."),
        zero_stage=0,
        step=state.step,
        saved_ns=time.time_ns(),
        files={},
        texts={},
        versions={"gpp_plugin": __version__, "torch": torch.__version__},
        names={name: state.aliases.get(name, ()) for name in (*state.weights, *state.buffers)},
    )


# ---- names -----------------------------------------------------------------------------------------------


def propose_names(own: WholeState, model: WholeState) -> dict[str, str]:
    """Return a model's name for each name of a checkpoint, by the shapes of the tensors and their order.

    A tensor that is alone of its kind (last part of the name, and shape) is certain. The others are taken in order
    where both have the same sequence of kinds.

        0.weight [16, 8]   1.weight [8, 8]   1.bias [8]    2.weight [8, 8]   2.bias [8]
        embed.weight       first.weight      first.bias    second.weight     second.bias

    Raises:
        CheckpointError: they have unlike tensors, or orders; which name means which is not known then.
    """
    sides = [{**state.weights, **state.buffers} for state in (own, model)]
    kinds = [
        {name: (name.rpartition(".")[2], *tensor.shape) for name, tensor in side.items()} for side in sides
    ]
    counts = [collections.Counter(side.values()) for side in kinds]
    for kind in counts[0] | counts[1]:
        if counts[0][kind] != counts[1][kind]:
            here, there = ([name for name, own in side.items() if own == kind] for side in kinds)
            raise CheckpointError(
                f"of {kind[0]!r} of shape {list(kind[1:])} the checkpoint has {len(here)} ({_few(here)}) and the model "
                f"{len(there)} ({_few(there)}); write the map by hand, or give the model that was trained"
            )
    alone = {kind for kind, count in counts[0].items() if count == 1}
    ordered = [[(name, kind) for name, kind in side.items() if kind not in alone] for side in kinds]
    for (name, kind), (other, found) in zip(*ordered, strict=True):
        if kind != found:
            raise CheckpointError(
                f"the order is ambiguous: where the checkpoint has {name!r} of shape {list(kind[1:])} the model has "
                f"{other!r} of shape {list(found[1:])}; write the map by hand"
            )
    by_kind = {kind: name for name, kind in kinds[1].items() if kind in alone}
    in_order = {name: other for (name, _), (other, _) in zip(*ordered, strict=True)}
    return {name: by_kind[kind] if kind in alone else in_order[name] for name, kind in kinds[0].items()}


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


# ---- DeepSpeed's PipelineModule ---------------------------------------------------------------------------

_LAYER_FILE = re.compile(r"^layer_(\d+)(?:-\w+_\d+)*-model_states\.pt$")


def is_pipeline(directory: Path) -> bool:
    """Return whether a directory holds layers of DeepSpeed's `PipelineModule`."""
    return any(_LAYER_FILE.match(path.name) for path in directory.glob("layer_*.pt"))


def read_pipeline(directory: Path) -> WholeState:
    """Return a checkpoint that DeepSpeed's pipeline engine wrote without ZeRO in fp32, ``0.weight`` its first weight.

    Raises:
        CheckpointError: it is none, or its optimizer's state is in pieces.
    """
    with parsing(str(directory)):
        return _read_pipeline(directory).checked(directory)


def _read_pipeline(directory: Path) -> WholeState:
    paths: dict[int, Path] = {}
    for path in sorted(directory.glob("layer_*.pt")):
        match = _LAYER_FILE.match(path.name)
        if match is None or paths.setdefault(int(match[1]), path) != path:
            raise CheckpointError(f"{path} is a part of a layer (tensor parallelism), which cannot be joined")
    layers: dict[int, dict[str, Tensor]] = {number: _load(path) for number, path in paths.items()}
    ranks = [_load(path) for path in sorted(directory.glob("mp_rank_*_model_states.pt"))]
    states = [rank["optimizer"] for rank in ranks if rank.get("optimizer")]
    is_flat = any(not isinstance(state.get("state"), dict) for state in states)
    if is_flat or any(directory.glob("*zero_pp_rank_*")):
        raise CheckpointError(
            f"{directory}: its optimizer's state is in flat pieces (ZeRO, bf16 or fp16); convert it with DeepSpeed's "
            "own ds_to_universal.py (--inject_missing_state), and give what that writes"
        )
    buffers = {name for rank in ranks for name in rank.get("buffer_names") or ()}
    state = WholeState(
        weights={},
        step=max((int(rank["global_steps"]) for rank in ranks), default=0),
        samples=max((int(rank.get("global_samples") or 0) for rank in ranks), default=0),
        schedule=ranks[0].get("lr_scheduler") if ranks else None,
    )
    trained: dict[int, list[str]] = {}
    for number, layer in sorted(layers.items()):
        first = next((other for other in trained if _is_copy(layer, layers[other])), None)
        if first is not None:
            for key in layer:
                state.aliases[f"{first}.{key}"] = (
                    *state.aliases.get(f"{first}.{key}", ()),
                    f"{number}.{key}",
                )
            continue
        trained[number] = [f"{number}.{key}" for key in layer if f"{number}.{key}" not in buffers]
        for key, tensor in layer.items():
            (state.buffers if f"{number}.{key}" in buffers else state.weights)[f"{number}.{key}"] = tensor
    if states:
        kind = str(ranks[0]["ds_config"]["optimizer"]["type"])
        state.optimizer = "AdamW" if kind.lower() in ("adam", "adamw") else kind
        _take_states(state, [names for _, names in sorted(trained.items()) if names], states, directory)
    return state


def _is_copy(layer: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Return whether two layers are one, tied: all values are the same, and not those that all layers begin with."""
    return (
        layer.keys() == other.keys()
        and any(tensor.dim() > 1 and bool((tensor != tensor.flatten()[0]).any()) for tensor in layer.values())
        and all(torch.equal(tensor, other[key]) for key, tensor in layer.items())
    )


def _take_states(
    state: WholeState, layers: Sequence[Sequence[str]], saved: Sequence[Mapping[str, Any]], directory: Path
) -> None:
    """Give each parameter what the optimizer of its stage has of it.

    Raises:
        CheckpointError: it is not known which state is whose.
    """
    stages = [
        [dict(stage["state"].get(n, {})) for group in stage["param_groups"] for n in group["params"]]
        for stage in saved
    ]
    ways = _ways_to_number(state, layers, stages)
    if len(ways) != 1 or any(len(stage["param_groups"]) != 1 for stage in saved):
        counts = [len(stage["param_groups"]) for stage in saved], [len(states) for states in stages]
        raise CheckpointError(
            f"{directory}: its stages' optimizers have {counts[0]} groups with states of {counts[1]} parameters: which "
            f"of {_few([name for layer in layers for name in layer])} they are of is not certain (frozen parameters, "
            "several groups, a file mp_rank_*_model_states.pt that is missing); train a step with ZeRO 1, and use "
            "DeepSpeed's ds_to_universal.py"
        )
    for stage, states, own in zip(saved, stages, ways[0], strict=True):
        if own:
            state.state |= dict(zip(own, states[-len(own) :], strict=True))
        group = stage["param_groups"][0]
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        if state.groups and state.groups[0][1] == options:
            state.groups[0][0].extend(own)
        else:
            state.groups.append((list(own), options))


def _ways_to_number(
    state: WholeState,
    layers: Sequence[Sequence[str]],
    stages: Sequence[Sequence[Mapping[str, Any]]],
    first: int = 0,
) -> list[list[list[str]]]:
    """Return all ways in which stages may hold consecutive layers: by stage, the parameters of its last states.

    A stage numbers tied layers first. One that shares layers of earlier stages has their states in front, again.
    """
    #   layers [0.weight] [1.weight 1.bias] [2.weight]    stage 0 has 3 states, stage 1 has 2: of 0.weight and 2.weight
    if not stages:
        return [[]] if first == len(layers) else []
    ways: list[list[list[str]]] = []
    earlier = [name for layer in layers[:first] for name in layer]
    for end in range(first, len(layers) + 1):
        by_layer = sorted(layers[first:end], key=lambda layer: layer[0] not in state.aliases)
        own = [name for layer in by_layer for name in layer]
        again = len(stages[0]) - len(own)
        shares = again > 0 and any(name in state.aliases for name in own)  # in which order is not known
        if again < 0 or shares:
            continue
        whose = [earlier] * again + [[name] for name in own]
        if all(_fits(state, one, names) for one, names in zip(stages[0], whose, strict=True)):
            ways += [[own, *rest] for rest in _ways_to_number(state, layers, stages[1:], end)]
    return ways


def _fits(state: WholeState, own: Mapping[str, Any], names: Sequence[str]) -> bool:
    """Return whether an optimizer's state may be that of one of these parameters, by its shape."""
    shapes = {value.shape for value in own.values() if isinstance(value, Tensor) and value.dim()}
    return any(shapes <= {state.weights[name].shape} for name in names)


# ---- one process -----------------------------------------------------------------------------------------


def write_torch(state: WholeState, path: Path) -> None:
    """Write one file, which ``torch.load(path, weights_only=True)`` reads; steps in tensors, as torch counts them."""
    module = {**state.weights, **state.buffers}
    for name, aliases in state.aliases.items():
        if name in module:
            module |= dict.fromkeys(aliases, module[name])
    numbers = {name: at for at, name in enumerate(name for names, _ in state.groups for name in names)}
    optimizer = {
        "state": {
            numbers[name]: {
                what: torch.tensor(float(value)) if what == "step" else value
                for what, value in state_of.items()
            }
            for name, state_of in state.state.items()
            if state_of
        },
        "param_groups": [
            {**options, "params": [numbers[name] for name in names], "param_names": list(names)}
            for names, options in state.groups
        ],
    }
    data = {"module": module, "optimizer": optimizer, "optimizer_class": state.optimizer, "step": state.step}
    data |= {"samples": state.samples, "lr_scheduler": state.schedule}
    _save(data, path)


def read_torch(path: Path) -> WholeState:
    """Return what a single process has saved: ``{"module": ..., "optimizer": ...}``, the second where there is one.

    The optimizer's groups must name their parameters: make it of ``model.named_parameters()``, or give the file
    ``"parameters"``, the list of their names in the optimizer's order.

    Raises:
        CheckpointError: it is no such file, or would run code.
    """
    with parsing(str(path)):
        return _read_torch(path).checked(path)


def _read_torch(path: Path) -> WholeState:
    data = _load(path)
    if not isinstance(data, dict) or not isinstance(data.get("module"), dict):
        raise CheckpointError(
            f"{path} holds no {{'module': state dict, 'optimizer': state dict}}; write torch.save of such a dict"
        )
    module = {str(name): value for name, value in data["module"].items() if isinstance(value, Tensor)}
    optimizer = data.get("optimizer") or {}
    groups: list[tuple[list[str], dict[str, Any]]] = []
    by_number: dict[int, str] = {}
    listed = list(data.get("parameters") or ())
    for group in optimizer.get("param_groups", ()):
        names = list(group.get("param_names") or ()) or [
            listed[n] for n in group["params"] if n < len(listed)
        ]
        if len(names) != len(group["params"]) or not set(names) <= set(module):
            raise CheckpointError(
                f"{path}: the optimizer's groups do not say which parameters they have; make the optimizer of "
                "model.named_parameters(), or add 'parameters': [names in its order] to the file"
            )
        by_number |= dict(zip(group["params"], names, strict=True))
        groups.append(
            (names, {key: value for key, value in group.items() if key not in ("params", "param_names")})
        )
    state_of = optimizer.get("state", {})
    state: dict[str, dict[str, Any]] = {name: dict(state_of.get(n, {})) for n, name in by_number.items()}
    weights, aliases = _without_aliases(module, set(state))
    return WholeState(
        weights=weights,
        aliases=aliases,
        optimizer=str(data.get("optimizer_class") or "AdamW") if groups else "",
        state=state,
        groups=groups,
        step=int(data.get("step") or max((float(s.get("step", 0)) for s in state.values()), default=0)),
        samples=int(data.get("samples") or 0),
        schedule=data.get("lr_scheduler"),
    )


def _without_aliases(
    module: Mapping[str, Tensor], trained: set[str]
) -> tuple[dict[str, Tensor], dict[str, tuple[str, ...]]]:
    """Return a state dict's tensors each under one name, the optimizer's or the first, and their other names."""
    # A file keeps it that two names are of one storage: a tied head.
    first: dict[tuple[int, torch.Size, tuple[int, ...]], str] = {}
    names: dict[str, list[str]] = {}
    for name in sorted(module, key=lambda name: name not in trained):
        tensor = module[name]
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        owner = first.setdefault(key, name) if tensor.numel() else name
        names.setdefault(owner, [])
        if owner != name:
            names[owner].append(name)
    ordered = [name for name in module if name in names]
    return {name: module[name] for name in ordered}, {name: tuple(names[name]) for name in ordered}


# ---- DeepSpeed's universal checkpoint --------------------------------------------------------------------


def write_universal(state: WholeState, directory: Path) -> None:
    """Write a directory as DeepSpeed's ``ds_to_universal.py`` does, of the parameters that are trained.

    What is not trained, and buffers, are in ``module.pt``.

    Raises:
        CheckpointError: the optimizer keeps what a universal checkpoint has no place for.
    """
    other = sorted({what for state_of in state.state.values() for what in state_of} - {*MOMENTS, "step"})
    if other:
        raise CheckpointError(
            f"a universal checkpoint holds exp_avg, exp_avg_sq and step, not {other[0]!r} of {state.optimizer}"
        )
    for name, state_of in state.state.items():
        folder = directory / "zero" / _checked(name)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            "fp32": state.weights[name].float(),
            **{what: state_of[what] for what in MOMENTS if what in state_of},
        }
        for what, tensor in tensors.items():
            _save({"param": tensor.clone(), "cat_dim": 0}, folder / f"{what}.pt")
        if "step" in state_of:
            _save(state_of["step"], folder / "step.pt")
    rest = {name: tensor for name, tensor in state.weights.items() if name not in state.state}
    options = [{**data, "params": list(names)} for names, data in state.groups]
    _save(
        {
            "module": {**rest, **state.buffers},
            "param_groups": options,
            "optimizer_class": state.optimizer,
            "step": state.step,
            "samples": state.samples,
            "lr_scheduler": state.schedule,
            "names": {name: list(state.aliases.get(name, ())) for name in (*state.weights, *state.buffers)},
            "buffers": list(state.buffers),
        },
        directory / "module.pt",
    )


def read_universal(directory: Path) -> WholeState:
    """Return a universal checkpoint; of one that DeepSpeed wrote, the parameters that ZeRO trained.

    Raises:
        CheckpointError: it is none.
    """
    with parsing(str(directory)):
        return _read_universal(directory).checked(directory)


def _read_universal(directory: Path) -> WholeState:
    root = directory / "zero"
    if not root.is_dir():
        raise CheckpointError(f"{directory} has no directory zero: it is no universal checkpoint")
    data = _load(directory / "module.pt") if (directory / "module.pt").exists() else {}
    buffers = set(data.get("buffers", ()))
    weights: dict[str, Tensor] = {}
    state: dict[str, dict[str, Any]] = {}
    ranks = [_load(path) for path in sorted(directory.glob("mp_rank_*_model_states.pt"))]
    shapes = [group for rank in ranks for group in rank.get("param_shapes") or ()]
    order = {name: at for at, name in enumerate(name for group in shapes for name in group)}
    for folder in sorted(root.iterdir(), key=lambda path: (order.get(path.name, len(order)), path.name)):
        if not folder.is_dir():  # what is no parameter's
            continue
        name = _checked(folder.name)
        places.check_inside(directory, folder)
        found = {path.stem: _load(path) for path in sorted(folder.glob("*.pt"))}
        if not isinstance(found.get("fp32"), dict):
            raise CheckpointError(f"{folder} has no fp32.pt with a 'param'")
        weights[name] = found.pop("fp32")["param"]
        state[name] = {
            what: value["param"] if isinstance(value, dict) else value for what, value in found.items()
        }
    weights |= {name: value for name, value in data.get("module", {}).items() if name not in buffers}
    names = data.get("names") or dict.fromkeys(weights, ())
    groups = [
        (list(group["params"]), {key: value for key, value in group.items() if key != "params"})
        for group in data.get("param_groups") or [{"params": list(state)}]
    ]
    steps = [float(state_of.get("step", 0)) for state_of in state.values()]
    return WholeState(
        weights={name: weights[name] for name in names if name in weights},
        buffers={name: data["module"][name] for name in names if name in buffers},
        aliases={name: tuple(aliases) for name, aliases in names.items() if aliases},
        optimizer=str(data.get("optimizer_class") or "AdamW"),
        state=state,
        groups=groups,
        step=int(
            data.get("step") or max([*steps, *(int(rank["global_steps"]) for rank in ranks)], default=0)
        ),
        samples=int(
            data.get("samples") or max((int(rank.get("global_samples") or 0) for rank in ranks), default=0)
        ),
        schedule=next(
            (told.get("lr_scheduler") for told in (data, *ranks) if told.get("lr_scheduler")), None
        ),
    )


def _checked(name: str) -> str:
    """Return a parameter's name, which becomes a directory's."""
    if not _PARAMETER_NAME.match(name) or name.startswith("."):
        raise CheckpointError(f"parameter {name[:100]!r} cannot be the name of a directory")
    return name


# ---- torch's files ---------------------------------------------------------------------------------------


def _save(value: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as stream:
            torch.save(value, stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler fails in any way on what is none of its files
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} cannot be read as tensors and plain values: {first}") from error
