"""What each rank runs in the tests of Megatron stages; importable by the processes that run it."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.integrations.megatron import (
    gather_full_state,
    gpt_stage,
    load_full_state,
    require_megatron,
    transformer_block_stage,
)
from gpp_plugin.integrations.megatron.chunks import DropoutStreams
from gpp_plugin.model.graph.stage_graph import StageContext, StageGraph, make_contexts
from tests.integrations.engine_jobs import said_of

LAYERS, HIDDEN, VOCAB, LENGTH, IMAGE = 4, 32, 64, 12, 63
LANGUAGE = {"vocab_size": VOCAB, "max_sequence_length": 16}
LLAMA = {"normalization": "RMSNorm", "gated_linear_unit": True}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "sequence": ({"sequence_parallel": True}, {}),
    "llama": (
        {**LLAMA, "add_bias_linear": False, "num_query_groups": 2, "activation_func": nn.functional.silu},
        {"position_embedding_type": "rope"},
    ),
    "llama sequence": (
        {**LLAMA, "sequence_parallel": True, "qk_layernorm": True},
        {"position_embedding_type": "rope"},
    ),
    # not LayerNorm, where a bias of keys does nothing
    "norms of queries": ({"qk_layernorm": True, "normalization": "RMSNorm"}, {}),
    "tied": ({}, {"share_embeddings_and_output_weights": True}),
}


def config_of(**changes: Any) -> Any:
    """Return a small configuration; ``sequence_parallel`` is for tensor size 2."""
    require_megatron("test")
    from megatron.core.transformer import TransformerConfig

    given: dict[str, Any] = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": 2 if changes.get("sequence_parallel") else 1,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TransformerConfig(**{**given, **changes})


def alone(stage: str = "whole", dtype: torch.dtype = torch.float64) -> StageContext:
    """Return the context of a stage on this rank only, for what a plain process computes."""
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return StageContext(
        stage=stage, rank=dist.get_rank(), device=torch.device("cpu"), dtype=dtype, data_group=group,
        tensor_group=group, single_group=group, data_rank=0, data_size=1, tensor_rank=0, tensor_size=1,
    )  # fmt: skip


def alone_config(**changes: Any) -> Any:
    """Return the same model's configuration at tensor size 1."""
    return config_of(**{**changes, "sequence_parallel": False})


def in_place(tensor: int = 2) -> StageContext:
    """Return this rank's context in one stage of all ranks."""
    graph = StageGraph()
    ranks = range(dist.get_world_size())
    graph.stage("all", nn.Identity(), inputs=["x"], outputs=["y"], ranks=ranks, tensor=tensor)
    contexts = make_contexts(
        graph.stages, rank=dist.get_rank(), device=torch.device("cpu"), dtype=torch.float64, timeout_s=60.0
    )
    return contexts["all"]


def jolt(module: nn.Module) -> None:
    """Give every parameter values that matter: biases are zero and norms one at first."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the whole model's gradients as a stage's engine owns them: partial ones are summed."""
    found, context = {}, module.context
    for name, parameter in module.named_parameters():
        if parameter.grad is None:
            continue
        found[name] = parameter.grad.clone()
        if context.tensor_size > 1 and getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(found[name], group=context.tensor_group)
    return gather_full_state(module, found)


