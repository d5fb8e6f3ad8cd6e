"""Capture a model: `torch.export`, names, layouts, couplings and costs in one `CapturedGraph`."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from gpp_plugin.capture.annotate import Note, annotate, module_path
from gpp_plugin.capture.attention import attention_masks, without_masks
from gpp_plugin.capture.captured_graph import CapturedGraph
from gpp_plugin.capture.coarsen import coarsen
from gpp_plugin.capture.eager.choose_whole import MAX_ATTEMPTS, Untraceable, find_asked, with_culprit
from gpp_plugin.capture.eager.keep_whole import WholeCalls
from gpp_plugin.capture.eager.opaque_call import OpaqueCall
from gpp_plugin.capture.keys import find_layer_lists
from gpp_plugin.capture.layout.inseparable import find_clusters
from gpp_plugin.capture.layout.layout_rules import Counted, Fixed, Rows
from gpp_plugin.capture.layout.layouts import (
    Layouts,
    analyse_layouts,
    describe_coupling,
    is_random,
    whole_layouts,
)
from gpp_plugin.capture.layout.replicate import find_replicable
from gpp_plugin.capture.lengths import LengthCapture, resized
from gpp_plugin.capture.mask_values import Mask, MaskFinder, inputs_of_ones
from gpp_plugin.capture.same_blocks import border_names, with_names
from gpp_plugin.capture.tracing.clean import written_arguments
from gpp_plugin.capture.tracing.devices import place_graph, placed_body
from gpp_plugin.capture.tracing.outside import Draws, check_draws
from gpp_plugin.capture.tracing.sample_batches import WholeUnit, count_samples, resize_batch, rows_per_sample
from gpp_plugin.capture.tracing.shadow import Shadow, dtype_name, make_shadow, tracing_device
from gpp_plugin.capture.tracing.symbolic_sizes import (
    SizeTexts,
    is_open,
    sizes_in,
    sizes_of_results,
    with_sizes,
)
from gpp_plugin.capture.tracing.torch_export import (
    Call,
    Reads,
    call_by_key,
    lacks_values,
    run_reading,
)
from gpp_plugin.capture.tracing.traced import Exported, Traced, align, structure_of, trace
from gpp_plugin.capture.tracing.values import Recording
from gpp_plugin.errors import CaptureError
from gpp_plugin.ir.analysis import RECORDED, WHOLE_UNITS, Analysis
from gpp_plugin.ir.op_graph import OpGraph, OpNode, Parameter
from gpp_plugin.ir.tensors import UNIFORM, UNIT, Layout, TensorSpec, batch_layout

__all__ = ["capture_model", "count_samples", "recapture", "recapture_for_lengths", "resize_batch"]

logger = logging.getLogger(__name__)


def capture_model(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    training: bool = True,
    outputs: Sequence[str] = (),
    received: Mapping[str, bool] = MappingProxyType({}),
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    call: Call = call_by_key,
    eager: Sequence[str] = (),
) -> CapturedGraph:
    """Capture ``model`` on a batch like ``batch`` as one operator graph with the loss inside.

    The model itself is neither run nor changed, and its weights are not copied: a weightless copy is
    traced. Its parameters may be real, fake or on the meta device. The copy is exported at up to three
    numbers of samples, to see what scales with the samples and which operators mix them.

    Args:
        batch: tensors with the samples along axis 0, and constants (``return_loss=True``).
        training: capture as after ``model.train()``; else as after ``model.eval()``. A loss is optional in
            evaluation, and where outputs are asked for.
        outputs: fields of the model's output to return beside the loss, e.g. ``("logits",)``.
        received: entries of the batch that other stages make -> whether they take a gradient.
        dtype: floating parameters and batch tensors become this type before tracing; buffers keep theirs.
        device: the device the graph will run on; the CPU by default.
        call: how the model is called with the batch, and what is its loss and which its outputs; ``model(**batch)``
            by default. Names in the graph are the model's own whatever calls it.
        eager: modules that are not traced but run as they are, each one operator; further ones are found where
            tracing fails.

    Raises:
        ConfigError: ``eager`` names no module of the model's.
        CaptureError: the model cannot be exported, has no loss, or its structure depends on the number
            of samples; the message names the module, the line and the remedy.
    """
    asked = whole = find_asked(model, eager)
    reasons: list[Untraceable] = []
    while True:
        try:
            captured = _capture(
                model, batch, training, outputs, received, dtype, torch.device(device or "cpu"), call, whole
            )
            break
        except CaptureError as error:
            # The innermost module that fails is kept whole, and the rest traced anew; where that does not help, the
            # first failure is what the user should know of.
            more = with_culprit(model, whole, error.culprit) if isinstance(error, Untraceable) else None
            if more is None or len(reasons) == MAX_ATTEMPTS:
                raise (reasons[0] if reasons else error) from None
            assert isinstance(error, Untraceable)
            logger.debug("kept whole, as tracing failed: %s (%s)", error.culprit, error)
            reasons.append(error)
            whole = more
    for path in whole:
        # of modules that failed alike, the first says why; of one that was kept for another inside it, that other
        why = next((e for e in reasons if e.culprit == path or e.culprit.startswith(f"{path}.")), None)
        if path not in asked and why is not None:
            logger.warning("%s is kept whole and runs as it is, on whole loss units: %s", path, why)
    if whole:
        logger.info("kept whole, run as they are: %s", ", ".join(whole))
    return captured


def _capture(
    model: nn.Module,
    batch: Mapping[str, Any],
    training: bool,
    outputs: Sequence[str],
    received: Mapping[str, bool],
    dtype: torch.dtype | None,
    device: torch.device,
    call: Call,
    eager: tuple[str, ...],
) -> CapturedGraph:
    """Capture a model, as `capture_model` does, with these modules kept whole."""
    # One export at the batch's own number of samples, n; more at 2 and 4 (3 and 6 where n is 3): what is twice as long
    # at 4 as at 2 lies along the samples, and an operator on 2 and 4 rows is quickly tried by itself. Profiles are
    # measured at such numbers too: they take what was exported here.
    shadow = make_shadow(model, training=training, dtype=dtype, device=device)
    export = functools.partial(
        trace, shadow, outputs=outputs, received=received, training=training, call=call, eager=eager
    )
    traced, pair = _traced_or_whole(export, batch, shadow)
    if pair is not None:
        traced = _aligned(pair[0], traced)
    rows = {} if pair is None else rows_per_sample(resize_batch(batch, pair[0].num_samples))
    unpadded = inputs_of_ones(batch)
    captured = _analysed(type(model).__name__, traced, shadow, pair, rows, unpadded, training, eager)
    others = [each for each in pair or () if each.num_samples != traced.num_samples]
    return dataclasses.replace(
        captured, trials={each.num_samples: Exported(shadow=shadow, traced=each) for each in others}
    )


def _analysed(
    model: str,
    traced: Traced,
    shadow: Shadow,
    pair: tuple[Traced, Traced] | None,
    rows: dict[str, int],
    unpadded: Collection[str],
    training: bool,
    eager: tuple[str, ...],
) -> CapturedGraph:
    """Return the capture with all that is found out of it.

    Args:
        pair: exports at n and 2n samples; None where the model takes whole units.
        rows: of a sample of each input.
        unpadded: inputs that hold ones only.
        eager: modules that are kept whole.
    """
    masks = _masks(traced, shadow).find()
    notes = _notes(traced, shadow, masks, unpadded, training=training)
    clusters = find_clusters(traced.graph, notes)
    if pair is not None:
        # Clusters twice: layouts are judged cluster by cluster, and what they find uncuttable makes clusters larger.
        layouts = analyse_layouts(*pair, clusters, rows, tracing_device(shadow.device))
        clusters = find_clusters(traced.graph, notes, uncuttable=layouts.uncuttable())
    else:
        layouts = whole_layouts(traced)
    replicable = find_replicable(traced, notes, clusters, layouts)
    _couple_readers_of_counts(traced, layouts, replicable)
    op_graph = _op_graph(model, shadow, traced, notes, layouts, replicable)
    of_masks = {key for mask in masks.values() for key in mask.inputs}
    analysis = Analysis(
        op_graph=op_graph,
        nodes=structure_of(traced.graph),
        is_training=training,
        dtype=dtype_name(shadow.dtype) if shadow.dtype is not None else None,
        device_type=shadow.device.type,
        layer_lists=find_layer_lists(shadow.model),
        clusters=clusters,
        unpadded=tuple(sorted(of_masks.intersection(unpadded))),
        eager=eager,
        means=(*((RECORDED,) if traced.recording else ()), *((WHOLE_UNITS,) if pair is None else ())),
    )
    return _assemble(traced, op_graph, shadow, analysis, masks)


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
        shadow, traced = _trace_again(model, analysis, batch, device=device, call=call)
    else:
        shadow, traced = exported.shadow, exported.traced
    try:
        traced = align(analysis.nodes, traced)
    except CaptureError as error:
        if analysis.takes_whole_units:
            return _with_same_blocks(analysis, traced, shadow, granularity)
        raise _changed(error) from None
    masks = _masks(traced, shadow).find()
    notes = _notes(traced, shadow, masks, analysis.unpadded, training=analysis.is_training)
    return _assemble(traced, _carried_over(analysis.op_graph, traced, notes), shadow, analysis, masks)


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
    shadow, traced = _trace_again(model, analysis, batch, device=device, call=call, lengths=lengths)
    try:
        traced = align(analysis.nodes, traced)
    except CaptureError as error:
        raise _changed(error) from None
    return LengthCapture(
        captured=_assemble(traced, analysis.op_graph, shadow, analysis, {}),
        num_samples=traced.num_samples,
        masks=_masks(traced, shadow),
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
        self._shadow, traced = _trace_again(model, analysis, batch, device=device, call=call, lengths=lengths)
        try:
            self._traced = align(analysis.nodes, traced)
        except CaptureError as error:
            raise _changed(error) from None
        if self._traced.attributes or any(isinstance(n.target, OpaqueCall) for n in self._traced.operators):
            raise CaptureError("operators with bodies of their own have no sizes that are known outside")
        graph, inputs = self._traced.graph, self._traced.inputs
        self._texts = SizeTexts({inputs[n.name]: n.meta["val"] for n in graph.nodes if n.name in inputs})
        found = [size for node in graph.nodes for size in (*sizes_in(node), *sizes_of_results(node))]
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
        if isinstance(symbols, str):
            raise CaptureError(symbols)
        values = dict(zip(self._keys, self._evaluate(*symbols), strict=True))

        def plain(size: Any) -> Any:
            return values[self._texts.key(size)] if is_open(size) else size

        def sized(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not any(is_open(size) for size in value.shape):
                return value
            with self._shadow.mode:
                made = torch.empty([plain(s) for s in value.shape], dtype=value.dtype, device=value.device)
                return made.requires_grad_(value.requires_grad)

        graph, copies = torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node]()
        for node in self._traced.graph.nodes:
            copy = copies[node] = graph.node_copy(node, copies.__getitem__)
            copy.args, copy.kwargs = with_sizes(copy.args, plain), with_sizes(copy.kwargs, plain)
            if "val" in copy.meta:
                copy.meta["val"] = torch.utils._pytree.tree_map(sized, copy.meta["val"])
        fakes = {name: sized(fake) for name, fake in self._traced.fakes.items()}
        traced = dataclasses.replace(self._traced, graph=graph, fakes=fakes)
        analysis, shadow = self._analysis, self._shadow
        masks = _masks(traced, shadow).find()
        notes = _notes(traced, shadow, masks, analysis.unpadded, training=analysis.is_training)
        return _assemble(traced, _carried_over(analysis.op_graph, traced, notes), shadow, analysis, masks)


def _trace_again(
    model: nn.Module,
    analysis: Analysis,
    batch: Mapping[str, Any],
    *,
    device: torch.device | str | None,
    call: Call,
    lengths: Mapping[str, Collection[int]] = MappingProxyType({}),
) -> tuple[Shadow, Traced]:
    """Return another export of an analysed model, for `align`."""
    # Names tie the two: the new graph will be aligned with the analysed one operator by operator, and takes its notes.
    # What rank 0 analysed on its device is of another rank's too, as long as the type is the same.
    shadow = _shadow_of(model, analysis, device)
    known = analysis.op_graph
    traced = trace(
        shadow,
        batch,
        outputs=tuple(known.outputs),
        received={spec.name: spec.requires_grad for spec in known.inputs if spec.name in known.received},
        training=analysis.is_training,
        call=call,
        eager=analysis.eager,
        reads=_reads(analysis, batch),
        lengths=lengths,
    )
    return shadow, traced


def _shadow_of(model: nn.Module, analysis: Analysis, device: torch.device | str | None) -> Shadow:
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
    return make_shadow(model, training=analysis.is_training, dtype=dtype, device=where)


def _changed(error: CaptureError) -> CaptureError:
    return CaptureError(
        f"the graph changed with the input shapes: {error}; pad batches to one length, or use another micro-batch size"
    )


def _first(export: Callable[[Mapping[str, Any]], Traced], batch: Mapping[str, Any], shadow: Shadow) -> Traced:
    """Return the capture at the batch's own size, if it holds no number drawn outside the graph."""
    first = export(batch)

    def trace_again() -> tuple[str, Draws]:
        again = export(batch)
        return again.as_text(), again.drawn

    if first.drawn:
        check_draws(shadow.model, trace_again, (first.as_text(), first.drawn))
    return first


