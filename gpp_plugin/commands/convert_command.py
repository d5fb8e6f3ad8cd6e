"""`gpp convert`: a checkpoint as a single process has it, as DeepSpeed's universal checkpoint, and back.

Those of DeepSpeed's `PipelineModule` are read. Their names are numbers of layers: a map gives them a model's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpp_plugin.errors import GppError
from gpp_plugin.ir.serialize import SMALL_BYTES, read_json, write_text_whole

if TYPE_CHECKING:
    from gpp_plugin.engine.checkpoints.conversion import WholeState

KINDS = ("torch", "universal", "gpp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gpp convert`."""
    parser.add_argument(
        "checkpoint",
        type=Path,
        help="a checkpoint's directory, or the one with its `latest`; a torch file; a universal checkpoint; "
        "DeepSpeed's of a PipelineModule",
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
    parser.add_argument(
        "--names",
        type=Path,
        help="a JSON file: {name in the checkpoint: name in the model}; with --like, where a proposed map is written",
    )
    parser.add_argument(
        "--like",
        type=Path,
        help="a checkpoint or torch file of the model: prints a map to its names by shapes and order, converts nothing",
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
    state = _read(args.checkpoint)
    if args.like is not None:
        return _propose(state, args)
    if args.names is not None:
        state = state.renamed(_read_names(args.names))
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


def _read(path: Path) -> WholeState:
    """Return a checkpoint of any kind."""
    from gpp_plugin.engine.checkpoints import checkpoint_directory, conversion

    if path.is_file():
        return conversion.read_torch(path)
    if (path / "zero").is_dir():
        return conversion.read_universal(path)
    if (path / checkpoint_directory.LATEST).exists():
        path = checkpoint_directory.directory_of(path, checkpoint_directory.read_latest(path))
    return (
        conversion.read_pipeline(path) if conversion.is_pipeline(path) else conversion.read_checkpoint(path)
    )


def _propose(state: WholeState, args: argparse.Namespace) -> dict[str, Any]:
    """Print a map of names, and write it where the user names a file that is not there yet."""
    from gpp_plugin.engine.checkpoints.conversion import propose_names

    if not args.like.exists():
        raise GppError(f"--like: {args.like} is not there; give a checkpoint or a torch file of the model")
    if args.names is not None and args.names.exists():
        raise GppError(f"--names: {args.names} is there already; leave out --like to convert with it")
    names = propose_names(state, _read(args.like))
    text = json.dumps(names, indent=2)
    print(text)
    if args.names is not None:
        write_text_whole(args.names, text + "\n")
        print(f"{args.names}: written; look at it, then give the command again without --like")
    else:
        print("nothing is written; add --names map.json to keep the map, then give that without --like")
    return {"names": names, "out": None}


def _read_names(path: Path) -> dict[str, str]:
    """Return a map of names.

    Raises:
        GppError: it is not there, or no object of texts.
    """
    if not path.exists():
        raise GppError(f"--names: {path} is not there; give --like MODEL as well to have a map proposed")
    names = read_json(path, what="a map of names", max_bytes=SMALL_BYTES)
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise GppError(f'--names: {path} is no object of texts; write {{"0.weight": "embed.weight", ...}}')
    return names
