"""The catalogue of the zoo: reads ``models.json``, builds models and makes their batches.

A row of the table is ``[class of transformers, batch, configuration]``, and behind it an object of what is unusual:

    "gpt2": ["GPT2LMHeadModel", "text", {"like": "gpt2"}, {"note": "..."}]

In a configuration ``like`` names shared ones, which its other keys complete or replace. A batch is the name of a shared
one or an object of entries; an entry is a constant or ``[maker, arguments]``, where ``S`` stands for the samples and
``L`` for the length. Nothing is downloaded, weights are random and the same at every build, and nothing in a model is
drawn at random while it trains: dropout, layer drop and random masks are switched off (`calm`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpp_plugin.errors import ConfigError, nearest

Batch = dict[str, Any]
IMAGE, IMAGE_START, IMAGE_END = 63, 66, 67
"""Tokens that stand for an image, and around it; those of a text are 3 to 59."""
EXACT, ONE_LENGTH, REFUSED, LATE, RAW, WRONG, ENDED, BROKEN = (
    "exact", "exact at one length", "refused", "late", "raw error", "wrong", "ended", "no model",
)  # fmt: skip
VERDICTS = (EXACT, ONE_LENGTH, REFUSED, LATE, RAW, WRONG, ENDED, BROKEN)
"""What becomes of a model. `refused`: one line of the plugin's own says why it is not captured. `exact at one length`:
the same at the other length. `late`: a line as well, but in a step and not at the start. `raw error`: an error of
another kind. `ended`: its process crashed or took too long. `no model`: the plain model itself did not give a loss
twice alike; that is the zoo's own fault."""
_RANDOM = ("drop", "mask_time_prob", "mask_feature_prob", "router_jitter")
"""Parts of the names by which configurations ask for random numbers; 0 asks for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooModel:
    """One family: how its model is made, and its batches.

    Args:
        name: as transformers calls its folder, and behind it what tells several of one folder apart.
        kind: the class it is counted in.
        model: a class of transformers.
        config: what the model's configuration is given; nested dicts are those of towers.
        batch: makes the batch of some samples at a length.
        lengths: at which it is captured, and another one.
        means: what a length counts.
        note: what was changed so that the loss can be computed twice, and other things a reader may miss.
        draws: whether the loss is of numbers drawn by torch's generator; others are the same whatever its seed.
        extra: what to set on the configuration after it is made.
    """

    name: str
    kind: str
    model: str
    config: Mapping[str, Any]
    batch: Callable[[int, int], Batch]
    lengths: Sequence[int] = (8, 12)
    means: str = "text tokens"
    note: str = ""
    draws: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)


# ---- the table ---------------------------------------------------------------------------------------


def _read_table() -> list[ZooModel]:
    table = json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))
    found = []
    for kind, rows in table["models"].items():
        for name, (model, batch, config, *more) in rows.items():
            shared = table["batches"][batch] if isinstance(batch, str) else {"entries": batch}
            values = {key: value for key, value in shared.items() if key != "entries"}
            found.append(
                ZooModel(
                    name=name,
                    kind=kind,
                    model=model,
                    config=_completed(config, table["like"]),
                    batch=functools.partial(make_batch, shared["entries"]),
                    **{**values, **(more[0] if more else {})},
                )
            )
    return found


def _completed(value: Any, shared: Mapping[str, Any]) -> Any:
    """Return a configuration with what it is like, and with the whole numbers that JSON has no keys for."""
    if not isinstance(value, dict):
        return value
    found: dict[Any, Any] = {}
    for name in value.get("like", "").split():
        found.update(_completed(shared[name], shared))
    own = {key: _completed(each, shared) for key, each in value.items() if key != "like"}
    return {**found, **{int(key) if key.isdecimal() else key: each for key, each in own.items()}}


# ---- models ------------------------------------------------------------------------------------------


def build_model(entry: ZooModel, *, device: str = "cpu") -> nn.Module:
    """Return a family's model in training mode; on ``meta`` without weights.

    On the CPU no weight is left at a constant: a gate that starts at zero would hide what is behind it.
    """
    on_device: Any = torch.device(device) if device != "cpu" else contextlib.nullcontext()
    with torch.random.fork_rng(devices=[]), on_device:
        torch.manual_seed(0)
        made = transformers_class(entry.model)
        config = made.config_class(**entry.config)
        for name, value in entry.extra.items():
            setattr(config, name, value)
        calm(config)
        model: nn.Module = made(config).train()
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0  # some are written into the code
        if device == "cpu":
            _stir(model)
    return model


def transformers_class(name: str) -> Any:
    """Return what transformers calls ``name``."""
    return getattr(importlib.import_module("transformers"), name)


def calm(config: Any) -> None:
    """Switch off what a configuration, or one inside it, has drawn at random."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            calm(value)
        elif isinstance(value, dict):
            for key in value:
                if _is_asked_for(key, value[key]):
                    value[key] = type(value[key])(0)
        elif _is_asked_for(name, value):
            setattr(config, name, type(value)(0))
        elif name == "apply_spec_augment":
            config.apply_spec_augment = False


