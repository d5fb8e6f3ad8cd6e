"""Training in one process with plain torch and transformers: what the pipelined losses are compared with."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gpp_plugin.demo.clip import make_clip
from gpp_plugin.demo.digits import DigitData, mini_batches
from gpp_plugin.demo.settings import DemoSettings


def train_in_one_process(data: DigitData, settings: DemoSettings, steps: int) -> Iterator[float]:
    """Yield the loss of each of the first ``steps`` steps."""
    model = make_clip(data.tokenizer, seed=settings.seed)
    params = {k: v for k, v in settings.optimizer_block()["params"].items() if k != "torch_adam"}
    optimizer = torch.optim.AdamW(model.parameters(), **params)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, settings.learning_rate_factor)
    model.train()
    for batch in mini_batches(data.train, mini_batch=settings.mini_batch, steps=steps, seed=settings.seed):
        loss = model(**batch, return_loss=True).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        yield loss.item()
