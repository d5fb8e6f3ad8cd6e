"""`gpp demo`: trains the digits on a graph of stages, shows it, and compares it with a single process.

Its ranks run `main`: what a user's training script does, and events for the process that shows them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.serialize import load, save
from gpp_plugin.ir.timeline import Timeline
from gpp_plugin.launch import emit_event, end_rank, require_modules, run_ranks
from gpp_plugin.relative_errors import loss_difference
from gpp_plugin.report.plan_text import format_plan
from gpp_plugin.report.timeline_chart import format_timeline, forward_overlap_us, forward_overlaps_us
from gpp_plugin.report.units import screen_columns

COMPARED_STEPS = 20
"""Steps over which equality is stated: later on, rounding of any two runs grows apart by itself."""

PLAIN_LINES = 10
"""Progress lines where the output is no terminal."""

TIMELINE_STEPS = 5
"""Steps at the end whose timelines are recorded; the one of median length is kept."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """Sizes and seeds of a run.

    Args:
        steps: optimizer steps; ``mini_batch`` samples in each.
        micro_batch: samples the encoders take at a time; the loss always takes the mini-batch.
        num_ranks: processes; ``stages`` is how many stages they form.
        mode: ``sync``, or ``async``: every stage steps alone, after each micro-batch of ``async_micro_batch``.
        gradient_clipping: largest norm of a gradient; 0 does not clip.
    """

    steps: int = 400
    mini_batch: int = 64
    micro_batch: int = 16
    num_ranks: int = 4
    stages: int = 4
    seed: int = 0
    mode: str = "sync"
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    warmup_steps: int = 20
    gradient_clipping: float = 0.0
    async_micro_batch: int = 32

    @classmethod
    def in_mode(cls, mode: str, **values: Any) -> DemoSettings:
        """Return the settings of a mode.

        Stale gradients want smaller steps: half the learning rate, a longer warm-up, and clipping. At mode sync's
        rates this model falls into a state in which all its features are alike.
        """
        if mode == "async":
            values = {"learning_rate": 5e-4, "warmup_steps": 50, "gradient_clipping": 0.3, **values}
        return cls(mode=mode, **values)

    def optimizer_block(self) -> dict[str, Any]:
        """Return the JSON's ``optimizer``."""
        params = {
            "lr": self.learning_rate,
            "betas": [0.9, 0.999],
            "eps": 1e-8,
            "weight_decay": self.weight_decay,
        }
        return {"type": "AdamW", "params": {**params, "torch_adam": True}}

    def scheduler_block(self) -> dict[str, Any]:
        """Return the JSON's ``scheduler``: linear warm-up, linear decay to zero."""
        params = {
            "total_num_steps": self.steps,
            "warmup_min_lr": 0.0,
            "warmup_max_lr": self.learning_rate,
            "warmup_num_steps": min(self.warmup_steps, self.steps - 1),
            "warmup_type": "linear",
        }
        return {"type": "WarmupDecayLR", "params": params}

    def learning_rate_factor(self, step: int) -> float:
        """Return what `scheduler_block` makes of the learning rate at a step, counted from 0.

        DeepSpeed's scheduler starts one step behind the optimizer, so two steps are taken at rate 0.
        """
        # 400 steps, 20 of warm-up: factor 0 at steps 0 and 1, 1/20 at 2, 1 at step 21, then down along (400 -
        # position) / 380 to 2/380 at step 399.
        params = self.scheduler_block()["params"]
        total, warm = params["total_num_steps"], params["warmup_num_steps"]
        position = max(step - 1, 0)
        if position < warm:
            return position / warm
        return max(0.0, (total - position) / max(1.0, total - warm))

    def ds_config(self) -> dict[str, Any]:
        """Return the DeepSpeed configuration, the ``graph_pipeline`` block in it."""
        config: dict[str, Any] = {
            "train_batch_size": self.mini_batch,
            "optimizer": self.optimizer_block(),
            "scheduler": self.scheduler_block(),
            "steps_per_print": 0,
            "gradient_clipping": self.gradient_clipping,
        }
        if self.mode == "async":
            block: dict[str, Any] = {"stages": self.stages, "mode": "async"}
            return {
                **config,
                "train_micro_batch_size_per_gpu": self.async_micro_batch,
                "graph_pipeline": block,
            }
        # The towers take 16 samples at a time, the loss all 64: contrastive losses depend on who else is in
        # the batch, so this trains as one process does on mini-batches of 64.
        sizes = {"loss": "full", "*": self.micro_batch}
        return {**config, "graph_pipeline": {"stages": self.stages, "micro_batch_sizes": sizes}}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TowerOverlap:
    """The vision and the text stage whose forwards share most time, in microseconds of one step."""

    vision: str
    text: str
    overlap_us: float
    same_micro_batch_us: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gpp demo`."""
    default = DemoSettings()
    parser.add_argument("--steps", type=int, default=default.steps, help="optimizer steps (%(default)s)")
    parser.add_argument("--ranks", type=int, default=default.num_ranks, help="processes (%(default)s)")
    parser.add_argument("--stages", type=int, default=default.stages, help="stages they form (%(default)s)")
    parser.add_argument("--seed", type=int, default=default.seed, help="of weights and batches (%(default)s)")
    parser.add_argument(
        "--mode",
        choices=("sync", "async"),
        default=default.mode,
        help="one step of all stages a mini-batch, or each stage alone with stale gradients (%(default)s)",
    )
    parser.add_argument("--out", type=Path, help="keep plan, timeline, trace and trained model there")
    parser.add_argument(
        "--timeout", type=float, default=900.0, help="seconds after which to give up (%(default)s)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run the demo and print what it shows; return its figures.

    Raises:
        GppError: an option is impossible or a rank failed.
    """
    for name in ("steps", "ranks", "stages"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name}: {getattr(args, name)} is not valid; give at least 1")
    require_modules("transformers", "sklearn")
    settings = DemoSettings.in_mode(
        args.mode, steps=args.steps, num_ranks=args.ranks, stages=args.stages, seed=args.seed
    )
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        return _run_in(args.out, settings, args.timeout)
    with tempfile.TemporaryDirectory(prefix="gpp_demo_") as folder:
        return _run_in(Path(folder), settings, args.timeout)


def _run_in(folder: Path, settings: DemoSettings, timeout_s: float) -> dict[str, Any]:
    start = time.perf_counter()
    print(
        f"Training a CLIP on scikit-learn's digits: {settings.num_ranks} ranks on this machine, "
        f"{settings.steps} steps of {settings.mini_batch} image-caption pairs\n",
        flush=True,
    )
    # The folder holds what the ranks leave to this process, which has no engine: plan.json (before the first
    # step), timeline.json and model/ (after the last).
    losses, train_seconds = _train(folder, settings, timeout_s)
    plan = load(PipelinePlan, folder / "plan.json")
    timeline = load(Timeline, folder / "timeline.json")
    shown = format_timeline(timeline, plan, screen=screen_columns())
    print(f"\nOne step as it ran, the median of the last ones:\n{shown}")
    overlap = find_tower_overlap(timeline, plan)
    if overlap is not None:
        print(
            f"stages {overlap.vision} and {overlap.text} ran forwards at the same time for "
            f"{overlap.overlap_us / 1000:.1f} ms, {overlap.same_micro_batch_us / 1000:.1f} ms of it on the "
            "same micro-batch"
        )
    accuracy = _accuracy(folder)
    rows: list[dict[str, Any]] = [{"step": step, "loss": loss} for step, loss in enumerate(losses, start=1)]
    figures: dict[str, Any] = {"num_stages": len(plan.stages), "depth": plan.depth}
    differences, unit = "", "mini-batch"
    if settings.mode == "sync":  # a single process has no stale gradients to compare with
        # Behind the pipelined run, never beside it: two trainings on the same cores would slow each other, and
        # the times printed are those of one.
        reference = _reference_losses(settings)
        for row, other in zip(rows, reference, strict=True):
            row["reference_loss"] = other
        first = loss_difference(losses[:COMPARED_STEPS], reference[:COMPARED_STEPS])
        everything = loss_difference(losses, reference)
        compared, unit = min(COMPARED_STEPS, settings.steps), "step"
        differences = (
            f"largest relative difference to single-process training: {first:.1e} in the losses of the first "
            f"{compared} steps, {everything:.1e} in all {settings.steps}\n"
        )
        figures |= {
            "max_relative_difference": first,
            "compared_steps": compared,
            "max_relative_difference_all_steps": everything,
            "overlap": None if overlap is None else dataclasses.asdict(overlap),
        }
    seconds = time.perf_counter() - start
    print(
        f"\nzero-shot accuracy on held-out digits: {100 * accuracy:.1f} %\n{differences}"
        f"{seconds:.0f} s in all, {train_seconds:.0f} s of them training "
        f"({1000 * train_seconds / len(losses):.0f} ms a {unit})"
    )
    return {"rows": rows, "accuracy": accuracy, "seconds": seconds, "train_seconds": train_seconds, **figures}


def _train(folder: Path, settings: DemoSettings, timeout_s: float) -> tuple[list[float], float]:
    """Run the ranks and show their progress; return the losses and the seconds of the training loop."""
    losses: list[float] = []
    # Seconds of training count from the plan to the last step, so that imports and profiling are not in them:
    #
    #   start     "the ranks are up"     plan            step 1 ... step n        model saved
    #   |---- imports ----|---- profile ----|---- train_seconds ----------|
    start = plan_time = time.perf_counter()
    events = run_ranks(
        "gpp_plugin.demo.demo_run",
        [json.dumps(dataclasses.asdict(settings)), str(folder)],
        num_ranks=settings.num_ranks,
        timeout_s=timeout_s,
    )
    end_time = plan_time
    with _Progress(settings.steps) as progress:
        for event in events:
            if event["event"] == "phase":
                progress.show(f"{time.perf_counter() - start:.0f} s: {event['text']}")
            elif event["event"] == "plan":
                plan_time = time.perf_counter()
                text = format_plan(load(PipelinePlan, folder / "plan.json"), width=screen_columns() or 120)
                progress.show(f"{plan_time - start:.0f} s: the plan\n\n{text}\n")
            elif event["event"] == "step":
                losses.append(event["loss"])
                progress.advance(event["step"], event["loss"])
                end_time = time.perf_counter()
    return losses, end_time - plan_time


def _accuracy(folder: Path) -> float:
    """Return the accuracy of the saved model."""
    import torch
    from transformers import CLIPModel
    from transformers.utils import logging as transformers_logging

    from gpp_plugin.demo.clip import load_digit_captions, zero_shot_accuracy

    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)  # as each rank has; with operators this small, more only wait for each other
    model = CLIPModel.from_pretrained(folder / "model")
    return zero_shot_accuracy(model, load_digit_captions().held_out)


def _reference_losses(settings: DemoSettings) -> list[float]:
    """Return the losses of training in one process."""
    import torch

    from gpp_plugin.demo.clip import load_digit_captions, make_clip, mini_batches

    data = load_digit_captions()
    print("\nThe same training in one process, to compare with:", flush=True)
    model = make_clip(data.tokenizer, seed=settings.seed)
    # "torch_adam" is DeepSpeed's word for torch's AdamW instead of its fused one; torch does not know it.
    params = {k: v for k, v in settings.optimizer_block()["params"].items() if k != "torch_adam"}
    optimizer = torch.optim.AdamW(model.parameters(), **params)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, settings.learning_rate_factor)
    model.train()
    batches = mini_batches(
        data.train, mini_batch=settings.mini_batch, steps=settings.steps, seed=settings.seed
    )
    reference: list[float] = []
    with _Progress(settings.steps) as progress:
        for step, batch in enumerate(batches, start=1):
            loss = model(**batch, return_loss=True).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            reference.append(loss.item())
            progress.advance(step, reference[-1])
    return reference


def find_tower_overlap(timeline: Timeline, plan: PipelinePlan) -> TowerOverlap | None:
    """Return the vision and text stage that overlap most; None where one stage holds both towers."""
    vision = _tower_stages(plan, "vision_model")
    text = _tower_stages(plan, "text_model")
    found = [
        TowerOverlap(
            vision=plan.stages[v].name,
            text=plan.stages[t].name,
            overlap_us=forward_overlap_us(timeline, [v, t]),
            same_micro_batch_us=sum(forward_overlaps_us(timeline, [v, t]).values()),
        )
        for v in vision
        for t in text
    ]
    # The same micro-batch in both towers at once is what a chain can never do; other overlaps it has too.
    return max(found, key=lambda o: (o.same_micro_batch_us, o.overlap_us), default=None)


def _tower_stages(plan: PipelinePlan, tower: str) -> list[int]:
    """Return the stages that hold blocks of one tower and none of the other."""
    other = {"vision_model": "text_model", "text_model": "vision_model"}[tower]
    return [
        index
        for index, stage in enumerate(plan.stages)
        if any(block.startswith(tower) for block in stage.blocks)
        and not any(block.startswith(other) for block in stage.blocks)
    ]


class _Progress:
    """A bar with the loss on a terminal; a few plain lines elsewhere."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> _Progress:
        if sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]}"),
                TimeElapsedColumn(),
            )
            self._task = self._bar.add_task("", total=self._steps, loss="-")
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, text: str) -> None:
        """Print above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def advance(self, step: int, loss: float) -> None:
        """Show that a step is done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, loss=f"{loss:.4f}")
        elif step == 1 or step % max(1, self._steps // PLAIN_LINES) == 0 or step == self._steps:
            print(f"  step {step:4d} of {self._steps}  loss {loss:.4f}", flush=True)


# ---- one rank ------------------------------------------------------------------------------------------------


def main() -> None:
    """Train on this rank, with the settings and the folder of the command line; rank 0 reports."""
    import deepspeed
    import torch.distributed as dist

    from gpp_plugin.demo.clip import load_digit_captions, make_clip, mini_batches

    settings = DemoSettings(**json.loads(sys.argv[1]))
    output = Path(sys.argv[2])
    is_first = os.environ["RANK"] == "0"
    if is_first:
        emit_event(event="phase", text="the ranks are up; capturing, profiling and planning")
    data = load_digit_captions()
    engine, _, _, _ = deepspeed.initialize(
        model=make_clip(data.tokenizer, seed=settings.seed),
        config=settings.ds_config(),
        training_data=data.train,
    )
    if is_first:
        save(engine.plan, output / "plan.json")
        emit_event(event="plan")
    batches = mini_batches(
        data.train, mini_batch=settings.mini_batch, steps=settings.steps, seed=settings.seed
    )
    timelines = []
    for step in range(settings.steps):
        # Only at the end: by then everything is allocated, and recording costs the other steps nothing.
        engine.record_timelines = step >= settings.steps - TIMELINE_STEPS
        loss = engine.train_batch(data_iter=batches)
        if is_first:
            emit_event(event="step", step=step + 1, loss=float(loss))
            if engine.record_timelines:
                timelines.append(engine.last_timeline)
    if is_first:
        timelines.sort(key=lambda timeline: timeline.iteration_us)
        save(timelines[len(timelines) // 2], output / "timeline.json")
    engine.save_pretrained(output / "model")
    dist.barrier()


if __name__ == "__main__":
    main()
    end_rank()
