"""`gpp simulate --decode`: Figures 4.1 to 4.5 of the chapter on Cache Parallelism, as rows.

    4.1    what a GPU sends, by ranks and batch
    4.2    throughput by the length of prompts, for three batches      4.3    by the length of answers
    4.4    throughput against latency, for five batches
    4.5    what the time is spent on, by the length of prompts

The chapter's curves are pictures whose numbers are not printed, and of their axes only 10K tokens of a prompt and the
batches are: lengths here are assumed. Figures are of `ServedLayer`, with the formula of what `engine.generate` sends;
beside them stands what the other formulas and a server without block tables would say.

Source: Cache Parallelism (thesis, chapter 4), Figures 4.1 to 4.5
Tests: tests/simulate/test_decoding.py
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpp_benchmarks._decode_serving import (
    KINDS,
    VOLUMES,
    Request,
    Served,
    ServedLayer,
    Volumes,
    sent_of,
    serve,
)
from gpp_plugin.errors import ConfigError, nearest
from gpp_plugin.report.rows_text import format_rows
from gpp_plugin.report.units import fill_text

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What is asked for.

    Args:
        prefix, new: tokens of a prompt, and in the mean of an answer; what the other figures hold fixed.
        spread: answers are of ``new`` tokens, less or more by at most this part, evenly.
        waves: requests, as a multiple of the batch.
        rate: requests a second, at random times (Poisson); 0: all of them wait from the beginning.
        seed: of lengths and times.
        prefixes, answers: the lengths of the figures that vary them.
        batches: of Figures 4.2 and 4.3; ``all_batches`` of 4.1 and 4.4; ``batch`` of 4.5.
    """

    prefix: int = 10_000
    new: int = 512
    spread: float = 0.5
    waves: float = 2.0
    rate: float = 0.0
    seed: int = 0
    prefixes: tuple[int, ...] = (10_000, 20_000, 40_000, 80_000)
    answers: tuple[int, ...] = (1_000, 4_000, 16_000)
    batches: tuple[int, ...] = (32, 128, 512)
    all_batches: tuple[int, ...] = (32, 64, 128, 256, 512)
    batch: int = 128

    def requests(self, *, batch: int, prefix: int, new: int) -> list[Request]:
        """Return requests, the same for the same numbers."""
        rng = random.Random(self.seed)
        most, arrival, made = round(new * self.spread), 0.0, []
        for _ in range(max(1, round(batch * self.waves))):
            if self.rate:
                arrival += rng.expovariate(self.rate) * 1e6
            length = max(1, new + rng.randint(-most, most))
            made.append(Request(arrival_us=arrival, prompt=prefix, new=length))
        return made


def volume_rows(layer: ServedLayer, traffic: Traffic) -> list[Row]:
    """Return Figure 4.1: bytes that leave a GPU in a step, one byte an element as printed there."""
    rows = []
    for ranks in (2, 4, 8):
        one = dataclasses.replace(layer, ranks=ranks)
        for batch in traffic.all_batches:
            row: Row = {"figure": "4.1", "ranks": ranks, "batch": batch}
            for name in VOLUMES:
                tensor, cache = (sent_of(one, kind, batch, name) for kind in KINDS[1:])
                if name != "owner":  # whose tensor parallelism is the corrected one
                    row[f"{name}_tp"] = tensor
                row |= {f"{name}_cp": cache, f"{name}_cp_to_tp": cache / tensor}
            rows.append(row)
    return rows


def throughput_rows(layer: ServedLayer, traffic: Traffic, *, figure: str) -> list[Row]:
    """Return Figure 4.2, by prompts, or 4.3, by answers: tokens a second of a layer."""
    lengths = traffic.prefixes if figure == "4.2" else traffic.answers
    rows = []
    for batch in traffic.batches:
        for length in lengths:
            prefix, new = (length, traffic.new) if figure == "4.2" else (traffic.prefix, length)
            requests = traffic.requests(batch=batch, prefix=prefix, new=new)
            rows.append(
                {"figure": figure, "max_batch": batch, "prefix": prefix, "new": new}
                | _compared(layer, requests, batch)
            )
    return rows


def latency_rows(layer: ServedLayer, traffic: Traffic) -> list[Row]:
    """Return Figure 4.4: throughput and milliseconds a token, as the largest batch grows."""
    rows = []
    for prefix in traffic.prefixes:
        for batch in traffic.all_batches:
            requests = traffic.requests(batch=batch, prefix=prefix, new=traffic.new)
            row: Row = {"figure": "4.4", "prefix": prefix, "max_batch": batch}
            for kind in KINDS:
                one = serve(layer, kind, requests, max_batch=batch)
                row |= {f"{kind}_tokens_per_s": one.tokens_per_s, f"{kind}_token_ms": one.token_us / 1e3}
            rows.append(row)
    return rows


