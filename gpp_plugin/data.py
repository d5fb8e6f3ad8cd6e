"""Which samples make up the loss units of a mini-batch, so that units cost about as much as each other.

A unit is filled to a budget of predicted cost. Every mini-batch has the same number of units, and every sample is in
one unit an epoch. Epochs are drawn from seed and epoch number alone: every rank derives the same units without a
message, on any number of ranks, and continues in the middle of an epoch from two numbers.

    costs 9 1 4 4 2 8 3 5, budget 10, mini-batches of 2 units     shuffled, cut into windows of whole mini-batches, and
    units [9 1] [8 2]   [5 4] [4 3]                               in each window the costliest sample first, each to
                                                                  the unit that it fills least

Source: R. L. Graham, Bounds on multiprocessing timing anomalies (SIAM J. Appl. Math. 1969, doi 10.1137/0117039)
Tests: tests/data/test_unit_packing.py, tests/data/test_flattening.py, tests/integrations/test_flattened.py
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpp_plugin.errors import CheckpointError, ConfigError

# Several samples in one row without padding: `flatten`, a collator for models that separate such samples.
#
# A row holds samples one behind the other. Positions begin anew with each. Models of transformers that make their masks
# with `masking_utils` find the beginning of a sample by them, so that it attends to itself alone (attention is then
# block-diagonal). A sample's first token has no label, as nothing before it in its own sample predicts it:
#
#     samples        a b c    d e               mask   a b c d e
#     input_ids      a b c d e                  a      x
#     position_ids   0 1 2 0 1                  b      x x
#     labels         - b c - e                  c      x x x
#                                               d            x
#                                               e            x x

IDS, MASK, LABELS, POSITIONS = "input_ids", "attention_mask", "labels", "position_ids"
UNLABELLED = -100
"""The label of a token that is not predicted."""


def flatten(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return samples as one row of tokens, ``[1, tokens]`` each entry; for use as ``collate_fn``.

    Args:
        samples: dicts of tensors with one axis, of a sample's tokens: ``input_ids``, perhaps ``labels`` (its own tokens
            where it has none) and others; tokens that an ``attention_mask`` hides are left out.

    Raises:
        ConfigError: a sample has no tokens, or an entry that is not one value a token.
    """
    if not samples:
        raise ConfigError("flatten: no samples; give at least one to a unit")
    rows = [_row(sample) for sample in samples]
    entries = sorted({tuple(sorted(row)) for row in rows})
    if len(entries) > 1:
        raise ConfigError(f"flatten: samples have different entries {entries}; give all of them the same")
    lengths = [len(row[IDS]) for row in rows]
    first = [sum(lengths[:number]) for number in range(len(lengths))]
    flat: dict[str, Any] = {}
    # by methods of the tensors themselves: this layer imports no torch
    for key in entries[0]:
        flat[key] = rows[0][key].new_empty((1, sum(lengths)))
        for begin, length, row in zip(first, lengths, rows, strict=True):
            flat[key][0, begin : begin + length] = row[key]
    flat[LABELS][0, first] = UNLABELLED
    flat[POSITIONS] = rows[0][IDS].new_tensor([[i for length in lengths for i in range(length)]])
    return flat


