"""One rank of `gpp bench start-up`: a training script's own steps, timed on rank 0.

python -m gpp_benchmarks._start_up_ranks SETTINGS_JSON
"""

from __future__ import annotations

import collections
import json
import os
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
MINI_BATCH = 16
LENGTH = 32


class StackSampler:
    """Looks at this thread's stack again and again, and adds up where it was seen.

    A timer's signal, not a thread: `torch.export` takes what another thread holds of its frames for the model's.
    """

    def __init__(self) -> None:
        self._seen: dict[str, float] = collections.defaultdict(float)
        self._last = time.perf_counter()
        signal.signal(signal.SIGALRM, self._look)
        signal.setitimer(signal.ITIMER_REAL, EVERY_S, EVERY_S)

    def _look(self, number: int, frame: FrameType | None) -> None:
        now = time.perf_counter()
        self._seen[_part_of(frame)] += (
            now - self._last
        )  # as long as since the last look: seconds, not samples
        self._last = now

    def end(self) -> dict[str, float]:
        """Stop looking and return the seconds seen in every part."""
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        return dict(self._seen)


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
    seconds: dict[str, float] = {}
    begin = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal begin
        now = time.perf_counter()
        seconds[name] = now - begin
        begin = now

    import deepspeed

    import gpp_plugin  # noqa: F401  (the import registers the `graph_pipeline` block)

    make = {"clip": _clip, "t5": _t5}[job]
    lap("import")
    model, config, batches = make()
    lap("model_and_data")
    sampler = StackSampler()
    engine, _, _, _ = deepspeed.initialize(model=model, config=config, training_data=batches)
    lap("initialize")
    engine.train_batch()
    lap("first_step")
    parts = sampler.end()
    engine.train_batch()
    begin = time.perf_counter()
    engine.train_batch()
    lap("third_step")
    if os.environ["RANK"] == "0":
        from gpp_plugin.launch import emit_event

        emit_event(found={"seconds": seconds, "parts": parts})
    engine.destroy()


def _clip() -> tuple[Any, dict[str, Any], Any]:
    """Return the demo's model, configuration and data."""
    from gpp_plugin.demo.clip import make_clip
    from gpp_plugin.demo.demo_settings import DemoSettings
    from gpp_plugin.demo.digits import load_digit_captions

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
