"""Trains on the ranks that there are: a job that loses a host goes on from its last checkpoint, planned anew.

Each host runs an agent of torchrun's, which starts its ranks again when any rank of the job is gone; where a host does
not come back within torchrun's limit, the job goes on without it. On two hosts of two ranks each:

    torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint first-host:29500 \\
        --rdzv-id job1 examples/train_elastically.py --save /shared/checkpoints

The script needs no more than `engine.resume`, a mini-batch that does not depend on the number of ranks
(``train_batch_size``), and a plan that the planner makes (no ``"stages"`` for so many ranks). The directory is one that
all hosts share; the first host keeps torchrun's store, and must live.
"""

import argparse
import os

import deepspeed
import torch
from torch import nn

import gpp_plugin  # noqa: F401  makes deepspeed.initialize honour the "graph_pipeline" block

CONFIG = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "graph_pipeline": {"checkpoint": {"keep_last": 2}},
}


class TwoViews(nn.Module):
    """Says from two views of a vector, each seen by a branch of its own, which of eight kinds it is."""

    def __init__(self, width=32):
        super().__init__()
        self.left, self.right = (
            nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())])
            for _ in range(2)
        )
        self.head = nn.Linear(2 * width, 8)

    def forward(self, left, right, labels):
        """Return the loss."""
        seen = torch.cat([self.left(left), self.right(right)], dim=1)
        return nn.functional.cross_entropy(self.head(seen), labels)


def make_dataset(num_samples=512, width=32):
    """Return vectors around eight centres, seen twice with noise."""
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(8, width, generator=generator)
    labels = torch.randint(0, 8, (num_samples,), generator=generator)
    views = [centres[labels] + torch.randn(num_samples, width, generator=generator) for _ in range(2)]
    return [{"left": views[0][i], "right": views[1][i], "labels": labels[i]} for i in range(num_samples)]


def main():
    """Train to the last step, from wherever the job had come."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--save", default="checkpoints", help="directory that all hosts share")
    args = parser.parse_args()

    torch.manual_seed(0)
    engine = deepspeed.initialize(model=TwoViews(), config=CONFIG, training_data=make_dataset())[0]
    is_first = engine.global_rank == 0
    resumed = engine.resume(args.save)
    if is_first:
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        come = "from the beginning" if resumed is None else f"from step {engine.global_steps}"
        print(f"start {start}: {engine.plan.num_ranks} ranks, {come}", flush=True)
    while engine.global_steps < args.steps:
        loss = engine.train_batch()
        if is_first:
            print(f"step {engine.global_steps}  loss {loss.item():.9g}", flush=True)
        if engine.global_steps % args.every == 0:
            engine.save_checkpoint(args.save)


if __name__ == "__main__":
    main()
