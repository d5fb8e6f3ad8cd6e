"""Forwards on backends: equal to torch, refused in one line where they are not, measured once, mixed where asked."""

from __future__ import annotations

import logging
import operator
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from gpp_plugin.backends.forward_code import ForwardCode
from gpp_plugin.backends.measured_backends import (
    BackendLog,
    build_checked,
    build_forward,
    measure_backends,
)
from gpp_plugin.backends.place_forward import CuttableForward, choose_single, place_forward, placed_groups
from gpp_plugin.backends.stage_backends import (
    BackendForward,
    StageBackends,
    check_backends_installed,
    check_stages,
    describe,
    forward_code,
    requested_backends,
)
from gpp_plugin.collage.patterns import BasePatternRule, is_op
from gpp_plugin.errors import BackendRefused, ConfigError
from gpp_plugin.ir.profile import BackendCost, PlacedGroup, StageBackend
from gpp_plugin.plugins import BACKENDS, Backend, find_backend
from gpp_plugin.runtime.stage_module import StageFunction

aten = torch.ops.aten


class Graph:
    """Generated code written down by hand: weights first, then what changes."""

    def __init__(self, *shapes: tuple[int, ...], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.graph = fx.Graph()
        self.weights = tuple(torch.randn(shape, generator=generator) * 0.5 for shape in shapes)
        self.held = [self.graph.placeholder(f"weight_{i}") for i in range(len(shapes))]
        self.given: list[Tensor] = []

    def take(self, tensor: Tensor) -> fx.Node:
        self.given.append(tensor)
        return self.graph.placeholder(f"input_{len(self.given)}")

    def call(self, target: Any, *args: Any) -> fx.Node:
        return self.graph.call_function(target, args)

    def code(self, *outputs: fx.Node, dtype: torch.dtype = torch.float32) -> ForwardCode:
        self.graph.output(outputs)
        return ForwardCode(
            name="tower",
            module=fx.GraphModule(nn.Module(), self.graph),
            bound=(),
            parameters=tuple(weight.to(dtype) for weight in self.weights),
            examples=tuple(tensor.to(dtype) for tensor in self.given),
        )


def make_tower(samples: int = 2, seed: int = 0, dtype: torch.dtype = torch.float32) -> ForwardCode:
    """A convolution, something like attention, two outputs; a tuple, and a size, on the way."""
    own = Graph((8, 1, 2, 2), (8,), (24, 8), (24,), (8,), (8,), seed=seed)
    call, held = own.call, own.held
    pixels = own.take(torch.randn(samples, 1, 8, 8, generator=torch.Generator().manual_seed(seed)))
    patches = call(aten.conv2d.default, pixels, held[0], held[1], [2, 2])
    size = call(aten.sym_size.int, patches, 1)
    hidden = call(aten.transpose.int, call(aten.flatten.using_ints, patches, 2), 1, 2)
    parts = call(aten.chunk.default, call(aten.linear.default, hidden, held[2], held[3]), 3, -1)
    a, b, c = (call(operator.getitem, parts, i) for i in range(3))
    scores = call(aten.div.Tensor, call(aten.matmul.default, a, call(aten.transpose.int, b, 1, 2)), size)
    mixed = call(aten.matmul.default, call(aten.softmax.int, scores, -1), c)
    added = call(aten.add.Tensor, call(aten.relu.default, mixed), hidden)
    out = call(aten.layer_norm.default, added, [8], held[4], held[5])
    return own.code(out, call(aten.mean.dim, out, [1]), dtype=dtype)


@pytest.fixture(scope="module")
def tower() -> ForwardCode:
    return make_tower()


def require(name: str) -> None:
    reason = find_backend(name).missing()
    if reason:
        pytest.skip(reason)


def make_layer() -> ForwardCode:
    """One operator after another, for a compiler that takes seconds for each kernel."""
    own = Graph((8, 1, 2, 2), (8,))
    patches = own.call(aten.conv2d.default, own.take(torch.randn(2, 1, 8, 8)), *own.held, [2, 2])
    out = own.call(aten.relu.default, patches)
    return own.code(out, own.call(aten.add.Tensor, out, 1.0))


@pytest.mark.parametrize("name", BACKENDS.built_in)
def test_each_gives_what_torch_gives_and_stays_as_it_is(name: str, tower: ForwardCode) -> None:
    require(name)
    tower = make_layer() if name == "inductor" else tower
    expected = tower.run(*tower.examples)
    built = build_checked(lambda: build_forward(name, tower), tower.examples, expected)
    assert built.error <= 1e-5 and built.build_s > 0
    other = torch.randn(2, 1, 8, 8)
    first = built(*tower.examples)
    second = built(other)
    for own, right in zip((*first, *second), (*expected, *tower.run(other)), strict=True):
        assert torch.allclose(own, right, rtol=1e-4, atol=1e-5), "an earlier result was written over"


def test_frozen_code_takes_what_changes_and_nothing_else(tower: ForwardCode) -> None:
    assert [n.name for n in tower.frozen.graph.nodes if n.op == "placeholder"] == ["input_0"]
    for own, right in zip(tower.frozen(*tower.examples), tower.run(*tower.examples), strict=True):
        assert torch.equal(own, right)


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_a_tensor_that_no_operator_reads_is_left_out(name: str) -> None:
    """A mask of a batch that is not padded."""
    require(name)
    own = Graph((8, 4))
    own.take(torch.ones(2, 4))
    hidden = own.take(torch.randn(2, 4))
    code = own.code(own.call(aten.relu.default, own.call(aten.linear.default, hidden, own.held[0])))
    built = build_checked(lambda: build_forward(name, code), code.examples, code.run(*code.examples))
    mask, other = torch.zeros(2, 4), torch.randn(2, 4)
    torch.testing.assert_close(built(mask, other), code.run(mask, other))


@pytest.mark.parametrize("cut", [(1,), (3, 6), (2, 5, 9)])
def test_a_forward_in_groups_is_the_whole(tower: ForwardCode, cut: tuple[int, ...]) -> None:
    forward = CuttableForward(tower)
    size = len(forward.graph.operators)
    ends = [0, *cut, size]
    groups = [("torch", sum(1 << i for i in range(a, b))) for a, b in zip(ends, ends[1:], strict=False)]
    run = forward.build(groups, build_forward)
    for own, right in zip(run(*tower.examples), tower.run(*tower.examples), strict=True):
        assert torch.equal(own, right)
    placed = placed_groups(forward, groups)
    assert CuttableForward(tower).groups(placed) == groups
    with pytest.raises(BackendRefused, match="has no operator 'gone' at these shapes"):
        forward.groups([PlacedGroup(backend="torch", operators=("gone",))])


# ---- what is refused ----------------------------------------------------------------------------------------


class Wrong(Backend):
    """Gives something else than torch."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self._change = change

    def build(self, code: ForwardCode) -> Any:
        return lambda *tensors: self._change(code.run(*tensors))


def fail(*_: Any) -> Any:
    raise RuntimeError("No conversion rule found for operations: aten::softmax")


@pytest.mark.parametrize(
    ("backend", "text"),
    [
        (Wrong(lambda out: (out[0] * 1.001, out[1])), r"output 0 differs by 1\.0e-03 of its norm, more than 1e-05"),
        (Wrong(lambda out: out[:1]), "it returns 1 tensors of 2"),
        (Wrong(lambda out: (out[0], out[1].double())), r"output 1 is \(2, 8\) torch.float64"),
        (Wrong(lambda out: (out[0] / 0, out[1])), "output 0 is not finite where torch's is"),
        (Wrong(fail), "its first run failed: RuntimeError: No conversion rule"),
    ],
)  # fmt: skip
def test_a_result_that_differs_is_refused(tower: ForwardCode, backend: Backend, text: str) -> None:
    with BACKENDS.lent("wrong", backend):
        costs = measure_backends(tower, ["wrong"], rounds=1)
        assert not costs["torch"].refused and costs["torch"].us > 0
        with pytest.raises(BackendRefused, match=text):
            raise BackendRefused(costs["wrong"].refused)


def test_a_conversion_that_fails_names_the_operator(tower: ForwardCode) -> None:
    class Unable(Backend):
        def build(self, code: ForwardCode) -> Any:
            fail()

    with BACKENDS.lent("unable", Unable()), pytest.raises(BackendRefused) as caught:
        build_forward("unable", tower)
    assert re.fullmatch(r"operator softmax\w* \(aten\.softmax\.int\): RuntimeError", str(caught.value))


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        ([(aten.dropout.default, 0.5, True)], r"aten\.dropout\.default\) draws random numbers"),
        ([(aten.batch_norm.default, None, None, "held", "held", True, 0.1, 1e-5, False)], "updates its running statistics"),
        ([(aten.relu_.default,)], r"aten\.relu_\.default\) writes into its operands"),
        ([(aten.view.default, [12]), (aten.relu_.default,)], "writes into its operands"),
        ([(aten.nonzero.default,)], "depends on values"),
    ],
)  # fmt: skip
def test_code_that_no_backend_may_run(calls: list[Any], text: str) -> None:
    own = Graph((4,))
    last = own.take(torch.randn(3, 4))
    for target, *rest in calls:
        last = own.call(target, last, *(own.held[0] if value == "held" else value for value in rest))
    code = own.code(last)
    with pytest.raises(BackendRefused, match=text):
        raise BackendRefused(code.refusal())
    assert measure_backends(code, ["inductor"])["inductor"].refused == code.refusal()


def test_what_is_written_inside_may_stay_but_is_not_cut() -> None:
    own = Graph((4, 4))
    made = own.call(aten.linear.default, own.take(torch.randn(3, 4)), own.held[0])
    code = own.code(own.call(aten.relu_.default, made))
    assert code.refusal() == ""
    with pytest.raises(BackendRefused, match="writes into a tensor: it is not cut"):
        CuttableForward(code)


def test_dropout_that_drops_nothing_is_left_out_of_frozen_code() -> None:
    own = Graph()
    code = own.code(own.call(aten.dropout.default, own.take(torch.randn(3)), 0.5, False))
    assert code.refusal() == "" and not [n for n in code.frozen.graph.nodes if n.op == "call_function"]


def test_half_precision_and_other_devices_are_refused_by_inference_backends(tower: ForwardCode) -> None:
    half = make_tower(dtype=torch.bfloat16)
    for name in ("onnxruntime", "openvino"):
        assert find_backend(name).refusal(half) == "runs float32 alone, and the stage has bfloat16"
        assert find_backend(name).refusal(tower) == ""


# ---- measured once, chosen, mixed ----------------------------------------------------------------------------


class Counting(Backend):
    """Torch under another name, which counts how often it builds, and may run parts alone."""

    def __init__(self, *, whole: bool = True) -> None:
        self.is_graph_library = whole
        self.built = 0

    def build(self, code: ForwardCode) -> Any:
        self.built += 1
        return code.run


def test_the_log_measures_once_and_again_where_the_version_is_another(
    tower: ForwardCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting, log = Counting(), BackendLog(tmp_path)
    with BACKENDS.lent("counting", counting):
        first = measure_backends(tower, ["counting"], log=log, rounds=1)
        assert measure_backends(tower, ["counting"], log=BackendLog(tmp_path), rounds=1) == first
        assert counting.built == 1
        monkeypatch.setattr(counting, "version", lambda: "2", raising=False)
        measure_backends(tower, ["counting"], log=log, rounds=1)
        assert counting.built == 2
        for path in tmp_path.iterdir():
            path.write_text("{")
        measure_backends(tower, ["counting"], log=log, rounds=1)
        assert counting.built == 3


def cost(backend: str, us: float, refused: str = "") -> BackendCost:
    return BackendCost(backend=backend, us=us, refused=refused)


@pytest.mark.parametrize(
    ("costs", "backend"),
    [
        ([cost("torch", 100), cost("a", 60), cost("b", 50)], "b"),
        ([cost("torch", 100), cost("a", 97)], "torch"),
        ([cost("torch", 100), cost("a", 0, "cannot"), cost("b", 80)], "b"),
        ([cost("torch", 100), cost("a", 0, "cannot")], "torch"),
    ],
)
def test_the_fastest_is_chosen_if_it_wins_by_more_than_noise(costs: list[BackendCost], backend: str) -> None:
    assert choose_single("tower", costs).backend == backend


class Fuses(BasePatternRule):
    """Runs relu and additions, joined where they touch."""

    def op_rule(self, op: Any) -> bool:
        return op.name in ("relu", "add")

    def fusion_rule(self, cur_type: int, src: Any, sink: Any) -> bool:
        return True


def test_a_backend_of_patterns_alone_is_placed_by_both_levels(tower: ForwardCode) -> None:
    """Every other backend sleeps, so that a mix of torch and the one of patterns is fastest, or torch by itself."""
    counting = Counting(whole=False)
    counting.patterns = (is_op("layer_norm"), is_op("gelu"))
    counting.pattern_rules = (Fuses(),)
    with BACKENDS.lent("counting", counting):
        chosen = place_forward(tower, ["counting"])
    assert counting.built >= 3, "layer_norm, relu, add were measured on it"
    assert chosen.backend in ("torch", "torch + counting", "counting + torch") and chosen.us > 0
    assert chosen.notes[0] == "pattern gelu of backend 'counting' matches nothing here"
    assert "placements measured end to end" in chosen.notes[-1]


# ---- taking over in a stage ------------------------------------------------------------------------------------


def stage_function(code: ForwardCode) -> StageFunction:
    return StageFunction(
        call=code.module.forward,
        tensors=tuple(f"w{i}" for i in range(len(code.parameters))),
        constants=(),
        batch_inputs=("pixels",),
        received=(),
        outputs=("out", "mean"),
        code="",
        module=code.module,
    )


def placed_on(backend: str) -> StageBackends:
    return StageBackends({"tower": StageBackend(stage="tower", groups=(PlacedGroup(backend=backend),))})


def running_on(backends: StageBackends, code: ForwardCode) -> BackendForward:
    forward = backends.forward("tower", stage_function(code), code.parameters)
    assert isinstance(forward, BackendForward)
    return forward


class Baked(Counting):
    """Copies the weights when it builds, and writes all its results into the same memory."""

    def build(self, code: ForwardCode) -> Any:
        super().build(code)
        held = tuple(p.detach().clone() for p in code.parameters)
        places: list[Tensor] = []

        def run(*tensors: Tensor) -> list[Tensor]:
            made = code.module(*held, *tensors)
            if not places:
                places.extend(torch.empty_like(t) for t in made)
            return [place.copy_(t) for place, t in zip(places, made, strict=True)]

        return run


@torch.no_grad()
def test_it_takes_over_copies_what_is_overwritten_and_follows_the_weights() -> None:
    code = make_tower(seed=1)
    inputs = [torch.randn(2, 1, 8, 8) for _ in range(3)]
    baked = Baked()
    with BACKENDS.lent("baked", baked):
        forward = running_on(placed_on("baked"), code)
        assert not forward.is_taken
        found = [forward(*code.parameters, x) for x in inputs]
        assert forward.is_taken and baked.built == 1
        for own, x in zip(found, inputs, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(own, code.run(x), strict=True))
        code.parameters[0].mul_(2.0)  # a checkpoint was loaded
        for x in inputs[:2]:
            own = forward(*code.parameters, x)
            assert all(torch.equal(a, b) for a, b in zip(own, code.run(x), strict=True))
        assert baked.built == 2


def test_what_differs_or_fails_leaves_the_stage_on_torch_with_one_warning(
    tower: ForwardCode, caplog: pytest.LogCaptureFixture
) -> None:
    backends = placed_on("wrong")
    with BACKENDS.lent("wrong", Wrong(lambda out: (out[0] + 1, out[1]))), caplog.at_level(logging.WARNING):
        forward = running_on(backends, tower)
        assert backends.in_use() == backends.choices
        for _ in range(3):
            own = forward(*tower.parameters, *tower.examples)
            assert torch.equal(own[0], tower.run(*tower.examples)[0])
    assert not forward.is_taken
    (record,) = caplog.records
    assert "stage tower stays on torch instead of wrong: output 0 differs by" in record.getMessage()
    (now,) = backends.in_use().values()
    assert now.is_torch and now.notes[0].startswith("instead of wrong: output 0 differs by")
    assert describe(now).startswith("stage tower runs on torch; instead of wrong: ")


def test_a_backend_that_could_not_run_a_stage_is_said_with_the_reason() -> None:
    found = choose_single("tower", [cost("torch", 100.0), cost("a", 0.0, "no lowering for aten.sort")])
    assert describe(found).endswith("; not on a: no lowering for aten.sort")


def test_a_stage_that_trains_is_left_as_it_is(tower: ForwardCode) -> None:
    backends, function = placed_on("inductor"), stage_function(tower)
    trained = [p.detach().requires_grad_(True) for p in tower.parameters]
    assert backends.forward("tower", function, trained) is None
    assert backends.forward("other", function, tower.parameters) is None


def test_many_shapes_are_built_for_up_to_a_number_and_what_is_built_is_shared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    baked, backends, held = Baked(), placed_on("baked"), make_tower().parameters
    with BACKENDS.lent("baked", baked), caplog.at_level(logging.WARNING):
        for samples in (*range(1, 11), 1):
            code = replace(make_tower(samples=samples), parameters=held)
            forward = running_on(backends, code)
            for _ in range(2):
                assert torch.equal(forward(*held, *code.examples)[0], code.run(*code.examples)[0])
            assert forward.is_taken == (samples <= 8)
    assert baked.built == 8, "the first shape came twice, in two lanes"
    assert [r.getMessage().partition(": ")[2] for r in caplog.records] == [
        "it has met 8 shapes, each of which is built for anew; pad to a few lengths"
    ] * 2


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"language": "openvino"}, "'language': 'openvino': the stage trains, and backends run stages without gradients"),
        ({"visoin": "openvino"}, "'visoin': 'openvino': no such stage; did you mean 'vision'?; stages are vision, language"),
    ],
)  # fmt: skip
def test_stages_that_train_or_are_none_are_refused(asked: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"graph_pipeline.backends: {text}")):
        check_stages(asked, ["vision"], ["language"])
    check_stages({"vision": "openvino", "language": "torch"}, ["vision"], ["language"])
    check_stages("auto", [], ["language"])


def test_a_backend_that_is_asked_for_and_absent_is_refused_before_anything_is_captured() -> None:
    class Absent(Counting):
        def missing(self) -> str:
            return "needs a package: pip install it"

    with BACKENDS.lent("absent", Absent()):
        line = "backend 'absent' needs a package: pip install it, or leave it out"
        for asked in (["absent"], {"vision": "absent"}):
            with pytest.raises(ConfigError, match=line):
                check_backends_installed(asked)
        check_backends_installed("auto")
        assert "absent" not in requested_backends("auto", "vision")
    assert requested_backends({"vision": "openvino"}, "language") == requested_backends("off", "vision") == ()


def test_forward_code_is_the_version_in_use(tower: ForwardCode) -> None:
    code = forward_code("tower", stage_function(tower), tower.parameters, tower.examples)
    assert code.signature == tower.signature
