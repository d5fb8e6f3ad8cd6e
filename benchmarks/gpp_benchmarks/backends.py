"""Forwards of frozen towers on each backend, and on the one that `auto` takes: times in turn, errors, building.

Each tower is captured as a stage of its own in evaluation, with random weights. All backends that are installed are
built twice (the second time with what their own caches have), compared with torch, and timed in turn, on one thread in
processor time, which other processes do not lengthen. Then what `auto` would take is timed once more in turn with
torch and the fastest. Beside it stand the figures of the thesis (Collage, PACT 2022).
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gpp_plugin.backends.forward_code import ForwardCode
from gpp_plugin.backends.measured_backends import (
    TORCH,
    BuiltForward,
    build_checked,
    build_forward,
    time_in_turn,
)
from gpp_plugin.backends.model_parts import part_codes
from gpp_plugin.backends.place_forward import choose_single
from gpp_plugin.errors import BackendRefused, ConfigError
from gpp_plugin.extensions import BACKENDS
from gpp_plugin.ir.backend_costs import BackendCost

TABLE = None
"""It prints a table of its own as it goes."""

THESIS = (
    "thesis, section 2.5 (whole networks, on its machines): 1.43 x as fast as the best framework on a V100, 1.26 x on "
    "an RTX 2070, 1.40 x on a Xeon 8259CL; the graph level beat the op level on two of five networks, by 1.09 to "
    "1.20 x; choosing took up to two minutes, below one with the log",
    "here a stage is held against torch's operators, not the best framework: `auto` is the best single backend, so "
    "over that one it gains nothing; its candidates are whole libraries on one CPU, whose costs do not add up",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--towers", nargs="+", choices=TOWERS, default=list(TOWERS), help="which (all six)")
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=BACKENDS.names(),
        default=list(BACKENDS.names()),
        help="which to measure beside torch (all that are installed)",
    )
    parser.add_argument("--samples", type=int, default=4, help="samples of a forward (%(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="timed forwards of each (%(default)s)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return a row a tower and backend, and one a tower for ``auto``."""
    if min(args.samples, args.rounds) < 1:
        raise ConfigError("--samples and --rounds must be at least 1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    try:
        for name in args.towers:
            for row in _measure(name, args):
                rows.append(row)
                print(_line(row), flush=True)
    finally:
        torch.set_num_threads(threads)
    print("\n".join(THESIS))
    return {"rows": rows, "thesis": list(THESIS), "samples": args.samples}


def _line(row: dict[str, Any]) -> str:
    head = f"{row['tower']:18} {row['backend']:12}"
    if row["refused"]:
        return f"{head} {row['refused']}"
    text = f"{head} {row['ms']:9.3f} ms  {row['over_torch']:5.2f} x torch"
    if row["backend"] == "auto":
        return f"{text}  takes {row['takes']}, {row['over_best_single']:.3f} x the best single"
    return f"{text}  error {row['error']:.0e}  built in {row['build_s']:.1f} s, again {row['build_again_s']:.1f} s"


@torch.no_grad()
def _measure(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model, batch = TOWERS[name](args.samples)
    outputs = ("last_hidden_state",)
    (code,) = part_codes(model, batch, outputs=outputs)
    code = replace(code, name=name)
    expected = code.run(*code.examples)
    built: dict[str, BuiltForward] = {}
    again: dict[str, float] = {}
    costs: dict[str, BackendCost] = {}
    for backend in dict.fromkeys((TORCH, *args.backends)):
        try:
            built[backend] = _build(backend, code, expected)
            start = time.perf_counter()
            _build(backend, replace(code, name=name), expected)  # another object: nothing is kept in it
            again[backend] = time.perf_counter() - start
        except BackendRefused as error:
            costs[backend] = BackendCost(backend=backend, refused=str(error))
    times = time_in_turn(_runs(built, code), rounds=args.rounds)
    for backend, made in built.items():
        costs[backend] = BackendCost(
            backend=backend, us=times[backend], build_s=made.build_s, error=made.error
        )
    rows = [_row(name, cost, costs[TORCH].us, again.get(cost.backend, 0.0)) for cost in costs.values()]
    chosen = choose_single(name, list(costs.values()))
    best = min(built, key=lambda backend: times[backend])
    anew = {"auto": built[chosen.backend], "best": built[best], "torch": built[TORCH]}
    fresh = time_in_turn(_runs(anew, code), rounds=args.rounds)
    own = BackendCost(backend="auto", us=fresh["auto"], error=built[chosen.backend].error)
    row = _row(name, own, fresh["torch"], 0.0)
    return [
        *rows,
        {
            **row,
            "takes": chosen.backend,
            "best_single": best,
            "over_best_single": fresh["best"] / fresh["auto"],
        },
    ]


def _build(backend: str, code: ForwardCode, expected: tuple[Tensor, ...]) -> BuiltForward:
    return build_checked(functools.partial(build_forward, backend, code), code.examples, expected)


def _runs(built: dict[str, BuiltForward], code: ForwardCode) -> dict[str, Callable[[], object]]:
    return {name: functools.partial(own, *code.examples) for name, own in built.items()}


def _row(tower: str, cost: BackendCost, torch_us: float, build_again_s: float) -> dict[str, Any]:
    return {
        "tower": tower,
        "backend": cost.backend,
        "ms": cost.us / 1e3,
        "over_torch": torch_us / cost.us if cost.us else 0.0,
        "error": cost.error,
        "build_s": cost.build_s,
        "build_again_s": build_again_s,
        "refused": cost.refused,
    }


# ---- towers --------------------------------------------------------------------------------------------------


def _vit(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(**_LAYERS, image_size=96, patch_size=16)
    return ViTModel(config, add_pooling_layer=False), {"pixel_values": torch.randn(samples, 3, 96, 96)}


def _bert(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import BertConfig, BertModel

    config = BertConfig(**_LAYERS, vocab_size=512)
    ids = torch.randint(3, 500, (samples, 64))
    return BertModel(config, add_pooling_layer=False), {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
    }


def _resnet(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import ResNetConfig, ResNetModel

    config = ResNetConfig(
        embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[2, 2, 2, 2], layer_type="basic"
    )
    return ResNetModel(config), {"pixel_values": torch.randn(samples, 3, 96, 96)}


def _clip(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    config = CLIPVisionConfig(**_LAYERS, image_size=96, patch_size=16)
    return CLIPVisionModel(config), {"pixel_values": torch.randn(samples, 3, 96, 96)}


def _whisper(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(
        d_model=192,
        encoder_layers=4,
        encoder_attention_heads=3,
        encoder_ffn_dim=768,
        num_mel_bins=80,
        max_source_positions=100,
    )
    return WhisperEncoder(config), {"input_features": torch.randn(samples, 80, 200)}


def _amoeba(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    return AmoebaLike(channels=24, cells=4), {"pixel_values": torch.randn(samples, 3, 48, 48)}


_LAYERS: dict[str, int] = {
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
}


class AmoebaLike(nn.Module):
    """Cells of five sums of two small operators each, as AmoebaNet has them: many operators, little work in each."""

    def __init__(self, *, channels: int, cells: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.cells = nn.ModuleList(_Cell(channels) for _ in range(cells))

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """Return the last cell's states."""
        before = now = self.stem(pixel_values)
        for cell in self.cells:
            before, now = now, cell(before, now)
        return {"last_hidden_state": now}


class _Cell(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()

        def entry(kernel: int) -> nn.Module:
            return nn.Sequential(
                nn.ReLU(),
                nn.Conv2d(channels, channels, kernel, padding=kernel // 2, bias=False),
                nn.BatchNorm2d(channels),
            )

        pool, mean = nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1)
        pairs = [(entry(1), pool), (mean, entry(3)), (entry(1), entry(3)), (pool, entry(1)), (mean, entry(1))]
        self.pairs = nn.ModuleList(nn.ModuleList(pair) for pair in pairs)
        self.join = nn.Conv2d(3 * channels, channels, 1)

    def forward(self, before: Tensor, now: Tensor) -> Tensor:
        states = [before, now]
        for i, pair in enumerate(self.pairs):
            assert isinstance(pair, nn.ModuleList)
            left, right = pair
            states.append(left(states[i // 2]) + right(states[i // 2 + 1]))
        return self.join(torch.cat(states[-3:], dim=1))


TOWERS: dict[str, Callable[[int], tuple[nn.Module, dict[str, Tensor]]]] = {
    "vit": _vit,
    "bert": _bert,
    "resnet": _resnet,
    "amoeba_like": _amoeba,
    "clip_vision": _clip,
    "whisper_encoder": _whisper,
}
