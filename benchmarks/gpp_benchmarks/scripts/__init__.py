"""HuggingFace's example scripts, unchanged in one process and with the trainer's class changed on several ranks.

    gpp bench scripts ~/transformers/examples/pytorch --ranks 2

The scripts are the user's own copy of them: of the release of transformers that is installed. What they read is made
here: a small model with random weights, a tokenizer, sixty samples of unlike lengths, metrics as local modules. Nothing
is downloaded. A script is run three times, with its defaults (augmentation, padding, shuffling, accumulation):

    plain     as it is, in one process that accumulates what all ranks do together
    changed   with `GraphPipelineTrainer` in place of Trainer, and --deepspeed, under torchrun
    resumed   the same from its checkpoint in the middle

Losses and gradient norms of all steps are those of plain to 1e-5, evaluation too; the resumed run has the same bits as
the changed one. --with adds bf16 (losses to 5 %), workers that load, or streaming. Models have no dropout and no
SpecAugment, which other processes draw otherwise; --dropout leaves them as they are, and compares only what is resumed.
So it is with run_mae, whose model always draws. A script that is refused before its first step has the refusal as its
row.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpp_benchmarks._options import add_option
from gpp_plugin.errors import ConfigError, nearest
from gpp_plugin.relative_errors import loss_difference

TRAINERS = {"Trainer": "GraphPipelineTrainer", "Seq2SeqTrainer": "GraphPipelineSeq2SeqTrainer"}
APART = ("loss_apart", "norm_apart", "evaluation_apart")
MOST_APART, MOST_APART_BF16 = 1e-5, 5e-2
YES, NO, REFUSED, NOT_THERE = "yes", "no", "refused", "not in this folder"
TABLE = (
    "script",
    "verdict",
    "lines_changed",
    "loss_apart",
    "norm_apart",
    "evaluation_apart",
    "resumed",
    "line",
)
UNIT, ACCUMULATION = 2, 2
NO_METRIC = ("runtime", "per_second", "samples", "epoch", "loss_nan")
USUAL = (
    f"--model_name_or_path model --do_train --do_eval --per_device_train_batch_size {UNIT} "
    f"--per_device_eval_batch_size {UNIT} --logging_steps 1 --learning_rate 1e-3 --seed 7 --use_cpu --report_to none "
    "--disable_tqdm True"
)
MORE = {"bf16": "--bf16 True", "streaming": "--streaming", "workers": "--dataloader_num_workers 2"}
"""Of --with: arguments of the three runs."""
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    from gpp_benchmarks.scripts._inputs import CASES

    parser.add_argument("folder", help="where the scripts are, in any folder below")
    parser.add_argument("--scripts", nargs="+", metavar="NAME", help=f"of {', '.join(CASES)} (all)")
    add_option(parser, "--ranks", 2, "processes, a stage each")
    add_option(parser, "--zero", 0, "ZeRO stage")
    add_option(parser, "--steps", 4, "steps of a training; the resumed one begins in the middle")
    add_option(parser, "--timeout", 300.0, "seconds of a run, then it is ended")
    parser.add_argument("--dropout", action="store_true", help="leave the models' dropout as it is")
    parser.add_argument(
        "--with", nargs="+", default=[], choices=list(MORE), dest="more", help="what is trained with too"
    )
    parser.add_argument(
        "--keep", metavar="DIR", help="leave models, data, scripts and outputs in this new folder"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return a row a script, and whether all that are there train as they do unchanged, or are refused in time.

    Raises:
        ConfigError: an option is wrong, or what the scripts need is not installed.
    """
    from gpp_benchmarks.scripts._inputs import CASES, make_inputs

    names = args.scripts or list(CASES)
    for name in names:
        if name not in CASES:
            raise ConfigError(
                f"--scripts {name}: not a script that is known{nearest(name, CASES)}; known are {', '.join(CASES)}"
            )
    if not Path(args.folder).is_dir():
        raise ConfigError(f"{args.folder} is no folder; give that of transformers' examples/pytorch")
    if args.ranks < 2 or args.steps < 2:
        raise ConfigError(f"--ranks {args.ranks} --steps {args.steps}: give two or more of each")
    if args.keep and Path(args.keep).exists():
        raise ConfigError(f"--keep {args.keep} exists; give a new folder")
    work = Path(args.keep or tempfile.mkdtemp(prefix="gpp-scripts-")).absolute()
    rows = []
    try:
        for name in names:
            found = sorted(Path(args.folder).rglob(f"{name}.py"))
            row = dict.fromkeys(TABLE) | {"script": name, "verdict": NOT_THERE}
            if found and "streaming" in args.more and "streaming" not in found[0].read_text(encoding="utf-8"):
                row["line"] = "has no --streaming"
            elif found:
                (here := work / name).mkdir(parents=True)
                make_inputs(name, here, has_dropout=args.dropout)
                row |= _try_script(found[0], here, CASES[name], args)
            rows.append(row)
            print(describe(row), flush=True)
    finally:
        if not args.keep:
            shutil.rmtree(work, ignore_errors=True)
    tried = [row for row in rows if row["verdict"] != NOT_THERE]
    right = sum(row["verdict"] == YES for row in tried)
    print(f"{right} of {len(tried)} scripts train, evaluate and resume as unchanged")
    return {"rows": rows, "ok": bool(tried) and all(row["verdict"] in (YES, REFUSED) for row in tried)}


