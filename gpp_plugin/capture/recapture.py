"""Capture an analysed model again: at other shapes, for many lengths, or only what its Python reads of a batch.

Names tie the two captures: operators are aligned one by one with those that were analysed, on this rank or another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import _disable_current_modes

from gpp_plugin.capture.captured_graph import CapturedGraph, LengthCapture
from gpp_plugin.capture.coarsen import coarsen
from gpp_plugin.capture.eager.keep_whole import WholeCalls
from gpp_plugin.capture.eager.opaque_call import OpaqueCall
from gpp_plugin.capture.export import analysed, assemble, carried_over, masks_of, notes_of
from gpp_plugin.capture.tracing.carried_state import LeavesState, refused
from gpp_plugin.capture.tracing.clean import copied
from gpp_plugin.capture.tracing.meta_copy import MetaCopy, make_meta_copy
from gpp_plugin.capture.tracing.outside import noted_reads
from gpp_plugin.capture.tracing.symbolic_sizes import (
    SizeTexts,
    is_open,
    sizes_in,
    tensors_in,
    with_sizes,
)
from gpp_plugin.capture.tracing.torch_export import Call, call_by_key, run_reading
from gpp_plugin.capture.tracing.traced import Exported, Traced, align, trace
from gpp_plugin.capture.tracing.values import Recording
from gpp_plugin.errors import CaptureError
from gpp_plugin.ir.analysis import Analysis
from gpp_plugin.ir.block_graph import BlockGraph, OpGraph
from gpp_plugin.ir.size_formulas import Mismatch

# Two captures of one model whose operators differ, but not its blocks: one gets the other's names on their borders.
#
# Where Python reads values, another batch may have another graph: three images instead of two in a loop, more windows
# of attention, no multiplication by a mask that hides nothing. A plan has of a model its blocks and the tensors
# between them. Where these are the same, the new graph runs under the old plan, its schedules and programs:
#
#     planned   visual.1 -(add_7)-> language.0 -(add_12)-> language.1
#     now       visual.1 -(add_9)-> language.0 -(add_14)-> language.1        add_9 is called add_7, add_14 is add_12
#
# Every rank makes the same names of the same two graphs, and both ends of an edge find a tensor by its name, so it
# does not matter which of several like tensors of one edge gets which name.

_Kind = tuple[str, tuple[str, ...], str, bool]


def border_names(
    planned: BlockGraph, now: BlockGraph, results: OpGraph, results_now: OpGraph
) -> dict[str, str]:
    """Return operator of the new graph -> what the plan calls its result.

    Args:
        results, results_now: whose losses and named outputs are known by name, too.

    Raises:
        CaptureError: blocks, their parameters, or the tensors between them differ; says which.
    """
    _check_blocks(planned, now)
    old, new = _by_kind(planned), _by_kind(now)
    for kind in old.keys() | new.keys():
        if len(old.get(kind, ())) != len(new.get(kind, ())):
            src, readers, dtype, _ = kind
            raise CaptureError(
                f"{len(new.get(kind, ()))} tensors of {dtype} go from {src} to {', '.join(readers)}, and "
                f"{len(old.get(kind, ()))} in the plan"
            )
    names = {a: b for kind, found in new.items() for a, b in zip(found, old[kind], strict=True)}
    pairs = [(results_now.loss, results.loss)]
    pairs += [(results_now.outputs.get(key), node) for key, node in results.outputs.items()]
    for mine, wanted in pairs:
        if mine is not None and wanted is not None and names.setdefault(mine, wanted) != wanted:
            raise CaptureError(f"result {wanted} is another tensor")
    return names


def with_names(traced: Traced, names: Mapping[str, str]) -> Traced:
    """Return the graph with some operators renamed; others make way."""
    taken = set(names.values())
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in traced.graph.nodes:
        name = names.get(node.name) or (f"{node.name}_now" if node.name in taken else node.name)
        args: Any = fx.map_arg(node.args, lambda n: mapping[n])
        kwargs: Any = fx.map_arg(node.kwargs, lambda n: mapping[n])
        mapping[node] = copied = graph.create_node(node.op, node.target, args, kwargs, name=name)
        copied.meta = dict(node.meta)
    return dataclasses.replace(traced, graph=graph)


def _check_blocks(planned: BlockGraph, now: BlockGraph) -> None:
    old = {block.name: frozenset(block.parameters) for block in planned.blocks}
    new = {block.name: frozenset(block.parameters) for block in now.blocks}
    odd = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    if odd:
        changes = {(True, True): "has other parameters", (False, True): "is new", (True, False): "is gone"}
        raise CaptureError(f"block {odd[0]} {changes[odd[0] in old, odd[0] in new]}")


def _by_kind(graph: BlockGraph) -> dict[_Kind, list[str]]:
    """Return (block, its readers, type, takes a gradient) -> such tensors, in the order in which they are made."""
    readers: dict[str, list[str]] = {}
    made_by: dict[str, str] = {}
    for edge in graph.edges:
        for name in edge.tensors:
            readers.setdefault(name, []).append(edge.dst)
            made_by[name] = edge.src
    found: dict[_Kind, list[str]] = {}
    for name, spec in graph.tensors.items():
        if name in made_by:
            kind = made_by[name], tuple(sorted(readers[name])), spec.dtype, spec.requires_grad
            found.setdefault(kind, []).append(name)
    return found


@_disable_current_modes()
def recapture(
    model: nn.Module,
    analysis: Analysis,
    batch: Mapping[str, Any],
    *,
    device: torch.device | str | None = None,
    call: Call = call_by_key,
    granularity: str = "layer",
    exported: Exported | None = None,
) -> CapturedGraph:
    """Capture the same model at another number of samples or other lengths.

    One export, where it was not made before. Layouts, couplings and what is replicated carry over by name, so that
    `coarsen` gives the same blocks. Of a model that takes whole units the operators may differ, too, where its blocks
    are the same.

    Args:
        analysis: of the first capture, on this rank or another.
        granularity: of those blocks.
        device: the device the graph will run on, of the type that was analysed; the CPU by default.
        call: as for `capture_model`.
        exported: of the first capture's `trials`, of a batch of these shapes.

    Raises:
        CaptureError: the graph has another structure at these shapes; the message says where.
        ValueError: ``device`` is of another type.
    """
    if exported is None:
        meta_copy, traced = _trace_again(model, analysis, batch, device=device, call=call)
    else:
        meta_copy, traced = exported.meta_copy, exported.traced
    try:
        traced = _aligned(analysis, traced)
    except CaptureError:
        if analysis.takes_whole_units:
            return _with_same_blocks(analysis, traced, meta_copy, granularity)
        raise
    return _as_analysed(analysis, traced, meta_copy)


@_disable_current_modes()
def recapture_for_lengths(
    model: nn.Module,
    analysis: Analysis,
    batch: Mapping[str, Any],
    lengths: Mapping[str, Collection[int]],
    *,
    device: torch.device | str | None = None,
    call: Call = call_by_key,
) -> LengthCapture:
    """Capture the same model at another number of samples for batches of many lengths.

    One export, with symbols for the sizes of some axes. Operators, names and what is known of them are as analysed.

    Args:
        lengths: batch key -> its axes of many lengths.
        analysis, device, call: as for `recapture`.

    Raises:
        CaptureError: as `recapture`; or a length has no symbol.
        ValueError: as `recapture`.
    """
    meta_copy, traced = _trace_again(model, analysis, batch, device=device, call=call, lengths=lengths)
    traced = _aligned(analysis, traced)
    return LengthCapture(
        captured=assemble(traced, analysis.op_graph, meta_copy, analysis, {}),
        num_samples=traced.num_samples,
        masks=masks_of(traced, meta_copy),
    )


class CaptureAtLengths:
    """One export of an analysed model with symbols for lengths, as the capture of a batch of any of them.

    What costs are derived from: operators with plain sizes and what they keep, where `LengthCapture` has code that
    takes sizes. Nothing is exported again.

    Args:
        model, analysis, batch, lengths, device, call: as of `recapture_for_lengths`.

    Raises:
        CaptureError: as `recapture_for_lengths`; or a body of operators inside an operator may have sizes of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        analysis: Analysis,
        batch: Mapping[str, Any],
        lengths: Mapping[str, Collection[int]],
        *,
        device: torch.device | str | None = None,
        call: Call = call_by_key,
    ) -> None:
        self._analysis = analysis
        self._meta_copy, traced = _trace_again(
            model, analysis, batch, device=device, call=call, lengths=lengths
        )
        self._traced = _aligned(analysis, traced)
        if self._traced.attributes or any(isinstance(n.target, OpaqueCall) for n in self._traced.operators):
            raise CaptureError("operators with bodies of their own have no sizes that are known outside")
        graph, inputs = self._traced.graph, self._traced.inputs
        self._texts = SizeTexts({inputs[n.name]: n.meta["val"] for n in graph.nodes if n.name in inputs})
        found: list[Any] = []
        for node in graph.nodes:
            made = (size for value in tensors_in(node.meta.get("val")) for size in value.shape)
            found += [*sizes_in(node), *filter(is_open, made)]
        self._keys = list(dict.fromkeys(self._texts.key(size) for size in found))
        by_key = {self._texts.key(size): size for size in found}
        self._evaluate = self._texts.compile([by_key[key] for key in self._keys])
        self.conditions = self._texts.conditions()

    def at(self, batch: Mapping[str, Any]) -> CapturedGraph:
        """Return the capture for a batch of these shapes.

        Raises:
            CaptureError: it does not hold for them.
        """
        shapes = {key: tuple(v.shape) for key, v in batch.items() if isinstance(v, torch.Tensor)}
        symbols = self.conditions.solver()(shapes)
        if isinstance(symbols, Mismatch):
            raise CaptureError(str(symbols))
        values = dict(zip(self._keys, self._evaluate(*symbols), strict=True))

        def plain(size: Any) -> Any:
            return values[self._texts.key(size)] if is_open(size) else size

        def sized(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not any(is_open(size) for size in value.shape):
                return value
            with self._meta_copy.mode:
                made = torch.empty([plain(s) for s in value.shape], dtype=value.dtype, device=value.device)
                return made.requires_grad_(value.requires_grad)

        graph = copied(self._traced.graph.nodes)
        for copy in graph.nodes:
            copy.args, copy.kwargs = with_sizes(copy.args, plain), with_sizes(copy.kwargs, plain)
            if "val" in copy.meta:
                copy.meta["val"] = torch.utils._pytree.tree_map(sized, copy.meta["val"])
        fakes = {name: sized(fake) for name, fake in self._traced.fakes.items()}
        traced = dataclasses.replace(self._traced, graph=graph, fakes=fakes)
        return _as_analysed(self._analysis, traced, self._meta_copy)


def attributes_read(
    model: nn.Module,
    analysis: Analysis,
    batch: Mapping[str, Any],
    *,
    device: torch.device | str | None = None,
    call: Call = call_by_key,
) -> tuple[str, frozenset[tuple[str, str]]]:
    """Trace an analysed model as it is now.

    Returns:
        All that two traces of it can differ in, and the attributes that its Python read, by path of the module.

    Raises:
        CaptureError: it cannot be traced.
    """
    reads: set[tuple[int, str]] = set()
    with noted_reads(lambda owner, name: reads.add((owner, name))):
        meta_copy, traced = _trace_again(model, analysis, batch, device=device, call=call)
    # by their attributes: export calls some modules through proxies, which share those
    paths = {id(vars(module)): path for path, module in meta_copy.model.named_modules()}
    return traced.as_text(), frozenset((paths[owner], name) for owner, name in reads if owner in paths)


def _as_analysed(analysis: Analysis, traced: Traced, meta_copy: MetaCopy) -> CapturedGraph:
    """Return the capture of an aligned trace: what was analysed, with this trace's sizes and costs."""
    masks = masks_of(traced, meta_copy).find()
    notes = notes_of(traced, meta_copy, masks, analysis.unpadded, training=analysis.is_training)
    return assemble(traced, carried_over(analysis.op_graph, traced, notes), meta_copy, analysis, masks)


def _aligned(analysis: Analysis, traced: Traced) -> Traced:
    """Return a trace with the analysed one's node names; refuse one of another structure."""
    try:
        return align(analysis.nodes, traced)
    except CaptureError as error:
        raise CaptureError(
            f"the graph changed with the input shapes: {error}; pad batches to one length, or use another micro-batch "
            "size"
        ) from None


def _trace_again(
    model: nn.Module,
    analysis: Analysis,
    batch: Mapping[str, Any],
    *,
    device: torch.device | str | None,
    call: Call,
    lengths: Mapping[str, Collection[int]] = MappingProxyType({}),
) -> tuple[MetaCopy, Traced]:
    """Return another export of an analysed model, for `align`."""
    # Names tie the two: the new graph will be aligned with the analysed one operator by operator, and takes its notes.
    # What rank 0 analysed on its device is of another rank's too, as long as the type is the same.
    meta_copy = _meta_copy_of(model, analysis, device)
    known = analysis.op_graph
    try:
        traced = trace(
            meta_copy,
            batch,
            outputs=tuple(known.outputs),
            received={spec.name: spec.requires_grad for spec in known.inputs if spec.name in known.received},
            training=analysis.is_training,
            call=call,
            eager=analysis.eager,
            reads=batch if analysis.reads_values else None,
            lengths=lengths,
        )
    except LeavesState as found:
        name = found.states[0].name
        raise refused(
            meta_copy.model, name, "is left behind at other shapes than the sample batch's only"
        ) from None
    return meta_copy, traced


def _meta_copy_of(model: nn.Module, analysis: Analysis, device: torch.device | str | None) -> MetaCopy:
    """Return what is traced of an analysed model.

    Raises:
        ValueError: ``device`` is of another type than it was analysed for.
    """
    where = torch.device(device or "cpu")
    if where.type != analysis.device_type:
        raise ValueError(
            f"device is {where}, but the model was analysed for {analysis.device_type}; use one type"
        )
    dtype = getattr(torch, analysis.dtype) if analysis.dtype is not None else None
    return make_meta_copy(
        model, training=analysis.is_training, dtype=dtype, device=where, carried=analysis.carried
    )


def _with_same_blocks(
    analysis: Analysis, traced: Traced, meta_copy: MetaCopy, granularity: str
) -> CapturedGraph:
    """Return a graph of other operators under the names of the blocks' borders that were analysed.

    Raises:
        CaptureError: the blocks differ.
    """
    known, model = analysis.op_graph, analysis.op_graph.model
    how: Any = None, {}, analysis.unpadded, analysis.is_training, analysis.eager
    now = analysed(model, traced, meta_copy, *how)
    blocks, blocks_now = (coarsen(found, granularity=granularity) for found in (analysis, now))
    try:
        names = border_names(blocks, blocks_now, known, now.op_graph)
    except CaptureError as error:
        raise CaptureError(
            f"{model} has other blocks for a batch of these shapes and values than the plan: {error}; give batches "
            "whose images or clips, and what stands for them, are as in the sample batch"
        ) from None
    return analysed(model, with_names(traced, names), meta_copy, *how)


def read_values(
    model: nn.Module,
    analysis: Analysis,
    batch: Mapping[str, Any],
    *,
    device: torch.device | str | None = None,
    call: Call = call_by_key,
) -> Recording:
    """Return what the model's Python reads of a batch, by running it on fake tensors beside the batch's values.

    Raises:
        CaptureError: it fails on such a batch; names module and line.
    """
    meta_copy = _meta_copy_of(model, analysis, device)
    whole = WholeCalls(meta_copy, analysis.eager, batch, training=analysis.is_training)
    return run_reading(meta_copy, batch, outputs=tuple(analysis.op_graph.outputs), whole=whole, call=call)
