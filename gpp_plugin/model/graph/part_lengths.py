"""A captured part's code for batches of many lengths: one export with symbols, bound to the sizes of each batch.

The first batch's shapes are captured as they are. A batch of other lengths shows which axes are lengths: the part is
captured once more with symbols for those, and from then on a length not seen before costs the evaluation of formulas.

    input_ids [4, 8]     captured at the start               seconds
    input_ids [4, 11]    captured with input_ids [4, s0]     seconds, once
    input_ids [4, 9]     s0 = 9                              milliseconds

Numbers of samples are symbols as lengths are, as soon as a batch has a third one: units of 2, 3, 5 .. samples share one
capture. Not so a single sample: torch takes a size of one for another matter, and it is captured by itself.

Where a model's Python reads sizes, what it answered is a condition of the capture (``s0 <= 16``). A batch that it
does not hold for is captured by itself, and a warning says so once. Where Python takes the number of images as one (a
list of them), a capture holds for texts of any length beside so many, and each number has its own, up to a bound.

Of a model whose Python reads values, a batch's kind has its readings too: texts of other lengths beside the same sizes
of images are one kind, whose lengths are symbols; other sizes of images are another kind, captured twice again.

Source: this project
Tests: tests/runtime/test_lengths.py
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gpp_plugin.capture.captured_graph import LengthCapture
from gpp_plugin.capture.mask_values import MasksAtLengths, repeated_operands
from gpp_plugin.capture.tracing.sample_batches import WholeUnit, is_padded
from gpp_plugin.errors import CaptureError, first_line
from gpp_plugin.ir.size_formulas import Mismatch
from gpp_plugin.runtime.batches import Batch
from gpp_plugin.runtime.stage_module import OpenStage, StageCode, StageFunction

logger = logging.getLogger(__name__)

Lengths: TypeAlias = Mapping[str, tuple[int, ...]]
"""Batch key -> its axes of many lengths."""
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""Batch key -> the shape of its tensor."""

MAX_KINDS = 64
"""Kinds of batches (numbers of samples, keys, constants) of which a part remembers what it found out."""
MAX_EXPORTS = 8
"""Exports with symbols for one kind of batches of so many samples: of other axes each, or from another batch."""
MAX_EXPORTS_AT_ANY_COUNT = 2
"""The same, for any number of samples."""
MAX_STAGES = 64
"""Exports with symbols that are stored for one kind of batches."""
MANY_COUNTS = 3
"""Numbers of samples from which on there may be any: whole and half micro-batches, or a rest at the end, are two."""