def describe(row: Mapping[str, Any]) -> str:
    """Return a script's line.

    >>> describe({"script": "run_clm", "verdict": "refused", "lines_changed": 2, "line": "ConfigError: because"})
    'run_clm                            refused; 2 lines changed; ConfigError: because'
    """
    parts = [f"{row['script']:<34} {row['verdict']}"]
    if row.get("lines_changed"):
        parts.append(f"{row['lines_changed']} lines changed")
    if row.get("loss_apart") is not None:
        parts.append(
            f"losses {row['loss_apart']:.1e}, norms {row['norm_apart']:.1e}, evaluation "
            f"{row['evaluation_apart']:.1e} apart"
        )
    if row.get("resumed") is not None:
        parts.append("resumed with the same bits" if row["resumed"] else "RESUMED OTHERWISE")
    return "; ".join([*parts, *([row["line"]] if row.get("line") else [])])


def change_script(text: str) -> tuple[str, int]:
    """Return a script with each trainer that it imports from transformers replaced, and how many lines that added.

    >>> change_script("from transformers import Trainer")
    ('from transformers import Trainer\\nfrom gpp_plugin import GraphPipelineTrainer as Trainer', 1)
    """
    lines, added = text.split("\n"), 0
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and node.module == "transformers":
            for name in (each.name for each in node.names if each.name in TRAINERS):
                assert node.end_lineno is not None
                lines.insert(node.end_lineno + added, f"from gpp_plugin import {TRAINERS[name]} as {name}")
                added += 1
    return "\n".join(lines), added


