"""A rank of a job that a fault happens to, as a user's script would be."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class FaultSettings:
    """What each rank of the job does.

    Args:
        fault: the arguments of `Fault`; None: nothing happens.
        odd: what one rank has otherwise, by the name of an `ODDITIES` entry.
        block, config: changes of the configuration on all ranks.
        steps: of training, then a save, an evaluation, a load, and the end.
        rank_zero_only: the call that rank 0 makes after training, and no other rank; they sleep meanwhile, or, with
            ``others_go_on``, make the next one.
        bad: what fails on rank 1 at its second mini-batch, by a ``ValueError`` or what ``bad_kind`` says: ``dataset``,
            ``collate_fn``, ``iterator``, the iterator of ``evaluation``, a ``hook`` on a parameter, the script's own
            ``callback`` before it, or the ``model`` as it is captured.
        bad_kind: of `Fault`.
        model: of `tests.models`.
        generates: tokens after training.
    """

    directory: str
    fault: dict[str, Any] | None = None
    odd: str = ""
    odd_rank: int = 1
    block: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    steps: int = 3
    uses_loader: bool = False
    rank_zero_only: str = ""
    others_go_on: bool = False
    bad: str = ""
    bad_kind: str = ""
    model: str = "two_branch"
    generates: bool = False


def odd_config(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of the rank that has another one."""
    block = config["graph_pipeline"]
    optimizer = config["optimizer"]
    params = optimizer["params"]
    in_block = {
        "mode": "async", "granularity": "node", "seed": 7, "stages": 1, "schedule": "gpipe", "slicing": "off",
        "loss_mean": "tokens", "compile": True, "tensor_parallel": "auto", "backends": ["inductor"],
    }  # fmt: skip
    if name in in_block:
        return {**config, "graph_pipeline": {**block, name: in_block[name]}}
    changed = {
        "lr": {"optimizer": {**optimizer, "params": {**params, "lr": 2e-3}}},
        "weight_decay": {"optimizer": {**optimizer, "params": {**params, "weight_decay": 0.5}}},
        "optimizer": {"optimizer": {"type": "SGD", "params": {"lr": 1e-3}}},
        "scheduler": {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}},
        "clip": {"gradient_clipping": 0.1},
        "precision": {"bf16": {"enabled": True}},
        "zero": {"zero_optimization": {"stage": 1}},
        "batch": {"train_micro_batch_size_per_gpu": 1},
        "zero 3": {"zero_optimization": {"stage": 3}},
        "bad_block": {"graph_pipeline": {**block, "planner": "nonsense"}},
    }
    return {**config, **changed.get(name, {})}


def train(settings: FaultSettings) -> None:
    """Run the job."""
    import torch

    from gpp_plugin.runtime.ranks.failure_board import HERE
    from tests.faults import Fault, inject

    def script_does(name: str) -> None:  # where a fault may strike, outside of the engine's calls
        HERE.script = name  # type: ignore[attr-defined]

    def bad_sample(index: int) -> Any:
        if settings.bad_kind:
            Fault(kind=settings.bad_kind, rank=1, at="").strike()
        raise ValueError(f"sample {index} is broken")

    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    if settings.fault is not None:
        fault = Fault(**settings.fault)
        inject(fault, rank=rank)
        if fault.at == "start:" and rank == fault.rank:
            fault.strike()
    from tests.integrations.engine_jobs import B, config_of, make_engine
    from tests.models import build

    config = config_of(block={"comm_timeout_s": 60, **settings.block}, **settings.config)
    model, make_batch = build(settings.model)
    sample = make_batch(B, 0)
    given: dict[str, Any] = {}
    is_odd = bool(settings.odd) and rank == settings.odd_rank
    if is_odd:
        config = odd_config(settings.odd, config)
        make_odd(settings.odd, model)
    bad = settings.bad if rank == 1 else ""
    if settings.uses_loader:
        rows = make_batch(4 * B, 1)
        samples = [{key: value[i] for key, value in rows.items()} for i in range(4 * B)]
        given["training_data"] = BadSamples(samples, bad_sample, from_count=B if bad == "dataset" else None)
        given["collate_fn"] = bad_collate(bad_sample) if bad == "collate_fn" else None
    if bad == "model":
        model.register_forward_pre_hook(lambda module, args: bad_sample(0))
    script_does("initialize")
    engine = make_engine(model, sample, config, **given)
    stream: Any = None if settings.uses_loader else (make_batch(B, seed) for seed in itertools.count())
    if bad == "iterator":
        stream = itertools.chain(itertools.islice(stream, 1), map(bad_sample, [0]))
    if bad == "hook":  # tried once before the first step, and called in each
        calls = itertools.count()
        hook = lambda gradient: bad_sample(0) if next(calls) > 1 else None  # noqa: E731
        next(engine.module.parameters()).register_hook(hook)
    for step in range(settings.steps):
        if bad == "callback" and step == 1:
            bad_sample(0)
        script_does(f"step {step}")
        engine.train_batch(data_iter=stream)
    if settings.generates:
        engine.generate(sample["input_ids"], max_new_tokens=6)
    judged = map(bad_sample, [0]) if bad == "evaluation" else iter([sample])
    for name, call in {
        "save": lambda: engine.save_checkpoint(settings.directory),
        "evaluation": lambda: engine.eval_batch(judged),
        "load": lambda: engine.load_checkpoint(settings.directory),
        "step": lambda: engine.train_batch(data_iter=stream),
        "end": engine.destroy,
    }.items():
        script_does(name)
        if rank == 0 or name != settings.rank_zero_only:
            call()
        elif not settings.others_go_on:
            time.sleep(600)


class BadSamples:
    """A dataset that fails when ``from_count`` of its samples were read."""

    def __init__(self, samples: list[Any], fail: Callable[[int], Any], *, from_count: int | None) -> None:
        self.samples, self.fail, self.from_count, self.count = samples, fail, from_count, 0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        return self.fail(index) if self.count - 1 == self.from_count else self.samples[index]


def bad_collate(fail: Callable[[int], Any]) -> Any:
    """Return what collates once, and then fails."""
    from torch.utils.data import default_collate

    calls = itertools.count()
    return lambda rows: default_collate(rows) if next(calls) == 0 else fail(0)


def make_odd(name: str, model: Any) -> None:
    """Change what one rank has beside its configuration."""
    import torch

    from gpp_plugin.runtime.ranks import agreement

    if name == "weights":
        with torch.no_grad():
            next(model.parameters()).mul_(1.01)
    elif name == "frozen":
        next(model.parameters()).requires_grad_(False)
    elif name == "version":
        real = agreement.software_facts
        agreement.software_facts = lambda: {**real(), "deepspeed": "0.0.1"}
