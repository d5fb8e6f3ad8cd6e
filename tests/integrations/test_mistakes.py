"""Mistakes that only the whole engine can see: one line, the same on every rank, before time is lost."""

from __future__ import annotations

from tests.integrations import mistake_jobs as jobs
from tests.ranks import run_ranks


def test_a_mistake_gets_the_same_line_on_every_rank() -> None:
    first, second = run_ranks(jobs.make_mistakes, 2)
    assert first == second
    assert all(text.startswith("ConfigError: ") and "\n" not in text for text in first.values()), first
    assert "lacks ['labels']" in first["no labels"]
    assert "also has ['weight']" in first["more keys"]
    assert "optimizer: missing" in first["no optimizer"]
    assert "graph_pipeline.stages: 2" in first["two plans"] and "plan has 1" in first["two plans"]
    assert "graph_pipeline.slicing: on, and graph_pipeline.plan slices nothing" in first["slices"]
    assert "graph_pipeline.micro_batch_sizes: 8 is requested for stage 'left" in first["saved sizes"]
    assert (
        "graph_pipeline.schedule: gpipe is requested, graph_pipeline.plan has 1f1b" in first["saved schedule"]
    )
    assert first["named stage"] == "ConfigError: none, [8, 2]"
    assert "graph_pipeline.weights: 'nowhere'" in first["weights"]
    assert "graph_pipeline.micro_batch_sizes.lefd: no module or stage 'lefd'" in first["module"]
    assert "left" in first["module"]
    assert (
        "graph_pipeline.micro_batch_sizes: the plan has no stage 'left.7'; its stages are" in first["stage"]
    )
    assert "did you mean 'AdamW'?" in first["optimizer"]
    assert "did you mean 'WarmupLR'?" in first["scheduler"]
    assert "graph_pipeline.trace_path: /dev/null" in first["trace"]
