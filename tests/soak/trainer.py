"""GraphPipelineTrainer on four ranks, degrees 1 and 2, ZeRO 0, 1 and 2: ten losses of four models are plain Trainer's."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence

from gpp_plugin.compare.loss_difference import loss_difference
from tests.integrations import trainer_jobs as jobs
from tests.ranks import run_kept_ranks

RANKS = 4
NAMES = ("clip", "t5", "gpt2", "lora")
PLANS = (
    ("4 stages of 1", {"stages": 4, "data_parallel": 1}),
    ("2 stages of 2", {"stages": 2, "data_parallel": 2}),
)
ZERO_STAGES = (0, 1, 2)
MOST_APART = 1e-6
"""As numbers, or of a loss above 1: float32 has seven digits."""

COUNT = 64  # whole mini-batches: Trainer also trains on what is left of an epoch


def main(arguments: Sequence[str]) -> int:
    """Return 0 where every loss is that of one process."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak trainer")
    parser.add_argument("--models", nargs="+", choices=NAMES, default=list(NAMES), help="which (all)")
    parser.add_argument("--zero", nargs="+", type=int, choices=ZERO_STAGES, default=list(ZERO_STAGES))
    args = parser.parse_args(arguments)
    total = jobs.UNIT * jobs.ACCUMULATION * RANKS
    cases = [(what, zero, block) for what, block in PLANS for zero in args.zero]
    wrong = 0
    for name in args.models:
        with tempfile.TemporaryDirectory() as directory:
            configs = [jobs.config_of(zero, **block) for _, zero, block in cases]
            answers = run_kept_ranks(
                jobs.train_on_ranks, RANKS, name, directory, configs, COUNT, timeout_s=900
            )
            plain = jobs.logged(jobs.train_plain(name, directory, total=total, count=COUNT))
        for number, (what, zero, _) in enumerate(cases):
            wanted = [loss for loss, *_ in plain]
            apart = max(loss_difference([loss for loss, *_ in answer[number]], wanted) for answer in answers)
            is_wrong = len(plain) != jobs.STEPS or apart > MOST_APART
            wrong += is_wrong
            verdict = "WRONG" if is_wrong else "the same"
            print(f"  {name}, {what}, ZeRO {zero}: {verdict}, {apart:.1e} apart at most", flush=True)
    return int(wrong > 0)
