"""What .ci/wheel.py runs on two ranks with the installed wheel: two steps with a `graph_pipeline` block.

python wheel_job.py [missing | broken]      without all that an extra brings, or where importing it fails
"""

import importlib.abc
import importlib.machinery
import json
import sys

OPTIONAL = frozenset(
    "PIL accelerate datasets huggingface_hub matplotlib megatron onnxruntime openvino peft scipy sklearn tensorboard "
    "timm tokenizers torchaudio torchvision transformers".split()
)


class _Missing:
    """A finder as it was, but for what is `OPTIONAL`, which it does not find."""

    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        """Find all but optional packages."""
        is_hidden = name.partition(".")[0] in OPTIONAL
        return None if is_hidden else self.finder.find_spec(name, path, target)


class _Broken(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what is `OPTIONAL`, and fails to import it, as a package built for another torch does."""

    def find_spec(self, name, path=None, target=None):
        """Find optional packages."""
        is_hidden = name.partition(".")[0] in OPTIONAL
        return importlib.machinery.ModuleSpec(name, self) if is_hidden else None

    def exec_module(self, module):
        """Fail."""
        raise RuntimeError(f"{module.__name__} is broken")


if sys.argv[1:] == ["missing"]:
    sys.meta_path[:] = [_Missing(finder) for finder in sys.meta_path]
elif sys.argv[1:] == ["broken"]:
    sys.meta_path.insert(0, _Broken())

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
