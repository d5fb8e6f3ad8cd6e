"""The tensors of a checkpoint by name, whatever plan wrote them: whole, or some elements of them.

Of each tensor requested, only the parts that overlap are read. Example: ``exp_avg`` of a parameter of 10 elements,
saved on 2 ranks under ZeRO, requested by the second of 3 ranks:

    saved     [0 1 2 3 4][5 6 7 8 9]
    requested         [4  5  6]            element 4 of the first file, 0 and 1 of the second

Tensor ranks hold shards. Where the tensor size is another one, the shards are joined to the whole, one parameter at a
time, and cut anew (`join_shards`, `cut_shard`).

Source: this project
Tests: tests/checkpoints/test_saved_tensors.py, tests/integrations/test_resharding.py
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpp_plugin.engine.checkpoints.checkpoint_directory import check_inside
from gpp_plugin.engine.checkpoints.checkpoint_files import (
    BUFFER,
    MANIFEST,
    MASTER,
    MOMENTS,
    STATE,
    STATE_TENSOR,
    STATE_TENSORS,
    WEIGHT,
    BrokenFile,
    CheckpointManifest,
    TensorFile,
    TensorRecord,
    check_tensors,
    from_json,
    parsing,
    read_text,
)
from gpp_plugin.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """The reader of a tensor: how its stage holds it.

    Args:
        stage: its number in the plan.
        shape: as it is held.
        shard: tensor position and tensor size, where each tensor rank holds a shard of its own; None: all the same.
        axis, stride: how shards make the whole.
    """

    stage: int
    shape: tuple[int, ...]
    shard: tuple[int, int] | None = None
    axis: int = 0
    stride: int = 1


class _Entry(NamedTuple):
    file: str
    key: str
    tensor: TensorRecord


class CheckpointTensors:
    """Reads a checkpoint's tensors by name.

    Args:
        target: the checkpoint's directory.
    """

    def __init__(self, target: Path, manifest: CheckpointManifest) -> None:
        self.target = target
        self.manifest = manifest
        self._files: dict[str, TensorFile] = {}
        self._index: dict[tuple[str, str], list[_Entry]] = {}
        self._kinds: dict[str, list[str]] = {}
        for name, file in manifest.files.items():
            if name.startswith("rank-"):
                continue  # of one rank: requested by that rank, by file
            for key, tensor in file.tensors.items():
                self._index.setdefault((tensor.what, tensor.name), []).append(_Entry(name, key, tensor))
        for (what, name), entries in self._index.items():
            _check_parts(entries)
            if what not in (WEIGHT, BUFFER, STATE_TENSOR, MASTER):
                self._kinds.setdefault(name, []).append(what)

    # ---- what there is -----------------------------------------------------------------------------------

    def names(self, what: str) -> set[str]:
        """Return the names of all tensors of a kind."""
        return {name for kind, name in self._index if kind == what}

    def kind_of(self, name: str) -> str:
        """Return whether a tensor of the model is a weight or a buffer; what one process wrote says weight of all."""
        return BUFFER if (BUFFER, name) in self._index else WEIGHT

    def tensor_kinds(self, name: str) -> list[str]:
        """Return what the optimizer keeps of a parameter in tensors."""
        return self._kinds.get(name, [])

    def has(self, what: str, name: str) -> bool:
        """Return whether there is such a tensor."""
        return (what, name) in self._index

    def shape(self, what: str, name: str) -> tuple[int, ...]:
        """Return the shape of the whole, all shards joined."""
        return _whole_shape(self._index[what, name][0].tensor)

    def check_everything(self) -> None:
        """Check every tensor and every text of the checkpoint.

        Raises:
            BrokenFile: something is missing or is not what was written.
        """
        files = self.manifest.files
        self.check(((name, key) for name, file in files.items() for key in file.tensors), files=files)
        for name, expected in self.manifest.texts.items():
            read_text(self.target, name, expected=expected)

    def is_whole(self, what: str, name: str) -> bool:
        """Return whether it has a shape of its own, and cannot be cut."""
        return self._index[what, name][0].tensor.start is None

    def check_fits(
        self, what: str, name: str, place: TensorPlace, *, dtype: torch.dtype | None = None
    ) -> None:
        """Refuse a tensor that is of another shape here, or not of numbers as this one.

        Args:
            dtype: as it is held; another precision fits.

        Raises:
            CheckpointError: names both shapes.
        """
        entry = self._entries(what, name, place)[0].tensor
        whole = list(_whole_shape(entry))
        if place.shard is not None and len(whole) == len(place.shape) > 0:
            axis = place.axis if entry.shard is None else entry.axis
            whole[axis] //= place.shard[1]
        if tuple(whole) != place.shape:
            raise CheckpointError(
                f"{name!r} is of shape {_whole_shape(entry)} in {self.target}, and a rank of this run holds "
                f"{place.shape} of it; is it a checkpoint of this model?"
            )
        saved: torch.dtype = getattr(torch, entry.dtype)
        if dtype is not None and dtype.is_floating_point != saved.is_floating_point:
            raise CheckpointError(
                f"{name!r} is of {saved} in {self.target}, and of {dtype} here; is it a checkpoint of this model?"
            )

    # ---- checking ----------------------------------------------------------------------------------------

    def needed(
        self, what: str, name: str, place: TensorPlace, start: int = 0, count: int | None = None
    ) -> set[tuple[str, str]]:
        """Return the file and key of each tensor that `elements` would read.

        Raises:
            BrokenFile: some elements are in no file.
        """
        wanted = math.prod(place.shape) if count is None else count
        entries = self._entries(what, name, place)
        if self.is_whole(what, name):
            return {(entry.file, entry.key) for entry in entries}
        if self._is_recut(entries, place):
            for _, own in _by_shard(entries):
                _spans(own, 0, math.prod(own[0].tensor.shape) if own else 1)
            return {(entry.file, entry.key) for entry in entries}
        return {(entry.file, entry.key) for entry, _, _ in _spans(entries, start, wanted)}

    def check(self, wanted: Iterable[tuple[str, str]], files: Iterable[str] = ()) -> None:
        """Read files and compare checksums.

        Args:
            wanted: file and key of each tensor.
            files: those of which at least the header is read.

        Raises:
            BrokenFile: something is missing or is not what was written.
        """
        by_file: dict[str, set[str]] = {name: set() for name in files}
        for file, key in wanted:
            by_file.setdefault(file, set()).add(key)
        for file, keys in sorted(by_file.items()):
            check_inside(self.target, self.target / file)
            if file not in self.manifest.files:
                raise BrokenFile(f"the manifest has no {file}")
            said = self.manifest.files[file]
            said.check_header(file, check_tensors(self.target / file, said.sums, keys))
            self.file(file)

    # ---- reading -----------------------------------------------------------------------------------------

    def file(self, name: str) -> TensorFile:
        """Return a file of the checkpoint, open."""
        if name not in self._files:
            self._files[name] = TensorFile(check_inside(self.target, self.target / name))
        return self._files[name]

    def elements(self, what: str, name: str, place: TensorPlace, start: int, count: int) -> Tensor:
        """Return elements of a tensor as ``place`` holds it, flattened.

        Raises:
            BrokenFile: some of them are in no file.
        """
        entries = self._entries(what, name, place)
        if self._is_recut(entries, place):
            return self._recut(entries, place).reshape(-1)[start : start + count]
        return self._read(entries, start, count)

    def whole(self, what: str, name: str, place: TensorPlace) -> Tensor:
        """Return a tensor as ``place`` holds it, or in the shape of its own."""
        entries = self._entries(what, name, place)
        if self.is_whole(what, name):
            return self.file(entries[0].file).whole(entries[0].key)
        return self.elements(what, name, place, 0, math.prod(place.shape)).reshape(place.shape)

    def state(self, plain: Any, file: str) -> Any:
        """Return a state whose tensors are in ``file``.

        Raises:
            BrokenFile: it is not as checkpoints write it.
        """
        with parsing(file):
            return from_json(plain, tensor=lambda name: self.file(file).whole(name))

    def shared_state(self, plain: Any, *, of: str = STATE) -> Any:
        """Return a state whose tensors are in the file that all ranks share.

        Args:
            of: the file that it stands in.
        """
        with parsing(of):
            return from_json(plain, tensor=lambda name: self.file(STATE_TENSORS).whole(name))

    def _entries(self, what: str, name: str, place: TensorPlace) -> list[_Entry]:
        """Return the parts of a tensor: where several stages wrote it (frozen weights, buffers), one stage's."""
        found = self._index.get((what, name))
        if not found:
            raise CheckpointError(f"{self.target} has no {what} of {name!r}")
        stages = {entry.tensor.stage for entry in found}
        stage = place.stage if place.stage in stages else min(stages)
        found = [entry for entry in found if entry.tensor.stage == stage]
        saved = found[0].tensor.shard
        if saved is None or (place.shard is not None and place.shard[1] != saved[1]) or place.shard is None:
            return found
        own = [entry for entry in found if entry.tensor.shard == place.shard]
        if not own:
            raise BrokenFile(f"{MANIFEST}: of {what} of {name!r} no file has shard {place.shard}")
        return own

    @staticmethod
    def _is_recut(entries: Sequence[_Entry], place: TensorPlace) -> bool:
        saved = entries[0].tensor.shard
        return (saved and saved[1]) != (place.shard and place.shard[1])

    def _recut(self, entries: Sequence[_Entry], place: TensorPlace) -> Tensor:
        """Join the shards of another tensor size, and return this rank's of the whole."""
        saved = entries[0].tensor
        shards = [
            self._read(own, 0, math.prod(saved.shape)).reshape(saved.shape) for _, own in _by_shard(entries)
        ]
        axis, stride = (place.axis, place.stride) if saved.shard is None else (saved.axis, saved.stride)
        whole = join_shards(shards, axis=axis, stride=stride)
        if place.shard is None:
            return whole
        return cut_shard(whole, place.shard[0], place.shard[1], axis=axis, stride=stride)

    def _read(self, entries: Sequence[_Entry], start: int, count: int) -> Tensor:
        parts = [
            self.file(entry.file).elements(entry.key, offset, size)
            for entry, offset, size in _spans(entries, start, count)
        ]
        if not parts:
            return torch.zeros(0)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _check_parts(entries: Sequence[_Entry]) -> None:
    """Refuse parts of a tensor that are of different tensors: of each stage they have one shape, type and cut."""
    first: dict[int, tuple[Any, ...]] = {}
    for entry in entries:
        it = entry.tensor
        shape = None if it.start is None else it.shape
        facts = (shape, it.dtype, it.shard and it.shard[1], it.axis, it.stride)
        if first.setdefault(it.stage, facts) != facts:
            raise BrokenFile(f"{MANIFEST}: parts of {it.what} of {it.name!r} differ in shape, type or cut")


