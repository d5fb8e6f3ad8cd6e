"""Calls a stage's module: names to arguments, and what it returns to named outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from gpp_plugin.errors import ConfigError
from gpp_plugin.model.graph.resolve import GraphStage
from gpp_plugin.runtime.stage_module import StageFunction


def named_outputs(stage: str, nodes: Sequence[tuple[str, str]], returned: Any) -> dict[str, Tensor]:
    """Return what a stage's module returned as "stage.output" -> tensor.

    Args:
        nodes: (field of what the module returns, "stage.output").

    Raises:
        ConfigError: it is not what the stage's outputs say.
    """
    # By key where it returns a dict, which may have more than is asked for; by position otherwise, where the number
    # must be right. With nodes (("h", "tower.hidden"), ("loss", "tower.loss")):
    #
    #     {"h": x, "loss": y, "aux": z}   {"tower.hidden": x, "tower.loss": y}
    #     (x, y)                          the same: fields are only names then
    #     x                               refused: "returned one tensor"
    #
    # It is checked at every call: a module may return something else for another batch.
    fields = [field for field, _ in nodes]
    listed = ", ".join(map(repr, fields))
    if isinstance(returned, Tensor):
        values: list[Any] = [returned]
    elif isinstance(returned, Mapping):
        missing = [field for field in fields if field not in returned]
        if missing:
            raise ConfigError(
                f"stage {stage!r}: its module returned no {missing[0]!r}, only {', '.join(map(str, returned))}; "
                f"its outputs are {listed}"
            )
        values = [returned[field] for field in fields]
    elif isinstance(returned, (tuple, list)):
        values = list(returned)
    else:
        raise ConfigError(
            f"stage {stage!r}: its module returned a {type(returned).__name__}; return a tensor, a tuple or a "
            f"dict of its outputs {listed}"
        )
    if len(values) != len(fields):
        raise ConfigError(f"stage {stage!r}: its module returned {_count(values)}; its outputs are {listed}")
    for field, value in zip(fields, values, strict=True):
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"stage {stage!r}: output {field!r} is a {type(value).__name__}; outputs are tensors"
            )
    return {node: value for (_, node), value in zip(nodes, values, strict=True)}


def _count(values: Sequence[Any]) -> str:
    return "one tensor" if len(values) == 1 else f"{len(values)} values"


def loss_node(stage: GraphStage) -> str | None:
    """Return what a stage's loss is called: an output, or the sum of several."""
    if not stage.losses:
        return None
    return stage.losses[0] if len(stage.losses) == 1 else " + ".join(stage.losses)


def stage_function(
    stage: GraphStage, module: nn.Module, outputs: Sequence[str], *, tensors: Mapping[str, Tensor]
) -> StageFunction:
    """Return the module as the code of a stage, which computes with the tensors it is given, as captured code does.

    Those are the module's own, but for older versions of its weights (asynchronous mode).

    Args:
        tensors: its parameters and buffers, by what they are called in the graph.
        outputs: which of its outputs, and its `loss_node`, the code returns.
    """
    batch_inputs = tuple(dict.fromkeys(key for _, key in stage.batch_inputs))
    received = tuple(dict.fromkeys(node for _, node in stage.received))
    order = {("batch", key): i for i, key in enumerate(batch_inputs)}
    order |= {("node", node): len(batch_inputs) + i for i, node in enumerate(received)}
    places = [(keyword, order["batch", key]) for keyword, key in stage.batch_inputs]
    places += [(keyword, order["node", node]) for keyword, node in stage.received]
    total = loss_node(stage)
    wanted, count = tuple(outputs), len(tensors)
    local = {id(t): name for name, t in module.named_parameters()}
    # buffers are the module's own, which it may bind anew, whatever version of its weights it computes with
    names = [local.get(id(tensor)) for tensor in tensors.values()]
    # versions replace trained parameters: one of them tells
    trained = [
        (i, t) for i, t in enumerate(tensors.values()) if isinstance(t, nn.Parameter) and t.requires_grad
    ]
    telling, own = trained[0] if trained else (0, None)

    def call(*given: Tensor) -> tuple[Tensor, ...]:
        arguments = {keyword: given[count + place] for keyword, place in places}
        if own is None or given[telling] is own:
            returned = module(**arguments)
        else:
            weights = {name: t for name, t in zip(names, given[:count], strict=True) if name is not None}
            returned = functional_call(module, weights, kwargs=arguments)
        found = named_outputs(stage.name, stage.nodes, returned)
        if total is not None and total not in found:
            found[total] = sum(found[node] for node in stage.losses)  # type: ignore[assignment]
        return tuple(found[name] for name in wanted)

    return StageFunction(
        call=call,
        tensors=tuple(tensors),
        constants=(),
        batch_inputs=batch_inputs,
        received=received,
        outputs=wanted,
        code=f"{type(module).__name__}({', '.join(keyword for keyword, _ in places)})",
        given=module,
    )


IDLE = StageFunction(
    call=lambda: (), tensors=(), constants=(), batch_inputs=(), received=(), outputs=(), code=""
)
"""The code of a stage that has nothing to do."""
