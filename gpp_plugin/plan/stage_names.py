"""What stages are called: after the modules and the layers they hold, and ``loss`` where they yield it.

A name is made of the modules a stage holds, in the order in which they run, joined by ``+``:

    blocks of a stage                                            its name
    model.language_model.layers.2, .layers.3, .norm, lm_head,    language_model.2-3+lm_head+loss
    and the loss
    vision_model.embeddings, vision_model.encoder.layers.0       vision_model.0
    all of vision_model, visual_projection                       vision_model+visual_projection
    vision_model.post_layernorm, visual_projection               vision_model.post_layernorm+visual_projection
    what joins both towers of a CLIP: the loss alone             loss
    dense0, dense1, ... dense14, top (16 modules), and the loss  dense0+dense1+13_more+top+loss

How a block's path becomes a part of a name. A *unit* is the outermost module that holds at most one list of
layers: ``vision_model`` of a CLIP, ``model.language_model`` of a LLaVA (``model`` holds two lists: it is no unit),
``transformer`` of a GPT-2, ``lm_head``. Of each unit of which a stage holds something its name says

- all of it: the unit;
- layers of it: the unit and their numbers, without the list's own name (``vision_model.0-1`` for layers 0 and 1 of
  ``vision_model.encoder.layers``); what stands beside them is left out: embeddings before the first, a norm behind
  the last. Where a cut lies inside layer 2, one name ends with 2 and the next one begins with it;
- none of its layers: the modules directly in it (``vision_model.embeddings``), ``forward`` for its own code.

Units are written without a module around all of the lists (the ``model`` of ``model.language_model``) where they
still differ. More than `MOST_UNITS` are not listed. Names that would be equal are numbered: ``head``, ``head#2``.
Which stage yields the loss is in the plan (`PipelinePlan.losses`): nothing is ever read out of a name.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.plan import LOSS_KEY, PipelinePlan

MOST_UNITS = 4
"""Units that a name lists; of more it lists the first two and the last one, and counts the others."""
OWN_CODE = "forward"
"""What a module computes itself, between the modules in it: also the block of a model's own code (`capture`)."""

Path = tuple[str, ...]


