"""What each rank runs to load checkpoints on other plans than they were saved on."""

from __future__ import annotations

from typing import Any

import torch

from tests.integrations.engine_jobs import B, config_of, decay_groups, make_engine, steps
from tests.models import build

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
    given = {"model_parameters": decay_groups(model)} if name == "t5" else {}
    config = config_of(
        **MORE.get(name, {}), zero_optimization={"stage": zero}, block={"verify": False, **block}
    )
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


def load_converted(name: str, directory: str, plan: str) -> dict[str, Any]:
    """Load what one process wrote, and train on."""
    engine, batches = make(name, plan, seed=4)
    engine.load_checkpoint(directory)
    engine.save_checkpoint(f"{directory}/again", tag="half")
    found = steps(engine, batches[2:])
    engine.destroy()
    return {"losses": found, "steps": engine.global_steps}