def _row(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a sample has for each of its tokens, with labels, and without its mask."""
    ids: Any = sample.get(IDS)
    if not hasattr(ids, "new_empty") or ids.ndim != 1 or not len(ids):
        raise ConfigError(
            f"flatten: a sample's {IDS} must be a tensor of at least one token, [tokens]; of a dataset of lists, "
            'set_format("torch") gives tensors'
        )
    for key, value in sample.items():
        if tuple(getattr(value, "shape", ())) != tuple(ids.shape):
            shape = list(value.shape) if hasattr(value, "shape") else type(value).__name__
            raise ConfigError(
                f"flatten: {key} is {shape}, and a sample has {len(ids)} tokens; only entries of one value a token can "
                "lie in one row: leave it out, or pad samples in place of packing them"
            )
    row = {LABELS: ids, **{key: value for key, value in sample.items() if key != POSITIONS}}
    mask = row.pop(MASK, None)
    if mask is not None:
        row = {key: value[mask != 0] for key, value in row.items()}
        if not len(row[IDS]):
            hidden = f"a sample's {MASK} hides all of its {len(ids)} tokens"
            raise ConfigError(f"flatten: {hidden}; leave such samples out")
    return row


Cost = str | Sequence[str] | Sequence[float] | NDArray[Any] | Callable[[Any], float | Sequence[float]]
Budget = float | Sequence[float]

WINDOW = 16
"""Mini-batches whose units are filled together: more are filled better, fewer are shuffled better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackReport:
    """How well the units of an epoch are filled.

    Args:
        fill: mean cost of a unit over the budget; of several costs the one that fills most.
        padding: part of what units cost that is padding; 0 where nothing is padded.
        imbalance: mean over mini-batches of the largest unit's cost over the mean one's: what the slowest rank takes
            longer.
        over_budget: units above the budget, for want of samples to make whole mini-batches of.
    """

    samples: int
    units: int
    mini_batches: int
    fill: float
    padding: float
    imbalance: float
    over_budget: int


def pack(
    dataset: Any, *, cost: Cost, budget: Budget, units: int, seed: int = 0, is_padded: bool = True
) -> PackedUnits:
    """Return a sampler that fills units to a budget, for ``training_data`` or a DataLoader's ``batch_sampler``.

    Args:
        dataset: has a length; its samples are read once where costs must be computed of them.
        cost: of each sample: the name of the entry whose length it is, several of them (one cost each), a number a
            sample, or a function of a sample (tokens, patches, predicted time; a sequence for several branches).
        budget: most that a unit costs; one number for each cost.
        units: of a mini-batch: ``graph_pipeline.units``.
        is_padded: the collator pads samples of a unit to the longest, so that a unit costs its samples times their
            largest cost; else their sum.

    Raises:
        ConfigError: there are fewer samples than units, or a sample is above the budget.
    """
    costs = _costs_of(dataset, cost)
    limits = np.atleast_1d(np.asarray(budget, dtype=np.float64))
    if limits.shape != costs.shape[1:] or not (limits > 0).all():
        raise ConfigError(
            f"pack: budget {budget!r} for {costs.shape[1]} costs a sample; give a number above 0 for each cost"
        )
    if units < 1 or len(costs) < units:
        raise ConfigError(
            f"pack: {len(costs)} samples do not make a mini-batch of {units} units; give more samples or fewer units"
        )
    fills = costs / limits
    worst = int(fills.max(axis=1).argmax())
    if not np.isfinite(fills).all() or (fills < 0).any() or fills[worst].max() > 1:
        raise ConfigError(
            f"pack: sample {worst} costs {costs[worst].tolist()}, and a unit may cost {limits.tolist()}; raise the "
            "budget, or cut or leave out such samples"
        )
    return PackedUnits(dataset, fills, units=units, seed=seed, is_padded=is_padded)


def _costs_of(dataset: Any, cost: Cost) -> NDArray[np.float64]:
    """Return the costs of all samples, [samples, costs of one]."""
    if isinstance(cost, str):
        cost = (cost,)
    if callable(cost):
        rows = [np.atleast_1d(np.asarray(cost(dataset[i]), dtype=np.float64)) for i in range(len(dataset))]
        return np.stack(rows) if rows else np.zeros((0, 1))
    if len(cost) and all(isinstance(name, str) for name in cost):
        samples = map(dataset.__getitem__, range(len(dataset)))
        lengths = [[len(sample[str(name)]) for name in cost] for sample in samples]
        return np.asarray(lengths, dtype=np.float64).reshape(-1, len(cost))
    costs = np.asarray(cost, dtype=np.float64)
    if len(costs) != len(dataset):
        raise ConfigError(f"pack: {len(costs)} costs for {len(dataset)} samples; give one for each")
    return costs.reshape(len(costs), -1)


class PackedUnits:
    """The units of every epoch, each a list of samples' numbers; a batch sampler whose iterations go on from epoch to
    epoch.

    Args:
        fills: what each sample costs, over the budget: [samples, costs of one].
        units: of a mini-batch; each epoch has a multiple of it.
    """

    def __init__(
        self, dataset: Any, fills: NDArray[np.float64], *, units: int, seed: int, is_padded: bool
    ) -> None:
        self.dataset = dataset
        self.units = units
        self.seed = seed
        self.is_padded = is_padded
        self._fills = fills
        self._epoch = self._position = 0
        self._made: tuple[int, list[list[int]]] | None = None

    # ---- units -----------------------------------------------------------------------------------

    def epoch_units(self, epoch: int) -> list[list[int]]:
        """Return all units of an epoch in order; each ``units`` of them are a mini-batch."""
        if self._made is None or self._made[0] != epoch:
            generator = np.random.default_rng([self.seed, epoch])
            order = generator.permutation(len(self._fills))
            found: list[list[int]] = []
            # a window has samples for whole mini-batches, of units with one sample at least
            expected = max(1, int(np.ceil(self._fills.sum(axis=0).max() / self.units)))
            num_windows = max(1, min(expected // WINDOW, len(self._fills) // self.units))
            for window in np.array_split(order, num_windows):
                # units of about the same cost share a mini-batch, whose slowest unit is what all wait for
                own = sorted(self._fill_window(window), key=self._cost)
                batches = [own[first : first + self.units] for first in range(0, len(own), self.units)]
                for batch in generator.permutation(len(batches)):
                    found += [batches[batch][i] for i in generator.permutation(self.units)]
            self._made = epoch, found
        return self._made[1]

    def typical_unit(self) -> list[int]:
        """Return the unit of the first epoch whose number of samples is the median: what a plan may be made for."""
        ordered = sorted(self.epoch_units(0), key=len)
        return ordered[len(ordered) // 2]

    def _fill_window(self, window: NDArray[np.int64]) -> list[list[int]]:
        """Return the units of some samples, a multiple of ``self.units`` of them."""
        # the costliest first; of equals, as they were shuffled
        order = window[np.argsort(-self._fills[window].max(axis=1), kind="stable")]
        most = len(order) // self.units * self.units
        if self.is_padded:
            return self._cut_sorted(order, most)
        count = int(np.ceil(self._fills[order].sum(axis=0).max() - 1e-9))
        for number in range(self._whole(max(count, 1)), most + 1, self.units):
            found = self._spread(order, number)
            if found is not None:
                return found
        found = self._spread(order, most, may_exceed=True)
        assert found is not None
        return found

    def _whole(self, count: int) -> int:
        """Return the next number of units that are whole mini-batches."""
        return -(-count // self.units) * self.units

    def _spread(
        self, order: NDArray[np.int64], number: int, *, may_exceed: bool = False
    ) -> list[list[int]] | None:
        """Return ``number`` units, each sample to the one that it fills least; None where one is above the budget."""
        loads = np.zeros((number, self._fills.shape[1]))
        found: list[list[int]] = [[] for _ in range(number)]
        for sample in order:
            after = (loads + self._fills[sample]).max(axis=1)
            at = int(after.argmin())
            if after[at] > 1 + 1e-9 and not may_exceed:
                return None
            loads[at] += self._fills[sample]
            found[at].append(int(sample))
        # samples that cost nothing may all lie in one unit: an empty unit takes one of the unit that has most
        for unit in found:
            if not unit:
                unit.append(max(found, key=len).pop())
        return found

    def _cut_sorted(self, order: NDArray[np.int64], most: int) -> list[list[int]]:
        """Return runs of samples of like cost, each as long as its padding allows, then cut to whole mini-batches."""
        found: list[list[int]] = []
        largest = np.zeros(self._fills.shape[1])
        for sample in order:
            largest = np.maximum(largest, self._fills[sample])
            if found and (largest * (len(found[-1]) + 1) <= 1 + 1e-9).all():
                found[-1].append(int(sample))
            else:
                found.append([int(sample)])
                largest = self._fills[sample].copy()
        # cut the fullest that can be cut until mini-batches are whole; where there are not enough samples for that,
        # join the emptiest
        wanted = min(self._whole(len(found)), most)
        while len(found) < wanted:
            at = max(range(len(found)), key=lambda i: (len(found[i]) > 1, self._cost(found[i])))
            unit, middle = found[at], len(found[at]) // 2
            found[at : at + 1] = [unit[:middle], unit[middle:]]
        while len(found) > wanted:
            found.sort(key=self._cost, reverse=True)
            found[-2:] = [found[-2] + found[-1]]
        return found

    def _cost(self, unit: Sequence[int]) -> float:
        """Return what a unit costs, over the budget."""
        own = self._fills[list(unit)]
        return float((own.max(axis=0) * len(unit) if self.is_padded else own.sum(axis=0)).max())

    # ---- as a batch sampler ----------------------------------------------------------------------

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the units that are left of this epoch; the next iteration is of the next epoch."""
        found = self.epoch_units(self._epoch)
        while self._position < len(found):
            self._position += 1
            yield found[self._position - 1]
        self._epoch, self._position = self._epoch + 1, 0

    def __len__(self) -> int:
        """Return the units of this epoch."""
        return len(self.epoch_units(self._epoch))

    @property
    def fingerprint(self) -> int:
        """Return a number that differs for other costs, budgets and sizes: they have other units."""
        facts = repr((self.units, self.seed, self.is_padded, self._fills.shape)).encode()
        return zlib.crc32(np.ascontiguousarray(self._fills).tobytes(), zlib.crc32(facts))

    def state_dict(self, *, mini_batches: int | None = None) -> dict[str, int]:
        """Return where to continue.

        Args:
            mini_batches: trained since the very first; None: all that was taken, which includes what a loader has
                prefetched.
        """
        epoch, position = self._epoch, self._position
        if mini_batches is not None:
            epoch, position = 0, mini_batches * self.units
            while position >= (length := len(self.epoch_units(epoch))):
                epoch, position = epoch + 1, position - length
        return {"epoch": epoch, "position": position, "fingerprint": self.fingerprint}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue where `state_dict` was called.

        Raises:
            CheckpointError: it was of other samples, costs or sizes.
        """
        if state["fingerprint"] != self.fingerprint:
            raise CheckpointError(
                "pack: the saved position is of other samples, costs, budget, units or seed than these; pack as then, "
                "or begin a new epoch"
            )
        self._epoch, self._position = state["epoch"], state["position"]

    # ---- how well --------------------------------------------------------------------------------

    def report(self, epoch: int = 0) -> PackReport:
        """Return how well the units of an epoch are filled."""
        found = self.epoch_units(epoch)
        costs = np.array([self._cost(unit) for unit in found])
        by_batch = costs.reshape(-1, self.units)
        mean = np.maximum(by_batch.mean(axis=1), 1e-12)
        used = sum(float(self._fills[unit].sum()) for unit in found)
        paid = sum(float(self._fills[unit].max(axis=0).sum()) * len(unit) for unit in found)
        return PackReport(
            samples=len(self._fills),
            units=len(found),
            mini_batches=len(found) // self.units,
            fill=float(costs.mean()),
            padding=1 - used / paid if self.is_padded and paid else 0.0,
            imbalance=float((by_batch.max(axis=1) / mean).mean()),
            over_budget=int((costs > 1 + 1e-9).sum()),
        )
