"""Forwards on backends: equal to torch, refused in one line where they are not, measured once, mixed where asked."""

from __future__ import annotations

import logging
from collections.abc import Callable
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
from gpp_plugin.backends.place_forward import choose_single, place_forward
from gpp_plugin.backends.placed_forward import CuttableForward, placed_groups
from gpp_plugin.backends.stage_backends import BackendForward, StageBackends, forward_code
from gpp_plugin.collage.operator_graph import bits
from gpp_plugin.collage.pattern_rules import BasePatternRule
from gpp_plugin.collage.patterns import is_op
from gpp_plugin.doors import Backend
from gpp_plugin.errors import BackendRefused
from gpp_plugin.extensions import BACKENDS, find_backend
from gpp_plugin.ir.backend_costs import BackendCost, PlacedGroup, StageBackend
from gpp_plugin.runtime.stage_module import StageFunction


class Tower(nn.Module):
    """A small convolution, attention-like mixing, two outputs, a tuple and a size on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 8, 2, 2)
        self.mix = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(8)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.patches(pixels).flatten(2).transpose(1, 2)
        a, b, c = self.mix(hidden).chunk(3, dim=-1)
        mixed = torch.softmax(a @ b.transpose(1, 2) / hidden.shape[-1] ** 0.5, dim=-1) @ c
        out = self.norm(torch.relu(mixed) + hidden)
        return out, out.mean(1)


def code_of(module: nn.Module, *examples: Tensor) -> ForwardCode:
    """Return generated code like a stage's: parameters first, then what changes."""
    program = torch.export.export(module.eval(), examples, strict=False)
    kinds = [spec.kind.name for spec in program.graph_signature.input_specs]
    count = sum(kind != "USER_INPUT" for kind in kinds)
    held = [program.state_dict[spec.target] for spec in program.graph_signature.input_specs[:count]]
    return ForwardCode(
        name="tower",
        module=fx.GraphModule(nn.Module(), program.graph),
        bound=(),
        parameters=tuple(held),
        examples=examples,
    )


@pytest.fixture(scope="module")
def tower() -> ForwardCode:
    torch.manual_seed(0)
    return code_of(Tower(), torch.randn(2, 1, 8, 8))


def require(name: str) -> None:
    reason = find_backend(name).missing()
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize("name", BACKENDS.built_in)
def test_each_gives_what_torch_gives_and_stays_as_it_is(name: str, tower: ForwardCode) -> None:
    require(name)
    expected = tower.run(*tower.examples)
    built = build_checked(lambda: build_forward(name, tower), tower.examples, expected)
    assert built.error <= 1e-5 and built.build_s > 0
    other = torch.randn(2, 1, 8, 8)
    first = built(*tower.examples)
    second = built(other)
    for own, right in zip((*first, *second), (*expected, *tower.run(other)), strict=True):
        assert torch.allclose(own, right, rtol=1e-4, atol=1e-5), "an earlier result was written over"


def test_frozen_code_takes_what_changes_and_nothing_else(tower: ForwardCode) -> None:
    assert [n.name for n in tower.frozen.graph.nodes if n.op == "placeholder"] == ["given_0"]
    for own, right in zip(tower.frozen(*tower.examples), tower.run(*tower.examples), strict=True):
        assert torch.equal(own, right)


def test_the_signature_is_of_operators_and_shapes(tower: ForwardCode) -> None:
    torch.manual_seed(5)
    again = code_of(Tower(), torch.randn(2, 1, 8, 8))
    wider = code_of(Tower(), torch.randn(3, 1, 8, 8))
    assert again.signature == tower.signature != wider.signature


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


