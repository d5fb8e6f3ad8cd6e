"""Where gradients lie, what the host knows of them, and when they are sent."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.engine import gradient_store, partitioned_gradients
from gpp_plugin.engine.gradient_store import GradientStore, sum_over
from gpp_plugin.engine.partitioned_gradients import FlatGroup, ParameterSpan, PartitionedGradients
from gpp_plugin.errors import RuntimeFailure
from tests.ranks import run_kept_ranks

WIDTH, LAYERS, MICRO_BATCHES = 5, 6, 3
BUCKET = 2 * (WIDTH * WIDTH + WIDTH)
"""Elements of two layers: three buckets."""


class Tower(nn.Module):
    """Layers in a row, each of which may be left out."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(LAYERS))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)

    def forward(self, x: Tensor, left_out: tuple[int, ...] = ()) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index not in left_out:
                x = torch.tanh(layer(x))
        return x


def make_store(tower: nn.Module, **options: Any) -> GradientStore:
    settings = {"dtype": None, "bucket_elements": BUCKET, **options}
    return GradientStore(dict(tower.named_parameters()), **settings)


def partitioned(
    parameters: dict[str, nn.Parameter],
    group: FlatGroup,
    *,
    position: int = 0,
    degree: int = 1,
    **options: Any,
) -> PartitionedGradients:
    given: Any = {"group": None, "dtype": torch.float32, "communication_dtype": None, **options}
    return PartitionedGradients(parameters, [group], position=position, degree=degree, **given)


def backward(tower: Tower, seed: int, left_out: tuple[int, ...] = ()) -> None:
    rows = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
    tower(rows.to(tower.layers[0].weight.dtype), left_out).float().square().sum().backward()


# ---- one rank --------------------------------------------------------------------------------------------


def test_autograd_adds_up_in_one_buffer_that_stays() -> None:
    tower, other = Tower(), Tower()
    store = make_store(tower)
    wanted = sum(p.nbytes for p in tower.parameters())
    places = {n: p.grad.data_ptr() for n, p in tower.named_parameters() if p.grad is not None}
    first, last = min(places.values()), max(places.values())
    assert len(places) == 2 * LAYERS and last - first < wanted, "one after the other"
    for step in range(2):
        for micro_batch in range(MICRO_BATCHES):
            backward(tower, 10 * step + micro_batch)
            backward(other, 10 * step + micro_batch)
            store.accumulate()
            assert store.held_bytes() == wanted
        store.reduce_data()
        for name, parameter in other.named_parameters():
            found = store.get(name)
            assert found is not None and torch.equal(found, parameter.grad), name
            assert found.data_ptr() == places[name]
        store.clear()
        other.zero_grad()
        assert store.is_empty() and store.get("layers.0.weight") is None


def test_sums_of_another_type_are_added_in_one_call_a_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    tower, other = Tower(torch.bfloat16), Tower(torch.bfloat16)
    store = make_store(tower, dtype=torch.float32)
    calls: list[int] = []
    add = torch._foreach_add_
    monkeypatch.setattr(torch, "_foreach_add_", lambda sums, new: (calls.append(len(new)), add(sums, new)))
    sums: dict[str, Tensor] = {}
    for micro_batch in range(MICRO_BATCHES):
        backward(tower, micro_batch)
        backward(other, micro_batch)
        store.accumulate()
        for name, parameter in other.named_parameters():
            sums[name] = sums[name] + parameter.grad if name in sums else parameter.grad.float()
            parameter.grad = None
        assert all(parameter.grad is None for parameter in tower.parameters())
    assert calls == [2 * LAYERS] * MICRO_BATCHES
    assert all(torch.equal(store.get(name), value) for name, value in sums.items())


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_what_no_loss_reaches_has_no_gradient(dtype: torch.dtype | None) -> None:
    tower = Tower()
    store = make_store(tower, dtype=dtype)
    for left_out in ((1,), (1, 4), (0, 1, 2)):
        assert store.is_empty()
        backward(tower, 0, left_out)
        assert not store.is_empty()
        store.accumulate()
        store.reduce_data()
        missing = {name for name in store.parameters if store.get(name) is None}
        assert missing == {f"layers.{i}.{kind}" for i in left_out for kind in ("weight", "bias")}
        assert store.gather().keys() == store.parameters.keys() - missing
        store.clear()