class StageNamer:
    """Names stages of one block graph, and finds the blocks that a part of a name means.

    Args:
        blocks: their names, in the graph's order.
        loss_blocks: those that yield a loss.
    """

    def __init__(self, blocks: Sequence[str], loss_blocks: Sequence[str]) -> None:
        # Of a LLaVA's block model.language_model.layers.2:
        #   _path     (model, language_model, layers, 2)     _number: 2
        #   _unit     (model, language_model)                _members: all of its blocks
        #   _label    language_model                         what names call the unit
        #   _called   that, and model.language_model         what users may call it
        self._loss_blocks = frozenset(loss_blocks)
        paths = _paths(blocks)
        self._order = {block: i for i, block in enumerate(paths)}
        around = _around_all(paths.values())
        self._path = {
            block: (path[len(around) :] or (OWN_CODE,)) if path[: len(around)] == around else path
            for block, path in paths.items()
        }
        lists = {path[:n] for path in self._path.values() if (n := _number_at(path)) is not None}
        self._unit = {block: _unit_of(path, lists) for block, path in self._path.items()}
        self._members: dict[Path, set[str]] = {}
        for block, unit in self._unit.items():
            self._members.setdefault(unit, set()).add(block)
        self._label = _labels(self._members, lists)
        self._called = {
            unit: {label, ".".join(unit), ".".join(around + unit)} for unit, label in self._label.items()
        }
        self._numbers = {
            unit: sorted({n for block in blocks if (n := self._number(block)) is not None})
            for unit, blocks in self._members.items()
        }

    def name(self, blocks: Iterable[str]) -> str:
        """Return the name of a stage of these blocks; another stage may get the same one.

        >>> namer = StageNamer(["v.embed", "v.layers.0", "v.layers.1", "v.norm", "head"], ["head"])
        >>> namer.name(["v.embed", "v.layers.0"]), namer.name(["v.layers.1", "v.norm", "head"])
        ('v.0', 'v.1+head+loss')
        """
        held: dict[Path, list[str]] = {}
        own = sorted(blocks, key=self._order.__getitem__)
        for block in own:
            held.setdefault(self._unit[block], []).append(block)
        yields_loss = not self._loss_blocks.isdisjoint(own)
        parts = list(dict.fromkeys(part for unit in held for part in self._parts(unit, held[unit])))
        if yields_loss:  # the model's own code of this stage is, or leads to, its loss
            parts = [part for part in parts if part not in (OWN_CODE, LOSS_KEY)]
        if len(parts) > MOST_UNITS:
            parts = [*parts[:2], f"{len(parts) - 3}_more", parts[-1]]
        return "+".join([*parts, LOSS_KEY] if yields_loss else parts)

    def blocks_of(self, key: str) -> frozenset[str]:
        """Return the blocks that a part of a name means, none where it means nothing.

        ``vision_model.0`` is layer 0 of that unit, whatever range a name holds it in.
        """
        # vision_model: all of the unit; vision_model.0: its layer 0, of one block or of several (attention, mlp);
        # vision_model.embeddings: what lies in that module.
        unit_text, _, number = key.rpartition(".")
        found: set[str] = set()
        for unit, blocks in self._members.items():
            called = self._called[unit]
            if key in called:
                found |= blocks
            elif unit_text in called and number.isdigit():
                found |= {block for block in blocks if self._number(block) == int(number)}
            else:
                found |= {
                    block
                    for block in blocks
                    if self._number(block) is None and key in {f"{c}.{self._piece(block)}" for c in called}
                }
        return frozenset(found)

    def may_name(self, key: str) -> bool:
        """Return whether a stage of this graph could have this name, or one with this part in it."""
        return all(self._may_be_part(part.partition("#")[0]) for part in key.split("+"))

    def _may_be_part(self, part: str) -> bool:
        if part in (LOSS_KEY, OWN_CODE) or re.fullmatch(r"\d+_more", part):
            return True
        unit = re.sub(r"(^|\.)\d+(-\d+)?$", "", part)
        return any(unit in called for called in self._called.values()) or bool(self.blocks_of(part))

    def _parts(self, unit: Path, held: Sequence[str]) -> list[str]:
        """Return what a name says of one unit: all of it, its layers, or the modules directly in it."""
        label = self._label[unit]
        is_whole = len(held) == len(self._members[unit])
        if label and (is_whole or label.rpartition(".")[2] == OWN_CODE):
            return [label]
        numbers = {n for block in held if (n := self._number(block)) is not None}
        if not numbers:
            return [f"{label}.{self._piece(block)}" for block in held]
        # Layers follow each other where no block of the graph lies between: (0, 2, 4) of layers 0, 2, 4, 6 are 0-4.
        every = self._numbers[unit]
        ranges = []
        for _, run in groupby(enumerate(sorted(numbers)), key=lambda pair: every.index(pair[1]) - pair[0]):
            first, *more = (n for _, n in run)
            ranges.append(f"{first}-{more[-1]}" if more else str(first))
        return [f"{label}.{text}" if label else text for text in ranges]

    def _number(self, block: str) -> int | None:
        at = _number_at(self._path[block])
        return None if at is None else int(self._path[block][at])

    def _piece(self, block: str) -> str:
        """Return the module directly in a block's unit that it lies in."""
        path, depth = self._path[block], len(self._unit[block])
        return path[depth] if len(path) > depth else OWN_CODE


def namer_of(graph: BlockGraph) -> StageNamer:
    """Return what names the stages of ``graph``; planners that name many plans of one graph share it."""
    return _namer(tuple(block.name for block in graph.blocks), graph.loss_blocks)


_namer = functools.lru_cache(maxsize=4)(StageNamer)


def name_stages(
    graph: BlockGraph, groups: Sequence[Sequence[str]], explicit: Sequence[str | None] = ()
) -> list[str]:
    """Return unique names for all stages of a plan: explicit ones as they are, the others by what they hold.

    Args:
        groups: by stage, its blocks.
        explicit: by stage, what the user calls it, or None.
    """
    namer = namer_of(graph)
    wanted = [name for name in explicit if name is not None]
    result: list[str] = []
    for index, blocks in enumerate(groups):
        own_name = explicit[index] if explicit else None
        name = namer.name(blocks) if own_name is None else own_name
        unique, number = name, 2
        while unique in result or (own_name is None and unique in wanted):
            unique, number = f"{name}#{number}", number + 1
        result.append(unique)
    return result


