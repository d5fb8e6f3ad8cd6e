"""Zero Bubble's Tables 5 and 9: bubble rates of four orders, from the times that the paper gives.

Nothing is fitted: T_F, T_B, T_W and T_comm of each run are in the tables. A bubble rate is 1 - m (T_F + T_B + T_W) over
the longest span of a stage. The paper prints them to four decimals.

Source: Zero Bubble (arXiv 2401.10241), Tables 3, 5 and 9
Tests: tests/bench/test_published.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpp_benchmarks.published._interleaved import interleaved_orders
from gpp_benchmarks.published._plans import (
    chain,
    cluster_of,
    longest_span_us,
    schedules_of,
    stage_of,
)
from gpp_benchmarks.published._rows import GIVEN, Row
from gpp_benchmarks.published._unsynchronised import shortest_span_orders
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.schedule.build import build_schedules

SOURCE = "Zero Bubble"
INTERLEAVED_LIMIT = 0.005
SEQUENCE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model of Table 3, and the chunks a rank that its layers (22, 30, 46, 62; embedding and head one more) make."""

    name: str
    hidden: int
    heads: int
    ranks: int
    chunks: int

    @property
    def kept(self) -> float:
        """Return what a weight gradient still needs, of all that a forward keeps: 32sbh of 34sbh + 5bs²a (Table 1)."""
        return 32.0 / (34.0 + 5.0 * self.heads * SEQUENCE / self.hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One row: times of F, B and W of a micro-batch on a stage and of a message, in ms; bubble rates."""

    model: Model
    micro_batches: int
    times: tuple[float, float, float]
    message: float
    rates: dict[str, float]

    @property
    def case(self) -> str:
        """Return how the row is called."""
        return f"{self.model.name} p {self.model.ranks} m {self.micro_batches}"

    @property
    def work(self) -> float:
        """Return the time of one rank's tasks."""
        return self.micro_batches * sum(self.times)

    def rate(self, span: float) -> float:
        """Return the bubble rate of a span."""
        return 1.0 - self.work / span


_SMALL = Model(name="1.5B", hidden=2304, heads=24, ranks=8, chunks=3)
_MIDDLE = Model(name="6.2B", hidden=4096, heads=32, ranks=8, chunks=4)
_LARGE = Model(name="14.6B", hidden=5120, heads=40, ranks=16, chunks=3)
_LARGEST = Model(name="28.3B", hidden=6144, heads=48, ranks=32, chunks=2)
SCHEDULES = ("1F1B", "ZB-1p", "ZB-2p", "1F1B-I")
_TABLE = (
    (_SMALL, 24, (18.522, 18.086, 9.337), 0.601, (0.2431, 0.1585, 0.0433, 0.1055)),
    (_SMALL, 32, (18.513, 18.086, 9.331), 0.626, (0.1985, 0.1242, 0.0039, 0.0818)),
    (_SMALL, 64, (18.546, 18.097, 9.321), 0.762, (0.1240, 0.0674, 0.0026, 0.0443)),
    (_MIDDLE, 24, (29.718, 29.444, 19.927), 0.527, (0.2347, 0.1323, 0.0029, 0.0808)),
    (_MIDDLE, 32, (29.802, 29.428, 19.530), 0.577, (0.1898, 0.1045, 0.0022, 0.0628)),
    (_MIDDLE, 64, (29.935, 29.621, 19.388), 0.535, (0.1091, 0.0554, 0.0010, 0.0320)),
    (_LARGE, 48, (11.347, 11.248, 8.132), 0.377, (0.2552, 0.1397, 0.0066, 0.1104)),
    (_LARGE, 64, (11.307, 11.254, 8.101), 0.379, (0.2082, 0.1088, 0.0054, 0.0852)),
    (_LARGE, 128, (11.325, 11.308, 8.109), 0.378, (0.1251, 0.0576, 0.0028, 0.0445)),
    (_LARGEST, 96, (10.419, 10.207, 7.715), 0.408, (0.2646, 0.1421, 0.0038, 0.1493)),
    (_LARGEST, 128, (10.408, 10.204, 7.703), 0.408, (0.2168, 0.1106, 0.0029, 0.1164)),
    (_LARGEST, 256, (10.402, 10.248, 7.698), 0.460, (0.1352, 0.0594, 0.0018, 0.0624)),
)
RUNS = tuple(
    Run(
        model=model,
        micro_batches=m,
        times=times,
        message=message,
        rates=dict(zip(SCHEDULES, rates, strict=True)),
    )
    for model, m, times, message, rates in _TABLE
)
_WHY_INTERLEAVED = (
    "the published span is p messages shorter than Megatron's order has them one behind the other: with 2pv - 2 - p "
    "in place of 2pv - 2 messages all twelve rows agree to four decimals"
)
_WHY_TWICE = (
    "the longest span of a stage, as the paper's optimizer does not wait for all stages; ours does, so that this order "
    "is the benchmark's own and no schedule of a plan"
)


def zero_bubble_rows(runs: tuple[Run, ...] = RUNS) -> Iterator[Row]:
    """Yield four rows a run: 1F1B, ZB-1p, ZB-2p and interleaved 1F1B."""
    for run in runs:
        split = run.rate(_span(_chain(run, split=True), run))
        fewer = (split, "split backwards, no more held")
        usual = run.rate(_span(_chain(run), run))
        yield _row(run, "1F1B", usual, 0.0, shorter=fewer)
        granted = _chain(run, split=True, in_flight=run.model.ranks)
        yield _row(run, "ZB-1p", run.rate(_span(granted, run)), 0.0)
        yield _row(run, "ZB-2p", _twice(run), 0.0, why=_WHY_TWICE)
        rate, shorter = _interleaved(run)
        yield _row(run, "1F1B-I", rate, INTERLEAVED_LIMIT, shorter=shorter, why=_WHY_INTERLEAVED)


def _row(
    run: Run,
    schedule: str,
    ours: float,
    limit: float,
    *,
    shorter: tuple[float, str] | None = None,
    why: str = "",
) -> Row:
    rate, order = shorter if shorter and shorter[0] < ours - 5e-5 else (None, "")
    return Row(
        source=SOURCE,
        case=run.case,
        quantity=schedule,
        unit="rate",
        published=run.rates[schedule],
        ours=ours,
        known=GIVEN,
        limit=limit,
        shorter=rate,
        shorter_order=order,
        why=why,
    )


def _chain(run: Run, *, split: bool = False, in_flight: int | None = None) -> PipelinePlan:
    """Return equal stages under 1F1B, or with split backwards, each holding what 1F1B does or ``in_flight``."""
    forward, gradient, weight = run.times
    ranks = run.model.ranks
    return chain(
        [
            stage_of(
                index,
                index,
                forward_us=forward,
                input_us=gradient,
                weight_us=weight,
                in_flight=in_flight or ranks - index,
                schedule="zero_bubble" if split else "1f1b",
            )
            for index in range(ranks)
        ],
        micro_batches=run.micro_batches,
    )


def _span(plan: PipelinePlan, run: Run) -> float:
    cluster = cluster_of(run.model.ranks, run.message)
    return longest_span_us(plan, build_schedules(plan), cluster=cluster)


def _twice(run: Run) -> float:
    """Return the rate of the paper's automatic order, which holds twice as much as 1F1B on the first stage."""
    ranks = run.model.ranks
    orders = shortest_span_orders(
        ranks,
        run.micro_batches,
        times=run.times,
        message=run.message,
        limit=2 * ranks,
        kept=run.model.kept,
    )
    plan = _chain(run, split=True, in_flight=run.micro_batches)
    cluster = cluster_of(ranks, run.message)
    return run.rate(longest_span_us(plan, schedules_of(orders), cluster=cluster))


def _interleaved(run: Run) -> tuple[float, tuple[float, str]]:
    """Return the rate of Megatron's order, and of our scheduler's with split backwards at the same in-flight counts."""
    model = run.model
    orders = interleaved_orders(model.ranks, run.micro_batches, model.chunks)
    schedules = schedules_of(orders)
    forward, gradient, weight = (time / model.chunks for time in run.times)
    cluster = cluster_of(model.ranks, run.message)
    whole, split = (
        chain(
            [
                stage_of(
                    index,
                    index % model.ranks,
                    forward_us=forward,
                    input_us=gradient,
                    weight_us=weight,
                    in_flight=schedule.num_in_flight,
                    schedule=name,
                )
                for index, schedule in enumerate(schedules)
            ],
            micro_batches=run.micro_batches,
        )
        for name in ("1f1b", "zero_bubble")
    )
    usual = longest_span_us(whole, schedules, cluster=cluster, orders=dict(enumerate(orders)))
    shorter = longest_span_us(split, build_schedules(split), cluster=cluster)
    return run.rate(usual), (run.rate(shorter), "split backwards in chunks, no more held")
