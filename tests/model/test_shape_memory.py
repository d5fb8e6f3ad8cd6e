"""What is remembered of modules that other ranks run, and when they are run on shapes again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, MistralConfig

from gpp_plugin.model.generation.owned_modules import ShapeMemory
from gpp_plugin.model.generation.stage_tensors import ReplicaRun, StageTensor


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


RUN = ReplicaRun(NoWire())  # type: ignore[arg-type]


def there(*shape: int, dtype: torch.dtype | None = None) -> StageTensor:
    """Return a tensor that rank 0 has."""
    return StageTensor(torch.empty(*shape, dtype=dtype, device="meta"), (0,), RUN)


def decode(layer: Layer, steps: int, cache: Any, memory: ShapeMemory) -> list[Any]:
    made = []
    for step in range(steps):
        length = 5 if step == 0 else 1
        hidden = there(2, length, 3)
        made.append(memory.call(RUN, layer, 0, (hidden,), {"mask": torch.ones(2, 5 + step), "cache": cache}))
        assert cache.get_seq_length() == 5 + step, "the cache has its length, whether the module ran or not"
    return made


def test_a_module_whose_result_does_not_change_runs_for_three_tokens() -> None:
    layer, memory = Layer(), ShapeMemory()
    made = decode(layer, 7, DynamicCache(), memory)
    assert layer.calls == 3, "the prompt and two tokens"
    for hidden, nothing in made[1:]:
        assert (
            hidden.shape == (2, 1, 3) and hidden.holders == (0,) and hidden.value.is_meta and nothing is None
        )
    decode(layer, 5, DynamicCache(), memory)
    assert layer.calls == 3, "another cache changes nothing"


def test_a_module_that_notes_more_than_lengths_meets_each_cache_anew() -> None:
    layer, memory = Layer(), ShapeMemory()
    config = MistralConfig(num_hidden_layers=1, sliding_window=64)
    for calls in (3, 6):
        decode(layer, 7, DynamicCache(config=config), memory)
        assert layer.calls >= calls


def test_a_module_whose_result_grows_with_the_cache_runs_each_time() -> None:
    layer = Layer(scores=True)
    made = decode(layer, 6, DynamicCache(), ShapeMemory())
    assert layer.calls == 6 and [scores.shape[2] for _, scores in made] == [5, 6, 7, 8, 9, 10]


def test_a_module_whose_result_depends_on_the_numbers_in_a_tensor_is_run_for_others() -> None:
    """Pixtral's tower cuts as many patches out of its pixels as the sizes of the images say."""
    memory, calls = ShapeMemory(), []

    def tower(pixels: Tensor, sizes: Tensor) -> Any:
        calls.append(sizes)
        rows = sum(high * wide for high, wide in sizes.tolist())
        return there(rows, 4)

    def rows_of(*sizes: tuple[int, int]) -> int:
        return len(memory.call(RUN, tower, 0, (torch.ones(2, 3, 20, 20), torch.tensor(sizes)), {}))

    assert [rows_of((10, 10), (4, 4)), rows_of((10, 10), (10, 5)), rows_of((5, 5), (5, 5))] == [116, 150, 50]
    assert rows_of((10, 10), (4, 4)) == 116 and len(calls) == 3, "the same sizes are known"


def test_numbers_in_the_only_tensor_of_a_module_count() -> None:
    """A table of positions may be given the sizes of images, and nothing else."""
    memory = ShapeMemory()

    def positions(sizes: Tensor) -> Any:
        return there(int(sizes.sum()), 4)

    found = [len(memory.call(RUN, positions, 0, (torch.tensor(sizes),), {})) for sizes in ([3, 4], [5, 6])]
    assert found == [7, 11]


def test_token_ids_of_an_embedding_are_known_by_their_shape() -> None:
    memory, calls = ShapeMemory(chooses_rows=True), []

    def embed(ids: Tensor) -> Any:
        calls.append(ids)
        return there(*ids.shape, 4)

    for token in range(5):
        assert memory.call(RUN, embed, 0, (torch.tensor([[token]]),), {}).shape == (1, 1, 4)
    assert len(calls) == 1


