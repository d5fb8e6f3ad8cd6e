"""Users' modules whose storages wait on the host: gradients are those of everything kept, whatever the module does."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.plan import MemoryPlan, RecomputedSegment, SwappedTensor
from gpp_plugin.runtime.memory.activation_policy import _Buffers, make_stage_activations
from gpp_plugin.runtime.memory.swap import SwapLink
from gpp_plugin.runtime.stage_module import StageFunction

WIDTH = 5


class Rewrites(nn.Module):
    """Writes to what an operator kept whose result nobody uses, and keeps it again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        made = self.layer(hidden)
        torch.sin(made)
        made.mul_(3.0)
        return made * made + made[:, :1].exp()


class Wanders(nn.Module):
    """Goes another way each time, with temporaries that lend their memory to the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.calls = itertools.count(1)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers[: 1 + next(self.calls) % 3]:
            hidden = torch.tanh(layer(nn.functional.dropout(hidden, 0.3)) + hidden.square().mean())
        return hidden


class Unusual(nn.Module):
    """Keeps views, a conjugate, a sparse matrix and its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("eye", torch.eye(WIDTH).to_sparse())

    def forward(self, hidden: Tensor) -> Tensor:
        wave = torch.fft.fft(hidden.t())
        power = (wave * wave.conj()).real.t()
        return torch.sparse.mm(self.eye, (power @ self.weight).t()).t() * hidden[:, :1]


def gradients(module: nn.Module, swapped: tuple[int, ...], num_micro_batches: int = 3) -> list[Tensor]:
    """Return the gradients of some micro-batches in flight together: of what was received, then of parameters."""
    torch.manual_seed(0)
    if isinstance(module, Wanders):
        module.calls = itertools.count(1)
    plan = MemoryPlan(swapped=tuple(SwappedTensor(name=f"own:{n}", bytes=1, free_us=0.0) for n in swapped))
    function = StageFunction(
        call=lambda *given: (module(given[-1]),), tensors=(), constants=(), batch_inputs=(), received=("hidden",),
        outputs=("out",), code="", given=module,
    )  # fmt: skip
    activations = make_stage_activations(
        stage="own", plan=plan, blocks=("other",), operators=None, whole=function, gradient_inputs=("hidden",),
        link=SwapLink(torch.device("cpu")),
    )  # fmt: skip
    parameters = list(module.parameters())
    kept = []
    for micro_batch in range(num_micro_batches):
        received = torch.randn(4, WIDTH)
        kept.append(activations.forward(micro_batch, None, parameters, (), (received,)))
    found = []
    for micro_batch, ((leaf,), (output,)) in enumerate(kept):
        activations.begin_backward(micro_batch)
        output.backward(torch.linspace(0.0, 1.0, output.numel()).view(output.shape))
        activations.end_backward(micro_batch)
        found.append(leaf.grad)
    found += [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    assert all(gradient is not None for gradient in found)
    return found


@pytest.mark.parametrize("module", [Rewrites(), Wanders(), Unusual()])
@pytest.mark.parametrize("swapped", [(0,), (1,), (2, 3), tuple(range(30))])
def test_gradients_are_those_of_everything_kept(module: nn.Module, swapped: tuple[int, ...]) -> None:
    for have, want in zip(gradients(module, swapped), gradients(module, ()), strict=True):
        assert torch.equal(have, want)


@pytest.mark.parametrize(
    "plan",
    [
        MemoryPlan(swapped=(SwappedTensor(name="layer.weight:inside", bytes=8, free_us=0.0),)),
        MemoryPlan(
            swapped=(SwappedTensor(name="own:1", bytes=8, free_us=0.0),),
            recomputed=(
                RecomputedSegment(blocks=("own",), tensors=(), bytes=8, held_bytes=0, recompute_us=1.0),
            ),
        ),
    ],
)
def test_a_plan_of_something_else_is_refused(plan: MemoryPlan) -> None:
    function = StageFunction(
        call=lambda *given: given, tensors=(), constants=(), batch_inputs=(), received=(), outputs=(), code="",
        given=nn.Linear(2, 2),
    )  # fmt: skip
    with pytest.raises(PlanError, match="stage 'own' runs the user's own module as it is"):
        make_stage_activations(
            stage="own",
            plan=plan,
            blocks=("other",),
            operators=None,
            whole=function,
            link=SwapLink(torch.device("cpu")),
        )


def test_a_second_forward_reads_the_buffers_of_the_first_and_leaves_the_present_ones() -> None:
    module = nn.BatchNorm1d(2)
    before, mean = _Buffers(module), module.running_mean
    assert mean is not None
    version = mean._version
    mean.data.fill_(3.0)
    with before.restored():
        assert not mean.any()
        mean.data += 1
    assert module.running_mean is mean and mean.eq(3.0).all() and mean._version == version