def find_stage(plan: PipelinePlan, graph: BlockGraph, key: str) -> int:
    """Return the index of the stage that a key means: its name, ``loss``, or the one that holds what the key names.

    Raises:
        PlanError: no stage is meant, or several are.
    """
    names = [stage.name for stage in plan.stages]
    if key not in names:
        meant = namer_of(graph).blocks_of(key)
        holding = [i for i, stage in enumerate(plan.stages) if not meant.isdisjoint(stage.blocks)]
        if len(holding) == 1:
            return holding[0]
        if holding:
            found = " and ".join(repr(names[i]) for i in holding)
            raise PlanError(f"{key!r} is in stages {found}; give the name of one of them")
    return plan.stage_index(key)


def _paths(blocks: Sequence[str]) -> dict[str, Path]:
    """Return the module path of each block, without what distinguishes blocks of one module.

    ``encoder.layers.0#2`` lies in encoder, layers, 0; a block of one operator is called ``module:operator``, or
    ``operator`` alone where no module but the model itself calls it.
    """
    has_operators = any(":" in block for block in blocks)
    paths = {}
    for block in blocks:
        module, colon, _ = block.split("#")[0].partition(":")
        paths[block] = (OWN_CODE,) if has_operators and not colon else tuple(module.split("."))
    return paths


def _number_at(path: Path) -> int | None:
    """Return where the number of the outermost layer stands in a path: 2 in (encoder, layers, 0, mlp)."""
    return next((i for i, part in enumerate(path) if part.isdigit()), None)


def _unit_of(path: Path, lists: Collection[Path]) -> Path:
    """Return the outermost module on ``path`` that holds at most one of ``lists``.

    Of (model, language_model, layers, 0), with lists in model.language_model and in model.vision_tower: the two are
    both in ``model``, so its unit is (model, language_model).
    """
    start = 0 if path[0].isdigit() else 1  # the model itself can be the list: its layers are 0, 1, ...
    for depth in range(start, len(path)):
        if sum(each[:depth] == path[:depth] for each in lists) <= 1:
            return path[:depth]
    return path


def _labels(units: Iterable[Path], lists: Collection[Path]) -> dict[Path, str]:
    """Return how units are written: without the modules around all lists, where they still differ."""
    # Of a Whisper, with lists in (model, encoder) and (model, decoder), and proj_out: encoder, decoder, proj_out. Were
    # there an encoder beside model too, the short names would not differ, and all units would be written in full.
    every = list(units)
    around = _common_prefix([unit for unit in every if any(each[: len(unit)] == unit for each in lists)])
    depth = len(around) if len(lists) > 1 else 0
    # a module around several lists is in `units` where it has code of its own, which is meant then
    full = {u: (*u, OWN_CODE) if sum(e[: len(u)] == u for e in lists) > 1 else u for u in every}
    short = {u: path[depth:] if u[:depth] == around and len(u) > depth else path for u, path in full.items()}
    is_clear = len(set(short.values())) == len(every)
    return {unit: ".".join(short[unit] if is_clear else full[unit]) for unit in every}


def _around_all(paths: Iterable[Path]) -> Path:
    """Return the modules around everything, which say nothing where there are several modules in them.

    (net,) of (net, layers, 0), (net, layers, 1), (net, head); () of (net, layers, 0), (net, layers, 1), which are
    better called net.0 and net.1. The model's own code is left aside.
    """
    every = list(paths)
    holding = {path[:depth] for path in every for depth in range(1, len(path))}
    parents = []
    for path in every:
        if path in holding or path[0] in (LOSS_KEY, OWN_CODE):
            continue
        number = _number_at(path)
        parents.append(path[: max((len(path) if number is None else number) - 1, 0)])
    around = _common_prefix(parents)
    inside = {path[len(around)] for path in every if path[: len(around)] == around != path}
    return around if len(inside) > 1 else ()


def _common_prefix(paths: Sequence[Path]) -> Path:
    """Return what all paths begin with: (a,) of (a, b), (a, c, d) and (a,)."""
    return tuple(os.path.commonprefix(paths))
