"""How long ranks wait for each other outside of a single message: by the plan's own times, not the limit of a message.

Source: this project
Tests: tests/runtime/test_time_limits.py
"""

from __future__ import annotations

from gpp_plugin.ir.plan import PipelinePlan

LEAST_COLLECTIVE_S = 600.0
"""No collective gives up sooner: the first mini-batch of a shape captures, compiles and loads kernels on its way."""

SLOWNESS = 10.0
"""How many times longer than predicted a mini-batch may take before its ranks are given up."""


def collective_timeout_s(plan: PipelinePlan | None, comm_timeout_s: float) -> float:
    """Return the limit, in seconds, of whatever may wait for as long as a whole mini-batch takes.

    These are all sums over ranks, and every communicator of NCCL, those of messages among them. A rank that is through
    early asks for the gradients' norm, and waits while the others run the rest of the mini-batch. A receive that is
    posted for the last stage waits while its sender's own inputs travel through all stages before it. NCCL's watchdog
    counts from when an operation was posted and ends the process at the limit, so that the limit of a message,
    ``comm_timeout_s``, holds on gloo alone, where a wait is the host's and says which message did not come.

    Args:
        plan: None where there is none yet.
        comm_timeout_s: the configuration's; a longer one than follows from the plan is honoured.
    """
    # A plan of 200 s a mini-batch: 2000 s. One of 3 s: 600 s. One without a predicted time (a saved plan of another
    # release): by the busiest stage's own tasks, which no mini-batch is shorter than.
    if plan is None:
        return max(LEAST_COLLECTIVE_S, comm_timeout_s)
    busy_us = [
        plan.num_micro_batches(index) * (stage.forward_us + stage.backward_us)
        for index, stage in enumerate(plan.stages)
    ]
    predicted_us = max([plan.iteration_us, *busy_us])
    return max(LEAST_COLLECTIVE_S, comm_timeout_s, SLOWNESS * predicted_us / 1e6)
