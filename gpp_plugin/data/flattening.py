"""Several samples in one row without padding: `flatten`, a collator for models that keep such samples apart.

A row holds samples one behind the other. Positions begin anew with each, by which models of transformers that make
their masks with `masking_utils` know where a sample begins, and let it attend to itself alone (attention is then
block-diagonal). No label is given for a sample's first token, which nothing before it in its own sample predicts:

    samples        a b c    d e               mask   a b c d e
    input_ids      a b c d e                  a      x
    position_ids   0 1 2 0 1                  b      x x
    labels         - b c - e                  c      x x x
                                              d            x
                                              e            x x

Source: transformers, DataCollatorWithFlattening (release 5.23); M. Krell et al., Efficient sequence packing without
    cross-contamination (arXiv 2107.02027)
Tests: tests/data/test_flattening.py, tests/integrations/test_flattened.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpp_plugin.errors import ConfigError

IDS, MASK, LABELS, POSITIONS = "input_ids", "attention_mask", "labels", "position_ids"
UNLABELLED = -100
"""The label of a token that is not predicted."""


def flatten(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return samples as one row of tokens, ``[1, tokens]`` each entry; to be given as ``collate_fn``.

    Args:
        samples: dicts of tensors with one axis, of a sample's tokens: ``input_ids``, perhaps ``labels`` (its own tokens
            where it has none) and others; tokens that an ``attention_mask`` hides are left out.

    Raises:
        ConfigError: a sample has no tokens, or an entry that is not one value a token.
    """
    if not samples:
        raise ConfigError("flatten: no samples; give at least one to a unit")
    rows = [_row(sample) for sample in samples]
    keys = set(rows[0])
    if any(set(row) != keys for row in rows):
        found = sorted({tuple(sorted(row)) for row in rows})
        raise ConfigError(f"flatten: samples have unlike entries {found}; give all of them the same")
    lengths = [len(row[IDS]) for row in rows]
    ids = rows[0][IDS]
    first = [sum(lengths[:number]) for number in range(len(lengths))]
    flat: dict[str, Any] = {}
    # by methods of the tensors themselves: this layer knows no torch
    for key in sorted(keys):
        flat[key] = rows[0][key].new_empty((1, sum(lengths)))
        for begin, length, row in zip(first, lengths, rows, strict=True):
            flat[key][0, begin : begin + length] = row[key]
    flat[LABELS][0, first] = UNLABELLED
    flat[POSITIONS] = ids.new_tensor([[place for length in lengths for place in range(length)]])
    return flat


def _row(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a sample has for each of its tokens, with labels, and without its mask."""
    ids: Any = sample.get(IDS)
    if not hasattr(ids, "new_empty") or ids.ndim != 1 or not len(ids):
        raise ConfigError(
            f"flatten: a sample's {IDS} must be a tensor of at least one token, [tokens]; of a dataset of lists, "
            'set_format("torch") gives tensors'
        )
    for key, value in sample.items():
        if tuple(getattr(value, "shape", ())) != tuple(ids.shape):
            shape = list(value.shape) if hasattr(value, "shape") else type(value).__name__
            raise ConfigError(
                f"flatten: {key} is {shape}, and a sample has {len(ids)} tokens; only entries of one value a token can "
                "lie in one row: leave it out, or pad samples in place of packing them"
            )
    row = {LABELS: ids, **{key: value for key, value in sample.items() if key != POSITIONS}}
    mask = row.pop(MASK, None)
    if mask is not None:
        row = {key: value[mask != 0] for key, value in row.items()}
        if not len(row[IDS]):
            raise ConfigError(
                f"flatten: a sample's {MASK} hides all of its {len(ids)} tokens; leave such samples out"
            )
    return row
