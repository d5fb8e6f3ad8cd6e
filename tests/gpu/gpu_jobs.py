"""What ranks run on devices beyond the jobs of other tests; on CPU ranks too, where they show only that they work."""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.integrations import engine_jobs
from tests.integrations.async_jobs import async_config, held_by_stages
from tests.integrations.engine_jobs import make_engine, steps
from tests.models import build
from tests.runtime.jobs import use_device

RESERVE_SHARE, RESERVE_BYTES = 0.08, 128 << 20
"""What an allocator may have above the plan's figure: the 8 % that a prediction may be off, and cuBLAS's workspaces with
the rounding of the allocator's segments."""
GPT2_SIZES = {"cuda": (4, 1024, 512), "cpu": (1, 64, 16)}
"""Layers a rank, width and tokens of the GPT-2 whose memory is looked at."""


def config_of(**changes: Any) -> dict[str, Any]:
    """Return the configuration of a job that verifies its capture, as users' do."""
    return engine_jobs.config_of(**{**changes, "block": {"verify": True, **changes.get("block", {})}})


def gpt2(
    device: str, num_layers: int, samples: int, *, dropout: float = 0.1
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return a GPT-2 large enough for its device, with random weights, and a batch for it."""
    from gpp_plugin.integrations.huggingface.hf_models import build_model_of, config_of, make_example_batch

    _, hidden, length = GPT2_SIZES[device]
    sizes = {"n_embd": hidden, "n_layer": num_layers, "n_head": hidden // 64, "n_positions": length}
    drops = {f"{where}_pdrop": dropout for where in ("resid", "embd", "attn")}
    plain = {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 2 * hidden, **sizes, **drops
    }  # fmt: skip
    torch.manual_seed(0)
    model = build_model_of(config_of({**plain, "bos_token_id": 1, "eos_token_id": 2}, "make test-gpu"))
    return model, make_example_batch(model, num_samples=samples, length=length)


def where(engine: Any) -> dict[str, str]:
    """Return where this rank computes and what its messages go over."""
    return {"device": str(engine.device), "transport": type(engine._rank_runner._shared.transport).__name__}


def train_in_a_bound_group(device: str) -> dict[str, Any]:
    """Train a step in a default group that is the caller's own, bound to the device; make a gloo group beside it."""
    import torch.distributed as dist

    use_device(device)
    if device == "cuda":
        dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    elif not dist.is_initialized():
        dist.init_process_group("gloo")
    default: Any = dist.group.WORLD
    default.bound_device_id = torch.device("cuda", 0)  # as `device_id` leaves it, in a dry run as well
    model, make_batch = build("gpt2")
    engine = make_engine(model, make_batch(4, 0), config_of(train_batch_size=4, block={"stages": 1}))
    losses = steps(engine, [make_batch(4, 0)])
    assert dist.get_world_size(dist.new_group([0], backend="gloo")) == 1
    return {"losses": losses, "backend": dist.get_backend(), "bound": str(default.bound_device_id)}


# ---- one step, looked at ------------------------------------------------------------------------------------


def train_without_reading(device: str, stages: int, num_steps: int) -> dict[str, Any]:
    """Train while reading the device raises, from the first task of each step to the last one before its update."""
    use_device(device)
    model, make_batch = build("gpt2")
    batches = [make_batch(8, seed) for seed in range(2 + num_steps)]
    with reading_refused(
        torch.cuda.set_sync_debug_mode if device == "cuda" else (lambda mode: None)
    ) as guard:
        engine = make_engine(model, batches[0], config_of(block={"stages": stages}))
        losses = steps(engine, batches[:2])  # compiles, opens communicators, makes the optimizer's state
        guard["is_on"] = True
        losses += steps(engine, batches[2:])
    refused = ""
    if device == "cuda":  # the guard itself: what it must refuse is refused
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.ones(1, device=engine.device).item()
        except RuntimeError as error:
            refused = str(error)
        torch.cuda.set_sync_debug_mode("default")
    return {"losses": losses, "guarded": guard["guarded"], "refused": refused, **where(engine)}


@contextlib.contextmanager
def reading_refused(set_mode: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Set a mode from the first forward of each step until its update, once the yielded ``is_on`` is set."""
    from gpp_plugin.engine.stage_step import RankUpdate
    from gpp_plugin.runtime.compute import AutogradCompute

    guard: dict[str, Any] = {"is_on": False, "is_in": False, "guarded": 0}
    forward, step = AutogradCompute.forward, RankUpdate.run

    def guarded_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if guard["is_on"] and not guard["is_in"]:
            guard["is_in"] = True
            set_mode("error")
        return forward(self, *args, **kwargs)

    def free_step(self: Any) -> Any:
        if guard["is_in"]:
            set_mode("default")
            guard["is_in"] = False
            guard["guarded"] += 1
        return step(self)

    AutogradCompute.forward, RankUpdate.run = guarded_forward, free_step  # type: ignore[method-assign]
    try:
        yield guard
    finally:
        AutogradCompute.forward, RankUpdate.run = forward, step  # type: ignore[method-assign]
        set_mode("default")


def train_within_prediction(device: str, stages: int, zero: int, num_steps: int) -> dict[str, Any]:
    """Train with an allocator that gives no more than the plan predicts and the reserve; return both peaks."""
    use_device(device)
    layers_a_rank, _, _ = GPT2_SIZES[device]
    model, batch = gpt2(device, num_layers=layers_a_rank * stages, samples=8)
    config = config_of(
        zero_optimization={"stage": zero},
        block={"planner": "uniform", "stages": stages, "schedule": "1f1b", "slicing": "off",
               "memory": {"recompute": "off", "swap": "off"}, "comm_timeout_s": 120},
    )  # fmt: skip
    engine = make_engine(model, batch, config)
    predicted = engine.memory_report().ranks[engine.global_rank].predicted_peak_bytes
    cap = round(predicted * (1 + RESERVE_SHARE)) + RESERVE_BYTES
    if device == "cuda":
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(engine.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(cap / total, 1.0), engine.device)
    losses = steps(engine, [batch] * num_steps)
    report = engine.memory_report()
    measured = report.ranks[engine.global_rank].measured_peak_bytes
    reserved = torch.cuda.max_memory_reserved(engine.device) if device == "cuda" else 0
    return {
        "losses": losses, "predicted": predicted, "measured": measured, "reserved": reserved, "cap": cap,
        "differences": report.differences, **where(engine),
    }  # fmt: skip


# ---- captured code and eager modules ------------------------------------------------------------------------


def time_captured_and_eager(device: str, rounds: int) -> dict[str, float]:
    """Return milliseconds of a forward and backward of a stage's code and of the plain model, taken in turns."""
    use_device(device)
    layers, _, _ = GPT2_SIZES[device]
    is_cuda = device == "cuda"
    model, batch = gpt2(device, num_layers=2 * layers, samples=8, dropout=0.0)
    eager, _ = gpt2(device, num_layers=2 * layers, samples=8, dropout=0.0)
    memory = {"recompute": "off", "swap": "off"}
    config = config_of(
        bf16={"enabled": is_cuda},
        train_micro_batch_size_per_gpu=8,
        optimizer={"type": "AdamW", "params": {"lr": 0.0}},  # a step leaves both with the same weights
        block={"stages": 1, "memory": memory},
    )
    engine = make_engine(model, batch, config)
    steps(engine, [batch])
    dtype = torch.bfloat16 if is_cuda else torch.float32
    eager = eager.to(engine.device, dtype).train()
    given = {k: v.to(engine.device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
    captured = captured_call(engine, given)

    def run_captured() -> None:
        captured().backward()
        engine.module.zero_grad(set_to_none=True)

    def run_eager() -> None:
        eager(**given).loss.backward()
        eager.zero_grad(set_to_none=True)

    times: dict[str, list[float]] = {"captured": [], "eager": []}
    for number in range(rounds + 2):  # the first two are warm-up
        for name, call in (("captured", run_captured), ("eager", run_eager)):
            took = _milliseconds(call, repeat=5 if is_cuda else 1, is_cuda=is_cuda)
            times[name] += [took] if number >= 2 else []
    step_ms = _milliseconds(lambda: steps(engine, [batch] * 3), repeat=1, is_cuda=is_cuda) / 3
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    losses = {"captured_loss": float(captured()), "eager_loss": float(eager(**given).loss)}
    return {**medians, **losses, "step": step_ms}


def captured_call(engine: Any, batch: dict[str, Any]) -> Callable[[], torch.Tensor]:
    """Return what runs the code of an engine's one stage on a batch and returns the loss."""
    (compiled,) = engine._rank_runner.stage_runners[0]._compiled.values()
    function, tensors = compiled.code.code.function, engine.module.named_tensors()
    arguments = [tensors[name] for name in function.tensors] + [batch[key] for key in function.batch_inputs]
    assert not function.received, "a model of one stage receives nothing"

    def call() -> torch.Tensor:
        (loss,) = (output for output in function.call(*arguments) if output.ndim == 0)
        return loss

    return call


def _milliseconds(call: Callable[[], Any], *, repeat: int, is_cuda: bool) -> float:
    if is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    if is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeat * 1e3


# ---- what jobs are made of ----------------------------------------------------------------------------------


def train_and_evaluate(device: str, stages: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Evaluate batches of several sizes between steps of training; rank 0 also asks the plain model."""
    use_device(device)
    model, make_batch = build("gpt2", dropout=0.3)
    plain = build("gpt2", dropout=0.3)[0].eval()
    config = config_of(train_batch_size=16, block={"stages": stages})
    engine = make_engine(model, make_batch(16, 0), config)
    found, wanted = [], []
    for size in sizes:
        batch = make_batch(size, size)
        loss, logits = engine.eval_batch(iter([batch]), return_logits=True)
        found.append((float(loss), logits.float().cpu()))
        plain.to(engine.device)
        with torch.no_grad():
            rows = [{k: v[i : i + 1].to(engine.device) for k, v in batch.items()} for i in range(size)]
            outputs = [plain(**row) for row in rows]
        mean = sum(float(output["loss"]) for output in outputs) / size
        wanted.append((mean, torch.cat([output["logits"] for output in outputs]).float().cpu()))
    losses = steps(engine, [make_batch(16, seed) for seed in range(2)])
    after = float(engine.eval_batch(iter([make_batch(16, 3)])))
    losses += steps(engine, [make_batch(16, 2)])
    return {"found": found, "wanted": wanted, "losses": losses, "after": after, **where(engine)}


def train_with_traces(device: str, stages: int, folder: str) -> dict[str, Any]:
    """Train three recorded steps; return the last timeline, and on rank 0 the events of the file."""
    use_device(device)
    model, make_batch = build("gpt2")
    path = Path(folder) / "step{step}.json"
    block = {"stages": stages, "trace_path": str(path)}
    config = config_of(train_batch_size=16, block=block)
    engine = make_engine(model, make_batch(16, 0), config)
    start = time.perf_counter()
    losses = steps(engine, [make_batch(16, seed) for seed in range(3)])
    took_us = (time.perf_counter() - start) * 1e6
    events: list[dict[str, Any]] = []
    if engine.global_rank == 0:
        trace = json.loads(Path(str(path).format(step=3)).read_text())["traceEvents"]
        events = [event for event in trace if event["ph"] == "X"]
    return {
        "losses": losses, "took_us": took_us, "events": events, "timeline": engine.last_timeline, **where(engine)
    }  # fmt: skip


def train_stage_graph(device: str, name: str, zero: int) -> dict[str, Any]:
    """Train three steps of a graph of given stages, tensor-parallel ones among them."""
    from tests.stage_graph import jobs
    from tests.stage_graph.graphs import batch_of

    use_device(device)
    engine = jobs.make_engine(name, jobs.config_of(name, zero_optimization={"stage": zero}))
    losses, norms = [], []
    for seed in range(3):
        losses += steps(engine, [batch_of(name, seed=seed)])
        norms.append(engine.get_global_grad_norm())
    return {"losses": losses, "norms": norms, "stage": engine.stage_name, **where(engine)}


def train_asynchronously(device: str, stages: int, num_batches: int) -> dict[str, Any]:
    """Train in mode async; return what its emulation needs to know beside losses and parameters."""
    use_device(device)
    model, make_batch = build("two_branch")
    batches = [make_batch(16, seed) for seed in range(num_batches)]
    config = async_config(mini_batch=16, unit=4, block={"stages": stages})
    engine = make_engine(model, batches[0], config)
    losses = steps(engine, batches)
    engine.flush()
    return {
        "losses": losses,
        "parameters": {name: p.detach().float().cpu() for name, p in engine.module.named_parameters()},
        "stages": held_by_stages(engine),
        "micro_batch": engine.plan.stages[0].micro_batch_size,
        **where(engine),
    }
