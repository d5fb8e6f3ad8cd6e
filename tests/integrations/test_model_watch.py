"""The look at a model between two steps, on one rank without an engine: what it honours, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpp_plugin.engine.model_watch import ModelWatch
from gpp_plugin.errors import ConfigError
from gpp_plugin.runtime.stage_module import WatchedModule


class Net(nn.Module):
    """Two layers, the second one not trained; attributes of which a trace reads ``scale``, ``table`` and the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(2, 1).requires_grad_(False)
        self.extra = nn.Parameter(torch.ones(1))  # takes a gradient, and is in no group of the optimizer
        self.register_buffer("mean", torch.zeros(2))
        self.scale, self.epoch, self.table = 1.0, 0, {"deep": [1, 2]}
        self.alias = self.table["deep"]


class Watched:
    """A stage of a model, and what watches it; counts traces."""

    def __init__(self, *, num_units: int = 1, eager: tuple[str, ...] = (), **stage: Any) -> None:
        self.model = Net()
        self.traces = 0
        self.update = SimpleNamespace(is_written=False, frozen=frozenset(), hooks={})
        parameters, buffers = list(self.model.named_parameters()), list(self.model.named_buffers())
        trained = {name: p for name, p in parameters if name.startswith("first")}
        told = {"tensor": 1, "num_replicas": 1, "is_partitioned": False, **stage}
        self.stage = SimpleNamespace(
            trained={"tied.weight" if name == "first.weight" else name: p for name, p in trained.items()},
            module=SimpleNamespace(named_parameters=lambda: parameters, named_buffers=lambda: buffers),
            update=self.update, weights=None, stage_index=4, is_partitioned=told.pop("is_partitioned"),
            stage=SimpleNamespace(name="s", ranks=(0, 1), **told),
        )  # fmt: skip
        stages: Any = SimpleNamespace(stages=[self.stage], weights=[])
        module = WatchedModule(module=self.model, prefix="", eager=eager, trace=self._trace)
        self.watch = ModelWatch([module], stages, num_units)

    def _trace(self) -> tuple[str, frozenset[tuple[str, str]]]:
        self.traces += 1
        model = self.model
        text = f"{model.scale > 2} {model.alias[0]} {model.first.training}"
        return text, frozenset({("", "scale"), ("", "alias"), ("first", "training"), ("second", "padding")})


def test_what_is_written_to_parameters_and_buffers_is_where_stages_have_it() -> None:
    watched = Watched()
    model, update, watch = watched.model, watched.update, watched.watch
    watch.look()
    assert not update.is_written and watched.traces == 0
    home, mean = model.first.weight.data, model.mean
    with torch.no_grad():
        model.second.bias.add_(1.0)
    watch.look()
    assert update.is_written
    update.is_written = False
    watch.note()
    watch.look()
    assert not update.is_written, "a step begins anew"
    model.first.weight.data = torch.full((2, 3), 5.0)
    model.mean = torch.tensor([2.0, 3.0])
    watch.look()
    assert update.is_written and home.eq(5.0).all() and model.first.weight.data_ptr() == home.data_ptr()
    assert model.mean is mean and mean.tolist() == [2.0, 3.0]
    for given in (torch.zeros(3), torch.zeros(2, dtype=torch.float64), None):
        model.mean = given
        with pytest.raises(ConfigError, match="buffer mean was replaced by"):
            watch.look()
    model.mean = mean
    watch.look()
    model.first.weight.data = torch.zeros(3, 3)
    with pytest.raises(ConfigError, match=r"tied.weight.data was replaced by a tensor \[3, 3\]"):
        watch.look()


def test_what_is_frozen_rests_and_what_was_never_trained_cannot_begin() -> None:
    watched = Watched()
    model, update, watch = watched.model, watched.update, watched.watch
    model.first.requires_grad_(False)
    model.extra.requires_grad_(False)
    for _ in range(2):
        watch.look()
        assert update.frozen == {"tied.weight", "first.bias"}, "by the name of their group"
        with watch.as_captured():
            assert [p.requires_grad for p in model.parameters()] == [False, True, True, False, False]
        assert not any(p.requires_grad for p in model.parameters())
    model.first.requires_grad_(True)
    model.extra.requires_grad_(True)
    watch.look()
    assert update.frozen == frozenset()
    model.second.bias.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"second.bias takes a gradient now"):
        watch.look()