def _check_loss(traced: Traced, notes: Mapping[str, Note], shadow: Shadow) -> None:
    """Refuse a training loss that no backward starts from; a model without weights has nothing to train anyway."""
    own = [p for p in shadow.parameters if not p.is_buffer]
    if not own or traced.loss is None or notes[traced.loss].requires_grad:
        return
    trained = sum(p.requires_grad for p in own)
    why = (
        "between them and the loss are detach(), torch.no_grad(), integers, or a custom autograd.Function, which is "
        "traced without its gradient; remove that"
        if trained
        else "unfreeze what is to be trained (requires_grad_)"
    )
    raise CaptureError(
        f"the loss of {type(shadow.model).__name__} needs no gradient, so that nothing would train: {trained} of its "
        f"{len(own)} parameters take one; {why}"
    )


def _with_same_blocks(analysis: Analysis, traced: Traced, shadow: Shadow, granularity: str) -> CapturedGraph:
    """Return a graph of other operators under the names of the blocks' borders that were analysed.

    Raises:
        CaptureError: the blocks differ.
    """
    known, model = analysis.op_graph, analysis.op_graph.model
    now = _analysed(model, traced, shadow, None, {}, analysis.unpadded, analysis.is_training, analysis.eager)
    blocks, blocks_now = (coarsen(found, granularity=granularity) for found in (analysis, now))
    try:
        names = border_names(blocks, blocks_now, known, now.op_graph)
    except CaptureError as error:
        raise CaptureError(
            f"{model} has other blocks for a batch of these shapes and values than the plan: {error}; give batches "
            "whose images or clips, and what stands for them, are as in the sample batch"
        ) from None
    renamed = with_names(traced, names)
    return _analysed(
        model, renamed, shadow, None, {}, analysis.unpadded, analysis.is_training, analysis.eager
    )


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
    shadow = _shadow_of(model, analysis, device)
    whole = WholeCalls(shadow.model, shadow.original, analysis.eager, batch, training=analysis.is_training)
    return run_reading(shadow, batch, outputs=tuple(analysis.op_graph.outputs), whole=whole, call=call)