def tokens(samples: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randint(0, VOCAB - 1, (samples, LENGTH), generator=generator)  # noqa: E731
    labels = draw()
    labels[0, :3] = -100
    return {"input_ids": draw(), "labels": labels}


def shared_out() -> dict[str, Any]:
    """Run every kind of model at tensor size 2, in one chunk and in two, beside the same model at size 1."""
    require_megatron("test")
    from megatron.core import parallel_state

    answers: dict[str, Any] = {}
    here, one = in_place(), alone()
    batch = tokens(4)
    for kind, (changes, options) in KINDS.items():
        whole = gpt_stage(alone_config(**changes), **LANGUAGE, **options)(one)
        jolt(whole)
        weights = gather_full_state(whole)
        whole.double()  # what Megatron builds in single precision whatever it is told
        loss = whole(**batch)
        loss.backward()
        wanted = gradients_of(whole)
        config = config_of(**changes)
        given = {**LANGUAGE, **options, "full_state": weights}
        chunk = gpt_stage(config, **given)(here).double()
        found = chunk(**batch)
        found.backward()
        lower = gpt_stage(config, layers=range(0, 1), post_process=False, **given)(here).double()
        upper = gpt_stage(config, layers=range(1, LAYERS), pre_process=False, **given)(here).double()
        hidden = lower(input_ids=batch["input_ids"])
        in_two = upper(hidden_states=hidden, labels=batch["labels"])
        in_two.backward()
        both = gradients_of(lower)
        for name, gradient in gradients_of(upper).items():
            is_twice = name == "output_layer.weight" and options.get("share_embeddings_and_output_weights")
            key = "embedding.word_embeddings.weight" if is_twice else name
            both[key] = both[key] + gradient if key in both else gradient
        back = gather_full_state(chunk)
        answers[kind] = {
            "losses": (float(loss), float(found), float(in_two)),
            "wanted": wanted,
            "found": gradients_of(chunk),
            "in two": both,
            "weights": all(torch.equal(weights[k], v) for k, v in back.items())
            and set(back) in ({*weights}, set()),
            "hidden": tuple(hidden.shape),
            "numbers": [layer.layer_number for layer in upper.decoder.layers],
            "globals": parallel_state.is_initialized() or parallel_state.model_parallel_is_initialized(),
            "logits": float(
                (whole(input_ids=batch["input_ids"]) - chunk(input_ids=batch["input_ids"])).abs().max()
            ),
        }
    return answers


def images(samples: int) -> dict[str, Tensor]:
    """Return a batch with two image positions in each sample, at different places, and padding at the end."""
    generator = torch.Generator().manual_seed(5)
    batch = tokens(samples, seed=5)
    for sample in range(samples):
        batch["input_ids"][sample, sample : sample + 2] = IMAGE
        batch["labels"][sample, LENGTH - sample :] = -100
    keep = (batch["labels"] != -100).long()
    keep[0, :3] = 1
    return {
        **batch,
        "attention_mask": keep,
        "images": torch.randn(samples, 2, HIDDEN, generator=generator).double(),
    }


def in_layouts(make: Callable[..., Any]) -> Iterator[tuple[str, nn.Module, dict[str, Tensor]]]:
    """Yield a module at tensor size 1, at size 2, and there with sequence parallelism, and the weights of all three.

    Args:
        make: makes the factory of a configuration and weights.
    """
    here, one = in_place(), alone()
    weights: Any = None
    for name, config, context in (
        ("whole", alone_config(), one),
        ("tensor", config_of(), here),
        ("sequence", config_of(sequence_parallel=True), here),
    ):
        module = make(config, full_state=weights)(context)
        if weights is None:
            jolt(module)
            weights = gather_full_state(module)
        yield name, module.double(), weights


def merged() -> dict[str, Any]:
    """Put image embeddings among tokens at tensor size 2, with and without sequence parallelism, and at size 1."""
    batch = images(3)
    answers: dict[str, Any] = {}
    make = functools.partial(gpt_stage, merge={"images": IMAGE}, **LANGUAGE)
    for name, chunk, weights in in_layouts(make):  # noqa: B007 - the last ones are used below
        given = {**batch, "images": batch["images"].clone().requires_grad_()}
        loss = chunk(**given)
        loss.backward()
        answers[name] = (float(loss), given["images"].grad, gradients_of(chunk))
    with torch.no_grad():  # what embeddings and labels say, put together by hand
        word = weights["embedding.word_embeddings.weight"].double()
        places = torch.arange(LENGTH).expand(3, -1)
        embedded = torch.where(
            (batch["input_ids"] == IMAGE)[..., None],
            torch.stack([batch["images"][i, (places[i] - i).clamp(0, 1)] for i in range(3)]),
            word[batch["input_ids"]] + weights["embedding.position_embeddings.weight"][places],
        )
        upper = gpt_stage(alone_config(), pre_process=False, full_state=weights, **LANGUAGE)(alone()).double()
        hidden = embedded.transpose(0, 1).contiguous()
        logits = upper(hidden_states=hidden, attention_mask=batch["attention_mask"])
        per_token = nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100
        )
    answers["by hand"] = float(per_token)
    batch["input_ids"][0, 5] = IMAGE
    answers["said"] = said_of(lambda: chunk(**batch))
    return answers


