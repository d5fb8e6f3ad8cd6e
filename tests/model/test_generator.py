"""What a call of `engine.generate` goes through, on one rank without an engine."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from gpp_plugin.config.block import GenerateConfig
from gpp_plugin.config.reader import BatchSizes
from gpp_plugin.errors import ConfigError
from gpp_plugin.integrations.huggingface.generate_calls import argument_facts, joined_tokens
from gpp_plugin.ir.memory_report import RankCaches
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.ir.tensors import even_ranges
from gpp_plugin.model.generation.generator import (
    GeneratedModel,
    Generator,
    _all_caches,
    _note_cache,
    _Outcome,
)
from gpp_plugin.model.generation.micro_batches import Turns
from gpp_plugin.model.generation.owned_modules import DrawsOfAll, ReplicaPart, replicas_of
from gpp_plugin.runtime.ranks.collectives import Collectives
from gpp_plugin.runtime.ranks.placement_of_ranks import Setting
from tests.integrations.generation_jobs import Kept, generating, prompts, ways


def plan_of(*ranks: tuple[int, ...], tensor: int = 1) -> PipelinePlan:
    return PipelinePlan(
        model="toy", graph="0" * 16, planner="by hand", mini_batch=8, loss_unit=1, edges=(),
        stages=tuple(
            Stage(
                name=f"s{i}", blocks=(f"b{i}",), ranks=own, micro_batch_size=len(own), in_flight=1,
                tensor=tensor,
            )
            for i, own in enumerate(ranks)
        ),
    )  # fmt: skip


def generator_of(model: nn.Module, **config: Any) -> Generator:
    """Return the generator of a job of one rank, whose weights are twice the model's own."""
    trained = {name: (p * 2).detach() for name, p in model.named_parameters()}
    first = {id(p): name for name, p in reversed(list(model.named_parameters()))}
    every = model.named_parameters(remove_duplicate=False)
    generated = GeneratedModel(
        module=model,
        held=[tuple(trained)],
        names={name: first[id(p)] for name, p in every if name != first[id(p)]},
        live=lambda: trained,
        buffers=lambda: dict(model.named_buffers(remove_duplicate=False)),
    )
    setting = Setting(
        rank=0, num_ranks=1, device=torch.device("cpu"), dtype=torch.float32,
        sizes=BatchSizes(8, 1, None), zero_stage=0, optimizer_bytes=0.0, group=None,
        placement=SimpleNamespace(backend="gloo"),  # type: ignore[arg-type]
    )  # fmt: skip
    return Generator(
        generated,
        plan=plan_of((0,)),
        config=GenerateConfig(**config),
        setting=setting,
        collectives=Collectives(group=None, who="rank 0", timeout_s=1.0),
        free_bytes=lambda: None,
    )


def doubled(model: nn.Module) -> dict[str, Tensor]:
    return {name: 2 * p for name, p in model.state_dict().items()}


def test_it_generates_with_the_weights_in_training_and_reports_caches() -> None:
    model: Any = generating("llama")[0]
    generator = generator_of(model)
    streamer = Kept()
    with pytest.raises(ConfigError, match="nothing has been generated yet"):
        generator.cache_report()
    torch.manual_seed(5)
    found = generator.generate({**prompts("llama", 1), **ways("llama")["sampled"], "streamer": streamer})
    assert streamer.tokens == [*found[0].tolist(), -1]
    (report,) = generator.cache_report().ranks
    assert report.counted_bytes == report.predicted_bytes == 4 * 2 * 16 * 4 * report.length
    plain: Any = generating("llama")[0].eval()
    plain.load_state_dict(doubled(plain))
    drawn = torch.get_rng_state()
    torch.manual_seed(5)
    assert torch.equal(found, plain.generate(**prompts("llama", 1), **ways("llama")["sampled"]))
    assert torch.equal(drawn, torch.get_rng_state()), "the next call draws on from there"
    assert all(module.training for module in model.modules()) and not generator.is_broken
    generator.generate({**prompts("llama", 1), "max_new_tokens": 1})
    (one,) = generator.cache_report().ranks
    assert one.layers == report.layers > 0, "of a single forward"
    caches: list[Any] = [None]
    for cache in (DynamicCache(), None):
        _note_cache(caches, model, (), {"past_key_values": cache})
    assert isinstance(caches[0], DynamicCache), "empty as it was, and false"
    assert not model._forward_pre_hooks, "what looked at caches is gone"
    model.model.norm.forward = lambda hidden: 1 / 0
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        generator.generate({**prompts("llama", 1), "max_new_tokens": 1})
    with pytest.raises(ConfigError, match="nothing has been generated yet"):
        generator.cache_report()


