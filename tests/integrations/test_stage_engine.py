"""StageEngine on four gloo ranks against plain torch in one process."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.engine.rank_engine import StageEngine
from gpp_plugin.engine.stage_groups import StageGroups, make_replicas_equal
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.model.model_source import ModelSource
from tests.integrations import toy
from tests.integrations.engine_jobs import B, config_of, make_engine, said_of
from tests.models import build
from tests.ranks import run_kept_ranks

MICRO_BATCHES = 3
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16+fp32": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 10}},
    "fp16+fp32": {
        "fp16": {"enabled": True, "initial_scale_power": 10},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_config(zero_stage: int = 0, precision: str = "fp32", **more: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "betas": [0.9, 0.95]}},
        **PRECISIONS[precision],
        **more,
    }
    if zero_stage:
        config["zero_optimization"] = {"stage": zero_stage}
    return config


def allow_fp16() -> None:
    """Let DeepSpeed train fp16 here: torch computes it on any CPU, DeepSpeed wants a CPU that is fast at it."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True


def parameters(engine: StageEngine) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


# ---- precision x ZeRO ------------------------------------------------------------------------------------


def train_matrix(cases: list[tuple[int, str]], context: int) -> dict[tuple[int, str], dict[str, Any]]:
    rank = dist.get_rank()
    allow_fp16()
    report = {}
    for zero_stage, precision in cases:
        config = make_config(zero_stage, precision, gradient_clipping=1.0)
        engine = toy.make_engine(rank, config, context=context)
        steps, gradients = [], []
        for step in range(4):
            toy.feed(engine, step, MICRO_BATCHES)
            gradients.append(engine.full_gradients())
            steps.append(engine.step())
        report[zero_stage, precision] = {
            "steps": steps,
            "gradients": gradients,
            "parameters": parameters(engine),
            "masters": engine.parameter_state(),
            "optimizer": type(engine.optimizer).__name__,
        }
    return report


MATRIX = list(itertools.product((0, 1, 2), PRECISIONS))
CONTEXT_MATRIX = [(0, "fp32"), (1, "bf16+fp32"), (2, "fp32")]


@pytest.fixture(scope="module")
def matrix() -> list[dict[tuple[int, str], dict[str, Any]]]:
    return run_kept_ranks(train_matrix, toy.NUM_RANKS, MATRIX, 1)


@functools.cache
def alone(
    precision: str, *, reduced_often: bool = False
) -> tuple[dict[str, Tensor], list[float], list[dict[str, Tensor]]]:
    dtype = DTYPES[precision.partition("+")[0]]
    rounding: dict[str, Any] = {
        "dtype": dtype,
        "sum_dtype": torch.float32 if "+" in precision else dtype,
        "scale": 1024.0 if dtype == torch.float16 else 1.0,
        "reduced_often": reduced_often,
    }
    oracle = toy.Alone(
        [{"params": list(toy.SHAPES)}], dtype=dtype, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95)
    )
    norms, gradients = [], []
    for step in range(4):
        gradients.append({name: toy.summed(name, step, MICRO_BATCHES, **rounding) for name in toy.SHAPES})
        norms.append(oracle.step(gradients[-1], clipping=1.0))
    return {name: p.detach() for name, p in oracle.masters.items()}, norms, gradients


@pytest.mark.parametrize(("zero_stage", "precision"), MATRIX)
def test_steps_as_one_process_would(matrix: list[Any], zero_stage: int, precision: str) -> None:
    masters, norms, gradients = alone(precision, reduced_often=zero_stage == 2)
    dtype = DTYPES[precision.partition("+")[0]]
    assert max(norms) > 1.0, "clipping must be at work"
    for rank, names in zip(range(4), (*toy.STAGE_NAMES[:1] * 2, *toy.STAGE_NAMES[1:]), strict=True):
        found = matrix[rank][zero_stage, precision]
        assert [s.grad_norm for s in found["steps"]] == pytest.approx(norms, rel=1e-6)
        assert not any(s.overflow for s in found["steps"])
        for name in names:
            if "frozen" in name:
                assert torch.equal(found["parameters"][name], toy.initial(name).to(dtype))
                continue
            for step in range(4):
                torch.testing.assert_close(
                    found["gradients"][step][name], gradients[step][name], rtol=2e-6, atol=1e-7
                )
            torch.testing.assert_close(found["masters"][name], masters[name], rtol=2e-6, atol=2e-7)
            assert torch.equal(found["parameters"][name], found["masters"][name].to(dtype))