def test_a_gradient_that_somebody_took_away_or_replaced_is_what_counts() -> None:
    tower = Tower()
    store = make_store(tower)
    backward(tower, 0)
    tower.layers[0].weight.grad = None
    tower.layers[1].weight.grad = torch.ones(WIDTH, WIDTH)
    store.reduce_data()
    assert store.get("layers.0.weight") is None
    assert torch.equal(store.get("layers.1.weight"), torch.ones(WIDTH, WIDTH))
    store.clear()
    tower.zero_grad()  # a user's; autograd makes new gradients
    backward(tower, 1)
    other = Tower()
    backward(other, 1)
    store.reduce_data()
    assert all(torch.equal(store.get(n), p.grad) for n, p in other.named_parameters())
    assert all(p.grad is store.get(n) for n, p in tower.named_parameters()), "and adds to ours again"


def test_a_gradient_has_the_strides_of_its_parameter() -> None:
    layer = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    make_store(layer)
    assert layer.weight.grad is not None
    assert layer.weight.grad.stride() == layer.weight.stride() != layer.weight.contiguous().stride()


def test_a_mini_batch_begins_with_nothing_of_the_last_one() -> None:
    """Flags, what rests and what is known of other ranks."""
    tower = Tower()
    store = make_store(tower, bucket_elements=30)
    names = list(store.parameters)
    for left_out, rests in (((3,), True), ((), False)):
        assert store.unknown() is None
        backward(tower, 0, left_out)
        brought = [summand.brought for summand in store.tied_summands(names)]
        flags = torch.cat([each[-2:] for each in brought])
        assert flags.tolist() == [0.0 if i in (6, 7) and left_out else 1.0 for i in range(12)]
        assert (store.unknown() is None) == (not left_out)
        before = store.squared_norm(without=(), precision=torch.float64)
        if rests:
            store.rest(["layers.0.weight"])
            part = tower.layers[0].weight.grad
            assert part is not None and not part.any() and store.get("layers.0.weight") is None
            assert store.squared_norm(without=(), precision=torch.float64) < before
        else:
            assert all(store.get(name) is not None for name in names)
        store.clear()


def test_ranks_of_a_stage_share_out_its_norm_and_one_brings_its_sum_in_bounded_messages() -> None:
    towers = [Tower(), Tower()]
    stores = [make_store(tower, position=i, degree=2, bucket_elements=31) for i, tower in enumerate(towers)]
    for tower in towers:
        backward(tower, 0)
    whole = sum(float(p.grad.double().square().sum()) for p in towers[0].parameters() if p.grad is not None)
    shares = [float(store.squared_norm(without=(), precision=torch.float64)) for store in stores]
    assert sum(shares) == pytest.approx(whole) and all(share > 0 for share in shares)
    names = list(stores[0].parameters)
    first, second = ([summand.brought for summand in store.tied_summands(names)] for store in stores)
    assert [len(each) for each in first] == [25 + 5 + 2] * LAYERS, "a weight and its bias, and two flags"
    assert all(each.any() for each in first) and not any(each.any() for each in second)


@pytest.mark.parametrize("most", [30, 29, 60])
def test_buckets_are_sent_from_the_back_in_bounded_messages(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(
        dist, "all_reduce", lambda payload, **_: (sent.append(payload.numel()), payload.mul_(2))
    )
    monkeypatch.setattr(gradient_store, "finish", lambda *_, **__: None)
    tower, other = Tower(), Tower()
    store = make_store(tower, degree=2, bucket_elements=most)
    backward(tower, 0, (3,))
    backward(other, 0, (3,))
    store.reduce_data()
    layer = {30: [30], 29: [5, 25], 60: [60]}[most]
    assert sent == [*(layer * (6 if most < 60 else 3))[:-1], layer[-1] + 64], "and the flags at the front"
    for name, parameter in other.named_parameters():
        found = store.whole(name)
        wanted = torch.zeros_like(parameter) if parameter.grad is None else 2 * parameter.grad
        assert found is not None and torch.equal(found, wanted)


def test_a_stage_of_one_rank_has_whole_sums_where_its_optimizer_partitions_them() -> None:
    weight, bias = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(2))
    spans = tuple(
        ParameterSpan(name=n, first=f, num_elements=p.numel())
        for n, f, p in (("w", 0, weight), ("b", 6, bias))
    )
    group = FlatGroup(spans=spans, partition_size=8)
    store = partitioned({"w": weight, "b": bias}, group, bucket_elements=4, is_reduced_often=True)
    weight.grad = torch.arange(6.0).view(2, 3)
    store.reduce_data()
    assert store.whole("w").tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]] and store.whole("b") is None
    assert store.gather().keys() == {"w"}


