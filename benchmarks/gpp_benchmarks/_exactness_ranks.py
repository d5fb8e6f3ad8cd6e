"""One rank of `gpp bench exactness`: random draws, each against a single process and against itself with delays.

python -m gpp_benchmarks._exactness_ranks SETTINGS_JSON
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_benchmarks._exactness_kept import (
    KEPT_FAMILIES,
    DrawnRank,
    KeptDraw,
    kept_draw,
    stale_error,
    train_kept,
)
from gpp_benchmarks._linear_stages import (
    DATA_WIDTH,
    GradientError,
    LinearNetwork,
    Parameters,
    Trained,
    in_double,
    linear_network,
    single_process_gradients,
    starts_nearby,
    worst_error,
)
from gpp_benchmarks._random_plans import FAMILIES, Draw, random_draw
from gpp_benchmarks._ranks import rank_settings
from gpp_plugin.errors import GppError, RuntimeFailure
from gpp_plugin.ir.program import Direction
from gpp_plugin.launch import emit_event
from gpp_plugin.runtime.messages.transport import GlooTransport
from gpp_plugin.schedule.checks.validate_programs import validate_programs
from gpp_plugin.schedule.program_sets import RankPrograms

ALL_FAMILIES = (*FAMILIES, *KEPT_FAMILIES)
MINI_BATCHES = 3
MOST_SHARED_STAGES = 7
"""Of draws whose ranks hold several."""
LONGEST_DELAY_S = 0.05
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One draw to run.

    Args:
        has_delays: run it once more with random delays before every task.
        shares_ranks: ranks hold several stages.
    """

    seed: int
    family: str
    has_delays: bool
    shares_ranks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """What came of a case on all ranks.

    Args:
        fp64_error: largest error of any gradient tensor of any mini-batch.
        fp32_error: of the tensor that is furthest off what is allowed of it (`worst_error`).
        fp32_rounding: of that tensor of one process in fp32, against itself in fp64 from the same fp32 numbers.
        is_equal_delayed: the delayed run has the same bits; None where there was none.
    """

    seed: int
    family: str
    shares_ranks: bool
    stages: int
    fp64_error: float
    fp32_error: float
    fp32_rounding: float
    is_equal_delayed: bool | None


def draw_cases(num_cases: int, *, seed: int, delayed_every: int, shares_ranks: bool = False) -> list[Case]:
    """Return cases of all families in turn; every so many of a family are run with delays too."""
    return [
        Case(
            seed=seed + index,
            family=ALL_FAMILIES[index % len(ALL_FAMILIES)],
            has_delays=delayed_every > 0 and index // len(ALL_FAMILIES) % delayed_every == 0,
            shares_ranks=shares_ranks,
        )
        for index in range(num_cases)
    ]


def main() -> None:
    """Run all cases on this rank; rank 0 reports each."""
    settings = rank_settings()
    dist.init_process_group("gloo")
    cases = [Case(**case) for case in settings["cases"]]
    for result in run_cases(cases):
        if dist.get_rank() == 0:
            emit_event(event="case", **asdict(result))
    dist.barrier()
    dist.destroy_process_group()


def run_cases_here(cases: Sequence[Case]) -> list[CaseResult]:
    """Run cases in a process that has joined a group, and return their results, the same on every rank."""
    return list(run_cases(cases))


def run_cases(cases: Sequence[Case]) -> Iterator[CaseResult]:
    """Run cases one after the other; collective over all ranks.

    Raises:
        RuntimeFailure: a draw failed; says which.
    """
    groups = _Groups()
    try:
        for case in cases:
            try:
                yield _run_case(case, groups)
            except GppError as error:
                raise RuntimeFailure(f"seed {case.seed}, family {case.family}: {error}") from error
    finally:
        groups.close()


class _Groups:
    """The process groups that all cases share: two for messages, one for each set of ranks."""

    def __init__(self) -> None:
        self.ranks = range(dist.get_world_size())
        self.messages = {direction: dist.new_group(backend="gloo") for direction in Direction}
        self.of: dict[frozenset[int], dist.ProcessGroup] = {
            frozenset(ranks): dist.new_group(ranks, backend="gloo")
            for size in range(2, len(self.ranks) + 1)
            for ranks in combinations(self.ranks, size)
        }

    def close(self) -> None:
        """Let go of them."""
        for group in (*self.messages.values(), *self.of.values()):
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)


