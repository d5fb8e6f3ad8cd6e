"""Capture a model for the first time: its exports, its eager submodules, and an analysed `OpGraph` of them.

Source: this project
Tests: tests/capture/test_export.py, tests/capture/test_layouts.py
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import _disable_current_modes

from gpp_plugin.capture.captured_graph import CapturedGraph, resized
from gpp_plugin.capture.eager.opaque_call import OpaqueCall
from gpp_plugin.capture.eager.trial_run import (
    GLOBAL_HOOKS,
    MAX_ATTEMPTS,
    Untraceable,
    find_eager_modules,
    has_hooks,
    is_within,
    lacks_values,
    with_culprit,
    without_inner,
)
from gpp_plugin.capture.find_context import find_context
from gpp_plugin.capture.find_regions import find_sharding
from gpp_plugin.capture.layout_rules import Counted, Fixed, Rows
from gpp_plugin.capture.layouts import (
    LayoutAnalysis,
    Layouts,
    describe_coupling,
    find_clusters,
    is_random,
    operator_sources,
    ordered_units,
    whole_layouts,
)
from gpp_plugin.capture.mask_values import Mask, MaskFinder, inputs_of_ones, mask_candidates, without_masks
from gpp_plugin.capture.tracing.carried_state import LeavesState, refused, states_of_written
from gpp_plugin.capture.tracing.clean import (
    Note,
    annotate,
    module_path,
    place_graph,
    placed_body,
    written_placeholders,
)
from gpp_plugin.capture.tracing.meta_copy import (
    MetaCopy,
    check_float_types,
    dtype_name,
    make_meta_copy,
    overlapping,
    tracing_device,
)
from gpp_plugin.capture.tracing.outside import Draws, check_draws
from gpp_plugin.capture.tracing.sample_batches import WholeUnit, resize_batch, rows_per_sample
from gpp_plugin.capture.tracing.torch_export import Call, call_by_key
from gpp_plugin.capture.tracing.traced import Exported, Traced, align, structure_of, trace
from gpp_plugin.errors import CaptureError
from gpp_plugin.ir.analysis import RECORDED, WHOLE_UNITS, Analysis, CarriedState, Sharding
from gpp_plugin.ir.block_graph import OpGraph, OpNode, Parameter
from gpp_plugin.ir.tensors import UNIFORM, UNIT, Layout, TensorSpec, batch_layout

logger = logging.getLogger(__name__)


@_disable_current_modes()  # one of the caller's, such as CUDA's sanitizer, would look for memory behind fake tensors
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
    carried: Sequence[CarriedState] = (),
) -> CapturedGraph:
    """Capture ``model`` on a batch like ``batch`` as one operator graph with the loss inside.

    The model itself is neither run nor changed, and its weights are not copied: a weightless copy is
    traced. Its parameters may be real, fake or on the meta device. The copy is exported at up to three
    numbers of samples, to see what scales with the samples and which operators mix them.

    Args:
        batch: tensors with the samples along axis 0, and constants (``return_loss=True``).
        training: capture with the modes that the model's modules are in (as after ``model.train()``, where all of it
            is in eval mode); else as after ``model.eval()``. A loss is optional in evaluation, and where outputs are
            requested.
        outputs: fields of the model's output to return beside the loss, e.g. ``("logits",)``.
        received: entries of the batch that other stages make -> whether they take a gradient.
        dtype: floating parameters and batch tensors become this type before tracing; buffers keep theirs.
        device: the device the graph will run on; the CPU by default.
        call: how the model is called with the batch, and what is its loss and which its outputs; ``model(**batch)``
            by default. Names in the graph are the model's own whatever calls it.
        eager: modules that are not traced but run as they are, each one operator; further ones are found where
            tracing fails.
        carried: state that is known of, as another mode's capture carries it; further state is found.

    Raises:
        ConfigError: ``eager`` names no module of the model's.
        CaptureError: the model cannot be exported, has no loss, or its structure depends on the number
            of samples; the message names the module, the line and the remedy.
    """
    requested = find_eager_modules(model, eager)
    # modules run as they are so that their hooks are called; the model itself cannot
    hooked = without_inner(path for path, module in model.named_modules() if path and has_hooks(module))
    whole = without_inner((*requested, *hooked))
    _warn_of_hooks(model)
    attempt = functools.partial(
        _capture, model, batch, training, outputs, received, dtype, torch.device(device or "cpu"), call
    )
    reasons: list[Untraceable] = []
    states = {state.name: state for state in carried}
    while True:
        try:
            captured = attempt(whole, tuple(states.values()))
        except LeavesState as found:
            # traced anew, with what the forward leaves behind as buffers
            again = [state for state in found.states if states.get(state.name) == state]
            if again:
                raise refused(model, again[0].name, "is left behind in more than one way") from None
            states.update({state.name: state for state in found.states})
        except Untraceable as error:
            # The innermost module that fails runs as it is, and the rest is traced anew. Where that does not help, the
            # first failure is reported.
            more = None
            # a model whose own Python reads what it keeps runs as one block; for other values the error advises to move
            # what reads them into a module of its own: the rest is then cut
            keeps = error.is_of_state or bool(model._buffers) or any(s.tensors for s in states.values())
            if error.culprit or (keeps and lacks_values(error)):
                more = with_culprit(model, whole, error.culprit)
            if more is not None and len(reasons) < MAX_ATTEMPTS:
                logger.debug("runs as it is, as tracing failed: %s (%s)", error.culprit, error)
                reasons.append(error)
                whole = more
                continue
            if not hooked:
                raise (reasons[0] if reasons else error) from None
            logger.warning(
                "hooks on %s are traced once and not called in training, as these modules cannot run as they are: %s",
                *(", ".join(hooked), error),
            )
            hooked, whole = (), requested
            reasons.clear()
        except CaptureError as error:
            raise (reasons[0] if reasons else error) from None
        else:
            _log_what_is_special(captured, whole, requested=requested, hooked=hooked, reasons=reasons)
            return captured


def _warn_of_hooks(model: nn.Module) -> None:
    """Log which hooks training does not call."""
    if has_hooks(model):
        logger.warning(
            "hooks on %s itself are not called in training; register them on modules in it, which then run as they are",
            type(model).__name__,
        )
    if any(GLOBAL_HOOKS.values()):
        logger.warning(
            "hooks on all modules (torch.nn.modules.module.register_module_forward_hook) are traced once and not "
            "called in training; register them on modules, which then run as they are"
        )


def _log_what_is_special(
    captured: CapturedGraph,
    whole: Sequence[str],
    *,
    requested: Sequence[str],
    hooked: Sequence[str],
    reasons: Sequence[Untraceable],
) -> None:
    """Log which modules run as they are, and why where it was not requested, and the state that is carried."""
    for path in whole:
        # of modules that failed alike, the first says why; of one that is eager for another inside it, that other
        why = next((e for e in reasons if is_within(e.culprit, path)), None)
        if not path:
            logger.warning(
                "%s runs as it is, as one block that is not cut, on whole loss units: %s",
                captured.analysis.op_graph.model,
                why,
            )
        elif path in hooked:
            logger.warning("%s is kept whole and runs as it is, on whole loss units, with its hooks", path)
        elif path not in requested and why is not None:
            logger.warning("%s is kept whole and runs as it is, on whole loss units: %s", path, why)
    left = [state.name for state in captured.analysis.carried if state.tensors]
    if left:
        logger.info("state that each forward leaves for the next one: %s", ", ".join(left))
    if whole:
        logger.info("modules that run as they are: %s", ", ".join(path or "the model" for path in whole))


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
    states: tuple[CarriedState, ...],
) -> CapturedGraph:
    """Capture a model, as `capture_model` does, with these eager submodules, and this state carried."""
    # One export at the batch's own number of samples, n; more at 2 and 4 (3 and 6 where n is 3): what is twice as long
    # at 4 as at 2 lies along the samples, and an operator on 2 and 4 rows is quickly tried by itself. Profiles are
    # measured at such numbers too: they take what was exported here.
    meta_copy = make_meta_copy(model, training=training, dtype=dtype, device=device, carried=states)
    if training:
        check_float_types(model, dtype)
    export = functools.partial(
        trace, meta_copy, outputs=outputs, received=received, training=training, call=call, eager=eager
    )
    traced, pair = _traced_or_whole(export, batch, meta_copy)
    if pair is not None:
        traced = _aligned(pair[0], traced)
    rows = {} if pair is None else rows_per_sample(resize_batch(batch, pair[0].num_samples))
    unpadded = inputs_of_ones(batch)
    captured = analysed(type(model).__name__, traced, meta_copy, pair, rows, unpadded, training, eager)
    others = [each for each in pair or () if each.num_samples != traced.num_samples]
    return dataclasses.replace(
        captured, trials={each.num_samples: Exported(meta_copy=meta_copy, traced=each) for each in others}
    )


def _first(
    export: Callable[[Mapping[str, Any]], Traced], batch: Mapping[str, Any], meta_copy: MetaCopy
) -> Traced:
    """Return the capture at the batch's own size, if it holds no number drawn outside the graph."""
    first = export(batch)

    def trace_again() -> tuple[str, Draws]:
        again = export(batch)
        return again.as_text(), again.drawn

    if first.drawn:
        check_draws(meta_copy.model, trace_again, (first.as_text(), first.drawn))
    return first