class StageAtLengths:
    """A stage of a capture with symbols.

    Args:
        code: the stage as analysed, without its function: what does not depend on lengths, and what is analysed of
            tensors.
        nodes, outputs: its operators and results in the capture.
        names: tensor of ``code`` -> what the capture calls it.
        whole: the capture before ranks of the same samples shared it out, whose tensors have the sizes of wholes.
        finish: gives code the names by which it is known; by default it keeps its own.

    Raises:
        CaptureError: a size has no formula.
    """

    def __init__(
        self,
        capture: LengthCapture,
        code: StageCode,
        nodes: Sequence[str],
        outputs: Sequence[str],
        *,
        names: Mapping[str, str],
        whole: LengthCapture | None = None,
        finish: Callable[[StageFunction], StageFunction] = lambda function: function,
    ) -> None:
        texts, captured = capture.texts(), capture.captured
        self._code = code
        self._stage = OpenStage(captured, nodes, outputs, key=texts.key, finish=finish)
        self._tensors, self._inputs = tuple(code.tensors), tuple(code.inputs)
        placeholder = {key: name for name, key in captured.inputs.items()}
        self._specs = (whole or capture).specs(
            (*code.tensors.values(), *code.inputs.values()),
            (
                *(names[tensor] for tensor in code.tensors),
                *(placeholder[key] for key in code.inputs),
            ),
            texts,
        )
        finder = capture.masks.of(self._stage.names)
        self._masks = MasksAtLengths(finder, texts)
        self._repeated = {
            name: repeated_operands(captured.graph, (name,)) for name in sorted(finder.candidates)
        }
        self._sizes = texts.compile(self._stage.sizes)
        # last: until here operators' shapes were compared, which may be conditions too
        conditions = texts.conditions()
        self._solve = conditions.solver()
        self._shapes = conditions.shapes

    def is_open(self, key: str, axis: int) -> bool:
        """Return whether the stage is for many sizes of an axis of the batch."""
        return not self._shapes[key][axis].isdigit()

    @property
    def has_open_axes(self) -> bool:
        """Return whether the stage is for many sizes of any axis."""
        return any(not size.isdigit() for shape in self._shapes.values() for size in shape)

    def at(self, shapes: Mapping[str, Sequence[int]], num_samples: int) -> StageCode | Mismatch:
        """Return the stage for a batch of so many samples of these shapes, or why it has no code for it."""
        symbols = self._solve(shapes)
        if isinstance(symbols, Mismatch):
            return symbols
        try:
            specs = self._specs(num_samples, *symbols)
        except CaptureError as error:
            return Mismatch(partial(str, error))
        masks = self._masks.at(symbols)
        operators = self._code.operators
        assert operators is not None, "captured code says what it is made of"
        return dataclasses.replace(
            self._code,
            function=self._stage.at(self._sizes(*symbols), masks),
            tensors=dict(zip(self._tensors, specs, strict=False)),
            inputs=dict(zip(self._inputs, specs[len(self._tensors) :], strict=True)),
            operators=dataclasses.replace(
                operators, repeated=[pair for name in masks for pair in self._repeated[name]]
            ),
        )