def _masks(traced: Traced, shadow: Shadow) -> MaskFinder:
    """Return what finds the masks of attention that eager models leave out where some entries hold ones only."""
    own = {name: key for name, key in traced.inputs.items() if key not in traced.received}
    where = tracing_device(shadow.device)
    return attention_masks(traced.graph, inputs=own, constants=traced.constants, device=where)


def _notes(
    traced: Traced, shadow: Shadow, masks: Mapping[str, Mask], unpadded: Collection[str], *, training: bool
) -> dict[str, Note]:
    """Return what is found of each operator, with the costs of attention as it is for batches like the first one.

    Shapes are those of the capture: a bias that eager attention would add once for all samples has them here too, for
    that is what a stage sends where another stage adds it.
    """
    graph, unread = without_masks(traced.graph, masks, unpadded)
    notes = annotate(
        graph,
        shadow,
        traced.fakes,
        traced.attributes,
        received=traced.received,
        training=training,
        unread=unread,
    )
    for node in traced.operators:
        if isinstance(node.meta.get("val"), torch.Tensor):
            notes[node.name].shapes = (tuple(node.meta["val"].shape),)
    if training:
        _check_loss(traced, notes, shadow)
    return notes


def _reads(analysis: Analysis, batch: Mapping[str, Any]) -> Reads | None:
    return _what_is_read(batch) if analysis.reads_values else None


