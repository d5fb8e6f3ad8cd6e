"""The input of planners: model, costs, cluster, and what the options say; checked before any planner sees it.

It imports no planner, so that everything planners are made of may import it. Of a request that no plan fits, the
nearest that has one is found by planning (`nearest_that_fits`).

Source: this project
Tests: tests/plan/test_joined.py, tests/plan/test_plan_command.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gpp_plugin.config.key_names import name_of, place_of, setting_of
from gpp_plugin.errors import PlanError, PlanInfeasible, ProfileError
from gpp_plugin.ir.block_graph import GRANULARITIES, BlockGraph
from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.profile import Profile
from gpp_plugin.ir.samples import nearest_divisors
from gpp_plugin.ir.typed_leaves import MOST_COUNT

UNLIMITED = 1 << 62
"""More bytes than any device has: two of them still fit in 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Everything a planner may look at.

    Args:
        num_ranks: ranks to use; the first ``num_ranks`` devices of the cluster.
        mini_batch: samples of one optimizer step (B); ``loss_unit`` samples of one loss (u).
        num_stages: exactly that many stages, or None: the planner chooses. More than ranks: ranks hold several.
        granularity: of the graph's blocks, one of `GRANULARITIES`: finer ones are what errors may advise.
        micro_batch_sizes: stage or module-path prefix -> micro-batch size of the whole stage;
            ``*`` for all others; None where the planner chooses.
        schedule: ``1f1b`` or ``gpipe``.
        memory_limit_bytes: what one rank may use, where less than its device has.
        data_parallel: degree of every stage, or None: the planner chooses.
        zero_stage: 0 to 3; what the ranks of a stage share out among themselves.
        keep_units: every stage the user has not fixed computes one loss unit a rank at a time, as those
            that mix samples must; otherwise the planner chooses any size that divides the mini-batch.
        smallest_local_batch: fewest samples one rank may compute at a time (some models cannot be captured,
            or cannot train, on a single sample).
        max_k: largest k of kFkB the refining planners try.
        mode: ``sync`` or ``async``, as of `PipelinePlan`.
        memory_optimization: what a planner may use to fit: ``recompute``, ``swap``, both or neither.
        vertical_sync: as of `PipelinePlan`.
        virtual_stages: stages that every group of ranks holds (interleaving): 1, exactly that many, or None: as many
            as make the step shortest in simulation.
        colocate: stages of a branch may be placed on the ranks of others where that is shorter.
        tensor_parallel: tensor size of all stages whose blocks tensor ranks can divide; None: the planner chooses,
            stage by stage; a map from module paths to sizes: of stages with those blocks, 1 of all others.
        rank_order: all ranks in the order in which stages take them; None: by their numbers, or, where devices are of
            several speeds, the best of the orders that keep each kind together.
    """

    graph: BlockGraph
    profile: Profile
    cluster: Cluster
    num_ranks: int
    mini_batch: int
    loss_unit: int
    num_stages: int | None = None
    granularity: str = "layer"
    micro_batch_sizes: dict[str, int] | None = None
    schedule: str = "1f1b"
    memory_limit_bytes: int | None = None
    data_parallel: int | None = None
    zero_stage: int = 0
    keep_units: bool = False
    smallest_local_batch: int = 1
    max_k: int = 1
    mode: str = "sync"
    memory_optimization: tuple[str, ...] = ()
    vertical_sync: bool = False
    virtual_stages: int | None = 1
    colocate: bool = False
    rank_order: tuple[int, ...] | None = None
    tensor_parallel: int | dict[str, int] | None = 1

    @property
    def must_share_ranks(self) -> bool:
        """Return whether only plans whose ranks hold several stages are an answer."""
        return (self.virtual_stages or 1) > 1 or (self.num_stages or 1) * (
            self.data_parallel or 1
        ) > self.num_ranks

    @property
    def may_share_ranks(self) -> bool:
        """Return whether plans whose ranks hold several stages are wanted, or to be tried."""
        return self.must_share_ranks or self.virtual_stages is None or self.colocate


def rank_limit(request: PlanRequest, rank: int) -> int:
    """Return the bytes that ``rank`` may use."""
    limit = request.cluster.devices[rank].memory_bytes
    return limit if request.memory_limit_bytes is None else min(limit, request.memory_limit_bytes)


def one_stage_a_rank(request: PlanRequest) -> PlanRequest:
    """Return the request as planners take it, whose stages have ranks of their own."""
    if not request.may_share_ranks:
        return request
    # numbers of stages that are meant for shared ranks say nothing of a plan without
    stages = None if request.must_share_ranks or request.data_parallel is not None else request.num_stages
    tensor = 1 if request.must_share_ranks else request.tensor_parallel  # these have no tensor ranks
    return dataclasses.replace(
        request, num_stages=stages, virtual_stages=1, colocate=False, tensor_parallel=tensor
    )


def unlimited(request: PlanRequest) -> PlanRequest:
    """Return the request with all the memory in the world, and nothing to be done for it."""
    return dataclasses.replace(
        request,
        memory_limit_bytes=None,
        memory_optimization=(),
        cluster=request.cluster.with_memory(UNLIMITED),
    )


def check_request(request: PlanRequest) -> None:
    """Refuse what no planner could answer.

    Raises:
        PlanError: a value contradicts another one or the graph.
        PlanInfeasible: more stages than blocks or ranks.
    """
    # Once, here, so that planners may count on it. Samples divide twice: 48 in a mini-batch, 8 in a loss unit, 12 in
    # a stage's micro-batch pass (48 = 6 * 8 = 4 * 12); a unit of 10 or a micro-batch of 9 would leave a rest that no
    # task computes. 12 and 8 need not divide each other: a stage without coupled blocks does not see units.
    r = request
    num_blocks = len(r.graph.blocks)
    if num_blocks == 0:
        raise PlanError(f"model {r.graph.model!r} has no blocks to plan; capture it again")
    try:
        r.profile.check(block.name for block in r.graph.blocks)
    except ProfileError as error:
        raise PlanError(str(error)) from error
    if not 1 <= r.num_ranks <= r.cluster.num_devices:
        raise PlanError(
            f"{r.num_ranks} ranks are wanted and cluster {r.cluster.name!r} has {r.cluster.num_devices} "
            "devices; change the number of ranks or the cluster description"
        )
    counts = {"mini_batch": r.mini_batch, "loss_unit": r.loss_unit, "stages": r.num_stages}
    counts |= {"data_parallel": r.data_parallel, "virtual_stages": r.virtual_stages}
    for key, count in counts.items():
        if count is not None and not 1 <= count <= MOST_COUNT:
            raise PlanError(f"{place_of(key)}: {count} is not valid; give 1 to {MOST_COUNT}")
    if r.mini_batch % r.loss_unit:
        raise PlanError(
            f"the loss unit of {r.loss_unit} samples does not divide the mini-batch of {r.mini_batch}; "
            f"{name_of('mini_batch')} must be a multiple of {name_of('loss_unit')}"
        )
    if r.schedule not in ("1f1b", "gpipe"):
        raise PlanError(f"no schedule {r.schedule!r}; choose 1f1b or gpipe")
    if r.mode not in ("sync", "async"):
        raise PlanError(f"no mode {r.mode!r}; choose sync or async")
    most = 2 if r.mode == "async" else 3
    if not 0 <= r.zero_stage <= most:
        why = " in mode async, which needs several versions of the weights at a time" if most == 2 else ""
        raise PlanError(f"{place_of('zero_stage')}: {r.zero_stage} is not valid{why}; give 0 to {most}")
    if r.vertical_sync and r.mode == "sync":
        raise PlanError(
            f"{place_of('vertical_sync')}: has no meaning in mode sync, where all stages step at once; write "
            f"{setting_of('mode', 'async')} or remove it"
        )
    if r.mode == "async" and r.tensor_parallel not in (1, None):
        raise PlanError(
            f"{place_of('tensor_parallel')}: {r.tensor_parallel} is not possible in mode async, which is planned "
            f"without tensor ranks; write {setting_of('tensor_parallel', 1)}, or {setting_of('mode', 'sync')}"
        )
    unknown = set(r.memory_optimization) - {"recompute", "swap"}
    if unknown:
        raise PlanError(f"no memory optimization {sorted(unknown)[0]!r}; choose from recompute and swap")
    _check_counts(r, num_blocks)
    _check_sharing(r, num_blocks)
    for key, size in (r.micro_batch_sizes or {}).items():
        if size < 1 or r.mini_batch % size:
            raise PlanError(
                f"{place_of('micro_batch_sizes', *([] if key == '*' else [key]))}: {size} does not divide "
                f"{name_of('mini_batch')} {r.mini_batch}; give "
                f"{' or '.join(map(str, nearest_divisors(r.mini_batch, size)))}"
            )


def _check_counts(r: PlanRequest, num_blocks: int) -> None:
    """Refuse numbers of stages and degrees that ranks and blocks cannot have."""
    if r.num_stages is not None and r.num_stages > num_blocks:
        raise PlanInfeasible(
            f"{place_of('stages')}: {r.num_stages} is more than the {num_blocks} blocks of the model; "
            f"write {setting_of('stages', num_blocks)}{finer_advice(r, r.num_stages)}"
        )
    if r.data_parallel is not None and r.num_ranks % r.data_parallel:
        raise PlanInfeasible(
            f"{place_of('data_parallel')}: {r.data_parallel} does not divide {r.num_ranks} ranks; give "
            f"{' or '.join(map(str, nearest_divisors(r.num_ranks, r.data_parallel)))}"
        )
    if (
        r.data_parallel is not None
        and r.num_stages is not None
        and not r.may_share_ranks
        and r.tensor_parallel == 1
        and r.data_parallel * r.num_stages != r.num_ranks
    ):
        raise PlanInfeasible(
            f"{r.num_stages} stages of {r.data_parallel} ranks are {r.num_stages * r.data_parallel} ranks, "
            f"not {r.num_ranks}; change {name_of('stages')}, {name_of('data_parallel')} or the number of ranks"
        )


def finer_advice(r: PlanRequest, num_stages: int) -> str:
    """Return advice to cut the model finer, where that can make so many blocks; "" where it cannot."""
    finer = GRANULARITIES[GRANULARITIES.index(r.granularity) + 1 :]
    # graphs that are only described have no operators: what a finer one has is unknown
    most = sum(len(block.nodes) for block in r.graph.blocks) or num_stages
    if not finer or most < num_stages:
        return ""
    return "".join(f", or {setting_of('granularity', one)}" for one in finer)


def _check_sharing(r: PlanRequest, num_blocks: int) -> None:
    """Refuse virtual stages that ranks, blocks or the mode cannot have."""
    # With v stages on each of p groups of d ranks, N = p d, there are v p stages: at most all blocks, and as many as
    # are wanted. Without d any divisor of N may be meant; the fewest stages of a pipeline are then 2 v.
    virtual = r.virtual_stages
    if not r.may_share_ranks:
        return
    if r.must_share_ranks and r.tensor_parallel not in (1, None):
        raise PlanError(
            f"{place_of('tensor_parallel')}: {r.tensor_parallel} is not possible where ranks hold several stages; "
            f"write {setting_of('virtual_stages', 1)} and {setting_of('stages', r.num_ranks)} or less, or "
            f"{setting_of('tensor_parallel', 1)}"
        )
    if r.mode == "async":
        wrong = "virtual_stages" if virtual != 1 else "colocate" if r.colocate else "stages"
        raise PlanError(
            f"{place_of(wrong)}: mode async has one stage a rank; write {setting_of('virtual_stages', 1)}, "
            f"{setting_of('colocate', 'off')} and {setting_of('stages', r.num_ranks)} or less, or "
            f"{setting_of('mode', 'sync')}"
        )
    if virtual is None or virtual == 1:
        return
    degrees = [d for d in range(1, r.num_ranks + 1) if r.num_ranks % d == 0 and r.data_parallel in (None, d)]
    degrees = [d for d in degrees if d < r.num_ranks] or degrees  # one group alone is no pipeline
    counts = {virtual * (r.num_ranks // d): d for d in degrees}
    if r.num_stages is not None and r.num_stages not in counts:
        possible = " or ".join(str(count) for count in sorted(counts))
        raise PlanInfeasible(
            f"{place_of('stages')}: {r.num_stages} is not possible with {setting_of('virtual_stages', virtual)}, "
            f"which makes {possible} stages on {r.num_ranks} ranks; change {name_of('stages')}, "
            f"{name_of('virtual_stages')} or {name_of('data_parallel')}"
        )
    fewest = min(counts) if r.num_stages is None else r.num_stages
    if fewest > num_blocks:
        degree = "" if r.data_parallel is None else f" with {setting_of('data_parallel', r.data_parallel)}"
        raise PlanInfeasible(
            f"{place_of('virtual_stages')}: {virtual} on {r.num_ranks} ranks{degree} makes at least "
            f"{fewest} stages and the model has {num_blocks} blocks; write "
            f"{setting_of('virtual_stages', max(num_blocks * virtual // fewest, 1))}{finer_advice(r, fewest)}"
        )


# The configuration nearest to a request that no plan fits: found by planning, not by rule of thumb.
#
# One thing is changed at a time, in the order in which it costs the user least: ways to save memory, the samples
# a rank computes at a time, ZeRO, stages and ranks, and last the memory of a rank. What is suggested has a plan.


HasPlan = Callable[[PlanRequest], bool]

MORE_RANKS = (2,)
"""Times the requested ranks, that are tried."""
LIMIT_STEP = 1.02
MOST_STEPS = 4
NUM_BISECTIONS = 2
MOST_SHOWN = 3
LIMIT_DIGITS = 4


def nearest_that_fits(request: PlanRequest, has_plan: HasPlan, missing_bytes: int) -> str:
    """Return a clause with up to three changes that each make a plan fit, or that none does.

    Args:
        has_plan: plans a changed request.
        missing_bytes: of the worst rank of the plan nearest to fitting.
    """
    found: list[str] = []
    for change in _changes(request, has_plan):
        found.append(change)
        if len(found) == MOST_SHOWN - 1:
            break
    least = _least_limit(request, has_plan, missing_bytes)
    if least is not None:
        found.append(f"{least} bytes a rank ({setting_of('memory.limit_gb', float(limit_gb(least)))})")
    return f"nearest that fits: {', or '.join(found)}" if found else "nothing that was tried fits"


def limit_gb(num_bytes: int) -> str:
    """Return the ``memory.limit_gb`` that allows so many bytes: rounded up, for less would not fit."""
    step = 10 ** max(0, len(str(num_bytes)) - LIMIT_DIGITS)
    return f"{-(-num_bytes // step) * step / 1e9:.9f}".rstrip("0").rstrip(".")


def _changes(request: PlanRequest, has_plan: HasPlan) -> Iterator[str]:
    both = ("recompute", "swap")
    for ways in (("recompute",), both):
        more = tuple(dict.fromkeys((*request.memory_optimization, *ways)))
        if len(more) > len(request.memory_optimization) and has_plan(
            dataclasses.replace(request, memory_optimization=more)
        ):
            yield " and ".join(setting_of(f"memory.{way}", "auto") for way in more)
            break
    sizes = request.micro_batch_sizes or {}
    if "*" in sizes:
        size = _largest(
            sizes["*"], lambda n: has_plan(dataclasses.replace(request, micro_batch_sizes={**sizes, "*": n}))
        )
        if size is not None:
            yield setting_of("micro_batch_sizes", size)
    unit = request.loss_unit
    if request.keep_units or any(block.is_coupled for block in request.graph.blocks):
        size = _largest(unit, lambda n: has_plan(dataclasses.replace(request, loss_unit=n)))
        if size is not None:
            yield setting_of("loss_unit", size)
    most = 0 if request.num_ranks == 1 else 2 if request.mode == "async" else 3
    for stage in range(request.zero_stage + 1, most + 1):
        if has_plan(dataclasses.replace(request, zero_stage=stage)):
            yield setting_of("zero_stage", stage)
            break
    if request.num_stages is not None and has_plan(dataclasses.replace(request, num_stages=None)):
        yield "stages left to the planner"
    for factor in MORE_RANKS if request.num_stages is None else ():
        ranks = round(factor * request.num_ranks)
        if ranks > request.num_ranks and has_plan(with_ranks(request, ranks)):
            yield f"{ranks} ranks"
            break


def _largest(size: int, works: Callable[[int], bool]) -> int | None:
    """Return the largest proper divisor of ``size`` that works, or None; smaller ones work where larger do."""
    divisors = [n for n in range(1, size) if size % n == 0]
    if not divisors or not works(divisors[0]):
        return None
    low, high = 0, len(divisors)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if works(divisors[middle]) else (low, middle)
    return divisors[low]


def with_ranks(request: PlanRequest, num_ranks: int) -> PlanRequest:
    """Return the request for so many ranks, on devices like those there are."""
    devices = request.cluster.devices[: request.num_ranks]
    more = (devices * (num_ranks // len(devices) + 1))[:num_ranks]
    cluster = dataclasses.replace(request.cluster, devices=more)
    return dataclasses.replace(request, num_ranks=num_ranks, cluster=cluster)


def _with_limit(request: PlanRequest, limit: int) -> PlanRequest:
    devices = tuple(
        dataclasses.replace(device, memory_bytes=max(device.memory_bytes, limit))
        for device in request.cluster.devices
    )
    cluster = dataclasses.replace(request.cluster, devices=devices)
    return dataclasses.replace(request, cluster=cluster, memory_limit_bytes=limit)


def _least_limit(request: PlanRequest, has_plan: HasPlan, missing_bytes: int) -> int | None:
    """Return about the least memory of a rank with which there is a plan."""
    low = max(rank_limit(request, rank) for rank in range(request.num_ranks))
    high = low + missing_bytes
    for _ in range(MOST_STEPS):
        if has_plan(_with_limit(request, high)):
            break
        low, high = high, round(high * LIMIT_STEP)
    else:
        return None
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) // 2
        low, high = (low, middle) if has_plan(_with_limit(request, middle)) else (middle, high)
    return high
