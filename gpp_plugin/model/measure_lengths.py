"""What a captured part costs as a function of lengths: traced and measured at a few, checked at one more.

The capture with symbols says which axes are one length (ids, their mask, labels) and which are two (an encoder's and a
decoder's). Blocks are then profiled at so many lengths as determine a polynomial of second degree, each once: their
times, what they keep, what they hold while they run.

Source: this project
Tests: tests/stage_graph/test_measured_lengths.py, tests/integrations/test_length_memory.py,
    tests/profile/test_length_fit.py
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpp_plugin.capture.captured_graph import CapturedGraph
from gpp_plugin.capture.eager.trial_run import refuse_lost_device
from gpp_plugin.capture.recapture import CaptureAtLengths
from gpp_plugin.capture.tracing.sample_batches import LengthOf, length_entries, length_of, with_lengths
from gpp_plugin.config.block import LengthsConfig
from gpp_plugin.errors import CaptureError, GppError, first_line
from gpp_plugin.ir.analysis import Analysis
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.profile import BlockCost, Profile
from gpp_plugin.ir.size_formulas import (
    BlockLengths,
    Coefficients,
    LengthCosts,
    Lengths,
    Mismatch,
    SizeConditions,
    compile_formulas,
    products,
    terms_of,
    value_of,
)
from gpp_plugin.model.graph.captured_part import CapturedPart
from gpp_plugin.model.graph.part_lengths import shapes_of
from gpp_plugin.profile.measure import profile_blocks
from gpp_plugin.runtime.batches import Batch

# Costs as polynomials in lengths: at which lengths to measure, and the polynomials through what was measured there.
#
# As many lengths as there are terms determine bytes, which are such polynomials. Times are fitted with no negative
# coefficient, so that no longer text is ever cheaper; of all sets of terms that give none, the one with the least
# squares of relative errors is taken (Lawson and Hanson, "Solving Least Squares Problems", 1974, chapter 23, by
# enumeration).

LEAST = 4
"""Shorter texts are special cases to some models (one token, no token behind the first)."""
MOST_SUBSETS = 6
"""Terms of which all sets are tried; of more, those of one length and the constant."""


def fit_points(lows: Sequence[int], highs: Sequence[int]) -> tuple[list[Lengths], Lengths]:
    """Return as many lengths as there are terms, so placed that they determine any polynomial, and one more to check.

    >>> fit_points([256], [512])
    ([(256,), (384,), (512,)], (448,))
    """
    # of two lengths, each between low (l) and high (h): ll, ml, hl, lm, lh, hh
    middles = [(low + high) // 2 for low, high in zip(lows, highs, strict=True)]
    points: dict[Lengths, None] = {tuple(lows): None}
    for at in range(len(lows)):
        for value in (middles[at], highs[at]):
            points[(*lows[:at], value, *lows[at + 1 :])] = None
    for one, other in itertools.combinations(range(len(lows)), 2):
        point = list(lows)
        point[one], point[other] = highs[one], highs[other]
        points[tuple(point)] = None
    return list(points), tuple((m + high) // 2 for m, high in zip(middles, highs, strict=True))


def range_of(typical: Sequence[int], longest: int) -> tuple[int, int]:
    """Return between which lengths to measure: the typical ones, or down to half of them where they are alike."""
    # typical 512 and 1024: 512 to 1024; 512 alone: 256 to 512; 6 alone, at most 64: 4 to 12
    high = max(typical)
    low = max(min(min(typical), high // 2), min(LEAST, high))
    if high - low < LEAST:
        high = max(high, min(longest, low + 2 * LEAST))
    return low, high


def exact_fit(points: Sequence[Lengths], values: Sequence[float]) -> Coefficients:
    """Return the polynomial through values at lengths of `fit_points`."""
    matrix, scale = _matrix(points)
    found, *_ = np.linalg.lstsq(matrix, np.asarray(values, dtype=float), rcond=None)
    return tuple((found / scale).tolist())


def nonnegative_fit(
    points: Sequence[Lengths], values: Sequence[float], *, of: Collection[int]
) -> Coefficients:
    """Return the polynomial without negative coefficients that is nearest to positive values, as their share.

    Args:
        of: the lengths, by position, that it may depend on.
    """
    # Times are noisy: an encoder that a decoder's length has nothing to do with would seem to depend on it. Terms of
    # many lengths have too many subsets: then without products of two.
    weights = 1.0 / np.maximum(np.asarray(values, dtype=float), 1e-9)
    matrix, scale = _matrix(points)
    rows = matrix * weights[:, None]
    terms = terms_of(len(points[0]))
    own = [i for i, term in enumerate(terms) if all(at in of for at, power in enumerate(term) if power)]
    usable = [i for i in own if len(own) <= MOST_SUBSETS or max(terms[i]) == sum(terms[i])]
    best: tuple[float, npt.NDArray[np.float64]] = (np.inf, np.zeros(len(terms)))
    for count in range(min(len(usable), MOST_SUBSETS) + 1):
        for chosen in itertools.combinations(usable, count):
            found = np.zeros(len(terms))
            if chosen:
                found[list(chosen)] = np.linalg.lstsq(rows[:, chosen], np.ones(len(points)), rcond=None)[0]
            error = float(np.square(rows @ found - 1.0).sum())
            if found.min() >= 0.0 and error < best[0] - 1e-12:
                best = error, found
    return tuple((best[1] / scale).tolist())


def _matrix(points: Sequence[Lengths]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return terms by point, each divided by its largest value, and these."""
    terms = terms_of(len(points[0]))
    matrix = np.array([products(point, terms) for point in points])
    scale = np.abs(matrix).max(axis=0)
    return matrix / scale, scale


