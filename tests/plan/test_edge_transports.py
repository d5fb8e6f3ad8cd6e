"""Which edges go over P2PCommunicator: by what they carry, between how many ranks, in which micro-batches."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gpp_benchmarks._emulated_graphs import chain_links, emulated_plan
from gpp_plugin.errors import PlanError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.edge_transports import (
    choose_edge_transports,
    describe_edge_transports,
    note_edge_transports,
)
from tests.plan.graphs import with_stage


def pair(**options: Any) -> PipelinePlan:
    """Return two stages with one float tensor between them."""
    return emulated_plan("pair", [(0, 1)], num_micro_batches=6, samples=4, **options)


def with_dtype(dtype: str) -> PipelinePlan:
    plan = pair()
    return dataclasses.replace(plan, tensors=(dataclasses.replace(plan.tensors[0], dtype=dtype),))


def with_second_tensor() -> PipelinePlan:
    plan = pair()
    edge = dataclasses.replace(plan.edges[0], whole_tensors=("bias",))
    bias = dataclasses.replace(plan.tensors[0], name="bias")
    return dataclasses.replace(plan, edges=(edge,), tensors=(*plan.tensors, bias))


def with_tensor_parallel(stage: int) -> PipelinePlan:
    return with_stage(pair(degrees={0: 2, 1: 2}), stage, tensor=2)


CASES = {
    "one rank each": (pair(), ""),
    "other micro-batches": (pair(sizes={0: 2, 1: 12}), ""),
    "two ranks each": (pair(degrees={0: 2, 1: 2}), ""),
    "bf16": (with_dtype("bfloat16"), ""),
    "int64": (with_dtype("int64"), "x0 is int64"),
    "bool": (with_dtype("bool"), "x0 is bool"),
    "complex": (with_dtype("complex64"), "x0 is complex64"),
    "two tensors": (with_second_tensor(), "2 tensors a message"),
    "1 to 2": (pair(degrees={1: 2}), "1 to 2 ranks"),
    "2 to 1": (pair(degrees={0: 2}), "2 to 1 ranks"),
    "two ranks, other micro-batches": (
        pair(degrees={0: 2, 1: 2}, sizes={1: 8}),
        "micro-batches of 4 and 8 samples over 2 ranks",
    ),
    "tensor-parallel source": (with_tensor_parallel(0), "stage stage0 is tensor-parallel"),
    "tensor-parallel target": (with_tensor_parallel(1), "stage loss is tensor-parallel"),
}


@pytest.mark.parametrize("name", CASES)
def test_an_edge_is_chosen_by_its_tensors_and_ranks(name: str) -> None:
    plan, reason = CASES[name]
    (choice,) = choose_edge_transports(plan, "megatron")
    assert (choice.transport, choice.reason) == ("native" if reason else "megatron", reason)
    (choice,) = choose_edge_transports(plan, "native")
    assert (choice.transport, choice.reason) == ("native", "")


def test_an_edge_whose_tensor_is_not_described_is_refused() -> None:
    plan = dataclasses.replace(pair(), tensors=())
    with pytest.raises(PlanError, match="edge 0 sends 'x0', whose type and shape the plan does not hold"):
        choose_edge_transports(plan, "megatron")
    assert choose_edge_transports(plan, "native")[0].transport == "native"


def test_a_plan_notes_which_edges_are_native_once() -> None:
    plan = emulated_plan("mixed", chain_links(3), num_micro_batches=4, degrees={2: 2})
    chosen = choose_edge_transports(plan, "megatron")
    line = "1 of 2 edges over P2PCommunicator; native: stage1 -> loss (1 to 2 ranks)"
    assert describe_edge_transports(plan, chosen) == line
    noted = note_edge_transports(dataclasses.replace(plan, notes=("first",)), "megatron")
    assert noted.notes == ("first", f"p2p megatron: {line}")
    assert note_edge_transports(noted, "megatron").notes == noted.notes
    assert note_edge_transports(noted, "native").notes == ("first",)
