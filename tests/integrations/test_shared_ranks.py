"""HuggingFace models on ranks that hold several stages, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.integrations.engine_jobs import (
    B,
    U,
    adamw,
    check_training,
    clipping,
    config_of,
    make_engine,
    steps,
    steps_and_gradients,
)
from tests.models import build
from tests.ranks import run_kept_ranks
from tests.reference import loss_of, train_reference, units_of

STEPS = 5
SAVED_AFTER = 3

GPT2 = [["transformer.wte", "transformer.h.0"], ["transformer.h.1"], ["transformer.h.2"], ["*"]]
CLIP = [
    ["vision_model", "visual_projection"],
    ["text_model.embeddings", "text_model.encoder.layers.0"],
    ["*"],
]
LLAVA = [
    ["model.vision_tower", "model.multi_modal_projector"],
    ["model", "model.language_model.embed_tokens", "model.language_model.layers.0"],
    ["model.language_model.layers.1", "model.language_model.norm", "*"],
]
T5 = [["encoder"], ["decoder.embed_tokens", "decoder.block.0"], ["*"]]

PLACED: dict[str, tuple[str, list[list[str]], list[list[int]]]] = {
    "gpt2, interleaved": ("gpt2", GPT2, [[0], [1], [0], [1]]),
    "gpt2, in a V": ("gpt2", GPT2, [[0], [1], [1], [0]]),
    "clip on two ranks": ("clip", CLIP, [[0, 1], [0], [1]]),
    "t5, the encoder on the decoder's ranks": ("t5", T5, [[0, 1], [0], [1]]),
    "llava, the tower on all ranks": ("llava", LLAVA, [[0, 1, 2, 3], [0, 1], [2, 3]]),
}
"""Model, the modules of each stage, and the ranks of each."""
LAYERS = {"gpt2": 4}


def model_of(case: str, **given: Any) -> Any:
    name = PLACED[case][0]
    return build(name, layers=LAYERS.get(name, 2), **given)


def config(
    case: str, zero: int, *, clipping: float = 0.0, memory: dict[str, Any] | None = None
) -> dict[str, Any]:
    _, modules, ranks = PLACED[case]
    stages = [{"modules": m, "ranks": r} for m, r in zip(modules, ranks, strict=True)]
    block: dict[str, Any] = {"plan": {"stages": stages}}
    if memory:
        block["memory"] = memory
    return config_of(zero_optimization={"stage": zero}, gradient_clipping=clipping, block=block)


def train(case: str, zero: int, options: dict[str, Any], directory: str) -> dict[str, Any]:
    """Train five steps, with a checkpoint on the way; go on from it anew; evaluate and export."""
    model, make_batch = model_of(case)
    batches = [make_batch(B, seed) for seed in range(STEPS)]
    engine = make_engine(model, batches[0], config(case, zero, **options))
    losses, gradients = steps_and_gradients(engine, batches[:1])
    norm = engine.get_global_grad_norm()
    losses += steps(engine, batches[1:SAVED_AFTER])
    engine.save_checkpoint(f"{directory}/checkpoint", client_state={"epoch": 7})
    losses += steps(engine, batches[SAVED_AFTER:])
    evaluated = {n: float(engine.eval_batch(iter([make_batch(n, n)]))) for n in (B, 5)}
    engine.save_pretrained(f"{directory}/export")
    report = engine.memory_report().ranks[engine.global_rank]
    answer = {
        "losses": losses,
        "gradients": gradients,
        "norm": norm,
        "evaluated": evaluated,
        "stages": engine.rank_engine.indices,
        "is": (engine.stage_name, engine.is_first_stage(), engine.is_last_stage()),
        "names": sorted(dict(engine.module.named_parameters())),
        "state": sorted(engine.module_state_dict()),
        "rates": engine.get_lr(),
        "groups": len(engine.optimizer.param_groups),
        "memory": (report.stage, report.held.weights, report.measured_peak_bytes),
        "steps": (engine.global_steps, engine.global_samples),
        "gathered": engine.gather_state_dict(),
    }
    engine.destroy()
    other = make_engine(model_of(case, seed=5)[0], batches[0], config(case, zero, **options))
    _, client = other.load_checkpoint(f"{directory}/checkpoint")
    answer["resumed"] = steps(other, batches[SAVED_AFTER:])
    answer["client"] = client
    resumed = other.gather_state_dict()
    answer["is resumed bit for bit"] = resumed is None or all(
        bool((value == resumed[name]).all()) for name, value in answer["gathered"].items()
    )
    other.destroy()
    return answer


def load() -> dict[str, list[float]]:
    """Train on a dataset that the engine loads, on ranks of several stages and on ranks of one."""
    import deepspeed

    _, make_batch = build("gpt2", layers=4)
    whole = make_batch(3 * B, 0)
    dataset = [{key: value[row] for key, value in whole.items()} for row in range(3 * B)]
    on_both = [[0, 1], [0], [1], [0, 1]]
    stages = [{"modules": m, "ranks": r} for m, r in zip(GPT2, on_both, strict=True)]
    answers = {}
    for name, block in (("shared", {"plan": {"stages": stages}}), ("alone", {"stages": 2})):
        engine, optimizer, _, scheduler = deepspeed.initialize(
            model=build("gpt2", layers=4)[0],
            config=config_of(
                block=block,
                scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 2e-3, "warmup_num_steps": 3}},
            ),
            training_data=dataset,
        )
        answers[name] = [float(engine.train_batch()) for _ in range(4)]
        answers[f"{name} rates"] = [group["lr"] for group in optimizer.param_groups] + scheduler.get_last_lr()
        engine.destroy()
    return answers


# ---- stages by hand ------------------------------------------------------------------------------------------

WIDTH = 6


class Tower(nn.Module):
    """Two layers; the first of them is what a tower may share with the head."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"hidden": self.out(torch.tanh(self.layer(x)))}