logger = logging.getLogger(__name__)


def measure_lengths(
    part: CapturedPart,
    analysis: Analysis,
    batch: Batch,
    profile: Profile,
    wanted: LengthsConfig,
    *,
    cache_dir: str | None,
) -> LengthCosts | None:
    """Return what the part's blocks cost at any lengths; None, and a warning, where it is not known.

    Args:
        batch: one loss unit, of the lengths that the part was analysed at.
        profile: of those lengths.
    """
    if analysis.takes_whole_units:
        logger.warning(
            "lengths: %s takes whole loss units, each captured by itself: costs and memory are those of the sample "
            "batch, whose lengths are the typical ones",
            type(part.model).__name__,
        )
        return None
    try:
        return _Measured(part, analysis, batch, wanted, cache_dir).costs(profile)
    except (GppError, RuntimeError, ValueError) as error:
        refuse_lost_device(error)
        logger.warning(
            "lengths: costs and memory are those of the sample batch, as %s cannot be measured at others (%s)",
            type(part.model).__name__,
            first_line(error),
        )
        return None


class _Measured:
    """A part at several lengths."""

    def __init__(
        self,
        part: CapturedPart,
        analysis: Analysis,
        batch: Batch,
        wanted: LengthsConfig,
        cache_dir: str | None,
    ) -> None:
        self._part, self._analysis, self._cache_dir = part, analysis, cache_dir
        self._samples = analysis.op_graph.num_samples
        self._batch = part.arguments(batch, {}, self._samples)
        self._entries = length_entries(self._batch, wanted.max)
        self._wanted = wanted
        self._capture: CaptureAtLengths | None = None
        self._sizes = self._with_symbols() or self._by_size()
        symbols = tuple(self._sizes.symbols)
        self._formulas = {
            key: compile_formulas(symbols, [self._sizes.shapes[key][-1]])
            for keys in self._entries.values()
            for key in keys
        }
        self._state: dict[str, Tensor] = dict(part.model.named_parameters()) | dict(
            part.model.named_buffers()
        )

    def _with_symbols(self) -> SizeConditions | None:
        """Return what torch found out about the lengths; None where it makes a number of one."""
        open_axes = {k: (self._batch[k].ndim - 1,) for keys in self._entries.values() for k in keys}
        try:
            found = CaptureAtLengths(
                self._part.model,
                self._analysis,
                {k: _empty(v) for k, v in self._batch.items()},
                open_axes,
                device=self._part.device,
                call=self._part.call,
            )
        except Exception:  # whatever torch raises on symbols
            logger.debug("lengths: no capture with symbols", exc_info=True)
            return None
        known = found.conditions
        if any(known.shapes[key][-1].isdigit() for key in open_axes):
            return None
        self._capture = found
        # a length is identified by its anchor, ``labels``, whichever entry torch saw first, ``decoder_attention_mask``
        symbols = dict(known.symbols)
        for anchor in reversed(self._entries):
            name = known.shapes[anchor][-1]
            if name in symbols:
                symbols[name] = anchor, self._batch[anchor].ndim - 1
        return SizeConditions(symbols=symbols, shapes=known.shapes)

    def _by_size(self) -> SizeConditions:
        """Return lengths as they differ in the batch: entries of one size are of one length."""
        anchors = {self._batch[anchor].shape[-1]: anchor for anchor in reversed(self._entries)}
        names = {size: f"s{number}" for number, size in enumerate(anchors)}
        shapes: dict[str, tuple[str, ...]] = {}
        own = {key for keys in self._entries.values() for key in keys}
        for key, value in self._batch.items():
            if isinstance(value, Tensor):
                *others, last = value.shape
                shapes[key] = (*map(str, others), names[last] if key in own else str(last))
                shapes[key] = shapes[key] if value.ndim else ()
        symbols = {names[size]: (anchor, self._batch[anchor].ndim - 1) for size, anchor in anchors.items()}
        return SizeConditions(symbols=symbols, shapes=shapes)

    def _values(self, requested: LengthOf) -> Lengths:
        """Return the values of the symbols where lengths are those requested."""
        anchor_of = {key: anchor for anchor, keys in self._entries.items() for key in keys}
        return tuple(length_of(requested, anchor_of[key]) for key, _ in self._sizes.symbols.values())

    def _batch_at(self, lengths: Lengths) -> dict[str, Any]:
        """Return the loss unit with texts of some lengths."""
        sizes = {key: int(at(*lengths)[0]) for key, at in self._formulas.items()}
        return with_lengths(self._batch, sizes)

    def _at(self, lengths: Lengths) -> tuple[Profile, BlockGraph]:
        """Return what the part costs at some lengths, and its blocks there."""
        batch = self._batch_at(lengths)
        captured = self._captured(batch)
        graph = self._part.local_graph(captured)
        logger.debug("profiling at lengths %s", lengths)
        profile = profile_blocks(
            captured,
            graph,
            model_state=self._state,
            batch=batch,
            sample_counts=(self._samples,),
            threads=torch.get_num_threads(),
            cache_dir=self._cache_dir,
        )
        return profile, graph

    def _warn_of(self, longest: Lengths) -> None:
        """Say so where the model's Python answers otherwise at the longest: it may lack places for so many tokens."""
        if self._capture is None:
            return
        reason = self._capture.conditions.solver()(shapes_of(self._batch_at(longest)))
        if isinstance(reason, Mismatch):
            logger.warning(
                "lengths: %s is another graph at the longest (%s): its memory is predicted from shorter ones; lower "
                "graph_pipeline.lengths.max if it has no places for so many tokens",
                type(self._part.model).__name__,
                reason,
            )

    def _captured(self, batch: Batch) -> CapturedGraph:
        """Return the part at the lengths of a batch, without another export where one holds for all."""
        if self._capture is not None:
            try:
                return self._capture.at(batch)
            except CaptureError as error:
                logger.debug("lengths: captured again, as %s", error)
        return self._part.capture_again(self._analysis, batch)

    def costs(self, profile: Profile) -> LengthCosts:
        """Return the polynomials.

        Raises:
            GppError: the part cannot be traced or run at one of the lengths, or is another graph there.
        """
        typical = tuple(self._values(one) for one in self._wanted.planned)
        longest = self._values(self._wanted.max)
        reference = tuple(int(self._batch[key].shape[axis]) for key, axis in self._sizes.symbols.values())
        self._warn_of(longest)
        ranges = [
            range_of(column, most) for column, most in zip(zip(*typical, strict=True), longest, strict=True)
        ]
        points, checked = fit_points([low for low, _ in ranges], [high for _, high in ranges])
        found = [self._at(point) for point in points]
        check = self._at(checked)
        names = [[storage.blocks for storage in one.shared] for one, _ in (*found, check)]
        if any(name != [storage.blocks for storage in profile.shared] for name in names):
            raise GppError("what blocks keep together changes with the lengths")
        costs = LengthCosts(
            sizes=self._sizes,
            num_samples=self._samples,
            terms=terms_of(len(reference)),
            reference=reference,
            typical=typical,
            longest=longest,
            fitted=tuple(points),
            checked=checked,
            time_error=0.0,
            byte_error=0.0,
            **_fits(points, found, self._samples),
        )
        return _checked(costs, check[0])


