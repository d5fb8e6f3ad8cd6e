"""Forwards of frozen towers on each backend, and on the one that `auto` takes: times in turn, errors, building.

Each model is captured as a stage of its own in evaluation, with random weights. All backends that are installed are
built twice, cold and warm; for the cold build inductor's folder on disk is empty. They are compared with torch and
timed in turn, on one thread in processor time, which other processes do not lengthen. Then what `auto` takes is timed
anew in turn with torch and the fastest, and with what it would take without its favourites: the ablation. Beside it
stand the figures of the thesis (Collage, PACT 2022).

With --training something like LLaVA trains on 4 ranks behind a frozen tower instead. It trains on torch, with the
tower on a backend in the same stages, and with stages cut again for it. Losses are held against one process.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from gpp_benchmarks._backend_towers import FROZEN_TOWERS, TOWERS
from gpp_benchmarks._backend_training import SETTLING, train_behind_towers
from gpp_benchmarks._options import add_choices, add_option
from gpp_plugin.backends.forward_code import ForwardCode, part_codes
from gpp_plugin.backends.measured_backends import (
    TORCH,
    BuiltForward,
    build_checked,
    build_forward,
    time_in_turn,
)
from gpp_plugin.backends.place_forward import LEAST_GAIN, choose_single
from gpp_plugin.errors import BackendRefused, ConfigError
from gpp_plugin.ir.profile import BackendCost
from gpp_plugin.plugins import BACKENDS
from gpp_plugin.report.progress import step
from gpp_plugin.report.rows_text import format_rows
from gpp_plugin.report.units import fill_text

TABLE = None
"""It prints tables of its own as it goes."""

CACHE = "TORCHINDUCTOR_CACHE_DIR"
AUTO = "auto"

THESIS = (
    "thesis, section 2.5 (whole networks, on its machines): 1.43 x as fast as the best framework on a V100, 1.26 x on "
    "an RTX 2070, 1.40 x on a Xeon 8259CL; the graph level beat the op level on two of five networks, by 1.09 to "
    "1.20 x; choosing took up to two minutes, below one with the log; taking backends away made no network faster",
    "here a stage is held against torch's operators, not the best framework: `auto` is the best single backend, so "
    "over that one it gains nothing; its candidates are whole libraries on one CPU, whose costs do not add up",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add_choices(parser, "--models", TOWERS, "which (all six)")
    installed = "which to measure beside torch (all that are installed)"
    add_choices(parser, "--backends", BACKENDS.names(), installed)
    add_option(parser, "--samples", 4, "samples of a forward")
    add_option(parser, "--rounds", 15, "timed forwards of each")
    parser.add_argument("--training", action="store_true", help="train behind a frozen tower instead")
    add_choices(parser, "--towers", FROZEN_TOWERS, "of --training (both)")
    add_option(parser, "--steps", 10, "of --training")
    add_option(
        parser,
        "--stages",
        2,
        "of --training: in one, the tower would be beside what trains, and stay on torch",
    )
    add_option(parser, "--turns", 2, "runs of each way of --training")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return a row a model and backend, one a model for ``auto``, and the ablation; or a row a way of training.

    Raises:
        ConfigError: an option is wrong.
        RuntimeFailure: a rank failed.
    """
    if min(args.samples, args.rounds, args.turns, args.stages) < 1 or args.steps <= SETTLING:
        raise ConfigError(
            f"--samples, --rounds, --turns and --stages must be at least 1, --steps at least {SETTLING + 1}"
        )
    if args.training:
        return train_behind_towers(
            args.towers, backends=args.backends, num_steps=args.steps, turns=args.turns, stages=args.stages
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    ablation: list[dict[str, Any]] = []
    try:
        for name in args.models:
            with step(f"measure {name}"), _empty_cache():
                own, without = _measure(name, args)
            rows += own
            ablation += without
            print(f"{format_rows(own)}\n", flush=True)
    finally:
        torch.set_num_threads(threads)
    print(format_rows({**row, "without": ", ".join(row["without"])} for row in ablation))
    for line in ("", *THESIS):
        print(fill_text(line))
    return {
        "rows": rows,
        "ablation": ablation,
        "is_monotone": all(row["over_all"] * max(LEAST_GAIN, row["noise"]) >= 1.0 for row in ablation),
        "thesis": list(THESIS),
        "samples": args.samples,
    }


@contextlib.contextmanager
def _empty_cache() -> Iterator[None]:
    """Let inductor begin with nothing on disk."""
    with tempfile.TemporaryDirectory(prefix="gpp_inductor_", ignore_cleanup_errors=True) as folder:
        with mock.patch.dict(os.environ, {CACHE: folder}):
            yield


@torch.no_grad()
def _measure(name: str, args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of a model, and those of its ablation."""
    torch.manual_seed(0)
    model, batch = TOWERS[name](args.samples)
    outputs = ("last_hidden_state",)
    (code,) = part_codes(model, batch, outputs=outputs)
    code = replace(code, name=name)
    expected = code.run(*code.examples)
    built: dict[str, BuiltForward] = {}
    again: dict[str, float] = {}
    costs: dict[str, BackendCost] = {}
    for backend in dict.fromkeys((TORCH, *args.backends)):
        try:
            built[backend] = _build(backend, code, expected)
            start = time.perf_counter()
            _build(backend, replace(code, name=name), expected)  # another object: nothing is kept in it
            again[backend] = time.perf_counter() - start
        except BackendRefused as error:
            costs[backend] = BackendCost(backend=backend, refused=str(error))
    times = time_in_turn(_runs(built, code), rounds=args.rounds)
    for backend, made in built.items():
        costs[backend] = BackendCost(
            backend=backend, us=times[backend], build_s=made.build_s, error=made.error
        )
    rows = [_row(name, cost, costs[TORCH].us, again.get(cost.backend, 0.0)) for cost in costs.values()]
    takes = choose_single(name, list(costs.values())).backend
    best = min(built, key=lambda backend: times[backend])
    fewer = _ablated(name, list(costs.values()))
    # Everything that is compared is timed anew, in one turn: auto and the best single may be the same code, and so may
    # two ways of the ablation, which says what noise there is.
    anew = {AUTO: takes, "best": best, TORCH: TORCH, "again": takes}
    anew |= {f"without {', '.join(gone)}": left for gone, left in fewer.items()}
    fresh = time_in_turn(
        _runs({key: built[backend] for key, backend in anew.items()}, code), rounds=args.rounds
    )
    own = BackendCost(backend=AUTO, us=fresh[AUTO], error=built[takes].error)
    auto = {"takes": takes, "best_single": best, "over_best_single": fresh["best"] / fresh[AUTO]}
    rows.append({**_row(name, own, fresh[TORCH], 0.0), **auto})
    ablation = []
    noise = max(fresh["again"] / fresh[AUTO], fresh[AUTO] / fresh["again"])
    for gone, left in fewer.items():
        us = fresh[f"without {', '.join(gone)}"]
        row = {"model": name, "without": list(gone), "takes": left, "ms": us / 1e3}
        ablation.append({**row, "over_all": us / fresh[AUTO], "noise": noise})
    return rows, ablation


def _ablated(name: str, costs: Sequence[BackendCost]) -> dict[tuple[str, ...], str]:
    """Return what auto takes without one backend after another: the fastest goes first, at last torch is left.

    Beside them what it takes without each of those that it does not take anyway.
    """
    # torch 10, a 5, b 7: without nothing a; without a: b; without a and b: torch; without b: a
    fastest = sorted((c for c in costs if not c.refused and c.backend != TORCH), key=lambda cost: cost.us)
    names = [cost.backend for cost in fastest]
    gone = [tuple(names[: count + 1]) for count in range(len(names))]
    gone += [(other,) for other in names[1:]]
    return {
        away: choose_single(name, [cost for cost in costs if cost.backend not in away]).backend
        for away in gone
    }


def _build(backend: str, code: ForwardCode, expected: tuple[Tensor, ...]) -> BuiltForward:
    return build_checked(functools.partial(build_forward, backend, code), code.examples, expected)


def _runs(built: Mapping[str, BuiltForward], code: ForwardCode) -> dict[str, Callable[[], object]]:
    return {name: functools.partial(own, *code.examples) for name, own in built.items()}


def _row(model: str, cost: BackendCost, torch_us: float, build_again_s: float) -> dict[str, Any]:
    return {
        "model": model,
        "backend": cost.backend,
        "ms": cost.us / 1e3,
        "over_torch": torch_us / cost.us if cost.us else 0.0,
        "error": cost.error,
        "build_s": cost.build_s,
        "build_again_s": build_again_s,
        "refused": cost.refused,
    }
