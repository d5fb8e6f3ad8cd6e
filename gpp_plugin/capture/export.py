"""Capture a model for the first time: the exports that an analysis is made of, and the eager submodules."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from gpp_plugin.capture.analyse_traced import analysed
from gpp_plugin.capture.captured_graph import CapturedGraph
from gpp_plugin.capture.eager.trial_run import (
    GLOBAL_HOOKS,
    MAX_ATTEMPTS,
    Untraceable,
    find_eager_modules,
    has_hooks,
    hooked_modules,
    is_within,
    lacks_values,
    with_culprit,
    without_inner,
)
from gpp_plugin.capture.mask_values import inputs_of_ones
from gpp_plugin.capture.tracing.carried_state import LeavesState, refused
from gpp_plugin.capture.tracing.meta_copy import MetaCopy, check_float_types, make_meta_copy
from gpp_plugin.capture.tracing.outside import Draws, check_draws
from gpp_plugin.capture.tracing.sample_batches import WholeUnit, resize_batch, rows_per_sample
from gpp_plugin.capture.tracing.torch_export import Call, call_by_key
from gpp_plugin.capture.tracing.traced import Exported, Traced, align, structure_of, trace
from gpp_plugin.errors import CaptureError
from gpp_plugin.ir.analysis import CarriedState

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
    hooked = hooked_modules(model)
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
            if error.culprit or _reads_own_state(model, error, states):
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


def _reads_own_state(model: nn.Module, error: Untraceable, states: Mapping[str, CarriedState]) -> bool:
    """Return whether the Python of the model itself reads what it keeps: it then runs as one block.

    For other values the error advises to move what reads them into a module of its own: the rest is then cut.
    """
    keeps = error.is_of_state or bool(model._buffers) or any(state.tensors for state in states.values())
    return keeps and lacks_values(error)


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
        traced = _trace_with_values(export, batch, meta_copy, failure)
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


def _trace_with_values(
    export: Callable[..., Traced], batch: Mapping[str, Any], meta_copy: MetaCopy, error: CaptureError
) -> Traced:
    """Return the model traced with what its Python reads of the batch.

    Raises:
        CaptureError: it cannot be; ``error``, that of the export without, where values are not what it lacks.
    """
    try:
        traced = _first(functools.partial(export, reads=batch), batch, meta_copy)
    except CaptureError as other:
        raise (other if lacks_values(error) and not lacks_values(other) else error) from None
    assert traced.recording is not None
    return traced


def _aligned(small: Traced, traced: Traced) -> Traced:
    return traced if traced is small else align(structure_of(small.graph), traced)