class Head(nn.Module):
    """Compares what two towers found with a target."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Tower(1).layer

    def forward(self, left: Tensor, right: Tensor, target: Tensor) -> Tensor:
        return ((self.layer(left) * right - target) ** 2).mean()


class TowersAlone(nn.Module):
    """The graph of `build_towers` in one process."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = Tower(1), Tower(2), Head()
        self.head.layer.weight = self.left.layer.weight

    def forward(self, x: Tensor, y: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self.head(self.left(x)["hidden"], self.right(y)["hidden"], target)
        return loss


def towers_batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(B, WIDTH, generator=generator) for key in ("x", "y", "target")}


def build_towers() -> Any:
    """A tower on both ranks, a captured one on the first, and on the second a head that shares a weight with a tower."""
    import gpp_plugin

    graph = gpp_plugin.StageGraph("towers")
    graph.stage("left", lambda: Tower(1), inputs={"x": "x"}, outputs=["hidden"], ranks=[0, 1])
    graph.capture("right", Tower(2), inputs={"x": "y"}, outputs=["hidden"], ranks=[0], stages=1)
    graph.stage(
        "head",
        lambda: Head(),
        inputs={"left": "left.hidden", "right": "right.hidden", "target": "target"},
        outputs=["loss"],
        ranks=[1],
    )
    graph.tie("left.layer.weight", "head.layer.weight")
    return graph


def train_towers(directory: str) -> dict[str, Any]:
    """Train a graph of stages on the same ranks, evaluate, save, and go on from the checkpoint."""
    settings = config_of(zero_optimization={"stage": 1}, gradient_clipping=0.1)
    batches = [towers_batch(seed) for seed in range(STEPS)]
    engine = make_engine(build_towers(), batches[0], settings)
    losses = steps(engine, batches[:SAVED_AFTER])
    engine.save_checkpoint(f"{directory}/checkpoint")
    losses += steps(engine, batches[SAVED_AFTER:])
    engine.save_pretrained(f"{directory}/export")
    answer = {
        "losses": losses,
        "after": engine.gather_state_dict(),
        "evaluated": float(engine.eval_batch(iter([towers_batch(9)]))),
        "stages": len(engine.rank_engine.stages),
    }
    engine.destroy()
    other = make_engine(build_towers(), batches[0], settings)
    steps(other, [towers_batch(7)])
    other.load_checkpoint(f"{directory}/checkpoint")
    answer["resumed"] = steps(other, batches[SAVED_AFTER:])
    other.destroy()
    return answer


CASES: list[tuple[str, int, int, dict[str, Any]]] = [
    ("gpt2, interleaved", 2, 1, {"clipping": 0.05}),
    ("gpt2, in a V", 2, 0, {"memory": {"recompute": "full"}}),
    ("clip on two ranks", 2, 2, {"clipping": 0.05}),
    ("t5, the encoder on the decoder's ranks", 2, 1, {"memory": {"recompute": "full"}}),
    ("llava, the tower on all ranks", 4, 1, {"clipping": 0.05}),
]


