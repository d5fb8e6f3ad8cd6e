"""How long an evaluation takes beside the forward tasks of a training timeline, and beside one process.

A GPT-2 of small layers is divided into a stage a rank. Its batches are trained on, with timelines, and then evaluated
together (`engine.eval_batches`), the first batch apart. The bound is the busiest rank's forward tasks for as many
batches: a pipeline that stays full takes this and its filling once. Processor time, of all ranks, tells more where the
machine is busy with other things: one process needs it for the same forwards.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from typing import Any

from gpp_benchmarks._options import add_option
from gpp_benchmarks._ranks import bench_ranks, over_ranks, rank_settings, start_engine
from gpp_plugin.errors import ConfigError

VOCABULARY = 512
MOST = 1.3
"""Times the forward tasks that an evaluation may take."""
TRAINED = 6
"""Mini-batches whose timelines are looked at; of the first ones the forwards are slower."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add_option(parser, "--ranks", [2, 4], "numbers of ranks")
    add_option(parser, "--batches", 20, "of an evaluation")
    add_option(parser, "--samples", 8, "of a batch, four micro-batches")
    add_option(parser, "--width", 256, "of the layers")
    add_option(parser, "--layers", 8, "of the model")
    add_option(parser, "--length", 64, "tokens of a sample")
    add_option(parser, "--rounds", 3, "evaluations; the quickest counts")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return a row a number of ranks."""
    if min(args.ranks) < 2 or args.batches < 2 or args.samples % 4 or args.rounds < 1:
        raise ConfigError(
            f"--ranks {args.ranks}, --batches {args.batches}, --samples {args.samples}, --rounds {args.rounds}: give "
            "at least 2 ranks, 2 batches, a multiple of 4 samples and 1 round"
        )
    rows: list[dict[str, Any]] = []
    names = ("batches", "samples", "width", "layers", "length", "rounds")
    settings = {name: getattr(args, name) for name in names}
    for num_ranks in args.ranks:
        timeout_s = 120.0 + 20.0 * args.rounds * num_ranks
        for row in bench_ranks("evaluation", settings, num_ranks=num_ranks, timeout_s=timeout_s):
            rows.append({"ranks": num_ranks, **row, "most": MOST})
            print(_line(rows[-1]), flush=True)
    return {"rows": rows}


def _line(row: dict[str, Any]) -> str:
    return (
        "{ranks} ranks: {evaluation_s:.2f} s for {batches} batches, {ratio:.2f} x the forward tasks of {forward_s:.2f} "
        "s (at most {most}); {first_s:.2f} s the first time; one process {plain_s:.2f} s; processors {cpu_s:.2f} s, "
        "one process {plain_cpu_s:.2f} s"
    ).format(**row)


def main() -> None:
    """Measure on one rank; rank 0 tells."""
    import torch
    import torch.distributed as dist
    from transformers import GPT2Config, GPT2LMHeadModel

    from gpp_plugin.ir.timeline import EventKind
    from gpp_plugin.launch import emit_event, end_rank

    settings = rank_settings()
    samples, length, count = settings["samples"], settings["length"], settings["batches"]
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=length,
        n_embd=settings["width"],
        n_layer=settings["layers"],
        n_head=4,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)
    plain = copy.deepcopy(model).eval()
    ids = [torch.randint(VOCABULARY, (samples, length)) for _ in range(count)]
    batches = [{"input_ids": rows, "labels": rows} for rows in ids]
    engine = start_engine(
        model,
        batches[0],
        {
            "train_batch_size": samples,
            "train_micro_batch_size_per_gpu": samples // 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}},
            "graph_pipeline": {"stages": int(os.environ["WORLD_SIZE"]), "comm_timeout_s": 120},
        },
    )
    rank = dist.get_rank()
    forwards: list[float] = []
    engine.record_timelines = True
    for batch in batches[:TRAINED]:
        engine.train_batch(iter([batch]))
        if rank == 0:  # which has the events of all
            of_ranks = dict.fromkeys(range(dist.get_world_size()), 0.0)
            for event in engine.last_timeline.events:
                if event.kind is EventKind.FORWARD:
                    of_ranks[event.rank] += (event.end_us - event.start_us) / 1e6
            forwards.append(max(of_ranks.values()))
    engine.record_timelines = False
    forward_s = statistics.median(forwards[2:]) * (count - 1) if rank == 0 else 0.0
    engine.eval_batches(batches[:1])
    times = []
    for _ in range(settings["rounds"] + 1):
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        engine.eval_batches(batches[1:])
        times.append([time.perf_counter() - start, time.process_time() - cpu, forward_s])
    found = over_ranks(times)
    best = min(found[1:])
    plain_s = plain_cpu_s = 0.0
    if rank == 0:  # the others wait
        plain(**batches[0])
        start, cpu = time.perf_counter(), time.process_time()
        with torch.no_grad():
            for batch in batches[1:]:
                plain(**batch)
        plain_s, plain_cpu_s = time.perf_counter() - start, time.process_time() - cpu
    dist.barrier()
    if rank == 0:
        emit_event(
            batches=count - 1,
            evaluation_s=best[0],
            first_s=found[0][0],
            forward_s=best[2],
            ratio=best[0] / best[2],
            cpu_s=min(row[1] for row in found[1:]),
            plain_s=plain_s,
            plain_cpu_s=plain_cpu_s,
        )
    end_rank()


if __name__ == "__main__":
    main()
