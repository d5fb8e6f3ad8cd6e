"""What several devices show, one rank each: 2, 4 and 8 of them, as many as there are."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu import checks
from tests.gpu.lab import Lab
from tests.runtime import jobs
from tests.runtime.test_equality import job

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(0)]
COUNTS = (2, 4, 8)
CONNECTIONS = (1, 8, 32)
DIAMOND = ("stem", "up", "down", "*")
TENSOR_GRAPHS = {4: "tensor_on_four", 8: "tensor_on_eight"}


@pytest.fixture(params=COUNTS, ids=lambda count: f"{count}-devices")
def many(request: pytest.FixtureRequest, lab: Lab) -> int:
    """Return a number of ranks, each on a device of its own."""
    if request.param > len(lab.devices):
        pytest.skip(f"needs {request.param} devices and there are {len(lab.devices)}")
    return int(request.param)


def tasks_on(num_ranks: int, *, zero: int = 0, **block: Any) -> list[jobs.Job]:
    """Return jobs in two to four stages, data-parallel where ranks are left: chains, branches, a tie, a skip."""
    stages = min(num_ranks, 4)
    given = {"mini_batch": 16, "zero": zero, **block}
    return [
        job("clip", stages=stages, **given),
        job("t5", stages=stages, **given),
        job("gpt2", stages=min(stages, 3) if num_ranks < 4 else 2, **given),
        job("dlrm", stages=stages, **given),
    ]


def diamond_on(num_ranks: int, zero: int, p2p: str) -> jobs.Job:
    """Return the job of a diamond whose edges Megatron can carry: stages of ranks in equal parts."""
    groups = [("stem",), ("*",)] if num_ranks == 2 else [(name,) for name in DIAMOND]
    size = num_ranks // len(groups)
    stages = [
        {"modules": list(modules), "ranks": list(range(i * size, (i + 1) * size))}
        for i, modules in enumerate(groups)
    ]
    block = {"plan": {"stages": stages}, "slicing": "off", "p2p": p2p}
    return {"model": "diamond", "mini_batch": 16, "unit": 2, "zero": zero, "block": block}


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_native_transport_equals_the_plain_model(lab: Lab, many: int, zero: int) -> None:
    checks.equality(lab, many, tasks_on(many, zero=zero), f"{many} devices, ZeRO {zero}", num_devices=many)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_megatron_transport_equals_the_plain_model_and_the_native_one(lab: Lab, many: int, zero: int) -> None:
    pytest.importorskip("megatron.core")
    tasks = [diamond_on(many, zero, p2p) for p2p in ("native", "megatron")]
    what = f"diamond over both transports, {many} devices, ZeRO {zero}"
    native, megatron = checks.equality(lab, many, tasks, what, num_devices=many)
    assert megatron[0]["transport"] == "MegatronTransport" != native[0]["transport"]
    assert megatron[0]["losses"] == pytest.approx(native[0]["losses"], rel=1e-6)


@pytest.mark.parametrize("zero", [0, 1])
def test_tensor_parallel_stages(lab: Lab, many: int, zero: int) -> None:
    if many not in TENSOR_GRAPHS:
        pytest.skip("a graph with a tensor-parallel stage between others needs 4 devices or 8")
    checks.tensor_parallel(lab, many, TENSOR_GRAPHS[many], zero, num_devices=many)


@pytest.mark.parametrize("connections", CONNECTIONS)
def test_any_number_of_hardware_queues(lab: Lab, many: int, connections: int) -> None:
    # Rank by rank the launches share that many queues: whatever order holds on one must not need a second.
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": str(connections)}
    what = f"{many} devices, CUDA_DEVICE_MAX_CONNECTIONS={connections}"
    checks.equality(lab, many, tasks_on(many), what, num_devices=many, environment=variables)


def test_int16_between_stages(lab: Lab, many: int) -> None:
    stages = [{"modules": ["stem"]}, {"modules": ["*"]}]
    block = {"plan": {"stages": stages}, "data_parallel": many // 2}
    task = {"model": "short_edges", "mini_batch": 16, "unit": 2, "block": block}
    checks.equality(lab, many, [task], f"an int16 tensor between stages, {many} devices", num_devices=many)


def test_evaluation(lab: Lab, many: int) -> None:
    checks.evaluation(lab, many, num_devices=many)


def test_tracing(lab: Lab, many: int) -> None:
    checks.tracing(lab, many, num_devices=many)


def test_mode_async(lab: Lab, many: int) -> None:
    checks.mode_async(lab, many, num_devices=many)


def test_no_task_reads_the_device(lab: Lab, many: int) -> None:
    checks.no_reads(lab, many, num_devices=many)


@pytest.mark.parametrize("zero", [0, 2])
def test_training_fits_what_is_predicted(lab: Lab, many: int, zero: int) -> None:
    checks.capped_memory(lab, many, zero=zero, num_devices=many)


def test_demo_and_bench_memory_on_devices_of_their_own(lab: Lab, many: int) -> None:
    if many != 4:
        pytest.skip("the demo has four ranks")
    checks.demo(lab, num_devices=many)
    few = ["--models", "gpt2", "--plans", "none"] if lab.is_dry else []
    checks.bench_memory(lab, *few, num_devices=many)
