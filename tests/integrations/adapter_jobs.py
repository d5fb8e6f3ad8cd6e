"""A peft model, and what each rank runs in the tests of its files; importable by the processes that run it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from tests.capture.test_one_sample import batch_of, llama
from tests.integrations.engine_jobs import config_of, make_engine, steps

B = 4


def with_lora(base: nn.Module, **changes: Any) -> Any:
    """Return the model with LoRA whose two matrices are random, so that every one of them counts."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(
        **{"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **changes}
    )
    model = get_peft_model(copy.deepcopy(base), config)
    randomise(model)
    return model


def randomise(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)


def train_and_save(directory: str) -> dict[str, Any]:
    """Train LoRA on two stages and save it."""
    model = with_lora(llama())
    config = config_of(train_batch_size=B, train_micro_batch_size_per_gpu=2, block={"stages": 2})
    engine = make_engine(model, batch_of(B), config)
    losses = steps(engine, [batch_of(B)] * 2)
    engine.save_pretrained(f"{directory}/adapter")
    return {"losses": losses, "state": engine.gather_state_dict()}