def _is_asked_for(name: Any, value: Any) -> bool:
    """Return whether a value of a configuration asks for random numbers."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and any(part in str(name) for part in _RANDOM)


def _stir(model: nn.Module) -> None:
    """Give weights that all start at one value, or at none, small random differences."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point() or not parameter.numel():
                continue
            if not bool(torch.isfinite(parameter).all()) or float(parameter.abs().max()) > 1e4:
                parameter.normal_(0.0, 0.02)
            elif bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(torch.randn_like(parameter), alpha=0.02)


# ---- batches -----------------------------------------------------------------------------------------


def make_batch(entries: Mapping[str, Any], samples: int, length: int) -> Batch:
    """Return the batch that entries describe; ``text`` brings its three entries, ``without`` takes some away."""
    batch: Batch = _text(samples, **{"length": length, **entries["text"]}) if "text" in entries else {}
    for key, entry in entries.items():
        if key in ("text", "without"):
            continue
        if not isinstance(entry, list):
            batch[key] = entry
            continue
        maker, *arguments = entry
        named = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
        sized = [_size(each, samples, length) for each in arguments]
        batch[key] = MAKERS[maker](batch, samples, *sized, **named)
    return {key: value for key, value in batch.items() if key not in entries.get("without", ())}


def _size(value: Any, samples: int, length: int) -> Any:
    """Return a number for S, L and their multiples: with three samples 16S is 48."""
    if value == "L/2":
        return max(length // 2, 4)
    if isinstance(value, str) and value[-1] in "SL" and (value[:-1] or "1").isdecimal():
        return int(value[:-1] or 1) * (samples if value[-1] == "S" else length)
    return value


def _text(
    samples: int,
    length: int,
    *,
    asked: int = 1,
    count: int = 0,
    token: int = IMAGE,
    before: Sequence[int] = (),
    after: Sequence[int] = (),
) -> Batch:
    """Return texts to go on with: every second sample is padded by a token.

    Args:
        asked: labels are those of every so many tokens.
        count: of tokens behind the first word that stand for something else, with ``before`` and ``after`` around them.
    """
    ids, mask = integers(samples, length), torch.ones(samples, length, dtype=torch.int64)
    mask[1::2, -1] = 0
    ids = torch.where(mask > 0, ids, 0)
    labels = torch.where((mask > 0) & (torch.arange(length) % asked == 0), ids, -100)
    # w [before] T T T T [after] w w w: T ask for no word, and are no padding
    inserted = torch.tensor([*before, *([token] * count), *after], dtype=torch.int64).repeat(samples, 1)
    return {
        key: torch.cat([words[:, :1], between, words[:, 1:]], 1)
        for key, words, between in (
            ("input_ids", ids, inserted),
            ("attention_mask", mask, torch.ones_like(inserted)),
            ("labels", labels, torch.full_like(inserted, -100)),
        )
    }


def integers(*shape: int, first: int = 3, end: int = 60, seed: int = 1) -> Tensor:
    """Return whole numbers from ``first`` up to but not ``end``."""
    return torch.randint(first, end, shape, generator=torch.Generator().manual_seed(seed))


def numbers(*shape: int, seed: int = 2) -> Tensor:
    """Return normally distributed numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uniform(*shape: int, seed: int = 3, first: float = 0.0, is_rounded: bool = False) -> Tensor:
    """Return numbers evenly distributed between ``first`` and one more."""
    drawn = first + torch.rand(*shape, generator=torch.Generator().manual_seed(seed))
    return drawn.round() if is_rounded else drawn


def _right_mask(samples: int, length: int) -> Tensor:
    mask = torch.ones(samples, length, dtype=torch.int64)
    mask[1::2, -1] = 0
    return mask


def _placed_patches(samples: int, count: int, width: int) -> Tensor:
    """Return patches with their row and column, counted from 1, in front."""
    places = torch.tensor([[1 + i // 2, 1 + i % 2] for i in range(count)]).float().repeat(samples, 1, 1)
    return torch.cat([places, numbers(samples, count, width)], -1)


def _corners(samples: int, length: int, scale: float | None = None) -> Tensor:
    """Return a box on a page of 60 for each word; with a scale as shares of that."""
    corners = integers(samples, length, 4, first=0, end=60, seed=6).sort(-1).values
    return corners if scale is None else corners / scale


def _boxes(samples: int, side: int | None = None, num_classes: int = 3) -> list[dict[str, Tensor]]:
    """Return two boxes with classes for each image; of a given side with a mask each."""
    found = []
    for i in range(samples):
        box = {"class_labels": _two_classes(i) % num_classes, "boxes": 0.25 + 0.5 * uniform(2, 4, seed=i)}
        masks = {} if side is None else {"masks": uniform(2, side, side, seed=i, is_rounded=True)}
        found.append({**box, **masks})
    return found


def _two_classes(number: int) -> Tensor:
    return torch.tensor([number % 3, (number + 1) % 3])


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


MAKERS: dict[str, Callable[..., Any]] = {
    "integers": lambda batch, samples, *shape, **named: integers(*shape, **named),
    "numbers": lambda batch, samples, *shape, **named: numbers(*shape, **named),
    "uniform": lambda batch, samples, *shape, **named: uniform(*shape, **named),
    "ones": lambda batch, samples, *shape, dtype="int64": torch.ones(*shape, dtype=_dtype(dtype)),
    "full": lambda batch, samples, value, *shape: torch.full(shape, value),
    "classes": lambda batch, samples, num, first=0: first + torch.arange(samples) % num,
    "one_hot": lambda batch, samples, num: nn.functional.one_hot(torch.arange(samples) % num, num).float(),
    "each": lambda batch, samples, value, dtype="int64": torch.tensor([value] * samples, dtype=_dtype(dtype)),
    "repeat": lambda batch, samples, value: torch.tensor(value * samples),
    "is_token": lambda batch, samples, token: (batch["input_ids"] == token).long(),
    "same_as": lambda batch, samples, key: batch[key].clone(),
    "unasked": lambda batch, samples, key, n: torch.cat([batch[key], torch.full((samples, n), -100)], 1),
    "right_mask": lambda batch, samples, length: _right_mask(samples, length),
    "corners": lambda batch, samples, *size, **named: _corners(samples, *size, **named),
    "placed_patches": lambda batch, samples, *size: _placed_patches(samples, *size),
    "boxes": lambda batch, samples, *side, **named: _boxes(samples, *side, **named),
    "box_classes": lambda batch, samples: [_two_classes(i) for i in range(samples)],
    "masks": lambda batch, samples, side: [box["masks"] for box in _boxes(samples, side)],
}
"""What makes an entry, from those before it, the samples, and its arguments."""


CATALOGUE: dict[str, ZooModel] = {entry.name: entry for entry in _read_table()}
KINDS = tuple(dict.fromkeys(entry.kind for entry in CATALOGUE.values()))


def find(name: str) -> ZooModel:
    """Return a family by its name.

    Raises:
        ConfigError: there is none.
    """
    if name not in CATALOGUE:
        raise ConfigError(
            f"no model {name!r} in the zoo{nearest(name, CATALOGUE)} (gpp bench zoo --list names all {len(CATALOGUE)})"
        )
    return CATALOGUE[name]


def build(
    name: str, *, num_samples: int = 2, length: int | None = None, device: str = "cpu"
) -> tuple[nn.Module, Batch]:
    """Return a family's model, in training mode, and a batch for it; the same at every call."""
    entry = find(name)
    return build_model(entry, device=device), entry.batch(num_samples, length or entry.lengths[0])
