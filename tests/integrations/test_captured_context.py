"""Captured stages on context ranks: losses, gradients and files of one process, beside data and tensor ranks and stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpp_plugin.plan.costs.memory_formula import copies_of, cut_by_block, sharded_by_block
from gpp_plugin.runtime.tensor_ranks import (
    EXCHANGED,
    GRADIENT,
    GRADIENT_EXCHANGED,
    GRADIENT_PARTS,
    PARTS,
    RESULT,
)
from tests.integrations import async_jobs
from tests.integrations.engine_jobs import B, make_engine, part_of, steps
from tests.integrations.pipedream import reported
from tests.integrations.test_async import check_parameters, emulate
from tests.integrations.test_captured_tensor import (
    CLIPPING,
    alone,
    check_exactness,
    config,
    train_dropping,
    trained_cases,
)
from tests.models import build
from tests.ranks import run_kept_ranks
from tests.tiers import some


def plan_of(*stages: tuple[list[str], list[int], int]) -> dict[str, Any]:
    """Return the block of a plan: of each stage its modules, its ranks, and its context ranks."""
    keys = ("modules", "ranks", "context")
    return {"plan": {"stages": [dict(zip(keys, stage, strict=True)) for stage in stages]}}


def one_stage(ranks: int, context: int) -> dict[str, Any]:
    """Return the block of a plan of one stage."""
    return plan_of((["*"], list(range(ranks)), context))


def _case(name: str, ranks: int, block: dict[str, Any], *, zero: int = 0, clipping: float = 0.0,
          **more: Any) -> Any:  # fmt: skip
    return ranks, (name, {**block, **more}, {"zero": zero, "clipping": clipping})


FULL = {"recompute": "full"}

ALL_CASES = {
    "llama": _case("llama", 2, one_stage(2, 2), zero=1, clipping=CLIPPING),
    "gpt2": _case("gpt2", 2, one_stage(2, 2), memory=FULL),
    "clip": _case("clip", 2, one_stage(2, 2)),
    "t5": _case("t5", 2, one_stage(2, 2), clipping=CLIPPING),
    "llava": _case("llava", 2, one_stage(2, 2), zero=2),
    "gpt2, tied over stages of unlike sizes": _case(
        "gpt2", 3, plan_of((["transformer"], [0, 1], 2), (["*"], [2], 1)), zero=1, clipping=CLIPPING
    ),
    "llama, two data positions": _case("llama", 4, one_stage(4, 2), zero=3, clipping=CLIPPING),
    "gpt2, four context ranks": _case("gpt2", 4, one_stage(4, 4), zero=2),
    "t5, two stages": _case(
        "t5", 4, plan_of((["encoder"], [0, 1], 2), (["*"], [2, 3], 2)), clipping=CLIPPING, memory=FULL
    ),
    "gpt2, two tensor ranks": _case(
        "gpt2",
        4,
        {"stages": 1, "data_parallel": 1, "tensor_parallel": 2, "sequence_parallel": 2},
        zero=1,
        clipping=CLIPPING,
    ),
    "clip, two stages of unlike sizes": _case(
        "clip", 4, plan_of((["vision_model"], [0], 1), (["text_model"], [1, 2], 2), (["*"], [3], 1))
    ),
}
CASES = dict(some(ALL_CASES.items(), every=5))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    return trained_cases(CASES, tmp_path_factory.mktemp)


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_one_process(trained, case):
    _, (name, _, options) = CASES[case]
    check_exactness(trained[case], alone(name, options["clipping"]))


@pytest.mark.parametrize("case", CASES)
def test_files_and_evaluation_are_whole_and_the_same_on_all_ranks(trained, case):
    first = trained[case][0]
    for answer in trained[case]:
        assert answer["evaluated"] == first["evaluated"]
        for name, own in answer["held"].items():
            assert torch.equal(own, part_of(answer["exported"][name], answer["shards"].get(name))), name
        if answer["gathered"] is not None:
            assert all(torch.equal(answer["gathered"][n], whole) for n, whole in answer["exported"].items())


def go_on(directory: str, zero: int) -> dict[str, list[float]]:
    """Save on two context ranks; go on there, on two data positions, and from these on context ranks once more."""
    answers = {}
    for run, context, source, target in (
        ("first", 2, None, "one"),
        ("same", 2, "one", None),
        ("apart", 1, "one", "two"),
        ("back", 2, "two", None),
    ):
        model, make_batch = build("gpt2", layers=1)
        batches = [make_batch(B, seed) for seed in range(6)]
        given = config({**one_stage(2, context), "profile_dir": f"{directory}/profiles"}, zero=zero)
        engine = make_engine(model, batches[0], given)
        if source is None:
            steps(engine, batches[:2])
        else:
            engine.load_checkpoint(f"{directory}/{source}")
        if target is not None:
            engine.save_checkpoint(f"{directory}/{target}")
        answers[run] = steps(engine, batches[2:])
        engine.destroy()
    return answers


@pytest.mark.parametrize("zero", [0, 2])
def test_checkpoints_go_on_with_other_context_sizes(tmp_path, zero):
    for answer in run_kept_ranks(go_on, 2, str(tmp_path), zero):
        assert answer["same"] == answer["first"]
        assert answer["apart"] == pytest.approx(answer["first"], rel=1e-5)
        assert answer["back"] == pytest.approx(answer["first"], rel=1e-5)


def test_dropout_on_parts_repeats_bit_by_bit_and_when_forwards_run_again(tmp_path):
    """Hidden states drop at each rank's positions, attention in each rank's heads."""
    runs = {
        "once": (one_stage(2, 2), 1),
        "recomputed": ({**one_stage(2, 2), "memory": FULL}, 1),
        "other": (one_stage(2, 2), 2),
    }
    for answer in run_kept_ranks(train_dropping, 2, runs, str(tmp_path)):
        once = answer["once"]
        again = answer["recomputed"]
        assert again["losses"] == once["losses"]
        for held in ("gradients", "weights"):
            assert once[held] and again[held].keys() == once[held].keys()
            assert all(torch.equal(again[held][n], once[held][n]) for n in once[held])
        assert all(a != b for a, b in zip(answer["other"]["losses"], once["losses"], strict=True))


def test_asynchronous_losses_and_weights_are_those_of_the_emulation():
    # of the second stage's four ranks two have losses, and the others have the positions of the same samples
    block = plan_of((["vision_model", "visual_projection"], [0, 1], 2), (["*"], [2, 3, 4, 5], 2))
    config = async_jobs.async_config(
        mini_batch=16, unit=4, block={**block, "micro_batch_sizes": 8, "vertical_sync": False}
    )
    answers = run_kept_ranks(async_jobs.train, 6, "clip", 16, config, timeout_s=600)
    stages = answers[0]["stages"]
    emulation = emulate("clip", stages, mini_batch=16, micro=8, unit=4, vertical_sync=False)
    losses = [emulation.mini_batch(build("clip")[1](16, seed), 8) for seed in range(async_jobs.NUM_BATCHES)]
    emulation.flush()
    for answer in answers:
        assert answer["losses"] == pytest.approx(reported(losses, emulation.longest), abs=1e-6)
        assert answer["flushed"] == pytest.approx(losses[-1][-1], abs=1e-6)
    check_parameters(answers, emulation)


KINDS = {
    "forward_sum": RESULT,
    "backward_sum": GRADIENT,
    "forward_gather": PARTS,
    "backward_gather": GRADIENT_PARTS,
    "forward_exchange": EXCHANGED,
    "backward_exchange": GRADIENT_EXCHANGED,
}


def count_context(runs: dict[str, tuple[str, dict[str, Any]]], directory: str) -> dict[str, Any]:
    """Train each run, (model, block), on one mini-batch; the bytes that context ranks sent, and those of its costs."""
    answers = {}
    for run, (name, block) in runs.items():
        model, make_batch = build(name, layers=1)
        engine = make_engine(model, make_batch(B), config({**block, "profile_dir": f"{directory}/profiles"}))
        loss = steps(engine, [make_batch(B)])
        graph, plan = engine._rank_runner.reference.block_graph, engine._plan
        counted, planned = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0.0)
        for index in engine.rank_engine.indices:
            stage = plan.stages[index]
            sent = engine._source._job.links.of(stage, "context").sent_bytes
            shards = sharded_by_block(graph, stage.tensor)
            for own in cut_by_block(graph, stage.context).values():
                for kind, what in KINDS.items() if own.block in stage.blocks else ():
                    num_bytes, shared = (
                        getattr(own, f"{kind}_bytes"),
                        stage.tensor if own.block in shards else 1,
                    )
                    if what in (EXCHANGED, GRADIENT_EXCHANGED):
                        num_bytes += (copies_of(own, stage.context, shared) - 1) * own.group_bytes
                        num_bytes /= shared
                    planned[kind] += num_bytes * B / stage.degree / graph.num_samples
            for kind, what in KINDS.items():
                counted[kind] += sent.get(what, 0)
        grids = [tuple(stage.grid) for stage in plan.stages]
        answers[run] = {"grids": grids, "counted": counted, "planned": planned, "loss": loss}
        engine.destroy()
    return answers


def by_key(size: int, **more: Any) -> dict[str, Any]:
    """Return the block of one stage whose context size the key says."""
    return {"stages": 1, "data_parallel": 1, "sequence_parallel": size, **more}


SENT = {
    2: {name: (name, by_key(2)) for name in ("gpt2", "llama", "clip", "t5")},
    4: {
        "llama, fewer groups than ranks": ("llama", by_key(4)),
        "llama, groups that tensor ranks divide first": ("llama", by_key(2, tensor_parallel=2)),
        "gpt2, beside tensor ranks": ("gpt2", by_key(2, tensor_parallel=2)),
    },
}


@pytest.mark.parametrize("ranks", SENT)
def test_the_key_makes_context_ranks_that_send_what_is_planned(tmp_path, ranks):
    for answer in run_kept_ranks(count_context, ranks, SENT[ranks], str(tmp_path), timeout_s=600):
        for run, (_, block) in SENT[ranks].items():
            found = answer[run]
            assert found["grids"] == [(block["sequence_parallel"], block.get("tensor_parallel", 1))], run
            assert found["counted"] == pytest.approx(found["planned"], rel=0.02, abs=64), run
            assert found["planned"]["forward_exchange"] > 0, run
