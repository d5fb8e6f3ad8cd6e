"""Captured stages on tensor ranks: losses, gradients and files of one process, beside data-parallel ranks and stages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpp_plugin.plan.costs.memory_formula import boundary_bytes, expected_counts
from gpp_plugin.runtime.tensor_ranks import (
    GRADIENT,
    GRADIENT_PARTS,
    PARTS,
    RESULT,
)
from tests.integrations.engine_jobs import (
    B,
    U,
    config_of,
    make_engine,
    part_of,
    said_of,
    shards_of,
    steps,
    steps_and_gradients,
)
from tests.models import build
from tests.ranks import run_kept_ranks
from tests.reference import ReferenceRun, gradient_errors, train_reference
from tests.tiers import some

STEPS = 5


def config(block: dict[str, Any], *, zero: int = 0, clipping: float = 0.0) -> dict[str, Any]:
    return config_of(zero_optimization={"stage": zero}, gradient_clipping=clipping, block=block)


def train_all(cases: dict[str, Any], directory: str) -> dict[str, Any]:
    """Train every case: (model, block of the configuration, options of the rest)."""
    return {case: train_one(*given, f"{directory}/{case.replace(' ', '-')}") for case, given in cases.items()}


def train_one(name: str, block: dict[str, Any], options: dict[str, Any], directory: str) -> dict[str, Any]:
    """Train five steps, export, evaluate; the first step's gradients, and how they are cut."""
    model, make_batch = build(name, layers=1)
    batches = [make_batch(B, seed) for seed in range(STEPS)]
    block = {**block, "profile_dir": f"{directory}/../profiles"}  # every model is measured once
    engine = make_engine(model, batches[0], config(block, **options))
    losses, gradients = steps_and_gradients(engine, batches)
    answer = {
        "losses": losses,
        "gradients": gradients,
        "shards": shards_of(engine),
        "tensor": [stage.tensor for stage in engine._plan.stages],
        "memory": engine.memory_report(),
        "planned": expected_counts(engine.plan, *engine.rank_engine.indices),
    }
    answer["evaluated"] = {n: float(engine.eval_batch(iter([make_batch(n, n)]))) for n in (B, 5)}
    engine.save_pretrained(f"{directory}/export")
    answer["exported"] = exported(f"{directory}/export", model)
    answer["gathered"] = engine.gather_state_dict()
    answer["held"] = {n: value.clone() for n, value in engine.module_state_dict().items()}
    engine.destroy()
    return answer


def exported(directory: str, model: Any) -> dict[str, Tensor]:
    """Return an export as HuggingFace reads it, by all names."""
    return dict(type(model).from_pretrained(directory).state_dict())


# ---- more than training as it is ----------------------------------------------------------------------------

TWO = {"stages": 1, "data_parallel": 1, "tensor_parallel": 2}


def count_sums(name: str, block: dict[str, Any], directory: str) -> dict[str, Any]:
    """Train on one mini-batch; the bytes that the ranks summed, and those that the graph says."""
    model, make_batch = build(name, layers=1)
    engine = make_engine(model, make_batch(B), config({**block, "profile_dir": f"{directory}/profiles"}))
    steps(engine, [make_batch(B)])
    graph = engine._rank_runner.reference.block_graph
    answer = dict.fromkeys(
        (
            f"{planned}{way}{kind}"
            for planned in ("", "planned ")
            for way in ("forward", "backward")
            for kind in ("", " parts")
        ),
        0.0,
    )
    for index in engine.rank_engine.indices:
        stage = engine._plan.stages[index]
        sent = engine._source._job.links.of(stage).sent_bytes
        answer["forward"] += sent.get(RESULT, 0)
        answer["backward"] += sent.get(GRADIENT, 0)
        answer["forward parts"] += sent.get(PARTS, 0)
        answer["backward parts"] += sent.get(GRADIENT_PARTS, 0)
        share = B / stage.degree / graph.num_samples
        for own in graph.sharding:
            if own.block in stage.blocks and stage.tensor in own.degrees:
                answer["planned forward"] += own.forward_sum_bytes * share
                answer["planned backward"] += own.backward_sum_bytes * share
                answer["planned forward parts"] += own.forward_gather_bytes * share
                answer["planned backward parts"] += own.backward_gather_bytes * share
        leaving, entering = boundary_bytes(graph, stage.blocks, stage.tensor)
        answer["planned forward parts"] += sum(leaving) * share
        answer["planned backward parts"] += sum(entering) * share
    engine.destroy()
    return answer


