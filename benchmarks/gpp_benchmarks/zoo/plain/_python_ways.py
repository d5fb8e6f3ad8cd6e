"""Modules whose Python does something beside calling layers: hooks, functions of one's own, branches on values."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpp_benchmarks.zoo.plain._entry import WIDTH, SmallNet, plain, sequences, vectors

HOOKS, PYTHON = "hooks", "python"
Loss = dict[str, Tensor]


class Hooked(SmallNet):
    """A plain module; what makes it below adds hooks."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Tensor] = {}
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss."""
        return self.loss(self.first(x), y)


def forward_hook() -> nn.Module:
    """Return a module one of whose layers has its output doubled."""
    model = Hooked()
    model.second.register_forward_hook(lambda module, given, output: 2 * output)
    return model


def counting_hook() -> nn.Module:
    """Return a module that counts the calls of a layer in a buffer."""
    model = Hooked()
    model.second.register_forward_hook(lambda module, given, output: model.calls.add_(1) and None)
    return model


def full_backward_hook() -> nn.Module:
    """Return a module one of whose layers passes half its gradient on."""
    model = Hooked()
    model.second.register_full_backward_hook(lambda module, inner, outer: (0.5 * inner[0],))  # type: ignore[index]
    return model


def parameter_hook() -> nn.Module:
    """Return a module one of whose weights has its gradient clamped."""
    model = Hooked()
    model.first.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return model


class PerceptualLoss(SmallNet):
    """The loss reads what hooks took from inner layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features: dict[str, Tensor] = {}
        self.second[0].register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, given: Any, output: Tensor) -> None:
        self.features["inner"] = output

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss, and the distance between inner features of inputs and targets."""
        loss = self.loss(self.first(x), y)["loss"]
        ours = self.features["inner"]
        with torch.no_grad():
            self.second(y)
        return {"loss": loss + 0.1 * (ours - self.features["inner"]).abs().mean()}


class TensorHook(SmallNet):
    """An activation's gradient is scaled by a hook set in forward."""

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss."""
        hidden = self.first(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: 0.1 * gradient)
        return self.loss(hidden, y)


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * gradient, None


class GradientReversal(SmallNet):
    """Domain-adversarial training: a custom function turns the gradient round."""

    def __init__(self) -> None:
        super().__init__()
        self.domain = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss, and that of the domain."""
        hidden = self.first(x)
        reversed_: Tensor = _Reverse.apply(hidden, 0.5)  # type: ignore[no-untyped-call]
        domain = F.softplus(self.domain(reversed_)).mean()
        return {"loss": self.loss(hidden, y)["loss"] + 0.1 * domain}


class ValueBranch(SmallNet):
    """Takes a branch by a mean of the data."""

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss."""
        hidden = self.first(x)
        hidden = torch.relu(hidden) if x.mean() > 0 else torch.tanh(hidden)
        return self.loss(hidden, y)


class ActivationBranch(SmallNet):
    """Takes a branch by what a layer computed."""

    class Gate(nn.Module):
        """The layer that looks."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            """Return one of two activations."""
            out: Tensor = self.weight(x)
            if out.sum().item() > 0:
                return out.relu()
            return out.sigmoid()

    def __init__(self) -> None:
        super().__init__()
        self.gate = self.Gate()

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss."""
        return self.loss(self.gate(self.first(x)), y)


class FixedPoint(nn.Module):
    """A deep equilibrium layer: iterates until it changes no more."""

    class Equilibrium(nn.Module):
        """The layer."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            """Return the state that is reached, with a gradient through the last step."""
            z = torch.zeros_like(x)
            with torch.no_grad():
                for _ in range(30):
                    new = torch.tanh(0.5 * self.inner(z) + x)
                    if (new - z).norm() < 1e-3:
                        break
                    z = new
            return torch.tanh(0.5 * self.inner(z) + x)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.equilibrium = self.Equilibrium()

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss."""
        return {"loss": (self.head(self.equilibrium(self.first(x))) - y).square().mean()}


class Checkpointed(SmallNet):
    """Calls a part through torch's checkpoint."""

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss."""
        hidden = checkpoint(self.second, self.first(x), use_reentrant=False)
        return {"loss": (self.head(hidden) - y).square().mean()}


class CompiledPart(SmallNet):
    """A part is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.fast: Any = torch.compile(self.second, backend="eager")

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss."""
        return {"loss": (self.head(self.fast(self.first(x))) - y).square().mean()}


class ScriptedPart(SmallNet):
    """A part is TorchScript."""

    def __init__(self) -> None:
        super().__init__()
        self.scripted: Any = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()))

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss."""
        return self.loss(self.scripted(self.first(x)), y)


