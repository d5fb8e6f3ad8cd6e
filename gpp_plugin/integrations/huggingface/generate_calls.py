"""HuggingFace's side of a call of `generate`: which models can, what arguments mean, where caches lie.

Tests: tests/integrations/test_generation.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpp_plugin.errors import ConfigError

_DYNAMIC = (None, "dynamic", "dynamic_full")
_REFUSED = {
    "assistant_model": "assisted decoding is not supported; leave it out",
    "prompt_lookup_num_tokens": "assisted decoding (prompt lookup) is not supported; leave it out",
    "assistant_early_exit": "assisted decoding (early exit) is not supported; leave it out",
    "custom_generate": "a generation loop of its own is not supported; leave it out",
    "past_key_values": "its caches would have to lie with the stages; give the whole prompt instead",
    "inputs_embeds": "embeddings are a stage's to make; give input_ids",
    "max_time": "ranks have clocks of their own, and would not stop together; give max_new_tokens",
    "synced_gpus": "ranks that generate together stop together; leave it out",
}
"""Arguments that `engine.generate` does not take, and what to do."""

_WHOLE_BATCH = (
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "streamer",
    "negative_prompt_ids",
    "return_dict_in_generate",
)
"""Arguments that number samples, or keep a state of all of them: where they receive, one replica has all prompts."""


def generating_model(model: nn.Module) -> Any:
    """Return the module whose `generate` is called: the model, or the one that adapters were put into.

    Raises:
        ConfigError: it has none.
    """
    base: Any = getattr(model, "get_base_model", None)
    inner: Any = base() if callable(base) else model
    can: Any = getattr(inner, "can_generate", None)
    if not callable(can) or not can() or not callable(getattr(inner, "generate", None)):
        raise ConfigError(
            f"engine.generate: {type(inner).__name__} cannot generate (it has no `generate` of transformers' "
            "GenerationMixin); give deepspeed.initialize a model that has, e.g. AutoModelForCausalLM"
        )
    return inner


def check_arguments(model: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that stages cannot follow.

    Raises:
        ConfigError: names the argument and says what to do.
    """
    for name, why in _REFUSED.items():
        explicit = _setting(model, arguments, name)
        if explicit is not None and explicit is not False:
            raise ConfigError(f"engine.generate: {name}: {why}")
    kind = _setting(model, arguments, "cache_implementation")
    if kind not in _DYNAMIC:
        raise ConfigError(
            f"engine.generate: cache_implementation={kind!r}: caches lie with their stages and grow there; leave it "
            'out, or use "dynamic"'
        )
    if not tensor_arguments(arguments):
        raise ConfigError(
            f"engine.generate: no tensor among the arguments {sorted(arguments)}; give the prompts, e.g. "
            "input_ids=... and attention_mask=..."
        )


def why_not_cut(model: Any) -> str | None:
    """Return why a model's caches cannot be cut along the sequence, None where they can."""
    config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        return f"{name} has caches for cross-attention, which do not grow"
    if kinds or (getattr(config, "sliding_window", None) and not getattr(config, "layer_types", None)):
        found = ", ".join(sorted(kinds)) or "sliding_window"
        return f"{name} has caches that do not grow by a position a token ({found})"
    if not getattr(model, "_supports_attention_backend", False):
        return f"{name} does not call attention by HuggingFace's AttentionInterface"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestCaches:
    """How long caches may get.

    Args:
        each: sequences of a prompt.
        own: positions of the decoder's own tokens; ``across``: of what it attends to across, 0 where there is none.
    """

    each: int
    own: int
    across: int


def longest_caches(model: Any, arguments: Mapping[str, Any]) -> LongestCaches | None:
    """Return how long the caches of a generation may get; None where its arguments do not say."""
    ids = arguments.get("input_ids", arguments.get("inputs"))
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        return None
    # A prompt of 8 and 7 new tokens: 14 positions, as the last token is read by nobody. An encoder-decoder begins with
    # one token of its own.
    is_across = bool(model.config.is_encoder_decoder)
    new, most = (_setting(model, arguments, name) for name in ("max_new_tokens", "max_length"))
    prompt = 1 if is_across else ids.shape[1]
    longest = prompt + int(new) if new is not None else int(most or 20)
    each = max(int(_setting(model, arguments, name) or 1) for name in ("num_beams", "num_return_sequences"))
    return LongestCaches(each=each, own=max(longest - 1, prompt), across=ids.shape[1] if is_across else 0)


def _setting(model: Any, arguments: Mapping[str, Any], name: str) -> Any:
    """Return a setting of a generation: an argument, else of the passed configuration, else of the model's."""
    if arguments.get(name) is not None:
        return arguments[name]
    explicit = getattr(arguments.get("generation_config"), name, None)
    return explicit if explicit is not None else getattr(model.generation_config, name, None)