@pytest.mark.parametrize(("zero_stage", "precision"), MATRIX)
def test_all_ranks_agree_and_copies_are_bit_equal(matrix: list[Any], zero_stage: int, precision: str) -> None:
    found = [report[zero_stage, precision] for report in matrix]
    assert all(f["steps"] == found[0]["steps"] for f in found)
    for name in toy.STAGE_NAMES[0]:
        assert torch.equal(found[0]["parameters"][name], found[1]["parameters"][name])
    for key in ("parameters", "masters"):
        assert torch.equal(found[0][key]["embed.weight"], found[3][key]["embed.weight"])


def test_zero_changes_no_bit_and_uses_deepspeeds_optimizer(matrix: list[Any]) -> None:
    for precision in PRECISIONS:
        for name, value in matrix[0][0, precision]["masters"].items():
            assert torch.equal(value, matrix[0][1, precision]["masters"][name]), (precision, name)
        for zero_stage in (1, 2):
            assert matrix[0][zero_stage, precision]["optimizer"] == "DeepSpeedZeroOptimizer"
    assert matrix[0][0, "fp32"]["optimizer"] == "AdamW"
    assert matrix[0][0, "bf16"]["optimizer"] == "FP16_UnfusedOptimizer"


def test_context_ranks_step_as_data_parallel_ranks_of_the_same_parameters(matrix: list[Any]) -> None:
    # each brings the summands of its positions, as others those of their samples: the same sums, parts and bits
    found = run_kept_ranks(train_matrix, toy.NUM_RANKS, CONTEXT_MATRIX, 2)
    for own, other in zip(found, matrix, strict=True):
        for case in CONTEXT_MATRIX:
            assert own[case]["steps"] == other[case]["steps"]
            assert own[case]["optimizer"] == other[case]["optimizer"]
            for key in ("parameters", "masters"):
                assert own[case][key].keys() == other[case][key].keys()
                for name, value in own[case][key].items():
                    assert torch.equal(value, other[case][key][name]), (case, name)


def look_at_a_grid() -> dict[str, Any]:
    """Return the members of a rank's groups, 2 data x 2 context x 2 tensor ranks, and what it begins with."""
    rank = dist.get_rank()
    stage = Stage(
        name="all", blocks=("a",), ranks=tuple(range(8)), micro_batch_size=2, in_flight=1, context=2, tensor=2
    )
    plan = PipelinePlan(
        model="", graph="0" * 16, planner="", mini_batch=2, loss_unit=1, stages=(stage,), edges=()
    )
    groups = StageGroups.create(plan, timeout_s=60)
    module = nn.ParameterDict({name: torch.full((2,), 10.0 + rank) for name in ("shard", "whole")})
    module["shard"].tensor_model_parallel = True
    make_replicas_equal({0: module}, plan=plan, groups=groups, tied=())
    kinds = ("data", "tensor", "context", "model", "stage")
    members = {kind: dist.get_process_group_ranks(getattr(groups, kind)[0]) for kind in kinds}
    groups.close()
    return {**members, "held": {name: p.tolist() for name, p in module.items()}}


