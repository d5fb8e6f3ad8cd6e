"""An optimizer's state by parameter name: in pieces of parameters when it is saved, from any pieces when it is loaded.

An optimizer steps *masters*: parameters themselves, fp32 copies, or parts of a flat buffer (`Fragment` says which part
of which parameter). What it keeps of a master is of the master's shape (momenta), a number (steps), or of a shape of
its own (factors of a whole parameter). Example, ZeRO on two ranks, parameters a (6 elements) and b (4):

    rank 0   master  a0 a1 a2 a3 a4        saved: exp_avg of a, elements 0 to 5
    rank 1   master  a5 b0 b1 b2 b3        saved: exp_avg of a, element 5; exp_avg of b, elements 0 to 4

Another plan reads its own pieces of a and b from these, in whatever files they are.

Source: this project
Tests: tests/checkpoints/test_optimizer_pieces.py, tests/integrations/test_resharding.py
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpp_plugin.engine.checkpoints.checkpoint_files import (
    MANIFEST,
    MASTER,
    MOMENTS,
    BrokenFile,
    SavedGroup,
)
from gpp_plugin.engine.checkpoints.saved_tensors import StageOptimizerState
from gpp_plugin.errors import CheckpointError

logger = logging.getLogger(__name__)

_STEP = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """The part of a parameter whose master weight this rank steps.

    Args:
        master: the tensor the inner optimizer steps.
        master_start: first element of the part in ``master``, flattened.
        start, num_elements: the part, in the flattened parameter.
        flat: ``master`` is one-dimensional and shared with other parameters.
    """

    master: Tensor
    master_start: int
    start: int
    num_elements: int
    flat: bool

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return this part of a tensor of the master's shape, as one row."""
        return tensor.detach().reshape(-1).narrow(0, self.master_start, self.num_elements)

    def write_part(self, tensor: Tensor, part: Tensor) -> None:
        """Write this part of a tensor of the master's shape; one that is not flat may lie in memory in any order."""
        if self.flat:
            self.part_of(tensor).copy_(part)
        else:
            tensor.copy_(part.view(tensor.shape))


