"""The exceptions of gpp_plugin; every message says what is wrong, with which values, and the fix.

GppError
├── ConfigError          the graph_pipeline block or the DeepSpeed JSON around it
│   └── ReadError        a file, or a value in it, is not what it should be
├── ExtensionError       what another package adds to gpp_plugin cannot be used
├── CaptureError         the model cannot be exported or split
├── BackendRefused       a backend cannot run operators; they stay on torch
├── ProfileError         costs cannot be measured or read
├── PlanError            a plan is malformed, or no plan can be made
│   └── PlanInfeasible   no plan fits the devices
├── ScheduleError        a schedule or lowered program is unsafe
├── BatchRefused         a mini-batch is too long for its plan, or for a rank's memory
├── RuntimeFailure       a rank failed while running a program
│   └── CommTimeout      a message did not arrive in time
├── CheckpointError      a checkpoint is missing, broken or of another model
└── DeviceMissing        what was asked for needs a device that is not there
"""

from __future__ import annotations

import os
from collections.abc import Iterable


class GppError(Exception):
    """Base of every failure that gpp_plugin reports."""


class ConfigError(GppError, ValueError):
    """The configuration is wrong; the message starts with the key path."""


class ReadError(ConfigError):
    """A file is not what it should be, or a value in it is not valid; names the file, the key path and the fix."""


class ExtensionError(GppError):
    """A planner, schedule, transport or backend is not there, or the package that adds it is at fault; names both."""


class CaptureError(GppError):
    """The model cannot be captured; the message names module, operator and remedy."""


class BackendRefused(GppError):
    """A backend cannot run operators; the message names the first of them."""


class ProfileError(GppError):
    """Costs could not be measured, derived or read."""


class PlanError(GppError):
    """A plan is malformed or cannot be made for this graph."""


class PlanInfeasible(PlanError):
    """No plan fits the given devices; the message says by how much and which knob helps."""


class ScheduleError(GppError):
    """A schedule or lowered program would deadlock, reorder or exceed its memory."""


class BatchRefused(GppError, ValueError):
    """A mini-batch is longer than is planned for, or would not fit; nothing of it has run, and the next one may."""


class RuntimeFailure(GppError):
    """A rank failed while it ran a program."""


class CommTimeout(RuntimeFailure):
    """A message did not arrive in time; names rank, stage, edge and micro-batch."""


class CheckpointError(GppError):
    """A checkpoint is missing, broken, or of another model."""


class DeviceMissing(GppError):
    """What was asked for needs a device that this machine does not have."""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text; empty where it has none."""
    return (str(error).strip().splitlines() or [""])[0]


def describe_error(error: BaseException) -> str:
    """Return an exception in one line: its kind, what it says, and for those not ours where it was raised.

    The place is the last in code of the user's: not in an installed package, nor in this one.
    """
    import sysconfig
    import traceback

    kind, text = type(error).__name__, first_line(error)
    frames = [] if isinstance(error, GppError) else traceback.extract_tb(error.__traceback__)
    # how files begin that are not the user's; of code that is generated there is no file
    not_the_users = (sysconfig.get_path("stdlib") + os.sep, os.path.dirname(__file__) + os.sep, "<")
    users = [
        frame
        for frame in frames
        if not frame.filename.startswith(not_the_users) and f"-packages{os.sep}" not in frame.filename
    ]
    place = [
        f"({os.path.basename(frame.filename)}:{frame.lineno}, in {frame.name})"
        for frame in (users or frames)[-1:]
        if not frame.filename.startswith("<")
    ]
    return " ".join([f"{kind}: {text}" if text else kind, *place])


def nearest(name: str, names: Iterable[str]) -> str:
    """Return ``; did you mean ...?`` with the name most like ``name``, or nothing where none is.

    >>> nearest("benhc", ["plan", "bench"]), nearest("xyz", ["plan"])
    ("; did you mean 'bench'?", '')
    """
    import difflib  # of use for mistakes alone; `gpp --help` is quicker without

    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


# What brings a module that gpp_plugin works without: ``pip install gpp_plugin[...]``.

EXTRAS = {
    "transformers": "hf",
    "tokenizers": "hf",
    "accelerate": "trainer",
    "trl": "trl",
    "datasets": "trl",
    "sklearn": "demo",
    "megatron": "megatron",
    "tensorboard": "report",
    "matplotlib": "plots",
}


def needs_extra(error: ModuleNotFoundError) -> str | None:
    """Return what is needed and how to install it, None where no extra brings the module.

    >>> needs_extra(ModuleNotFoundError(name="transformers.trainer"))
    "needs transformers, which is not installed: pip install 'gpp_plugin[hf]'"
    """
    missing = (error.name or "").partition(".")[0]
    if missing not in EXTRAS:
        return None
    return f"needs {missing}, which is not installed: pip install 'gpp_plugin[{EXTRAS[missing]}]'"
