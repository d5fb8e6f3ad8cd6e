"""What each rank runs in the tests of the engine; importable by the processes that run it."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpp_plugin.runtime.ranks.job_board import job_board
from gpp_plugin.runtime.tensor_ranks import own_part, parameter_shards
from tests.models import build
from tests.reference import ReferenceRun, gradient_errors
from tests.runtime.odd_models import build_odd

B, U = 8, 2


def config_of(**changes: Any) -> dict[str, Any]:
    block = changes.pop("block", {})
    config: dict[str, Any] = {
        "train_batch_size": B,
        "train_micro_batch_size_per_gpu": U,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "steps_per_print": 1000,
        # tests hold losses and gradients against one process themselves
        "graph_pipeline": {"comm_timeout_s": 60, "verify": False, **block},
    }
    return {**config, **changes}


def make_engine(model: nn.Module, sample: dict[str, Any], config: dict[str, Any], **given: Any) -> Any:
    import deepspeed

    import gpp_plugin

    wrapped = gpp_plugin.GraphPipelineModule(model, sample_batch=sample)
    return deepspeed.initialize(model=wrapped, config=config, **given)[0]


def steps(engine: Any, batches: Sequence[dict[str, Any]]) -> list[float]:
    return [float(engine.train_batch(data_iter=iter([batch]))) for batch in batches]


def steps_and_gradients(
    engine: Any, batches: Sequence[dict[str, Any]]
) -> tuple[list[float], dict[str, Tensor]]:
    """Train on batches; return the losses, and copies of the first step's gradients."""
    engine.retain_gradients()
    losses = steps(engine, batches[:1])
    gradients = {name: gradient.clone() for name, gradient in engine.gradients.items()}
    return losses + steps(engine, batches[1:]), gradients


def check_training(answers: Sequence[dict[str, Any]], reference: ReferenceRun, *, most: float = 1e-5) -> None:
    """Hold losses and first gradients of all ranks against one process; together they have every gradient."""
    covered: set[str] = set()
    for answer in answers:
        assert answer["losses"] == pytest.approx(reference.losses, rel=1e-5)
        errors = gradient_errors(answer["gradients"], reference.gradients)
        assert max(errors.values(), default=0.0) < most, errors
        covered |= set(answer["gradients"])
    assert covered == set(reference.gradients)


def shards_of(engine: Any) -> dict[str, Any]:
    """Return what this rank holds in parts, by name: how it is cut, its position, and the number of ranks."""
    reference = engine._rank_runner.reference
    found = {}
    for index in engine.rank_engine.indices:
        stage = engine._plan.stages[index]
        for name, shard in parameter_shards(reference, engine._plan, index).items():
            found[name] = (shard, stage.tensor_position(engine.global_rank), stage.tensor)
    return found


def part_of(whole: Tensor, how: Any) -> Tensor:
    return whole if how is None else own_part(whole, *how)


def said_of(action: Callable[[], Any]) -> str:
    """Return what a call is refused with, by class and text; nothing where it is not."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@contextlib.contextmanager
def logged(name: str) -> Iterator[list[logging.LogRecord]]:
    """Return what will list the records of a logger, from INFO on."""
    records: list[logging.LogRecord] = []
    handler, logger = logging.Handler(), logging.getLogger(name)
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of `config_of`."""
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01)


def clipping(
    make: Callable[[Any], torch.optim.Optimizer], most: float, norms: list[float]
) -> Callable[[Any], torch.optim.Optimizer]:
    """Return what makes an optimizer that clips before it steps (0 does not), and lists the norms before that."""

    def made(parameters: Any) -> torch.optim.Optimizer:
        optimizer = make(parameters)
        own = [p for group in optimizer.param_groups for p in group["params"]]

        def clip(*_: Any) -> None:
            norms.append(float(torch.nn.utils.clip_grad_norm_(own, most or float("inf"))))

        optimizer.register_step_pre_hook(clip)
        return optimizer

    return made


