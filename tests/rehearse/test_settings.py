"""What is refused before a process starts, and how tensors are scaled."""

import dataclasses

import pytest

from gpp_benchmarks._emulated_graphs import chain_links, emulated_plan
from gpp_plugin.cli import main
from gpp_plugin.errors import ConfigError, PlanError
from gpp_plugin.ir.plan import StageEdge
from gpp_plugin.ir.serialize import save
from gpp_plugin.ir.tensors import UNIFORM, TensorSpec, batch_layout
from gpp_plugin.rehearse.rehearsal import (
    RehearsalSettings,
    check_memory,
    check_rehearsable,
    message_memory_bytes,
    scale_tensors,
    scale_times,
)
from tests.plan.graphs import with_stage


@pytest.fixture
def plan():
    return emulated_plan("chain", chain_links(3), num_micro_batches=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps: 0 is not valid; give at least 1"),
        ({"scale_time": 0.0}, "scale_time: 0 is not valid; give a number above 0"),
        ({"scale_bytes": float("nan")}, "scale_bytes: nan is not valid; give a number above 0"),
        ({"comm_timeout_s": 0.0}, "timeout_s: 0 is not valid; give seconds above 0"),
    ],
)
def test_settings_are_checked(options, message):
    with pytest.raises(ConfigError) as raised:
        RehearsalSettings(**options)
    assert str(raised.value) == message


def test_ranks_must_be_all_of_zero_to_the_last(plan):
    with pytest.raises(PlanError, match=r"ranks are 0, 1, 3; they must be 0\.\.2 .*rank 3"):
        check_rehearsable(with_stage(plan, 2, ranks=(3,)))
    check_rehearsable(with_stage(plan, 2, ranks=(1,)))  # two stages may share a rank
    with pytest.raises(PlanError, match=r"lists rank 2 twice; keep one"):
        check_rehearsable(with_stage(plan, 2, ranks=(2, 2)))


def test_times_and_shapes_must_be_there(plan):
    with pytest.raises(PlanError, match="no forward_us; make the plan with gpp plan --out"):
        check_rehearsable(scale_times(plan, 0.0))
    with pytest.raises(PlanError, match=r"stage 'stage1' takes 20000.0 and -1.0 us"):
        check_rehearsable(with_stage(plan, 1, backward_us=-1.0))
    with pytest.raises(PlanError, match="edge 0 sends 'x0', whose shape the plan does not hold"):
        check_rehearsable(dataclasses.replace(plan, tensors=()))
    odd = dataclasses.replace(plan.tensors[0], dtype="float7")
    with pytest.raises(PlanError, match=r"tensor 'x0' has dtype 'float7'; the dtypes are float64, .*bool"):
        check_rehearsable(dataclasses.replace(plan, tensors=(odd, *plan.tensors[1:])))


def test_a_plan_that_cannot_be_rehearsed_is_named_with_its_file(plan, tmp_path, capsys):
    path = tmp_path / "plan.json"
    save(with_stage(plan, 0, ranks=(7,)), path)
    assert main(["rehearse", str(path)]) == 1
    assert capsys.readouterr().err.startswith(f"gpp rehearse: {path}: the plan's ranks are 1, 2, 7;")


SPEC = TensorSpec(name="x", dtype="bfloat16", shape=(6, 4, 5), num_samples=4, layout=batch_layout(1))
BIAS = TensorSpec(name="bias", dtype="float32", shape=(1, 3, 7), num_samples=4, layout=UNIFORM)
EMPTY = TensorSpec(name="none", dtype="float32", shape=(4, 0), num_samples=4, layout=batch_layout(0))


def test_tensors_keep_their_shapes_at_full_size_and_scale_by_elements(plan):
    plan = dataclasses.replace(plan, tensors=(SPEC, BIAS, EMPTY))
    assert scale_tensors(plan, 1.0) == {"x": SPEC, "bias": BIAS, "none": EMPTY}
    half = scale_tensors(plan, 0.5)
    assert half["x"].shape_for(2) == (2, 15)
    assert half["x"].bytes_for(4) * 2 == SPEC.bytes_for(4)
    assert half["bias"].shape_for(2) == (10,)  # 10.5 rounded to even; the same for any samples
    assert half["bias"].layout == UNIFORM
    assert half["none"].bytes_for(4) == 0
    assert scale_tensors(plan, 1e-9)["x"].shape_for(2) == (2, 1)


def test_messages_that_do_not_fit_are_refused_with_what_would(plan):
    settings = RehearsalSettings()
    # Two edges of 64 KiB a micro-batch: senders hold one and its gradient, receivers hold two and
    # one micro-batches in flight and a gradient each.
    assert [s.in_flight for s in plan.stages] == [3, 2, 1]
    needed = 65536 * (2 + 3 + 2 + 2)
    assert message_memory_bytes(plan, settings) == needed
    check_memory(plan, settings, needed / 0.8)
    for free, advice in ((needed / 0.8 / 1.9, "0.5"), (needed / 0.8 / 300, "0.003")):
        with pytest.raises(ConfigError, match=f"0.0 GiB free; write scale_bytes {advice}$"):
            check_memory(plan, settings, free)
    with pytest.raises(ConfigError, match="write scale_bytes 40.0$"):
        check_memory(
            plan, RehearsalSettings(scale_bytes=1000.0), message_memory_bytes(plan, RehearsalSettings()) * 61
        )


def test_whole_tensors_count_as_messages_too(plan):
    edge = StageEdge(src=0, dst=1, whole_tensors=("bias",))
    plan = dataclasses.replace(plan, edges=(edge,), tensors=(BIAS,))
    assert message_memory_bytes(plan, RehearsalSettings()) == BIAS.bytes_for(1) * (2 + 3)
