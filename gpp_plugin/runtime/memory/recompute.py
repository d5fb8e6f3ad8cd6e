"""Segments that run again before their backward (DawnPiper, section 4.3; Chen et al., 2016).

The autograd graph of the forward stays as it is; only what a segment's operators saved is replaced, through
saved-tensor hooks, by a place in its second forward. The first of these places that the backward requests runs
the segment again, with random states restored and gradients on, and collects what its operators save, all of
it; each tensor is returned once and then released. The graph that the second forward makes is dropped.

Why not `torch.utils.checkpoint`: it drops whatever the segment saves, where a plan drops what nobody outside
uses and keeps the rest; it holds what the segment reads, where that may itself wait on the host; it would update
buffers twice; and it compares the metadata of every saved tensor each time. An `autograd.Function` would besides
cut the graph, so that a backward could not be split inside a segment.

Gradients are those of the plain backward bit by bit: the same kernels make the same saved tensors from the
same values. Autocast needs no restoring: stages refuse it, regions inside a model carry their own setting.

Source: Chen et al. 2016 (arXiv 1604.06174); DawnPiper (arXiv 2505.05856), section 4.3
Tests: tests/runtime/test_recompute.py, tests/runtime/test_memory_ranks.py
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_iter

from gpp_plugin.capture.eager.opaque_call import saving_separately
from gpp_plugin.capture.tracing.clean import ADDED
from gpp_plugin.errors import RuntimeFailure
from gpp_plugin.runtime.memory.counting import (
    MemoryCounter,
    Packed,
    Pass,
    pack_versioned,
    storage_bytes,
    storage_id,
    unpack,
)
from gpp_plugin.runtime.memory.segments import (
    INSIDE,
    MemoryPolicy,
    SegmentCode,
    SegmentLayout,
    lay_out,
    second_forward,
    with_entries,
)
from gpp_plugin.runtime.memory.swap import ReturnQueue, SwapLink, SwappedStorage, SwappedView
from gpp_plugin.runtime.random_streams import Streams, set_streams, streams_of


@dataclass(frozen=True, slots=True)
class Held:
    """What a segment reads from outside: on the device, or on the host."""

    value: Tensor | SwappedView
    requires_grad: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondForward:
    """How a segment makes its tensors again.

    Args:
        places: for every tensor that the code saves, in order, its number among those that the stage's forward
            saves, or None where the first one stayed.
        fixed: argument -> its position among the pass's inputs (parameters, rows).
    """

    code: SegmentCode
    places: tuple[int | None, ...]
    fixed: Mapping[str, int]


class Replay:
    """One segment in one pass of a stage's code; lives as long as autograd holds something that it makes again.

    Args:
        fixed: what is there anyway, in the order of `SecondForward.fixed`.
        queue: brings back values that wait on the host.
    """

    __slots__ = (
        "_counter", "_device", "_fixed", "_has_run", "_micro_batch", "_queue", "_values", "_working_bytes",
        "__weakref__", "_second", "held", "states",
    )  # fmt: skip

    def __init__(
        self,
        *,
        fixed: Sequence[Tensor],
        queue: ReturnQueue,
        device: torch.device,
        micro_batch: int,
        counter: MemoryCounter | None,
    ) -> None:
        self._fixed = fixed
        self._queue = queue
        self._device = device
        self._micro_batch = micro_batch
        self._counter = counter
        self._values: dict[int, Tensor] = {}
        self._has_run = False
        self._working_bytes = 0
        self.held: dict[str, Held] = {}
        self.states: dict[int, Streams] = {}
        self._second: SecondForward | None = None

    def plan(self, second: SecondForward | None) -> None:
        """Say how to run again, and release what that does not read; None: nothing is made again."""
        self._second = second
        wanted = second.code.arguments if second is not None else ()
        for name in [name for name in self.held if name not in wanted]:
            value = self.held.pop(name).value
            if isinstance(value, SwappedView):
                value.storage.forgo()

    def restore(self, run: int) -> None:
        """Draw from now on what the forward drew in a run; called by the segment's code."""
        set_streams(self._device, self.states[run])

    def get(self, place: int) -> Tensor:
        """Return the tensor that the forward saved at a place; runs the segment if it is not at hand.

        A second backward through the same graph (the weight gradients of a split one) runs it again.
        """
        if place not in self._values:
            self._run()
        tensor = self._values.pop(place)
        if not self._values:
            self._count_working(0)
        return tensor

    def __del__(self) -> None:
        self._count_working(0)  # some of what was made again may never have been requested

    def _run(self) -> None:
        # The second forward saves what the first one did, in the same order: ``places`` says for each which number it
        # had in the stage's forward, None where the first one stayed. With places [0, None, 3] the first and third
        # are collected as 0 and 3, the second is dropped at once. The graph that gradients on builds is never used:
        # without it operators would save nothing.
        second = self._second
        assert second is not None, "a segment's code is known before any backward"
        arguments = [self._argument(name, second) for name in second.code.arguments]
        places = iter(second.places)
        found = self._values

        def collect(tensor: Tensor) -> None:
            place = next(places, _NO_PLACE)
            if place == _NO_PLACE:
                raise RuntimeFailure(_OTHER_TENSORS)
            if place is not None:
                found[place] = tensor.detach()

        before = streams_of(self._device) if second.code.is_random else None
        try:
            # what an opaque call saves was saved the first time, and is dropped the second
            hooks = saved_tensors_hooks(collect, _never)
            with torch.enable_grad(), hooks, saving_separately(lambda tensor: None, _never):
                second.code.call(self, *arguments)
        finally:
            if before is not None:
                set_streams(self._device, before)
        if next(places, _NO_PLACE) != _NO_PLACE:
            raise RuntimeFailure(_OTHER_TENSORS)
        self._count()

    def _argument(self, name: str, second: SecondForward) -> Tensor:
        held = self.held.get(name)
        if held is None:
            tensor = self._fixed[second.fixed[name]]
        else:
            value = held.value
            tensor = value.detach() if isinstance(value, Tensor) else self._queue.get(value)
            tensor.requires_grad_(held.requires_grad)
        return tensor.clone() if name in second.code.scratch else tensor

    def _count(self) -> None:
        if self._counter is None:
            return
        total = storage_bytes(self._values.values())
        if not self._has_run:
            self._counter.make_again(self._micro_batch, total)
            self._has_run = True
        self._count_working(total)

    def _count_working(self, num_bytes: int) -> None:
        if self._counter is not None:
            self._counter.work(num_bytes - self._working_bytes)
            self._working_bytes = num_bytes


