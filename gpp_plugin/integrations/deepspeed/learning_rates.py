"""Learning rates and loss scale, the same on every rank: all schedule all groups of the model, each steps its own.

A stage holds a part of the model's parameters, so some of the model's parameter groups may be empty on it;
optimizers and schedulers cannot live with that (a list of one rate per group no longer fits, and stages would
report different rates). So the scheduler works on a *mirror*: an optimizer like the user's over one placeholder
per group, the same on every rank, also where a stage trains nothing. After each of its steps the rates are
copied to the stage's own optimizer. Example, groups "decay" and "none", a stage with biases only: its optimizer
has one group, number 1 of the mirror's two, and takes that one's rate.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from deepspeed.runtime.precision_config import get_float16_config
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gpp_plugin.engine.checkpoints.checkpoint_files import STATE, BrokenFile
from gpp_plugin.engine.checkpoints.optimizer_pieces import check_like
from gpp_plugin.errors import CheckpointError, ConfigError, RuntimeFailure
from gpp_plugin.ir.typed_leaves import nearest_key

OptimizerFactory = Callable[[Any], Optimizer]
SchedulerFactory = Callable[[Optimizer], Any]

_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_SCHEDULED_KEYS = ("lr", "momentum", "betas")
_DEEPSPEED_NAMES = ("Adam", "AdamW", "Lamb", "Lion", "Adagrad")
_OF_WHOLE_WEIGHTS = ("lamb", "lars", "adafactor", "muon", "shampoo", "novograd")
"""In names of optimizers whose step of an element depends on others of its weight: by norms, or by rows and columns."""
_MIRROR_CLASSES = {"adam": "Adam", "adamw": "AdamW", "lamb": "Adam", "lion": "Adam", "adagrad": "Adagrad"}


class StageParameterGroups:
    """The user's parameter groups, and those of them this stage has parameters in.

    Args:
        parameters: the stage's trainable parameters by name; names of one parameter may be several.
        groups: the model's groups, each ``{"params": [names], **options}``; None: one group of everything.

    Raises:
        ConfigError: a group has no list of names, or a parameter is in two groups.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], groups: Sequence[Mapping[str, Any]] | None
    ) -> None:
        self.is_explicit = groups is not None
        self.options: list[dict[str, Any]] = []
        self.members: list[list[str]] = []
        if groups is None:
            groups = [{"params": list(parameters)}]
        # By identity: a parameter may have several names (a tied head), and is trained under the first one listed.
        first_name: dict[int, str] = {}
        taken: dict[int, int] = {}
        for index, group in enumerate(groups):
            names = group.get("params")
            if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
                raise ConfigError(
                    f"parameter group {index}: 'params' must list parameter names, found {names!r}"
                )
            self.options.append({key: value for key, value in group.items() if key != "params"})
            members: list[str] = []
            for name in names:
                parameter = parameters.get(name)
                if parameter is None or taken.get(id(parameter)) == index:
                    continue  # another stage's, frozen, or a second name of one parameter
                if id(parameter) in taken:
                    raise ConfigError(
                        f"parameter {name!r} is in the groups {taken[id(parameter)]} and {index}; name it once"
                    )
                taken[id(parameter)] = index
                members.append(first_name.setdefault(id(parameter), name))
            self.members.append(members)
        self.local = [index for index, members in enumerate(self.members) if members]

    def names(self) -> list[str]:
        """Return the names of the parameters this stage trains, in the groups' order."""
        return [name for members in self.members for name in members]

    def optimizer_input(self, parameters: Mapping[str, nn.Parameter]) -> list[Any]:
        """Return what the stage's optimizer takes: its non-empty groups, or the plain list without explicit groups."""
        if not self.is_explicit:
            return [parameters[name] for name in self.names()]
        return [
            {"params": [parameters[name] for name in self.members[index]], **self.options[index]}
            for index in self.local
        ]

    def placeholder_input(self) -> list[Any]:
        """Return the same for the mirror: one placeholder per group of the model."""
        if not self.is_explicit:
            return [nn.Parameter(torch.zeros(1))]
        return [{"params": [nn.Parameter(torch.zeros(1))], **options} for options in self.options]


