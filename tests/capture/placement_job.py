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
from typing import Any

import torch

from gpp_plugin.capture import analyse_traced
from gpp_plugin.capture.tracing import shadow
from gpp_plugin.capture.tracing.devices import place_graph
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

CPU = torch.device("cpu")


@contextmanager
def traced_on_cuda() -> Iterator[None]:
    """Trace on the wanted device, as where torch has CUDA; try operators on the CPU, as these devices cannot."""
    tracing_device, analyse_layouts = shadow.tracing_device, analyse_traced.analyse_layouts

    def analyse_on_the_cpu(
        small: Any, large: Any, clusters: Any, rows: Any, device: torch.device, *, written: Any
    ) -> Any:
        for traced in (small, large):
            place_graph(traced.graph, CPU, of_type="cuda")
        found = analyse_layouts(small, large, clusters, rows, CPU, written=written)
        for traced in (small, large):
            place_graph(traced.graph, device, of_type="cpu")
        return found

    shadow.tracing_device = analyse_traced.tracing_device = lambda device: device
    analyse_traced.analyse_layouts = analyse_on_the_cpu
    try:
        yield
    finally:
        shadow.tracing_device = analyse_traced.tracing_device = tracing_device
        analyse_traced.analyse_layouts = analyse_layouts


def check_family(name: str, own: torch.device, *, is_training: bool) -> list[str]:
    """Return what of a family's code is on another device where a rank captures on ``own``."""
    first, arguments = make_part(name, torch.device("cuda", 0))
    with traced_on_cuda():
        rank_0 = first.capture(arguments, is_training=is_training)
        part, arguments = make_part(name, own)
        captured = part.capture_again(loads(Analysis, dumps(rank_0.analysis)), arguments)
    found = [
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
