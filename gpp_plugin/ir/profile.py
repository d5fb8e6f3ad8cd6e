"""What each block costs: time by number of samples, bytes by kind; and what a forward costs on a backend.

Source: this project
Tests: tests/plan/test_memory_breakdown.py, tests/profile/test_measure.py
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from gpp_plugin.errors import ProfileError, ReadError
from gpp_plugin.ir.serialize import check_leaves
from gpp_plugin.ir.typed_leaves import Bytes, Count, Factor, MeanBytes, Micros, Share, SignedBytes, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """Measured or derived cost of one block on one device.

    Args:
        samples: increasing numbers of samples at which times are known.
        forward_us, backward_us: median microseconds at those numbers of samples.
        saved_bytes_per_sample: activation bytes held from forward to backward, for each sample.
        saved_bytes_fixed: held for each micro-batch whatever its size.
        parameter_bytes, gradient_bytes, optimizer_bytes: held all the time.
        transient_bytes_per_sample: peak above what is held while the block runs.
        split_factor: input and weight gradient made separately over the whole backward; 1 where not measured.
        input_share: share of the input gradient in both.
        pending_bytes_per_sample: of a split backward, gradients that wait from the input gradient for the weight
            gradient, beside what is saved; 0 where not known.
    """

    block: str
    samples: tuple[Count, ...]
    forward_us: tuple[Micros, ...]
    backward_us: tuple[Micros, ...]
    saved_bytes_per_sample: MeanBytes = 0.0
    saved_bytes_fixed: MeanBytes = 0.0
    parameter_bytes: Bytes = 0
    gradient_bytes: Bytes = 0
    optimizer_bytes: Bytes = 0
    transient_bytes_per_sample: MeanBytes = 0.0
    split_factor: Factor = 1.0
    input_share: Share = 0.5
    pending_bytes_per_sample: MeanBytes = 0.0

    def forward_us_for(self, num_samples: float) -> float:
        """Return forward microseconds for ``num_samples``, piecewise linear, extended at both ends."""
        return _interpolate(self.samples, self.forward_us, num_samples)

    def backward_us_for(self, num_samples: float) -> float:
        """Return backward microseconds for ``num_samples``, piecewise linear, extended at both ends."""
        return _interpolate(self.samples, self.backward_us, num_samples)

    def check(self) -> None:
        """Refuse times that are not of increasing numbers of samples, one each.

        Raises:
            ProfileError: it names the block.
        """
        rises = all(a < b for a, b in pairwise(self.samples))
        if not self.samples or not rises:
            raise ProfileError(
                f"block {self.block!r}: samples are {list(self.samples)[:8]}; they must increase; profile again"
            )
        for name, times in (("forward_us", self.forward_us), ("backward_us", self.backward_us)):
            if len(times) != len(self.samples):
                raise ProfileError(
                    f"block {self.block!r}: {name} has {len(times)} times for {len(self.samples)} numbers of samples; "
                    "profile again"
                )


def _interpolate(xs: tuple[int, ...], ys: tuple[float, ...], x: float) -> float:
    # ``xs`` samples, ``ys`` microseconds. Of (1, 8, 64) and (50, 60, 410): 4 samples lie between the first two, 54.3;
    # 128 beyond the last, on the line through the last two, 810; half a sample on the line through the first two is
    # 49.3, against 25 for half of one sample's time: a launch is not halved, so the larger.
    if len(xs) == 1:
        return ys[0] * x / xs[0]
    right = min(max(bisect_left(xs, x), 1), len(xs) - 1)
    x0, x1, y0, y1 = xs[right - 1], xs[right], ys[right - 1], ys[right]
    value = y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    if x < xs[0]:  # extending a fit downwards may go negative; scale the smallest measurement instead
        return max(value, ys[0] * x / xs[0])
    return max(value, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStorage:
    """What several blocks keep for backward: a stage holds it once, whichever of them it has.

    A stage that has none but later ones of ``blocks`` holds these bytes beside what its blocks are charged with.

    Args:
        blocks: in execution order; the first is charged with it in its `BlockCost`. Where the bytes are negative,
            the first makes a view, and the others keep the storage it lies in: they are charged with all of it,
            and hold the view alone where they receive it from another stage.
    """

    blocks: tuple[str, ...]
    bytes_per_sample: SignedBytes
    bytes_fixed: SignedBytes = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedCost:
    """A parameter that several blocks share: it is in the cost of each, and a stage holds it once.

    Args:
        parameter_bytes, gradient_bytes, optimizer_bytes: as of `BlockCost`, of this parameter.
    """

    blocks: tuple[str, ...]
    parameter_bytes: Bytes
    gradient_bytes: Bytes
    optimizer_bytes: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStorage:
    """One storage that a user's module keeps from forward to backward.

    Args:
        last_use: share of the forward's time after which it is saved for the last time.
        is_made: whether the module made it, so that running it again makes it again; else it was received.
        is_movable: plain bytes that autograd alone holds, which free memory where they leave.
    """

    bytes_per_sample: MeanBytes
    bytes_fixed: MeanBytes
    last_use: Share
    is_made: bool
    is_movable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleMemory:
    """What a stage that is the user's own module, one block, keeps; known by trying it, not by its operators.

    Args:
        storages: in the order it first keeps them; empty where that order changes with the number of samples.
        dropped_bytes_per_sample, dropped_bytes_fixed: what it drops if it runs again, of one micro-batch on one rank.
        held_bytes_per_sample, held_bytes_fixed: what it then keeps beside what it keeps anyway: received tensors that
            the plain backward does not read, and buffers.
    """

    block: str
    storages: tuple[SavedStorage, ...] = ()
    dropped_bytes_per_sample: MeanBytes = 0.0
    dropped_bytes_fixed: MeanBytes = 0.0
    held_bytes_per_sample: SignedBytes = 0.0
    held_bytes_fixed: MeanBytes = 0.0

    @property
    def storage_names(self) -> tuple[str, ...]:
        """Return what plans call its storages."""
        return tuple(f"{self.block}:{number}" for number in range(len(self.storages)))


@dataclass(frozen=True, slots=True, kw_only=True)
class InputCost:
    """An entry of the batch: the stages that read it hold all rows of a mini-batch while it runs.

    Args:
        blocks: those that read it.
        bytes: for the whole mini-batch.
        is_shared_out: whether the ranks of a stage hold a part each; else each holds all of it.
    """

    blocks: tuple[str, ...]
    bytes: Bytes
    is_shared_out: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Costs of every block of one BlockGraph on one device.

    Args:
        graph: fingerprint of the BlockGraph.
        device: what the times are of, e.g. ``cpu (2 threads)`` or ``NVIDIA H200``.
        source: ``measured``, ``analytic`` or ``given``.
        shared: what several blocks keep, charged to the first of them; a stage without that one holds it too.
        tied: parameters that several blocks share, in the costs of each.
        modules: what those blocks keep that are users' own modules.
        inputs: of the mini-batch that is planned for; empty where that is not known.
        backends: blocks that no gradient passes -> how many times what it takes on torch their forward takes on the
            backend it was measured on; a stage of such blocks alone takes that, one that trains does not.
        growth: tensors saved for backward, and results on edges -> how many times larger than in the BlockGraph they
            are at the lengths that memory is planned for; those of one size are missing.
    """

    graph: str
    device: str
    source: str
    costs: tuple[BlockCost, ...]
    shared: tuple[SharedStorage, ...] = ()
    tied: tuple[TiedCost, ...] = ()
    modules: tuple[ModuleMemory, ...] = ()
    inputs: tuple[InputCost, ...] = ()
    growth: dict[str, Factor] = field(default_factory=dict)
    backends: dict[str, Factor] = field(default_factory=dict)

    def check(self, blocks: Iterable[str] | None = None) -> None:
        """Refuse costs that no planner may count on: values out of range, blocks that repeat or are missing.

        Args:
            blocks: of the graph that it should be of; None: of any.

        Raises:
            ProfileError: it says which value of which block.
        """
        try:
            check_leaves(self)
        except ReadError as error:
            raise ProfileError(
                f"the profile of {self.device!r} is not valid: {error}; profile again"
            ) from error
        names = [cost.block for cost in self.costs]
        for cost in self.costs:
            cost.check()
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise ProfileError(f"block {twice[0]!r} has two costs; profile again")
        named = [*(entry.blocks for entry in self.shared), *(entry.blocks for entry in self.tied)]
        for blocks_of_one in named:
            if not blocks_of_one:
                raise ProfileError("shared bytes are of no block; profile again")
        missing = set(() if blocks is None else blocks) - set(names)
        if missing:
            raise ProfileError(f"{len(missing)} blocks have no costs: {sorted(missing)[:3]}; profile again")

    def input_bytes(self, blocks: Iterable[str], degree: int) -> float:
        """Return what one rank of a stage of ``degree`` ranks holds of the mini-batch."""
        # 64 images of 1 KiB that blocks a and b read, 4 ranks: 16 KiB a rank of a stage with a, b or both; a table that
        # has no samples is whole on each.
        own = frozenset(blocks)
        read = [entry for entry in self.inputs if not own.isdisjoint(entry.blocks)]
        return sum(entry.bytes / (degree if entry.is_shared_out else 1) for entry in read)

    def module(self, blocks: Sequence[str]) -> ModuleMemory | None:
        """Return what a stage keeps that is one user's module; None for any other stage."""
        return next((module for module in self.modules if (module.block,) == tuple(blocks)), None)

    def by_block(self) -> dict[str, BlockCost]:
        """Return the costs keyed by block name."""
        return {cost.block: cost for cost in self.costs}

    def saved_with_others(self, blocks: Iterable[str]) -> tuple[float, float]:
        """Return bytes a sample, and fixed bytes, that ``blocks`` keep and blocks elsewhere are charged with."""
        # An encoder's output is saved by itself and by decoder layers 0 to 5: ``blocks`` (encoder, d0, ..., d5),
        # charged to the encoder. Stage {d2, d3} receives it and holds it too: its bytes are here. Stage {encoder, d0}
        # has the encoder, so that its costs contain it. Each storage once, however many later blocks of a stage save
        # it.
        own = frozenset(blocks)
        per_sample = fixed = 0.0
        for storage in self.shared:
            first, *others = storage.blocks
            if first not in own and not own.isdisjoint(others):
                per_sample += storage.bytes_per_sample
                fixed += storage.bytes_fixed
        return per_sample, fixed

    def counted_again(self, blocks: Iterable[str]) -> tuple[int, int, int]:
        """Return parameter, gradient and optimizer bytes that the costs of ``blocks`` together have too often."""
        # An embedding of 10 MB that is the output layer too is in the costs of both blocks: a stage with both holds
        # one, so 10 MB of the sum of its blocks' costs are too many; a stage with one of them has its own.
        own = frozenset(blocks)
        parameter = gradient = optimizer = 0
        for tie in self.tied:
            more = sum(block in own for block in tie.blocks) - 1
            if more > 0:
                parameter += more * tie.parameter_bytes
                gradient += more * tie.gradient_bytes
                optimizer += more * tie.optimizer_bytes
        return parameter, gradient, optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendCost:
    """One backend on one forward, or part of one.

    Args:
        us: median of the forward, at the shapes it was measured at.
        build_s: seconds it took to build, and the first call.
        error: largest difference to torch of any output, by the norm of the tensor.
        refused: why it cannot be used, in one line; times mean nothing then.
    """

    backend: str
    us: Micros = 0.0
    build_s: Work = 0.0
    error: Work = 0.0
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedGroup:
    """Operators of a stage, by their names in its graph, on a backend; none: all of them."""

    backend: str
    operators: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBackend:
    """The backend of a stage that takes no gradients.

    Args:
        groups: in the order in which they run; one for a stage that runs on one backend.
        us: of the forward on it, ``torch_us`` on torch's operators; 0 where it was not measured.
        costs: of all that were measured.
        notes: lines for the user.
    """

    stage: str
    groups: tuple[PlacedGroup, ...]
    us: Micros = 0.0
    torch_us: Micros = 0.0
    costs: tuple[BackendCost, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def backend(self) -> str:
        """Return the backends' names: ``openvino``, or of a mix ``openvino + torch``."""
        return " + ".join(dict.fromkeys(group.backend for group in self.groups))

    @property
    def is_torch(self) -> bool:
        """Return whether it runs as it would without any backend."""
        return self.backend == "torch"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledCost:
    """A block that trains, compiled and on torch's operators, at the shapes it was measured at.

    Args:
        forward_us, both_us: medians of a forward, and of a forward with its backward.
        saved_bytes: held from forward to backward.
        build_s: seconds that compiling took, and the first forward and backward.
        error: largest difference of an output or a gradient, by the norm of the tensor.
        refused: why it cannot be used, in one line; the rest means nothing then.
    """

    forward_us: Micros = 0.0
    both_us: Micros = 0.0
    saved_bytes: Bytes = 0
    torch_forward_us: Micros = 0.0
    torch_both_us: Micros = 0.0
    torch_saved_bytes: Bytes = 0
    build_s: Work = 0.0
    error: Work = 0.0
    refused: str = ""

    @property
    def gain(self) -> float:
        """Return how many times as fast as torch's operators it is; 0 where it cannot be used."""
        return self.torch_both_us / self.both_us if self.both_us and not self.refused else 0.0