def _by_shard(entries: Sequence[_Entry]) -> list[tuple[int, list[_Entry]]]:
    """Return the parts of each tensor position's shard."""
    saved = entries[0].tensor.shard
    size = 1 if saved is None else saved[1]
    if size > len(entries):
        raise BrokenFile(
            f"{MANIFEST}: of {entries[0].tensor.name!r} there are {len(entries)} of {size} shards"
        )
    return [(at, [each for each in entries if each.tensor.shard in (None, (at, size))]) for at in range(size)]


def _spans(entries: Sequence[_Entry], start: int, count: int) -> list[tuple[_Entry, int, int]]:
    """Return which elements of which parts are the requested ones, in order: the part, its first one, how many.

    Raises:
        BrokenFile: some of them are in no file, or in two.
    """
    found = []
    for entry in entries:
        span = _overlap(entry.tensor, start, count)
        if span is not None:
            found.append((span[0], span[1], entry))
    found.sort(key=lambda each: each[0])
    ends = [start, *(first + size for first, size, _ in found)]
    begins = [*(first for first, _, _ in found), start + count]
    for end, begin in zip(ends, begins, strict=True):
        if end != begin:
            said = f"{entries[0].tensor.what} of {entries[0].tensor.name!r}: " if entries else ""
            are = f"{end} to {begin} are in no file" if end < begin else f"{begin} to {end} are in two files"
            raise BrokenFile(f"{MANIFEST}: {said}elements {are}")
    return [(entry, first - (entry.tensor.start or 0), size) for first, size, entry in found]


