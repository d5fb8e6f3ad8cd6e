"""Measured costs: bytes against independent counts, times against a clock that is told what to say."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gpp_plugin.capture.captured_graph import CapturedGraph
from gpp_plugin.capture.coarsen import coarsen
from gpp_plugin.capture.export import capture_model
from gpp_plugin.capture.tracing.sample_batches import resize_batch
from gpp_plugin.errors import ProfileError
from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.profile import Profile
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.memory.memory_chain import StageChain
from gpp_plugin.plan.memory.operator_chain import GraphTensors
from gpp_plugin.profile import block_survey, timing
from gpp_plugin.profile.block_survey import BlockSigner
from gpp_plugin.profile.measure import profile_blocks
from gpp_plugin.profile.timing import HeadStart, Lap, LiveBytes, SavedStorages
from gpp_plugin.runtime.stage_module import build_stage_function
from tests.models import MODELS, build, captured_once
from tests.profile.test_busy_stream import piece_of

SAMPLES = 4


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def saved_by(model: nn.Module, batch: dict[str, Any], run: Callable[[], object]) -> int:
    """Count what a forward saves for backward, each storage once, without parameters, buffers and model inputs."""
    inputs = [value for value in batch.values() if isinstance(value, Tensor)]
    own = {t.untyped_storage().data_ptr() for t in (*state_of(model).values(), *inputs)}
    held: list[Tensor] = []  # keeps the storages, so that no address is used twice
    with saved_tensors_hooks(lambda tensor: held.append(tensor) or tensor, lambda tensor: tensor):
        output = run()
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    del output
    return sum(size for pointer, size in sizes.items() if pointer not in own)


@functools.cache
def prepared(name: str, device: str = "cpu") -> tuple[nn.Module, dict[str, Any], CapturedGraph]:
    """Return a model, a batch of four samples and the capture of both; no test may change them."""
    model, make_batch = build(name, device=device)
    return model, make_batch(SAMPLES, 0), captured_once(name, SAMPLES, device=device)


def measured(
    model: nn.Module,
    batch: dict[str, Any],
    captured: CapturedGraph | None = None,
    *,
    granularity: str = "layer",
    **options: Any,
) -> Profile:
    captured = captured or capture_model(model, batch)
    options = {"use_cache": False, "repeats": 1, "threads": 1, "model_state": state_of(model), **options}
    return profile_blocks(captured, coarsen(captured, granularity=granularity), batch=batch, **options)


def held_more(costs: CostModel, own: set[str]) -> float:
    """Return the bytes that a stage of some blocks holds more with a micro-batch in flight than with none."""
    blocks = costs.indices(own)
    empty, held = (costs.stage_memory(blocks, degree=1, local=SAMPLES, in_flight=n) for n in (0, 1))
    return held - empty


def saved_bytes(profile: Profile) -> float:
    return sum(c.saved_bytes_per_sample * SAMPLES + c.saved_bytes_fixed for c in profile.costs)


@pytest.mark.parametrize("granularity", ["layer", "sub_layer", "node"])
@pytest.mark.parametrize(
    "name", ["two_branch", "frozen_branch", "dlrm", "multi_sink", "batch_norm_mlp", "clip"]
)
def test_saved_bytes_of_the_blocks_add_up_to_the_eager_models(name: str, granularity: str) -> None:
    """Tensors that several blocks keep, identical branches and operators that make views included."""
    model, batch, captured = prepared(name)
    expected = saved_by(model, batch, lambda: model(**batch))
    for share in (True, False):
        profile = measured(model, batch, captured, granularity=granularity, share_identical=share)
        assert saved_bytes(profile) == expected


@pytest.mark.parametrize(("name", "granularity"), [("t5", "layer"), ("multi_sink", "node")])
def test_what_a_stage_keeps_is_known_wherever_it_is_cut(name: str, granularity: str) -> None:
    """A stage keeps the encoder's output, or a mask, that an earlier stage is charged with, for itself."""
    model, batch, captured = prepared(name)
    graph = coarsen(captured, granularity=granularity)
    profile = measured(model, batch, captured, granularity=granularity)
    costs = CostModel(graph, profile, Cluster(name="none", devices=(), links=()))
    state, values = state_of(model), dict[str, Tensor]()
    third = len(graph.blocks) // 3
    is_shared = False
    for blocks in (graph.blocks[:third], graph.blocks[third : 2 * third], graph.blocks[2 * third :]):
        own = {block.name for block in blocks}
        later = {n for e in graph.edges if e.src in own and e.dst not in own for n in e.tensors}
        names = [node for block in blocks for node in block.nodes]
        outputs = [node for node in names if node in later or node == captured.op_graph.loss]
        code = build_stage_function(captured, names, outputs)
        if code.choice is not None:
            code.choice.use(captured.analysis.unpadded)
        received = [values[n].detach().clone().requires_grad_(values[n].requires_grad) for n in code.received]
        tensors = [state[n] for n in code.tensors]
        made: list[Tensor] = []
        operands = (*tensors, *(batch[key] for key in code.batch_inputs), *received)
        counted = saved_by(model, batch, lambda run=code.call, of=operands, to=made: to.extend(run(*of)))
        values.update(zip(outputs, made, strict=True))
        assert held_more(costs, own) == counted
        is_shared |= profile.saved_with_others(own) != (0.0, 0.0)
    assert is_shared


