"""What an engine holds and remembers between calls, as ranks try it out."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from gpp_plugin.errors import GppError
from tests.integrations.engine_jobs import B, config_of, make_engine, steps
from tests.models import build


class Powered(nn.Module):
    """A model with a constant among its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor, power: int = 1) -> dict[str, Tensor]:
        """Return the mean cross entropy and the logits."""
        logits = self.second(self.first(x) ** power)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def powered() -> Powered:
    torch.manual_seed(0)
    return Powered()


def powered_batch(num_samples: int, power: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(num_samples)
    return {
        "x": torch.randn(num_samples, 8, generator=generator),
        "labels": torch.randint(0, 3, (num_samples,), generator=generator),
        "power": power,
    }


def evaluate_many() -> dict[str, Any]:
    """Evaluate with other constants, and with more sizes than are kept."""
    engine = make_engine(powered(), powered_batch(B, 1), config_of(block={"stages": 2}))
    cases = [(B, 1), (B, 2), (B, 1), *((size, 1) for size in range(1, 13)), (B, 2), (3, 3), (3, 4), (3, 5)]
    losses = [((n, p), float(engine.eval_batch(iter([powered_batch(n, p)])))) for n, p in cases]
    evaluator = engine._evaluator
    return {"losses": losses, "runners": len(evaluator._runners), "graphs": len(evaluator._graphs)}


class Failing(torch.utils.data.Dataset[dict[str, Tensor]]):
    """A dataset of two-branch samples that cannot be read on one rank after a while."""

    def __init__(self, rank: int, bad_rank: int) -> None:
        self.batch = build("two_branch")[1](3 * B, 0)
        self.is_bad = rank == bad_rank
        self.num_read = 0

    def __len__(self) -> int:
        return 3 * B

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.num_read += 1
        if self.is_bad and self.num_read > 3 * B:
            raise OSError("the disk is gone")
        return {key: value[index] for key, value in self.batch.items()}


def fail_to_load(bad_rank: int) -> dict[str, Any]:
    """Train until one rank's dataset fails; say what this rank saw and how soon."""
    import deepspeed
    import torch.distributed as dist

    model, _ = build("two_branch")
    dataset = Failing(dist.get_rank(), bad_rank)
    engine, *_ = deepspeed.initialize(
        model=model, config=config_of(block={"stages": 2}), training_data=dataset
    )
    start = time.perf_counter()
    try:
        for _ in range(3):
            engine.train_batch()
    except (GppError, OSError) as error:
        return {
            "said": f"{type(error).__name__}: {error}",
            "seconds": time.perf_counter() - start,
            "step": engine.global_steps,
        }
    return {"said": "", "seconds": 0.0, "step": engine.global_steps}


def hold_weights(zero_stages: tuple[int, ...]) -> list[dict[str, Any]]:
    """Train under each ZeRO stage on two ranks of one stage; say what is held and what the program does."""
    from gpp_plugin.model.materialize import resident_bytes

    answers = []
    for zero in zero_stages:
        model, make_batch = build("gpt2")
        batch = make_batch(B, 0)
        config = config_of(zero_optimization={"stage": zero}, block={"stages": 1})
        engine = make_engine(model, batch, config)
        held: list[int] = []
        gradients = engine.stage_engine.gradients
        accumulate = engine.stage_engine.accumulate

        def watch(gradients: Any = gradients, held: list[int] = held, accumulate: Any = accumulate) -> None:
            held.append(gradients.held_bytes())  # as a backward ends
            accumulate()

        engine._rank_runner.stage_runners[0]._hooks.accumulate = watch
        between: list[int] = []
        reduce_data = engine.stage_engine.reduce_data

        def watch_reduce(
            gradients: Any = gradients, between: list[int] = between, call: Any = reduce_data
        ) -> None:
            call()
            between.append(gradients.held_bytes())

        engine._rank_runner.stage_runners[0]._hooks.reduce_data = watch_reduce
        losses = steps(engine, [batch])
        stage = dict(engine.module.named_parameters(remove_duplicate=False))
        kinds = [i.kind.value for i in engine._rank_runner.stage_runners[0]._programs.main.instructions]
        answers.append(
            {
                "losses": losses,
                "reductions": kinds.count("reduce_data"),
                "as backwards end": held,
                "after reductions": between,
                "parameters": sum(p.numel() * p.element_size() for p in engine.module.parameters()),
                "shared": all(p.data_ptr() == stage[n].data_ptr() for n, p in model.named_parameters()),
                "model bytes": resident_bytes(model),
            }
        )
    return answers