def _run_case(case: Case, groups: _Groups) -> CaseResult:
    num_ranks = len(groups.ranks)
    options: dict[str, Any] = {
        "most_stages": MOST_SHARED_STAGES if case.shares_ranks else num_ranks,
        "num_ranks": num_ranks,
        "most_ranks": 4,
        "shares_ranks": case.shares_ranks,
    }
    draw: Draw | KeptDraw
    if case.family in KEPT_FAMILIES:
        draw = kept_draw(case.seed, case.family, **options)
        draw.validate()
    else:
        draw = random_draw(case.seed, case.family, **options)
        validate_programs(draw.plan, draw.schedules, draw.programs)
    errors: dict[torch.dtype, GradientError] = {}
    is_equal: bool | None = None
    for dtype in (torch.float64, torch.float32):
        network = linear_network(draw.plan, draw.forward_only, seed=case.seed, dtype=dtype)
        batches = _batches(draw, dtype)
        run = _train(draw, network, batches, groups, longest_delay_s=0.0)
        if isinstance(draw, KeptDraw) and draw.programs.windows is not None:
            errors[dtype] = stale_error(run, network, batches)
        else:
            errors[dtype] = _error(run, network, batches)
        if case.has_delays and dtype is torch.float32:
            delayed = _train(draw, network, batches, groups, longest_delay_s=LONGEST_DELAY_S)
            is_equal = all(
                _has_same_bits(one, other)
                for stage, own in run.items()
                for one, other in zip(own.gradients, delayed[stage].gradients, strict=True)
            )
    told: list[tuple[GradientError, GradientError, bool | None]]
    told = [(GradientError(0.0, 0.0), GradientError(0.0, 0.0), None)] * len(groups.ranks)
    dist.all_gather_object(told, (errors[torch.float64], errors[torch.float32], is_equal))
    worst = max((one[1] for one in told), key=GradientError.excess)
    return CaseResult(
        seed=case.seed,
        family=case.family,
        shares_ranks=case.shares_ranks,
        stages=len(draw.plan.stages),
        fp64_error=max(one[0].error for one in told),
        fp32_error=worst.error,
        fp32_rounding=worst.rounding,
        is_equal_delayed=all(one[2] for one in told) if case.has_delays else None,
    )


def _batches(draw: Draw | KeptDraw, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(draw.seed)
    shape = (draw.plan.mini_batch, DATA_WIDTH)
    count = MINI_BATCHES if isinstance(draw, Draw) else max(MINI_BATCHES, draw.least_mini_batches)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]


def _train(
    draw: Draw | KeptDraw,
    network: LinearNetwork,
    batches: Sequence[Tensor],
    groups: _Groups,
    *,
    longest_delay_s: float,
) -> dict[int, Trained]:
    """Run the mini-batches one behind the other; return what came of each stage of this rank."""
    rank, plan = dist.get_rank(), draw.plan
    of_stages = {
        index: groups.of[frozenset(plan.stages[index].ranks)] if plan.stages[index].degree > 1 else None
        for index in plan.stages_of_rank(rank)
    }
    given: dict[str, Any] = {
        "groups": of_stages,
        "transport": GlooTransport(groups=groups.messages, timeout_s=TIMEOUT_S),
        "delays": random.Random(f"{draw.seed} {rank}"),
        "longest_delay_s": longest_delay_s,
    }
    if isinstance(draw, KeptDraw):
        return train_kept(draw, network, batches, rank=rank, **given)
    own, program = DrawnRank(draw, network, rank=rank, **given), draw.programs[rank]
    for index in own.stages:
        own.begin(program.of_stage(index))
    executor = own.executor(RankPrograms(plan=plan, programs={"whole": program}))
    parts = [own.make(program.of_stage(index)) for index in own.stages]
    for data in batches:
        executor.run("whole", parts, own.rows(data))
    return own.done()


def _error(run: Mapping[int, Trained], network: LinearNetwork, batches: Sequence[Tensor]) -> GradientError:
    """Return the worst error of a gradient tensor of this rank against one process with the same parameters.

    Collective: every stage tells its parameters.
    """
    plan = network.plan
    told: list[dict[int, list[Parameters]]] = [{} for _ in range(plan.num_ranks)]
    dist.all_gather_object(told, {stage: own.parameters for stage, own in run.items()})
    found = []
    for number, data in enumerate(batches):
        ours = {stage: own.gradients[number] for stage, own in run.items()}
        parameters = [told[stage.ranks[0]][index][number] for index, stage in enumerate(plan.stages)]
        answers = [
            (
                single_process_gradients(network, near, data),
                single_process_gradients(network, [in_double(each) for each in near], data.double()),
            )
            for near in starts_nearby(parameters)
        ]
        found.append(worst_error(ours, answers))
    return max(found, key=GradientError.excess)


def _has_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


if __name__ == "__main__":
    main()