def test_a_grid_has_a_group_for_each_of_its_axes() -> None:
    answers = run_kept_ranks(look_at_a_grid, 8)
    # 0 1 | 2 3
    # 4 5 | 6 7
    assert answers[5] == {
        "data": [1, 3, 5, 7], "tensor": [4, 5], "context": [5, 7], "model": [4, 5, 6, 7], "stage": list(range(8)),
        "held": {"shard": [11.0, 11.0], "whole": [10.0, 10.0]},
    }  # fmt: skip
    assert answers[2] == {
        "data": [0, 2, 4, 6], "tensor": [2, 3], "context": [0, 2], "model": [0, 1, 2, 3], "stage": list(range(8)),
        "held": {"shard": [10.0, 10.0], "whole": [10.0, 10.0]},
    }  # fmt: skip


def train_with_sgd(cases: list[tuple[int, float]]) -> list[dict[str, Tensor]]:
    rank = dist.get_rank()
    allow_fp16()
    states = []
    for zero_stage, clipping in cases:
        config = make_config(
            zero_stage, "fp16", gradient_clipping=clipping, zero_allow_untested_optimizer=True
        )
        config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
        engine = toy.make_engine(rank, config)
        for step in range(3):
            toy.feed(engine, step, MICRO_BATCHES)
            engine.step()
        states.append(engine.parameter_state())
    return states


def test_gradients_are_unscaled_and_clipped_to_the_right_length() -> None:
    """Adam hides a wrong factor on all gradients, SGD does not."""
    cases = [(zero_stage, clipping) for zero_stage in (0, 1) for clipping in (0.0, 0.7)]
    found = run_kept_ranks(train_with_sgd, toy.NUM_RANKS, cases)
    half = {"dtype": torch.float16, "sum_dtype": torch.float16, "scale": 1024.0}
    for case, (_, clipping) in enumerate(cases):
        oracle = toy.Alone([{"params": list(toy.SHAPES)}], dtype=torch.float16)
        oracle.optimizer = torch.optim.SGD(oracle.masters.values(), lr=0.1, momentum=0.9)
        for step in range(3):
            gradients = {name: toy.summed(name, step, MICRO_BATCHES, **half) for name in toy.SHAPES}
            oracle.step(gradients, clipping)
        for states in found:
            for name in set(states[case]) & set(toy.SHAPES):
                torch.testing.assert_close(
                    states[case][name], oracle.masters[name].detach(), rtol=2e-6, atol=2e-7
                )


def train_with_reduce_scatter(zero_stage: int) -> list[dict[str, Tensor]]:
    """Train with gloo's all-reduce, and with the reduce-scatter that NCCL uses."""
    states = []
    for is_gloo in (True, False):
        engine = toy.make_engine(dist.get_rank(), make_config(zero_stage, "bf16"))
        vars(engine.gradients)["_is_gloo"] = is_gloo and engine.stage.degree > 1
        for step in range(2):
            toy.feed(engine, step, MICRO_BATCHES)
            engine.step()
        states.append(engine.parameter_state())
    return states


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_both_ways_to_reduce_to_partitions_are_the_same(zero_stage: int) -> None:
    for gloo, nccl in run_kept_ranks(train_with_reduce_scatter, toy.NUM_RANKS, zero_stage):
        assert all(torch.equal(value, nccl[name]) for name, value in gloo.items())


# ---- overflow --------------------------------------------------------------------------------------------


def train_through_overflow(config: dict[str, Any], spoiled: str) -> dict[str, Any]:
    rank = dist.get_rank()
    allow_fp16()
    engine = toy.make_engine(rank, config)
    scales, steps, weights, rates = [engine.loss_scale], [], [parameters(engine)], []
    for step in range(5):
        toy.feed(engine, step, 1, spoil=spoiled if step == 1 else None)
        steps.append(engine.step())
        scales.append(engine.loss_scale)
        weights.append(parameters(engine))
        rates.append(steps[-1].learning_rates[0])
    skipped = engine.counters.skipped_steps
    return {"scales": scales, "steps": steps, "weights": weights, "rates": rates, "skipped": skipped}


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
@pytest.mark.parametrize("spoiled", ["layer.bias", "norm.weight"])
def test_overflow_on_one_stage_skips_all(zero_stage: int, spoiled: str) -> None:
    config = make_config(
        zero_stage,
        scheduler={
            "type": "WarmupLR",
            "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 10, "warmup_type": "linear"},
        },
        fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 2},
    )
    for found in run_kept_ranks(train_through_overflow, toy.NUM_RANKS, config, spoiled):
        assert [s.overflow for s in found["steps"]] == [False, True, False, False, False]
        assert found["steps"][1].grad_norm == math.inf
        assert found["scales"] == [256.0, 256.0, 128.0, 128.0, 128.0, 256.0]
        assert found["rates"] == pytest.approx([0.0, 0.0, 0.001, 0.002, 0.003])
        assert found["skipped"] == 1
        for name, value in found["weights"][1].items():
            assert torch.equal(value, found["weights"][2][name]), "a skipped step must change nothing"
            if "frozen" not in name:
                assert not torch.equal(value, found["weights"][4][name])