def _try_script(
    script: Path, here: Path, case: Mapping[str, Any], args: argparse.Namespace
) -> dict[str, Any]:
    """Run a script unchanged, changed and resumed, in the folder that has its inputs; return what its row says."""
    changed = 1  # --deepspeed
    for name in ("plain", "changed"):
        shutil.copytree(script.parent, here / name)
    imported = re.findall(r"^(?:from|import) (\w+)", script.read_text(encoding="utf-8"), re.MULTILINE)
    for file in (here / "changed" / f"{name}.py" for name in {script.stem, *imported}):
        text, added = change_script(file.read_text(encoding="utf-8")) if file.exists() else ("", 0)
        if not added:
            continue
        file.write_text(text, encoding="utf-8")
        changed += added
    block = {"graph_pipeline": {"stages": args.ranks}, "zero_optimization": {"stage": args.zero}}
    (here / "config.json").write_text(json.dumps(block), encoding="utf-8")
    more = " ".join(MORE[name] for name in args.more)
    given = f"{case['arguments']} {'' if args.dropout else case.get('without_dropout', '')} {more}"
    common = f"--max_steps {args.steps} --save_steps {args.steps // 2} {USUAL} {given}".split()
    launcher = (
        f"-m torch.distributed.run --standalone --nproc_per_node {args.ranks} changed/{script.name}".split()
    )
    ranked = [*launcher, *common, "--deepspeed", "config.json"]
    accumulation = "--gradient_accumulation_steps"
    runs = {
        "plain": [f"plain/{script.name}", *common, accumulation, str(ACCUMULATION * args.ranks)],
        "changed": [*ranked, accumulation, str(ACCUMULATION)],
    }
    checkpoint = f"changed_out/checkpoint-{args.steps // 2}"
    runs["resumed"] = [*runs["changed"], case.get("resume", "--resume_from_checkpoint"), checkpoint]
    row: dict[str, Any] = {"lines_changed": changed, "verdict": NO}
    told = {}
    for name, command in runs.items():
        code, last = _run(command, here, f"{name}_out", timeout_s=args.timeout)
        if code:
            is_refusal = (
                name == "changed"
                and not list((here / f"{name}_out").glob("checkpoint-*"))
                and "ConfigError" in last
            )
            return row | {"verdict": REFUSED if is_refusal else NO, "line": f"{name}: {last}"}
        told[name] = _read(here / f"{name}_out")
    if not args.dropout and not case.get("draws"):
        row |= _apart(told["plain"], told["changed"])
    second_half = slice(args.steps // 2, None)
    row["resumed"] = told["resumed"][0][second_half] == told["changed"][0][second_half]
    apart = [row[key] for key in APART if row.get(key) is not None]
    most = MOST_APART_BF16 if "bf16" in args.more else MOST_APART
    return row | {"verdict": YES if row["resumed"] and all(each <= most for each in apart) else NO}


Told = tuple[list[tuple[float, float]], dict[str, float]]


def _read(folder: Path) -> Told:
    """Return loss and gradient norm of each step, and the metrics of the evaluation."""
    log = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    steps = [(entry["loss"], float(entry["grad_norm"])) for entry in log if "loss" in entry]
    found = json.loads((folder / "eval_results.json").read_text(encoding="utf-8"))
    metrics = {
        key: value
        for key, value in found.items()
        if isinstance(value, int | float) and not any(part in key for part in NO_METRIC)
    }
    return steps, metrics


def _apart(plain: Told, changed: Told) -> dict[str, Any]:
    (steps, metrics), (other, found) = plain, changed
    if len(steps) != len(other) or set(metrics) != set(found):
        line = f"{len(other)} steps and metrics {sorted(found)} for {len(steps)} and {sorted(metrics)}"
        return {**dict.fromkeys(APART, float("inf")), "line": line}
    return {
        "loss_apart": loss_difference([loss for loss, _ in other], [loss for loss, _ in steps]),
        "norm_apart": loss_difference([norm for _, norm in other], [norm for _, norm in steps]),
        "evaluation_apart": loss_difference([found[key] for key in metrics], list(metrics.values())),
    }


def _run(command: Sequence[str], here: Path, output: str, *, timeout_s: float) -> tuple[int, str]:
    """Run Python in a folder until it ends, or its time is over; return its exit code and its last error line."""
    environment = os.environ | OFFLINE | {"HF_HOME": str(here / "cache"), "PYTHONPATH": _path(here)}
    with open(here / f"{output}.log", "w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            [sys.executable, *command, "--output_dir", output],
            cwd=here,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            code, limit = 1, f"took more than {timeout_s:g} s"
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return code, limit
        log.seek(0)
        lines = [line.strip() for line in log.read().splitlines()]
    errors = [line for line in lines if "Error: " in line and not line.startswith(("File", "raise"))]
    return code, (errors or lines or [""])[-1 if not errors else 0]


def _path(here: Path) -> str:
    """Return where Python looks: modules that stand for what would be downloaded come last."""
    return os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(here / "modules")]))