def _what_is_read(batch: Mapping[str, Any]) -> Reads:
    """Return what Python reads: of a unit whose readings are known there may be no values here."""
    readings = batch.readings if isinstance(batch, WholeUnit) else None
    return Reads(values=batch) if readings is None else Reads(readings=readings)


def _traced_or_whole(
    export: Callable[..., Traced], batch: Mapping[str, Any], shadow: Shadow
) -> tuple[Traced, tuple[Traced, Traced] | None]:
    """Return the capture, and exports at n and 2n samples, n >= 2, small enough to try operators on.

    Without these the model takes whole loss units, of which nothing is known of where samples lie: where the batch is
    a unit already, where Python reads values (of what there is at another number of samples nobody knows them), and
    where the graph is another one at another number of samples.
    """
    failure: CaptureError | None = None
    try:
        traced = _first(export, batch, shadow)
    except CaptureError as error:
        if isinstance(error, Untraceable) and error.lacks_records:
            raise
        failure = error
    if (
        failure is not None
    ):  # not in the handler: an error in there would be told as a consequence of this one
        traced = _trace_with_values(export, batch, shadow, failure)
    if isinstance(batch, WholeUnit) or traced.recording is not None:
        return traced, None
    # Not one sample: export specialises sizes of one (broadcasting, contiguity), and a slice of one sample could not
    # be told from a reduction over samples. A batch of 2, 3 or 4 saves an export: (3, 6); one of 16 is tried at (2, 4).
    base = 3 if traced.num_samples == 3 else 2
    pair = []
    try:
        for count in (base, 2 * base):
            known = traced if count == traced.num_samples else None
            pair.append(known or export(resize_batch(batch, count)))
        small, large = pair
        _aligned(small, traced)
        return traced, (small, _aligned(small, large))
    except CaptureError as error:
        logger.debug("whole units, as the graph differs with the number of samples: %s", error)
        return traced, None