def test_bf16_gradients_that_are_not_finite_skip_the_step() -> None:
    for found in run_kept_ranks(train_through_overflow, toy.NUM_RANKS, make_config(1, "bf16"), "out.bias"):
        assert [s.overflow for s in found["steps"]] == [False, True, False, False, False]
        assert found["scales"] == [1.0] * 6


def overflow_at_the_smallest_scale() -> str:
    rank = dist.get_rank()
    allow_fp16()
    scaling = {"enabled": True, "initial_scale_power": 0, "hysteresis": 1}
    engine = toy.make_engine(rank, make_config(fp16=scaling))
    toy.feed(engine, 0, 1, spoil="out.bias")
    return said_of(engine.step)


def test_a_scale_that_cannot_sink_is_an_error_on_every_rank() -> None:
    for text in run_kept_ranks(overflow_at_the_smallest_scale, toy.NUM_RANKS):
        assert text.startswith("RuntimeFailure") and "smallest loss scale, 1;" in text


# ---- groups and learning rates ---------------------------------------------------------------------------

GROUPS = [
    {"params": ["middle.frozen.weight"], "weight_decay": 0.5},  # empty everywhere: frozen
    {"params": ["layer.weight", "embed.weight"], "weight_decay": 0.2},
    {"params": ["scale", "layer.bias", "out.bias"], "weight_decay": 0.0, "lr": 3e-2},
    {"params": ["norm.weight", "out.weight"], "weight_decay": 0.1},  # empty on the first stage
]


def train_groups(config: dict[str, Any], source: str) -> dict[str, Any]:
    rank = dist.get_rank()
    options: dict[str, Any] = {"parameter_groups": GROUPS}
    if rank == 2:  # the middle
        options["module"] = toy.Holder(("middle.frozen.weight",))
    if source == "callables":
        config = {key: value for key, value in config.items() if key not in ("optimizer", "scheduler")}
        options["optimizer"] = functools.partial(torch.optim.AdamW, lr=1e-2, betas=(0.9, 0.95))
        options["lr_scheduler"] = make_lambda_schedule
    engine = toy.make_engine(rank, config, **options)
    rates = []
    for step in range(4):
        toy.feed(engine, step, MICRO_BATCHES)
        rates.append(engine.step().learning_rates)
    return {"rates": rates, "masters": engine.parameter_state()}


def make_lambda_schedule(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, [lambda step, k=k: 1.0 / (1 + k * step) for k in range(len(GROUPS))]
    )


WARMUP = {
    "type": "WarmupLR",
    "params": {
        "warmup_min_lr": [0.0, 0.001, 0.002, 0.003],
        "warmup_max_lr": [0.01, 0.02, 0.03, 0.04],
        "warmup_num_steps": 4,
        "warmup_type": "linear",
    },
}


def warmup_rates(applied: int) -> list[float]:
    """Return DeepSpeed's linear warm-up after ``applied`` steps; its first step still has the smallest rate."""
    low, high = WARMUP["params"]["warmup_min_lr"], WARMUP["params"]["warmup_max_lr"]
    return [a + (b - a) * max(0, applied - 1) / 4 for a, b in zip(low, high, strict=True)]


