"""What .ci/wheel.py runs on two ranks with the installed wheel: two steps with a `graph_pipeline` block.

python wheel_job.py [missing | broken]      without all that an extra brings, or where importing it fails
"""

import json
import sys

OPTIONAL = frozenset(
    "PIL accelerate datasets huggingface_hub matplotlib megatron onnxruntime openvino peft scipy sklearn tensorboard "
    "timm tokenizers torchaudio torchvision transformers".split()
)


class _Without:
    """Finds no optional package, or one that raises."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """Refuse those of `OPTIONAL`."""
        if name.partition(".")[0] not in OPTIONAL:
            return None
        if sys.argv[1] == "missing":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        raise RuntimeError(f"{name} is broken")


if len(sys.argv) > 1:
    sys.meta_path.insert(0, _Without)

import deepspeed  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

import gpp_plugin  # noqa: E402

CONFIG = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "graph_pipeline": {"stages": 2, "micro_batch_sizes": {"loss": "full", "*": 4}},
}


class TwoTowers(nn.Module):
    """Two encoders that do not depend on each other, and the distance of what they say."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.right = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x, y):
        """Return the loss of pairs that belong together."""
        return {"loss": (self.left(x) - self.right(y)).square().mean()}


def main() -> None:
    """Train two steps; rank 0 prints one line of JSON."""
    torch.manual_seed(0)
    dataset = [{"x": torch.randn(8), "y": torch.randn(6)} for _ in range(16)]
    engine, *_ = deepspeed.initialize(model=TwoTowers(), config=CONFIG, training_data=dataset)
    losses = [float(engine.train_batch()) for _ in range(2)]
    if torch.distributed.get_rank() == 0:
        stages = [stage.name for stage in engine.plan.stages]
        print(json.dumps({"losses": losses, "stages": stages, "package": gpp_plugin.__file__}))
    sys.stdout.flush()
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