def _traced_or_whole(
    export: Callable[..., Traced], batch: Mapping[str, Any], meta_copy: MetaCopy
) -> tuple[Traced, tuple[Traced, Traced] | None]:
    """Return the capture, and exports at n and 2n samples, n >= 2, small enough to try operators on.

    Without these the model takes whole loss units, in which the place of samples is unknown: where the batch is
    a unit already, where Python reads values (those at another number of samples are unknown), and
    where the graph is another one at another number of samples.
    """
    failure: CaptureError | None = None
    try:
        traced = _first(export, batch, meta_copy)
    except CaptureError as error:
        if isinstance(error, Untraceable) and error.lacks_records:
            raise
        failure = error
    # not in the handler: an error in there would be reported as a consequence of this one
    if failure is not None:
        # the model traced with what its Python reads of the batch; values may not be what the export lacks
        try:
            traced = _first(functools.partial(export, reads=batch), batch, meta_copy)
        except CaptureError as other:
            raise (other if lacks_values(failure) and not lacks_values(other) else failure) from None
        assert traced.recording is not None
    if isinstance(batch, WholeUnit) or traced.recording is not None:
        return traced, None
    # Not one sample: export specialises sizes of one (broadcasting, contiguity), and a slice of one sample could not
    # be distinguished from a reduction over samples. A batch of 2, 3 or 4 saves an export: (3, 6); one of 16 is tried
    # at (2, 4).
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


