"""Every reader of a file, fed with mutated ones: documented errors only, soon, and in little memory.

What is accepted is used as a command would use it: a plan is simulated and printed, a profile planned with.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpp_plugin.api import format_plan, format_timeline, make_request, plan, plan_for, simulate, validate
from gpp_plugin.config.reader import batch_arithmetic, read_config
from gpp_plugin.errors import CheckpointError, GppError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.profile import Profile
from gpp_plugin.ir.serialize import dumps, load, read_json
from gpp_plugin.ir.timeline import Timeline
from gpp_plugin.plan.cluster_files import CLUSTER_DIR, read_cluster
from gpp_plugin.plan.explicit_plan import explicit_plan
from gpp_plugin.plan.plan_form import check_events, read_plan
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.rehearse.rehearsal import RehearsalSettings, check_memory, load_rehearsable
from gpp_plugin.report.chrome_trace import chrome_trace
from gpp_plugin.report.timeline_chart import summarize_timeline
from tests.soak.mutations import mutate

MOST_SECONDS = 2.0
MOST_SECONDS_A_TASK = 400e-6
"""Beside it, of a plan that is accepted: one change may leave it a plan, of a mini-batch a thousand times as large."""
MOST_BYTES = 1 << 30
LONGEST_MESSAGE = 4000
FREE_BYTES = 64 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A reader and valid files for it.

    Args:
        use: reads the file and does what a command would; of a plan returns the tasks that it has.
        fixed: see `mutate`.
    """

    name: str
    valid: Callable[[], list[Any]]
    use: Callable[[Path], int | None]
    fixed: tuple[str, ...] = ("value",)


@dataclass(slots=True)
class Found:
    """What became of a reader's inputs."""

    counts: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    failures: list[tuple[str, bytes]] = field(default_factory=list)


@functools.cache
def _request() -> PlanRequest:
    return make_request(
        "mmt", "summit", num_devices=4, sizes={"branches": 2}, mini_batch=16, loss_unit=2, data_parallel=1
    )


@functools.cache
def _plans() -> list[PipelinePlan]:
    made = plan_for(_request(), planner="graphpipe")
    tight = plan(
        "mmt", "summit", planner="uniform", num_devices=4, sizes={"branches": 2}, mode="async", stages=4
    )
    shared = plan("mmt", "summit", num_devices=2, sizes={"branches": 2}, stages=4, mini_batch=16)
    assert all(len(each.stages) > 1 for each in (made, tight, shared))
    return [made, tight, shared]


def _plain_plans() -> list[Any]:
    return [json.loads(dumps(made)) for made in _plans()]


def _use_plan(path: Path) -> int:
    made = read_plan(path)
    format_plan(made)
    if any(stage.forward_us for stage in made.stages):
        format_timeline(simulate(made), made)
    validate(made)
    return _num_tasks(made)


def _use_rehearsal(path: Path) -> int:
    made = load_rehearsable(path)
    check_memory(made, RehearsalSettings(), FREE_BYTES)
    validate(made)
    return _num_tasks(made)


def _num_tasks(made: PipelinePlan) -> int:
    return sum(2 * made.num_micro_batches(index) for index in range(len(made.stages)))


def _use_timeline(path: Path) -> None:
    made = _plans()[0]
    timeline = load(Timeline, path)
    check_events(timeline, made)
    format_timeline(timeline, made)
    summarize_timeline(timeline)
    chrome_trace(timeline, made)


def _use_profile(path: Path) -> None:
    import dataclasses

    request = dataclasses.replace(_request(), profile=load(Profile, path))
    plan_for(request, planner="uniform", schedule="1f1b")


def _use_cluster(path: Path) -> None:
    read_cluster(path)
    simulate(_plans()[0], read_cluster(path, num_devices=_plans()[0].num_ranks))