def go_on(directory: str) -> dict[str, list[float]]:
    """Save on two tensor ranks; go on there, on two data positions, and from these on tensor ranks once more."""
    whole = {"stages": 1, "data_parallel": 2, "tensor_parallel": 1}
    answers = {}
    for run, block, source, target in (
        ("first", TWO, None, "one"),
        ("same", TWO, "one", None),
        ("whole", whole, "one", "two"),
        ("back", TWO, "two", None),
    ):
        model, make_batch = build("gpt2", layers=1)
        batches = [make_batch(B, seed) for seed in range(6)]
        given = config({**block, "profile_dir": f"{directory}/profiles"}, zero=1)
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


def train_dropping(runs: dict[str, tuple[dict[str, Any], int]], directory: str) -> dict[str, Any]:
    """Train each run, (block, seed), on the same mini-batches; its losses, gradients and weights."""
    found = {}
    for run, (block, seed) in runs.items():
        model, make_batch = build("gpt2", layers=1, dropout=0.2)
        torch.manual_seed(seed)
        batches = [make_batch(B, of) for of in range(2)]
        engine = make_engine(model, batches[0], config({**block, "profile_dir": f"{directory}/profiles"}))
        losses, gradients = steps_and_gradients(engine, batches)
        weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        found[run] = {"losses": losses, "gradients": gradients, "weights": weights}
        engine.destroy()
    return found


class Pair(nn.Module):
    def __init__(self, *, sums: bool) -> None:
        super().__init__()
        self.up, self.down, self.sums = nn.Linear(6, 8), nn.Linear(8, 6), sums

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inner = torch.tanh(self.up(x))
        if self.sums:
            inner = inner.cumsum(-1)
        return self.down(inner), inner


