"""What each rank runs in the tests of units that lack a branch of the model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

from tests.integrations.engine_jobs import config_of, make_engine
from tests.integrations.unit_jobs import own_steps
from tests.reference import gradient_errors, train_reference


class TwoTowers(nn.Module):
    """Two towers, either of which may have no input; what there is is added up."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        self.right = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(
        self, labels: Tensor | None = None, left: Tensor | None = None, right: Tensor | None = None
    ) -> SequenceClassifierOutput:
        """Return loss and logits."""
        parts = [tower(x) for tower, x in ((self.left, left), (self.right, right)) if x is not None]
        if not parts:
            raise ValueError("give left or right")
        logits = self.head(sum(parts[1:], start=parts[0]))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def tower_units(kinds: str) -> list[dict[str, Any]]:
    """Return a unit for each letter: with both inputs, or the left or right one only; of one to three samples."""
    generator = torch.Generator().manual_seed(len(kinds) + 7)
    units = []
    for index, kind in enumerate(kinds):
        count = 2 + index % 3
        unit: dict[str, Any] = {
            "labels": torch.randint(0, 3, (count,), generator=generator),
            "left": torch.randn(count, 6, generator=generator),
            "right": torch.randn(count, 5, generator=generator),
        }
        lost = {"b": "", "l": "right", "r": "left"}[kind]
        units.append({k: v for k, v in unit.items() if k != lost})
    return units


def train_absent(block: dict[str, Any], zero: int, patterns: Sequence[str]) -> dict[str, Any]:
    """Train a step for each pattern on units with absent branches, and evaluate; compare with one process.

    Args:
        patterns: of each step, a letter a unit: b has all inputs, l and r one.
    """
    torch.manual_seed(0)
    model: Any = TwoTowers()
    steps = [tower_units(kinds) for kinds in patterns]
    plain = copy.deepcopy(model)
    config = config_of(
        block={"units": len(patterns[0]), **block},
        zero_optimization={"stage": zero},
        train_batch_size="auto",
    )
    engine = make_engine(model, tower_units("b")[0], config)
    engine.retain_gradients()
    stream = iter([unit for units in (*steps, steps[0], steps[0]) for unit in units])
    losses, gradients, states = [], [], []
    for _ in steps:
        losses.append(float(engine.train_batch(stream)))
        gradients.append(dict(engine.gradients))
        state = engine.gather_state_dict() or {}  # on rank 0; of a single rank its own tensors
        states.append({name: tensor.clone() for name, tensor in state.items()})
    evaluated = float(engine.eval_batch(stream))
    _, logits = engine.eval_batch(stream, return_logits=True)
    reference = train_reference(plain, steps)
    with torch.no_grad():
        wanted = [reference.model.eval()(**unit) for unit in steps[0]]
    weights = dict(reference.model.named_parameters())
    return {
        "losses": losses,
        "wanted": reference.losses,
        "errors": gradient_errors(gradients[0], reference.gradients),
        "reached": [sorted(found) for found in gradients],
        "weights": {
            n: float((states[-1][n] - w.detach()).abs().max()) for n, w in weights.items() if n in states[-1]
        },
        "moved": [
            sorted(n for n in weights if n in states[i] and not torch.equal(states[i][n], states[i - 1][n]))
            for i in range(1, len(states))
        ],
        "evaluated": evaluated,
        "wanted_evaluated": sum(float(out.loss) for out in wanted) / len(wanted),
        "logits": [float((a - b.logits).abs().max()) for a, b in zip(logits, wanted, strict=True)],
        "left": len(list(stream)),
    }


def tower_samples() -> list[dict[str, Any]]:
    """Return a dataset of which every third sample lacks the right input."""
    units = [tower_units("l" if index % 3 == 0 else "b")[0] for index in range(36)]
    return [
        {key: value[0] + (0 if key == "labels" else 0.01 * index) for key, value in unit.items()}
        for index, unit in enumerate(units)
    ]


def collate_alike(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Stack what all samples have; None of what one of them lacks."""
    return {
        key: torch.stack([i[key] for i in items]) if all(key in i for i in items) else None
        for key in ("labels", "left", "right")
    }


def load_absent(block: dict[str, Any]) -> dict[str, Any]:
    """Train three steps on the engine's own units, some of which lack an input; compare with one process."""
    from gpp_plugin.data import pack

    torch.manual_seed(0)
    model, data = TwoTowers(), tower_samples()
    plain = copy.deepcopy(model)

    def packing() -> Any:
        return pack(data, cost=lambda item: 1.0, budget=3.0, units=4, seed=1)

    config = config_of(block=block)
    del config["train_batch_size"], config["train_micro_batch_size_per_gpu"]
    sample = collate_alike([data[1], data[2], data[4]])
    engine = make_engine(model, sample, config, training_data=packing(), collate_fn=collate_alike)
    losses, gradients = own_steps(engine)
    collated = [collate_alike([data[i] for i in unit]) for unit in packing().epoch_units(0)[:12]]
    reference = train_reference(plain, [collated[i : i + 4] for i in range(0, 12, 4)])
    return {
        "losses": losses,
        "wanted": reference.losses,
        "errors": gradient_errors(gradients, reference.gradients),
        "lacking": sum(unit["right"] is None for unit in collated),
    }