def _use_config(path: Path) -> None:
    from gpp_plugin.integrations.deepspeed.config_values import derive_stage_config

    read_config(path)
    sizes = batch_arithmetic(path, 2)
    derive_stage_config(read_json(path, what="x"), mini_batch=sizes.mini_batch, degree=1, device_type="cpu")


def _use_given(path: Path) -> None:
    from gpp_plugin.model.preparation import _names_its_order, _read_plan  # as the engine reads it

    spec = _read_plan(str(path))
    _names_its_order(spec)
    explicit_plan(spec, _request())


def _given_plans() -> list[Any]:
    graph = _request().graph
    roots = list(dict.fromkeys(block.name.split(".")[0] for block in graph.blocks))
    written = {"stages": [{"name": "a", "modules": roots[:1], "ranks": [0, 1], "micro_batch_size": 4},
                          {"modules": ["*"], "ranks": [2, 3], "k": 1}]}  # fmt: skip
    return [written, {"stages": [{"modules": ["*"], "devices": 4}]}, _plain_plans()[0]]


def _use_index(path: Path) -> None:
    from gpp_plugin.model.materialize import _indexed_files

    for file in _indexed_files(path).values():
        if file.parent != path.parent:
            raise AssertionError(f"{file} is outside {path.parent}")


def _use_model(path: Path) -> None:
    from gpp_plugin.integrations.huggingface.hf_models import (
        build_on_meta,
        make_example_batch,
        read_hf_config,
    )

    make_example_batch(build_on_meta(read_hf_config(path)), num_samples=2, length=8)


CONFIGS = [
    {
        "train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8}, "fp16": {"enabled": True, "loss_scale": 0}, "data_types": {"grad_accum_dtype": "fp32"}, "tensor_parallel": {"autotp_size": 1}, "flops_profiler": {"enabled": False},
        "graph_pipeline": {"planner": "graphpipe", "stages": 2, "micro_batch_sizes": {"loss": 2, "*": 4},
                           "memory": {"limit_gb": 4, "recompute": "auto"}, "lengths": {"max": 64, "typical": [32]},
                           "cluster": {"name": "c", "devices": []}, "eager": ["a.*"], "comm_timeout_s": 30},
    },
    {"train_batch_size": 8, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}, "scheduler": {"type": "WarmupLR", "params": {}},
     "graph_pipeline": {"units": 4, "mode": "sync", "trace_path": "x{step}.json", "slicing": "off"}},
]  # fmt: skip
MODELS = [
    {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 16, "n_layer": 1, "n_head": 2,
     "n_positions": 16, "vocab_size": 64, "n_inner": 32, "activation_function": "gelu_new", "attn_pdrop": 0.1},
    {"model_type": "clip", "architectures": ["CLIPModel"], "projection_dim": 8,
     "text_config": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
                     "vocab_size": 64, "max_position_embeddings": 8, "eos_token_id": 2},
     "vision_config": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
                       "image_size": 16, "patch_size": 8}},
    {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 8, "d_kv": 4, "d_ff": 16,
     "num_layers": 1, "num_heads": 2, "vocab_size": 64, "decoder_start_token_id": 0},
]  # fmt: skip
TARGETS = (
    Target(name="plan", valid=_plain_plans, use=_use_plan),
    Target(name="rehearsal", valid=_plain_plans, use=_use_rehearsal),
    Target(
        name="timeline", valid=lambda: [json.loads(dumps(simulate(_plans()[0], "summit")))], use=_use_timeline
    ),
    Target(name="profile", valid=lambda: [json.loads(dumps(_request().profile))], use=_use_profile),
    Target(
        name="cluster",
        valid=lambda: [json.loads(path.read_text()) for path in sorted(CLUSTER_DIR.glob("*.json"))],
        use=_use_cluster,
        fixed=(),
    ),
    Target(name="config", valid=lambda: CONFIGS, use=_use_config, fixed=()),
    Target(name="given", valid=_given_plans, use=_use_given, fixed=()),
    Target(
        name="index",
        valid=lambda: [{"metadata": {"total_size": 8}, "weight_map": {"a": "input.json", "b": "input.json"}}],
        use=_use_index,
        fixed=(),
    ),
    Target(name="model", valid=lambda: MODELS, use=_use_model, fixed=()),
)