@pytest.mark.parametrize(("case", "num_ranks", "zero", "options"), CASES)
def test_a_rank_of_several_stages_trains_as_one_process(
    case: str, num_ranks: int, zero: int, options: dict[str, Any], tmp_path: Path
) -> None:
    answers = run_kept_ranks(train, num_ranks, case, zero, options, str(tmp_path), timeout_s=240)
    model, make_batch = model_of(case)
    norms: list[float] = []
    reference = train_reference(
        model,
        [make_batch(B, seed) for seed in range(STEPS)],
        unit=U,
        make_optimizer=clipping(adamw, options.get("clipping", 0.0), norms),
    )
    assert any(len(answer["stages"]) > 1 for answer in answers)
    check_training(answers, reference, most=2e-6)
    for answer in answers:
        assert answer["losses"][0] == pytest.approx(reference.losses[0], rel=1e-6)
        assert answer["norm"] == pytest.approx(norms[0], rel=1e-5)
        assert answer["resumed"] == answer["losses"][SAVED_AFTER:]
        assert answer["is resumed bit for bit"] and answer["client"] == {"epoch": 7}
        assert answer["steps"] == (STEPS, STEPS * B)
        assert set(answer["rates"]) == {1e-3} and len(answer["rates"]) == answer["groups"]
        assert set(answer["names"]) <= set(answer["state"])
        stage, weights, peak = answer["memory"]
        assert stage == answer["is"][0] and peak > 2 * weights > 0
    assert answers[0]["is"][1] and answers[-1 if "V" not in case else 0]["is"][2]
    # Adam makes steps of the rounding of a gradient that is zero (of a bias before a softmax)
    sizes = {name: float(gradient.norm()) for name, gradient in reference.gradients.items()}
    moved = [name for name, own in sizes.items() if own > 1e-4 * max(sizes.values())]
    check_files(reference.model, moved, answers, tmp_path / "export")
    check_evaluation(case, answers)


def check_files(model: Any, moved: list[str], answers: list[dict[str, Any]], directory: Path) -> None:
    reloaded = type(model).from_pretrained(directory).state_dict()
    state = answers[0]["gathered"]
    assert all(torch.equal(reloaded[name], value) for name, value in state.items() if name in reloaded)
    assert reloaded.keys() <= state.keys()
    trained = dict(model.named_parameters())
    for name in moved:
        assert torch.allclose(state[name], trained[name].detach(), rtol=0, atol=2e-4), name


def check_evaluation(case: str, answers: list[dict[str, Any]]) -> None:
    model, make_batch = model_of(case)
    model.load_state_dict(answers[0]["gathered"])
    model.eval()
    with torch.no_grad():
        for size, loss in answers[0]["evaluated"].items():
            parts = units_of(make_batch(size, size), U)
            total = sum(float(loss_of(model(**p))) * p["input_ids"].shape[0] for p in parts)
            assert loss == pytest.approx(total / size, rel=1e-5), size
    assert all(answer["evaluated"] == answers[0]["evaluated"] for answer in answers)


def test_a_rank_of_several_stages_loads_what_all_of_them_read() -> None:
    for answer in run_kept_ranks(load, 2):
        assert answer["shared"] == pytest.approx(answer["alone"], rel=1e-5)
        assert len(set(answer["shared rates"])) == 1 and set(answer["shared rates"]) == set(
            answer["alone rates"]
        )


def test_stages_by_hand_on_the_same_ranks_train_as_one_process(tmp_path: Path) -> None:
    answers = run_kept_ranks(train_towers, 2, str(tmp_path))
    alone, batches = TowersAlone(), [towers_batch(seed) for seed in range(STEPS)]
    reference = train_reference(alone, batches, unit=B, make_optimizer=clipping(adamw, 0.1, []))
    with torch.no_grad():
        evaluated = float(reference.model(**towers_batch(9)))
    for answer in answers:
        assert answer["losses"] == pytest.approx(reference.losses, rel=1e-5)
        assert answer["losses"][0] == pytest.approx(reference.losses[0], rel=1e-6)
        assert answer["resumed"] == answer["losses"][SAVED_AFTER:]
        assert answer["evaluated"] == pytest.approx(evaluated, rel=1e-5)
    assert [answer["stages"] for answer in answers] == [2, 2]
    assert {name.name for name in (tmp_path / "export").iterdir()} == {
        f"{name}.safetensors" for name in ("left", "right", "head")
    }
    trained = {name: parameter.detach() for name, parameter in reference.model.named_parameters()}
    after = answers[0]["after"]
    assert after.keys() - {"head.layer.weight"} == trained.keys()
    for name, value in trained.items():
        assert torch.allclose(after[name], value, rtol=0, atol=1e-6), name