def test_attributes_are_traced_where_they_are_read_and_refused_where_that_changes_anything() -> None:
    watched = Watched()
    model, watch = watched.model, watched.watch
    model.epoch = 1
    watch.look()
    assert watched.traces == 1, "it may be read"
    model.epoch = 2
    watch.look()
    assert watched.traces == 1, "it is not"
    model.scale = 1.5
    watch.look()
    assert watched.traces == 3 and model.scale == 1.5, "with the new and the old: the same"
    model.scale = 3.0
    with pytest.raises(ConfigError, match=r"scale is 3.0, and was 1.5 when the model was captured"):
        watch.look()
    assert model.scale == 3.0, "as its user set it"
    model.scale = 1.5
    watch.look()
    traced = watched.traces
    model.table["deep"][0] = 7
    with pytest.raises(ConfigError, match=r"table.deep.0 is 7, and was 1"):
        watch.look()
    assert watched.traces > traced, "what is read by another name is the same list"
    model.alias[0] = 1
    watch.look()
    model.first.eval()
    watch.look(is_training=False)
    with pytest.raises(
        ConfigError, match=r"first is in eval mode, and was in train mode .*: call first.train\(\)"
    ):
        watch.look()
    model.first.train()
    watch.look()
    changes: tuple[Callable[[Net], object], ...] = (
        lambda net: setattr(net, "first", nn.Linear(3, 2)),
        lambda net: setattr(net.second, "bias", nn.Parameter(torch.zeros(1))),
        lambda net: net.second.register_forward_hook(print),
    )
    for change in changes:
        watched = Watched()
        change(watched.model)
        with pytest.raises(ConfigError, match="was replaced after|hooks on second were registered"):
            watched.watch.look()


def test_what_runs_as_it_is_has_attributes_that_no_trace_shows() -> None:
    for eager, is_refused in (((), False), (("second",), True), (("sec",), False)):
        watched = Watched(eager=eager)
        vars(watched.model.second)["padding"] = 3
        if is_refused:
            with pytest.raises(ConfigError, match="second.padding is 3, and was not there"):
                watched.watch.look()
            watched.model.second.register_forward_hook(print)
            del watched.model.second.padding
        watched.watch.look()


def double(gradient: Tensor) -> Tensor:
    return 2 * gradient


def clamp(gradient: Tensor) -> Tensor:
    return gradient.clamp(-1e-3, 1e-3)


HOOKS: list[tuple[dict[str, Any], Callable[[Tensor], Any], str, str]] = [
    ({}, clamp, "first.bias", ""),
    ({"num_units": 2}, double, "first.bias", ""),
    ({"num_units": 2}, print, "first.bias", ""),
    ({"num_units": 2}, clamp, "first.bias", "a step has 2 loss units"),
    ({"num_units": 2}, clamp, "second.bias", ""),
    ({"tensor": 2}, double, "first.bias", "no rank has its whole gradient"),
    ({"is_partitioned": True, "num_replicas": 2}, double, "first.bias", "no rank has its whole gradient"),
    ({"is_partitioned": True}, double, "first.bias", ""),
    ({"num_replicas": 2}, double, "first.bias", ""),
]


@pytest.mark.parametrize(("given", "hook", "name", "said"), HOOKS)
def test_hooks_are_taken_where_a_rank_has_the_whole_gradient(
    given: dict[str, Any], hook: Callable[[Tensor], Any], name: str, said: str
) -> None:
    watched = Watched(**given)
    parameter = watched.model.get_parameter(name).requires_grad_(True)
    parameter.register_hook(hook)
    if not name.startswith("first"):
        parameter.requires_grad_(False)
    if said:
        with pytest.raises(ConfigError, match=said):
            watched.watch.look()
        return
    watched.watch.look()
    assert parameter._backward_hooks is None, "autograd calls it no more"
    taken = [list(table.values()) for table in watched.update.hooks.get(name, [])]
    assert taken == ([[hook]] if name.startswith("first") else [])


@pytest.mark.parametrize("size", [3, 5000])
def test_stages_of_a_rank_that_share_a_tensor_have_what_is_written_to_the_first(size: int) -> None:
    """Large ones are compared first, at elements spread evenly."""
    held = [nn.Parameter(torch.zeros(size)) for _ in range(2)]

    def stage(parameter: nn.Parameter) -> Any:
        module = SimpleNamespace(named_parameters=lambda: [("w", parameter)], named_buffers=list)
        return SimpleNamespace(
            trained={}, module=module, weights=None, stage_index=0,
            update=SimpleNamespace(is_written=False, frozen=frozenset(), hooks={}),
        )  # fmt: skip

    watch = ModelWatch([], SimpleNamespace(stages=[stage(p) for p in held], weights=[]))  # type: ignore[arg-type]
    held[0].data.fill_(3.0)
    watch.look()
    assert held[1].eq(3.0).all()