def test_adapters_lie_around_the_model_that_generates() -> None:
    from peft import LoraConfig, get_peft_model

    def adapted() -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return get_peft_model(
                generating("llama")[0],
                LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False),
            )

    plain = adapted().eval()
    plain.load_state_dict(doubled(plain))
    found = generator_of(adapted()).generate({**prompts("llama"), **ways("llama")["beams"]})
    assert torch.equal(found, plain.generate(**prompts("llama"), **ways("llama")["beams"]))


def test_what_generate_or_a_module_refuses_is_one_line_and_breaks_nothing() -> None:
    generator = generator_of(generating("gpt2")[0], cache="sequence")
    with pytest.raises(ConfigError, match=r'"sequence": it is cut over the ranks of each stage'):
        generator.generate(prompts("gpt2"))
    generator = generator_of(generating("gpt2")[0])
    with pytest.raises(ConfigError, match="engine.generate: ValueError: .*max_new_tokns"):
        generator.generate({**prompts("gpt2"), "max_new_tokns": 2})
    generator._free_bytes = lambda: 1000
    with pytest.raises(ConfigError, match=r"on rank 0, which has 1000 B for them: \d+ bytes are missing"):
        generator.generate({**prompts("gpt2"), "max_new_tokens": 4})
    assert not generator.is_broken


def test_every_rank_draws_as_rank_0_and_only_rank_0_draws_on() -> None:
    generator = generator_of(generating("gpt2")[0])
    torch.manual_seed(3)
    told = torch.get_rng_state(), None
    ends = {}
    for rank, seed in ((0, 3), (1, 4)):
        torch.manual_seed(seed)
        own = torch.get_rng_state()
        asked: list[int] = []
        generator._setting = SimpleNamespace(rank=rank, device=torch.device("cpu"))  # type: ignore[assignment]
        generator._collectives = SimpleNamespace(  # type: ignore[assignment]
            broadcast=lambda value, source, what, asked=asked: asked.append(source) or told
        )
        with generator._same_streams():
            ends[rank] = torch.rand(4).tolist()
        assert asked == [0] and torch.equal(own, torch.get_rng_state()) == (rank == 1)
    assert ends[0] == ends[1]


def test_what_is_remembered_of_modules_lasts_as_long_as_the_model_is_called_the_same_way() -> None:
    model: Any = generating("gpt2")[0]
    generator = generator_of(model)
    found = []
    for own in ({}, {"do_sample": True}):
        generator.generate({**prompts("gpt2"), "max_new_tokens": 2, **own})
        generator._memories.setdefault("transformer.h.0", object())  # type: ignore[arg-type]
        found.append(generator._memories)
    assert found[0] is found[1] and len(found[0]) == 1
    model.config.output_hidden_states = True
    generator.generate({**prompts("gpt2"), "max_new_tokens": 2})
    assert generator._memories == {}, "modules may return something else now"


@pytest.mark.parametrize(
    ("asked", "samples", "is_cut", "sizes", "replicas"),
    [
        ("auto", 8, False, [3, 3, 2], 2),  # as many as stages
        ("auto", 5, False, [3, 2], 2),  # of one prompt a lane at least
        ("auto", 1, False, [1], 1),
        (4, 8, False, [2, 2, 2, 2], 2),
        (4, 5, False, [2, 1, 1, 1], 1),
        (9, 3, False, [1, 1, 1], 1),
        (4, 8, True, [8], 2),
        (4, 1, True, [1], 2),
        ("auto", None, False, [1], 1),
    ],
)  # fmt: skip
def test_prompts_are_as_many_micro_batches_as_keep_all_stages_and_lanes_busy(
    asked: Any, samples: int | None, is_cut: bool, sizes: list[int], replicas: int
) -> None:
    generator = generator_of(generating("gpt2")[0], micro_batches=asked)
    generator._replicas = ((0, 2, 4), (1, 3, 5))
    found = []
    for rank in range(6):
        generator._setting = SimpleNamespace(rank=rank)  # type: ignore[assignment]
        found.append((generator._own_replica(2), generator._own_replica(1)))
    assert found == [(0, 0), (1, None)] * 3
    parts = generator._parts(samples, is_cut=is_cut)
    assert [part.samples for part in parts] == sizes and {part.replicas for part in parts} == {replicas}
    assert [(part.number, part.first) for part in parts] == [(i, sum(sizes[:i])) for i in range(len(sizes))]
    assert {part.whole for part in parts} == {samples or 1}


def test_what_ranks_hold_parts_of_is_whole_for_a_generation() -> None:
    model: Any = generating("gpt2")[0]
    generator = generator_of(model)
    name, whole = "transformer.wpe.weight", torch.zeros(1)
    weights = generator._weights(model, 0, {name: whole})
    assert weights.live[name] is whole and weights.live.keys() == dict(model.named_parameters()).keys()


