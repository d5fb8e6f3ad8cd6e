"""A lane's ranks run HuggingFace's `generate` together, each its own modules: here threads, without engines."""

from __future__ import annotations

import copy
import queue
import re
import threading
from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpp_plugin.integrations.huggingface.generate_calls import joined_tokens
from gpp_plugin.model.generation.owned_modules import Weights, on_all_ranks
from gpp_plugin.model.generation.stage_tensors import ReplicaRun
from tests.integrations.generation_jobs import generating, prompts, ways

LIMIT_S = 120
Sent = dict[tuple[int, int, int], "queue.Queue[Tensor]"]


class ThreadLink:
    """What joins ranks that are threads: a queue for each tensor and reader."""

    device = torch.device("cpu")

    turns = None

    def __init__(self, sent: Sent, lock: threading.Lock, position: int, number: int, part: int) -> None:
        self._sent, self._lock = sent, lock
        self.position, self.messages = position, 0
        self.ranks = tuple(range(number))
        self._part = part

    def broadcast(self, value: Tensor, *, source: int, readers: Sequence[int], has_failed: bool) -> Tensor:
        number, self.messages = self.messages, self.messages + 1
        with self._lock:
            queues = {reader: self._sent[self._part, number, reader] for reader in readers}
        if source == self.position:
            for each in queues.values():
                each.put(value.clone())
        if self.position not in readers:
            return value
        came = queues[self.position].get(timeout=LIMIT_S)
        assert (came.shape, came.dtype) == (value.shape, value.dtype), "shapes are known everywhere"
        return came


def cut(model: nn.Module, number: int) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Return which ranks hold each parameter, layers in even parts and the rest beside them, and names of tied ones."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    layers = list(dict.fromkeys(m.group() for n in names if (m := re.match(r".*?\.\d+\.", n))))
    first: dict[int, str] = {}
    held: dict[str, set[int]] = {}
    aliases, at = {}, 0
    for name, parameter in model.named_parameters(remove_duplicate=False):
        layer = next((i for i, each in enumerate(layers) if name.startswith(each)), None)
        at = at if layer is None else layer * number // len(layers)
        home = first.setdefault(id(parameter), name)
        held.setdefault(home, set()).add(at)
        if home != name:
            aliases[name] = home
    return {name: tuple(sorted(ranks)) for name, ranks in held.items()}, aliases


def generate_in_lane(model: nn.Module, number: int, arguments: dict[str, Any]) -> list[list[Any]]:
    """Return what each rank of a lane generates, twice, or its error."""
    holders, names = cut(model, number)
    sent: Sent = defaultdict(queue.Queue)
    lock = threading.Lock()
    answers: list[Any] = [None] * number

    @torch.no_grad()
    def generate(rank: int, own: Any, part: int, memories: Any) -> Any:
        live = {name: p for name, p in own.named_parameters() if rank in holders[name]}
        buffers = dict(own.named_buffers(remove_duplicate=False))
        link: Any = ThreadLink(sent, lock, rank, number, part)
        weights = Weights(holders=holders, live=live, buffers=buffers, names=names)
        with on_all_ranks(own, weights, ReplicaRun(link), memories):
            return own.generate(**arguments)

    def run(rank: int, own: Any) -> None:
        memories: Any = {}
        try:
            # twice: what is remembered of modules is right for other caches too
            answers[rank] = [generate(rank, own, n, memories) for n in range(2)]
        except Exception as error:
            answers[rank] = [error]

    threads = [threading.Thread(target=run, args=(rank, copy.deepcopy(model))) for rank in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


@pytest.mark.parametrize(
    ("name", "number"),
    [("gpt2", 2), ("llama", 3), ("t5", 3), ("bart", 2), ("whisper", 3), ("llava", 2), ("qwen2_5_vl", 2)],
)
def test_a_lane_generates_what_one_process_does(name: str, number: int) -> None:
    """Greedy on three ranks, four beams on two; parameters are tied across ranks in most of these models."""
    model: Any = generating(name)[0].eval()
    arguments = {**prompts(name), **ways(name)["beams" if number == 2 else "greedy"]}
    expected = model.generate(**arguments)
    for answers in generate_in_lane(model, number, arguments):
        for answer in answers:
            assert torch.equal(answer, expected), answer


def test_a_model_is_as_it_was_afterwards() -> None:
    model: Any = generating("gpt2")[0]
    before = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    holders, names = cut(model, 2)
    weights = Weights(
        holders=holders, live=dict(model.named_parameters()), names=names,
        buffers=dict(model.named_buffers(remove_duplicate=False)),
    )  # fmt: skip
    with on_all_ranks(model, weights, None, {}):
        assert not model.training
    assert {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)} == before
    assert all(module.training for module in model.modules())
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize(("beams", "fill"), [(1, 0), (4, 15)])
def test_a_padding_token_of_zero_fills_up_no_beams(beams: int, fill: int) -> None:
    """HuggingFace's beam search takes ``pad_token_id or eos_token_id[0]``; without beams zeros are padding."""
    arguments = {"num_beams": beams, "pad_token_id": 0, "eos_token_id": [15, 18]}
    parts = [torch.tensor([[3, 4, 5]]), torch.tensor([[6, 15]])]
    found = joined_tokens(SimpleNamespace(generation_config=None), arguments, parts)
    assert found.tolist() == [[3, 4, 5], [6, 15, fill]]