def whole_fragment(parameter: Tensor, master: Tensor | None = None) -> Fragment:
    """Return the fragment of a parameter that is its own master, or has one of its own."""
    own = parameter if master is None else master
    return Fragment(master=own, master_start=0, start=0, num_elements=parameter.numel(), flat=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerPiece:
    """Elements of what an optimizer keeps for a parameter.

    Args:
        name: the parameter's.
        what: ``master``, or the optimizer's name of it (``exp_avg``).
        start: first element in the flattened parameter; None: the tensor has a shape of its own, and is whole.
    """

    name: str
    what: str
    start: int | None
    tensor: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerPieces:
    """All that one rank's optimizer of a stage keeps.

    Args:
        kind: the optimizer's class.
        numbers: by parameter, what is a number (``step``).
        groups: the parameter groups that it has parameters of, with options as the optimizer has them.
    """

    kind: str
    pieces: tuple[OptimizerPiece, ...]
    numbers: Mapping[str, Mapping[str, Any]]
    groups: tuple[SavedGroup, ...]


def optimizer_pieces(
    optimizer: torch.optim.Optimizer,
    fragments: Mapping[str, Fragment],
    *,
    has_masters: bool,
    foreign: Collection[str] = (),
    group_numbers: Sequence[int] | None = None,
) -> OptimizerPieces:
    """Return what ``optimizer`` keeps, as views of its tensors.

    Args:
        has_masters: masters are not the parameters themselves.
        foreign: parameters that another stage saves.
        group_numbers: of the optimizer's groups among the model's; None: it has all of them.

    Raises:
        CheckpointError: a flat master has state that is not of its shape: nothing says which parameter it is of.
    """
    # Of each parameter this rank has a slice of the flattened tensor (all of it under ZeRO 0). State of the master's
    # shape is cut as the master is; numbers (step counts) stay as they are; anything else is saved whole where the
    # parameter is whole, and refused where only a slice of a flat buffer is known.
    pieces: list[OptimizerPiece] = []
    numbers: dict[str, dict[str, Any]] = {}
    for name, fragment in fragments.items():
        if name in foreign:
            continue
        state = optimizer.state.get(fragment.master, {})
        if has_masters:
            part = fragment.part_of(fragment.master)
            pieces.append(OptimizerPiece(name=name, what=MASTER, start=fragment.start, tensor=part))
        numbers[name] = {}
        for what, value in state.items():
            is_number = not isinstance(value, Tensor) or (value.dim() == 0 and fragment.master.dim() > 0)
            if is_number or what == _STEP:
                numbers[name][what] = value.clone() if isinstance(value, Tensor) else value
            elif value.shape == fragment.master.shape:
                part = fragment.part_of(value)
                pieces.append(OptimizerPiece(name=name, what=what, start=fragment.start, tensor=part))
            elif not fragment.flat:
                pieces.append(OptimizerPiece(name=name, what=what, start=None, tensor=value.detach()))
            else:
                raise CheckpointError(
                    f"{type(optimizer).__name__} keeps {what!r} of shape {tuple(value.shape)} for "
                    f"{fragment.master.numel()} flat elements: it is unclear which parameter that is of; use ZeRO "
                    "0 in fp32, or an optimizer whose state is of the parameters' shape"
                )
    return OptimizerPieces(
        kind=type(optimizer).__name__,
        pieces=tuple(pieces),
        numbers=numbers,
        groups=tuple(
            SavedGroup(number=number, names=names, options=_own_options(group))
            for number, group, names in zip(
                range(len(optimizer.param_groups)) if group_numbers is None else group_numbers,
                optimizer.param_groups,
                group_names(optimizer, fragments),
                strict=True,
            )
        ),
    )


def _own_options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def group_names(optimizer: torch.optim.Optimizer, fragments: Mapping[str, Fragment]) -> list[tuple[str, ...]]:
    """Return the names of the parameters of each group that this rank steps a part of."""
    of_master: dict[int, list[str]] = {}
    for name, fragment in fragments.items():
        of_master.setdefault(id(fragment.master), []).append(name)
    return [
        tuple(name for master in group["params"] for name in of_master.get(id(master), ()))
        for group in optimizer.param_groups
    ]


def check_saved(
    optimizer: torch.optim.Optimizer, fragments: Mapping[str, Fragment], saved: StageOptimizerState
) -> None:
    """Refuse what `restore_optimizer` could not restore; nothing changes.

    Raises:
        CheckpointError: it is another optimizer's, or does not fit the masters; or it has numbers and options that no
            optimizer has: names the manifest, the place in it and the value.
    """
    ours, theirs = type(optimizer).__name__, saved.kind()
    if _family(ours) != _family(theirs):
        raise CheckpointError(
            f"the checkpoint has the state of {theirs}, this run's optimizer is {ours}; use the same, or load without "
            "the optimizer (load_optimizer_states=False)"
        )
    for group, names in zip(optimizer.param_groups, group_names(optimizer, fragments), strict=True):
        for name in names:
            numbers, kinds = saved.numbers(name), saved.tensor_kinds(name)
            check_like({}, numbers, f"numbers.{name}", file=MANIFEST)
            if twice := sorted(numbers.keys() & set(kinds)):
                raise BrokenFile(f"{MANIFEST}: {twice[0]!r} of {name!r} is a number and a tensor")
            options = saved.options(name)
            check_like(_own_options(group), options, f"options of {name}", file=MANIFEST)
            needed = {"max_exp_avg_sq"} if options.get("amsgrad") else set()
            needed |= _NEEDED.get(_family(saved.kind()), set())
            if numbers and (absent := needed - set(kinds)):
                raise BrokenFile(f"{MANIFEST}: {name!r} has a state without {min(absent)!r}")
            whole = [what for what in kinds if saved.is_whole(name, what)]
            if whole and fragments[name].flat:
                raise CheckpointError(
                    f"{whole[0]!r} of {name!r} is of the whole parameter, of which this run's ZeRO steps parts; load "
                    "on ZeRO 0, or without the optimizer"
                )


_NEEDED = {"adam": set(MOMENTS), "adagrad": {"sum"}}
"""What a state has in tensors where it has any numbers, by family of optimizers."""
_COUNTS = {"step": 0, "global_steps": 0, "cur_iter": 0, "_step_count": 0}
_COUNTS |= {"last_epoch": -1, "last_batch_iteration": -1, "last_overflow_iter": -1}
"""Names of counts in states, and the least they may be: -1 is before the first."""
_MOST_STEPS = 1 << 53


def check_like(own: Any, saved: Any, at: str, *, file: str, name: str = "") -> None:
    """Refuse a saved value that is not of the kind of the one whose place it takes: it would fail at the next step.

    Counts are whole and in their limits, wherever they are. Numbers are finite where they are here, sequences as long.
    Mappings are compared where both have a key.

    Raises:
        BrokenFile: names the file, the place in it and the value.
    """
    if name in _COUNTS:
        low = _COUNTS[name]
        is_right = _is_number(saved) and low <= float(saved) <= _MOST_STEPS and float(saved) == int(saved)
        wanted = f"a whole number of at least {low}"
    elif isinstance(own, Mapping):
        is_right, wanted = isinstance(saved, Mapping), "a mapping with names"
        for key, value in saved.items() if is_right else ():
            if key in own or key in _COUNTS:
                check_like(own.get(key), value, f"{at}.{key}", file=file, name=str(key))
    elif isinstance(own, (list, tuple)):
        is_right = isinstance(saved, (list, tuple)) and len(saved) == len(own)
        wanted = f"a sequence of {len(own)}"
        for number, (one, other) in enumerate(zip(own, saved, strict=True) if is_right else ()):
            check_like(one, other, f"{at}[{number}]", file=file, name=name)
    elif isinstance(own, Tensor) and own.numel() > 1:
        is_right = isinstance(saved, Tensor) and saved.shape == own.shape
        wanted = f"a tensor of shape {tuple(own.shape)}"
    elif isinstance(own, bool):
        is_right, wanted = saved is None or (isinstance(saved, int) and saved in (0, 1)), "true or false"
    elif _is_number(own):
        value = float(saved) if _is_number(saved) or isinstance(saved, bool) else math.nan
        is_right = math.isfinite(value) or (math.isinf(value) and math.isinf(own))
        wanted = "a finite number"
        if name == "betas":
            is_right, wanted = 0.0 <= value < 1.0, "a number from 0 to below 1"
    elif own is None:
        is_right = saved is None or isinstance(saved, bool) or _is_number(saved)
        wanted = "nothing, true, false or a number"
    else:
        is_right, wanted = saved is None or isinstance(saved, type(own)), f"a {type(own).__name__}"
    if not is_right:
        raise BrokenFile(f"{file}: {at} is {str(saved)[:60]!r}, where {wanted} is expected")


def _family(kind: str) -> str:
    """Return a name that implementations of one update share: DeepSpeed's FusedAdam, torch's AdamW."""
    plain = kind.lower()
    for word in ("deepspeed", "fused", "cpu", "zenflow"):
        plain = plain.replace(word, "")
    return "adam" if plain == "adamw" else plain


@torch.no_grad()
def restore_optimizer(
    optimizer: torch.optim.Optimizer, fragments: Mapping[str, Fragment], saved: StageOptimizerState
) -> None:
    """Write masters, and let ``optimizer`` continue from the state in ``saved``, which `check_saved` takes."""
    for name, fragment in fragments.items():
        fragment.write_part(fragment.master, saved.read(name, MASTER, fragment.start, fragment.num_elements))
    by_master: dict[int, list[str]] = {}
    for name, fragment in fragments.items():
        by_master.setdefault(id(fragment.master), []).append(name)
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    count = 0
    for group, names in zip(optimizer.param_groups, group_names(optimizer, fragments), strict=True):
        numbers = range(count, count + len(group["params"]))
        count += len(numbers)
        for number, master in zip(numbers, group["params"], strict=True):
            members = {name: fragments[name] for name in by_master.get(id(master), ())}
            if own_state := _state_of(optimizer, master, members, saved):
                state[number] = own_state
        groups.append({**_options_of(optimizer, group, names, saved), "params": list(numbers)})
    # torch moves and casts state as each optimizer wants it
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _state_of(
    optimizer: torch.optim.Optimizer,
    master: Tensor,
    members: Mapping[str, Fragment],
    saved: StageOptimizerState,
) -> dict[str, Any]:
    """Return the state of one master from that of the parameters in it; empty where it never took a step."""
    own_state: dict[str, Any] = {}
    for name, fragment in members.items():
        for what in saved.tensor_kinds(name):
            if saved.is_whole(name, what):
                own_state[what] = saved.read_whole(name, what)
                continue
            part = saved.read(name, what, fragment.start, fragment.num_elements)
            if what not in own_state:
                own_state[what] = torch.zeros(master.shape, dtype=part.dtype, device=master.device)
            fragment.write_part(own_state[what], part)
    counts = {name: saved.numbers(name) for name in members}
    for what in sorted({key for numbers in counts.values() for key in numbers}):
        found = [numbers[what] for numbers in counts.values() if what in numbers]
        if any(float(value) != float(found[0]) for value in found if _is_number(value)):
            logger.warning(
                "%s of the parameters that ZeRO steps together with %s differs (%s); the largest is taken",
                what,
                next(iter(members)),
                sorted({float(value) for value in found}),
            )
            found = [max(found, key=float)]
        own_state[what] = _like_own(optimizer, what, found[0], saved)
    return own_state


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _like_own(optimizer: torch.optim.Optimizer, what: str, value: Any, saved: StageOptimizerState) -> Any:
    """Return a number as this optimizer keeps it: torch's count steps in tensors, DeepSpeed's in integers."""
    if what != _STEP or saved.kind() == type(optimizer).__name__:
        return value
    if type(optimizer).__module__.startswith("torch.optim"):
        return torch.tensor(float(value), dtype=torch.float32)
    return int(value)


def _options_of(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    names: Sequence[str],
    saved: StageOptimizerState,
) -> dict[str, Any]:
    """Return a group's options: those its parameters had, where this optimizer has them, over its own."""
    own = _own_options(group)
    saved_options = saved.options(names[0]) if names else {}
    is_same = saved.kind() == type(optimizer).__name__
    return {**own, **{key: value for key, value in saved_options.items() if is_same or key in own}}