_NO_PLACE = -1
_OTHER_TENSORS = (
    "a recomputed segment saved other tensors the second time: one of its operators depends on what no node of the "
    "graph says; leave its blocks out of memory.recompute"
)


def _never(_: object) -> Tensor:
    raise AssertionError("the second forward's graph has no backward")


# What to do with each tensor that a stage's code saves for backward, in the order in which it saves them.
#
# The code never changes, so neither does that order, at whatever lengths: a `Recipe` is found out in the first pass
# (`SurveyPass`) and followed by position in all others, where nothing is looked up.


@dataclass(frozen=True, slots=True)
class Swap:
    """Move it to the host; ``slot`` numbers the storages that one pass moves."""

    slot: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Let a segment make it again."""

    segment: int


Action = Swap | Drop | None
"""None: keep it on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A value that a segment reads from outside.

    Args:
        slot: where its storage is swapped too.
        is_snapshot: it changes; keep a copy.
    """

    name: str
    slot: int | None
    requires_grad: bool
    is_snapshot: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What to note before a run of a segment."""

    holdings: tuple[Holding, ...]
    is_random: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One pass of a stage's code.

    Args:
        call: the code; takes a `Pass` first.
        entries: by segment and run.
        segments: None where a segment saves nothing that it could make again.
    """

    call: Callable[..., tuple[Tensor, ...]]
    actions: tuple[Action, ...]
    entries: tuple[tuple[Entry, ...], ...]
    segments: tuple[SecondForward | None, ...]


class MovingPass(Pass):
    """A forward some of whose saved tensors move to the host, or are made again by segments.

    Args:
        fixed: what is there anyway (sizes, constants, parameters, the model's inputs), in the order of the code's
            arguments.
    """

    def __init__(
        self,
        call: Callable[..., tuple[Tensor, ...]],
        *,
        micro_batch: int,
        fixed: Sequence[Any],
        num_segments: int,
        link: SwapLink,
        counter: MemoryCounter | None,
    ) -> None:
        super().__init__(call, micro_batch=micro_batch, counter=counter)
        self._link = link
        self._slots: dict[int, SwappedStorage] = {}
        self.queue = ReturnQueue()
        self.replays = [
            Replay(
                fixed=fixed, queue=self.queue, device=link.device, micro_batch=micro_batch, counter=counter
            )
            for _ in range(num_segments)
        ]

    def prefetch(self, *, beside_forward: bool = False) -> None:
        """Bring back what the backward needs first."""
        self.queue.prefetch(beside_forward=beside_forward)

    def call_behind(self, behind: Callable[[], None]) -> None:
        """Call something when the backward uses the last that came back."""
        self.queue.behind = behind

    def pack(self, tensor: Tensor, place: int, action: Action) -> Packed:
        """Do with a saved tensor what its action says, and return what stands for it."""
        if action is None:
            return self.keep(tensor)
        if isinstance(action, Drop):
            return functools.partial(self.replays[action.segment].get, place)
        return functools.partial(self.queue.get, self.move(tensor, action.slot))

    def move(self, tensor: Tensor, slot: int) -> SwappedView:
        """Return a handle of a tensor on the host; its storage moves when the first of its tensors does."""
        # Every use is noted in the queue, so that a storage that several operators keep comes back for the first of
        # them in backward order, which is the last one here.
        storage = self._slots.get(slot)
        if storage is None:
            storage = self._slots[slot] = SwappedStorage(self._link, tensor, self._counter)
            if self._counter is not None:
                self._counter.swap(self._micro_batch, storage.num_bytes)
        self.queue.add(storage)
        return storage.view(tensor)

    def note(self, segment: int, run: int, entry: Entry, values: Sequence[Tensor]) -> None:
        """Keep what a run of a segment needs to run again."""
        replay = self.replays[segment]
        if entry.is_random:
            replay.states[run] = streams_of(self._link.device)
        for holding, value in zip(entry.holdings, values, strict=True):
            kept: Tensor | SwappedView = value.detach()
            if holding.slot is not None:
                kept = self.move(value, holding.slot)
            elif holding.is_snapshot:
                kept = value.detach().clone()
            replay.held[holding.name] = Held(kept, holding.requires_grad)

    def finish(self) -> None:
        """End the forward: count what stays on the device for segments, and leave them to autograd."""
        if self._counter is not None:
            for replay in self.replays:
                for held in replay.held.values():
                    if isinstance(held.value, Tensor):
                        self.count(held.value)
        self.replays.clear()


class PlannedPass(MovingPass):
    """A forward that follows a recipe.

    Args:
        constants: what the code takes in front of parameters; ``fixed`` begins with them.
    """

    def __init__(self, recipe: Recipe, *, constants: Sequence[Any], **context: Any) -> None:
        super().__init__(recipe.call, num_segments=len(recipe.segments), **context)
        self._recipe = recipe
        self._constants = constants
        self._saved = itertools.count()
        for replay, second in zip(self.replays, recipe.segments, strict=True):
            replay.plan(second)

    def enter(self, segment: int, run: int, values: tuple[Tensor, ...]) -> None:
        """Note what a segment needs; called by the stage's code."""
        self.note(segment, run, self._recipe.entries[segment][run], values)

    def packer(self) -> Callable[[Tensor], Packed]:
        """Return what does with each saved tensor what the recipe says at its position."""
        # ``actions[place]`` for the saved tensor number ``place``: with [None, Swap(0), Drop(1), Swap(0)] the first
        # stays, the second and fourth are views of one storage that moves once, the third is made again by segment 1.
        actions, is_uncounted, saved = self._recipe.actions, self._counter is None, self._saved

        def pack(tensor: Tensor) -> Packed:
            place = next(saved)
            action = actions[place] if place < len(actions) else None
            if action is None and is_uncounted:  # most of them, and each costs microseconds
                return pack_versioned(tensor)
            return self.pack(tensor, place, action)

        return pack

    def run(self, fixed: Sequence[Tensor], received: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the code."""
        return self._call(self, *self._constants, *fixed, *received)

    def finish(self) -> None:
        """End the forward.

        Raises:
            RuntimeFailure: it saved other tensors than the first time.
        """
        num_saved = next(self._saved)
        if num_saved != len(self._recipe.actions):
            raise RuntimeFailure(
                f"the stage saved {num_saved} tensors for backward, and {len(self._recipe.actions)} the first "
                "time; its operators depend on more than shapes: train without memory.recompute and memory.swap"
            )
        super().finish()


def is_movable(tensor: Tensor, device: torch.device | None = None) -> bool:
    """Return whether a tensor is plain bytes in a storage.

    Args:
        device: the one it must be on: a number that a CUDA stage keeps on the host would come back on the device.
    """
    is_there = device is None or tensor.device.type == device.type
    return is_there and tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


# The first pass of a stage's code: its operators run one by one, to see which saves what.
#
# What an operator saves is named as in a plan (`SavedTensor`): of the operator whose result the
# storage is, or ``<operator>:inside``. Actions follow from names; numbers of storages from their identity.


@dataclass(slots=True)
class _Owner:
    """Whose results lie in a storage.

    Args:
        names: as in the plan; empty for what is there anyway. Several where a copy that the whole graph makes
            is none in the stage: operators choose layouts by those of what they read.
        slot: its number among the swapped ones, or -1.
    """

    storage: weakref.ref[Any]
    names: set[str]
    slot: int = -1


class _Storages:
    """Names of the storages alive, and numbers of those that are swapped."""

    def __init__(self, policy: MemoryPolicy, device: torch.device) -> None:
        self._policy, self._device = policy, device
        self._owners: dict[int, _Owner] = {}
        self._num_slots = 0

    def claim(self, tensor: Tensor, *names: str) -> _Owner:
        """Return the owner of a tensor's storage, which has these names if it is a new one."""
        # Storages are distinguished by address while they live. One that died may have lent its address to another
        # since, which its dead weak reference shows: then the storage is new, and its name with it.
        key = storage_id(tensor)
        owner = self._owners.get(key)
        if owner is None or owner.storage() is None:
            owner = self._owners[key] = _Owner(weakref.ref(tensor.untyped_storage()), set(names))
        return owner

    def add_result(self, tensor: Tensor, node: str) -> None:
        """Take note of an operator's result."""
        name = self._policy.root(node)
        owner = self.claim(tensor, name)
        if owner.names:
            owner.names.update((name, *self._policy.stand_ins.get(name, ())))

    def slot(self, tensor: Tensor, owner: _Owner) -> int | None:
        """Return the number of a storage that is to be swapped; None of another."""
        if self._policy.swapped.isdisjoint(owner.names) or not is_movable(tensor, self._device):
            return None
        if owner.slot < 0:
            owner.slot = self._num_slots
            self._num_slots += 1
        return owner.slot

    def action(self, tensor: Tensor, node: str) -> Action:
        """Return what happens to a tensor that an operator saves."""
        if tensor.layout is not torch.strided:
            return None
        owner = self.claim(tensor, f"{node}{INSIDE}")
        segment = self._policy.segment_of.get(node)
        if segment is not None and not self._policy.dropped[segment].isdisjoint(owner.names):
            return Drop(segment)
        slot = self.slot(tensor, owner)
        return None if slot is None else Swap(slot)


@dataclass(slots=True)
class _Saved:
    """A tensor saved while its operator still runs: whose storage it lies in shows when that is done."""

    tensor: Tensor | None
    packed: Packed | None = None

    def get(self) -> Tensor:
        """Return the tensor, wherever it went."""
        assert self.packed is not None
        return unpack(self.packed)


class SurveyPass(MovingPass):
    """The first forward of a stage's code, which finds out on its way what to do.

    Args:
        arguments: of the code, by placeholder, in order; the first ``num_fixed`` of them are there anyway.
        on_recipe: takes what to do from now on, when the forward is finished.
        context: as of `MovingPass`.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        policy: MemoryPolicy,
        arguments: Mapping[str, Tensor | int],
        num_fixed: int,
        *,
        link: SwapLink,
        on_recipe: Callable[[Recipe], None],
        **context: Any,
    ) -> None:
        # Which operator an output of `pack` belongs to is known only while operators run one by one; whose result a
        # storage is only when the operator has returned. So each saved tensor waits in ``pending`` until its operator
        # is done:
        #
        #     gelu(h)   pack(h)    pending [h]         h's storage is linear's result: the plan calls it "linear"
        #     returns   settle     log [(gelu, Swap(0))], and whatever is packed for h is passed to autograd's handle
        #     norm(..)  pack(x), pack(mean)            mean is nobody's result: the plan calls it "norm:inside"
        names = tuple(arguments)
        self._layouts = lay_out(module.graph, policy, frozenset(names[:num_fixed]))
        fixed = tuple(arguments.values())[:num_fixed]
        super().__init__(module, num_segments=len(self._layouts), fixed=fixed, link=link, **context)
        self._module = module
        self._code = with_entries(module, dict(enumerate(self._layouts)))
        self._constants = fixed
        self._fixed_names = names[:num_fixed]
        self._on_recipe = on_recipe
        self._storages = _Storages(policy, link.device)
        for position, (name, tensor) in enumerate(arguments.items()):
            if not isinstance(tensor, Tensor):  # a size, of code for all lengths
                continue
            if position < num_fixed:
                self._storages.claim(tensor)
            else:
                self._storages.claim(tensor, policy.root(name))
        self._pending: list[_Saved] = []
        self._log: list[tuple[str, Action]] = []
        self._entries: dict[tuple[int, int], Entry] = {}

    def packer(self) -> Callable[[Tensor], Packed]:
        """Return what takes note of each saved tensor."""
        return self.save

    def run(self, fixed: Sequence[Tensor], received: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the code operator by operator."""
        constants = self._constants[: len(self._constants) - len(fixed)]
        outputs: tuple[Tensor, ...] = _Interpreter(self._code, self).run(self, *constants, *fixed, *received)
        return outputs

    def finish(self) -> None:
        """End the forward, and report what it found out."""
        recipe = _recipe(self._module, self._layouts, self._log, self._entries, self._fixed_names)
        for replay, second in zip(self.replays, recipe.segments, strict=True):
            replay.plan(second)
        super().finish()
        self._on_recipe(recipe)

    def save(self, tensor: Tensor) -> Packed:
        """Take a tensor that the running operator saves."""
        saved = _Saved(tensor.detach())
        self._pending.append(saved)
        return saved.get

    def settle(self, node: str, result: Any) -> None:
        """Decide about what an operator saved."""
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                self._storages.add_result(tensor, node)
        for saved in self._pending:
            assert saved.tensor is not None
            action = self._storages.action(saved.tensor, node)
            saved.packed = self.pack(saved.tensor, len(self._log), action)
            saved.tensor = None
            self._log.append((node, action))
        self._pending.clear()

    def enter(self, segment: int, run: int, values: tuple[Tensor, ...]) -> None:
        """Note all that a segment may need; called by the stage's code."""
        layout = self._layouts[segment].runs[run]
        holdings = []
        for name, value in zip(layout.values, values, strict=True):
            owner = self._storages.claim(value, name)
            is_snapshot = name in layout.snapshots
            holdings.append(
                Holding(
                    name=name,
                    slot=None if is_snapshot else self._storages.slot(value, owner),
                    requires_grad=value.requires_grad,
                    is_snapshot=is_snapshot,
                )
            )
        entry = Entry(holdings=tuple(holdings), is_random=layout.is_random)
        self._entries[segment, run] = entry
        self.note(segment, run, entry, values)


class _Interpreter(fx.Interpreter):
    """Runs the code, and reports to a pass what each operator made."""

    def __init__(self, module: fx.GraphModule, survey: SurveyPass) -> None:
        super().__init__(module)
        self.extra_traceback = False  # an operator's error is shown as in any other pass
        self._survey = survey

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        result = super().run_node(n)
        if n.op == "call_function":
            # what is saved of an operator that the capture lacks is, as planned, inside of the one that saves it
            self._survey.settle(n.name, None if ADDED in n.meta else result)
        return result


def _recipe(
    module: fx.GraphModule,
    layouts: Sequence[SegmentLayout],
    log: Sequence[tuple[str, Action]],
    entries: Mapping[tuple[int, int], Entry],
    fixed: Sequence[str],
) -> Recipe:
    """Return what the first forward found out.

    Args:
        log: for each tensor that was saved, in order, the operator that saved it and what was done with it.
        entries: (segment, run) -> what the forward noted before that run.
        fixed: the code's arguments that are there anyway.
    """
    # Five saves by segment 0 (operators a, b, c) and by an operator x outside; the plan drops two of them:
    #
    #     log       (a, Drop(0))  (x, None)  (b, None)  (b, Drop(0))  (c, None)
    #     places    [0, None, 3]        of what the second forward saves: a's, b's two; it ends with b
    #     actions   [Drop(0), None, None, Drop(0), None]      for what every later forward of the stage saves
    #
    # What the second forward does not read (now that it ends early) is not noted by later forwards either
    # (``needed``).
    numbers = {name: position for position, name in enumerate(fixed)}
    segments: list[SecondForward | None] = []
    needed: dict[int, SegmentLayout] = {}
    for number, layout in enumerate(layouts):
        drops = [node for node, action in log if action == Drop(number)]
        if not drops:
            segments.append(None)
            continue
        layout = layout.until(drops[-1])
        code = second_forward(module, layout)
        needed[number] = layout.holding(code.arguments)
        segments.append(
            SecondForward(
                code=code,
                places=tuple(
                    place if action == Drop(number) else None
                    for place, (node, action) in enumerate(log)
                    if node in code.nodes
                ),
                fixed={name: numbers[name] for name in code.arguments if name in numbers},
            )
        )
    return Recipe(
        call=with_entries(module, needed).forward,
        actions=tuple(action for _, action in log),
        entries=tuple(
            tuple(_entries_of(needed[number], entries, number)) if number in needed else ()
            for number in range(len(layouts))
        ),
        segments=tuple(segments),
    )


def _entries_of(
    layout: SegmentLayout, entries: Mapping[tuple[int, int], Entry], segment: int
) -> Iterator[Entry]:
    """Yield what to note before each run of a segment, of what was noted in the first forward."""
    for number, run in enumerate(layout.runs):
        found = entries.get((segment, number))
        holdings = () if found is None else found.holdings
        yield Entry(holdings=tuple(h for h in holdings if h.name in run.values), is_random=run.is_random)
