"""How many labelled tokens a mini-batch has, and whether a model divides its loss by their number when it gets it.

HuggingFace's Trainer gives a model ``num_items_in_batch``, the labelled tokens of all batches of an optimizer step: the
model's loss is then the sum over its own tokens divided by that number, and the losses of a step are added up. What is
counted, and which models receive it, is decided here as there.

Source: transformers, Trainer.get_batch_samples and Trainer.compute_loss (release 5.23)
Tests: tests/integrations/test_token_mean.py, tests/capture/test_values.py, tests/integrations/test_units.py
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gpp_plugin.errors import ConfigError, describe_error
from gpp_plugin.ir.block_graph import OpGraph
from gpp_plugin.ir.typed_leaves import show
from gpp_plugin.runtime.batches import Batch, UnitBatch, join_batches, units_of, without_keys
from gpp_plugin.runtime.random_streams import restored_host_streams

T = TypeVar("T")

# Entries of a HuggingFace configuration that no model can have: which one it is, where transformers does not say.
#
# transformers takes many entries as they come: a negative number of layers is none, a text for a number fails
# somewhere inside a module. So sizes are held against those of the class's own default, and of what fails the guilty
# entry is found by leaving out one after the other.

LARGEST_SIZE = 2**31 - 1
MOST_LAYERS = 4096
"""Layers, heads, experts: each is a module, which takes time to make even without weights."""
_MODULES = re.compile(r"(layers?|depths?|heads?|blocks|experts)$|^n_(layer|head)s?$")
_NO_SIZE = re.compile(
    r"(_ids?|_idx|_index|_token|_layer|seed|offset|_type|_dtype|stride|_window\w*|_length|_every|_interval)$"
)
_NEVER_ZERO = re.compile(
    r"^(vocab_size|hidden_size|n_embd|n_head|d_model|d_kv|image_size|patch_size|num_channels|in_channels"
    r"|num_attention_heads|num_heads|encoder_attention_heads|decoder_attention_heads|intermediate_size|embed_dim"
    r"|max_position_embeddings|n_positions|num_hidden_layers|num_layers|n_layer|num_mel_bins|max_source_positions|projection_dim|head_dim)$"
)
_TRIAL_S = 2.0
"""For finding the guilty entry."""


def check_sizes(config: Any, source: object) -> None:
    """Refuse sizes that are negative, zero or texts where the model's own are positive numbers.

    Args:
        config: a `transformers` configuration, with those inside it.
        source: where it comes from, for errors.

    Raises:
        ConfigError: it names the entry, its value and the usual one.
    """
    for path, part in _parts(config, ""):
        try:
            usual = vars(type(part)())
        except Exception:  # a class without defaults of its own
            usual = {}
        for key, value in vars(part).items():
            _check_entry(f"{path}{key}", value, usual.get(key), source)


def _parts(config: Any, path: str) -> Iterator[tuple[str, Any]]:
    yield path, config
    for name in getattr(config, "sub_configs", None) or {}:
        part = getattr(config, name, None)
        if hasattr(part, "to_diff_dict"):
            yield from _parts(part, f"{path}{name}.")


def _check_entry(path: str, value: Any, usual: Any, source: object) -> None:
    key = path.rpartition(".")[2]
    is_size = type(usual) is int and usual > 0 and not _NO_SIZE.search(key)
    for number in value if isinstance(value, (list, tuple)) else [value]:
        # depths may be a list where the class has one; what is no number there is the model's own affair
        is_module = _MODULES.search(key) is not None
        if isinstance(number, bool) or not isinstance(number, int):
            if is_size and isinstance(number, (str, bool)):
                raise ConfigError(f"{source}: {path}: {show(number)} is no number; give one, like {usual}")
            continue
        known = is_size or is_module or _NEVER_ZERO.search(key) is not None
        # -2 layers is none, but the layer from the end whose features are taken (`vision_feature_layer`) may be
        counts = is_size or not (isinstance(value, list) or _NO_SIZE.search(key))
        least = 1 if _NEVER_ZERO.search(key) else 0 if counts else -LARGEST_SIZE
        most = MOST_LAYERS if is_module else LARGEST_SIZE
        if known and not least <= number <= most:
            like = f", like {usual}" if is_size else ""
            raise ConfigError(
                f"{source}: {path}: {show(number)} is not valid; give a number from {least} to {most}{like}"
            )


def guilty_key(
    entries: dict[str, Any], build: Callable[[dict[str, Any]], object], *, end: float | None = None
) -> tuple[str, ...]:
    """Return the keys that lead to the entry without which ``build`` works: ``("vision_config", "patch_size")``.

    Empty where no single one is to blame, or it takes too long.

    Args:
        end: when to give up, by `time.monotonic`.
    """
    end = time.monotonic() + _TRIAL_S if end is None else end
    # numbers first: they are what is most often wrong, and flags change little
    keys = sorted(entries, key=lambda key: (isinstance(entries[key], (bool, type(None))), str(key)))
    for key in keys:
        if time.monotonic() > end:
            return ()
        rest = {other: value for other, value in entries.items() if other != key}
        try:
            build(rest)
        except Exception:  # noqa: S112 - the next one, then
            continue
        inner = entries[key]
        if not isinstance(inner, dict):
            return (key,)

        def build_with(part: Mapping[str, Any], rest: dict[str, Any] = rest, key: str = key) -> Any:
            return build({**rest, key: part})

        return (key, *guilty_key(inner, build_with, end=end))
    return ()


def wrong_entry(source: object, entries: dict[str, Any], guilty: tuple[str, ...], error: Exception) -> str:
    """Return the line for entries that transformers cannot take."""
    # transformers and huggingface_hub write several lines: the last that says something is the reason
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = f"{type(error).__name__}: {lines[-1][:200] if lines else 'without a reason'}"
    if not guilty:
        return f"{source}: transformers cannot use these entries ({reason}); compare them with a published config.json"
    value: Any = entries
    for key in guilty:
        value = value[key]
    return (
        f"{source}: {'.'.join(guilty)}: {show(value)} is not valid beside the others ({reason}); mend it, or leave it "
        "out for the model's own"
    )


# Inputs that a HuggingFace model would make of a batch in Python, made early on the host as entries of the batch.
#
# The Qwen-VL family and its kin number text and image tokens in a loop over samples (``get_rope_index``), which reads
# where the images are and which tokens are padding: a capture would hold for one placement of images only. The method
# uses integers of the batch and the configuration alone, and the model takes its result as ``position_ids``, so every
# rank that reads inputs calls it on each batch.

POSITIONS = "position_ids"
_GRIDS = ("image_grid_thw", "video_grid_thw")


def has_prepared_inputs(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Return whether a batch holds what `prepared_inputs` made of it."""
    without = {key: value for key, value in batch.items() if key != POSITIONS}
    return batch.get(POSITIONS) is not None and _numbering(model, without) is not None