def _aligned(small: Traced, traced: Traced) -> Traced:
    return traced if traced is small else align(structure_of(small.graph), traced)


# Which operators every stage may compute for itself instead of receiving their results.

MAX_BUFFER_BYTES = 4 << 20
MAX_SHARE = 0.01
"""A replicated operator costs at most this part of the model's forward (or a million operations)."""
ALWAYS_CHEAP_FLOPS = 1e6


def find_replicable(
    traced: Traced, notes: Mapping[str, Note], clusters: Sequence[Sequence[str]], layouts: Layouts
) -> set[str]:
    """Return the operators that are cheap, draw no random numbers and read no parameters.

    They depend on model inputs without a gradient, constants and small buffers that the forward never writes. Groups
    that share written storage qualify as a whole or not at all. The loss and named outputs never do.
    """
    # A mask from attention_mask [8, 16] costs 100 operations and would be 8 x 1 x 16 x 16 values on every edge; each
    # stage computes it from the batch instead. One percent of the forward a node is the price limit, with a floor so
    # that tiny models still replicate their masks.
    total = sum(notes[node.name].flops for node in traced.operators)
    limit = max(ALWAYS_CHEAP_FLOPS, MAX_SHARE * total)
    written = written_placeholders(traced.graph, notes)
    results = {traced.loss, *traced.outputs.values()}
    usable = {name for name in traced.inputs if not notes[name].requires_grad} | set(traced.constants)
    for name in traced.parameters:
        fake = traced.fakes[name]
        is_small = fake.numel() * fake.element_size() <= MAX_BUFFER_BYTES
        if not isinstance(fake, nn.Parameter) and is_small and name not in written:
            usable.add(name)
    # an input that is written has other values behind the write than a second copy of its readers would see
    usable -= written & set(traced.inputs)
    by_name = {node.name: node for node in traced.operators}
    # In execution order: an operator qualifies if all it reads is usable or has qualified before it.
    found: set[str] = set()
    for group in ordered_units(operator_sources(traced.operators), clusters):
        members = [by_name[name] for name in group]
        known = usable | found | set(group)
        qualifies = all(
            (notes[n.name].flops <= limit or isinstance(layouts.states[n.name], Counted))
            and n.name not in results
            and not is_random(n)
            and not isinstance(n.target, OpaqueCall)
            and all(s.op == "get_attr" or s.name in known for s in n.all_input_nodes)
            for n in members
        )
        if qualifies:
            found.update(group)
    return found