def _overlap(tensor: TensorRecord, start: int, count: int) -> tuple[int, int] | None:
    """Return the first requested element that is in ``tensor``, and how many are."""
    begin = tensor.start or 0
    first, last = max(begin, start), min(begin + tensor.count, start + count)
    return (first, last - first) if first < last else None


def _whole_shape(entry: TensorRecord) -> tuple[int, ...]:
    if entry.shard is None or not entry.shape:
        return entry.shape
    shape = list(entry.shape)
    shape[entry.axis] *= entry.shard[1]
    return tuple(shape)


def cut_shard(whole: Tensor, rank: int, size: int, *, axis: int, stride: int) -> Tensor:
    """Return the part of ``whole`` that tensor rank ``rank`` of ``size`` holds (Megatron-LM, arXiv 1909.08053)."""
    # Gate and up projection in one tensor, 4 rows each, stride 2, on 2 ranks: 4 pieces.
    #
    #   whole   g0 g1 | g2 g3 | u0 u1 | u2 u3        rank 0: g0 g1 u0 u1     rank 1: g2 g3 u2 u3
    #
    # Each rank has a gate and the up projection that belongs to it, so the MLP's product needs no message.
    pieces = whole.chunk(size * stride, dim=axis)
    return torch.cat(pieces[rank::size], dim=axis)