def fuzz(target: Target, count: int, *, seed: int = 0) -> Found:
    """Feed a reader with ``count`` mutated files."""
    draw = random.Random(f"{target.name} {seed}")
    valid = target.valid()
    found = Found()
    with tempfile.TemporaryDirectory(prefix="gpp_fuzz_") as folder:
        path = Path(folder) / "input.json"
        for whole in valid:  # what is valid is accepted, and what this loads is not counted below
            path.write_text(json.dumps(whole))
            target.use(path)
        for number in range(count):
            content = mutate(draw, valid[number % len(valid)], fixed=target.fixed)
            path.write_bytes(content)
            _try_one(target, path, content, found)
    return found


def _try_one(target: Target, path: Path, content: bytes, found: Found) -> None:
    start = time.process_time()  # not the waits for other processes
    num_tasks = 0
    try:
        num_tasks = target.use(path) or 0
        verdict = "accepted"
    except (GppError, CheckpointError) as error:
        verdict = "refused"
        line = str(error)
        if not line or len(line) > LONGEST_MESSAGE:
            verdict = "unclear"
            found.failures.append((f"a message of {len(line)} characters: {line[:200]!r}", content))
    except Exception as error:  # this is what is looked for
        verdict = "escaped"
        found.failures.append((f"{type(error).__name__}: {str(error)[:300]}", content))
    seconds = time.process_time() - start
    found.slowest_s = max(found.slowest_s, seconds)
    found.counts[verdict] += 1
    if seconds > MOST_SECONDS + MOST_SECONDS_A_TASK * num_tasks:
        found.counts["slow"] += 1
        found.failures.append((f"took {seconds:.1f} s ({verdict})", content))


def main(arguments: list[str]) -> int:
    """Fuzz all readers, or those that are named; print what was found, and 1 where anything escaped."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=100_000, help="inputs in all (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reader", action="append", choices=[target.name for target in TARGETS])
    parser.add_argument("--keep", type=Path, help="write what failed there")
    args = parser.parse_args(arguments)
    chosen = [target for target in TARGETS if args.reader is None or target.name in args.reader]
    _plans()  # made before anything is counted
    if "model" in {target.name for target in chosen}:
        import transformers  # noqa: F401 - before memory is limited
    _limit_memory()
    print(
        f"{'reader':<10} {'inputs':>8} {'accepted':>8} {'refused':>8} {'escaped':>8} {'slow':>5}  slowest s",
        flush=True,
    )
    failures: list[tuple[str, str, bytes]] = []
    for target in chosen:
        found = fuzz(target, -(-args.count // len(chosen)), seed=args.seed)
        counts = found.counts
        total = sum(counts[verdict] for verdict in ("accepted", "refused", "escaped", "unclear"))
        print(
            f"{target.name:<10} {total:>8} {counts['accepted']:>8} {counts['refused']:>8} "
            f"{counts['escaped'] + counts['unclear']:>8} {counts['slow']:>5}  {found.slowest_s:9.2f}",
            flush=True,
        )
        failures += [(target.name, what, content) for what, content in found.failures]
    for number, (name, what, content) in enumerate(failures):
        if number < 40:
            print(f"{name}: {what}")
        if args.keep is not None:
            args.keep.mkdir(parents=True, exist_ok=True)
            (args.keep / f"{name}-{number}.json").write_bytes(content)
    print(f"{len(failures)} failures; at most {MOST_SECONDS:g} s and {MOST_BYTES >> 30} GiB each")
    return 1 if failures else 0


def _limit_memory() -> None:
    """Let this process take a GiB more than it has; what takes more gets a MemoryError, which is found."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
