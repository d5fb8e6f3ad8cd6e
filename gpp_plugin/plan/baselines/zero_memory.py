"""What ZeRO's data parallelism needs of a device, for comparison with pipelines of the same model.

Every rank computes its share of the samples through the whole model (Rajbhandari et al., 2020):

    stage 2   parameters whole; gradients and optimizer state shared out
    stage 3   parameters too; the layer in use and the next one are gathered
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpp_plugin.plan.memory.operator_chain import OperatorChain


def zero_memory_bytes(
    chain: OperatorChain, *, num_ranks: int, zero_stage: int, bounds: Sequence[int]
) -> float:
    """Return the peak of one rank that computes the chain's samples at a time.

    Args:
        bounds: where layers begin, and the number of operators.

    Raises:
        ValueError: ``zero_stage`` is neither 2 nor 3.
    """
    if zero_stage not in (2, 3):
        raise ValueError(f"zero_stage is {zero_stage}; this model has 2 and 3")
    num = chain.num_blocks
    parameters = float(chain.parameters[num])
    shared = chain.held_bytes(0, num, 1) - parameters
    if zero_stage == 2:
        held = parameters + shared / num_ranks
    else:
        layers = np.diff(chain.parameters[list(bounds)])
        held = (parameters + shared) / num_ranks + 2 * float(layers.max(initial=0.0))
    return held + chain.saved_bytes(0, num) + chain.transient(0, num)