def decay_groups(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    own = list(parameters)
    decayed, others = [p for p in own if p.ndim > 1], [p for p in own if p.ndim <= 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def train_with_everything(zero: int | str) -> dict[str, Any]:
    """Clipping, parameter groups and a schedule; a ZeRO stage that is the planner's to choose is one of one stage.

    ``"2 offloaded"`` is ZeRO 2 with the optimizer on the CPU.
    """
    model, make_batch = build("t5")
    batches = [make_batch(B, seed) for seed in range(4)]
    held: dict[str, Any] = {} if zero == "auto" else {"stage": int(str(zero)[0])}
    params = {"lr": 1e-3, "weight_decay": 0.01}
    if str(zero).endswith("offloaded"):
        held["offload_optimizer"] = {"device": "cpu"}
        params["torch_adam"] = True  # DeepSpeed's own is compiled
    config = config_of(
        zero_optimization=held,
        optimizer={"type": "AdamW", "params": params},
        gradient_clipping=0.5,
        scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 2e-3, "warmup_num_steps": 3,
                                                  "warmup_type": "linear"}},
        block={"stages": 1, "zero": "auto"} if zero == "auto" else {"stages": 2},
    )  # fmt: skip
    engine = make_engine(model, batches[0], config, model_parameters=decay_groups(model.parameters()))
    losses, norms, rates = [], [], []
    first_rate = engine.get_lr()[0]
    for batch in batches:
        losses += steps(engine, [batch])
        norms.append(engine.get_global_grad_norm())
        rates.append(engine.get_lr())
    stage = engine.zero_optimization_stage()
    return {"losses": losses, "norms": norms, "rates": rates, "first_rate": first_rate, "zero": stage}


def different_data() -> dict[str, str]:
    """Ranks that are given different batches must not train silently; mode async notices a call later."""
    said = {}
    for mode in ("sync", "async"):
        model, make_batch = build("two_branch")
        engine = make_engine(model, make_batch(B, 0), config_of(block={"stages": 1, "mode": mode}))
        batches = [make_batch(B, torch.distributed.get_rank()), make_batch(B, 2)]
        board = job_board()
        assert board is not None
        said[mode] = f"{said_of(functools.partial(steps, engine, batches))}; first: {board.first}"
    return said


def evaluate_a_head() -> dict[str, Any]:
    """Outputs and state that training does not use; a batch that gives no loss."""
    model, make_batch = build_odd("evaluation_head")
    block = {"plan": {"stages": [{"modules": ["stem"]}, {"modules": ["*"]}]}}
    engine = make_engine(model, make_batch(B, 0), config_of(block=block))
    asked = ("extra", "turned", "norm")
    _, found = engine.eval_batch(iter([make_batch(B, 1)]), return_logits=True, outputs=asked)
    unlabelled = {"a": make_batch(B, 1)["a"]}
    refusal = said_of(lambda: engine.eval_batch(iter([unlabelled]), return_logits=True))
    return {"found": found, "refusal": refusal, "state": engine.gather_state_dict()}


def fail_and_go_on(stages: int) -> dict[str, Any]:
    """A batch that fails in its third micro-batch, then a good one."""
    model, make_batch = build("gpt2")
    good, bad = make_batch(B, 0), make_batch(B, 1)
    bad["input_ids"][4, 0] = 10**6
    engine = make_engine(model, good, config_of(block={"stages": stages, "comm_timeout_s": 5}))
    engine.retain_gradients()
    said = [said_of(functools.partial(steps, engine, [batch])) for batch in (bad, good)]
    return {"said": said, "gradients": engine.gradients if not said[1] else {}}


SIZES = (2 * B, B, B, 2 * B, B // 2, 2 * B)
"""Samples of six steps; the first four are one pass over the data, the others are given."""


def change_batch_sizes(zero: int, stages: int) -> dict[str, Any]:
    """Train on mini-batches of these sizes, the engine's own and given ones, and say what is refused between."""
    import deepspeed

    model, make_batch = build("two_branch")
    rows = make_batch(48, 9)
    data = [{key: value[n] for key, value in rows.items()} for n in range(48)]
    config = config_of(zero_optimization={"stage": zero}, block={"stages": stages})
    engine = deepspeed.initialize(model=model, config=config, training_data=data)[0]
    answer: dict[str, Any] = {"losses": [], "sizes": []}
    engine.retain_gradients()
    for step, size in enumerate(SIZES):
        engine.set_train_batch_size(size)
        own = None if step < 4 else iter([make_batch(size, step)])
        answer["losses"].append(float(engine.train_batch(own)))
        answer["sizes"].append((engine.train_batch_size(), engine.gradient_accumulation_steps()))
        if step == 0:
            calls = [functools.partial(engine.set_train_batch_size, n) for n in (7, 0, "8", None)]
            answer["refused"] = [said_of(call) for call in calls]
    answer["evaluated"] = float(engine.eval_batch(iter([make_batch(6, 5)])))
    answer["counted"] = (engine.global_steps, engine.global_samples, engine.micro_steps)
    answer["weights"] = {name: value.detach().clone() for name, value in engine.named_parameters()}
    return answer