def analysed(
    model: str,
    traced: Traced,
    meta_copy: MetaCopy,
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
        eager: modules that run as they are.
    """
    masks = masks_of(traced, meta_copy).find()
    notes = notes_of(traced, meta_copy, masks, unpadded, training=training)
    _check_written(traced, notes, meta_copy)
    clusters = find_clusters(traced.graph, notes)
    if pair is not None:
        # Clusters twice: layouts are found cluster by cluster, and tensors that cannot be cut make clusters larger.
        written = written_placeholders(traced.graph, notes)
        device = tracing_device(meta_copy.device)
        layouts = LayoutAnalysis(*pair, clusters, rows, device, written=written).run()
        clusters = find_clusters(traced.graph, notes, uncuttable=layouts.uncuttable())
    else:
        layouts = whole_layouts(traced)
    replicable = find_replicable(traced, notes, clusters, layouts)
    # whatever reads a count of samples that is sent, instead of made anew, computes on whole units
    for node in traced.operators:
        if isinstance(layouts.states[node.name], Counted) and node.name not in replicable:
            layouts.coupling.update((node.name, *(u.name for u in node.users if u.op == "call_function")))
    op_graph = _op_graph(model, meta_copy, traced, notes, layouts, replicable)
    of_masks = {key for mask in masks.values() for key in mask.inputs}
    analysis = Analysis(
        op_graph=op_graph,
        nodes=structure_of(traced.graph),
        is_training=training,
        dtype=dtype_name(meta_copy.dtype) if meta_copy.dtype is not None else None,
        device_type=meta_copy.device.type,
        layer_lists=find_layer_lists(meta_copy.model),
        clusters=clusters,
        unpadded=tuple(sorted(of_masks.intersection(unpadded))),
        eager=eager,
        means=(*((RECORDED,) if traced.recording else ()), *((WHOLE_UNITS,) if pair is None else ())),
        # At one sample a cut along samples shows nowhere: [1, heads, ...] and [heads, ...] look alike.
        sharding=_sharding(traced if pair is None else pair[0], meta_copy, notes, layouts),
        carried=meta_copy.carried,
    )
    return assemble(traced, op_graph, meta_copy, analysis, masks)


def _sharding(traced: Traced, meta_copy: MetaCopy, notes: Mapping[str, Note], layouts: Layouts) -> Sharding:
    buffers = {p.name for p in meta_copy.parameters if p.is_buffer}
    parameters = {n: own for n, own in traced.parameters.items() if own not in buffers}
    called = {**traced.inputs, **traced.parameters}
    found = find_sharding(
        traced.graph,
        parameters=parameters,
        called=called,
        needs_gradient={name for name, note in notes.items() if note.requires_grad},
        styles=getattr(meta_copy.original, "_tp_plan", None) or {},
    )
    context, uncut = find_context(
        traced.graph,
        parameters=parameters,
        called=called,
        layouts=layouts.states,
        num_samples=traced.num_samples,
    )
    return dataclasses.replace(found, context=context, uncut=uncut)


def masks_of(traced: Traced, meta_copy: MetaCopy) -> MaskFinder:
    """Return what finds the masks of attention that eager models leave out where some entries hold ones only."""
    own = {name: key for name, key in traced.inputs.items() if key not in traced.received}
    where = tracing_device(meta_copy.device)
    candidates = mask_candidates(traced.graph)
    return MaskFinder(traced.graph, candidates, inputs=own, constants=traced.constants, traced_on=where)


def notes_of(
    traced: Traced,
    meta_copy: MetaCopy,
    masks: Mapping[str, Mask],
    unpadded: Collection[str],
    *,
    training: bool,
) -> dict[str, Note]:
    """Return what is found of each operator, with the costs of attention as it is for batches like the first one.

    Shapes are those of the capture: a bias that eager attention would add once for all samples has them here too, for
    that is what a stage sends where another stage adds it.
    """
    graph, unread = without_masks(traced.graph, masks, unpadded)
    notes = annotate(
        graph,
        meta_copy.mode,
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
        _check_loss(traced, notes, meta_copy)
    return notes


def _check_loss(traced: Traced, notes: Mapping[str, Note], meta_copy: MetaCopy) -> None:
    """Refuse a training loss that no backward starts from; a model without weights has nothing to train anyway."""
    own = [p for p in meta_copy.parameters if not p.is_buffer]
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
        f"the loss of {type(meta_copy.model).__name__} needs no gradient, so that nothing would train: {trained} of "
        f"its {len(own)} parameters take one; {why}"
    )


def _check_written(traced: Traced, notes: Mapping[str, Note], meta_copy: MetaCopy) -> None:
    """Refuse, or carry, what the forward writes and no stage would have.

    Raises:
        LeavesState: it is a tensor that a module holds and did not register; it is to be carried.
        CaptureError: it is of a module that is none of the model's, or has memory that another tensor has too.
    """
    written = written_placeholders(traced.graph, notes)
    constants = [tensor for name, tensor in traced.constants.items() if name in written]
    if constants:
        raise LeavesState(states_of_written(meta_copy.model, constants))
    own = {traced.parameters[name] for name in written if name in traced.parameters}
    own |= {p.name for p in meta_copy.parameters if p.requires_grad}
    for one, other in overlapping(meta_copy.original):
        if one in own or other in own:
            raise CaptureError(
                f"{type(meta_copy.original).__name__}: {one} and {other} are two tensors in the same memory, and a "
                "stage has each by itself: register one, and compute the other in forward (self.weight.t(), "
                "self.queue[0])"
            )


def assemble(
    traced: Traced, op_graph: OpGraph, meta_copy: MetaCopy, analysis: Analysis, masks: Mapping[str, Mask]
) -> CapturedGraph:
    """Return the capture of a trace, its operators on the device that they will run on."""
    logger.debug("captured %s: %d operators", op_graph.model, len(op_graph.nodes))
    # Traced for a device that this build of torch lacks, the graph says cpu wherever it will compute on that device.
    device, traced_on = meta_copy.device, tracing_device(meta_copy.device).type
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
    meta_copy: MetaCopy,
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
        read = (known.get(s.name, s.name) for s in node.all_input_nodes if s.op != "get_attr")
        nodes.append(
            OpNode(
                name=node.name,
                target=str(node.target),
                inputs=tuple(dict.fromkeys(read)),
                module=module_path(node),
                output=None if note.is_tuple else _spec(node.name, note, traced.num_samples, layout),
                **_costs(note),
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
        parameters=_with_written(meta_copy.parameters, traced, notes),
        nodes=tuple(nodes),
        loss=traced.loss,
        outputs=traced.outputs,
        couplings=tuple(describe_coupling(by_name[name], reason) for name, reason in layouts.reasons.items()),
        received=traced.received,
    )


def _costs(note: Note) -> dict[str, Any]:
    """Return the fields of an `OpNode` that another export changes, beside its output."""
    names = ("flops", "saved_bytes", "keeps", "kept_inside_bytes", "storage")
    return {name: getattr(note, name) for name in names}


def _with_written(
    parameters: Sequence[Parameter], traced: Traced, notes: Mapping[str, Note]
) -> tuple[Parameter, ...]:
    """Return parameters and buffers with a mark on those that the forward writes.

    Running statistics: the copies of a stage's replicas differ, and a checkpoint holds each rank's. Through views as
    well: a momentum encoder's weights are written through ``weight.data``.
    """
    placeholders = written_placeholders(traced.graph, notes)
    written = {traced.parameters.get(name) for name in placeholders}
    state = {traced.parameters.get(name) for name in placeholders if _reaches_result(traced.graph, name)}
    return tuple(
        dataclasses.replace(p, is_mutated=True, is_state=p.name in state) if p.name in written else p
        for p in parameters
    )


def _reaches_result(graph: fx.Graph, name: str) -> bool:
    """Return whether a result depends on what a placeholder holds.

    Not so on the statistics that a norm in train mode only updates, nor on a count of calls that nothing reads:

        running_mean ─► batch_norm(x, ..., running_mean, ...) ─► loss      count ─► add_
    """
    reached = {node for node in graph.nodes if node.name == name}
    for node in graph.nodes:
        sources = reached.intersection(node.all_input_nodes)
        if sources and not all(_is_statistic(node, source) for source in sources):
            reached.add(node)
    return any(node.op == "output" for node in reached)


def _is_statistic(node: fx.Node, source: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    arguments = dict(zip(names, node.args, strict=False)) | node.kwargs
    own = [name for name, value in arguments.items() if value is source]
    return bool(own) and set(own) <= {"running_mean", "running_var"}


def carried_over(reference: OpGraph, traced: Traced, notes: Mapping[str, Note]) -> OpGraph:
    """Return the reference's operators with the sizes and costs of another export."""
    # what tracing at another shape cannot change stays (names, modules, layouts, couplings); what it can is taken from
    # there: shapes, FLOPs, bytes
    samples = traced.num_samples
    nodes = []
    for old in reference.nodes:
        note = notes[old.name]
        output = None if old.output is None else _respec(old.output, note, samples)
        nodes.append(dataclasses.replace(old, output=output, **_costs(note)))
    names = {key: name for name, key in traced.inputs.items()}
    inputs = tuple(_respec(old, notes[names[old.name]], samples) for old in reference.inputs)
    return dataclasses.replace(reference, num_samples=samples, nodes=tuple(nodes), inputs=inputs)


def _respec(old: TensorSpec, note: Note, samples: int) -> TensorSpec:
    return dataclasses.replace(resized(old, note.shape, samples), requires_grad=note.requires_grad)


def _layout(layouts: Layouts, name: str, note: Note, samples: int) -> Layout:
    # Rows with outer > 1 are inside a cluster and on no edge; `Counted` values on an edge have one value a unit, as
    # their readers compute on whole units (`analysed`).
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


def find_layer_lists(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of containers whose children are layers, outer ones before inner ones.

    Module lists and dicts always are; a sequential is one if two of its children with parameters are of
    one class. A list of different modules that hold layer lists themselves (towers) only groups them.
    """
    # First all candidates, then without those that only hold different towers: ModuleDict(vision=ViT, text=GPT) with
    # layer lists in both is a namespace like any module, and so its towers' layers are the layers.
    found = []
    for path, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            found.append(path)
        elif isinstance(module, nn.Sequential):
            classes = Counter(type(c) for c in module.children() if any(True for _ in c.parameters()))
            if classes and max(classes.values()) > 1:
                found.append(path)
    lists = []
    for path in found:
        children = list(model.get_submodule(path).children())
        prefix = f"{path}." if path else ""
        inner = any(other != path and other.startswith(prefix) for other in found)
        is_namespace = inner and len(children) > 1 and len({type(c) for c in children}) == len(children)
        if not is_namespace:
            lists.append(path)
    return tuple(lists)