class FirstTokens(nn.Module):
    """Two towers whose first tokens alone are joined: what is sent are views, and the join keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)) for _ in range(2))
        self.join = nn.Bilinear(6, 6, 1)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        return {"loss": self.join(self.left(left)[:, 0], self.right(right)[:, 0]).mean()}


@pytest.mark.parametrize("has_towers", [False, True])
def test_a_view_from_another_stage_is_kept_without_the_rest_of_its_storage(has_towers: bool) -> None:
    model = FirstTokens()
    batch = {"left": torch.randn(SAMPLES, 5, 6), "right": torch.randn(SAMPLES, 5, 6)}
    captured = capture_model(model, batch)
    graph = coarsen(captured)
    costs = CostModel(graph, measured(model, batch, captured), Cluster(name="none", devices=(), links=()))
    last = graph.blocks[-1].name
    own = {b.name for b in graph.blocks} if has_towers else {last}
    held = held_more(costs, own)
    whole = saved_by(model, batch, lambda: model(**batch))
    towers = saved_by(model, batch, lambda: (model.left(batch["left"]), model.right(batch["right"])))
    assert len(graph.blocks) > 1
    assert held == (whole if has_towers else SAMPLES * 6 * 4 * 2)
    assert whole - towers > 4 * (SAMPLES * 6 * 4 * 2)
    chain = StageChain(GraphTensors(costs), sorted(costs.indices(own)), SAMPLES)
    assert sum(chain.tensors.bytes) == held  # what may be swapped is what is held


@pytest.mark.parametrize("name", MODELS)
def test_every_model_can_be_measured(name: str) -> None:
    """Whatever the eager model does besides (caches, unused outputs), blocks add up to the captured graph."""
    model, batch, captured = prepared(name)
    state = state_of(model)
    names = [node.name for node in captured.op_graph.nodes]
    ones = captured.analysis.unpadded  # without the masks that this batch does without
    code = build_stage_function(captured, names, [str(captured.op_graph.loss)], ones=ones)
    operands = [*(state[name] for name in code.tensors), *(batch[key] for key in code.batch_inputs)]
    whole = saved_by(model, batch, lambda: code.call(*operands))
    before = {key: tensor.detach().clone() for key, tensor in state_of(model).items()}
    profile = measured(model, batch, captured)
    assert saved_bytes(profile) == whole
    assert all(c.forward_us[0] > 0 and c.backward_us[0] >= 0 for c in profile.costs)
    assert sum(c.gradient_bytes for c in profile.costs) > 0
    assert all(torch.equal(tensor, before[key]) for key, tensor in state_of(model).items())
    assert all(p.grad is None for p in model.parameters())


def test_identical_layers_are_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, make_batch = build("gpt2", layers=6)
    runs: list[int] = []
    monkeypatch.setattr(
        "gpp_plugin.profile.block_survey.measure",
        lambda *args, **kwargs: runs.append(1) or timing.measure(*args, **kwargs),
    )
    batch = make_batch(SAMPLES, 0)
    captured = capture_model(model, batch)
    profile = measured(model, batch, captured)
    shared = len(runs)
    runs.clear()
    measured(model, batch, captured, share_identical=False)
    assert shared <= len(runs) - 4
    layers = [c for c in profile.costs if ".h." in c.block]
    assert len({(c.forward_us, c.backward_us) for c in layers}) < len(layers)


def test_signatures_tell_shapes_literals_and_gradients_apart() -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.same = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.wide = nn.Linear(4, 4, bias=False)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            for layer in (*self.same, self.wide, self.frozen):
                x = torch.nn.functional.leaky_relu(layer(torch.tanh(x)), 0.1)
            return torch.nn.functional.leaky_relu(x, 0.2).mean()

    captured = capture_model(Pairs(), {"x": torch.randn(2, 4)})
    nodes = [n.name for n in captured.op_graph.nodes if "linear" in n.target]
    signer = BlockSigner(captured)
    signatures = [signer.sign([name], [name]) for name in nodes]
    assert signatures[1] == signatures[2]
    assert len(set(signatures)) == 4  # the first one's input takes no gradient; no bias; frozen
    relus = [n.name for n in captured.op_graph.nodes if "leaky_relu" in n.target]
    first, second, *_, before, last = (signer.sign([name], [name]) for name in relus)
    assert first == second == before != last


class _Clock:
    """A CPU stopwatch whose forwards take 7 us a sample and backwards 11, with every third run disturbed."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, device: torch.device, head_start: HeadStart) -> _Clock:
        self.runs += 1
        return self

    def mark(self) -> None:
        pass

    def laps(self) -> list[Lap]:
        slow = 100.0 if self.runs % 3 == 0 else 0.0
        return [Lap(us=us, is_busy=True) for us in (7.0 + slow, 1.0, 11.0 + slow)]