def _fits(
    points: Sequence[Lengths], found: Sequence[tuple[Profile, BlockGraph]], samples: int
) -> dict[str, Any]:
    """Return the polynomials of blocks, shared storages and tensors."""

    def exact(values: Sequence[float]) -> Coefficients:
        return exact_fit(points, values)

    by_block = [profile.by_block() for profile, _ in found]
    flops = [{block.name: block.flops for block in graph.blocks} for _, graph in found]
    blocks = {}
    for name in by_block[0]:
        own = [costs[name] for costs in by_block]
        of = _lengths_of(points, [one[name] for one in flops])
        blocks[name] = BlockLengths(
            forward_us=nonnegative_fit(points, [cost.forward_us[-1] for cost in own], of=of),
            backward_us=nonnegative_fit(points, [cost.backward_us[-1] for cost in own], of=of),
            saved_bytes=exact([_saved(cost, samples) for cost in own]),
            transient_bytes=exact([cost.transient_bytes_per_sample * samples for cost in own]),
        )
    shared = tuple(
        exact([p.shared[i].bytes_per_sample * samples + p.shared[i].bytes_fixed for p, _ in found])
        for i in range(len(found[0][0].shared))
    )
    tensors = [_tensor_bytes(graph, samples) for _, graph in found]
    everywhere = set(tensors[0]).intersection(*tensors[1:])
    return {
        "blocks": blocks,
        "shared": shared,
        "tensors": {name: exact([one[name] for one in tensors]) for name in tensors[0] if name in everywhere},
    }


