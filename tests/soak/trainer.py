"""GraphPipelineTrainer on four ranks: four models, degrees 1 and 2, ZeRO 0 to 3.

Ten losses are plain Trainer's; a training that ends in the middle of an epoch and goes on from its checkpoint has the bits
of one without a break, on the same data, each sample once an epoch.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence

from gpp_plugin.relative_errors import loss_difference
from tests.integrations import trainer_jobs as jobs
from tests.ranks import run_kept_ranks

RANKS = 4
NAMES = ("clip", "t5", "gpt2", "lora")
PLANS = {
    "4 stages of 1": {"stages": 4, "data_parallel": 1},
    "2 stages of 2": {"stages": 2, "data_parallel": 2},
}
ZERO_STAGES = (0, 1, 2, 3)
MOST_APART = 1e-6
"""As numbers, or of a loss above 1: float32 has seven digits."""

COUNT = 64  # whole mini-batches: Trainer also trains on what is left of an epoch
LIMIT_S = 900


def main(arguments: Sequence[str]) -> int:
    """Return 0 where every loss is that of one process, and every resumed training the one without a break."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak trainer")
    parser.add_argument("--models", nargs="+", choices=NAMES, default=list(NAMES), help="which (all)")
    parser.add_argument("--zero", nargs="+", type=int, choices=ZERO_STAGES, default=list(ZERO_STAGES))
    parser.add_argument("--what", nargs="+", choices=CHECKS, default=list(CHECKS), help="of these (all)")
    args = parser.parse_args(arguments)
    cases = [(what, zero) for what in PLANS for zero in args.zero]
    verdicts = [
        verdict for what in args.what for name in args.models for verdict in CHECKS[what](name, cases)
    ]
    print(f"  {sum(verdicts)} of {len(verdicts)} right", flush=True)
    return int(not all(verdicts))


def _losses(name: str, cases: Sequence[tuple[str, int]]) -> Iterator[bool]:
    """Print a line a case, and yield whether its losses are those of one process."""
    total = jobs.UNIT * jobs.ACCUMULATION * RANKS
    with tempfile.TemporaryDirectory() as directory:
        configs = [jobs.config_of(zero, **PLANS[what]) for what, zero in cases]
        answers = run_kept_ranks(
            jobs.train_on_ranks, RANKS, name, directory, configs, COUNT, timeout_s=LIMIT_S
        )
        plain = jobs.logged(jobs.train_plain(name, directory, total=total, count=COUNT))
    wanted = [loss for loss, *_ in plain]
    for number, (what, zero) in enumerate(cases):
        apart = max(loss_difference([loss for loss, *_ in answer[number]], wanted) for answer in answers)
        is_right = len(plain) == jobs.STEPS and apart <= MOST_APART
        verdict = "the same" if is_right else "WRONG"
        print(f"  {name}, {what}, ZeRO {zero}: {verdict}, {apart:.1e} apart at most", flush=True)
        yield is_right


def _resumed(name: str, cases: Sequence[tuple[str, int]]) -> Iterator[bool]:
    """Print a line a case, and yield whether it goes on from the middle as if there had been no break."""
    for what, zero in cases:
        config = jobs.config_of(zero, **PLANS[what])
        with tempfile.TemporaryDirectory() as directory:
            answers = run_kept_ranks(jobs.resume, RANKS, directory, name, config, timeout_s=LIMIT_S)
        verdict = "the same bits and data"
        try:
            for found in answers:
                jobs.check_resumed(found)
        except AssertionError as error:
            verdict = f"WRONG: {str(error).splitlines()[0]}"
        print(f"  {name}, {what}, ZeRO {zero}, resumed: {verdict}", flush=True)
        yield not verdict.startswith("WRONG")


CHECKS = {"losses": _losses, "resumed": _resumed}
