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