def test_flags_of_many_parameters_lie_before_all_gradients() -> None:
    vectors = nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(70))
    store = make_store(vectors)
    sum((i + 2) * p.sum() for i, p in enumerate(vectors)).backward()
    for _ in store.tied_summands(list(store.parameters)):  # writes the flags
        pass
    assert all(torch.equal(store.get(f"{i}"), torch.full((2,), i + 2.0)) for i in range(70))


def test_stages_of_one_rank_that_share_a_parameter_both_have_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_store, "all_reduce", lambda total, **_: total.mul_(10))
    towers = [Tower(), Tower()]
    stores = [make_store(tower) for tower in towers]
    for number, tower in enumerate(towers):
        backward(tower, number)
    name = "layers.1.weight"
    wanted = 10 * sum(store.whole(name).clone() for store in stores)
    sum_over(0, [store.tied_summands([name]) for store in stores])
    assert all(torch.equal(store.whole(name), wanted) for store in stores)


# ---- several ranks ---------------------------------------------------------------------------------------


class Watch:
    """Notes each all-reduce: how many backwards have ended, and whether it is made where gradients lie."""

    def __init__(self, store: GradientStore) -> None:
        self.sent: list[tuple[str, int, bool]] = []
        self.moment = ""
        self._buffers = [buffer.flat for buffer in store._buffers]
        self._call = dist.all_reduce

    def __enter__(self) -> Watch:
        dist.all_reduce = self._note
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_reduce = self._call

    def _note(self, tensor: Tensor, **options: Any) -> Any:
        storages = [flat.untyped_storage().data_ptr() for flat in self._buffers]
        self.sent.append((self.moment, tensor.numel(), tensor.untyped_storage().data_ptr() in storages))
        return self._call(tensor, **options)


def train_early(precision: str, left_out: dict[int, tuple[int, ...]]) -> dict[str, Any]:
    """Make the sums of three mini-batches, early and not; ranks may leave out layers in their last micro-batch."""
    rank = dist.get_rank()
    dtype = torch.bfloat16 if "bf16" in precision else torch.float32
    answers: dict[str, Any] = {}
    for reduces_early in (False, True):
        tower = Tower(dtype)
        store = make_store(
            tower,
            dtype=torch.float32 if precision.endswith("fp32") else None,
            group=dist.group.WORLD,
            position=rank,
            degree=dist.get_world_size(),
            reduces_early=reduces_early,
        )
        sums, sent = [], []
        for step in range(3):
            with Watch(store) as watch:
                for micro_batch in range(MICRO_BATCHES):
                    is_last = micro_batch == MICRO_BATCHES - 1
                    if is_last:
                        store.begin_reduction()
                    watch.moment = "backward"
                    backward(tower, 100 * step + 10 * micro_batch + rank, left_out[rank] if is_last else (3,))
                    watch.moment = "accumulate"
                    store.accumulate()
                    watch.moment = "reduce"
                store.reduce_data()
            unknown = store.unknown()
            num_unknown = 0 if unknown is None else unknown.numel()
            sums.append(store.gather())
            sent.append(watch.sent)
            store.clear()
        answers["early" if reduces_early else "late"] = {"sums": sums, "sent": sent, "unknown": num_unknown}
    return answers


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16+fp32"])
@pytest.mark.parametrize("left_out", [{0: (), 1: ()}, {0: (3,), 1: ()}, {0: (3, 5), 1: (3,)}])
def test_early_sums_are_the_same_bits(precision: str, left_out: dict[int, tuple[int, ...]]) -> None:
    found = run_kept_ranks(train_early, 2, precision, left_out)
    every = set(range(LAYERS)) - (set(left_out[0]) & set(left_out[1]))
    flags, per_layer = 64, WIDTH * WIDTH + WIDTH
    sizes = [2 * per_layer, 2 * per_layer, 2 * per_layer + flags]
    for rank, answer in enumerate(found):
        for step in range(3):
            early, late = (answer[way]["sums"][step] for way in ("early", "late"))
            assert early.keys() == late.keys() and len(late) == 2 * len(every)
            assert all(torch.equal(early[name], late[name]) for name in late)
            assert all(torch.equal(late[name], found[0]["late"]["sums"][step][name]) for name in late)
            assert answer["late"]["sent"][step] == [("reduce", size, True) for size in sizes]
            assert [size for _, size, _ in answer["early"]["sent"][step]] == sizes, "one order"
            assert all(is_in_place for *_, is_in_place in answer["early"]["sent"][step])
        moments = [[moment for moment, *_ in sent] for sent in answer["early"]["sent"]]
        assert moments[0] == ["accumulate"] * 3, "the first backward is watched"
        # Buckets are sent in their order, so that one which is never final keeps the others back.
        last_bucket_is_final = not {4, 5} & set(left_out[rank])
        middle_is_final = last_bucket_is_final and 3 not in left_out[rank]
        num_early = 3 if middle_is_final else 1 if last_bucket_is_final else 0
        assert moments[1] == moments[2] == ["backward"] * num_early + ["accumulate"] * (3 - num_early)
        assert answer["late"]["unknown"] == (2 * (3 in left_out[rank]))


