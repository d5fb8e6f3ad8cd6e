"""One rank of `gpp bench start-up`: a training script's own steps, timed on rank 0.

python -m gpp_benchmarks._start_up_ranks SETTINGS_JSON
"""

from __future__ import annotations

import collections
import json
import os
import resource
import signal
import sys
import time
from types import FrameType
from typing import Any

WAITING = "waiting"
PARTS = (
    ("/runtime/ranks/", WAITING),
    ("/model/verify/verification.py", "verification"),
    ("/gpp_plugin/capture/", "capture"),
    ("/gpp_plugin/profile/", "profile"),
    ("/gpp_plugin/plan/", "plan"),
    ("/gpp_plugin/schedule/", "schedule"),
    ("/gpp_plugin/simulate/", "plan"),
    ("site-packages/deepspeed/", "DeepSpeed"),
    ("site-packages/transformers/", "model"),
)
"""Part of a path -> what a rank does while a frame of such a file is on its stack; the outermost such frame counts."""

OTHER = "engine"
EVERY_S = 0.01
PLANNED = ("llava-7b",)
"""Jobs of one rank that end with the plan."""
MINI_BATCH = 16
LENGTH = 32


class StackSampler:
    """Looks at this thread's stack again and again, and adds up where it was seen.

    A timer's signal, not a thread: `torch.export` takes what another thread holds of its frames for the model's.
    """

    def __init__(self) -> None:
        self._seen: dict[str, float] = collections.defaultdict(float)
        self._busy: dict[str, float] = collections.defaultdict(float)
        self._last, self._last_busy = time.perf_counter(), time.process_time()
        signal.signal(signal.SIGALRM, self._look)
        signal.setitimer(signal.ITIMER_REAL, EVERY_S, EVERY_S)

    def _look(self, number: int, frame: FrameType | None) -> None:
        now, busy, part = time.perf_counter(), time.process_time(), _part_of(frame)
        self._seen[part] += now - self._last  # as long as since the last look: seconds, not samples
        self._busy[part] += busy - self._last_busy
        self._last, self._last_busy = now, busy

    def end(self) -> tuple[dict[str, float], dict[str, float]]:
        """Stop looking and return the seconds seen in every part, and those of them that a processor worked."""
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        return dict(self._seen), dict(self._busy)


class Laps:
    """Seconds of each step of a script, by the clock and of this process's own work."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.busy: dict[str, float] = {}
        self.start()

    def start(self) -> None:
        """Leave out what has gone by since the last step."""
        self._begin, self._begin_busy = time.perf_counter(), time.process_time()

    def end(self, name: str) -> None:
        """End a step; the next one begins."""
        self.seconds[name] = time.perf_counter() - self._begin
        self.busy[name] = time.process_time() - self._begin_busy
        self.start()


def peak_mb() -> float:
    """Return the most memory that this process had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def _part_of(frame: FrameType | None) -> str:
    files = []
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    found = OTHER
    for file in reversed(files):  # outermost first
        for fragment, part in PARTS:
            if fragment in file:
                if part != WAITING:
                    return part
                found = part  # unless it is this rank that the others wait for
    return found


def main() -> None:
    """Start a job on this rank; rank 0 reports."""
    job = json.loads(sys.argv[1])["job"]
    laps = Laps()
    import deepspeed

    import gpp_plugin  # noqa: F401  (the import registers the `graph_pipeline` block)
    from gpp_plugin.launch import emit_event

    laps.end("import")
    parts, busy_parts = _plan(job, laps) if job in PLANNED else _train(job, laps, deepspeed.initialize)
    if os.environ["RANK"] == "0":
        found = {"seconds": laps.seconds, "busy": laps.busy, "parts": parts, "busy_parts": busy_parts}
        emit_event(found={**found, "peak_mb": peak_mb()})


def _train(job: str, laps: Laps, initialize: Any) -> tuple[dict[str, float], dict[str, float]]:
    """Train three steps; return what `StackSampler` saw of ``initialize`` and the first one."""
    model, config, batches = {"clip": _clip, "t5": _t5}[job]()
    laps.end("model_and_data")
    sampler = StackSampler()
    engine, _, _, _ = initialize(model=model, config=config, training_data=batches)
    laps.end("initialize")
    engine.train_batch()
    laps.end("first_step")
    parts = sampler.end()
    engine.train_batch()
    laps.start()
    engine.train_batch()
    laps.end("third_step")
    engine.destroy()
    return parts


def _plan(name: str, laps: Laps) -> tuple[dict[str, float], dict[str, float]]:
    """Plan a model that is never made, from its configuration, for eight GPUs; return what `StackSampler` saw."""
    from gpp_plugin import api
    from gpp_plugin.library.named_models import config_path, huggingface_model

    model, (batch,) = huggingface_model(config_path(name), loss_unit=4, lengths=[512])
    laps.end("build")
    sampler = StackSampler()
    request = api.make_request(
        model,
        "dgx_h100",
        sample_batch=batch,
        num_devices=8,
        mini_batch=64,
        loss_unit=4,
        memory=("recompute",),
    )
    laps.end("capture_and_costs")
    api.plan_for(request)
    laps.end("plan")
    return sampler.end()


def _clip() -> tuple[Any, dict[str, Any], Any]:
    """Return the demo's model, configuration and data."""
    from gpp_plugin.demo.clip import load_digit_captions, make_clip
    from gpp_plugin.demo.demo_settings import DemoSettings

    settings = DemoSettings()
    data = load_digit_captions()
    return make_clip(data.tokenizer, seed=settings.seed), settings.ds_config(), data.train


def _t5() -> tuple[Any, dict[str, Any], Any]:
    """Return a T5 of six encoder and six decoder layers, four stages, and random tokens."""
    import torch
    import transformers

    config = transformers.T5Config(
        vocab_size=512, d_model=128, d_kv=32, d_ff=512, num_layers=6, num_decoder_layers=6, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config)
    tokens = torch.randint(3, 512, (8 * MINI_BATCH, LENGTH))
    data = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in tokens]
    block = {"stages": 4}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    sizes = {"train_batch_size": MINI_BATCH, "train_micro_batch_size_per_gpu": MINI_BATCH // 4}
    return model, {**sizes, "optimizer": optimizer, "graph_pipeline": block}, data


if __name__ == "__main__":
    main()
