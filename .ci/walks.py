#!/usr/bin/env python3
"""Which files of the package one mini-batch, one plan and one capture run through, and how often one is entered again.

python .ci/walks.py [--json] [--files]

A *room* is a file that runs at least once. A *way* leads from a file to one that it calls. It counts once, however
often it is taken, so that loops weigh nothing. A *return* is a way into a file that another way has entered before.
Only what users call is used, so any revision can be walked: run it with the interpreter that has it installed.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BLOCK = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "gradient_clipping": 1.0,
    "steps_per_print": 1000000,
    "graph_pipeline": {"stages": 2, "micro_batch_sizes": 2},
}


@contextmanager
def walked(ways: list[tuple[str, str]]) -> Iterator[None]:
    """Append to ``ways`` each pair of files of the package of which the first calls the second, in order."""
    import gpp_plugin

    package = str(Path(gpp_plugin.__file__).parent) + os.sep

    found: dict[tuple[str, str], None] = {}
    importing = 0

    def file_of(frame: Any) -> str:
        while frame is not None and not frame.f_code.co_filename.startswith(package):
            frame = frame.f_back  # a library between two files of the package is no room
        return frame.f_code.co_filename[len(package) :] if frame is not None else ""

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal importing
        if frame.f_code.co_name == "<module>":  # what an import runs is no part of the walk
            importing += {"call": 1, "return": -1}.get(event, 0)
        elif event == "call" and not importing and frame.f_code.co_filename.startswith(package):
            way = file_of(frame.f_back), file_of(frame)
            if way[0] != way[1]:
                found[way] = None

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        ways[:] = found


def model_and_batch() -> tuple[Any, dict[str, Any]]:
    """Return a small CLIP, built from a configuration, and eight samples."""
    import torch
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(0)
    layers = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {
        **layers,
        "vocab_size": 64,
        "max_position_embeddings": 8,
        "eos_token_id": 63,
        "bos_token_id": 62,
        "pad_token_id": 0,
    }
    vision = {**layers, "image_size": 16, "patch_size": 8}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
    batch = {
        "input_ids": torch.randint(0, 63, (8, 8)),
        "attention_mask": torch.ones(8, 8, dtype=torch.long),
        "pixel_values": torch.randn(8, 3, 16, 16),
        "return_loss": True,
    }
    return model, batch


def walk_mini_batch() -> list[tuple[str, str]]:
    """Return the walk of the third `train_batch` of a rank, one of two; this runs on both."""
    import deepspeed

    import gpp_plugin

    model, batch = model_and_batch()
    module = gpp_plugin.GraphPipelineModule(model, sample_batch=batch, config=BLOCK)
    engine, *_ = deepspeed.initialize(model=module, config=BLOCK)
    for _ in range(2):
        engine.train_batch(data_iter=iter([batch]))
    walk: list[tuple[str, str]] = []
    with walked(walk):
        engine.train_batch(data_iter=iter([batch]))
    return walk


def walk_capture() -> list[tuple[str, str]]:
    """Return the walk of the capture of a module."""
    from gpp_plugin.capture.export import capture_model

    model, batch = model_and_batch()
    walk: list[tuple[str, str]] = []
    with walked(walk):
        capture_model(model, batch)
    return walk


def walk_plan() -> list[tuple[str, str]]:
    """Return the walk of ``gpp plan`` on a model that is known by name."""
    from gpp_plugin.cli import main

    walk: list[tuple[str, str]] = []
    with walked(walk), open(os.devnull, "w", encoding="utf-8") as nothing:
        out, sys.stdout = sys.stdout, nothing
        try:
            main(["plan", "mmt", "--devices", "4", "--cluster", "summit"])
        finally:
            sys.stdout = out
    return walk


WALKS: dict[str, Callable[[], list[tuple[str, str]]]] = {
    "mini_batch": walk_mini_batch,
    "plan": walk_plan,
    "capture": walk_capture,
}


def run_walk(name: str) -> list[tuple[str, str]]:
    """Return the walk, made in processes of its own: two ranks for a mini-batch, of which the first is walked."""
    ranks = 2 if name == "mini_batch" else 1
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(ranks),
            "OMP_NUM_THREADS": "1",
        }
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--walk", name, "--into", f"{folder}/{rank}.json"],
                env={
                    **os.environ,
                    **(shared if ranks > 1 else {}),
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                },
                stdout=subprocess.DEVNULL,
            )
            for rank in range(ranks)
        ]
        if any([process.wait() for process in processes]):
            raise SystemExit(f"the walk {name} failed; its errors stand above")
        walk: list[tuple[str, str]] = json.loads(Path(folder, "0.json").read_text(encoding="utf-8"))
    return walk


def main() -> None:
    """Print rooms and returns of each walk."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--files", action="store_true", help="name the files, with the ways into each")
    parser.add_argument("--walk", choices=WALKS, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.walk:
        args.into.write_text(json.dumps(WALKS[args.walk]()), encoding="utf-8")
        return
    walks = {name: run_walk(name) for name in WALKS}
    rooms = {name: len({file for _, file in walk}) for name, walk in walks.items()}
    rows = {
        name: {"rooms": rooms[name], "returns": len(walk) - rooms[name], "ways": len(walk)}
        for name, walk in walks.items()
    }
    if args.json:
        print(json.dumps(rows))
        return
    for name, row in rows.items():
        print(f"{name:12}{row['rooms']:4} files, {row['returns']:5} returns, {row['ways']:5} ways")
        if args.files:
            for file, count in collections.Counter(file for _, file in walks[name]).most_common():
                print(f"    {count:5} {file}")


if __name__ == "__main__":
    main()
