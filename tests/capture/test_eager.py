"""Modules that run as they are, custom autograd functions, losses on lists of dicts: the same numbers as eagerly."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gpp_plugin.capture.coarsen import coarsen
from gpp_plugin.capture.eager.opaque_call import OpaqueCall, extract_tensors, insert_tensors
from gpp_plugin.capture.eager.trial_run import CheckedOnCpu, refuse_lost_device, with_culprit
from gpp_plugin.capture.export import capture_model
from gpp_plugin.capture.recapture import recapture
from gpp_plugin.capture.tracing.meta_copy import make_meta_copy
from gpp_plugin.capture.tracing.sample_batches import RecordKeys, cut_records, pad_records
from gpp_plugin.errors import CaptureError, ConfigError, RuntimeFailure
from gpp_plugin.ir.analysis import Analysis
from gpp_plugin.ir.serialize import dumps, loads
from gpp_plugin.ir.tensors import LayoutKind
from gpp_plugin.model.graph.stage_graph import prepare_batch
from gpp_plugin.runtime.batches import join_batches
from tests.capture.graphs import Calls, assert_is_model, run_graph
from tests.eager_models import MODELS, Adversarial, Routed, build_eager, reverse, vectors
from tests.reference import loss_of


@pytest.mark.parametrize("name", MODELS)
def test_loss_gradients_and_buffers_are_those_of_the_model(name: str) -> None:
    model, make_batch = build_eager(name)
    batch = make_batch(4)
    capture = capture_model(model, prepare_batch(model, batch))
    assert_is_model(capture, model, batch, prepared=prepare_batch(model, batch))
    other = make_batch(2, 1)
    again = recapture(model, capture.analysis, prepare_batch(model, other))
    assert_is_model(again, model, other, prepared=prepare_batch(model, other))


def test_a_reversed_gradient_keeps_its_sign_and_cuts_by_samples() -> None:
    model, make_batch = build_eager("adversarial")
    capture = capture_model(model, make_batch(4))
    (node,) = [n for n in capture.graph.nodes if isinstance(n.target, OpaqueCall)]
    assert str(node.target) == "function tests.eager_models.Reversal" and capture.analysis.eager == ()
    by_name = {n.name: n for n in capture.op_graph.nodes}
    result = next(n for n in capture.op_graph.nodes if node.name in n.inputs)
    assert not by_name[node.name].is_coupling
    assert result.output is not None and result.output.layout.kind is LayoutKind.BATCH
    # of the critic alone, the encoder's gradient is minus what it is without the reversal
    plain = Adversarial(lambda x: x * 1.0)
    plain.load_state_dict(model.state_dict())
    found = run_graph(capture, model, make_batch(4))[capture.op_graph.loss]
    found.backward()
    loss_of(plain(**make_batch(4))).backward()
    first, other = (each.encoder[0][0].weight.grad for each in (model, plain))
    assert not torch.allclose(first, other, rtol=0.1)


def test_a_backward_that_mixes_samples_is_found_out() -> None:
    model, make_batch = build_eager("unit gradient")
    capture = capture_model(model, make_batch(4))
    coupled = [n.target for n in capture.op_graph.nodes if n.is_coupling]
    assert "function tests.eager_models.UnitGradient" in coupled
    assert any("UnitGradient" in line for line in capture.op_graph.couplings)


def test_modules_whose_tracing_fails_are_kept_whole_in_every_layer(caplog: pytest.LogCaptureFixture) -> None:
    model, make_batch = build_eager("routed")
    with caplog.at_level(logging.WARNING):
        capture = capture_model(model, make_batch(4))
    assert capture.analysis.eager == tuple(f"layers.{i}.router" for i in range(3))
    warned = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert (
        len(warned) == 1 and warned[0].startswith("layers.0.router is kept whole") and "unique" in warned[0]
    )
    calls = [n for n in capture.op_graph.nodes if n.target.startswith("eager ")]
    assert [n.module for n in calls] == list(capture.analysis.eager)
    assert all(n.is_coupling and n.flops > 0 and n.saved_bytes > 0 for n in calls)
    blocks = {block.name: block for block in coarsen(capture).blocks}
    assert "layers.1.router.experts.0.weight" in blocks["layers.1"].parameters
    written = {p.name for p in capture.op_graph.parameters if p.is_mutated}
    assert written == {f"layers.{i}.router.calls" for i in range(3)}
    # what one rank finds out is data, and another one captures with it
    told = loads(Analysis, dumps(capture.analysis))
    again = recapture(model, told, make_batch(8))
    assert [n.name for n in again.op_graph.nodes] == [n.name for n in capture.op_graph.nodes]


def test_modules_asked_for_are_kept_whole_and_inner_ones_with_them() -> None:
    model, make_batch = build_eager("adversarial")
    capture = capture_model(model, make_batch(4), eager=["encoder.*", "encoder.1.0"])
    assert capture.analysis.eager == ("encoder.0", "encoder.1", "encoder.2")
    assert_is_model(capture, model, make_batch(4))


def test_a_path_that_is_none_is_refused_with_the_right_one() -> None:
    model, make_batch = build_eager("routed")
    with pytest.raises(
        ConfigError,
        match=r"graph_pipeline.eager: 'layer.0.router' is no module of Routed; did you mean 'layers.0.router'",
    ):
        capture_model(model, make_batch(4), eager=["layer.0.router"])


def test_a_model_on_the_meta_device_is_tried_with_random_weights() -> None:
    with torch.device("meta"):
        empty = Routed()
    model, make_batch = build_eager("routed")
    capture = capture_model(empty, make_batch(4))
    # what experts compute depends on values, but for that the two are one
    other = capture_model(model, make_batch(4)).op_graph
    assert [(n.name, n.inputs, n.output) for n in capture.op_graph.nodes] == [
        (n.name, n.inputs, n.output) for n in other.nodes
    ]
    assert_is_model(capture, model, make_batch(4))


def test_weights_that_would_fill_the_machine_are_not_made_for_a_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with torch.device("meta"):
        empty = Routed()
    _, make_batch = build_eager("routed")
    monkeypatch.setattr("gpp_plugin.capture.eager.keep_whole.free_memory_bytes", lambda: 1000.0)
    with pytest.raises(CaptureError, match="cannot be captured at layers.0.router"):
        capture_model(empty, make_batch(4))


def _counts(model: Any, x: Tensor) -> Any:
    """Returns as many rows as values say, or a number of its own."""
    is_kept = x[:, 0] > 0.0
    return (model.linear(x), int(is_kept.sum())) if model.number else (model.linear(x)[is_kept], 1)


def _reads(model: Any, x: Tensor, y: Tensor) -> Tensor:
    hidden, number = model.counts(x)
    return (hidden.square().mean() * number).sum() + y.mean()


@pytest.mark.parametrize("number", [False, True])
def test_results_that_depend_on_values_are_refused_when_they_change(number: bool) -> None:
    batch = {**vectors(4), "x": torch.ones(4, 8)}
    model = Calls(_reads, counts=Calls(_counts, linear=nn.Linear(8, 8), number=number))
    capture = capture_model(model, batch, eager=["counts"])
    assert_is_model(capture, model, batch, prepared=prepare_batch(model, batch))
    batch["x"][0] = -1.0
    with pytest.raises(
        RuntimeFailure, match=r"counts \(Calls\), which runs as it is, returned .* and was captured with"
    ):
        run_graph(capture, model, batch)


def test_a_model_that_fails_itself_is_refused_by_its_first_failure() -> None:
    def scaled(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return (x * y).mean() if model.scale > 0 else y.mean()

    with pytest.raises(
        CaptureError, match=r"Calls cannot be captured at the model itself .*model.scale > 0.*torch.where"
    ):
        capture_model(Calls(scaled, scale=nn.Parameter(torch.ones(()))), vectors(4))


class _Draws(nn.Module):
    """Draws from all three generators that models draw from."""

    def forward(self, x: Tensor) -> Tensor:
        return x * random.random() * float(numpy.random.rand()) + torch.rand_like(x)


def test_generators_outside_torch_follow_torchs_and_are_left_alone() -> None:
    def noisy(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return (model.linear(model.draws(x)) - y).square().mean()

    model, batch = Calls(noisy, draws=_Draws(), linear=nn.Linear(8, 1)), vectors(4)
    random.seed(3)
    numpy.random.seed(3)
    states = random.getstate(), numpy.random.get_state()[1].copy(), torch.get_rng_state()
    capture = capture_model(model, batch, eager=["draws"])

    def loss(seed: int) -> float:
        torch.manual_seed(seed)
        return float(run_graph(capture, model, batch)[capture.op_graph.loss])

    assert torch.equal(states[2], torch.get_rng_state())
    assert loss(1) == loss(1) != loss(2)
    assert random.getstate() == states[0] and numpy.array_equal(numpy.random.get_state()[1], states[1])


def test_arguments_come_apart_and_together() -> None:
    x, m = torch.ones(2), torch.zeros(3)

    class Box:
        def __init__(self, inner: Any) -> None:
            self.inner, self.name = inner, "box"

    tensors: list[Tensor] = []
    pattern = extract_tensors(
        ((x, None), {"mask": [m, 3], "box": Box(x), "device": torch.device("cpu")}), tensors
    )
    assert len(tensors) == 3
    (first, none), named = insert_tensors(pattern, [x + 1, m, x + 2], ("cpu", torch.device("meta", 1)))
    assert torch.equal(first, x + 1) and none is None
    assert named["mask"][1] == 3 and torch.equal(named["box"].inner, x + 2) and named["box"].name == "box"
    assert named["device"] == torch.device("meta", 1)


def test_lists_of_dicts_travel_as_padded_tensors() -> None:
    records = [{"boxes": torch.rand(n, 4), "size": torch.tensor([n, 2])} for n in (3, 1)]
    batch = prepare_batch(nn.Linear(1, 1), {"x": torch.ones(2, 1), "labels": records})
    assert batch["labels"] == RecordKeys(("boxes", "size"))
    assert batch["labels.boxes"].shape == (2, 4, 4) and batch["labels.boxes.shape"].tolist() == [
        [3, 4],
        [1, 4],
    ]
    fields = ("boxes", "size")
    again = cut_records(batch["labels"], [batch[name] for name in batch["labels"].entries("labels")])
    for one, other in zip(records, again, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in fields)
    wider = pad_records(
        {"x": torch.ones(1, 1), "labels": [{"boxes": torch.rand(5, 4), "size": torch.tensor([5, 2])}]}
    )
    joined = join_batches([batch, wider])
    assert joined["labels.boxes"].shape == (3, 8, 4)
    masks = [torch.rand(n, 5, 5) for n in (2, 3)]
    bare = pad_records({"x": torch.ones(2, 1), "masks": masks, "scales": [torch.ones(3)] * 3})
    assert bare["masks.tensor"].shape == (2, 4, 5, 5) and len(bare["scales"]) == 3, (
        "three are not one a sample"
    )
    cut = cut_records(bare["masks"], [bare[name] for name in bare["masks"].entries("masks")])
    assert all(torch.equal(one, other) for one, other in zip(cut, masks, strict=True))
    with pytest.raises(ConfigError, match="'labels': its dicts have different keys"):
        pad_records({"labels": [{"a": torch.ones(1)}, {"b": torch.ones(1)}]})


def test_functions_without_a_gradient_and_in_evaluation_are_traced_as_before() -> None:
    model, make_batch = build_eager("adversarial")
    capture = capture_model(model, make_batch(4), training=False)
    assert not any(isinstance(n.target, OpaqueCall) for n in capture.graph.nodes)
    model.encoder.requires_grad_(False)
    capture = capture_model(model, make_batch(4))
    assert not any(isinstance(n.target, OpaqueCall) for n in capture.graph.nodes)
    assert reverse(torch.ones(1, requires_grad=True), 2.0).grad_fn is not None, "torch is as it was"


def test_a_call_on_fake_tensors_keeps_as_much_as_a_real_one() -> None:
    def keeps(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return model.router(x.tanh()).square().mean() + y.mean()

    router = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    model = Calls(keeps, router=router)
    whole = capture_model(model, vectors(4), eager=["router"]).op_graph
    traced = capture_model(model, vectors(4)).op_graph
    assert sum(n.saved_bytes for n in whole.nodes) == sum(n.saved_bytes for n in traced.nodes)
    assert sum(n.flops for n in whole.nodes) == sum(n.flops for n in traced.nodes)


def test_what_is_kept_whole_after_a_failure() -> None:
    model, _ = build_eager("routed")
    alike = tuple(f"layers.{i}.linear" for i in range(3))
    assert with_culprit(model, (), "layers.0.linear") == alike
    # a second place where a linear module fails: all of them do
    assert with_culprit(model, alike, "head") == (
        *alike,
        *(path for path, m in model.named_modules() if isinstance(m, nn.Linear) and path not in alike),
    )
    assert with_culprit(model, alike, "layers.1") == ("layers.0", "layers.1", "layers.2")
    assert with_culprit(model, alike, "layers.2.linear") is None
    assert with_culprit(model, alike, "") == ("",) and with_culprit(model, ("",), "") is None


def test_a_received_tensor_takes_its_gradient_through_a_custom_function() -> None:
    model, _ = build_eager("parts")
    hidden = torch.randn(4, 8, requires_grad=True)
    batch = {"hidden": hidden.detach(), "y": vectors(4)["y"]}
    capture = capture_model(model.critic, batch, received={"hidden": True})
    own = hidden.detach().clone().requires_grad_(True)
    run_graph(capture, model.critic, {**batch, "hidden": own})[capture.op_graph.loss].backward()
    model.critic(hidden, batch["y"])["loss"].backward()
    assert hidden.grad is not None and own.grad is not None
    assert torch.allclose(own.grad, hidden.grad, rtol=1e-6)


class Branches(nn.Module):
    """Two layers, one of them given hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Return a loss."""
        return {"loss": self.second(self.first(x).tanh()).square().mean()}


class Recorder:
    """Takes down what a module makes, and the gradient of that."""

    def __init__(self) -> None:
        self.made: list[Tensor] = []
        self.gradients: list[Tensor] = []

    def forward(self, module: nn.Module, given: Any, made: Tensor) -> Tensor:
        """Double the output."""
        self.made.append(made.detach().clone())
        return made * 2

    def backward(self, module: nn.Module, inner: Any, outer: Any) -> None:
        """Keep the gradient."""
        self.gradients.append(outer[0].clone())


def test_hooks_of_a_module_are_called_where_it_runs(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, recorder = Branches(), Recorder()
    model.second.register_forward_hook(recorder.forward)
    model.second.register_full_backward_hook(recorder.backward)
    batch = {"x": torch.randn(4, 4)}
    capture = capture_model(model, batch)
    assert capture.analysis.eager == ("second",) and "second is kept whole" in caplog.text
    model(**batch)["loss"].backward()
    wanted = recorder.made[-1], recorder.gradients[-1]
    recorder.made.clear()
    recorder.gradients.clear()
    run_graph(capture, model, batch)[capture.op_graph.loss].backward()
    assert len(recorder.made) == len(recorder.gradients) == 1
    assert torch.equal(recorder.made[0], wanted[0]) and torch.allclose(recorder.gradients[0], wanted[1])
    assert_is_model(capture, model, batch)


def test_hooks_of_libraries_are_traced_and_those_of_the_model_itself_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model = Branches()

    def doubled(module: nn.Module, given: Any, made: Tensor) -> Tensor:
        return made * 2

    doubled.__module__ = "peft.tuners"
    model.first.register_forward_hook(doubled)
    model.register_forward_hook(lambda module, given, made: None)
    capture = capture_model(model, {"x": torch.randn(4, 4)})
    assert capture.analysis.eager == ()
    assert "hooks on Branches itself are not called in training" in caplog.text


class Counting(Branches):
    """Counts the calls of a part by a hook, in a buffer of the model or of the part."""

    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        for module in (self, self.second):
            module.register_buffer("calls", torch.zeros(()))

        def count(module: Any, given: Any, made: Tensor) -> None:
            owner: Any = module if inside else self
            owner.calls += 1

        self.second.register_forward_hook(count)


def test_a_hook_writes_buffers_of_its_own_module_alone() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 4)}
    model = Counting(inside=False)
    with pytest.raises(
        CaptureError, match=r"a hook on second \(.*\) writes into calls, .* its first argument"
    ):
        capture_model(model, batch)
    assert model.calls == model.second.calls == 0
    model = Counting(inside=True)
    capture = capture_model(model, batch)
    assert capture.analysis.eager == ("second",) and model.second.calls == 0
    assert_is_model(capture, model, batch)


class Kept(Branches):
    """Reads what a hook of its own took from a part."""

    def __init__(self) -> None:
        super().__init__()
        self.second.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, given: Any, made: Tensor) -> None:
        self.inner = made

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found = super().forward(x)
        return {"loss": found["loss"] + self.inner.square().mean()}


@pytest.mark.parametrize("has_run", [False, True])
def test_what_a_hook_keeps_for_the_forward_is_traced_and_the_model_stays_as_it_is(has_run: bool) -> None:
    torch.manual_seed(0)
    model, batch = Kept(), {"x": torch.randn(4, 4)}
    if has_run:
        model(**batch)
        copy_of = make_meta_copy(model, training=True, dtype=None, device=torch.device("cpu")).model
        assert isinstance(copy_of.inner, Tensor)  # which deepcopy refuses
        del model.inner
    capture = capture_model(model, batch)
    assert "inner" not in vars(model)
    assert_is_model(capture, model, batch)


def _mapped(model: Any, x: Tensor) -> Tensor:
    """Members of an ensemble through torch.func."""
    return torch.func.vmap(lambda weight: x @ weight)(model.weights).mean(0)


def _penalty(model: Any, x: Tensor) -> Tensor:
    """A gradient that forward takes."""
    middle = (0.5 * x.detach()).requires_grad_(True)
    (gradient,) = torch.autograd.grad(model.critic(middle).sum(), middle, create_graph=True)
    return gradient.norm(dim=1) - 1


def _around(model: Any, x: Tensor) -> dict[str, Tensor]:
    return {"loss": model.part(model.first(x)).square().mean()}


def _inlined(model: Any, x: Tensor) -> dict[str, Tensor]:
    return {"loss": model.part.function(model.part, x).square().mean()}


@pytest.mark.parametrize(
    "make",
    [
        lambda: Calls(_mapped, weights=nn.Parameter(torch.randn(3, 4, 4))),
        lambda: Calls(_penalty, critic=nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))),
    ],
)
def test_transforms_and_gradients_of_forward_are_refused_in_the_model_and_run_in_a_part(make: Any) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 4)}
    with pytest.raises(
        CaptureError, match="move that part into a module of its own, which then runs as it is"
    ):
        capture_model(Calls(_inlined, part=make()), batch)
    model = Calls(_around, first=nn.Linear(4, 4), part=make())
    capture = capture_model(model, batch)
    assert capture.analysis.eager == ("part",)
    assert_is_model(capture, model, batch)


def test_torchscript_is_refused_by_name() -> None:
    model = Calls(_around, first=nn.Linear(4, 4), part=torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(
        CaptureError, match="part is TorchScript, which is not traced; use the module that it was made"
    ):
        capture_model(model, {"x": torch.randn(4, 4)})


class _Device(TorchDispatchMode):
    """Stands for a device that one assertion ends: tensors on the CPU, and every call behind an error fails."""

    def __init__(self) -> None:
        super().__init__()
        self.is_lost = False
        self.num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not self.is_lost, "the device runs nothing any more"
        self.num_calls += 1
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            self.is_lost = True
            raise


@pytest.mark.parametrize(
    "fails",
    [
        lambda x: nn.functional.embedding(torch.ones(2, dtype=torch.long), x[:1]),
        lambda x: x.gather(0, torch.full((1, 2), 7)),
        lambda x: torch.zeros(2, 2).scatter_(0, torch.full((1, 2), 7), x),
        lambda x: nn.functional.cross_entropy(x[:, :1], torch.ones(2, dtype=torch.long)),
        lambda x: nn.functional.binary_cross_entropy(x + 1.0, torch.ones_like(x)),
    ],
)
def test_what_the_cpu_refuses_never_reaches_the_device(fails: Any) -> None:
    x, numbers = torch.rand(2, 2), torch.get_rng_state()
    with _Device() as device:
        with CheckedOnCpu("cpu"):
            with pytest.raises((IndexError, RuntimeError)):
                fails(x)
            assert not device.is_lost
            before = device.num_calls
            assert torch.equal(x.add(1.0), x + 1.0) and device.num_calls > before
        with pytest.raises((IndexError, RuntimeError)):
            fails(x)
        assert device.is_lost, "the stand-in is lost where nothing checks"
    assert torch.equal(torch.get_rng_state(), numbers)


def test_a_lost_device_is_no_answer() -> None:
    refuse_lost_device(IndexError("index out of range"))
    lost = torch.AcceleratorError("CUDA error: device-side assert triggered")
    wrapped = RuntimeFailure("a block cannot be run")
    wrapped.__cause__ = lost
    for error in (lost, wrapped):
        with pytest.raises(RuntimeFailure, match="any more: CUDA error: .*CUDA_LAUNCH_BLOCKING=1"):
            refuse_lost_device(error)
