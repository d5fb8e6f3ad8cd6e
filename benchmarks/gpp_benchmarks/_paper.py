"""The settings of GraphPipe's evaluation: models, mini-batches (appendix A.2), the Summit-like cluster."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.library.analytic_models import AnalyticModel, profile_model
from gpp_plugin.library.paper_graphs import build_model
from gpp_plugin.plan.cluster_files import read_cluster
from gpp_plugin.plan.request import PlanRequest

SAMPLES_PER_DEVICE = {"mmt": 16, "dlrm": 64, "candle_uno": 1024, "transformer": 16, "two_branch": 16}
"""Appendix A.2: mini-batches of 64/256/4096 at 4 devices, in proportion at 8, 16 and 32."""
PAPER_MODELS = ("mmt", "dlrm", "candle_uno")
PAPER_DEVICES = (4, 8, 16, 32)


def paper_request(
    model: str | AnalyticModel,
    devices: int,
    *,
    cluster: str = "summit",
    mini_batch: int | None = None,
    micro_batch_size: int | None = None,
) -> PlanRequest:
    """Return the request of one cell of the paper's tables."""
    name = model if isinstance(model, str) else model.graph.model
    if isinstance(model, str):
        model = build_model(name)
    machines = read_cluster(cluster, num_devices=devices)
    batch = mini_batch or SAMPLES_PER_DEVICE.get(name, 16) * devices
    return PlanRequest(
        graph=model.graph,
        profile=profile_model(model, machines.devices[0], largest=batch),
        cluster=machines,
        num_ranks=devices,
        mini_batch=batch,
        loss_unit=1,
        micro_batch_sizes={"*": micro_batch_size} if micro_batch_size else None,
    )


def searched(limit: float, search: Callable[[], PipelinePlan]) -> tuple[PipelinePlan | None, str]:
    """Return the plan of a search and ``ok``, or None and why there is none.

    Args:
        limit: seconds that the search may compute.
    """
    try:
        with time_limit(limit):
            return search(), "ok"
    except TimeoutError:
        return None, f"timeout after {limit:g} s"
    except PlanError as error:
        return None, str(error)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread after it has computed for ``seconds``, whatever else the machine does."""

    def ring(signum: int, frame: object) -> None:
        raise TimeoutError

    previous = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)
