"""Which blocks save which storages for backward, each counted once; their bytes as a function of samples.

Source: this project
Tests: tests/profile/test_measure.py
"""

from __future__ import annotations

from collections.abc import Sequence

from gpp_plugin.ir.profile import SharedStorage
from gpp_plugin.profile.timing import Measurement
from gpp_plugin.runtime.stage_module import StageFunction

_BATCH, _PARAMETER = "batch ", "parameter "


class HeldStorages:
    """Which blocks save which storages for backward; a storage is known by the first tensor that lies in it.

    Args:
        saved_by: the blocks that save each storage, by its root.
        size_of: bytes of each result by itself, which is all of its storage that travels to another stage.
        maker_of: the block that makes each result.
    """

    def __init__(self) -> None:
        # ``_root``: result -> the first tensor in its storage. In h = linear(x); v = h.view(..); w = v[:, 0], the
        # root of all of h, v and w is h; a block that saves w saves h's storage. Roots "batch ..." and "parameter
        # ..." are storages of model inputs and parameters, which are there anyway.
        self._root: dict[str, str] = {}
        self._saved_as: dict[str, set[str | None]] = {}
        self.saved_by: dict[str, list[str]] = {}
        self.bytes_of: dict[str, int] = {}
        self.size_of: dict[str, int] = {}
        self.maker_of: dict[str, str] = {}

    def add(self, block: str, function: StageFunction, measured: Measurement) -> int:
        """Return the bytes ``block`` saves that no earlier one does."""
        # First what was received: its storage may have been counted with an earlier block. Then what was made here:
        # counted in ``saved_inside`` already, it is only noted, for later blocks that save it too.
        total = measured.saved_inside
        roots = [self._root.get(name, name) for name in function.received]
        for name, root, num_bytes in zip(function.received, roots, measured.saved_received, strict=True):
            if num_bytes and not root.startswith((_BATCH, _PARAMETER)):
                saved_as = name if roots.count(root) == 1 else None
                total += num_bytes if self._note(root, block, num_bytes, saved_as) else 0
        for name, tensor, origin, is_saved in zip(
            function.outputs, measured.outputs, measured.output_origin, measured.is_output_saved, strict=True
        ):
            source = name if origin is None else _operands(function)[origin[0]][origin[1]]
            root = self._root[name] = self._root.get(source, source)
            self.size_of[name], self.maker_of[name] = tensor.nbytes, block
            if is_saved:
                self._note(root, block, tensor.untyped_storage().nbytes())
        return total

    def received_as(self, root: str) -> str | None:
        """Return the one result, a part of the storage, through which all blocks save it; None if there is none."""
        # A storage hidden [8, 50, 32] of which a head saves hidden[:, 0], 1/50 of it: on the stage that makes hidden
        # the head saves all 50, on another stage it receives, and saves, the one row. That holds only if all blocks
        # that save it have it through that one view, and none of them makes the view itself.
        names = self._saved_as[root]
        name = next(iter(names))
        if len(names) > 1 or name is None or name not in self.maker_of:
            return None
        is_made_again = self.maker_of[name] in self.saved_by[root]  # a mask, say: every stage has its own
        return None if is_made_again or self.size_of[name] == self.bytes_of[root] else name

    def _note(self, root: str, block: str, num_bytes: int, saved_as: str | None = None) -> bool:
        """Note that a block saves a storage, and return whether it is the first.

        Args:
            saved_as: the one result in it that the block receives; None where it has the storage otherwise.
        """
        is_first = root not in self.saved_by
        blocks = self.saved_by.setdefault(root, [])
        self._saved_as.setdefault(root, set()).add(saved_as)
        self.bytes_of.setdefault(root, num_bytes)
        if block not in blocks:
            blocks.append(block)
        return is_first


def _operands(function: StageFunction) -> dict[str, tuple[str, ...]]:
    """Return the names of a function's operands and results by kind (`Origin`)."""
    return {
        "received": function.received,
        "input": tuple(f"{_BATCH}{key}" for key in function.batch_inputs),
        "parameter": tuple(f"{_PARAMETER}{key}" for key in function.tensors),
        "output": function.outputs,
    }


def fit_bytes(counts: Sequence[int], num_bytes: Sequence[int], unit: int) -> tuple[float, float]:
    """Return bytes a sample, and bytes whatever their number, that are exact at ``unit`` samples.

    The slope is that between the smallest and the largest count; what grows faster than the samples (a block that
    mixes them keeps their square) counts as proportional.

    Args:
        unit: samples of one loss: what stages compute at a time, unless configured otherwise.
    """
    # counts (1, 8, 64), bytes (100, 800, 6400): slope 100, nothing fixed. (110, 810, 6410) at unit 8: slope 100,
    # fixed 10. (1, 64, 4096) of a matrix of all pairs at unit 8: the slope, 65, would give 520 at 8 samples where 64
    # are saved and a negative rest; so 64 / 8 = 8 a sample, exact where stages compute, and low beyond.
    known = dict(zip(counts, num_bytes, strict=True))
    unit = unit if unit in known else counts[-1]
    slope = (num_bytes[-1] - num_bytes[0]) / max(counts[-1] - counts[0], 1)
    if len(counts) == 1 or slope < 0 or slope * unit > known[unit]:
        return known[unit] / unit, 0.0
    return slope, known[unit] - slope * unit


def shared_storages(
    counts: Sequence[int], held: Sequence[HeldStorages], unit: int
) -> tuple[SharedStorage, ...]:
    """Return the storages that several blocks save, and those of which another stage would get a part only.

    A view that is sent (`hidden[:, 0]`) arrives in a separate storage: a stage that saves it and does not have
    the block that made it holds less than the whole by what is returned for it, as negative bytes.
    """
    shared = []
    for root, savers in held[-1].saved_by.items():
        if len(savers) > 1:
            per_sample, fixed = fit_bytes(counts, [at_n.bytes_of.get(root, 0) for at_n in held], unit)
            shared.append(SharedStorage(blocks=tuple(savers), bytes_per_sample=per_sample, bytes_fixed=fixed))
        view = held[-1].received_as(root)
        if view is not None:
            less = [at_n.bytes_of.get(root, 0) - at_n.size_of.get(view, 0) for at_n in held]
            per_sample, fixed = fit_bytes(counts, less, unit)
            blocks = (held[-1].maker_of[view], *savers)
            shared.append(SharedStorage(blocks=blocks, bytes_per_sample=-per_sample, bytes_fixed=-fixed))
    return tuple(shared)