def test_what_decides_about_a_shape_is_small_integers_and_how_a_module_is_called() -> None:
    """256 numbers are looked at, more are data; a flag is another call; of 65 kinds of calls the first is forgotten."""
    memory, calls = ShapeMemory(), []

    def tower(numbers: Tensor, *, flag: Any = None) -> Any:
        calls.append(numbers)
        return there(2, 4, dtype=torch.float16)

    def num_calls(*given: Tensor, **flags: Any) -> int:
        calls.clear()
        for numbers in given:
            made = memory.call(RUN, tower, 0, (numbers,), flags)
            assert made.dtype == torch.float16 and made.holders == (0,)
        return len(calls)

    def of(size: int, number: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.full((size,), number, dtype=dtype)

    assert num_calls(of(256), of(256, 1), of(256)) == 2 and num_calls(of(257), of(257, 1)) == 1
    assert num_calls(of(8, 0, torch.float32), of(8, 1, torch.float32)) == 1, "pixels"
    assert num_calls(of(8), of(8, 0, torch.int32), of(8)) == 2
    assert num_calls(of(8), flag=True) == num_calls(of(8), flag="a") == num_calls(of(8), flag=2) == 1
    assert num_calls(of(8), flag=True) == num_calls(of(8), flag=2) == 0
    fresh = ShapeMemory()
    memory = fresh
    assert num_calls(*(of(4, number) for number in range(65))) == 65
    assert num_calls(of(4, 1)) == 0 and num_calls(of(4, 0)) == 1


def test_a_call_with_a_full_cache_says_nothing_of_one_with_an_empty_one() -> None:
    layer, memory = Layer(), ShapeMemory()

    def step(cache: Any, length: int, mask: int) -> None:
        hidden = there(2, length, 3)
        memory.call(RUN, layer, 0, (hidden,), {"mask": torch.ones(2, mask), "cache": cache})

    first, second = DynamicCache(), DynamicCache()
    for at in range(3):  # prompts of one token: the key is the same, the cache empty and then full
        step(first, 1, 1 + at)
    assert layer.calls == 3
    step(first, 1, 4)
    assert layer.calls == 3, "two lengths of full caches gave the same"
    step(second, 1, 9)
    assert layer.calls == 4, "an empty one with another mask"
    assert [first.get_seq_length(), second.get_seq_length()] == [4, 1]


def test_a_module_that_reads_across_is_known_to_have_read_in_another_cache() -> None:
    """Its layer of the cache across is filled by the first token alone, whether the module ran for it or not."""
    memory, calls = ShapeMemory(), []

    def attend(hidden: Tensor, *, cache: EncoderDecoderCache) -> Tensor:
        calls.append(cache)
        cache.self_attention_cache.update(hidden[:, None], hidden[:, None], 0)
        if not cache.is_updated.get(0):
            source = torch.empty(2, 1, 7, 3, device="meta")
            cache.cross_attention_cache.update(*(StageTensor(source, (0,), RUN) for _ in range(2)), 0)
            cache.is_updated[0] = True
        return hidden * 2

    for number in range(2):
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        for length in (1, 2, 3):
            hidden = there(2, 1, 3)
            memory.call(RUN, attend, 0, (hidden,), {"cache": cache})
            found = [
                one.get_seq_length() for one in (cache.self_attention_cache, cache.cross_attention_cache)
            ]
            assert found == [length, 7] and cache.is_updated == {0: True}
        assert len(calls) == 3, (number, "the second cache is filled without it")


def test_how_arguments_are_nested_and_named_is_part_of_a_call() -> None:
    memory = ShapeMemory()

    def join(first: Any = (), second: Any = (), number: int = 0) -> Any:
        return there(1 + len(first), 1 + len(second), 4 + number)

    def shape_of(*args: Any, **kwargs: Any) -> tuple[int, ...]:
        return tuple(memory.call(RUN, join, 0, args, kwargs).shape)

    hidden = there(2, 3)
    for _ in range(2):
        assert shape_of([hidden], [hidden]) == (2, 2, 4) and shape_of([hidden, hidden], []) == (3, 1, 4)
        assert shape_of(first=[hidden]) == (2, 1, 4) and shape_of(second=[hidden]) == (1, 2, 4)
    assert shape_of(torch.empty(3, dtype=torch.int64, device="meta")) == (4, 1, 4), (
        "numbers that nobody knows"
    )


def test_of_states_that_are_never_alike_the_last_four_are_known() -> None:
    memory, calls = ShapeMemory(), []

    def grow(hidden: Tensor, number: int) -> Any:
        calls.append(number)
        return there(number)

    for number in (1, 2, 3, 4, 1, 4, 5, 2, 1):
        hidden = there(2, 3)
        assert memory.call(RUN, grow, 0, (hidden, number), {}).shape == (number,)
    assert calls == [1, 2, 3, 4, 5, 1]