def breakdown_rows(layer: ServedLayer, traffic: Traffic) -> list[Row]:
    """Return Figure 4.5: seconds of a rank by what they are spent on."""
    rows = []
    for prefix in traffic.prefixes:
        requests = traffic.requests(batch=traffic.batch, prefix=prefix, new=traffic.new)
        for kind in KINDS:
            one = serve(layer, kind, requests, max_batch=traffic.batch)
            # the chapter's "CPU overhead" is the last four together
            rows.append(
                {
                    "figure": "4.5",
                    "prefix": prefix,
                    "parallel": kind,
                    "compute_s": (one.times.linear_us + one.times.attention_us) / 1e6,
                    "communication_s": one.times.link_us / 1e6,
                    "tables_s": one.times.table_us / 1e6,
                    "eviction_s": one.evict_us / 1e6,
                    "host_s": one.times.host_us / 1e6,
                    "idle_s": one.idle_us / 1e6,
                    "evictions": one.evictions,
                }
            )
    return rows


FIGURES: Mapping[str, Callable[[ServedLayer, Traffic], list[Row]]] = {
    "4.1": volume_rows,
    "4.2": lambda layer, traffic: throughput_rows(layer, traffic, figure="4.2"),
    "4.3": lambda layer, traffic: throughput_rows(layer, traffic, figure="4.3"),
    "4.4": latency_rows,
    "4.5": breakdown_rows,
}


def _compared(layer: ServedLayer, requests: Sequence[Request], batch: int) -> Row:
    """Return the throughputs of all three, and cache over tensor parallel by other formulas and without tables."""
    found = {kind: serve(layer, kind, requests, max_batch=batch) for kind in KINDS}
    tensor, cache = found["tensor"], found["cache"]

    def ratio(with_layer: ServedLayer, volumes: Volumes) -> float:
        other, one = (
            serve(with_layer, kind, requests, max_batch=batch, volumes=volumes) for kind in KINDS[1:]
        )
        return one.tokens_per_s / other.tokens_per_s

    without = dataclasses.replace(layer, entry_ns=0.0)
    return {
        "dp": found["data"].tokens_per_s,
        "tp": tensor.tokens_per_s,
        "cp": cache.tokens_per_s,
        "cp_to_tp": cache.tokens_per_s / tensor.tokens_per_s,
        "printed_cp_to_tp": ratio(layer, "printed"),
        "gathered_cp_to_tp": ratio(layer, "corrected"),
        "no_tables_cp_to_tp": ratio(without, "owner"),
        "dp_evictions": found["data"].evictions,
        "tp_evictions": tensor.evictions,
        "cp_evictions": cache.evictions,
        "cp_less_tp_ns": differences(tensor, cache),
    }


def differences(tensor: Served, cache: Served) -> dict[str, float]:
    """Return what cache parallelism takes more of a token's time than tensor parallelism, by part, in nanoseconds."""
    parts: dict[str, Callable[[Served], float]] = {
        "linear layers": lambda one: one.times.linear_us,
        "attention": lambda one: one.times.attention_us,
        "messages": lambda one: one.times.link_us,
        "block tables": lambda one: one.times.table_us,
        "eviction": lambda one: one.evict_us,
    }
    return {name: 1e3 * (of(cache) / cache.tokens - of(tensor) / tensor.tokens) for name, of in parts.items()}


def remarks(rows: Sequence[Row]) -> list[str]:
    """Return what the rows of one figure say of cache against tensor parallelism, in lines, and why."""
    if not rows or "cp_to_tp" not in rows[0]:
        return _volume_remarks(rows)
    lines = []
    for name, what in (
        ("cp_to_tp", "with the server's block tables"),
        ("no_tables_cp_to_tp", "without them"),
    ):
        slower = [row for row in rows if row[name] <= 1]
        faster = [row for row in rows if row[name] > 1]
        lines.append(
            f"{what}: cache parallelism is faster than tensor parallelism in {len(faster)} of {len(rows)} rows"
        )
        if slower and faster:
            lines[-1] += f", not at {_cells(slower)}"
        has_tables = name == "cp_to_tp"
        if slower:
            lines.append(f"  where it is slower, by {_most(slower, is_gain=False, has_tables=has_tables)}")
        if faster:
            lines.append(f"  where it is faster, by {_most(faster, is_gain=True, has_tables=has_tables)}")
    slowest = sum(row["dp"] < min(row["tp"], row["cp"]) for row in rows)
    behind = sum(row["dp"] < row["cp"] for row in rows)
    lines.append(
        f"data parallelism is slower than cache parallelism in {behind} of {len(rows)} rows, than both in {slowest}"
    )
    return lines


def _volume_remarks(rows: Sequence[Row]) -> list[str]:
    if not rows or "printed_cp_to_tp" not in rows[0]:
        return []
    texts = []
    for name, what in (
        ("printed", "as printed (unlike units)"),
        ("corrected", "in equal units, k and v gathered by all"),
        ("owner", "in equal units, k and v to the owner alone"),
    ):
        ratios = [row[f"{name}_cp_to_tp"] for row in rows]
        texts.append(
            f"{what}: cache parallelism sends {min(ratios):.3f} to {max(ratios):.3f} of tensor parallelism"
        )
    return texts