def _trace_with_values(
    export: Callable[..., Traced], batch: Mapping[str, Any], shadow: Shadow, error: CaptureError
) -> Traced:
    """Return the model traced with what its Python reads of the batch.

    Raises:
        CaptureError: it cannot be; ``error``, that of the export without, where values are not what it lacks.
    """
    try:
        traced = _first(functools.partial(export, reads=_what_is_read(batch)), batch, shadow)
    except CaptureError as other:
        raise (other if lacks_values(error) and not lacks_values(other) else error) from None
    assert traced.recording is not None
    return traced


def _aligned(small: Traced, traced: Traced) -> Traced:
    return traced if traced is small else align(structure_of(small.graph), traced)


def _couple_readers_of_counts(traced: Traced, layouts: Layouts, replicable: set[str]) -> None:
    """Keep to whole units whatever reads a count of samples that is sent instead of made anew."""
    for node in traced.operators:
        if isinstance(layouts.states[node.name], Counted) and node.name not in replicable:
            layouts.coupling.update((node.name, *(u.name for u in node.users if u.op == "call_function")))


def _assemble(
    traced: Traced, op_graph: OpGraph, shadow: Shadow, analysis: Analysis, masks: Mapping[str, Mask]
) -> CapturedGraph:
    logger.debug("captured %s: %d operators", op_graph.model, len(op_graph.nodes))
    # Traced for a device that this build of torch lacks, the graph says cpu wherever it will compute on that device.
    device, traced_on = shadow.device, tracing_device(shadow.device).type
    if traced_on != device.type:
        place_graph(traced.graph, device, of_type=traced_on)
        bodies = traced.attributes.items()
        traced.attributes.update(
            {name: placed_body(body, device, of_type=traced_on) for name, body in bodies}
        )
    return CapturedGraph(
        graph=traced.graph,
        attributes=traced.attributes,
        inputs=traced.inputs,
        parameters=traced.parameters,
        constants=traced.constants,
        op_graph=op_graph,
        device=device,
        analysis=analysis,
        masks=masks,
        recording=traced.recording,
    )


