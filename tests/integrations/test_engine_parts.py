"""The engine is parts that know no framework: what they import, and training with another framework than DeepSpeed."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest
import torch

from gpp_plugin import engine
from tests.integrations import engine_jobs
from tests.integrations import framework_jobs as jobs
from tests.models import build
from tests.ranks import run_ranks
from tests.reference import loss_of, units_of
from tests.waits import run_program

FOLDER = Path(engine.__path__[0])
ENGINE = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
FRAMEWORKS = ("deepspeed", "transformers", "megatron")


@pytest.mark.parametrize("module", ENGINE)
def test_a_part_names_no_framework_and_nothing_that_knows_one(module: str) -> None:
    """At any depth, function-level imports too."""
    named = set()
    for node in ast.walk(ast.parse((FOLDER / f"{module}.py").read_text())):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            named |= {f"{node.module}.{alias.name}" for alias in node.names}
    assert not [name for name in named if name.split(".")[0] in FRAMEWORKS]
    assert not [name for name in named if name.startswith("gpp_plugin.integrations")]


def test_the_engine_loads_without_a_framework() -> None:
    code = (
        f"import importlib, json, sys; [importlib.import_module('gpp_plugin.engine.' + m) for m in {ENGINE}]; "
        f"print(json.dumps([m for m in {FRAMEWORKS} if m in sys.modules]))"
    )
    done = run_program([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


def one_process() -> tuple[list[float], float]:
    """Return the losses of four steps of the plain model, and the last one's gradient norm before clipping."""
    model, make_batch = build("two_branch")
    optimizer = torch.optim.SGD(model.parameters(), lr=jobs.RATE)
    losses, norm = [], 0.0
    for step in range(4):
        optimizer.zero_grad()
        total = 0.0
        for part in units_of(make_batch(engine_jobs.B, step), engine_jobs.U):
            loss = loss_of(model(**part)) / (engine_jobs.B // engine_jobs.U)
            loss.backward()
            total += float(loss.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), jobs.Settings.gradient_clipping))
        optimizer.step()
        losses.append(total)
    return losses, norm


def test_stages_step_together_with_any_framework(tmp_path: Path) -> None:
    losses, norm = one_process()
    answers = run_ranks(jobs.train_without_deepspeed, 2, "sync", str(tmp_path))
    for answer in answers:
        assert answer["losses"] == pytest.approx(losses, rel=1e-5)
        assert answer["norm"] == pytest.approx(norm, rel=1e-4)
        assert answer["again"] == answer["losses"][2:], "a checkpoint is the engine's, whoever steps"
        assert answer["counted"] == (4, 4 * engine_jobs.B)
        assert answer["rule"] == "SGD"
        # a synchronous pipeline holds nothing between calls
        assert answer["flushed"] is None and answer["staleness"] == dict.fromkeys(answer["names"], 0)
    told = [value for name, value, _ in answers[0]["events"] if name == "Train/Samples/train_loss"]
    assert told == pytest.approx([*losses, *losses[2:]], rel=1e-5)
    assert not answers[1]["events"], "monitors are rank 0's"
