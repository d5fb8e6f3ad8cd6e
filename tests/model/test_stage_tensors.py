"""What operators make of tensors that other ranks hold: shapes here, values where they are told."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutput

from gpp_plugin.errors import CaptureError, ConfigError
from gpp_plugin.integrations.huggingface.generate_calls import generating_model
from gpp_plugin.model.generation.micro_batches import ReplicaStopped
from gpp_plugin.model.generation.stage_tensors import ReplicaRun, StageTensor, map_tensors
from gpp_plugin.model.model_source import ModelSource
from tests.models import build


class Payload:
    """Rank 1 of two; what rank 0 tells is given beforehand."""

    device = torch.device("cpu")
    position = 1
    ranks = (0, 1)
    turns = None

    def __init__(self, comes: dict[int, Tensor]) -> None:
        self.comes = comes
        self.told: list[int] = []

    def broadcast(
        self, value: Tensor, *, source: int, readers: Sequence[int], has_failed: bool
    ) -> Tensor | None:
        self.told.append(source)
        if has_failed and source == self.position:
            return None
        return self.comes[len(self.told)] if self.position in readers else value


def lane(**comes: Tensor) -> tuple[ReplicaRun, Payload]:
    link = Payload({int(name[1:]): tensor for name, tensor in comes.items()})
    return ReplicaRun(link), link  # type: ignore[arg-type]


def test_an_operator_runs_where_its_operands_lie_and_on_shapes_elsewhere() -> None:
    run, link = lane()
    there = StageTensor(torch.empty(2, 3, device="meta"), (0,), run)
    here = StageTensor(torch.ones(2, 3), (1,), run)
    for made in (
        there @ torch.ones(3, 4),
        there.to("cpu").new_zeros(2, 4),
        there[:, :1].expand(2, 4).clone(),
    ):
        assert isinstance(made, StageTensor) and made.value.is_meta
        assert made.shape == (2, 4) and made.holders == (0,) and made.device.type == "cpu"
    doubled: Any = here + here
    assert doubled.holders == (1,) and doubled.value.equal(torch.full((2, 3), 2.0)) and not link.told


def test_what_lies_elsewhere_is_told_once() -> None:
    run, link = lane(_1=torch.full((2,), 5.0))
    there = StageTensor(torch.empty(2, device="meta"), (0,), run)
    here = StageTensor(torch.ones(2), (1,), run)
    for _ in range(2):
        total: Any = there + here
        assert total.value.equal(torch.full((2,), 6.0))
    assert link.told == [0] and isinstance(run.broadcast(total), Tensor)


def test_a_module_runs_where_its_last_input_is_and_what_it_returns_is_that_rank_s() -> None:
    run, _ = lane()
    there, here = StageTensor(torch.empty(2, device="meta"), (0,), run), StageTensor(torch.ones(2), (1,), run)
    both = StageTensor(torch.ones(2), (2, 0), run)
    weight = StageTensor(torch.ones(2), (1,), run, is_weight=True)
    for values, owner in (
        ((there, here), 1), ((here, {"hidden": there}), 0), ((there, weight), 0), ((both, here, torch.ones(1)), 1),
        ((here, both), 0), ((weight, torch.ones(1)), 0),
    ):  # fmt: skip
        assert run.owner_of(values, (0, 1)) == owner
    made = [run.as_made_on((torch.ones(3), here, "x"), owner) for owner in (0, 1)]
    assert [(t.value.is_meta, t.holders, t.shape) for t, *_ in made] == [
        (True, (0,), (3,)),
        (False, (1,), (3,)),
    ]
    assert all(same is here and text == "x" for _, same, text in made)


def test_a_micro_batch_that_stops_stops_the_others_with_their_next_tensor() -> None:
    run, link = lane()
    link.turns = SimpleNamespace(is_stopping=False)  # type: ignore[assignment]
    here = StageTensor(torch.ones(2), (1,), run)
    assert run.broadcast(here).tolist() == [1.0, 1.0] and not run.has_failed
    link.comes = dict.fromkeys(range(9))  # type: ignore[arg-type]
    with pytest.raises(ReplicaStopped):
        run.broadcast(StageTensor(torch.empty(2, device="meta"), (0,), run))
    assert link.turns.is_stopping and run.has_failed
    other, second = lane()
    second.turns = link.turns
    with pytest.raises(ReplicaStopped):
        other.broadcast(StageTensor(torch.ones(2), (1,), other))
    assert other.has_failed, "it says so itself, before it is told"


def test_what_is_handed_over_is_held_by_both_and_no_other_rank_takes_part() -> None:
    run, link = lane()
    link.ranks = (0, 1, 2)
    hidden = StageTensor(torch.empty(2, 3, device="meta"), (0,), run)
    weight = StageTensor(torch.empty(3, 3, device="meta"), (2,), run, is_weight=True)
    made: Any = hidden @ weight
    assert made.holders == (2,) and hidden.holders == (0, 2) and hidden.value.is_meta and link.told == [0]
    both: Any = hidden * 2
    assert both.holders == (0, 2) and link.told == [0], "what lies there need not be sent again"


def test_who_hears_of_a_failure_goes_on_with_shapes_until_all_ranks_hear() -> None:
    run, link = lane()
    link.comes = dict.fromkeys(range(9))  # type: ignore[arg-type]
    there = StageTensor(torch.empty(2, device="meta"), (0,), run)
    here = StageTensor(torch.ones(2), (1,), run)
    total: Any = there + here
    assert run.has_failed and total.value.is_meta and total.shape == (2,)
    with pytest.raises(ReplicaStopped):
        run.broadcast(total)
    assert run.failure is None, "it is another rank's"


def test_a_tied_weight_is_read_beside_the_other_operand() -> None:
    run, link = lane()
    weight = StageTensor(torch.ones(3, 4), (0, 1), run, is_weight=True)
    here: Any = StageTensor(torch.ones(2, 4), (1,), run) @ weight.t()
    there: Any = StageTensor(torch.empty(2, 4, device="meta"), (0,), run) @ weight.t()
    assert here.holders == (1,) and not here.value.is_meta and there.holders == (0,) and not link.told


def test_values_that_are_read_are_told_but_not_inside_of_another_ranks_module() -> None:
    run, link = lane(_1=torch.tensor([0.0, 1.0]))
    there = StageTensor(torch.empty(2, device="meta"), (0,), run)
    assert (there > 0.5).nonzero().shape == (1, 1) and link.told == [0]
    picked: Any = StageTensor(torch.empty(3, 2, device="meta"), (0,), run)[torch.tensor([True, False, True])]
    assert picked.shape == (2, 2), "of a mask that all ranks have, all know how many it picks"
    with run.inside("Experts"), pytest.raises(CaptureError, match="Experts decides by the values"):
        StageTensor(torch.empty(2, device="meta"), (0,), run).max().item()


def test_a_tied_weight_is_a_shape_inside_of_another_ranks_module() -> None:
    """An index that is no row of it fails where the module runs, and not here, where nobody would hear of it."""
    run, _ = lane()
    weight = StageTensor(torch.ones(3, 4), (0, 1), run, is_weight=True)
    with run.inside("Embedding"):
        made: Any = torch.nn.functional.embedding(torch.tensor([5]), weight)
    assert made.value.is_meta and made.shape == (1, 4)
    with pytest.raises(IndexError):
        torch.nn.functional.embedding(torch.tensor([5]), weight)


def test_writing_in_place_keeps_the_tensor_and_forgets_what_was_told() -> None:
    run, link = lane()
    here: Any = StageTensor(torch.ones(2), (1,), run)
    run.broadcast(here)
    written = here.mul_(3)
    assert written is here and run.broadcast(here).equal(torch.full((2,), 3.0)) and link.told == [1, 1]


def test_structures_keep_their_classes() -> None:
    made = map_tensors(
        {"a": (torch.ones(1), [None]), "b": CausalLMOutput(logits=torch.ones(2))}, lambda t: t + 1
    )
    assert made["a"][0].item() == 2 and made["a"][1] == [None]
    assert isinstance(made["b"], CausalLMOutput) and made["b"].logits.sum() == 4 and made["b"].loss is None


def test_a_model_that_cannot_generate_says_so() -> None:
    with pytest.raises(ConfigError, match=r"CLIPModel cannot generate .* AutoModelForCausalLM"):
        generating_model(build("clip")[0])


def test_a_graph_of_stages_written_down_has_no_decode_step() -> None:
    source = object.__new__(ModelSource)
    source._made = SimpleNamespace(whole=None)  # type: ignore[assignment]
    unused: Any = None
    with pytest.raises(ConfigError, match="a graph of stages written down, which has no `generate`"):
        source.make_generator(unused, unused, [], collectives=unused, free_bytes=lambda: None)