def prepared_inputs(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries to add to a batch: those that the model lacks and can have made early."""
    numbering = _numbering(model, batch)
    if numbering is None:
        return {}
    parameters = inspect.signature(numbering.get_rope_index).parameters
    known_inputs = {name: batch[name] for name in parameters if name in batch}
    required = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if any(name not in known_inputs for name in required):
        return {}  # the model says itself what it lacks
    # on a stub without weights: what the method may store stays out of the model, which may lie on the meta device
    stub: Any = copy.copy(numbering)
    stub.__dict__ = {**vars(numbering), "_modules": {}, "_parameters": {}}
    with torch.no_grad():
        positions, _ = stub.get_rope_index(**known_inputs)
    return {POSITIONS: positions}


def _numbering(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """Return the module that numbers the tokens of such a batch, None where none does."""
    if batch.get(POSITIONS) is not None or not any(batch.get(key) is not None for key in _GRIDS):
        return None
    found: Any = next((m for m in model.modules() if callable(getattr(m, "get_rope_index", None))), None)
    is_taken = found is not None and POSITIONS in inspect.signature(model.forward).parameters
    return found if is_taken else None


NUM_ITEMS = "num_items_in_batch"
"""What models call the number of labelled tokens."""
LABELS, SHIFTED = "labels", "shift_labels"
UNLABELLED = -100

_REMEDY = 'set graph_pipeline.loss_mean to "units"'


def check_takes_count(model: nn.Module) -> None:
    """Refuse a model that cannot take the number of labelled tokens; the test is Trainer's.

    Raises:
        ConfigError: names the model's class.
    """
    parameters = inspect.signature(model.forward).parameters
    accepts = getattr(model, "accepts_loss_kwargs", None)
    if accepts is None:
        accepts = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if not accepts and NUM_ITEMS not in parameters:
        raise ConfigError(
            f'graph_pipeline.loss_mean: "tokens" needs a model whose forward takes {NUM_ITEMS}, and that of '
            f"{type(model).__name__} does not; {_REMEDY}"
        )


def check_divides(model: str, op_graph: OpGraph) -> None:
    """Refuse a captured model that takes the number of labelled tokens and makes nothing of it.

    Raises:
        ConfigError: names the model.
    """
    if not any(NUM_ITEMS in node.inputs for node in op_graph.nodes):
        raise ConfigError(
            f'graph_pipeline.loss_mean: "tokens", but {model} takes {NUM_ITEMS} without dividing its loss by it; '
            f"{_REMEDY}"
        )


def has_labels(batch: Mapping[str, Any]) -> bool:
    """Return whether a batch has labels that are counted."""
    return any(isinstance(batch.get(key), Tensor) for key in (LABELS, SHIFTED))


def check_counted(batch: Mapping[str, Any]) -> None:
    """Refuse a batch whose labelled tokens nobody can count.

    Raises:
        ConfigError: it has no labels.
    """
    if not has_labels(batch):
        raise ConfigError(
            f'graph_pipeline.loss_mean: "tokens" counts {LABELS!r}, which a batch of {sorted(batch)} lacks; give them '
            f"to every batch, or {_REMEDY}"
        )


def count_labelled(model: nn.Module, batches: Sequence[Mapping[str, Any]]) -> Tensor:
    """Return the labelled tokens of batches together, a number in a tensor without axes.

    A decoder that predicts the next token has no use for the first label of each row; labels of an encoder-decoder
    are shifted before it sees them, and each counts.

    Raises:
        ConfigError: none of the labels is a target.
    """
    shifts = _shifts_labels(model)
    total = 0
    for batch in batches:
        if SHIFTED in batch:
            targets = batch[SHIFTED]
        else:
            targets = batch[LABELS][..., 1:] if shifts else batch[LABELS]
        total += int((targets != UNLABELLED).sum())
    if total == 0:
        raise ConfigError(
            f'graph_pipeline.loss_mean: "tokens", and all {LABELS!r} of a mini-batch are {UNLABELLED}: it has no loss; '
            "leave such samples out"
        )
    return torch.tensor(total)


def join_counted(parts: Sequence[Batch]) -> tuple[Batch, list[float]]:
    """Return parts of batches as one, and what the loss of each is then to be multiplied with.

    A loss over the labelled tokens is divided by those of all of them.
    """
    counts = [each[NUM_ITEMS] for each in parts if each.get(NUM_ITEMS) is not None]
    if len(parts) == 1 or isinstance(parts[0], UnitBatch) and not counts:
        units = tuple(unit for each in parts for unit in units_of(each))
        return UnitBatch(units=units) if len(parts) > 1 else parts[0], [1.0] * len(parts)
    more = {NUM_ITEMS: torch.stack(counts).sum()} if counts else {}
    factors = [float(more[NUM_ITEMS] / count) for count in counts] or [1.0] * len(parts)
    bare = [without_keys(each, more) for each in parts]
    if isinstance(parts[0], UnitBatch):
        return UnitBatch(units=tuple({**unit, **more} for each in bare for unit in units_of(each))), factors
    return {**join_batches(bare), **more}, factors


def _shifts_labels(model: nn.Module) -> bool:
    """Return whether the model's loss compares each position with the label of the next one."""
    kind = getattr(model, "loss_type", None)
    if kind is None or getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    return LOSS_MAPPING.get(kind) is ForCausalLMLoss


def base_model(model: Any) -> Any:
    """Return the model within adapters, or the model."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


# What a model returns, and what Trainer would make of it outside of its forward.


def _called(
    model: nn.Module,
    batch: Mapping[str, Any],
    read: Callable[[Any], T],
    call: Callable[[dict[str, Any]], Any] | None = None,
) -> T:
    """Call a model in evaluation on fake tensors, or as it is where Python reads values; return what is read of it.

    Args:
        call: calls it with a batch; None: by keywords.

    Raises:
        ConfigError: it cannot be called with the batch.
    """
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    run = call or (lambda inputs: model(**inputs))
    try:
        with restored_host_streams():
            try:
                with FakeTensorMode(allow_non_fake_inputs=True) as fake:
                    return read(run({k: fake.from_tensor(v) if _is_real(v) else v for k, v in batch.items()}))
            except Exception:  # whatever fake tensors cannot do
                return read(run(dict(batch)))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{type(model).__name__} cannot be called with a batch of {sorted(batch)} ({describe_error(error)}); "
            "mend the data collator, or name the outputs to gather: prediction_outputs=['logits']"
        ) from error
    finally:
        for part, training in modes:
            part.training = training


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.requires_grad


def tensor_outputs(model: nn.Module, batch: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields of a model's output in evaluation that are tensors, but for the loss.

    Raises:
        ConfigError: the model cannot be called with the batch.
    """

    def read(result: Any) -> tuple[str, ...]:
        fields = result.items() if isinstance(result, Mapping) else ()
        return tuple(key for key, value in fields if isinstance(value, Tensor) and key != "loss")

    with torch.no_grad():
        return _called(model, batch, read)


def divides_by_items(model: Any, batch: Mapping[str, Any]) -> bool:
    """Return whether a model's loss depends on the number of labelled tokens: what HuggingFace's loss functions do.

    Raises:
        ConfigError: the model cannot be called with the batch.
    """
    base = base_model(model)
    if not getattr(model, "accepts_loss_kwargs", getattr(base, "accepts_loss_kwargs", True)):
        return False
    count = torch.ones((), requires_grad=True)

    def read(result: Any) -> bool:
        loss = result.get("loss") if isinstance(result, Mapping) else None
        if loss is None or not loss.requires_grad:
            return False
        return torch.autograd.grad(loss, count, allow_unused=True)[0] is not None

    with torch.enable_grad():
        return _called(model, {**batch, NUM_ITEMS: count}, read)


def arguments_of_own_loss(
    model: nn.Module, batch: Mapping[str, Any], compute: Callable[[dict[str, Any]], Any], *, name: str
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return what makes of a batch the model's arguments, where a function returns the very loss that the model does.

    Args:
        compute: calls the model with a batch, and returns the loss.
        name: of the function, for errors.

    Raises:
        ConfigError: it returns another loss, or calls the model with tensors of its own, not once, or by position.
    """
    calls: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = []
    note = model.register_forward_hook(lambda _, *call: calls.append(call), with_kwargs=True)
    given: dict[str, Any] = {}

    def call(inputs: dict[str, Any]) -> Any:
        calls.clear()
        given.clear()
        given.update(inputs)
        return compute(inputs)

    def read(loss: Any) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        positional, inputs, outputs = calls[0] if len(calls) == 1 else ((None,), {}, None)
        own = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        inputs = {key: value for key, value in inputs.items() if key != NUM_ITEMS}
        tensors = {key: value for key, value in inputs.items() if isinstance(value, Tensor)}
        if (
            positional
            or own is None
            or loss is not own
            or any(v is not given.get(k) for k, v in tensors.items())
        ):
            raise ConfigError(
                f"{name} would not be called: a pipeline's stages compute the loss, which is not the very loss that "
                "the model returns for the batch; return outputs.loss as it is, or give the loss by compute_loss_func"
            )
        constants = {key: value for key, value in inputs.items() if key not in tensors}
        return lambda other: {**{key: other[key] for key in tensors if key in other}, **constants}

    try:
        with torch.enable_grad():
            return _called(model, batch, read, call)
    finally:
        note.remove()


def check_others_losses(kind: type) -> None:
    """Refuse a class that has one of TRL's trainers as a base: their losses are computed outside of the model.

    Raises:
        ConfigError: names the trainer.
    """
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] != "trl":
            continue
        if base.__name__ == "SFTTrainer":
            raise ConfigError(
                f"{kind.__name__}: SFTTrainer computes its loss outside of the model; use "
                "gpp_plugin.GraphPipelineSFTTrainer in place of both classes"
            )
        raise ConfigError(
            f"{kind.__name__}: {base.__name__} computes its loss from several forwards, and a pipeline runs one; use "
            f"{base.__name__} without a pipeline, or gpp_plugin.GraphPipelineSFTTrainer for supervised fine-tuning"
        )


def _replace_forward(module: nn.Module, make: Callable[[Any], Callable[..., Any]], **more: Any) -> None:
    """Give a module another forward, made of its own; its class has the same name, and copies have it, too.

    Args:
        more: attributes of the class.
    """
    kind = type(module)
    forward = functools.wraps(kind.forward)(make(kind.forward))
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    module.__class__ = type(kind.__name__, (kind,), {**names, "forward": forward, **more})


def return_loss_of(model: nn.Module, loss_of: Callable[..., Tensor], *, counts: bool) -> None:
    """Let a model return the loss of its outputs and labels that a function computes, as Trainer does outside of it.

    Args:
        loss_of: is given outputs, labels and ``num_items_in_batch``.
        counts: Trainer passes the labelled tokens of a step.
    """
    kinds = {p.kind for p in inspect.signature(model.forward).parameters.values()}
    is_taken = inspect.Parameter.VAR_KEYWORD in kinds

    def make(forward: Any) -> Callable[..., Any]:
        def with_loss(self: Any, *args: Any, **inputs: Any) -> Any:
            labels = inputs.pop("labels", None)
            count = inputs.get(NUM_ITEMS)
            if not is_taken:
                inputs.pop(NUM_ITEMS, None)
            outputs = forward(self, *args, **inputs)
            if labels is None:
                return outputs
            loss = loss_of(outputs, labels, num_items_in_batch=count)
            return {"loss": loss, **{key: value for key, value in outputs.items() if key != "loss"}}

        return with_loss

    _replace_forward(model, make, accepts_loss_kwargs=counts)


def multiply_loss(model: nn.Module, factor: int) -> None:
    """Let a model's loss in training be so many times as large."""

    def make(forward: Any) -> Callable[..., Any]:
        def multiplied(self: Any, *args: Any, **inputs: Any) -> Any:
            outputs = forward(self, *args, **inputs)
            if not self.training or outputs.get("loss") is None:
                return outputs
            others = {key: value for key, value in outputs.items() if key != "loss"}
            return {"loss": outputs["loss"] * factor, **others}

        return multiplied

    _replace_forward(model, make)


def add_output(model: nn.Module, name: str, make_output: Callable[[Any, Tensor], Tensor]) -> None:
    """Let a model return something more that is made of its outputs and labels, where it has both."""

    def make(forward: Any) -> Callable[..., Any]:
        def with_more(self: Any, *args: Any, **inputs: Any) -> Any:
            outputs, labels = forward(self, *args, **inputs), inputs.get(LABELS)
            if labels is None or outputs.get("logits") is None:
                return outputs
            return {**outputs, name: make_output(outputs, labels)}

        return with_more

    _replace_forward(model, make)


def add_noise(embeddings: nn.Module, alpha: float) -> None:
    """Let embeddings draw NEFTune's noise in training (transformers, integrations/neftune.py)."""

    def make(forward: Any) -> Callable[..., Any]:
        def noisy(self: Any, *args: Any, **inputs: Any) -> Tensor:
            output: Tensor = forward(self, *args, **inputs)
            if not self.training:
                return output
            most = alpha / math.sqrt(output.size(1) * output.size(2))
            return output + torch.zeros_like(output).uniform_(-most, most)

        return noisy

    _replace_forward(embeddings, make)


def check_model(model: Any) -> None:
    """Refuse a model whose forward draws masks from numpy, which a capture would keep as they are.

    Raises:
        ConfigError: names the field of its configuration.
    """
    config = getattr(model, "config", None)
    if not getattr(config, "apply_spec_augment", False) or "PreTraining" in type(model).__name__:
        return  # a pre-training's batches have their masks
    for name in ("mask_time_prob", "mask_feature_prob"):
        if (value := getattr(config, name, 0) or 0) > 0:
            raise ConfigError(
                f"{type(model).__name__}: SpecAugment ({name} {value:g}) draws masks from numpy in each forward, and "
                "a captured graph would keep those of the first; set model.config.apply_spec_augment = False, and "
                "mask in the dataset"
            )
