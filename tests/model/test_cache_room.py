"""Where caches lie by what is free, and what is said where they have no room."""

from __future__ import annotations

import math

import pytest

from gpp_plugin.errors import ConfigError
from gpp_plugin.integrations.huggingface.generate_calls import longest_caches
from gpp_plugin.model.generation.cache_peers import CacheNeed, is_cut, need_of
from tests.integrations.generation_jobs import generating, prompts


def test_caches_are_cut_only_where_whole_ones_have_no_room() -> None:
    wide, narrow = CacheNeed(data=100, cut=50, free_bytes=100), CacheNeed(data=100, cut=50, free_bytes=70)
    assert not is_cut("auto", [wide, wide], why_not=None) and is_cut("auto", [wide, narrow], why_not=None)
    assert is_cut("sequence", [wide], why_not=None) and not is_cut("data", [], why_not=None)
    with pytest.raises(
        ConfigError, match=r'on rank 1, .*: 30 bytes are missing; .*set generate.cache to "sequence"'
    ):
        is_cut("data", [wide, narrow], why_not=None)
    with pytest.raises(ConfigError, match=r"30 bytes are missing; [^\"]*num_beams$"):
        is_cut("auto", [narrow], why_not="cannot")
    with pytest.raises(ConfigError, match="20 bytes are missing"):
        is_cut("sequence", [CacheNeed(data=100, cut=50, free_bytes=30)], why_not=None)
    with pytest.raises(ConfigError, match="has 100 B for them and 7 B of weights .*: 7 bytes are missing"):
        is_cut("auto", [CacheNeed(data=100, cut=50, free_bytes=100, weights=7)], why_not="cannot")


@pytest.mark.parametrize(("name", "own", "across"), [("llama", 8 + 7 - 1, 0), ("t5", 7, 8), ("bart", 7, 8)])
def test_the_longest_caches_follow_from_the_arguments(name: str, own: int, across: int) -> None:
    """What they hold at the end, as `engine.cache_report` counts it: the last token is in no cache."""
    model = generating(name)[0]
    longest = longest_caches(model, {**prompts(name), "max_new_tokens": 7, "num_beams": 3})
    assert longest is not None and (longest.each, longest.own, longest.across) == (3, own, across)
    held = [n for n, _ in model.named_parameters()]
    need = need_of(
        model,
        longest,
        held=held,
        names={},
        rows=2,
        prompts=4,
        ranks=2,
        block=2,
        itemsize=4,
        free_bytes=0,
        weights=0,
    )
    layers, width = (4, 16) if name == "llama" else (2, 32)
    assert need.data == 2 * layers * 2 * 3 * (own + across) * width * 4
    # four prompts, each rank has half of their blocks of two
    rooms = [math.ceil(math.ceil(length / 2) / 2) * 2 for length in (own, across)]
    assert need.cut == 2 * layers * 4 * 3 * sum(rooms) * width * 4