def test_times_are_medians_of_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "Stopwatch", _Clock())
    profile = measured(*prepared("frozen_branch"), repeats=5).by_block()
    left = [c for name, c in profile.items() if name.startswith("left")]
    right = [c for name, c in profile.items() if name.startswith("right")]
    assert left and right
    assert all(c.forward_us == (7.0,) and c.backward_us == (0.0,) for c in left)
    assert all(c.forward_us == (7.0,) and c.backward_us == (11.0,) for c in right)


@pytest.mark.parametrize("is_short", [False, True])
def test_blocks_are_timed_in_a_chain_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch, is_short: bool
) -> None:
    """As on CUDA: each distinct piece once, in order; where memory is short, the times of each alone stand."""
    chains: list[int] = []

    def time_chain(pieces: list[timing.Operands], **options: Any) -> list[tuple[Lap, Lap]]:
        found = timing.time_chain(pieces, **options)
        assert all(ahead.us > 0.0 for ahead, _ in found)
        chains.append(len(pieces))
        if is_short:
            raise torch.OutOfMemoryError("out of memory")
        return [(Lap(us=1e9 + i, is_busy=True), Lap(us=2e9 + i, is_busy=True)) for i in range(len(found))]

    monkeypatch.setattr(block_survey, "_has_chain_memory", lambda device: True)
    monkeypatch.setattr(block_survey, "time_chain", time_chain)
    plain = measured(*prepared("clip"))
    monkeypatch.undo()
    alone = measured(*prepared("clip"))
    assert chains and chains[0] < len(alone.costs) + 4, "identical layers are one piece"
    assert saved_bytes(plain) == saved_bytes(alone)
    for cost in plain.costs:
        assert (cost.forward_us[0] < 1e9) is is_short and (cost.backward_us[0] < 2e9) is is_short
    state = state_of(prepared("clip")[0])
    assert all(parameter.grad is None for parameter in state.values())