def _lengths_of(points: Sequence[Lengths], flops: Sequence[float]) -> list[int]:
    """Return the lengths, by position, that a block's operations depend on."""
    # the first point has the least of all lengths, and for each of these others differ from it in that one alone
    first = points[0]
    found = []
    for at in range(len(first)):
        along = [f for p, f in zip(points, flops, strict=True) if (*p[:at], first[at], *p[at + 1 :]) == first]
        if len(set(along)) > 1:
            found.append(at)
    return found


def _tensor_bytes(graph: BlockGraph, samples: int) -> dict[str, int]:
    crossing = {name: spec.bytes_for(samples) for name, spec in graph.tensors.items()}
    return {**crossing, **{tensor.name: tensor.bytes for tensor in graph.saved}}


def _saved(cost: BlockCost, samples: int) -> float:
    return cost.saved_bytes_per_sample * samples + cost.saved_bytes_fixed


def _checked(costs: LengthCosts, measured: Profile) -> LengthCosts:
    """Return costs with how far they are from what was measured where nothing was fitted."""
    at = products(costs.checked, costs.terms)
    predicted = [0.0, 0.0]
    found = [0.0, 0.0]
    for cost in measured.costs:
        own = costs.blocks[cost.block]
        predicted[0] += value_of(own.forward_us, at) + value_of(own.backward_us, at)
        predicted[1] += value_of(own.saved_bytes, at)
        found[0] += cost.forward_us[-1] + cost.backward_us[-1]
        found[1] += _saved(cost, costs.num_samples)
    errors = [p / f - 1.0 if f > 0 else 0.0 for p, f in zip(predicted, found, strict=True)]
    logger.info(
        "lengths: costs measured at %s; at %s predicted over measured: times %.3f, saved bytes %.4f",
        "; ".join(costs.in_words(point) for point in costs.fitted),
        costs.in_words(costs.checked),
        1.0 + errors[0],
        1.0 + errors[1],
    )
    return dataclasses.replace(costs, time_error=errors[0], byte_error=errors[1])


def _empty(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta").requires_grad_(value.requires_grad)
