"""What each rank of a test would import and trace for the first time: done once, where ranks are forked from.

Nothing is computed here: a process with threads, or one that has run a backward, must not be forked.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch  # noqa: E402

import gpp_plugin.engine.engine  # noqa: E402, F401
from gpp_plugin.capture.export import capture_model  # noqa: E402
from tests import ranks, reference  # noqa: E402, F401  (each rank imports them)
from tests.models import MODELS, build  # noqa: E402

torch.set_num_threads(1)
for module in ("deepspeed.dispatch", "huggingface", "stock_engine", "megatron.chunks"):
    with contextlib.suppress(ModuleNotFoundError):  # Megatron may not be installed
        importlib.import_module(f"gpp_plugin.integrations.{module}")
for name in MODELS:
    build(name, device="meta")
model, make_batch = build("clip", device="meta")
capture_model(model, make_batch(2))
gc.collect()
gc.freeze()