def join_shards(shards: Sequence[Tensor], *, axis: int, stride: int) -> Tensor:
    """Return the whole of the shards of all ranks, in order; the reverse of `cut_shard`."""
    # By piece first, then by rank: (g0 g1)(g2 g3), then (u0 u1)(u2 u3).
    cut = [shard.chunk(stride, dim=axis) for shard in shards]
    return torch.cat([pieces[i] for i in range(stride) for pieces in cut], dim=axis)


class StageOptimizerState:
    """A checkpoint's optimizer state as one stage requests it.

    Args:
        places: how the stage holds its trained parameters.
    """

    def __init__(self, saved: CheckpointTensors, places: Mapping[str, TensorPlace]) -> None:
        self._saved = saved
        self._places = places
        self._options = {name: group.options for group in saved.manifest.groups for name in group.names}

    def kind(self) -> str:
        """Return the class of the optimizer that was saved."""
        return self._saved.manifest.optimizer

    def tensor_kinds(self, name: str) -> Collection[str]:
        """Return which tensors were saved of a parameter's state."""
        return self._saved.tensor_kinds(name)

    def is_whole(self, name: str, what: str) -> bool:
        """Return whether it has a shape of its own."""
        return self._saved.is_whole(what, name)

    def read(self, name: str, what: str, start: int, count: int) -> Tensor:
        """Return elements of it; of ``master``, the weights where no masters were saved."""
        kind = WEIGHT if what == MASTER and not self._saved.has(MASTER, name) else what
        return self._saved.elements(kind, name, self._places[name], start, count)

    def read_whole(self, name: str, what: str) -> Tensor:
        """Return what has a shape of its own."""
        return self._saved.whole(what, name, self._places[name])

    def numbers(self, name: str) -> Mapping[str, Any]:
        """Return which numbers were saved of a parameter's state."""
        found: Mapping[str, Any] = self._saved.shared_state(
            self._saved.manifest.numbers.get(name, {}), of=MANIFEST
        )
        return found

    def options(self, name: str) -> Mapping[str, Any]:
        """Return the options of the parameter group that ``name`` was in."""
        options: Mapping[str, Any] = self._saved.shared_state(self._options.get(name, {}), of=MANIFEST)
        return options

    def needed(self, name: str, spans: Iterable[tuple[int, int]]) -> set[tuple[str, str]]:
        """Return file and key of each tensor that restoring these elements of a parameter reads.

        Raises:
            CheckpointError: the parameter was not trained.
        """
        saved, place = self._saved, self._places[name]
        if name not in saved.manifest.numbers:
            raise CheckpointError(
                f"{name!r} is trained here, and was not in {saved.target}; load without the optimizer "
                "(load_optimizer_states=False), or freeze it"
            )
        first = MASTER if saved.has(MASTER, name) else WEIGHT
        found: set[tuple[str, str]] = set()
        for start, count in spans:
            for what in (first, *saved.tensor_kinds(name)):
                if saved.is_whole(what, name):
                    found |= saved.needed(what, name, place)
                else:
                    saved.check_fits(
                        what, name, place, dtype=torch.float32 if what in (first, *MOMENTS) else None
                    )
                    found |= saved.needed(what, name, place, start, count)
        return found
