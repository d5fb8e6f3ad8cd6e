"""The papers' models as plain `nn.Module`s that train; block paths are those of `library.paper_graphs`.

Every model takes a dict of tensors and returns ``{"loss": ...}``, so that it runs on DeepSpeed with a
``graph_pipeline`` block as a HuggingFace model does. The loss is the mean squared error of one output a
sample; `make_batch` draws inputs of the right shapes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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


def dlrm(**sizes: int) -> DLRM:
    """Return the recommendation model; sizes as `DLRM` takes them."""
    return DLRM(**sizes)


MODULES: dict[str, Callable[..., nn.Module]] = {
    "mmt": mmt, "dlrm": dlrm, "candle_uno": candle_uno, "two_branch": two_branch,
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