def blocks() -> dict[str, Any]:
    """Run transformer blocks with the batch first at tensor size 2, with and without sequence parallelism."""
    answers: dict[str, Any] = {}
    hidden = torch.randn(3, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(3)).double()
    keep = torch.ones(3, LENGTH)
    keep[1, 7:] = 0
    make = functools.partial(transformer_block_stage, final_norm=True, batch_first=True)
    for name, block, _ in in_layouts(make):
        given = hidden.clone().requires_grad_()
        found = block(hidden_states=given, attention_mask=keep)
        (found * torch.linspace(0, 1, HIDDEN)).square().mean().backward()
        answers[name] = (found.detach(), given.grad, gradients_of(block))
    here = in_place()
    drawn = [transformer_block_stage(config_of(), layers=range(i, i + 1))(here) for i in (1, 2)]
    answers["drawn"] = [chunk.layers[0].mlp.linear_fc1.weight.detach() for chunk in drawn]
    return answers


def dropped() -> dict[str, Any]:
    """Draw dropout at tensor size 2: losses alike, of forwards in order, again, and recomputed by Megatron."""
    here, one = in_place(), alone()
    batch = tokens(4)
    answers: dict[str, Any] = {}
    weights = gather_full_state(gpt_stage(alone_config(), **LANGUAGE)(one))
    torch.manual_seed(dist.get_rank())  # ranks do not agree on torch's generator
    changes: dict[str, dict[str, Any]] = {
        "hidden": {"hidden_dropout": 0.5},
        "attention": {"attention_dropout": 0.5},
        "both": {"hidden_dropout": 0.5, "attention_dropout": 0.5},
    }
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    for name, change in changes.items():
        whole = gpt_stage(alone_config(**change), full_state=weights, **LANGUAGE)(alone("all")).double()
        chunk = gpt_stage(config_of(**change), full_state=weights, **LANGUAGE)(here).double()
        again = gpt_stage(config_of(**change, **recompute), full_state=weights, **LANGUAGE)(here).double()
        before = torch.get_rng_state()
        first = chunk(**batch)
        first.backward()
        second = float(chunk(**batch).detach())
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        repeated = float(chunk(**batch).detach())
        torch.set_rng_state(before)
        recomputed = again(**batch)
        recomputed.backward()
        torch.set_rng_state(before)
        of_one = float(whole(**batch)), float(whole(**batch))
        torch.set_rng_state(after)
        chunk.eval()
        answers[name] = {
            "whole": of_one,
            "losses": (float(first), second),
            "repeated": repeated,
            "recomputed": (float(recomputed), gradients_of(again), gradients_of(chunk)),
            "evaluated": (float(chunk(**batch)), float(chunk(**batch))),
        }
    torch.manual_seed(0)
    streams = DropoutStreams(3, dataclasses.replace(one, data_rank=dist.get_rank(), data_size=2))
    with streams.of_forward():
        answers["of a data position"] = float(torch.rand(()))
    return answers


def refuse() -> dict[str, str]:
    """Make mistakes with chunks that are built, and return what was said."""
    require_megatron("test")
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    here = in_place()
    lower = gpt_stage(config_of(), layers=range(0, 1), post_process=False, **LANGUAGE)(here)
    upper = gpt_stage(config_of(), layers=range(1, LAYERS), pre_process=False, **LANGUAGE)(here)
    given = gpt_stage(config_of(), spec=get_gpt_layer_local_spec(), **LANGUAGE)(here)
    wide = gpt_stage(config_of(hidden_size=2 * HIDDEN), **LANGUAGE)(alone())
    batch = tokens(2)
    calls = {
        "no hidden": lambda: upper(**batch),
        "unknown embeds": lambda: lower(input_ids=batch["input_ids"], images=torch.zeros(2, 1, HIDDEN)),
        "mask": lambda: given(**batch, attention_mask=torch.ones(2, LENGTH)),
        "missing weight": lambda: load_full_state(upper, {}),
        "wide weight": lambda: load_full_state(lower, gather_full_state(wide)),
        "no chunk": lambda: gather_full_state(nn.Linear(2, 2)),
    }
    return {name: said_of(call) for name, call in calls.items()}
