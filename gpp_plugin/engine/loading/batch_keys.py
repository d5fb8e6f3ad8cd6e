"""The keys of a batch: those that the model was captured with, and those of its tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gpp_plugin.errors import ConfigError
from gpp_plugin.runtime.batches import (
    Batch,
)


def check_keys(batch: Batch, keys: frozenset[str]) -> None:
    """Refuse a batch of other keys than the model was captured with.

    Raises:
        ConfigError: says which.
    """
    if batch.keys() != keys:
        parts = (("lacks", keys - batch.keys()), ("also has", batch.keys() - keys))
        differ = " and ".join(f"{verb} {sorted(names)}" for verb, names in parts if names)
        raise ConfigError(
            f"a batch {differ}, unlike the one the model was captured with; give train_batch() the same keys as "
            "the sample batch (by default the first of training_data)"
        )


def inputs_of(batch: Batch) -> frozenset[str]:
    """Return the keys of a batch's tensors."""
    return frozenset(key for key, value in batch.items() if isinstance(value, Tensor))


def own_inputs(unit: Batch, keys: frozenset[str], inputs: frozenset[str]) -> dict[str, Any]:
    """Return a loss unit with the inputs that it has: it may lack some, or have None for them.

    Args:
        keys: of the batch that the model was captured with; ``inputs`` those of its tensors.

    Raises:
        ConfigError: it has other keys, or lacks what is no tensor.
    """
    own = {key: value for key, value in unit.items() if value is not None or key not in inputs}
    check_keys(own, keys - (inputs - own.keys()))
    return own
