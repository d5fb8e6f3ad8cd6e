"""What is remembered of modules that other ranks run, and when they are run on shapes again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, MistralConfig

from gpp_plugin.model.generation.shape_memory import ShapeMemory
from gpp_plugin.model.generation.stage_tensors import LaneRun, StageTensor


class NoWire:
    device = torch.device("cpu")
    position = 1


class Layer:
    """A module that caches what it is given, and returns it, with scores over the cache if asked to."""

    def __init__(self, *, scores: bool = False) -> None:
        self.calls = 0
        self.scores = scores

    def __call__(self, hidden: Tensor, *, mask: Tensor | None, cache: Any) -> Any:
        self.calls += 1
        keys, _ = cache.update(hidden[:, None], hidden[:, None], 0)
        return (hidden * 2, hidden[:, :1] @ keys[:, 0].transpose(1, 2) if self.scores else None)


def decode(layer: Layer, steps: int, cache: Any, memory: ShapeMemory, run: LaneRun) -> list[Any]:
    made = []
    for step in range(steps):
        length = 5 if step == 0 else 1
        hidden = StageTensor(torch.empty(2, length, 3, device="meta"), (0,), run)
        made.append(memory.call(run, layer, 0, (hidden,), {"mask": torch.ones(2, 5 + step), "cache": cache}))
        assert cache.get_seq_length() == 5 + step, "the cache has its length, whether the module ran or not"
    return made


def test_a_module_whose_result_does_not_change_runs_for_three_tokens() -> None:
    run = LaneRun(NoWire())  # type: ignore[arg-type]
    layer, memory = Layer(), ShapeMemory()
    made = decode(layer, 7, DynamicCache(), memory, run)
    assert layer.calls == 3, "the prompt and two tokens"
    for hidden, nothing in made[1:]:
        assert (
            hidden.shape == (2, 1, 3) and hidden.holders == (0,) and hidden.value.is_meta and nothing is None
        )
    decode(layer, 5, DynamicCache(), memory, run)
    assert layer.calls == 3, "another cache changes nothing"


def test_a_module_that_notes_more_than_lengths_meets_each_cache_anew() -> None:
    run = LaneRun(NoWire())  # type: ignore[arg-type]
    layer, memory = Layer(), ShapeMemory()
    config = MistralConfig(num_hidden_layers=1, sliding_window=64)
    for calls in (3, 6):
        decode(layer, 7, DynamicCache(config=config), memory, run)
        assert layer.calls >= calls


def test_a_module_whose_result_grows_with_the_cache_runs_each_time() -> None:
    run = LaneRun(NoWire())  # type: ignore[arg-type]
    layer = Layer(scores=True)
    made = decode(layer, 6, DynamicCache(), ShapeMemory(), run)
    assert layer.calls == 6 and [scores.shape[2] for _, scores in made] == [5, 6, 7, 8, 9, 10]


def test_a_module_whose_result_depends_on_the_numbers_in_a_tensor_is_run_for_others() -> None:
    """Pixtral's tower cuts as many patches out of its pixels as the sizes of the images say."""
    run = LaneRun(NoWire())  # type: ignore[arg-type]
    memory, calls = ShapeMemory(), []

    def tower(pixels: Tensor, sizes: Tensor) -> Any:
        calls.append(sizes)
        rows = sum(high * wide for high, wide in sizes.tolist())
        return StageTensor(torch.empty(rows, 4, device="meta"), (0,), run)

    def rows_of(*sizes: tuple[int, int]) -> int:
        return len(memory.call(run, tower, 0, (torch.ones(2, 3, 20, 20), torch.tensor(sizes)), {}))

    assert [rows_of((10, 10), (4, 4)), rows_of((10, 10), (10, 5)), rows_of((5, 5), (5, 5))] == [116, 150, 50]
    assert rows_of((10, 10), (4, 4)) == 116 and len(calls) == 3, "the same sizes are known"


def test_numbers_in_the_only_tensor_of_a_module_count() -> None:
    """A table of positions may be given the sizes of images, and nothing else."""
    run = LaneRun(NoWire())  # type: ignore[arg-type]
    memory = ShapeMemory()

    def positions(sizes: Tensor) -> Any:
        return StageTensor(torch.empty(int(sizes.sum()), 4, device="meta"), (0,), run)

    found = [len(memory.call(run, positions, 0, (torch.tensor(sizes),), {})) for sizes in ([3, 4], [5, 6])]
    assert found == [7, 11]


def test_token_ids_of_an_embedding_are_known_by_their_shape() -> None:
    run = LaneRun(NoWire())  # type: ignore[arg-type]
    memory, calls = ShapeMemory(chooses_rows=True), []

    def embed(ids: Tensor) -> Any:
        calls.append(ids)
        return StageTensor(torch.empty(*ids.shape, 4, device="meta"), (0,), run)

    for token in range(5):
        assert memory.call(run, embed, 0, (torch.tensor([[token]]),), {}).shape == (1, 1, 4)
    assert len(calls) == 1