class Inside(nn.Module):
    """Yields what is made between two linear operators, when it is asked for."""

    def __init__(self, *, sums: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.pair = Pair(sums=sums)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outer, inner = self.pair(x)
        return {"loss": ((outer - labels) ** 2).mean(), "inner": inner}


def inside_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {key: torch.randn(B, 6, generator=generator) for key in ("x", "labels")}


def evaluate_inside(directory: str) -> dict[str, Any]:
    """Ask for a tensor of which each rank has a part in training; and for tensor ranks where nothing is shared out."""
    engine = make_engine(Inside(), inside_batch(), config({**TWO, "profile_dir": f"{directory}/profiles"}))
    held = {name: tuple(p.shape) for name, p in engine.module.named_parameters()}
    loss, inner = engine.eval_batch(iter([inside_batch()]), return_logits=True, outputs=("inner",))
    trained = steps(engine, [inside_batch()] * 2)
    engine.destroy()
    refused = said_of(lambda: make_engine(Inside(sums=True), inside_batch(), config(TWO)))
    return {"held": held, "loss": float(loss), "inner": inner, "trained": trained, "refused": refused}


CLIPPING = 0.5
FULL = {"recompute": "full"}
UNLIKE = {"stages": 2, "data_parallel": 1, "tensor_parallel": {"transformer.wte": 2, "transformer.h.0": 2}}
"""Both stages hold the embedding, one on two tensor ranks and one on a single one."""

LISTED = {"stages": 2, "tensor_parallel": {"transformer.h.0": 2}}
"""The embedding, or the head, goes with the layer; whichever does not has one rank."""

BRANCHES = {"stages": 2, "data_parallel": 1, "tensor_parallel": {"vision_model": 4, "text_model": 2}}


def _case(name: str, ranks: int, *, stages: int = 1, tensor: int = 2, zero: int = 0, clipping: float = 0.0,
          memory: dict[str, Any] | None = None, schedule: str = "auto") -> Any:  # fmt: skip
    block: dict[str, Any] = {"stages": stages, "tensor_parallel": tensor, "schedule": schedule}
    block["data_parallel"] = ranks // stages // tensor
    if memory:
        block["memory"] = memory
    return ranks, (name, block, {"zero": zero, "clipping": clipping})


ALL_CASES = {
    "llama": _case("llama", 2, zero=1, clipping=CLIPPING),
    "gpt2": _case("gpt2", 2, memory=FULL),
    "clip": _case("clip", 2),
    "llava": _case("llava", 2, zero=1),
    "t5": _case("t5", 2, clipping=CLIPPING),
    "llama, two data positions": _case("llama", 4, zero=1, clipping=CLIPPING, memory=FULL),
    "clip, two data positions": _case("clip", 4, zero=1),
    "gpt2, four tensor ranks": _case("gpt2", 4, tensor=4),
    "t5, two stages": _case("t5", 4, stages=2, clipping=CLIPPING),
    "llava, two stages": _case("llava", 4, stages=2, zero=1, memory=FULL),
    "llama, weights in parts twice": _case("llama", 4, zero=3, clipping=CLIPPING),
    "gpt2, backwards in two parts": _case("gpt2", 4, stages=2, schedule="zero_bubble"),
    "gpt2, one stage of two": (3, ("gpt2", UNLIKE, {"zero": 1, "clipping": CLIPPING})),
    "gpt2, one layer listed": (3, ("gpt2", LISTED, {"clipping": CLIPPING})),
    "clip, four tensor ranks": _case("clip", 4, tensor=4),
    "clip, four and two tensor ranks": (6, ("clip", BRANCHES, {"zero": 1, "clipping": 0.0})),
    "t5, four tensor ranks": _case("t5", 4, tensor=4, clipping=CLIPPING, memory=FULL),
    "gpt2, three stages": _case("gpt2", 6, stages=3, zero=1, clipping=CLIPPING),
    "llama, gradients in parts twice": _case("llama", 4, zero=2, clipping=CLIPPING),
}
CASES = dict(some(ALL_CASES.items(), every=6))


class ClippedAdamW(torch.optim.AdamW):
    """AdamW that clips as the engine does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, CLIPPING)
        return super().step(closure)


@functools.cache
def alone(name: str, clipping: float) -> ReferenceRun:
    model, make_batch = build(name, layers=1)
    make = ClippedAdamW if clipping else torch.optim.AdamW
    batches = [make_batch(B, seed) for seed in range(STEPS)]
    return train_reference(
        model, batches, unit=U, make_optimizer=lambda ps: make(ps, lr=1e-3, weight_decay=0.01)
    )


def trained_cases(
    cases: dict[str, Any], make_directory: Callable[[str], Any]
) -> dict[str, list[dict[str, Any]]]:
    """Train cases on as many ranks as each has; return what every rank of a case answers."""
    found = {}
    for ranks in sorted({on for on, _ in cases.values()}):
        own = {case: given for case, (on, given) in cases.items() if on == ranks}
        directory = str(make_directory(f"ranks{ranks}"))
        answers = run_kept_ranks(train_all, ranks, own, directory, timeout_s=600)
        found |= {case: [answer[case] for answer in answers] for case in own}
    return found


def check_exactness(answers: list[dict[str, Any]], reference: ReferenceRun) -> None:
    """Hold losses and first gradients of all ranks, parts of them too, against one process; together they have all."""
    held: set[str] = set()
    for answer in answers:
        assert answer["losses"][0] == pytest.approx(reference.losses[0], rel=1e-6)
        assert answer["losses"] == pytest.approx(reference.losses, rel=1e-5)
        wanted = {n: part_of(reference.gradients[n], answer["shards"].get(n)) for n in answer["gradients"]}
        errors = gradient_errors(answer["gradients"], wanted)
        # a softmax is the same whatever is added to all keys: the gradient of their bias is rounding alone
        rounding = {name for name in errors if name.endswith("k_proj.bias")}
        assert max(error for name, error in errors.items() if name not in rounding) < 2e-6
        assert all(errors[name] < 1e-5 for name in rounding)
        held |= set(answer["gradients"])
    assert held == set(reference.gradients)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    return trained_cases(CASES, tmp_path_factory.mktemp)


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_one_process(trained, case):
    _, (name, _, options) = CASES[case]
    assert any(answer["shards"] for answer in trained[case])
    assert all(max(answer["tensor"]) == (4 if "four" in case else 2) for answer in trained[case])
    check_exactness(trained[case], alone(name, options["clipping"]))


KEPT = [case for case, (_, (_, block, _)) in CASES.items() if "four" not in case and "memory" not in block]
"""Four ranks have unlike parts of five positions; what is received is kept whole where forwards run again."""


@pytest.mark.parametrize("case", KEPT)
def test_what_is_kept_for_backward_is_what_is_planned(trained, case):
    """Norms and residuals at a rank's positions, what a layer before makes too; what several read whole is kept whole."""
    for rank, answer in enumerate(trained[case]):
        counts, planned = answer["memory"].ranks[rank].counts, answer["planned"]
        assert counts is not None and planned is not None
        for field in ("held_bytes", "peak_held_bytes"):
            most = getattr(planned, field)
            assert 0.9 * most < getattr(counts, field) < 1.02 * most + 1024, field


@pytest.mark.parametrize("case", CASES)
def test_exports_are_the_trained_weights_whole(trained, case):
    for answer in trained[case]:
        exported: dict[str, Tensor] = answer["exported"]
        for name, own in answer["held"].items():
            whole = exported[name]
            assert torch.equal(own, part_of(whole, answer["shards"].get(name))), name
        if answer["gathered"] is not None:
            assert all(torch.equal(answer["gathered"][n], exported[n]) for n in exported)


@pytest.mark.parametrize("case", CASES)
def test_evaluation_is_the_same_on_all_ranks(trained, case):
    first, *others = (answer["evaluated"] for answer in trained[case])
    assert all(other == first for other in others)


SUMMED = [
    ("llama", 2, TWO),
    ("t5", 2, TWO),
    ("clip", 4, {"stages": 2, "data_parallel": 1, "tensor_parallel": 2}),
]


@pytest.mark.parametrize(("name", "ranks", "block"), SUMMED)
def test_bytes_that_are_summed_are_those_of_the_graph(name, ranks, block, tmp_path):
    for answer in run_kept_ranks(count_sums, ranks, name, block, str(tmp_path)):
        for way in ("forward", "backward", "forward parts", "backward parts"):
            assert answer[way] == answer[f"planned {way}"], (way, answer)
        assert answer["forward parts"] > 0 and answer["backward parts"] > 0


def test_checkpoints_are_cut_anew_for_other_tensor_sizes(tmp_path):
    for answer in run_kept_ranks(go_on, 2, str(tmp_path)):
        assert answer["same"] == answer["first"]
        assert answer["whole"] == pytest.approx(answer["first"], rel=1e-5)
        assert answer["back"] == pytest.approx(answer["first"], rel=1e-5)


def test_dropout_on_parts_repeats_bit_by_bit_and_when_forwards_run_again(tmp_path):
    """Residuals and the embedding drop at each rank's positions, attention in each rank's heads."""
    runs = {
        "once": (TWO, 1),
        "again": (TWO, 1),
        "recomputed": ({**TWO, "memory": FULL}, 1),
        "other": (TWO, 2),
    }
    for answer in run_kept_ranks(train_dropping, 2, runs, str(tmp_path)):
        once = answer["once"]
        for run in ("again", "recomputed"):
            assert answer[run]["losses"] == once["losses"]
            for held in ("gradients", "weights"):
                assert once[held] and answer[run][held].keys() == once[held].keys()
                assert all(torch.equal(answer[run][held][n], once[held][n]) for n in once[held])
        assert all(a != b for a, b in zip(answer["other"]["losses"], once["losses"], strict=True))


def test_evaluation_has_what_lies_inside_of_a_region_and_what_cannot_be_shared_out_is_refused(tmp_path):
    model, batch = Inside(), inside_batch()
    wanted = model(**batch)
    reference = train_reference(model, [batch] * 2, unit=U)
    for answer in run_kept_ranks(evaluate_inside, 2, str(tmp_path)):
        assert answer["held"]["pair.up.weight"] == (4, 6)
        assert answer["loss"] == pytest.approx(float(wanted["loss"]), rel=1e-6)
        assert torch.allclose(answer["inner"], wanted["inner"].detach(), rtol=1e-6)
        assert answer["trained"] == pytest.approx(reference.losses, rel=1e-5)
        assert "aten.cumsum.default" in answer["refused"] and "tensor_parallel" in answer["refused"]
