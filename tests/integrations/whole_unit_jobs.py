"""What each rank runs in the tests of models that take whole loss units."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from tests.reading_models import OneByOne, Reader, reader_batch
from tests.runtime.jobs import make_config, use_device

TWO, TURNED = [[2, 1], [1, 2]], [[1, 2], [2, 1]]
STEPS: tuple[tuple[list[list[int]], bool], ...] = ((TWO, True), (TURNED, True), (TWO, False), (TWO, True))
"""What Python reads of each mini-batch: sizes of images; whether something is padded."""


def build(name: str) -> Any:
    torch.manual_seed(0)
    return Reader() if name == "reader" else OneByOne()


def units_of_steps(name: str, num_units: int) -> list[list[dict[str, Any]]]:
    """Return the units of each mini-batch."""
    if name == "one_by_one":
        generator = torch.Generator().manual_seed(0)
        return [[{"x": torch.randn(2, 4, generator=generator)} for _ in range(num_units)] for _ in range(3)]
    return [
        [reader_batch(sizes, seed=10 * step + unit, padded=padded) for unit in range(num_units)]
        for step, (sizes, padded) in enumerate(STEPS)
    ]


class Pairs(Dataset[dict[str, Any]]):
    """Samples whose images a collator puts into one list."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Any]:
        return reader_batch([[2, 1]], seed=index)


def join(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Collate samples: tensors end to end, patches of all images in one list."""
    return {key: torch.cat([item[key] for item in items]) for key in items[0]}


def train(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train each job on this rank; return losses, this stage's first gradients, and evaluations."""
    import deepspeed

    import gpp_plugin

    use_device("cpu")
    answers = []
    for job in jobs:
        model, steps = build(job["model"]), units_of_steps(job["model"], job["mini_batch"] // job["unit"])
        wrapped = gpp_plugin.GraphPipelineModule(model, sample_batch=steps[0][0])
        data = {"training_data": Pairs(), "collate_fn": join} if job.get("loads") else {}
        engine, *_ = deepspeed.initialize(model=wrapped, config=make_config(job), **data)
        engine.retain_gradients()
        losses: list[float] = []
        gradients: dict[str, torch.Tensor] = {}
        for units in steps:
            given = () if job.get("loads") else (iter(units),)
            losses.append(float(engine.train_batch(*given)))
            gradients = gradients or {name: g.clone() for name, g in engine.gradients.items()}
        evaluated = [float(engine.eval_batch(iter([unit]))) for unit in steps[1]]
        answers.append(
            {
                "losses": losses,
                "gradients": gradients,
                "evaluated": evaluated,
                "stages": len(engine.plan.stages),
                "means": engine._reference.analysis.means,
            }
        )
        engine.destroy()
    return answers


def refused() -> list[str]:
    """Return what is said of mini-batches that do not fit, and train a good one behind them."""
    import deepspeed

    import gpp_plugin
    from gpp_plugin.errors import GppError

    use_device("cpu")
    job = {"model": "reader", "mini_batch": 4, "unit": 2, "block": {"stages": 2}}
    good = units_of_steps("reader", 2)[0]
    wrapped = gpp_plugin.GraphPipelineModule(build("reader"), sample_batch=good[0])
    engine, *_ = deepspeed.initialize(model=wrapped, config=make_config(job))
    said = []
    for units in (
        [good[0], reader_batch(TURNED)],
        [good[0], reader_batch([[1, 1], [1, 1]])],
        good[:1],
    ):
        try:
            engine.train_batch(iter(units))
        except GppError as error:
            said.append(f"{type(error).__name__}: {error}")
    said.append(str(float(engine.train_batch(iter(good)))))
    return said


class Counted(Reader):
    """A `Reader` that divides its loss by the labelled tokens of the mini-batch."""

    def forward(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        pixels: torch.Tensor,
        sizes: torch.Tensor,
        labels: torch.Tensor,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the mean loss of the labelled tokens, or a share of the mini-batch's."""
        found = super().forward(ids, mask, pixels, sizes, labels)
        if num_items_in_batch is not None:
            found["loss"] = found["loss"] / num_items_in_batch
        return found


def refused_keys() -> dict[str, str]:
    """Return what is said of keys that such a model is not trained with."""
    import deepspeed

    import gpp_plugin
    from gpp_plugin.errors import ConfigError

    use_device("cpu")
    job = {"mini_batch": 4, "unit": 2, "block": {"stages": 2}}
    unit = units_of_steps("reader", 2)[0][0]
    said = {}
    for key, value in {"units": 2, "loss_mean": "tokens", "look_ahead": 1}.items():
        wrapped = gpp_plugin.GraphPipelineModule(Counted(), sample_batch=unit)
        config = make_config({**job, "block": {"stages": 2, key: value}})
        try:
            deepspeed.initialize(model=wrapped, config=config)
            said[key] = "nothing"
        except ConfigError as error:
            said[key] = str(error)
    return said
