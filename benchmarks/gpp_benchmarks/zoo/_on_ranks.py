"""One rank of `gpp bench zoo --ranks`: models trained for three steps on several ranks, each against one process.

python -m gpp_benchmarks.zoo._on_ranks SETTINGS_JSON
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from gpp_benchmarks._ranks import bench_ranks, rank_settings, start_engine
from gpp_benchmarks.zoo._catalogue import CATALOGUE, EXACT, RAW, REFUSED, WRONG, Batch, ZooModel, build_model
from gpp_benchmarks.zoo._staged import worst_of
from gpp_benchmarks.zoo._trial import LOSS_LIMIT, SAMPLES, empty_row, is_refusal, one_line
from gpp_plugin.capture.tracing.outside import hidden_process_group
from gpp_plugin.capture.tracing.sample_batches import is_counted, rows_per_sample
from gpp_plugin.errors import GppError, RuntimeFailure
from gpp_plugin.launch import emit_event, end_rank
from gpp_plugin.relative_errors import loss_difference, tensor_error

STEPS, UNITS = 3, 2
PARAMETER_LIMIT = 1e-5
OPTIMIZER: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01, "eps": 1e-4}
"""Of AdamW. Its ``eps`` is above the rounding of gradients that are zero but for it (a key projection's bias): divided
by their own size, these would move parameters by whole steps, another way in every run."""


def rows_on_ranks(names: Sequence[str], *, num_ranks: int, timeout_s: float) -> Iterator[dict[str, Any]]:
    """Train models on ranks, each on processes of its own, and yield their rows.

    Args:
        timeout_s: of each model.
    """
    for name in names:
        row = empty_row(CATALOGUE[name]) | {"verdict": RAW, "line": "its ranks told nothing"}
        try:
            options: dict[str, Any] = {"num_ranks": num_ranks, "timeout_s": timeout_s}
            for event in bench_ranks("zoo._on_ranks", {"name": name}, **options, environment=None):
                row = event["row"]
        except RuntimeFailure as error:
            row |= {"verdict": RAW, "line": one_line(error)}
        yield row


def units_of_step(entry: ZooModel) -> list[Batch]:
    """Return the loss units of a mini-batch: parts of one batch where samples lie along axis 0, else moved apart."""
    batch = entry.batch(SAMPLES * UNITS, entry.lengths[0])
    tensors = {key: value for key, value in batch.items() if isinstance(value, Tensor)}
    if is_counted(tensors):
        rows = dict(rows_per_sample(tensors))
        # labels of detection: a list of as many dicts as there are samples
        rows |= {
            key: 1
            for key, value in batch.items()
            if isinstance(value, list) and len(value) == SAMPLES * UNITS
        }
        return [
            {
                key: value[unit * SAMPLES * rows[key] : (unit + 1) * SAMPLES * rows[key]]
                if rows.get(key)
                else value
                for key, value in batch.items()
            }
            for unit in range(UNITS)
        ]
    return [
        {
            key: value + 0.1 * unit if isinstance(value, Tensor) and value.is_floating_point() else value
            for key, value in entry.batch(SAMPLES, entry.lengths[0]).items()
        }
        for unit in range(UNITS)
    ]


def train_alone(
    model: nn.Module, steps: Iterable[Sequence[Batch]], optimizer: torch.optim.Optimizer
) -> list[float]:
    """Train a model in this process on the loss units of each step, and return the loss of each step."""
    losses = []
    for units in steps:
        optimizer.zero_grad()
        total = 0.0
        for unit in units:
            loss = loss_of(model(**unit)) / len(units)
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        optimizer.step()
    return losses


def loss_of(output: Any) -> Tensor:
    """Return the loss in what a model returns: itself, or an entry, the first value or an attribute."""
    if isinstance(output, Tensor):
        return output
    loss: Tensor = (
        output["loss"] if isinstance(output, dict) else output[0] if type(output) is tuple else output.loss
    )
    return loss


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are trained."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _adam_steps(model: nn.Module, units: Sequence[Batch]) -> list[float]:
    return train_alone(model, [units] * STEPS, torch.optim.AdamW(trained(model), **OPTIMIZER))


def train_here(entry: ZooModel) -> dict[str, Any]:
    """Train a model on all ranks, one stage each, and return its row on rank 0; collective.

    The row has the largest relative error of a loss, and of a parameter by the norm of its tensor.
    """
    units = units_of_step(entry)
    num_ranks = dist.get_world_size()
    config = {
        "train_batch_size": SAMPLES * UNITS,
        "train_micro_batch_size_per_gpu": SAMPLES,
        "optimizer": {"type": "AdamW", "params": {**OPTIMIZER, "torch_adam": True}},
        "graph_pipeline": {"stages": num_ranks, "planner": "graphpipe"},
    }
    start = time.perf_counter()
    engine = start_engine(build_model(entry), units[0], config)
    started = time.perf_counter() - start
    losses = [float(engine.train_batch(iter(units))) for _ in range(STEPS)]
    state = engine.gather_state_dict()
    plan = engine.plan
    engine.destroy()
    if state is None:
        return {}
    alone = build_model(entry)
    with hidden_process_group():  # a model that gathers over one (FLAVA) is alone here
        wanted = _adam_steps(alone, units)
    loss_error = loss_difference(losses, wanted)
    error, whose = worst_of(_parameter_errors(state, alone))
    is_rounding = loss_error > LOSS_LIMIT and _are_as_near(losses, wanted, entry, units)
    is_exact = (loss_error <= LOSS_LIMIT or is_rounding) and error <= PARAMETER_LIMIT
    return {
        "is_rounding": is_rounding,
        "verdict": EXACT if is_exact else WRONG,
        "line": "" if is_exact else f"losses off by {loss_error:.1e}, parameters by {error:.1e} ({whose})",
        "losses": losses, "loss_error": loss_error, "parameter_error": error, "worst_parameter": whose,
        "ranks": num_ranks, "stages": len(plan.stages), "depth": plan.depth, "start_s": started,
    }  # fmt: skip


def _are_as_near(
    losses: Sequence[float], wanted: Sequence[float], entry: ZooModel, units: Sequence[Batch]
) -> bool:
    """Return whether losses are as near to double precision's as those of one process in single precision.

    Steps of AdamW carry rounding on: of CLAP the third loss of one process is itself off by more than the limit.
    """
    exact_units = [
        tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, dict(unit))
        for unit in units
    ]
    try:
        with hidden_process_group():
            exact = _adam_steps(build_model(entry).double(), exact_units)
    except Exception:  # whatever a model raises that cannot compute in double precision
        return False
    return all(
        abs(a - x) <= max(3 * abs(b - x), LOSS_LIMIT * abs(x))
        for a, b, x in zip(losses, wanted, exact, strict=True)
    )


def _parameter_errors(found: dict[str, Tensor], model: nn.Module) -> dict[str, float]:
    """Return ||p - w|| / ||w|| of every parameter; one that is missing is infinitely far off."""
    errors = {}
    for name, parameter in model.named_parameters():
        wanted = parameter.detach().double()
        own = found[name] if name in found else torch.full_like(wanted, torch.inf)
        errors[name] = tensor_error(own, wanted, least=1e-12)
    return errors


def main() -> None:
    """Train one model on this rank; rank 0 tells its row."""
    entry = CATALOGUE[rank_settings()["name"]]
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    try:
        found = train_here(entry)
    except (
        GppError
    ) as error:  # told to all ranks; what only one raises ends it, and its last words are the row's line
        if not is_refusal(error):
            raise
        found = {"verdict": REFUSED, "line": one_line(error)}
    if dist.get_rank() == 0:
        emit_event(row=empty_row(entry) | found)
    dist.barrier()
    end_rank()


if __name__ == "__main__":
    main()