def _op_graph(
    model: str,
    shadow: Shadow,
    traced: Traced,
    notes: Mapping[str, Note],
    layouts: Layouts,
    replicable: set[str],
) -> OpGraph:
    # inputs of an operator are named as users know them: batch keys and parameters, not placeholders (p_layer_weight)
    by_name = {node.name: node for node in traced.graph.nodes}
    known = {**traced.inputs, **traced.parameters}
    nodes = []
    for node in traced.operators:
        note = notes[node.name]
        layout = _layout(layouts, node.name, note, traced.num_samples)
        nodes.append(
            OpNode(
                name=node.name,
                target=str(node.target),
                inputs=tuple(
                    dict.fromkeys(
                        known.get(s.name, s.name) for s in node.all_input_nodes if s.op != "get_attr"
                    )
                ),
                module=module_path(node),
                output=None if note.is_tuple else _spec(node.name, note, traced.num_samples, layout),
                flops=note.flops,
                saved_bytes=note.saved_bytes,
                keeps=note.keeps,
                kept_inside_bytes=note.kept_inside_bytes,
                storage=note.storage,
                is_coupling=node.name in layouts.coupling,
                is_random=is_random(node),
                is_replicable=node.name in replicable,
            )
        )
    return OpGraph(
        model=model,
        num_samples=traced.num_samples,
        inputs=tuple(
            _spec(
                key, notes[name], traced.num_samples, _layout(layouts, name, notes[name], traced.num_samples)
            )
            for name, key in traced.inputs.items()
        ),
        parameters=_with_written(shadow.parameters, traced),
        nodes=tuple(nodes),
        loss=traced.loss,
        outputs=traced.outputs,
        couplings=tuple(describe_coupling(by_name[name], reason) for name, reason in layouts.reasons.items()),
        received=traced.received,
    )


def _with_written(parameters: Sequence[Parameter], traced: Traced) -> tuple[Parameter, ...]:
    """Return parameters and buffers with a mark on those that the forward writes.

    Running statistics: the copies of a stage's replicas differ, and a checkpoint holds each rank's.
    """
    arguments = {a.name for n in traced.operators for a in written_arguments(n)}
    written = {own for name, own in traced.parameters.items() if name in arguments}
    return tuple(dataclasses.replace(p, is_mutated=True) if p.name in written else p for p in parameters)


def _carried_over(reference: OpGraph, traced: Traced, notes: Mapping[str, Note]) -> OpGraph:
    """Return the reference's operators with the sizes and costs of another export."""
    # what tracing at another shape cannot change stays (names, modules, layouts, couplings); what it can is taken from
    # there: shapes, FLOPs, bytes
    samples = traced.num_samples
    nodes = []
    for old in reference.nodes:
        note = notes[old.name]
        output = None
        if old.output is not None:
            output = _respec(old.output, note, samples)
        nodes.append(
            dataclasses.replace(
                old,
                output=output,
                flops=note.flops,
                saved_bytes=note.saved_bytes,
                keeps=note.keeps,
                kept_inside_bytes=note.kept_inside_bytes,
                storage=note.storage,
            )
        )
    names = {key: name for name, key in traced.inputs.items()}
    inputs = tuple(_respec(old, notes[names[old.name]], samples) for old in reference.inputs)
    return dataclasses.replace(reference, num_samples=samples, nodes=tuple(nodes), inputs=inputs)


def _respec(old: TensorSpec, note: Note, samples: int) -> TensorSpec:
    return dataclasses.replace(resized(old, note.shape, samples), requires_grad=note.requires_grad)


def _layout(layouts: Layouts, name: str, note: Note, samples: int) -> Layout:
    # Rows with outer > 1 are inside a cluster and on no edge; `Counted` values on an edge have one value a unit, as
    # their readers compute on whole units (`_couple_readers_of_counts`).
    state = layouts.states[name]
    if isinstance(state, Rows) and state.outer == 1 and not note.is_tuple:
        size = note.shape[state.axis]
        assert size % samples == 0, f"{name}: {note.shape} at {samples} samples"
        return batch_layout(state.axis, size // samples)
    return UNIFORM if isinstance(state, Fixed) else UNIT


def _spec(name: str, note: Note, samples: int, layout: Layout) -> TensorSpec:
    return TensorSpec(
        name=name,
        dtype=dtype_name(note.dtypes[0]),
        shape=note.shape,
        num_samples=samples,
        layout=layout,
        requires_grad=note.requires_grad,
    )