def test_split_backwards_are_timed_where_asked_for() -> None:
    captured = prepared("frozen_branch")
    plain, split = (
        measured(*captured, repeats=3, with_split=w, use_cache=False).by_block() for w in (False, True)
    )
    assert all((c.split_factor, c.input_share) == (1.0, 0.5) for c in plain.values())
    trained = [c for name, c in split.items() if name.startswith("right")]
    frozen = [c for name, c in split.items() if name.startswith("left")]
    assert trained and all(c.split_factor > 0.0 and 0.0 <= c.input_share <= 1.0 for c in trained)
    assert all(c.split_factor != 1.0 for c in trained)
    assert all((c.split_factor, c.input_share) == (1.0, 0.5) for c in frozen)


def test_a_backward_that_cannot_be_split_costs_too_much_to_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(operands: object, **options: object) -> None:
        raise RuntimeError("Trying to backward through the graph a second time")

    monkeypatch.setattr("gpp_plugin.profile.block_survey.measure_split_cost", refuse)
    costs = measured(*prepared("frozen_branch"), repeats=3, with_split=True, use_cache=False).by_block()
    assert all(c.split_factor > 1e3 for name, c in costs.items() if name.startswith("right"))
    assert all(c.split_factor == 1.0 for name, c in costs.items() if name.startswith("left"))


def test_weights_on_the_meta_device_are_measured_with_random_ones() -> None:
    real, batch, captured = prepared("clip")
    on_meta, _ = build("clip", device="meta")
    profile = measured(on_meta, batch)
    assert saved_bytes(profile) == saved_bytes(measured(real, batch, captured))
    assert all(p.is_meta for p in on_meta.parameters())


def test_transient_bytes_are_the_peak_above_what_is_held() -> None:
    """exp(x w): x w is freed at once (n bytes); the backward holds one gradient of x w beside those of x and w."""
    n = 4000
    x, w = torch.randn(1000, requires_grad=True), torch.randn(1000, requires_grad=True)
    counter = LiveBytes()
    counter.ignore((x, w))
    with counter:
        y = (x * w).exp()
        assert (counter.live_bytes, counter.peak_bytes) == (n, 2 * n)
        counter.reset_peak()
        torch.autograd.backward([y], [torch.ones_like(y)])
        assert counter.peak_bytes >= 4 * n
        assert counter.live_bytes == 3 * n
    del y
    assert counter.live_bytes == 2 * n
    x.grad = w.grad = None
    assert counter.live_bytes == 0
    profile = measured(*prepared("two_branch"))
    assert all(c.transient_bytes_per_sample > 0 for c in profile.costs)


def test_a_stored_profile_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, captured = prepared("two_branch")
    first = measured(model, batch, captured, use_cache=True, cache_dir=tmp_path)

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr("gpp_plugin.profile.block_survey.measure", refuse)
    assert measured(model, batch, captured, use_cache=True, cache_dir=tmp_path) == first
    for other in ({"threads": 2}, {"optimizer_bytes_per_parameter": 12.0}):
        with pytest.raises(ProfileError, match="measured again"):
            measured(model, batch, captured, use_cache=True, cache_dir=tmp_path, **other)
    with pytest.raises(ProfileError, match="measured again"):
        measured(model, resize_batch(batch, 2 * SAMPLES), use_cache=True, cache_dir=tmp_path)


def test_a_stage_holds_a_tied_parameter_once() -> None:
    """GPT-2's head is its embedding: both blocks have it, a stage with both holds it once, and not its gradient twice."""
    model, batch, captured = prepared("gpt2")
    graph = coarsen(captured)
    profile = measured(model, batch, captured)
    (tie,) = profile.tied
    embedding = model.get_input_embeddings().weight
    num_bytes = embedding.numel() * embedding.element_size()
    assert set(tie.blocks) == set(graph.tied["transformer.wte.weight"])
    found = (tie.parameter_bytes, tie.gradient_bytes, tie.optimizer_bytes)
    assert found == (num_bytes, num_bytes, 2 * num_bytes)
    assert profile.counted_again(tie.blocks[:1]) == (0, 0, 0)
    costs = CostModel(graph, profile, Cluster(name="none", devices=(), links=()))
    everything = range(len(graph.blocks))
    held = costs.stage_memory(everything, degree=1, local=0, in_flight=0)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    buffers = held - 4 * parameters  # weights, gradients and two moments
    assert 0 <= buffers <= sum(b.numel() * b.element_size() for b in model.buffers())