def test_the_next_call_draws_on_from_where_the_longest_micro_batch_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model: Any = generating("gpt2")[0]
    generator = generator_of(model)
    generator._make_links(3)
    parts = [
        ReplicaPart(number=n, samples=1, first=n, whole=3, replica=0, replicas=1, is_cut=False)
        for n in range(3)
    ]

    def attempt(model: Any, arguments: Any, part: ReplicaPart, weights: Any) -> _Outcome:
        draws = (2, 5, 3)[part.number]
        torch.rand(draws)
        return _Outcome(draws=draws, caches=RankCaches(
            rank=0, layers=1, rows=1, length=1, predicted_bytes=1, counted_bytes=1
        ))  # fmt: skip

    monkeypatch.setattr(generator, "_attempt", attempt)
    torch.manual_seed(5)
    torch.rand(5)
    wanted = torch.get_rng_state()
    torch.manual_seed(5)
    generator._attempt_all([model] * 3, {}, 0, parts)
    assert torch.equal(torch.get_rng_state(), wanted)


def test_cut_caches_are_predicted_in_whole_blocks_of_a_lane() -> None:
    model: Any = generating("llama")[0]
    generator = generator_of(model, block=4)
    weights, found = generator._weights(model, 0, {}), []
    cache = DynamicCache()
    cache.update(torch.zeros(3, 2, 9, 8), torch.zeros(3, 2, 9, 8), 0)
    for is_cut in (False, True):
        part = ReplicaPart(number=0, samples=3, first=0, whole=3, replica=0, replicas=2, is_cut=is_cut)
        found.append(generator._counted(model, weights, None, cache, part))
    assert [each.predicted_bytes for each in found] == [2 * 3 * 9 * 16 * 4, 2 * 3 * 8 * 16 * 4], (
        "two blocks of three"
    )
    assert {each.counted_bytes for each in found} == {2 * 3 * 9 * 16 * 4}


def test_caches_of_micro_batches_add_up() -> None:
    each = [
        RankCaches(
            rank=3, layers=2, rows=rows, length=length, predicted_bytes=10 * rows, counted_bytes=7 * rows
        )
        for rows, length in ((2, 9), (1, 12))
    ]
    assert _all_caches(each) == RankCaches(
        rank=3, layers=2, rows=3, length=12, predicted_bytes=30, counted_bytes=21
    )


def test_lanes_have_one_rank_of_each_stage() -> None:
    assert replicas_of(plan_of((0, 1), (2, 3))) == ((0, 2), (1, 3))
    assert replicas_of(plan_of((0, 1), (2,))) == ((0, 2),)
    assert replicas_of(plan_of((0,), (1,), (0,))) == ((0, 1),), "two stages of one rank"
    assert replicas_of(plan_of((0, 1), (0, 1))) == ((0,), (1,))
    assert replicas_of(plan_of((0, 1), (2, 3), tensor=2)) == ((0, 2), (1, 3)), (
        "tensor ranks share the prompts"
    )
    assert replicas_of(plan_of((0, 1), (1, 0))) == ((0, 1),), "of two lanes each rank would be in both"


def test_micro_batches_draw_what_all_prompts_together_would() -> None:
    """Each of its own stream, in turns; several sequences of a prompt, too."""
    model: Any = generating("llama")[0].eval()
    for own in ({}, {"num_return_sequences": 2}):
        arguments = {**prompts("llama", 5), **ways("llama")["sampled"], **own}
        torch.manual_seed(5)
        expected = model.generate(**arguments)
        turns = Turns(torch.device("cpu"))

        def generate(
            number: int, rows: range, turns: Turns = turns, arguments: dict[str, Any] = arguments
        ) -> Tensor:
            given = {k: v[list(rows)] if isinstance(v, Tensor) else v for k, v in arguments.items()}
            with turns.waiting(number):
                pass
            with DrawsOfAll(rows, 5):
                made: Tensor = model.generate(**given)
            return made

        torch.manual_seed(5)
        calls = [functools.partial(generate, n, rows) for n, rows in enumerate(even_ranges(5, 3))]
        assert torch.equal(joined_tokens(model, arguments, turns.run(calls)[0]), expected)


def test_each_micro_batch_has_a_model_of_its_own() -> None:
    model = nn.Linear(2, 2)
    generator = generator_of(model)
    assert generator._models(model, 1) == [model]
    twins = generator._models(model, 3)
    assert len({id(each) for each in (model, *twins)}) == 4
    assert all(each.weight is model.weight for each in twins)


def test_what_ranks_compare_of_arguments() -> None:
    config = SimpleNamespace(to_dict=lambda: {"top_k": 5, "ids": [2, {"own": torch.ones(3)}]})
    given = {"b": config, "a": (torch.ones(2, 4), None), "streamer": object(), "c": len}
    assert argument_facts(given, lambda tensor: str(tuple(tensor.shape))) == {
        "a[0]": "(2, 4)",
        "a[1]": "None",
        "a.length": "2",
        "b.top_k": "5",
        "b.ids[0]": "2",
        "b.ids[1].own": "(3,)",
        "b.ids.length": "2",
        "c": "len",
    }
