"""A peft model, and what each rank runs in the tests of its files; importable by the processes that run it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


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
