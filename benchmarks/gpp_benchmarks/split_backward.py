"""What it costs to split a backward: input and weight gradients apart, against both at once, on real layers.

Zero bubble schedules run them apart; nothing is computed twice, so what remains is the host's work and gradients that
are no longer in the cache. Stages of linear layers and of transformer layers, times of one micro-batch; the
parts and the whole alternate, medians. What `schedule: "auto"` uses is measured the same way on the model's blocks.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gpp_plugin.errors import ConfigError
from gpp_plugin.profile.block_survey import measure_split_cost
from gpp_plugin.profile.timing import Operands

HEADS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--widths", nargs="+", type=int, default=[64, 256, 768], help="of the layers (%(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=256, help="rows of a micro-batch (%(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="of a stage (%(default)s)")
    parser.add_argument("--repeats", type=int, default=7, help="fewest timed runs (%(default)s)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return a row a stage and width."""
    if min(*args.widths, args.tokens, args.layers, args.repeats) < 1 or any(w % HEADS for w in args.widths):
        raise ConfigError(
            f"--widths {args.widths} --tokens {args.tokens} --layers {args.layers} --repeats {args.repeats}: give at "
            f"least 1 of each, and widths that {HEADS} heads divide"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [_measure(kind, width, args, device) for kind in _STAGES for width in args.widths]
    finally:
        torch.set_num_threads(threads)
    return {"rows": rows, "device": device.type}


def _linear_layers(width: int, num_layers: int) -> nn.Module:
    return nn.Sequential(*(m for _ in range(num_layers) for m in (nn.Linear(width, width), nn.GELU())))


def _transformer_layers(width: int, num_layers: int) -> nn.Module:
    layers = [
        nn.TransformerEncoderLayer(width, HEADS, 4 * width, dropout=0.0, batch_first=True)
        for _ in range(num_layers)
    ]
    return nn.Sequential(*layers)


_STAGES = {"linear": _linear_layers, "transformer": _transformer_layers}


def _measure(kind: str, width: int, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    module = _STAGES[kind](width, args.layers).to(device)
    names = [name for name, _ in module.named_parameters()]

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        parameters = dict(zip(names, tensors, strict=False))
        return (functional_call(module, parameters, (tensors[-1],)),)

    operands = Operands(
        call=call,
        parameters=tuple(p.detach().requires_grad_() for p in module.parameters()),
        inputs=(),
        received=(torch.randn(1, args.tokens, width, device=device),),
        takes_gradient=(True,),
        is_training=True,
    )
    cost = measure_split_cost(operands, device=device, repeats=args.repeats)
    row = {
        "stage": kind,
        "layers": args.layers,
        "width": width,
        "tokens": args.tokens,
        **asdict(cost),
        "factor": cost.factor,
        "input_share": cost.input_share,
    }
    print(
        f"{kind:<12} width {width:5}: backward {cost.backward_us:9.0f} us, input {cost.input_gradient_us:9.0f} + "
        f"weight {cost.weight_gradient_us:9.0f} us: {cost.factor:.3f} x",
        flush=True,
    )
    return row
