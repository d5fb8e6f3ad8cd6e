"""What the demo trains with; its ranks and its single-process reference read the same values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """Sizes and seeds of a run.

    Args:
        steps: optimizer steps; ``mini_batch`` samples in each.
        micro_batch: samples the encoders take at a time; the loss always takes the mini-batch.
        num_ranks: processes; ``stages`` is how many stages they form.
        mode: ``sync``, or ``async``: every stage steps alone, after each micro-batch of ``async_micro_batch``.
        gradient_clipping: largest norm of a gradient; 0 does not clip.
    """

    steps: int = 400
    mini_batch: int = 64
    micro_batch: int = 16
    num_ranks: int = 4
    stages: int = 4
    seed: int = 0
    mode: str = "sync"
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    warmup_steps: int = 20
    gradient_clipping: float = 0.0
    async_micro_batch: int = 32

    @classmethod
    def in_mode(cls, mode: str, **values: Any) -> DemoSettings:
        """Return the settings of a mode.

        Stale gradients want smaller steps: half the learning rate, a longer warm-up, and clipping. At mode sync's
        rates this model falls into a state in which all its features are alike.
        """
        if mode == "async":
            values = {"learning_rate": 5e-4, "warmup_steps": 50, "gradient_clipping": 0.3, **values}
        return cls(mode=mode, **values)

    def optimizer_block(self) -> dict[str, Any]:
        """Return the JSON's ``optimizer``."""
        params = {
            "lr": self.learning_rate,
            "betas": [0.9, 0.999],
            "eps": 1e-8,
            "weight_decay": self.weight_decay,
        }
        return {"type": "AdamW", "params": {**params, "torch_adam": True}}

    def scheduler_block(self) -> dict[str, Any]:
        """Return the JSON's ``scheduler``: linear warm-up, linear decay to zero."""
        params = {
            "total_num_steps": self.steps,
            "warmup_min_lr": 0.0,
            "warmup_max_lr": self.learning_rate,
            "warmup_num_steps": min(self.warmup_steps, self.steps - 1),
            "warmup_type": "linear",
        }
        return {"type": "WarmupDecayLR", "params": params}

    def learning_rate_factor(self, step: int) -> float:
        """Return what `scheduler_block` makes of the learning rate at a step, counted from 0.

        DeepSpeed's scheduler starts one step behind the optimizer, so two steps are taken at rate 0.
        """
        # 400 steps, 20 of warm-up: factor 0 at steps 0 and 1, 1/20 at 2, 1 at step 21, then down along (400 -
        # position) / 380 to 2/380 at step 399.
        params = self.scheduler_block()["params"]
        total, warm = params["total_num_steps"], params["warmup_num_steps"]
        position = max(step - 1, 0)
        if position < warm:
            return position / warm
        return max(0.0, (total - position) / max(1.0, total - warm))

    def ds_config(self) -> dict[str, Any]:
        """Return the DeepSpeed configuration, the ``graph_pipeline`` block in it."""
        return {
            "train_batch_size": self.mini_batch,
            "optimizer": self.optimizer_block(),
            "scheduler": self.scheduler_block(),
            "steps_per_print": 0,
            "gradient_clipping": self.gradient_clipping,
            **self._pipeline(),
        }

    def _pipeline(self) -> dict[str, Any]:
        if self.mode == "async":
            block = {"stages": self.stages, "mode": "async"}
            return {"train_micro_batch_size_per_gpu": self.async_micro_batch, "graph_pipeline": block}
        # The towers take 16 samples at a time, the loss all 64: contrastive losses depend on who else is in
        # the batch, so this trains as one process does on mini-batches of 64.
        sizes = {"loss": "full", "*": self.micro_batch}
        return {"graph_pipeline": {"stages": self.stages, "micro_batch_sizes": sizes}}