@dataclass(slots=True)
class _Kind:
    """What is known of batches that differ in lengths, and in their number of samples, only.

    Args:
        about: what code was requested; held, as it is distinguished by identity.
        firsts: number of samples -> shapes of the first batch of so many.
        stages: captured with symbols, the newest first, each with the number of samples that it is for; None: for any.
        tried: the axes that were left open, and the example's shapes.
    """

    about: tuple[object, ...]
    firsts: dict[int, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    stages: list[tuple[int | None, StageAtLengths]] = field(default_factory=list)
    tried: set[tuple[Any, ...]] = field(default_factory=set)

    def begins(self, attempt: _Attempt) -> bool:
        """Return whether to make an attempt, which from now on has been made."""
        most = MAX_EXPORTS_AT_ANY_COUNT if attempt.num_samples is None else MAX_EXPORTS
        if attempt.key in self.tried or sum(count == attempt.num_samples for count, *_ in self.tried) >= most:
            return False
        self.tried.add(attempt.key)
        return True

    def keep(self, stage: StageAtLengths, count: int | None) -> None:
        """Let a stage be the first that is looked at, for so many samples; None: for any number."""
        self.stages.insert(0, (count, stage))
        del self.stages[MAX_STAGES:]


class _Wanted(NamedTuple):
    """What code is wanted for: arguments of so many samples, and their shapes."""

    arguments: Batch
    num_samples: int
    shapes: dict[str, tuple[int, ...]]


class _Attempt(NamedTuple):
    """A capture with symbols: for how many samples (None: any number), from which shapes, and which axes are open."""

    num_samples: int | None
    example: dict[str, tuple[int, ...]]
    lengths: Lengths

    @property
    def key(self) -> tuple[Any, ...]:
        """Return its number of samples, and what else distinguishes it."""
        return self.num_samples, tuple(sorted(self.lengths.items())), tuple(sorted(self.example.items()))


class CodeForLengths:
    """The code of one part for batches of many lengths.

    Args:
        model: what the part is called in a warning.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._kinds: OrderedDict[tuple[Any, ...], _Kind] = OrderedDict()
        self._has_warned = False

    def code(
        self,
        arguments: Batch,
        num_samples: int,
        about: tuple[object, ...],
        capture: Callable[[Batch, Lengths], StageAtLengths],
    ) -> StageCode | None:
        """Return code for these arguments of the part; None where they must be captured by themselves.

        Args:
            arguments: of ``num_samples`` samples.
            about: the objects that the code is of; those of one stage in one mode.
            capture: returns the stage, captured for arguments with some lengths open.
        """
        kind = self.learn(arguments, num_samples, about)
        wanted = _Wanted(arguments, num_samples, shapes_of(arguments))
        found = self._found(kind, wanted)
        if found is not None:
            return found
        if wanted.shapes == kind.firsts[num_samples] and len(kind.firsts) < MANY_COUNTS:
            return None
        return self._capture(kind, wanted, capture)

    def learn(self, arguments: Batch, num_samples: int, about: tuple[object, ...]) -> _Kind:
        """Return what is known of batches like these arguments; of the first, that these are captured as they are."""
        key = (*(id(part) for part in about), *kind_of(arguments))
        kind = self._kinds.get(key)
        if kind is None:
            while len(self._kinds) >= MAX_KINDS:
                self._kinds.popitem(last=False)
            kind = self._kinds[key] = _Kind(about)
        kind.firsts.setdefault(num_samples, shapes_of(arguments))
        self._kinds.move_to_end(key)
        return kind

    def _found(self, kind: _Kind, wanted: _Wanted) -> StageCode | None:
        for count, stage in kind.stages:
            if count not in (None, wanted.num_samples):
                continue
            found = stage.at(wanted.shapes, wanted.num_samples)
            if isinstance(found, StageCode):
                return found
        return None

    def _capture(
        self, kind: _Kind, wanted: _Wanted, capture: Callable[[Batch, Lengths], StageAtLengths]
    ) -> StageCode | None:
        """Capture with symbols what may be one, or at least what differs, and return code for the arguments."""
        reason = ""
        for attempt in _attempts(kind, wanted):
            if kind.begins(attempt):
                found = self._try(attempt, kind, wanted, capture)
                if isinstance(found, StageCode):
                    return found
                reason = found
        if wanted.shapes == kind.firsts[wanted.num_samples]:
            return None
        for _, stage in kind.stages[:1]:
            refused = stage.at(wanted.shapes, wanted.num_samples)
            reason = str(refused) if isinstance(refused, Mismatch) else reason
        self._warn(reason)
        return None

    def _try(
        self,
        attempt: _Attempt,
        kind: _Kind,
        wanted: _Wanted,
        capture: Callable[[Batch, Lengths], StageAtLengths],
    ) -> StageCode | str:
        """Capture, keep the stage, and return its code for the arguments; or say why there is none."""
        arguments, num_samples, shapes = wanted
        try:
            stage = capture(_resized(arguments, attempt.example), attempt.lengths)
        except Exception as error:
            # whatever torch raises on symbols: the shape is then captured by itself
            logger.debug("%s has no capture for many lengths", self._model, exc_info=True)
            if attempt.num_samples is None:
                # no more attempts for any number of samples: another batch will be refused as well
                kind.tried.update((None, place) for place in range(MAX_EXPORTS_AT_ANY_COUNT))
            return first_line(error)
        first = kind.firsts[num_samples]
        fixed = [
            f"{key}.shape[{axis}] is a number to the model"
            for key, shape in shapes.items()
            for axis, size in enumerate(shape)
            if size != first[key][axis] and not stage.is_open(key, axis) and not is_padded(key, arguments)
        ]
        found = stage.at(shapes, num_samples)
        # a number of images that is one to the model: this stage is for texts of any length beside so many
        if isinstance(found, Mismatch) or (fixed and not stage.has_open_axes):
            return fixed[0] if fixed else str(found)
        has_open_samples = all(stage.is_open(key, 0) for key, axes in attempt.lengths.items() if 0 in axes)
        kind.keep(stage, attempt.num_samples if has_open_samples else num_samples)
        # an export leaves dead objects and a larger heap behind: collected now, in a step that takes seconds anyway,
        # and not in one of a length that costs a millisecond
        gc.collect()
        return found

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s is captured again for each new shape of a batch, which takes seconds: no one capture holds for all "
                "lengths%s; pad sequences to a few lengths (buckets)",
                self._model,
                f" ({reason})" if reason else "",
            )


def kind_of(arguments: Batch) -> tuple[Any, ...]:
    """Return what is alike in all batches of one kind: all but sizes. What Python reads decides about code, too."""
    readings = (arguments.num_samples, arguments.readings) if isinstance(arguments, WholeUnit) else None
    return (
        readings,
        *(
            (key, value.dtype, value.ndim) if isinstance(value, Tensor) else (key, repr(value))
            for key, value in sorted(arguments.items())
        ),
    )


def shapes_of(arguments: Batch) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what is a tensor."""
    return {key: tuple(value.shape) for key, value in arguments.items() if isinstance(value, Tensor)}


def differing_axes(first: Shapes, new: Shapes) -> dict[str, tuple[int, ...]]:
    """Return the axes along which batches of one kind differ, by key."""
    return {
        key: tuple(axis for axis in range(len(shape)) if shape[axis] != first[key][axis])
        for key, shape in new.items()
    }


def _attempts(kind: _Kind, wanted: _Wanted) -> Iterator[_Attempt]:
    """Yield from which shapes, and with which axes open, to capture: the likeliest first.

    First for any number of samples, from the batch at hand: sizes that its Python reads are answered as this batch
    needs it. Not so for one sample, as torch specialises sizes of one.

    Token ids, masks and labels are of many lengths even where only some of them have changed so far: all axes behind
    the samples are left open in whole numbers, and elsewhere those that differ, which may be the first, where samples
    have different numbers of images. Sizes of the larger batch are the better example: torch
    specialises sizes of one.
    """
    arguments, num_samples, new = wanted
    others = [first for n, first in kind.firsts.items() if n not in (1, num_samples)]
    if num_samples > 1 and others and not isinstance(arguments, WholeUnit):
        lengths = _with_all_lengths(_unpadded_differing(others[0], new, arguments), new, arguments)
        for example in (new, others[0]):
            yield _Attempt(None, example, _open(lengths, example))
    first = kind.firsts[num_samples]
    if new == first:
        return
    differing = _unpadded_differing(first, new, arguments)
    # sizes of images are among a whole unit's numbers, and a model whose Python reads these may not leave them open
    whole = None if isinstance(arguments, WholeUnit) else _with_all_lengths(differing, new, arguments)
    for example in sorted((new, first), key=lambda at: sum(map(math.prod, at.values())), reverse=True):
        for axes in (whole, differing):
            if axes is not None:
                yield _Attempt(num_samples, example, _open(axes, example))


def _unpadded_differing(first: Shapes, new: Shapes, arguments: Batch) -> Lengths:
    # Lists of dicts are read by code that runs eagerly, without symbols: they keep the sizes they are padded to.
    return {k: axes for k, axes in differing_axes(first, new).items() if not is_padded(k, arguments)}


def _with_all_lengths(differing: Lengths, new: Shapes, arguments: Batch) -> Lengths:
    """Return the axes that differ, and of whole numbers all that are behind the samples."""
    return {
        key: axes if arguments[key].is_floating_point() else tuple(sorted({*axes, *range(1, len(new[key]))}))
        for key, axes in differing.items()
    }


def _open(lengths: Lengths, example: Mapping[str, tuple[int, ...]]) -> Lengths:
    opened = {key: tuple(a for a in axes if example[key][a] > 1) for key, axes in lengths.items()}
    return {key: axes for key, axes in opened.items() if axes}


def _resized(arguments: Batch, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return arguments of these shapes to trace with.

    What tensors of other shapes hold is not looked at; what those of the same hold is where a loss is tried (boxes).
    """
    resized: dict[str, Any] = {
        key: torch.empty(shapes[key], dtype=value.dtype, device="meta").requires_grad_(value.requires_grad)
        if isinstance(value, Tensor) and tuple(value.shape) != shapes[key]
        else value
        for key, value in arguments.items()
    }
    if isinstance(arguments, WholeUnit):
        return WholeUnit(resized, num_samples=arguments.num_samples, readings=arguments.readings)
    return resized
