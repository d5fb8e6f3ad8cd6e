"""python -m tests.capture.placement_job LIBRARY: captures on fake CUDA devices, and runs every family's code there."""

# ruff: noqa: E402
from __future__ import annotations

import sys
from pathlib import Path

from tests.capture import fake_cuda

fake_cuda.load_library(Path(sys.argv[1]))

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gpp_plugin.capture import export
from gpp_plugin.capture.tracing import meta_copy
from gpp_plugin.ir.analysis import Analysis
from gpp_plugin.ir.serialize import dumps, loads
from tests.capture.placement_checks import (
    FAMILIES,
    NUM_DEVICES,
    make_part,
    met_devices,
    profiled_codes,
    stage_codes,
)


@contextmanager
def traced_on_cuda() -> Iterator[None]:
    """Trace on the wanted device, as where torch has CUDA; an operator that is run there for real fails."""
    tracing_device = meta_copy.tracing_device
    meta_copy.tracing_device = export.tracing_device = lambda device: device
    try:
        yield
    finally:
        meta_copy.tracing_device = export.tracing_device = tracing_device


def check_family(name: str, own: torch.device, *, is_training: bool) -> list[str]:
    """Return what of a family's code is on another device where a rank captures on ``own``."""
    first, arguments = make_part(name, torch.device("cuda", 0))
    with traced_on_cuda():
        rank_0 = first.capture(arguments, is_training=is_training)
        part, arguments = make_part(name, own)
        captured = part.capture_again(loads(Analysis, dumps(rank_0.analysis)), arguments)
    on_cpu = make_part(name, torch.device("cpu"))[0].capture(arguments, is_training=is_training).analysis
    found = [
        # on the CPU the trials ran where the graph was traced: the same ones found the same
        *(line for line in rank_0.analysis.op_graph.couplings if line not in on_cpu.op_graph.couplings),
        *met_devices(captured, stage_codes, with_backward=is_training),
        *met_devices(captured, profiled_codes, with_backward=is_training),
    ]
    for index in range(NUM_DEVICES):  # rank 0's own capture, as if its device had another number
        elsewhere = dataclasses.replace(rank_0, device=torch.device("cuda", index))
        found += met_devices(elsewhere, stage_codes, with_backward=is_training and index == 0)
    return found


def main() -> None:
    """Print [family, problems] for each, in training and one evaluation, as one line of JSON."""
    torch.set_num_threads(1)
    cases = [(name, True) for name in FAMILIES] + [("clip", False)]
    answers = [
        (name, check_family(name, torch.device("cuda", 1 + i % (NUM_DEVICES - 1)), is_training=is_training))
        for i, (name, is_training) in enumerate(cases)
    ]
    print(json.dumps(answers))


main()
