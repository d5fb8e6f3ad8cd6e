"""`gpp convert`: a checkpoint as a single process has it, as DeepSpeed's universal checkpoint, and back."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gpp_plugin.errors import GppError

KINDS = ("torch", "universal", "gpp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gpp convert`."""
    parser.add_argument(
        "checkpoint",
        type=Path,
        help="a checkpoint's directory, or the one with its `latest`; a torch file; a universal checkpoint",
    )
    parser.add_argument("out", type=Path, help="what is written: a file for torch, else a directory; new")
    parser.add_argument(
        "--to",
        choices=KINDS,
        default="torch",
        help="torch: one file with module and optimizer; universal: DeepSpeed's; gpp: this package's (%(default)s)",
    )
    parser.add_argument(
        "--tag", default="converted", help="of a gpp checkpoint that is written (%(default)s)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Convert, and print what was written.

    Raises:
        GppError: the checkpoint is missing, broken or of a kind that is not known, or the target is there already.
    """
    from gpp_plugin.engine.checkpoints import conversion

    if not args.checkpoint.exists():
        raise GppError(f"{args.checkpoint}: is not there; give a checkpoint's directory, or a torch file")
    target = args.out / args.tag if args.to == "gpp" else args.out
    if target.exists():
        raise GppError(f"{target}: is there already; give a new name, or remove it")
    if args.checkpoint.is_file():
        state = conversion.read_torch(args.checkpoint)
    elif (args.checkpoint / "zero").is_dir():
        state = conversion.read_universal(args.checkpoint)
    else:
        state = conversion.read_checkpoint(args.checkpoint)
    if args.to == "torch":
        conversion.write_torch(state, args.out)
    elif args.to == "universal":
        conversion.write_universal(state, args.out)
    else:
        conversion.write_checkpoint(state, args.out, args.tag)
    trained = f"{state.optimizer} state of {len(state.state)}" if state.optimizer else "no optimizer state"
    print(
        f"{target}: {len(state.weights)} parameters, {len(state.buffers)} buffers, {trained}, step {state.step}"
    )
    return {
        "out": str(target),
        "parameters": len(state.weights),
        "trained": len(state.state),
        "step": state.step,
    }