class LearningRates:
    """The mirror optimizer, the scheduler on it, and the way of its rates to the stage's optimizer.

    Args:
        groups: the parameter groups.
        config: the user's DeepSpeed JSON; its ``optimizer`` and ``scheduler`` blocks are read.
        optimizer: callable that makes the user's optimizer, or None: the configuration's block.
        scheduler: callable that makes the user's scheduler, or None: the configuration's block.

    Attributes:
        local_groups: the numbers of the model's groups that the stage's optimizer has.

    Raises:
        ConfigError: a block or callable does not give an optimizer or scheduler.
    """

    def __init__(
        self,
        groups: StageParameterGroups,
        config: Mapping[str, Any],
        *,
        optimizer: OptimizerFactory | None = None,
        scheduler: SchedulerFactory | None = None,
    ) -> None:
        self.local_groups = groups.local
        self.mirror = _mirror_optimizer(groups, optimizer, config.get("optimizer"))
        self.scheduler = _scheduler(self.mirror, scheduler, config.get("scheduler"))

    def step(self) -> None:
        """Advance the schedule by one applied optimizer step."""
        if self.scheduler is not None:
            self.mirror.step()  # torch warns of a scheduler that steps before its optimizer
            self.scheduler.step()

    def publish(self, optimizer: Optimizer | None) -> None:
        """Copy the schedule's rates to the stage's optimizer; without a schedule the user's own stay."""
        if self.scheduler is None or optimizer is None:
            return
        # The stage's optimizer has those groups only in which the stage has parameters: `local` are their numbers in
        # the model. Momentum and betas are scheduled by one-cycle schedules.
        for index, group in zip(self.local_groups, optimizer.param_groups, strict=True):
            scheduled = self.mirror.param_groups[index]
            group.update(
                {key: scheduled[key] for key in _SCHEDULED_KEYS if key in scheduled and key in group}
            )

    def current(self, optimizer: Optimizer | None) -> tuple[float, ...]:
        """Return the learning rate of every group of the model."""
        # Without a schedule users may set rates on the stage's own optimizer: those count where there are any.
        rates = [float(group["lr"]) for group in self.mirror.param_groups]
        if self.scheduler is None and optimizer is not None:
            for index, group in zip(self.local_groups, optimizer.param_groups, strict=True):
                rates[index] = float(group["lr"])
        return tuple(rates)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of schedule and rates; the same on every rank."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.mirror.param_groups]
        return {
            "groups": groups,
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse what `load_state_dict` could not restore.

        Raises:
            CheckpointError: the number of groups, or whether there is a scheduler, has changed; or a value is not of
                its kind.
        """
        groups = self.mirror.param_groups
        state = dict(state)  # not a tensor, which takes names as numbers
        if len(state["groups"]) != len(groups) or (state["scheduler"] is None) != (self.scheduler is None):
            raise CheckpointError(
                f"{STATE} has {len(state['groups'])} parameter groups and "
                f"{'no' if state['scheduler'] is None else 'a'} scheduler; the configuration has {len(groups)} and "
                f"{'no' if self.scheduler is None else 'a'} scheduler; keep both, or load without the scheduler"
            )
        check_like(self.state_dict(), state, "engine.learning_rates", file=STATE)
        kept = state["scheduler"] or {}
        # torch's schedulers take a state as their attributes: a method's name would be one
        if hidden := sorted(key for key in kept if callable(getattr(type(self.scheduler), key, None))):
            raise BrokenFile(f"{STATE}: engine.learning_rates.scheduler has {hidden[0]!r}, a method's name")
        wanted = () if isinstance(self.scheduler, LRScheduler) else self.state_dict()["scheduler"] or ()
        if absent := sorted(set(wanted) - kept.keys()):
            raise CheckpointError(
                f"{STATE}: the schedule's state has no {absent[0]!r}, which a {type(self.scheduler).__name__} loads; "
                "keep the scheduler, or load without its state"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, and `check` takes."""
        for group, saved in zip(self.mirror.param_groups, state["groups"], strict=True):
            group.update(saved)
        if self.scheduler is None:
            return
        self.scheduler.load_state_dict(state["scheduler"])
        if any("lr" not in saved for saved in state["groups"]):
            # converted from what has no options of groups: the schedule alone says the rate of the next step
            own = self.scheduler
            rates = own.get_last_lr() if isinstance(own, LRScheduler) else own.get_lr()
            for group, rate in zip(self.mirror.param_groups, rates, strict=True):
                group["lr"] = rate


class LossScale:
    """Static or dynamic under fp16, else 1.

    Args:
        config: the user's DeepSpeed JSON; its ``fp16`` block is read.
    """

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype) -> None:
        half = get_float16_config(dict(config))
        self._scaler: Any = CreateLossScaler(
            dtype=torch.half if dtype == torch.float16 else dtype,
            static_loss_scale=half.loss_scale,
            dynamic_scaling=half.loss_scale == 0,
            dynamic_loss_args=half.dynamic_loss_scale_args(),
        )

    @property
    def value(self) -> float:
        """Return the scale in force."""
        return float(self._scaler.loss_scale)

    def update(self, overflow: bool, *, step: int) -> None:
        """Choose the scale of the next mini-batch.

        Raises:
            RuntimeFailure: it cannot sink any further.
        """
        scale = self.value
        try:
            self._scaler.update_scale(overflow)
        except Exception as error:  # DeepSpeed raises a bare Exception
            raise RuntimeFailure(
                f"step {step}: gradients overflow at the smallest loss scale, {scale:g}; "
                "lower the learning rate, use bf16, or lower fp16.min_loss_scale"
            ) from error

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: nothing of a static scale."""
        return {key: getattr(self._scaler, key) for key in _SCALER_STATE if self._scaler.dynamic}

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse what `load_state_dict` could not restore.

        Raises:
            CheckpointError: it is no scale, or of a name that a scaler has not.
        """
        check_like(self.state_dict(), state, "engine.loss_scaler", file=STATE)
        scale = state.get("cur_scale", 1.0) if self._scaler.dynamic else 1.0
        if not set(state) <= set(_SCALER_STATE) or not 0.0 < scale < math.inf:
            raise BrokenFile(
                f"{STATE}: engine.loss_scaler is {str(dict(state))[:100]}, which is no loss scale"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, and `check` takes."""
        if self._scaler.dynamic:
            vars(self._scaler).update(state)


def optimizer_of_whole_weights(
    optimizer: OptimizerFactory | None,
    block: Mapping[str, Any] | None,
    groups: Sequence[Mapping[str, Any]] | None,
) -> str | None:
    """Return the name of an optimizer that steps a part of a weight otherwise than the whole; None of any other.

    Args:
        optimizer, block, groups: as of `LearningRates` and `StageParameterGroups`.
    """
    # LAMB scales the step of a weight by the weight's norm: a tensor rank would take that of its own rows.
    if optimizer is None:
        names = [str((block or {}).get("type", ""))]
    else:
        mirror = _mirror_optimizer(StageParameterGroups({}, groups), optimizer, block)
        names = [kind.__name__ for kind in type(mirror).__mro__]
    is_found = any(known in name.lower() for known in _OF_WHOLE_WEIGHTS for name in names)
    return names[0] if is_found else None


def _nearest(name: str, known: Sequence[str]) -> str:
    by_letters = {other.lower(): other for other in known}
    near = difflib.get_close_matches(name.lower(), by_letters, n=1)
    return f"; did you mean {by_letters[near[0]]!r}?" if near else ""


def _subclasses(module: Any, base: type) -> list[str]:
    return [
        name for name, value in vars(module).items() if isinstance(value, type) and issubclass(value, base)
    ]


def _mirror_optimizer(
    groups: StageParameterGroups, factory: OptimizerFactory | None, block: Mapping[str, Any] | None
) -> Optimizer:
    placeholders = groups.placeholder_input()
    if factory is not None:
        made = factory(placeholders)
        if not isinstance(made, Optimizer) or len(made.param_groups) != len(
            placeholders if groups.is_explicit else [0]
        ):
            raise ConfigError(
                f"optimizer: the callable returned {type(made).__name__} for {len(placeholders)} parameter "
                "groups; it must return a torch optimizer with the groups it received"
            )
        return made
    # What the mirror steps has no gradients, so that its class matters to schedulers only: they look for its options.
    kind = str((block or {}).get("type", "SGD"))
    params = dict((block or {}).get("params") or {})
    cls = getattr(torch.optim, _MIRROR_CLASSES.get(kind.lower(), kind), None)
    if cls is None:
        raise ConfigError(
            f"optimizer.type: {kind!r} is neither one of DeepSpeed's nor one of torch.optim's"
            f"{_nearest(kind, [*_DEEPSPEED_NAMES, *_subclasses(torch.optim, Optimizer)])}"
        )
    # DeepSpeed's own classes take more; of torch's it is known what they take
    takes = [*inspect.signature(cls).parameters, *(params if kind.lower() in _MIRROR_CLASSES else ())]
    for key in params:
        if key not in takes:
            raise ConfigError(
                f"optimizer.params.{key}: unknown to torch.optim.{kind}; {nearest_key(key, takes[1:])}"
            )
    known = {key: params[key] for key in ("lr", "betas", "momentum", "weight_decay", "eps") if key in params}
    try:
        return cls(placeholders, **{"lr": 1e-3, **known})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.params: {params} do not fit {kind}: {error}") from error


def _scheduler(mirror: Optimizer, factory: SchedulerFactory | None, block: Mapping[str, Any] | None) -> Any:
    if factory is not None:
        name = getattr(factory, "__name__", type(factory).__name__)
        try:
            made = factory(mirror)
        except TypeError as error:  # mostly a class that needs more than the optimizer
            raise ConfigError(
                f"lr_scheduler: {name}(optimizer) fails: {error}; pass a callable that gives it all it needs: "
                f"functools.partial({name}, ...)"
            ) from error
        if not callable(getattr(made, "step", None)):
            raise ConfigError(
                f"lr_scheduler: the callable returned {type(made).__name__}, which has no step()"
            )
        return made
    if not block or block.get("type") is None:
        return None
    kind = str(block["type"])
    cls = getattr(lr_schedules, kind, None) or getattr(torch.optim.lr_scheduler, kind, None)
    if cls is None:
        torchs = _subclasses(torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)
        raise ConfigError(
            f"scheduler.type: {kind!r} is neither one of DeepSpeed's nor one of torch's schedules"
            f"{_nearest(kind, [*lr_schedules.VALID_LR_SCHEDULES, *torchs])}"
        )
    try:
        return cls(mirror, **dict(block.get("params") or {}))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"scheduler.params: {block.get('params')} do not fit {kind}: {error}") from error
