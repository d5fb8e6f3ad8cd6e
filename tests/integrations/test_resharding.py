"""Checkpoints of four models on five plans each: saved on one, loaded on the next, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpp_plugin.engine.checkpoints.conversion import WholeState, read_checkpoint
from tests.integrations.engine_jobs import B, U, config_of, decay_groups, make_engine, steps
from tests.models import build
from tests.ranks import run_kept_ranks
from tests.reference import train_reference

PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "two stages": (0, {"stages": 2}),
    "four stages, ZeRO 1": (1, {"stages": 4}),
    "one stage of four, ZeRO 2": (2, {"stages": 1, "data_parallel": 4}),
    "two of two, ZeRO 3": (3, {"stages": 2, "data_parallel": 2}),
    "two of two, ZeRO 1": (1, {"stages": 2, "data_parallel": 2}),
}
"""ZeRO stage and block, on four ranks."""
PLANS_OF_TWO: dict[str, tuple[int, dict[str, Any]]] = {
    "two stages": (0, {"stages": 2}),
    "one stage of two, ZeRO 1": (1, {"stages": 1, "data_parallel": 2}),
}
"""The same, on two."""
SCHEDULE = {
    "type": "WarmupLR",
    "params": {"warmup_max_lr": 2e-3, "warmup_num_steps": 6, "warmup_type": "linear"},
}
MORE: dict[str, dict[str, Any]] = {
    "clip": {"gradient_clipping": 0.5},
    "t5": {"scheduler": SCHEDULE},
    "gpt2": {"bf16": {"enabled": True}},
    "llava": {},
}
"""What else of the configuration each model has; T5 has parameter groups too, LLaVA trains adapters alone."""


def make(
    name: str, plan: str, *, seed: int, plans: dict[str, tuple[int, dict[str, Any]]] = PLANS
) -> tuple[Any, list[dict[str, Any]]]:
    """Return an engine and the batches of seven steps."""
    model, make_batch = build(name, seed=seed)
    if name == "llava":
        model = with_adapters(model)
    zero, block = plans[plan]
    batches = [make_batch(B, seed) for seed in range(7)]
    given = {"model_parameters": decay_groups(model.parameters())} if name == "t5" else {}
    config = config_of(**MORE.get(name, {}), zero_optimization={"stage": zero}, block=block)
    return make_engine(model, batches[0], config, **given), batches


def with_adapters(model: Any) -> Any:
    """Train LoRA adapters of the language model alone, and nothing of the vision tower."""
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        lora = LoraConfig(r=4, target_modules=r".*language_model.*\.(q|v)_proj", lora_dropout=0.0)
        return get_peft_model(model, lora)


def reshard(
    name: str, directory: str, plans: dict[str, tuple[int, dict[str, Any]]] = PLANS
) -> dict[str, Any]:
    """Train two steps on the first plan and save; load on each next one, save, and train on."""
    first, *others = plans
    engine, batches = make(name, first, seed=0, plans=plans)
    started = steps(engine, batches[:2])
    engine.save_checkpoint(f"{directory}/{first}", tag="half", client_state={"epoch": 1})
    answer: dict[str, Any] = {"start": started, first: steps(engine, batches[2:])}
    engine.destroy()
    before = first
    for plan in (*others, first):
        engine, _ = make(name, plan, seed=3, plans=plans)
        torch.manual_seed(0)
        _, client = engine.load_checkpoint(f"{directory}/{before}")
        assert client == {"epoch": 1} and engine.global_steps == 2
        target = "back" if plan == first else plan
        engine.save_checkpoint(f"{directory}/{target}", tag="half", client_state=client)
        answer[target] = steps(engine, batches[2:])
        answer[f"{target} rates"] = sorted(set(engine.get_lr()))
        engine.destroy()
        before = target
    return answer


def assert_same_bits(one: WholeState, other: WholeState) -> None:
    """Compare weights (masters where there are some), buffers, all optimizer state and options."""
    assert one.weights.keys() == other.weights.keys() and one.state.keys() == other.state.keys()
    for name, value in (one.weights | one.buffers).items():
        assert torch.equal(value, (other.weights | other.buffers)[name]), name
    for name, kept in one.state.items():
        assert kept.keys() == other.state[name].keys(), name
        for what, value in kept.items():
            found = other.state[name][what]
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(found)), (name, what)
    assert (one.step, one.optimizer) == (other.step, other.optimizer)

    def options(state: WholeState) -> dict[str, Any]:
        return {name: told for names, told in state.groups for name in names}

    assert options(one) == options(other)


@pytest.mark.parametrize("name", MORE)
def test_pairs_of_plans(name: str, tmp_path: Path) -> None:
    answers = run_kept_ranks(reshard, 4, name, str(tmp_path), timeout_s=400)
    first, *others = PLANS
    assert all(answer == answers[0] for answer in answers[1:])
    saved = read_checkpoint(tmp_path / first)
    assert saved.optimizer and saved.step == 2
    is_half = "bf16" in MORE[name]
    for plan in (*others, "back"):
        assert_same_bits(saved, read_checkpoint(tmp_path / plan))
        wanted, found = answers[0][first], answers[0][plan]
        assert found == pytest.approx(wanted, rel=3e-2 if is_half else 2e-5), plan
    assert answers[0]["back"] == answers[0][first], "the same plan again: the same bits"
    assert all(answers[0][f"{plan} rates"] == answers[0]["back rates"] for plan in others)
    if name == "llava":
        adapters = {name for name in saved.weights if "lora_" in name}
        assert (
            adapters
            and set(saved.state) == adapters
            and any("vision_tower" in name for name in saved.weights)
        )


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Where the checkpoints of two ranks are, and what each rank saw."""
    directory = tmp_path_factory.mktemp("two")
    given = ("two_branch", str(directory), PLANS_OF_TWO)
    return directory, run_kept_ranks(reshard, 2, *given)


def test_two_ranks_go_on_from_another_plan_as_one_process(
    on_two_ranks: tuple[Path, list[dict[str, Any]]],
) -> None:
    first, other = PLANS_OF_TWO
    _, answers = on_two_ranks
    model, make_batch = build("two_branch")
    losses = train_reference(model, [make_batch(B, seed) for seed in range(7)], unit=U).losses
    for answer in answers:
        for plan in (first, other, "back"):
            assert [*answer["start"], *answer[plan]] == pytest.approx(losses, rel=1e-5), plan
        assert answer["back"] == answer[first], "the same plan again: the same bits"


def test_what_is_loaded_on_another_plan_and_saved_has_the_same_bits(
    on_two_ranks: tuple[Path, list[dict[str, Any]]],
) -> None:
    first, other = PLANS_OF_TWO
    directory, _ = on_two_ranks
    saved = read_checkpoint(directory / first)
    assert saved.optimizer and saved.step == 2
    for plan in (other, "back"):
        assert_same_bits(saved, read_checkpoint(directory / plan))
