"""Published runs: rows that are exact, and orders that are right by themselves."""

from __future__ import annotations

import pytest

from gpp_benchmarks.published._language_models import BAND, chain_us, gpt_rows
from gpp_benchmarks.published._optimus import Setting, Tower
from gpp_benchmarks.published._plans import (
    chain,
    interleaved_orders,
    longest_span_us,
    most_held,
    schedules_of,
    stage_of,
)
from gpp_benchmarks.published._rows import COSTED, GIVEN, count_within
from gpp_benchmarks.published._zero_bubble import RUNS, shortest_span_orders, zero_bubble_rows
from gpp_plugin.ir.schedule import TaskKind


def text(order):
    return " ".join(map(str, order))


def span_of(ranks, micro_batches, chunks):
    """Megatron's order on stages of 1 us forward and 2 us backward."""
    orders = interleaved_orders(ranks, micro_batches, chunks)
    stages = [stage_of(i, i % ranks, (1.0, 1.0, 1.0), in_flight=micro_batches) for i in range(ranks * chunks)]
    plan = chain(stages, micro_batches=micro_batches)
    return longest_span_us(plan, schedules_of(orders), orders=dict(enumerate(orders)))


def test_megatrons_interleaved_order():
    """The grid in the module's docstring, and the bubble of the paper: (p - 1) of m v."""
    assert [text(order) for order in interleaved_orders(2, 4, 2)] == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]
    for ranks, micro_batches, chunks in ((2, 4, 2), (4, 8, 2), (4, 8, 3)):
        assert span_of(ranks, micro_batches, chunks) == 3.0 * (micro_batches * chunks + ranks - 1)


def test_the_unsynchronised_order_has_no_bubble_where_all_tasks_take_as_long():
    orders = shortest_span_orders(4, 12, times=(1.0, 1.0, 1.0), message=0.0, limit=8, kept=0.5)
    assert [sum(task.kind is kind for task in orders[0]) for kind in TaskKind] == [12, 0, 12, 12]
    stages = [stage_of(i, i, (1.0, 1.0, 1.0), in_flight=12, schedule="zero_bubble") for i in range(4)]
    plan = chain(stages, micro_batches=12)
    assert longest_span_us(plan, schedules_of(orders)) == 36.0
    assert max(map(most_held, orders)) <= 12
    with pytest.raises(ValueError, match="0 micro-batches are too few for 4 stages"):
        shortest_span_orders(4, 12, times=(1.0, 1.0, 1.0), message=0.0, limit=0, kept=0.5)


@pytest.mark.parametrize("run_", [RUNS[0], RUNS[3]], ids=lambda run_: run_.case)
def test_rows_of_zero_bubble(run_):
    rows = {row.quantity: row for row in zero_bubble_rows((run_,))}
    assert all(row.is_within and row.known == GIVEN for row in rows.values())
    for schedule in ("1F1B", "ZB-1p", "ZB-2p"):
        assert round(rows[schedule].ours, 4) == rows[schedule].published
    assert rows["1F1B"].shorter < rows["1F1B"].ours
    # the published interleaved span is p messages shorter than the chain of 2pv - 2 messages
    interleaved = rows["1F1B-I"]
    assert interleaved.shorter < interleaved.published
    span = run_.work / (1.0 - interleaved.ours)
    assert round(run_.rate(span - run_.model.ranks * run_.message), 4) == interleaved.published


def test_an_encoder_on_all_ranks_is_never_worse_than_the_work_and_never_better_than_the_language_model():
    small = Setting(encoder=Tower(width=64, layers=4), language=Tower(width=64, layers=8), ranks=2, chunks=2)
    assert small.encoder_layer == 1.0 and small.encoder_work == 4.0
    assert small.partition() == [2.0, 2.0, 4.0, 4.0]
    alone, step = small.alone(4), small.optimus(4, gather=0.0, scatter=0.0)
    assert alone == pytest.approx(4 * 4 + 2)  # (m v + p - 1) of one chunk
    assert alone < step < small.balanced(4) < small.megatron(4)
    assert step >= 4 * (8 + 4) / 2
    # collectives hide the encoder, and take their time
    hidden = small.optimus(4, gather=10.0, scatter=10.0)
    assert small.alone(4, gather=10.0, scatter=10.0) == alone + 20.0 <= hidden < step + 20.0


def test_gpts_by_costs_alone_tasks_and_steps_apart():
    """Megatron-LM's 1.7B without a pipeline, and 22B of Korthikanti et al. on eight tensor ranks."""
    rows = list(gpt_rows(at_most=32))
    assert [(row.source, row.quantity) for row in rows] == [
        ("Megatron-LM", "tasks"),
        ("Megatron-LM", "step"),
        ("Megatron-LM", "efficiency of products"),
        ("Korthikanti", "tasks"),
        ("Korthikanti", "step"),
        ("Korthikanti", "step, selective"),
        ("Korthikanti", "efficiency of products"),
    ]
    # 137 TFLOP/s on each of 32 GPUs, of 96 B s l h^2 (1 + s / 6h + V / 16lh) operations
    assert rows[0].published == rows[1].published == pytest.approx(3.528, abs=1e-3)
    assert rows[0].ours < rows[1].ours, "gradients are summed over 32 ranks"
    assert rows[3].ours == rows[4].ours, "one group of tensor ranks sums inside its tasks"
    # of 22B all of 0.6 is used: products at 0.595 would make the step as long as the published one; and so of 1.7B
    assert [rows[i].published for i in (2, 6)] == pytest.approx([0.600, 0.595], abs=1e-3)
    for row in rows:
        assert abs(row.error) < BAND and (row.limit == BAND) == (row.known == COSTED)
    assert count_within(rows)["Megatron-LM: step"] == "1 of 1"


def test_a_chain_takes_its_work_and_the_filling_of_its_pipeline():
    assert chain_us([1.0] * 4, 4, 8) == 3.0 * (8 + 3)
    assert chain_us([0.5] * 8, 4, 8) == 3.0 * 8 + 1.5 * 3, "two chunks a rank fill in half the time"
    assert chain_us([1.0] * 2, 2, 4, backwards=[3.0, 3.0]) == 4.0 * 5