def sum_ties() -> tuple[int, dict[str, Tensor], float]:
    """Sum a stage's gradients, each rank a stage of its own, over both; neither reaches layer 3, one reaches layer 4."""
    rank = dist.get_rank()
    tower = Tower()
    store = make_store(tower)
    backward(tower, rank, (3, 4) if rank else (3,))
    store.accumulate()
    store.reduce_data()
    sum_over(dist.group.WORLD, [store.tied_summands(list(store.parameters))])
    norm = float(store.squared_norm(without=(), precision=torch.float64))
    unknown = store.unknown()
    assert unknown is not None
    store.learn(unknown.tolist())
    found = {name: store.get(name) for name in store.parameters}
    return unknown.numel(), {name: g.clone() for name, g in found.items() if g is not None}, norm


def test_a_tie_that_no_stage_reaches_has_no_gradient() -> None:
    (first, sums, norm), (second, others, other_norm) = run_kept_ranks(sum_ties, 2)
    assert (first, second) == (2, 4), "flags of weight and bias"
    assert {name for name in Tower().state_dict() if name not in sums} == {"layers.3.weight", "layers.3.bias"}
    assert sums.keys() == others.keys() and all(torch.equal(sums[name], others[name]) for name in sums)
    assert norm == other_norm > 0


class Twice(torch.autograd.Function):
    """Runs a backward inside its backward, as reentrant checkpoints do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            ctx.layer(torch.ones(1, WIDTH)).sum().backward()
        return gradient, None


def reach_twice(from_step: int) -> tuple[list[bool], str]:
    """Reach the last layer a second time, from below the others, in all mini-batches from ``from_step`` on."""
    tower, other = Tower(), Tower()
    store = make_store(tower, group=dist.group.WORLD, degree=dist.get_world_size(), reduces_early=True)
    same = []
    try:
        for step in range(3):
            store.begin_reduction()
            for each in (tower, other):
                rows = torch.ones(4, WIDTH, requires_grad=True)
                entered = Twice.apply(rows, each.layers[-1]) if step >= from_step else rows
                each(entered).square().sum().backward()
            store.accumulate()
            store.reduce_data()
            whole = {name: 2 * p.grad for name, p in other.named_parameters()}
            same.append(all(torch.equal(store.get(name), whole[name]) for name in whole))
            store.clear()
            other.zero_grad()
    except RuntimeFailure as error:
        return same, str(error)
    return same, ""


@pytest.fixture
def two_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks with equal gradients, of which this is one."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda payload, **_: payload.mul_(2))
    monkeypatch.setattr(gradient_store, "finish", lambda *_, **__: None)


def test_a_parameter_that_one_backward_reaches_twice(two_alike: None) -> None:
    assert reach_twice(0) == ([True] * 3, "")
    same, text = reach_twice(1)
    assert same == [True] and "use_reentrant=False" in text


def test_what_was_taken_away_before_the_last_backward_is_not_sent(two_alike: None) -> None:
    tower, other = Tower(), Tower()
    store = make_store(tower, degree=2, reduces_early=True)
    for _ in range(2):  # the first one is watched only
        backward(tower, 0)
        store.accumulate()
        tower.zero_grad()
        store.begin_reduction()
        backward(tower, 1)
        store.accumulate()
        store.reduce_data()
        other.zero_grad()
        backward(other, 1)
        for name, parameter in other.named_parameters():
            assert parameter.grad is not None and torch.equal(store.whole(name), 2 * parameter.grad), name
        store.clear()


@pytest.mark.parametrize("bucket", [12, 3, 1000])
@pytest.mark.parametrize("is_reduced_often", [False, True], ids=["ZeRO 1", "ZeRO 2"])
def test_three_partitions_make_up_the_sums_of_unlike_parameters(
    bucket: int, is_reduced_often: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank's in turn, the others with equal gradients: parameters of 5, 12, 1 and 8 elements over 3 x 10."""

    def all_reduce(tensor: Tensor, *, group: Any, what: str) -> None:
        assert tensor.numel() <= bucket
        tensor.mul_(3)

    monkeypatch.setattr(partitioned_gradients, "all_reduce", all_reduce)
    sizes = {"a": (5,), "b": (3, 4), "c": (1,), "d": (2, 4)}
    firsts = {"a": 0, "b": 5, "c": 17, "d": 18}
    spans = tuple(
        ParameterSpan(name=n, first=firsts[n], num_elements=math.prod(size)) for n, size in sizes.items()
    )
    made = [{n: torch.randn(size, generator=torch.Generator().manual_seed(i)) for n, size in sizes.items() if n != "c"}
            for i in range(3)]  # fmt: skip
    total = {name: 3 * sum(each[name] for each in made) for name in ("a", "b", "d")}
    flat = torch.cat(
        [total.get(n, torch.zeros(size)).flatten() for n, size in sizes.items()] + [torch.zeros(4)]
    )
    shares, tied, norms = [], [], []
    for position in range(3):
        parameters = {n: torch.nn.Parameter(torch.zeros(size)) for n, size in sizes.items()}
        options = {"bucket_elements": bucket, "is_reduced_often": is_reduced_often}
        group = FlatGroup(spans=spans, partition_size=10)
        store = partitioned(parameters, group, position=position, degree=3, **options)
        for p in parameters.values():
            p.grad = torch.ones_like(p)
        assert store.held_bytes() == 4 * (26 + (10 if is_reduced_often else 26)), "a mini-batch that fails"
        store.clear()
        assert is_reduced_often == all(p.grad is None for p in parameters.values())
        for _ in range(2):  # the second mini-batch begins with nothing
            assert store.is_empty() and not store.resting
            for number, each in enumerate(made):
                for name, gradient in each.items():
                    held = parameters[name].grad
                    parameters[name].grad = gradient.clone() if held is None else held.add_(gradient)
                store.accumulate()
                if is_reduced_often or number == 2:
                    store.reduce_data()
                    assert not is_reduced_often or all(p.grad is None for p in parameters.values())
            assert not store.is_empty()
            torch.testing.assert_close(store.partitions[0], flat[10 * position : 10 * position + 10])
            share = float(store.squared_norm(without=["d"], precision=torch.float64))
            summands = list(store.tied_summands(["d", "b"]))
            assert [len(s.brought) for s in summands] == {12: [12, 8], 3: [3] * 6 + [2], 1000: [20]}[bucket]
            brought = torch.cat([summand.brought for summand in summands])
            own = store.norms(["d", "a"]).square()
            for summand in summands:
                summand.take(summand.brought * 2)
            doubled = flat.clone()
            doubled[5:17] *= 2
            doubled[18:26] *= 2
            torch.testing.assert_close(store.partitions[0], doubled[10 * position : 10 * position + 10])
            store.rest(["b", "a"])
            doubled[:17] = 0
            torch.testing.assert_close(store.partitions[0], doubled[10 * position : 10 * position + 10])
            assert store.resting == {"a", "b"}
            store.clear()
        shares.append(share)
        tied.append(brought)
        norms.append(own)
    wanted = flat.double().square()
    assert sum(shares) == pytest.approx(float(wanted[:18].sum()))
    torch.testing.assert_close(sum(tied), torch.cat([total["d"].flatten(), total["b"].flatten()]))
    torch.testing.assert_close(sum(norms), torch.stack([wanted[18:26].sum(), wanted[:5].sum()]))
