"""What a scenario is, and the two sides that it runs on: the peer's engine and this package's.

A scenario is a function of a `Side`. It does what one of a peer's own tests does, by calls that both engines have, and
returns what it saw: numbers, texts, lists and dicts of them. What the two sides saw is then compared (`verdict_of`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SAME, REFUSED, DIFFERS = "same", "refused", "differs"
CLOSE = 1e-5
RAISED = "raised"
LONGEST_LINE = 200

Seen = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One behaviour that a peer's tests ask for.

    Args:
        name: what the command line has for it.
        peer: ``deepspeed`` or ``torch``; ``files`` are configurations, beside one process. ``of`` is a part of it.
        what: the behaviour, for the table.
        here: what is expected: same, refused or differs; ``why`` is the reason and what to use.
        run: returns what one side shows; None for what cannot be run beside the peer, which ``test`` shows.
        most: largest relative distance of numbers that are the same.
    """

    name: str
    peer: str
    of: str
    what: str
    here: str
    why: str
    ranks: int
    most: float
    run: Callable[[Side], Seen] | None
    test: str = ""


SCENARIOS: list[Scenario] = []
"""All of them, in the order of their definition (`gpp_benchmarks.peers.all_scenarios` imports them)."""


def scenario(
    of: str,
    what: str,
    *,
    here: str = SAME,
    why: str = "",
    peer: str = "deepspeed",
    ranks: int = 2,
    most: float = CLOSE,
) -> Callable[[Callable[[Side], Seen]], Callable[[Side], Seen]]:
    """Put a function into the list of scenarios."""

    def add(run: Callable[[Side], Seen]) -> Callable[[Side], Seen]:
        add_scenario(
            run, name=run.__name__, peer=peer, of=of, what=what, here=here, why=why, ranks=ranks, most=most
        )
        return run

    return add


def add_scenario(run: Callable[[Side], Seen] | None, *, ranks: int = 2, test: str = "", **facts: Any) -> None:
    """Put a scenario into the list."""
    SCENARIOS.append(Scenario(run=run, ranks=ranks, test=test, **facts))


def shown_elsewhere(of: str, what: str, *, here: str, test: str, why: str = "") -> None:
    """Put into the list what only a test of ours shows."""
    name = test.rpartition("::")[2]
    add_scenario(
        None, name=name, peer="deepspeed", of=of, what=what, here=here, why=why, ranks=0, most=0.0, test=test
    )


class Side:
    """One of the two engines, on this rank.

    Args:
        is_peer: whether it is the peer's own.
        folder: of this scenario alone; the peer's side runs first.
    """

    def __init__(self, *, is_peer: bool, folder: Path) -> None:
        self.is_peer = is_peer
        self.folder = folder
        self.own = folder / ("peer" if is_peer else "here")
        self._engines: list[Any] = []

    def keep(self, engine: Any) -> Any:
        """Return an engine that ends with the scenario."""
        self._engines.append(engine)
        return engine

    def end(self) -> None:
        """End all engines of the scenario."""
        for engine in self._engines:
            with contextlib.suppress(Exception):
                engine.destroy()
        self._engines.clear()


def raised_by(call: Callable[[], Any]) -> Seen:
    """Return the type and the first line of what a call raises; an empty dict where it raises nothing."""
    try:
        call()
    except Exception as error:
        return raised_as(error)
    return {}


def raised_as(error: BaseException) -> Seen:
    """Return an exception as a side's observation."""
    from gpp_plugin.errors import GppError

    lines = str(error).strip().splitlines() or [""]
    is_one_line = isinstance(error, GppError | ValueError | AttributeError) and len(lines) == 1
    return {RAISED: type(error).__name__, "line": lines[0][:LONGEST_LINE], "is_one_line": is_one_line}


# ---- comparison ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What comparing two sides gave: ``apart`` is the largest relative distance of numbers; ``detail`` says where."""

    verdict: str
    apart: float
    detail: str


def verdict_of(peer: Seen, here: Seen, *, most: float = CLOSE) -> Verdict:
    """Compare what the two sides saw.

    Where this package raises and the peer does not, it is refused; both raising is the same.

    >>> verdict_of({"losses": [1.0, 2.0]}, {"losses": [1.0, 2.0000001]}).verdict
    'same'
    >>> verdict_of({"tag": "a"}, {"tag": "b"})
    Verdict(verdict='differs', apart=0.0, detail="tag: 'a', here 'b'")
    >>> verdict_of({}, {"raised": "ConfigError", "line": "grid: use engine.plan"}).detail
    'ConfigError: grid: use engine.plan'
    """
    refusals: list[str] = []
    others: list[str] = []
    apart = [0.0]
    _compare("", peer, here, most, refusals, others, apart)
    if refusals:
        return Verdict(verdict=REFUSED, apart=max(apart), detail=refusals[0])
    if others:
        return Verdict(verdict=DIFFERS, apart=max(apart), detail=others[0])
    return Verdict(verdict=SAME, apart=max(apart), detail="")


def _compare(
    path: str, peer: Any, here: Any, most: float, refusals: list[str], others: list[str], apart: list[float]
) -> None:
    """Add what differs at ``path`` and below it."""
    has_raised = [isinstance(seen, Mapping) and RAISED in seen for seen in (peer, here)]
    if all(has_raised):
        return  # both refuse; a scenario that wants the very type returns it as a text
    if has_raised[1]:
        refusals.append(f"{here[RAISED]}: {here['line']}")
    elif has_raised[0]:
        others.append(f"{path or 'all'}: the peer raises {peer[RAISED]}")
    elif isinstance(peer, Mapping) and isinstance(here, Mapping):
        for key in sorted({*peer, *here}, key=str):
            inner = f"{path}.{key}".lstrip(".")
            _compare(inner, peer.get(key), here.get(key), most, refusals, others, apart)
    elif is_numbers(peer) and is_numbers(here) and len(peer) == len(here):
        distance = _distance(peer, here)
        apart.append(distance)
        if not distance <= most:
            others.append(f"{path}: {distance:.1e} apart")
    elif isinstance(peer, list) and isinstance(here, list) and len(peer) == len(here):
        for index, (one, other) in enumerate(zip(peer, here, strict=True)):
            _compare(f"{path}[{index}]", one, other, most, refusals, others, apart)
    elif is_numbers([peer]) and is_numbers([here]) and float in (type(peer), type(here)):
        _compare(path, [peer], [here], most, refusals, others, apart)
    elif peer != here:
        others.append(f"{path}: {_short(peer)}, here {_short(here)}")


def is_numbers(values: Any) -> bool:
    """Return whether this is a list of numbers."""
    return (
        isinstance(values, list)
        and len(values) > 0
        and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    )


def _distance(peer: Sequence[float], here: Sequence[float]) -> float:
    """Return the relative distance of two vectors, of their norms; what is not finite is at no distance of itself."""
    if any(not math.isfinite(value) for value in (*peer, *here)):
        return 0.0 if [str(v) for v in peer] == [str(v) for v in here] else math.inf
    norm = math.sqrt(sum(value * value for value in peer))
    difference = math.sqrt(sum((one - other) ** 2 for one, other in zip(peer, here, strict=True)))
    return difference if norm == 0.0 else difference / norm


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@contextlib.contextmanager
def ended(side: Side) -> Iterator[Side]:
    """Yield a side whose engines end at the end."""
    try:
        yield side
    finally:
        side.end()