def test_optimizer_bytes_count_trainable_parameters() -> None:
    model, batch, captured = prepared("frozen_branch")
    profile = measured(model, batch, captured, optimizer_bytes_per_parameter=12.0)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(c.optimizer_bytes for c in profile.costs) == 12 * trainable
    assert sum(c.gradient_bytes for c in profile.costs) == 4 * trainable
    assert sum(c.parameter_bytes for c in profile.costs) == 4 * sum(p.numel() for p in model.parameters())


def test_random_state_and_threads_are_left_as_they_were() -> None:
    model, make_batch = build("two_branch", dropout=0.1)
    batch = make_batch(SAMPLES, 0)
    threads = torch.get_num_threads()
    before = torch.get_rng_state()
    profile = measured(model, batch, threads=threads + 1)
    assert profile.device == f"cpu ({threads + 1} threads)"
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def test_errors_name_the_block_and_the_fix() -> None:
    model, batch, captured = prepared("two_branch")
    short = {name: tensor for name, tensor in state_of(model).items() if name != "head.weight"}
    with pytest.raises(ValueError, match=r"sample_counts \[1, 4\] need capture_at"):
        measured(model, batch, captured, sample_counts=(1, 4))
    with pytest.raises(ProfileError, match=r"capture_at\(2\) returned a graph of 4 samples"):
        measured(model, batch, captured, sample_counts=(2, 4), capture_at=lambda n: captured)
    with pytest.raises(ProfileError, match=r"model_state has no 'head.weight'; pass all"):
        measured(model, batch, captured, model_state=short)
    with pytest.raises(ProfileError, match=r"cannot be run at 4 samples on cpu: IndexError"):
        measured(model, {**batch, "labels": batch["labels"] + 100}, captured)


class _HalfBranch(nn.Module):
    """A branch in half precision, called with a named type or with its weight's own."""

    def __init__(self, *, is_named: bool) -> None:
        super().__init__()
        self.branch, self.is_named = nn.Linear(4, 4).bfloat16(), is_named

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.branch(x.bfloat16() if self.is_named else x.to(self.branch.weight.dtype))
        return found.float().square().mean()


def test_a_block_in_another_type_says_so_and_the_advice_works() -> None:
    batch = {"x": torch.randn(2, 4)}
    for is_named in (True, False):
        model = _HalfBranch(is_named=is_named)
        captured = capture_model(model, batch, dtype=torch.float32)
        if not is_named:
            assert measured(model, batch, captured).costs
            continue
        with pytest.raises(ProfileError) as told:
            measured(model, batch, captured)
        assert "branch.weight is bfloat16 in the model and float32 in this job" in str(told.value)
        assert "x.to(weight.dtype)" in str(told.value) and "memory" not in str(told.value)


def test_slow_code_is_not_repeated_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "BUDGET_S", 0.05)
    calls: list[float] = []

    def slow(x: Tensor) -> tuple[Tensor, ...]:
        calls.append(time.perf_counter())
        end = time.thread_time() + 0.04
        while time.thread_time() < end:
            pass
        return (x * 2,)

    result = timing.measure(piece_of(slow), device=torch.device("cpu"), repeats=50, with_peak=False)
    assert result.forward_us >= 40_000
    assert len(calls) <= 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda() -> None:
    model, make_batch = build("clip")
    batch = make_batch(SAMPLES, 0)
    device = torch.device("cuda", 0)
    profile = measured(model, batch, capture_model(model, batch, device=device))
    assert profile.device == torch.cuda.get_device_name(device)
    assert all(c.forward_us[0] > 0 for c in profile.costs)
    assert saved_bytes(profile) > 0


def test_what_is_recorded_is_free_when_the_graph_is() -> None:
    """An operator that keeps its own result must not keep itself."""
    saved = SavedStorages()
    with saved.recording():
        result = torch.randn(8, requires_grad=True).exp()
    assert saved.total_bytes == 32
    storage = weakref.ref(result.untyped_storage())
    saved.clear()
    del result
    assert storage() is None
