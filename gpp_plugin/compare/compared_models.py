"""The model of a comparison and its batches: HuggingFace's, a library model, or from the user's own function."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpp_plugin.capture.tracing.sample_batches import count_samples, resize_batch, rows_per_sample
from gpp_plugin.compare.compare_settings import CompareSettings
from gpp_plugin.errors import ConfigError, nearest
from gpp_plugin.integrations.huggingface.hf_models import (
    FIRST_ORDINARY_ID,
    build_model_of,
    config_of,
    make_example_batch,
    read_hf_config,
)
from gpp_plugin.library.named_models import config_names
from gpp_plugin.library.paper_graphs import MODELS
from gpp_plugin.model.graph.stage_graph import prepare_batch

# The models that `gpp compare` takes: names, and a check of them that loads no torch.

_LAYERS: dict[str, int] = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4}
TINY: dict[str, dict[str, Any]] = {
    "clip_tiny": {
        "model_type": "clip",
        "architectures": ["CLIPModel"],
        "projection_dim": 64,
        "text_config": {
            **_LAYERS, "num_hidden_layers": 4, "vocab_size": 512, "max_position_embeddings": 32,
            "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 511,
        },
        "vision_config": {**_LAYERS, "num_hidden_layers": 4, "image_size": 32, "patch_size": 8},
    },
    "t5_tiny": {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "vocab_size": 512, "d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 4, "num_heads": 4,
        "decoder_start_token_id": 0, "dropout_rate": 0.0,
    },
    "gpt2_tiny": {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 512, "n_positions": 64, "n_embd": 128, "n_layer": 4, "n_head": 4,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    },
}  # fmt: skip
"""Small HuggingFace models to try the command with."""

BUILT = ("mmt", "dlrm", "candle_uno", "two_branch")
"""Library models that can be trained (`MODULES`)."""


def trained_names() -> tuple[str, ...]:
    """Return the names of models that are small enough to train on any machine."""
    return (*TINY, *BUILT)


def planned_names() -> tuple[str, ...]:
    """Return the names of models that are planned only: what they take is known, but nobody would train them here."""
    return tuple(name for name in (*config_names(), *MODELS) if name not in BUILT)


def unknown_model(name: str) -> ConfigError:
    """Return the error of a name that is no model, with the nearest that is one."""
    names = (*trained_names(), *planned_names())
    return ConfigError(
        f"model {name!r}: no such file or model{nearest(name, names)} (known: {', '.join(names)}; or a HuggingFace "
        "config.json, or module:function of your own)"
    )


def check_model_name(name: str) -> None:
    """Refuse what is no model, before torch is loaded and any process starts.

    Raises:
        ConfigError: there is no such name, file, module or function.
    """
    if name in (*trained_names(), *planned_names()) or Path(name).exists():
        return
    if ":" not in name:
        raise unknown_model(name)
    module, _, function = name.partition(":")
    _add_working_directory()
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        files = [path.stem for path in Path().glob("*.py")]
        raise ConfigError(
            f"model {name!r}: no module {module!r}{nearest(module, files)}; give module:function, importable from the "
            "working directory"
        )
    # read, not imported: what it does when it is imported is for the processes that train it
    source = Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    if source is not None and function not in source.read_text(encoding="utf-8", errors="replace"):
        raise ConfigError(f"model {name!r}: {source.name} has no function {function!r}; give module:function")


def _add_working_directory() -> None:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


Batch = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModel:
    """A model with its weights, and the mini-batch of each step; the same in every process."""

    model: nn.Module
    batch_at: Callable[[int], Batch]


def build_model(settings: CompareSettings) -> BuiltModel:
    """Build the model a user named.

    Raises:
        ConfigError: there is no such model, file or function, or its batch is none.
    """
    name = settings.model
    torch.manual_seed(settings.seed)
    if name in TINY or Path(name).exists():
        built = _huggingface_model(settings)
    elif name in MODULES:
        built = _library_model(settings)
    elif ":" in name:
        built = _own_model(settings)
    else:
        raise unknown_model(name)
    return BuiltModel(
        model=built.model.train(), batch_at=lambda step: prepare_batch(built.model, built.batch_at(step))
    )


def _huggingface_model(settings: CompareSettings) -> BuiltModel:
    name = settings.model
    config = config_of(TINY[name], name) if name in TINY else read_hf_config(name)
    model = build_model_of(config)
    example = make_example_batch(
        model,
        num_samples=settings.mini_batch,
        length=settings.text_length,
        is_asked=settings.length is not None,
    )
    # 0 where the batch holds no token ids (a vision model); then nothing below is drawn from it.
    vocabulary = config.get_text_config().vocab_size if "input_ids" in example or "labels" in example else 0

    def batch_at(step: int) -> Batch:
        generator = torch.Generator().manual_seed(settings.seed + step)
        return {key: _drawn(value, vocabulary, generator) for key, value in example.items()}

    return BuiltModel(model=model, batch_at=batch_at)


def _drawn(value: Any, vocabulary: int, generator: torch.Generator) -> Any:
    """Return random values where the example batch has made-up ones."""
    if not isinstance(value, Tensor):
        return value
    if value.is_floating_point():
        return torch.randn(value.shape, generator=generator)
    # the last id ends texts, and ids below the first ordinary one have meanings of their own
    low, high = FIRST_ORDINARY_ID, max(vocabulary - 1, FIRST_ORDINARY_ID + 1)
    ids = torch.randint(low, high, value.shape, generator=generator)
    return torch.where(value == FIRST_ORDINARY_ID, ids, value)


def _library_model(settings: CompareSettings) -> BuiltModel:
    try:
        model = MODULES[settings.model](**settings.sizes)
    except TypeError as error:
        raise ConfigError(f"--size: {settings.model}: {error}") from error

    def batch_at(step: int) -> Batch:
        return make_batch(model, settings.mini_batch, length=settings.text_length, seed=settings.seed + step)

    return BuiltModel(model=model, batch_at=batch_at)


def _own_model(settings: CompareSettings) -> BuiltModel:
    module_name, _, function_name = settings.model.partition(":")
    # What may come back, checked in this order so that each mistake has its own advice:
    #
    #   module:function                       imported from the working directory, as ``python -m`` would
    #   function() -> (model, batch)          a pair with an nn.Module
    #     batch = {"input_ids": [n, length]}  resized to train_batch_size samples, the same in every step
    #     batch = lambda step: {...}          drawn a step; must have train_batch_size samples itself
    #
    # Every process calls the function with the same torch seed, set by
    # `build_model`: all hold the same weights.
    _add_working_directory()
    where = f"model {settings.model!r}"
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        advice = "give module:function, importable from the working directory"
        raise ConfigError(f"{where}: {error}; {advice}") from error
    if not callable(function):
        raise ConfigError(f"{where}: is a {type(function).__name__}; name a function without arguments")
    try:
        answer = function()
    except Exception as error:
        raise ConfigError(f"{where}: its function raised {type(error).__name__}: {error}") from error
    if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[0], nn.Module):
        raise ConfigError(
            f"{settings.model} returned a {type(answer).__name__}; return the pair (model, batch): a torch.nn.Module, "
            "and a dict of tensors or a function from the step's number to one"
        )
    model, source = answer
    if not callable(source) and not isinstance(source, Mapping):
        raise ConfigError(f"{settings.model} returned a batch of type {type(source).__name__}; return a dict")

    def batch_at(step: int) -> Batch:
        if not callable(source):
            return resize_batch(source, settings.mini_batch)
        batch = dict(source(step))
        if count_samples(batch) != settings.mini_batch:
            raise ConfigError(
                f"{settings.model}: the batch of step {step} has {count_samples(batch)} samples, train_batch_size is "
                f"{settings.mini_batch}"
            )
        return batch

    return BuiltModel(model=model, batch_at=batch_at)


def cut_batch(batch: Mapping[str, Any], num_samples: int) -> list[Batch]:
    """Cut a batch into parts of ``num_samples`` samples."""
    rows = rows_per_sample(batch)
    parts = []
    # An entry may have several rows a sample (two images each): count = 2 cuts samples 2..3 as rows 4..7. One
    # without a batch axis (count 0) is whole in every part.
    for first in range(0, count_samples(batch), num_samples):
        part = dict(batch)
        for key, count in rows.items():
            if count:
                part[key] = batch[key][first * count : (first + num_samples) * count]
        parts.append(part)
    return parts


# ---- the papers' models, as modules that train ----------------------------------------------------------------
#
# Block paths are those of `library.paper_graphs`. Every model takes a dict of tensors and returns ``{"loss": ...}``, so
# that it runs on DeepSpeed with a ``graph_pipeline`` block as a HuggingFace model does. The loss is the mean squared
# error of one output a sample; `make_batch` draws inputs of the right shapes.


class TransformerLayer(nn.Module):
    """A pre-norm transformer layer, attention and feed-forward as modules of their own."""

    def __init__(self, hidden: int, heads: int, inner: int) -> None:
        super().__init__()
        self.attention = SelfAttention(hidden, heads)
        self.mlp = FeedForward(hidden, inner)

    def forward(self, hidden_BLD: Tensor) -> Tensor:
        """Return the hidden states [batch, length, hidden]."""
        result: Tensor = self.mlp(self.attention(hidden_BLD))
        return result


class SelfAttention(nn.Module):
    """Multi-head self-attention with its normalisation and residual."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, hidden_BLD: Tensor) -> Tensor:
        """Return the hidden states [batch, length, hidden]."""
        batch, length, hidden = hidden_BLD.shape
        # [batch, length, 3, heads, hidden of a head] -> 3 x [batch, heads, length, hidden of a head]. Two
        # texts of 16 tokens, hidden 1024 in 16 heads: [2, 16, 3, 16, 64] -> 3 x [2, 16, 16, 64]; ``mixed`` is
        # back at [2, 16, 16, 64] with tokens before heads, and reshaped to [2, 16, 1024].
        qkv = self.qkv(self.norm(hidden_BLD)).view(batch, length, 3, self.heads, hidden // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
        result: Tensor = hidden_BLD + self.out(mixed.reshape(batch, length, hidden))
        return result


class FeedForward(nn.Module):
    """Two linear layers with their normalisation and residual."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)

    def forward(self, hidden_BLD: Tensor) -> Tensor:
        """Return the hidden states [batch, length, hidden]."""
        result: Tensor = hidden_BLD + self.down(F.gelu(self.up(self.norm(hidden_BLD))))
        return result


class ActivatedLinear(nn.Module):
    """A linear layer and its activation."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, features_BD: Tensor) -> Tensor:
        """Return the features [batch, ..., outputs]."""
        return F.relu(self.linear(features_BD))


class Branch(nn.Module):
    """Layers one after the other."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, features: Tensor) -> Tensor:
        """Return what the last layer makes of ``features``."""
        for layer in self.layers:
            features = layer(features)
        return features


class CaseStudyLayer(nn.Module):
    """Attention and two linear layers (GraphPipe, Figure 10)."""

    def __init__(self, hidden: int, heads: int, inner: int) -> None:
        super().__init__()
        self.attention = SelfAttention(hidden, heads)
        self.linear1 = ActivatedLinear(hidden, inner)
        self.linear2 = ActivatedLinear(inner, hidden)

    def forward(self, hidden_BLD: Tensor) -> Tensor:
        """Return the hidden states [batch, length, hidden]."""
        result: Tensor = self.linear2(self.linear1(self.attention(hidden_BLD)))
        return result


class MultiBranch(nn.Module):
    """Branches over inputs of their own, concatenated; one linear head; mean squared error.

    Inputs are ``input0``, ``input1``, ... [batch, (length,) width] and ``labels`` [batch].
    """

    def __init__(self, make_layers: Callable[[], list[nn.Module]], num_branches: int, width: int) -> None:
        super().__init__()
        self.num_branches = num_branches
        for i in range(num_branches):
            self.add_module(f"branch{i}", Branch(make_layers()))
        self.head = nn.Linear(num_branches * width, 1)

    def forward(self, labels: Tensor, **inputs: Tensor) -> dict[str, Tensor]:
        """Return the loss of a batch."""
        outputs = []
        for i in range(self.num_branches):
            output = self.get_submodule(f"branch{i}")(inputs[f"input{i}"])
            # A sequence [batch, length, hidden] is pooled over its tokens; a vector [batch,
            # width] stays as it is.
            outputs.append(output.mean(dim=1) if output.dim() == 3 else output)
        scores_B = self.head(torch.cat(outputs, dim=-1)).squeeze(-1)
        return {"loss": F.mse_loss(scores_B, labels)}


class DLRM(nn.Module):
    """Dense branches and embedding bags, their concatenation, a top network (GraphPipe, A.2).

    Inputs are ``dense0``... [batch, hidden], ``sparse0``... [batch, bag] int64 and ``labels`` [batch].
    """

    def __init__(
        self,
        *,
        dense: int = 7,
        sparse: int = 7,
        layers: int = 4,
        hidden: int = 4096,
        top_layers: int = 4,
        entries: int = 1_000_000,
        embedding: int = 64,
        bag: int = 100,
    ) -> None:
        super().__init__()
        self.num_dense, self.num_sparse = dense, sparse
        for i in range(dense):
            self.add_module(f"dense{i}", Branch([ActivatedLinear(hidden, hidden) for _ in range(layers)]))
        for i in range(sparse):
            self.add_module(f"sparse{i}", nn.Embedding(entries, embedding))
        self.interaction = ActivatedLinear(dense * hidden + sparse * bag * embedding, hidden)
        self.top = Branch([ActivatedLinear(hidden, hidden) for _ in range(top_layers - 1)])
        self.head = nn.Linear(hidden, 1)

    def forward(self, labels: Tensor, **inputs: Tensor) -> dict[str, Tensor]:
        """Return the loss of a batch."""
        parts = [self.get_submodule(f"dense{i}")(inputs[f"dense{i}"]) for i in range(self.num_dense)]
        parts += [
            self.get_submodule(f"sparse{i}")(inputs[f"sparse{i}"]).flatten(1) for i in range(self.num_sparse)
        ]
        scores_B = self.head(self.top(self.interaction(torch.cat(parts, dim=-1)))).squeeze(-1)
        return {"loss": F.mse_loss(scores_B, labels)}


def mmt(
    *, branches: int = 4, layers: int = 8, hidden: int = 1024, heads: int = 16, inner: int = 4096
) -> MultiBranch:
    """Return the multi-modal transformer."""
    return MultiBranch(
        lambda: [TransformerLayer(hidden, heads, inner) for _ in range(layers)], branches, hidden
    )


def candle_uno(*, branches: int = 7, layers: int = 4, hidden: int = 4096) -> MultiBranch:
    """Return the drug-response model."""
    return MultiBranch(lambda: [ActivatedLinear(hidden, hidden) for _ in range(layers)], branches, hidden)


def two_branch(
    *, branches: int = 2, layers: int = 4, hidden: int = 1024, heads: int = 16, inner: int = 1024
) -> MultiBranch:
    """Return the case study of section 7.5."""
    return MultiBranch(
        lambda: [CaseStudyLayer(hidden, heads, inner) for _ in range(layers)], branches, hidden
    )


MODULES: dict[str, Callable[..., nn.Module]] = {
    "mmt": mmt, "dlrm": DLRM, "candle_uno": candle_uno, "two_branch": two_branch,
}  # fmt: skip


def make_batch(model: nn.Module, num_samples: int, *, length: int = 16, seed: int = 0) -> dict[str, Tensor]:
    """Return random inputs of the right shapes for a model of this file.

    Args:
        length: tokens of a sequence, for models of sequences.
    """
    generator = torch.Generator().manual_seed(seed)
    batch: dict[str, Tensor] = {}
    if isinstance(model, DLRM):
        hidden = model.head.in_features
        for i in range(model.num_dense):
            batch[f"dense{i}"] = torch.randn(num_samples, hidden, generator=generator)
        # What the interaction reads beside the dense branches, divided by tables and width: rows looked up a
        # table. 73,472 - 7 * 4096 = 44,800; / 7 tables / 64 = 100.
        total = model.interaction.linear.in_features - model.num_dense * hidden
        for i in range(model.num_sparse):
            table = model.get_submodule(f"sparse{i}")
            assert isinstance(table, nn.Embedding)
            bag = total // model.num_sparse // table.embedding_dim
            batch[f"sparse{i}"] = torch.randint(table.num_embeddings, (num_samples, bag), generator=generator)
    elif isinstance(model, MultiBranch):
        width = model.head.in_features // model.num_branches
        is_sequence = any(isinstance(module, SelfAttention) for module in model.modules())
        shape = (num_samples, length, width) if is_sequence else (num_samples, width)
        for i in range(model.num_branches):
            batch[f"input{i}"] = torch.randn(*shape, generator=generator)
    else:
        raise ValueError(f"a {type(model).__name__} is not a model of this file; give a batch of your own")
    batch["labels"] = torch.randn(num_samples, generator=generator)
    return batch
