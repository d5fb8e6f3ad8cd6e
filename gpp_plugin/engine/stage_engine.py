"""One stage's training state on one rank: its module, gradients and optimizer; counters and steps are the rank's.

    runtime, per micro-batch     backward; accumulate()
    runtime, once per mini-batch reduce_data(); reduce_tied()
    step()                       as the rule has it: by all stages together, or by this one alone (`stage_step`)

A `WeightUpdater` updates the weights; which framework's it is this module does not know. The stage's gradient norm is
a part of the graph's, so that norm, clipping and overflow are the engine's and not the framework's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.engine.checkpoints.optimizer_pieces import OptimizerPieces
from gpp_plugin.engine.framework import StageReplica, StepCounters, WeightUpdater
from gpp_plugin.engine.gradient_store import GradientStore, StageGradients
from gpp_plugin.engine.partitioned_gradients import PartitionedGradients
from gpp_plugin.engine.sharded_weights import GatheredBytes, ShardedWeights, gathered
from gpp_plugin.engine.stage_groups import StageGroups, TiedParameter, duplicates
from gpp_plugin.engine.stage_step import (
    GradientReductions,
    StageUpdate,
    StepResult,
    StepRule,
    TiedSums,
)
from gpp_plugin.ir.plan import PipelinePlan


class StageEngine:
    """Owns the training state of one of a rank's stages; `RankEngine` makes those of a rank together.

    Construction, `step` and `parameter_state` are collective: over the stage's ranks, the ranks of the rule, the
    stage's ranks.

    Args:
        module: the stage's module, parameters under their HuggingFace names, on ``device`` and equal on the stage's
            ranks; cast to the configured type.
        plan: the plan in force.
        index: of the stage in it.
        rank: this global rank.
        groups: the process groups of ``plan`` and ``tied``.
        tied: the parameters that several stages hold, the same list on every rank.
        make_optimizer: from the module, what updates its weights.
        counters: of the rank.
        device: where the module lives.
        reduces_early: its ranks may sum gradients in the last backward (`schedule.gathers`); alike on all.
        whole_bytes: counts what is gathered on the rank (ZeRO 3).

    Raises:
        ConfigError: the configuration asks for what a stage cannot do, or the framework refuses it.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        plan: PipelinePlan,
        index: int,
        rank: int,
        groups: StageGroups,
        tied: Sequence[TiedParameter] = (),
        make_optimizer: Callable[[nn.Module, StageReplica], WeightUpdater],
        counters: StepCounters,
        device: torch.device,
        reduces_early: bool = False,
        whole_bytes: GatheredBytes,
    ) -> None:
        self.module = module
        self.plan = plan
        self.rank = rank
        self.groups = groups
        self.device = device
        self.stage_index = index
        self.stage = plan.stages[index]
        self.tensor_position = self.stage.position(rank)[1]
        data_ranks = tuple(sorted(self.stage.data_ranks(self.tensor_position)))
        self.position = data_ranks.index(rank)  # in the data-parallel group
        self.tied = tuple(tie for tie in tied if index in tie.stages)
        self._counters = counters
        replica = StageReplica(
            rank=rank,
            data_ranks=data_ranks,
            data_group=groups.data[index],
            single_group=groups.single,
            mini_batch=plan.mini_batch,
            device=device,
        )
        self.updater = make_optimizer(module, replica)
        self.config = self.updater.config
        self.dtype: torch.dtype = getattr(torch, self.config.dtype)
        self.gradients: StageGradients = self._make_gradients(reduces_early)
        trained = set(map(id, self.updater.trained.values()))
        self._untrained = [p for p in module.parameters() if id(p) not in trained and p.requires_grad]
        self.reductions = GradientReductions(
            self.gradients,
            stage=self.stage,
            stage_index=index,
            groups=groups,
            tied=self.tied,
            device=device,
        )
        self.update = self._make_update()
        self.weights = self._make_weights(whole_bytes)
        self._rule: StepRule | None = None
        self._ties: TiedSums | None = None

    # ---- construction ------------------------------------------------------------------------------------

    def join(self, rule: StepRule, ties: TiedSums) -> None:
        """Let the stage step, and sum what is tied, as all stages of the rank do."""
        self._rule, self._ties = rule, ties

    def _make_gradients(self, reduces_early: bool) -> StageGradients:
        payload = self.config.communication_dtype
        common: dict[str, Any] = {
            "dtype": getattr(torch, self.config.accumulation_dtype),
            "group": self.groups.data[self.stage_index],
            "position": self.position,
            "degree": self.stage.degree,
            "communication_dtype": None if payload is None else getattr(torch, payload),
            "bucket_elements": self.config.bucket_elements,
        }
        if not self.is_partitioned:
            return GradientStore(
                self.updater.trained, reduces_early=reduces_early, device=self.device, **common
            )
        return PartitionedGradients(
            self.updater.trained,
            self.updater.layout,
            is_reduced_often=self.config.zero_stage >= 2,
            **common,
        )

    def _make_weights(self, count: GatheredBytes) -> ShardedWeights | None:
        """Return what gathers the stage's parameters, and let go of all but this rank's part; None below ZeRO 3."""
        if self.config.zero_stage < 3 or self.stage.degree == 1:
            return None
        group = self.groups.data[self.stage_index]
        assert isinstance(group, dist.ProcessGroup), "this rank is in its stage's group"
        weights = ShardedWeights(
            self.module.parameters(),
            self.updater.flat_weights(),
            group=group,
            position=self.position,
            degree=self.stage.degree,
            count=count,
        )
        self.updater.publish_to(weights.parts)
        return weights

    def _make_update(self) -> StageUpdate:
        """Return what updates the weights, and counts in the norm what no other stage and no other rank does."""
        foreign = set(self._foreign_ties())
        if self.tensor_position > 0:
            foreign.update(duplicates(self.gradients.parameters))
        return StageUpdate(
            self.gradients, self.reductions, self.updater, foreign=foreign, clear=self.zero_grad
        )

    def _foreign_ties(self) -> set[str]:
        """Return the parameters of the stage that another one owns: it counts and saves them."""
        return {tie.name for tie in self.tied if tie.owner != self.stage_index}

    # ---- one mini-batch ----------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """Return the factor on every loss of this mini-batch; the same on every rank."""
        return self.updater.loss_scale

    def rest(self, names: Collection[str]) -> None:
        """Leave these parameters, which no unit of the mini-batch that begins reads, as they are in its step."""
        self.gradients.resting = frozenset(names).intersection(self.gradients.parameters)

    def accumulate(self) -> None:
        """Add a micro-batch's gradients to the mini-batch's, where they are held in another type."""
        self.reductions.accumulate()

    def begin_reduction(self) -> None:
        """Let the gradients be summed over the stage's ranks in the backward that follows, the mini-batch's last."""
        self.reductions.begin_reduction()

    def reduce_data(self) -> None:
        """Sum the gradients over the stage's ranks; collective over them.

        Once a mini-batch, after its last backward; under ZeRO 2 and 3 as often as the program says.
        """
        self.reductions.reduce_data()

    def reduce_tied(self) -> None:
        """Sum tied parameters' gradients over their stages, after `reduce_data`; collective over those stages.

        Where the rank holds several such stages, when all of them have come to it.
        """
        assert self._ties is not None, "the rank's stages are made"
        self._ties.reduce(self.stage_index)

    def full_gradients(self) -> dict[str, Tensor]:
        """Return the mini-batch's gradients, fp32 and unscaled, between reduction and step.

        Parameters that no loss reached are left out. With tensor parallelism, and from ZeRO 1 on, collective
        over the stage's ranks.
        """
        self.reductions.sum_tensor()
        return {name: gradient.div_(self.loss_scale) for name, gradient in self.gradients.gather().items()}

    def step(self) -> StepResult:
        """Take a step as the rule has it, of all stages of the rank, or in mode async of this one.

        Collective over the ranks that step together.

        Raises:
            RuntimeFailure: gradients were not reduced, or the loss scale cannot sink any further.
            ConfigError: tensor ranks have unlike gradients of what they hold alike; seen at the first step.
        """
        assert self._rule is not None, "the rank's stages are made"
        return self._rule.step(self.stage_index)

    def zero_grad(self) -> None:
        """Forget the mini-batch's gradients."""
        self.reductions.clear()
        for parameter in self._untrained:
            parameter.grad = None

    @property
    def global_steps(self) -> int:
        """Return the optimizer steps so far, skipped ones among them."""
        return self._counters.global_steps

    @property
    def global_samples(self) -> int:
        """Return the samples trained on so far."""
        return self._counters.global_samples

    @property
    def skipped_steps(self) -> int:
        """Return the steps that overflow prevented."""
        return self._counters.skipped_steps

    # ---- optimizer and weights -----------------------------------------------------------------------------

    @property
    def optimizer(self) -> Any:
        """Return the stage's optimizer; one over placeholders where the stage trains nothing."""
        return self.updater.optimizer

    @property
    def trained(self) -> Mapping[str, nn.Parameter]:
        """Return the parameters that the optimizer steps, by name."""
        return self.updater.trained

    @property
    def is_trained(self) -> bool:
        """Return whether the optimizer steps any parameter of the stage."""
        return bool(self.updater.trained)

    @property
    def is_partitioned(self) -> bool:
        """Return whether optimizer state and masters are partitioned over the stage's ranks (ZeRO 1 to 3)."""
        return bool(self.updater.layout)

    def weight_tensors(self) -> tuple[Tensor, ...]:
        """Return parameters and buffers of the module; under ZeRO 3 this rank's parts of them."""
        own = self.weights
        if own is None:
            return (*self.module.parameters(), *self.module.buffers())
        return (
            *own.tensors,
            *(p for p in self.module.parameters() if id(p) not in own.parameters),
            *self.module.buffers(),
        )

    def parameter_state(self) -> dict[str, Tensor]:
        """Return the stage's parameters as fp32 copies, the masters where there are any.

        Collective over the stage's ranks under ZeRO 1 to 3.
        """
        state: dict[str, Tensor] = {}
        with gathered([] if self.weights is None else [self.weights]):
            for name, parameter in self.module.named_parameters():
                if name in self.updater.trained:
                    state[name] = self.updater.master(name)
                else:
                    state[name] = parameter.detach().float().clone()
        return state

    def refresh_masters(self) -> None:
        """Take master weights anew after the module's parameters were written from outside."""
        if self.weights is not None:
            self.weights.keep_written()
        self.updater.refresh_masters()

    # ---- state, as checkpoints hold it ----------------------------------------------------------------

    def held_weights(self) -> dict[str, Tensor]:
        """Return parameters and persistent buffers by name: the stage's own tensors."""
        tensors: dict[str, Tensor] = dict(self.module.named_parameters())
        return tensors | self.saved_buffers()

    def saved_buffers(self) -> dict[str, Tensor]:
        """Return the persistent buffers by name."""
        persistent = set(self.module.state_dict(keep_vars=True))
        return {name: buffer for name, buffer in self.module.named_buffers() if name in persistent}

    def own_weights(self) -> dict[str, Tensor]:
        """Return what the stage saves of `held_weights`: each tie only on its owner."""
        foreign = self._foreign_ties()
        return {name: tensor for name, tensor in self.held_weights().items() if name not in foreign}

    def optimizer_pieces(self) -> OptimizerPieces:
        """Return what optimizer and masters keep on this rank of the parameters that the stage saves."""
        return self.updater.pieces(self._foreign_ties())

    def shared_state(self) -> dict[str, Any]:
        """Return schedule, loss scaler and counters: the same on every rank."""
        return {**self.updater.shared_state(), "counters": self._counters.as_dict()}

    def load_shared_state(self, state: Mapping[str, Any], *, load_scheduler: bool = True) -> None:
        """Restore what `shared_state` returned, the schedule if ``load_scheduler``."""
        self.updater.load_shared_state(state, load_scheduler=load_scheduler)
        self._counters.load(state["counters"])
