"""The first pass of a stage's code: its operators run one by one, to see which saves what.

What an operator saves is named as in a plan (`SavedTensor`): of the operator whose result the
storage is, or ``<operator>:inside``. Actions follow from names; numbers of storages from their identity.

Source: this project
Tests: tests/runtime/test_memory_ranks.py
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_iter

from gpp_plugin.capture.tracing.clean import ADDED
from gpp_plugin.runtime.memory.activation_policy import INSIDE, MemoryPolicy, Packed, unpack
from gpp_plugin.runtime.memory.counting import storage_id
from gpp_plugin.runtime.memory.recompute import (
    Action,
    Drop,
    Entry,
    Holding,
    MovingPass,
    Recipe,
    SecondForward,
    Swap,
    is_movable,
)
from gpp_plugin.runtime.memory.segments import SegmentLayout, lay_out, second_forward, with_entries
from gpp_plugin.runtime.memory.swap import SwapLink


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
            tuple(_entry(entries, number, run, needed[number]) for run in range(len(needed[number].runs)))
            if number in needed
            else ()
            for number in range(len(layouts))
        ),
        segments=tuple(segments),
    )


def _entry(entries: Mapping[tuple[int, int], Entry], segment: int, run: int, layout: SegmentLayout) -> Entry:
    found = entries.get((segment, run), Entry(holdings=(), is_random=False))
    wanted = layout.runs[run].values
    return Entry(
        holdings=tuple(h for h in found.holdings if h.name in wanted),
        is_random=layout.runs[run].is_random,
    )
