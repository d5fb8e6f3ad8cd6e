"""What each rank runs in the tests of parameters that a stage's ranks hold in parts (ZeRO 3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from gpp_plugin.backends import compiled_blocks
from gpp_plugin.ir.program import InstructionKind
from tests.integrations.engine_jobs import B, U, config_of, make_engine, steps
from tests.models import build

BOTH = [0, 1]
PLACED: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
    "clip, two towers on two ranks and one": (
        "clip",
        [{"modules": ["vision_model"], "ranks": BOTH}, {"modules": ["text_model"], "ranks": [2]},
         {"modules": ["*"], "ranks": [2]}],
        {"gradient_clipping": 0.05},
    ),
    "t5, tied embeddings, recomputed": (
        "t5",
        [{"modules": ["encoder"], "ranks": BOTH}, {"modules": ["*"], "ranks": [2]}],
        {"block": {"memory": {"recompute": "full"}}},
    ),
    "gpt2, two stages on both ranks": (
        "gpt2",
        [{"modules": ["transformer.wte", "transformer.h.0"], "ranks": BOTH},
         {"modules": ["*"], "ranks": BOTH}],
        {},
    ),
}  # fmt: skip
"""Model, stages, and what else of the configuration, by case."""


def model_of(case: str) -> Any:
    name = PLACED[case][0]
    return build(name, layers=1 if name == "gpt2" else 2)


def config(case: str, zero: int, **more: Any) -> dict[str, Any]:
    _, stages, given = PLACED[case]
    block = {"plan": {"stages": stages}, **given.get("block", {})}
    return config_of(zero_optimization={"stage": zero}, **{**given, **more, "block": block})


def are_shapes_alone(engine: Any, is_sharded: bool) -> bool:
    """Return whether parameters that ranks hold in parts read as nothing, and only those."""
    nothing = [bool(p.isnan().all()) for p in engine.parameters() if p.numel()]
    return all(nothing) if is_sharded else not any(nothing)


def train(case: str, zero: int, more: dict[str, Any]) -> dict[str, Any]:
    """Train three steps, evaluate whole and in parts, look at weights; return what tests compare."""
    model, make_batch = model_of(case)
    batches = [make_batch(B, seed) for seed in range(3)]
    engine = make_engine(model, batches[0], config(case, zero, **more))
    engine.retain_gradients()
    losses = steps(engine, batches[:1])
    gradients = {name: gradient.clone() for name, gradient in engine.gradients.items()}
    norms = [engine.get_global_grad_norm()]
    for batch in batches[1:]:
        losses += steps(engine, [batch])
        norms.append(engine.get_global_grad_norm())
    stages = engine.rank_engine.stages
    sharded = [stage.stage.degree > 1 and zero == 3 for stage in stages]
    answer = {
        "losses": losses,
        "norms": norms,
        "gradients": gradients,
        "shapes alone": are_shapes_alone(engine, all(sharded)),
        "sharded": sharded,
        "evaluated": [float(engine.eval_batch(iter([make_batch(n, n)]))) for n in (B, 5)],
        "memory": engine.memory_report().ranks[engine.global_rank],
        "state": engine.module_state_dict(),
        "compiled": [stage.compiled for stage in engine.plan.stages],
        "num_compiled": engine._backends.compiled.compiler.num_compiled,
        "gathers": [
            i.stage for i in engine._rank_runner.program.instructions if i.kind is InstructionKind.GATHER
        ],
        "stages": [stage.stage for stage in stages],
    }
    engine.destroy()
    return answer


def train_compiled(case: str, compiler: Callable[..., Any], folder: str) -> dict[str, Any]:
    """Train a case under ZeRO 3 with all its blocks compiled."""
    more = {"compile": True, "slicing": "off", "profile_dir": folder}
    name, stages, given = PLACED[case]
    placed = {case: (name, stages, {**given, "block": {**given.get("block", {}), **more}})}
    with (
        mock.patch.dict(PLACED, placed),
        mock.patch.object(compiled_blocks, "compile_with_inductor", compiler),
    ):
        return train(case, 3, {})


def use_weights(directory: str) -> dict[str, Any]:
    """Read, write, generate with, export and reload weights that are in parts between steps."""
    model, make_batch = build("gpt2")
    batch = make_batch(B, 0)
    stages = {"plan": {"stages": PLACED["gpt2, two stages on both ranks"][1]}}
    answers: dict[str, Any] = {}
    for zero in (2, 3):
        sharded = {"stage": zero, "stage3_param_persistence_threshold": 0}
        engine = make_engine(build("gpt2")[0], batch, config_of(zero_optimization=sharded, block=stages))
        steps(engine, [batch])
        engine.save_pretrained(f"{directory}/export{zero}")
        tokens = engine.generate(batch["input_ids"][:2, :4], max_new_tokens=4, do_sample=False)
        with engine.gathered_parameters():
            refusals = _refusals_of(engine, [make_batch(n, n) for n in (B, 5)]) if zero == 3 else []
            for parameter in engine.parameters():
                parameter.data.mul_(0.5)
        engine.load_module_state_dict(engine.module_state_dict())  # masters of what was written
        answers[str(zero)] = {
            "tokens": tokens,
            "refusals": refusals,
            "losses": steps(engine, [batch, batch]),
            "whole": engine.gather_state_dict(),
        }
        engine.destroy()
    return answers


def _refusals_of(engine: Any, batches: list[dict[str, Any]]) -> list[str]:
    """Return what is said of training on the first and evaluating each, none of which may be taken."""
    from gpp_plugin.errors import ConfigError

    calls = [(engine.train_batch, batches[0]), *((engine.eval_batch, batch) for batch in batches)]
    said = []
    for call, batch in calls:
        left = iter([batch])
        try:
            call(left)
        except ConfigError as error:
            said.append(str(error) if next(left, None) is batch else "the batch is gone")
        else:
            said.append("")
    return said


def refusals() -> dict[str, str]:
    """Return what is said of what cannot be done."""
    from gpp_plugin.errors import GppError

    model, make_batch = build("two_branch")
    batch = make_batch(B, 0)
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "async": ({}, {"mode": "async", "micro_batch_sizes": U}),
        "backends": ({}, {"backends": "auto"}),
        "offload": ({"offload_param": {"device": "cpu"}}, {}),
    }
    said = {}
    for name, (zero, block) in cases.items():
        try:
            make_engine(
                model, batch, config_of(zero_optimization={"stage": 3, **zero}, block={"stages": 1, **block})
            )
        except GppError as error:
            said[name] = str(error)
    next(model.parameters()).ds_id = 0  # as deepspeed.zero.Init leaves it
    try:
        make_engine(model, batch, config_of(zero_optimization={"stage": 3}, block={"stages": 1}))
    except GppError as error:
        said["in parts"] = str(error)
    return said