class AutocastPart(SmallNet):
    """A part computes in bf16 under autocast."""

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.first(x)
        return self.loss(hidden.float(), y)


class NoGradTower(SmallNet):
    """A part is called without gradients."""

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss."""
        with torch.no_grad():
            hidden = self.first(x)
        return self.loss(hidden, y)


class InPlaceViews(SmallNet):
    """Writes into views of an activation."""

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss."""
        hidden = self.first(x)
        hidden[:, 0] = 0.0
        hidden[:, 1::2] *= 2.0
        hidden.view(-1, 2, WIDTH // 2)[:, 1].add_(1.0)
        return self.loss(hidden.relu_(), y)


class VmapEnsemble(nn.Module):
    """An ensemble of stacked weights, through torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.weights, self.biases = (
            nn.Parameter(0.3 * torch.randn(3, WIDTH, WIDTH)),
            nn.Parameter(torch.zeros(3, WIDTH)),
        )

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the mean loss of the members."""
        hidden = torch.tanh(self.body(x))
        out = torch.func.vmap(lambda w, b: F.linear(hidden, w, b))(self.weights, self.biases)
        return {"loss": (out - y).square().mean()}


class GradientPenalty(nn.Module):
    """WGAN-GP: a gradient with a graph of its own inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the critic's loss with its penalty."""
        middle = (0.5 * x + 0.5 * y).requires_grad_(True)
        (gradient,) = torch.autograd.grad(self.critic(middle).sum(), middle, create_graph=True)
        penalty = (gradient.norm(dim=1) - 1).square().mean()
        return {"loss": self.critic(x).mean() - self.critic(y).mean() + penalty}


class NumpyMatching(SmallNet):
    """A matching is worked out by numpy."""

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss against targets in another order."""
        hidden = self.first(x)
        cost = torch.cdist(hidden, y).detach().cpu().numpy()
        order = torch.from_numpy(np.argsort(cost.sum(0)).copy())
        return self.loss(hidden, y[order])


class Reparametrised(SmallNet):
    """A symmetric weight, as a parametrisation."""

    class Symmetric(nn.Module):
        """The parametrisation."""

        def forward(self, weight: Tensor) -> Tensor:
            """Return the upper half mirrored."""
            return weight.triu() + weight.triu(1).T

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrize.register_parametrization(self.first, "weight", self.Symmetric())

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss."""
        return self.loss(self.first(x), y)


class TimeLoop(nn.Module):
    """A cell called in a loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss of the last state."""
        state = x.new_zeros(len(x), WIDTH)
        for step in x.unbind(1):
            state = self.cell(step, state)
        return {"loss": (self.head(state) - y).square().mean()}


class Recurrent(nn.Module):
    """A recurrent layer and a head."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the loss of the last output."""
        out, _ = self.layer(x)
        return {"loss": (self.head(out[:, -1]) - y).square().mean()}


def gru() -> nn.Module:
    """Return a GRU of two layers."""
    return Recurrent(nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True), WIDTH)


class Adversaries(nn.Module):
    """A generator and a discriminator in one loss, each detached from the other."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.judge = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor, y: Tensor) -> Loss:
        """Return the sum of both players' losses."""
        made = self.generator(x)
        judged = F.softplus(-self.judge(y)).mean() + F.softplus(self.judge(made.detach())).mean()
        frozen = {name: p.detach() for name, p in self.judge.named_parameters()}
        fooled = F.softplus(-torch.func.functional_call(self.judge, frozen, (made,))).mean()
        return {"loss": judged + fooled}


def lazy_layers() -> nn.Module:
    """Return layers whose sizes came of the first batch."""
    model = Hooked()
    model.first = nn.LazyLinear(WIDTH)
    model(**vectors(0))
    return model


MODELS = (
    *plain(
        HOOKS, vectors, forward_hook, counting_hook, full_backward_hook, parameter_hook,
        PerceptualLoss, TensorHook,
    ),
    *plain(
        PYTHON, vectors, GradientReversal, ValueBranch, ActivationBranch, FixedPoint, Checkpointed,
        CompiledPart, ScriptedPart, AutocastPart, NoGradTower, InPlaceViews, VmapEnsemble, GradientPenalty,
        NumpyMatching, Reparametrised, Adversaries, lazy_layers,
    ),
    *plain(PYTHON, sequences, TimeLoop, gru),
)  # fmt: skip