@pytest.mark.parametrize("source", ["blocks", "callables"])
def test_groups_and_schedules_are_those_of_the_whole_model(source: str) -> None:
    config = make_config(1, scheduler=WARMUP)
    config["optimizer"]["params"].pop("weight_decay")
    found = run_kept_ranks(train_groups, toy.NUM_RANKS, config, source)
    oracle = toy.Alone(GROUPS[1:], lr=1e-2, betas=(0.9, 0.95))
    base = [1e-2, 1e-2, 3e-2, 1e-2]
    if source == "blocks":
        expected = [warmup_rates(step) for step in range(5)]
    else:
        expected = [[lr / (1 + k * step) for k, lr in enumerate(base)] for step in range(5)]
    for step in range(4):
        for group, lr in zip(oracle.optimizer.param_groups, expected[step][1:], strict=True):
            group["lr"] = lr
        oracle.step({name: toy.whole_gradient(name, step, MICRO_BATCHES).float() for name in toy.SHAPES})
    for rank, names in zip(range(4), (*toy.STAGE_NAMES[:1] * 2, *toy.STAGE_NAMES[1:]), strict=True):
        assert found[rank]["rates"] == [pytest.approx(rates) for rates in expected[1:]]
        for name in set(names) & set(toy.SHAPES):
            torch.testing.assert_close(
                found[rank]["masters"][name], oracle.masters[name].detach(), rtol=2e-6, atol=5e-7
            )


# ---- the edges -------------------------------------------------------------------------------------------


def step_with_unused_parameter(zero_stage: int) -> dict[str, Any]:
    rank = dist.get_rank()
    engine = toy.make_engine(rank, make_config(zero_stage))
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad and not (name == "layer.weight" or (name == "layer.bias" and rank == 1)):
            parameter.grad = torch.ones_like(parameter)
    engine.reduce_data()
    engine.reduce_tied()
    gradients = engine.full_gradients()
    engine.step()
    return {"before": gradients, "after": parameters(engine)}


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_a_parameter_without_gradient_is_left_alone(zero_stage: int) -> None:
    found = run_kept_ranks(step_with_unused_parameter, toy.NUM_RANKS, zero_stage)
    for rank in (0, 1):
        assert "layer.weight" not in found[rank]["before"]
        if zero_stage == 0:  # no decay either; a flat partition has a gradient of zero there, as in DeepSpeed
            assert torch.equal(found[rank]["after"]["layer.weight"], toy.initial("layer.weight"))
        assert torch.equal(found[rank]["before"]["layer.bias"], torch.ones(5))  # one rank had it
        assert torch.equal(found[rank]["before"]["embed.weight"], torch.full((7, 5), 3.0))


def construct_on_one_bad_stage() -> str:
    rank = dist.get_rank()

    def make(groups: Any) -> torch.optim.Optimizer:
        if any(p.shape == (3, 5) for p in groups):
            raise ValueError("no optimizer for out.weight")
        return torch.optim.AdamW(groups, lr=0.1)

    return said_of(lambda: toy.make_engine(rank, {"train_batch_size": 8}, optimizer=make))


def test_a_construction_that_fails_on_one_stage_fails_on_all() -> None:
    for text in run_kept_ranks(construct_on_one_bad_stage, toy.NUM_RANKS):
        assert text.startswith("ConfigError") and "rank 3 (stage 'loss'" in text
        assert "no optimizer for out.weight" in text


def construct_fp16() -> str:
    model, make_batch = build("gpt2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelSource, "prepare_plan", None)  # it is refused before anything is captured
        config = config_of(fp16={"enabled": True})
        return said_of(lambda: make_engine(model, make_batch(B, 0), config))


def test_fp16_is_refused_where_deepspeed_refuses_it() -> None:
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().is_fp16_supported():
        pytest.skip("this device computes fp16")
    assert set(run_kept_ranks(construct_fp16, 2)) == {
        "ConfigError: fp16.enabled: this device (cpu) computes no fp16; use bf16"
    }