def tensor_arguments(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the arguments that are tensors."""
    return {name: value for name, value in arguments.items() if isinstance(value, Tensor)}


def samples_of(model: Any, arguments: Mapping[str, Any]) -> int | None:
    """Return how many prompts there are, if each can be generated from by itself; None where they go together.

    Together go prompts whose tensors are not all of as many rows (patches of all images beside rows of tokens), and
    those with an argument that receives the number of a sample, or all samples at once.
    """
    if any(_setting(model, arguments, name) not in (None, False) for name in _WHOLE_BATCH):
        return None
    # without end tokens, what met a stop string continues until all have met one
    if _setting(model, arguments, "stop_strings") and _setting(model, arguments, "eos_token_id") is None:
        return None
    rows = {value.shape[0] if value.ndim else None for value in tensor_arguments(arguments).values()}
    nested = any(
        isinstance(value, (list, tuple, dict)) and _has_tensor(value) for value in arguments.values()
    )
    return rows.pop() if len(rows) == 1 and not nested else None


def _has_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_has_tensor(each) for each in value.values())
    return isinstance(value, Tensor) or (isinstance(value, (list, tuple)) and any(map(_has_tensor, value)))


def joined_tokens(model: Any, arguments: Mapping[str, Any], parts: list[Tensor]) -> Tensor:
    """Return the tokens of several replicas as those of one call: shorter ones are filled up as HuggingFace does."""
    if len({part.shape[1] for part in parts}) > 1:
        pad = _setting(model, arguments, "pad_token_id")
        end = _setting(model, arguments, "eos_token_id")
        end = end[0] if isinstance(end, (list, tuple)) else end
        has_beams = (_setting(model, arguments, "num_beams") or 1) > 1
        # `generate` fills up with the first end token where there is no padding token; beams, too, where that is 0
        if pad is None or (has_beams and pad == 0 and end is not None):
            pad = end
        longest = max(part.shape[1] for part in parts)
        parts = [nn.functional.pad(part, (0, longest - part.shape[1]), value=int(pad)) for part in parts]
    return torch.cat(parts)


def argument_facts(arguments: Mapping[str, Any], describe: Any) -> dict[str, str]:
    """Return short texts of the arguments by name, which must be the same on all ranks; a streamer is a rank's own.

    Args:
        describe: of a tensor, its type, shape and checksum.
    """
    facts: dict[str, str] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            facts[name] = describe(value)
        elif isinstance(value, Mapping):
            for key in value:
                add(f"{name}.{key}", value[key])
        elif isinstance(value, (list, tuple)):
            for number, each in enumerate(value):
                add(f"{name}[{number}]", each)
            facts[f"{name}.length"] = str(len(value))
        elif isinstance(value, (bool, int, float, str, type(None), torch.dtype, torch.device)):
            facts[name] = repr(value)
        elif hasattr(value, "to_dict"):
            add(name, value.to_dict())
        else:
            facts[name] = getattr(value, "__qualname__", type(value).__qualname__)

    for name in sorted(arguments):
        if name != "streamer":
            add(name, arguments[name])
    return facts


class RankStreamer:
    """The streamer of `generate` on one rank: rank 0 streams.

    Args:
        streamer: the user's; None on ranks whose tokens nobody reads.

    Attributes:
        note: is given what the streamer raises, where other ranks must hear of it; None: it is raised.
    """

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self.note: Callable[[Exception], None] | None = None

    def put(self, value: Tensor) -> None:
        """Stream tokens."""
        self._call("put", value)

    def end(self) -> None:
        """End the stream."""
        self._call("end")

    def _call(self, name: str, *values: Tensor) -> None:
        if self._streamer is None:
            return
        try:
            getattr(self._streamer, name)(*values)
        except Exception as error:
            if self.note is None:
                raise
            self._streamer = None
            self.note(error)


def attention_weights(model: nn.Module) -> dict[tuple[int, int], str]:
    """Return a parameter of each attention whose keys and values are cached, by (layer, 0 or 1 across).

    HuggingFace numbers the layers of a decoder for its cache: the modules that have such a number, and none inside that
    has, are its attentions; of two of one layer the second reads the encoder's output.
    """
    # Llama: layers.3.self_attn has layer_idx 3. T5: block.3.layer.0.SelfAttention and block.3.layer.1.EncDecAttention
    # have, and so may the encoder's, which are distinguished from the decoder's modules.
    modules: Any = model
    inside = {id(module) for module in modules.get_decoder().modules()}
    found: dict[tuple[int, int], str] = {}
    for path, module in model.named_modules():
        number = getattr(module, "layer_idx", None)
        if not isinstance(number, int) or id(module) not in inside:
            continue
        deeper = any(
            isinstance(getattr(m, "layer_idx", None), int) for m in module.modules() if m is not module
        )
        name = next((name for name, _ in module.named_parameters()), None)
        if not deeper and name is not None:
            found[number, int((number, 0) in found)] = f"{path}.{name}"
    return found


def kv_width(model: Any) -> int:
    """Return the elements of one position's keys, and of its values, by the configuration."""
    whole = model.config
    heads = getattr(whole, "decoder_attention_heads", None)
    if heads:  # one configuration of encoder and decoder, whose other names for heads are the encoder's
        return int(heads) * (whole.hidden_size // heads)
    config = whole.get_text_config(decoder=True)
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or getattr(config, "d_kv", None) or config.hidden_size // heads
    return int(getattr(config, "num_key_value_heads", None) or heads) * int(size)


def cache_layers(cache: Any) -> Iterator[tuple[tuple[int, int], Any]]:
    """Yield the layers of a cache by (layer, 0 or 1 across): of own tokens, and of what is attended to across."""
    for across, part in enumerate(
        (getattr(cache, "self_attention_cache", cache), getattr(cache, "cross_attention_cache", None))
    ):
        for number, layer in enumerate(getattr(part, "layers", ())):
            yield (number, across), layer
