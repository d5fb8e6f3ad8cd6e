"""Which operators every stage may compute for itself instead of receiving their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from gpp_plugin.capture.annotate import Note, written_placeholders
from gpp_plugin.capture.eager.opaque_call import OpaqueCall
from gpp_plugin.capture.layout.inseparable import operator_sources, ordered_units
from gpp_plugin.capture.layout.layout_rules import Counted
from gpp_plugin.capture.layout.layouts import Layouts, is_random
from gpp_plugin.capture.tracing.traced import Traced

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
