"""The first pass of a stage's code: its operators run one by one, to see which saves what.

What an operator saves has the name that a plan knows it by (`SavedTensor`): of the operator whose result the
storage is, or ``<operator>:inside``. Actions follow from names; numbers of storages from their identity.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_iter

from gpp_plugin.runtime.counting import storage_id
from gpp_plugin.runtime.memory_policy import INSIDE, MemoryPolicy
from gpp_plugin.runtime.recipe import (
    Action,
    Drop,
    Entry,
    Holding,
    Packed,
    Pass,
    Recipe,
    Swap,
    is_movable,
    unpack,
)
from gpp_plugin.runtime.recompute import SecondForward
from gpp_plugin.runtime.segments import Layout, second_forward, with_entries
from gpp_plugin.runtime.swap import HostLink


@dataclass(slots=True)
class _Owner:
    """Whose results lie in a storage.

    Args:
        names: as the plan knows them; empty for what is there anyway. Several where a copy that the whole graph makes
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
            owner.names.add(name)

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


class _SurveyPass(Pass):
    """A pass that finds out what to do as it goes."""

    def __init__(self, layouts: Sequence[Layout], storages: _Storages, **surroundings: Any) -> None:
        super().__init__(num_segments=len(layouts), **surroundings)
        self._layouts = layouts
        self._storages = storages
        self._pending: list[_Saved] = []
        self.log: list[tuple[str, Action]] = []
        self.holdings: dict[str, list[Holding]] = {}
        self.entries: dict[tuple[int, int], Entry] = {}

    def save(self, tensor: Tensor) -> _Saved:
        """Take a tensor that the running operator saves."""
        saved = _Saved(tensor.detach())
        self._pending.append(saved)
        return saved

    def settle(self, node: str, result: Any) -> None:
        """Decide about what an operator saved."""
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                self._storages.add_result(tensor, node)
        for saved in self._pending:
            assert saved.tensor is not None
            action = self._storages.action(saved.tensor, node)
            saved.packed = self.pack(saved.tensor, len(self.log), action)
            saved.tensor = None
            self.log.append((node, action))
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
        self.entries[segment, run] = entry
        self.note(segment, run, entry, values)


class _Interpreter(fx.Interpreter):
    """Runs the code, and tells a pass what each operator made."""

    def __init__(self, module: fx.GraphModule, survey: _SurveyPass) -> None:
        super().__init__(module)
        self.extra_traceback = False  # an operator's error is told as in any other pass
        self._survey = survey

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        result = super().run_node(n)
        if n.op == "call_function":
            self._survey.settle(n.name, result)
        return result


def _unpack(saved: _Saved) -> Tensor:
    assert saved.packed is not None
    return unpack(saved.packed)


def survey(
    module: fx.GraphModule,
    layouts: Sequence[Layout],
    policy: MemoryPolicy,
    arguments: Mapping[str, Tensor],
    num_fixed: int,
    *,
    link: HostLink,
    **surroundings: Any,
) -> tuple[Pass, tuple[Tensor, ...], Recipe]:
    """Run a stage's code for the first time.

    Args:
        arguments: of the code, by placeholder, in order; the first ``num_fixed`` of them are there anyway.
        link, surroundings: as for `Pass`.

    Returns:
        The pass, the outputs, and what to do from now on.
    """
    storages = _Storages(policy, link.device)
    for position, (name, tensor) in enumerate(arguments.items()):
        if position < num_fixed:
            storages.claim(tensor)
        else:
            storages.claim(tensor, policy.root(name))
    fixed = tuple(arguments.values())[:num_fixed]
    first = _SurveyPass(layouts, storages, fixed=fixed, link=link, **surroundings)
    with saved_tensors_hooks(first.save, _unpack):
        outputs = _Interpreter(with_entries(module, dict(enumerate(layouts))), first).run(
            first, *arguments.values()
        )
    recipe = _recipe(module, layouts, first, tuple(arguments)[:num_fixed])
    for replay, second in zip(first.replays, recipe.segments, strict=True):
        replay.plan(second)
    first.finish()
    return first, outputs, recipe


def _recipe(
    module: fx.GraphModule, layouts: Sequence[Layout], first: _SurveyPass, fixed: Sequence[str]
) -> Recipe:
    numbers = {name: position for position, name in enumerate(fixed)}
    segments: list[SecondForward | None] = []
    needed: dict[int, Layout] = {}
    for number, layout in enumerate(layouts):
        drops = [node for node, action in first.log if action == Drop(number)]
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
                    for place, (node, action) in enumerate(first.log)
                    if node in code.nodes
                ),
                fixed={name: numbers[name] for name in code.arguments if name in numbers},
            )
        )
    return Recipe(
        call=with_entries(module, needed).forward,
        actions=tuple(action for _, action in first.log),
        entries=tuple(
            tuple(_entry(first, number, run, needed[number]) for run in range(len(needed[number].runs)))
            if number in needed
            else ()
            for number in range(len(layouts))
        ),
        segments=tuple(segments),
    )


def _entry(first: _SurveyPass, segment: int, run: int, layout: Layout) -> Entry:
    found = first.entries.get((segment, run), Entry(holdings=(), is_random=False))
    wanted = layout.runs[run].values
    return Entry(
        holdings=tuple(h for h in found.holdings if h.name in wanted),
        is_random=layout.runs[run].is_random,
    )
