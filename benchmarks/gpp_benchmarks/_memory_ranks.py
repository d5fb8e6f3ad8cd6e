"""One rank of `gpp bench memory`: trains a model under several plans and counts what autograd keeps.

python -m gpp_benchmarks._memory_ranks CASE_JSON
"""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_benchmarks._memory_pairs import CONFIGS, LEAST_SHARE, SHARES, MemoryCase
from gpp_benchmarks._ranks import rank_settings, start_engine
from gpp_plugin.errors import PlanInfeasible
from gpp_plugin.integrations.huggingface.hf_models import build_model_of, config_of, make_example_batch
from gpp_plugin.ir.memory_report import MemoryReport
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.launch import emit_event, end_rank
from gpp_plugin.plan.costs.memory_formula import expected_counts

VOCABULARY = 126
"""Ids are drawn below the special ones."""


def main() -> None:
    """Run every plan of the case; rank 0 reports a row for each rank."""
    plain = rank_settings()
    case = MemoryCase(**{**plain, "plans": tuple(plain["plans"])})
    free, report = _train(case, "none", None)
    for name in case.plans:
        if name in SHARES:
            limits = [_limit_gb(free, stage, name) for stage in range(case.num_ranks)]
            try:
                plan, report = _train(case, name, limits)
            except PlanInfeasible as error:  # the same on every rank
                if dist.get_rank() == 0:
                    emit_event(model=case.model, plan=name, refused=str(error))
                continue
        elif name == "none":
            plan = free
        else:
            plan, report = _train(case, name, None)
        if dist.get_rank() == 0:
            emit_event(model=case.model, plan=name, rows=_rows(case.model, name, plan, report))
    dist.barrier()
    end_rank()


def _limit_gb(plan: PipelinePlan, stage: int, name: str) -> float:
    """Return the memory in which a stage has room for a share of its activations, or all where that gains nothing."""
    part, share = plan.memory[stage], SHARES[name]
    is_small = part.activations < LEAST_SHARE * max(other.activations for other in plan.memory)
    if is_small or (name == "recompute" and plan.stages[stage].in_flight == 1):
        share = 1.0
    return (part.total - (1.0 - share) * part.activations) / 1e9


def _train(case: MemoryCase, name: str, memory_gb: list[float] | None) -> tuple[PipelinePlan, MemoryReport]:
    """Train one step under a plan, and return the plan and what it held."""
    torch.manual_seed(0)
    model = build_model_of(config_of(CONFIGS[case.model], case.model))
    batch = _batch(model, case)
    config = {
        "train_batch_size": case.mini_batch,
        "train_micro_batch_size_per_gpu": case.loss_unit,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "graph_pipeline": case.block(name, memory_gb),
    }
    engine = start_engine(model, batch, config)
    engine.train_batch(data_iter=iter([batch]))
    found = engine.plan, engine.memory_report()
    engine.destroy()
    del engine, model
    gc.collect()
    return found


def _batch(model: Any, case: MemoryCase) -> dict[str, Any]:
    example = make_example_batch(model, num_samples=case.mini_batch, length=case.length)
    generator = torch.Generator().manual_seed(0)

    def drawn(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.is_floating_point():
            return torch.randn(value.shape, generator=generator)
        ids = torch.randint(3, VOCABULARY, value.shape, generator=generator)
        return torch.where(value == 3, ids, value)

    return {key: drawn(value) for key, value in example.items()}


def _rows(model: str, name: str, plan: PipelinePlan, report: MemoryReport) -> list[dict[str, Any]]:
    rows = []
    for rank in report.ranks:
        expected = expected_counts(plan, plan.stage_of_rank(rank.rank))
        assert expected is not None and rank.counts is not None
        predicted, counted = expected.peak_held_bytes, rank.counts.peak_held_bytes
        rows.append(
            {
                "model": model,
                "plan": name,
                "rank": rank.rank,
                "stage": rank.stage,
                "in_flight": plan.stages[plan.stage_of_rank(rank.rank)].in_flight,
                "predicted_bytes": predicted,
                "counted_bytes": counted,
                "ratio": counted / predicted if predicted else float(counted == predicted),
                "predicted_swapped_bytes": expected.swapped_bytes,
                "swapped_bytes": rank.counts.swapped_bytes,
                "predicted_recomputed_bytes": expected.recomputed_bytes,
                "recomputed_bytes": rank.counts.recomputed_bytes,
                "predicted_working_bytes": rank.predicted.working if rank.predicted is not None else 0,
                "working_bytes": rank.counts.working_bytes,
            }
        )
    return rows


if __name__ == "__main__":
    main()