def test_operators_have_names_attributes_and_whole_tuples(tower: ForwardCode) -> None:
    graph = CuttableForward(tower).graph
    named = {operator.name: operator for operator in graph.operators}
    assert named["conv2d"].attr["stride"] == [2, 2] and named["conv2d"].attr["groups"] == 1
    assert "getitem" not in named and named["chunk"].attr["chunks"] == 3


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
    assert str(caught.value) == "operator softmax (aten.softmax.int): RuntimeError"


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (nn.Dropout(0.5), r"aten\.dropout\.default\) draws random numbers"),
        (nn.BatchNorm1d(4), "updates its running statistics"),
        (nn.ReLU(inplace=True), r"aten\.relu_\.default\) writes into what it is given"),
        (nn.Sequential(nn.Unflatten(1, (2, 2)), nn.ReLU(inplace=True)), "writes into what it is given"),
    ],
)
def test_code_that_no_backend_may_run(module: nn.Module, text: str) -> None:
    code = code_of(nn.Identity(), torch.randn(3, 4))
    program = torch.export.export(module.train(), (torch.randn(3, 4),), strict=False)
    code = ForwardCode(
        name="odd",
        module=fx.GraphModule(nn.Module(), program.graph),
        bound=(),
        parameters=tuple(
            program.state_dict[s.target] for s in program.graph_signature.input_specs if s.target is not None
        ),
        examples=(torch.randn(3, 4),),
    )
    with pytest.raises(BackendRefused, match=text):
        raise BackendRefused(code.refusal())
    assert measure_backends(code, ["inductor"])["inductor"].refused == code.refusal()


def test_what_is_written_inside_may_stay_but_is_not_cut() -> None:
    code = code_of(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), torch.randn(3, 4))
    assert code.refusal() == ""
    with pytest.raises(BackendRefused, match="writes into a tensor: it is not cut"):
        CuttableForward(code)


def test_half_precision_and_other_devices_are_refused_by_inference_backends(tower: ForwardCode) -> None:
    half = code_of(Tower().bfloat16(), torch.randn(2, 1, 8, 8).bfloat16())
    for name in ("onnxruntime", "openvino"):
        assert find_backend(name).refusal(half) == "runs float32 alone, and the stage has bfloat16"
        assert find_backend(name).refusal(tower) == ""


def test_an_absent_package_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert find_backend("openvino").missing() == "needs openvino: pip install 'gpp_plugin[openvino]'"


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


def running_on(code: ForwardCode, backend: str) -> BackendForward:
    chosen = StageBackend(stage="tower", groups=(PlacedGroup(backend=backend),))
    forward = StageBackends({"tower": chosen}).forward("tower", stage_function(code), code.parameters)
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
    torch.manual_seed(1)
    code = code_of(Tower(), torch.randn(2, 1, 8, 8))
    inputs = [torch.randn(2, 1, 8, 8) for _ in range(3)]
    baked = Baked()
    with BACKENDS.lent("baked", baked):
        forward = running_on(code, "baked")
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
    with BACKENDS.lent("wrong", Wrong(lambda out: (out[0] + 1, out[1]))), caplog.at_level(logging.WARNING):
        forward = running_on(tower, "wrong")
        for _ in range(3):
            own = forward(*tower.parameters, *tower.examples)
            assert torch.equal(own[0], tower.run(*tower.examples)[0])
    assert not forward.is_taken
    (record,) = caplog.records
    assert "stage tower stays on torch instead of wrong: output 0 differs by" in record.getMessage()


def test_a_stage_that_trains_or_meets_many_shapes_is_left_as_it_is(
    tower: ForwardCode, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = StageBackend(stage="tower", groups=(PlacedGroup(backend="inductor"),))
    backends = StageBackends({"tower": chosen})
    function = stage_function(tower)
    trained = [p.detach().requires_grad_(True) for p in tower.parameters]
    assert backends.forward("tower", function, trained) is None
    assert backends.forward("other", function, tower.parameters) is None
    frozen = [p.detach() for p in tower.parameters]
    with caplog.at_level(logging.WARNING):
        made = [backends.forward("tower", function, frozen) for _ in range(7)]
    assert [one is not None for one in made] == [True] * 4 + [False] * 3
    assert len(caplog.records) == 1


def test_forward_code_is_the_version_in_use(tower: ForwardCode) -> None:
    function = stage_function(tower)
    code = forward_code("tower", function, tower.parameters, tower.examples)
    assert code.signature == tower.signature
    assert list(bits(CuttableForward(code).graph.everything)) == list(
        range(len(CuttableForward(code).graph.operators))
    )
