"""Adapters (LoRA and its like) in the files that peft reads: which tensors they are, and how they are written.

peft itself chooses the tensors, names them and writes the files; here it is only kept from reading the model's own
weights, which may be on the meta device and on no one rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpp_plugin.errors import CheckpointError
from gpp_plugin.integrations.huggingface.hf_weights import is_of_package

CONFIG_NAME = "adapter_config.json"
"""What makes a directory one of an adapter; in a directory of its name below for each but the first."""


def has_adapters(model: nn.Module) -> bool:
    """Return whether ``model`` is a ``PeftModel``, or a transformers model with adapters added to it."""
    return _is_peft_model(model) or bool(getattr(model, "_hf_peft_config_loaded", False))


def _is_peft_model(model: nn.Module) -> bool:
    return is_of_package(model, "peft", "PeftModel")


def adapter_tensors(model: nn.Module) -> set[str]:
    """Return the names, in the model, of the tensors that its adapters' files hold.

    Raises:
        CheckpointError: the adapter is a prompt, which is computed when it is saved, from weights that no rank holds.
    """
    any_model: Any = model
    for name, config in any_model.peft_config.items():
        if config.is_prompt_learning:
            raise CheckpointError(
                f"adapter {name!r} is of type {getattr(config.peft_type, 'value', config.peft_type)}, a learnt prompt; "
                "save_pretrained() writes adapters made of weights (LoRA and its like); take gather_state_dict()"
            )
    # Empty tensors stand for the weights: those that peft hands back are the ones it would write, by whatever name.
    stand_ins = {name: torch.empty(0, device="meta") for name in model.state_dict(keep_vars=True)}
    if _is_peft_model(model):
        from peft import get_peft_model_state_dict

        chosen = [
            value
            for name in any_model.peft_config
            for value in get_peft_model_state_dict(
                model, state_dict=dict(stand_ins), adapter_name=name
            ).values()
        ]
    else:  # a `PeftModel` has what the model inside it has, this too
        chosen = list(any_model.get_adapter_state_dict(state_dict=stand_ins).values())
    taken = {id(value) for value in chosen}
    return {name for name, value in stand_ins.items() if id(value) in taken}


def write_adapters(staging: Path, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Write the adapters' configurations and weights to an empty directory.

    Args:
        tensors: of `adapter_tensors`, all of them.
    """
    any_model: Any = model
    any_model.save_pretrained(str(staging), state_dict=dict(tensors))


def move_adapters(staging: Path, target: Path) -> None:
    """Put what was written in place of an older save; a directory's configuration goes first and comes last."""
    files = [path.relative_to(staging) for path in sorted(staging.rglob("*")) if path.is_file()]
    configs = [path for path in files if path.name == CONFIG_NAME]
    for path in configs:
        (target / path).unlink(missing_ok=True)
    for path in [*(path for path in files if path not in configs), *configs]:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (staging / path).replace(target / path)