def _cells(rows: Sequence[Row]) -> str:
    """Return which rows these are."""
    by_batch: dict[int, list[str]] = {}
    for row in rows:
        by_batch.setdefault(row["max_batch"], []).append(f"{row['prefix']} + {row['new']}")
    return "; ".join(f"batch {batch}: {', '.join(cells)}" for batch, cells in by_batch.items())


REASONS = {
    "linear layers": "each rank reads all weights, where tensor parallelism reads a part",
    "attention": "each rank begins a task for every sequence and head, however few positions it holds",
    "messages": "what is sent, by the formula",
    "block tables": "each rank is told its own blocks only, where tensor parallelism tells every rank all",
    "eviction": "sequences copied to the host and back",
}


def _most(rows: Sequence[Row], *, is_gain: bool, has_tables: bool) -> str:
    """Return the part that decides in most of the rows, with its mean."""
    sign = -1 if is_gain else 1
    parts = [name for name in REASONS if has_tables or name != "block tables"]
    sums = {name: sum(row["cp_less_tp_ns"][name] for row in rows) / len(rows) for name in parts}
    worst = max(parts, key=lambda name: sign * sums[name])
    return f"{worst}: {abs(sums[worst]) / 1e3:.1f} us a token in the mean ({REASONS[worst]})"


# ---- the command -----------------------------------------------------------------------------------------

TITLES = {
    "4.1": "bytes that leave a GPU in a step of a layer, one byte an element",
    "4.2": "tokens a second of a layer, by the length of prompts",
    "4.3": "tokens a second of a layer, by the length of answers",
    "4.4": "tokens a second of a layer and milliseconds a token, as the largest batch grows",
    "4.5": "seconds of a rank by what they are spent on",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of simulated decoding."""
    parser.add_argument(
        "--figure", nargs="+", choices=sorted(FIGURES), help="with --decode: these figures (all)"
    )
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="with --decode: a constant of the layer, the machine or the requests; a list as 1000,4000",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print the figures as tables.

    Raises:
        ConfigError: a constant is unknown or wrong.
    """
    layer, traffic = _constants(args.set)
    rows: list[dict[str, Any]] = []
    said: dict[str, list[str]] = {}
    for figure in args.figure or FIGURES:
        found = FIGURES[figure](layer, traffic)
        said[figure] = remarks(found)
        print(fill_text(f"Figure {figure}: {TITLES[figure]}"))
        print(format_rows([{k: v for k, v in row.items() if k != "figure"} for row in found]))
        print("".join(f"{fill_text(line, indent='  ')}\n" for line in said[figure]))
        rows += found
    constants = {**dataclasses.asdict(layer), **dataclasses.asdict(traffic)}
    shown = ", ".join(f"{name}={_shown(value)}" for name, value in constants.items())
    print(fill_text(f"constants (--set): {shown}", indent="  "))
    return {"rows": rows, "remarks": said, "constants": constants}


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else f"{value:g}"


def _constants(texts: list[str]) -> tuple[ServedLayer, Traffic]:
    """Return the constants with what was set.

    Raises:
        ConfigError: names the one that is unknown or wrong.
    """
    kinds = (ServedLayer(), Traffic())
    known = {field.name: getattr(kind, field.name) for kind in kinds for field in dataclasses.fields(kind)}
    given: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in known:
            raise ConfigError(
                f"--set {text}: there is no constant {name!r}{nearest(name, known)} ({', '.join(known)})"
            )
        given[name] = _read(text, value, known[name])
    layer, traffic = ServedLayer(**_of(ServedLayer, given)), Traffic(**_of(Traffic, given))
    if layer.heads % layer.kv_heads or layer.width % layer.heads:
        raise ConfigError(
            f"--set width={layer.width} heads={layer.heads} kv_heads={layer.kv_heads}: heads divide the width, and "
            "key-value heads the heads"
        )
    return layer, traffic


def _of(kind: Any, given: dict[str, Any]) -> dict[str, Any]:
    return {field.name: given[field.name] for field in dataclasses.fields(kind) if field.name in given}


MAY_BE_ZERO = {"entry_ns", "task_ns", "link_us", "step_us", "rate", "spread", "seed", "prefix"}


def _read(text: str, value: str, default: Any) -> Any:
    kind = type(default[0]) if isinstance(default, tuple) else type(default)
    try:
        read = [kind(part) for part in (value.split(",") if isinstance(default, tuple) else [value])]
    except ValueError:
        what = "whole numbers, as 1,2" if isinstance(default, tuple) else f"{kind.__name__}"
        raise ConfigError(f"--set {text}: {value!r} is no value of the kind {what}") from None
    least = 0 if text.partition("=")[0] in MAY_BE_ZERO else None
    if any(one < 0 or (one == 0 and least is None) or one != one for one in read):
        raise ConfigError(f"--set {text}: give {'at least 0' if least == 0 else 'more than 0'}")
    return tuple(read) if isinstance(default, tuple) else read[0]
