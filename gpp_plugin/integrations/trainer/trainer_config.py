"""The DeepSpeed configuration that HuggingFace's `TrainingArguments` mean, for a graph of stages.

What a configuration says counts; what it leaves open, or has as ``"auto"``, comes from the arguments, as in Trainer's
own use of DeepSpeed. Where both say something, and not the same, that is an error, which lists all of it.

Source: transformers, integrations/deepspeed.py (release 5.23)
Tests: tests/integrations/test_trainer.py
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import DistributedType
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler
from transformers import Adafactor, DefaultDataCollator, default_data_collator
from transformers.training_args import ParallelMode

from gpp_plugin.config.block import BLOCK
from gpp_plugin.config.reader import read_config
from gpp_plugin.engine.loading.rank_shard import as_it_is, first_items, stream_state
from gpp_plugin.errors import CheckpointError, ConfigError
from gpp_plugin.runtime.random_streams import (
    AheadStreams,
    HostStreams,
    WorkerStreams,
    described_streams,
    host_streams,
    restored_host_streams,
    set_host_streams,
    streams_described,
)

# The batches of HuggingFace's Trainer, as one process would have them, on every rank of a graph of stages.
#
# Every rank reads the same stream: of a mini-batch each takes what its stages read. An epoch has whole mini-batches
# only: the samples left over at its end, fewer than one, are left out.

logger = logging.getLogger(__name__)
T = TypeVar("T")


class WholeSteps(BatchSampler):
    """The batches of an epoch, without those at its end that are no whole mini-batch.

    Args:
        step: batches of a mini-batch.
        read: reads and discards the batch behind the last one, if there is any. One process has it fetched by then,
            so what is loaded next, for an evaluation, draws behind it.
        workers: what workers that load draw.

    Attributes:
        skipped: batches of the epoch under way that are trained already.

    >>> list(WholeSteps(range(11), 2, step=2))
    [[0, 1], [2, 3], [4, 5], [6, 7]]
    """

    def __init__(
        self,
        sampler: Sampler[int],
        batch_size: int,
        *,
        step: int,
        read: Callable[[list[int]], Any] | None = None,
        workers: WorkerStreams | None = None,
    ) -> None:
        super().__init__(sampler, batch_size, drop_last=False)
        self._step, self._read, self.workers = step, read, workers
        self.ahead = AheadStreams()
        self.skipped = 0

    def __iter__(self) -> Iterator[list[int]]:
        """Yield lists of samples' numbers."""
        skipped, self.skipped = self.skipped, 0
        batches = super().__iter__()
        for number, indices in enumerate(itertools.islice(batches, len(self))):
            if number >= skipped:
                self.ahead.fetch(number)
            yield indices
        if self._read is not None and (left := next(batches, None)) is not None:
            self.ahead.fetch(len(self))
            self._read(left)

    def position(self, num_batches: int) -> dict[str, Any] | None:
        """Return where so many batches of all epochs end, in JSON values; None at an epoch's end."""
        batches = num_batches % len(self)
        if not batches or self.ahead.number < batches:
            return None
        workers = None if self.workers is None else self.workers.state()
        return {"batches": batches, "random": described_streams(self.ahead.before), "workers": workers}

    def resume(self, position: Mapping[str, Any], program: HostStreams) -> None:
        """Continue there; ``program`` is what is drawn from behind the batch that was read ahead."""
        self.skipped = position["batches"]
        self.ahead.resume(streams_described(position["random"]), program)
        if self.workers is not None and position.get("workers"):
            self.workers.resume(position["workers"])

    def __len__(self) -> int:
        """Return the batches of an epoch."""
        return len(self.sampler) // (self.batch_size * self._step) * self._step  # type: ignore[arg-type]


def as_one_process(loader: DataLoader[Any], *, data_seed: int | None) -> DataLoader[Any]:
    """Return what accelerate makes of a loader for a job of one process: the same samples in the same order."""
    prepared: DataLoader[Any] = prepare_data_loader(
        loader,
        num_processes=1,
        process_index=0,
        put_on_device=False,
        dispatch_batches=False,
        use_seedable_sampler=True,
        data_seed=data_seed,
    )
    return prepared


TRIED_SAMPLES = 16
"""Samples that are collated one by one, to see whether a collator pads to the longest."""


def pads_to_longest(collator: Any, loader: Any) -> bool:
    """Return whether batches of one mini-batch may have lengths of their own.

    A collator's ``padding`` says so. One without it (those of language models, a function of the user's) is tried:
    where single samples, taken from all over the dataset, become batches of different shapes, it pads.

    Args:
        loader: with the dataset, and what collates its samples: the collator, behind what drops columns.
    """
    padding = getattr(collator, "padding", None)
    # not by isinstance: the collator that makes one row of all samples is derived from the default one
    if padding is not None or type(collator) is DefaultDataCollator or collator is default_data_collator:
        return padding in (True, "longest")
    shapes = set()
    for sample in _some_samples(loader.dataset):
        try:
            batch = loader.collate_fn([sample])
        except Exception:  # it makes batches of several alone; training reports what is wrong with them
            return False
        tensors = batch.items() if isinstance(batch, Mapping) else ()
        shapes.add(tuple((key, tuple(v.shape)) for key, v in tensors if isinstance(v, Tensor)))
    return len(shapes) > 1


def _some_samples(dataset: Any) -> list[Any]:
    """Return samples from all over a dataset, or the first ones of a stream, which is left where it is."""
    if isinstance(dataset, IterableDataset):
        return first_items(dataset, TRIED_SAMPLES)
    count = len(dataset)
    return [dataset[index] for index in range(0, count, max(count // TRIED_SAMPLES, 1))[:TRIED_SAMPLES]]


def with_arguments(config: Mapping[str, Any], args: Any) -> dict[str, Any]:
    """Return a configuration whose block has what arguments say of compilation and recomputation, unless it has it.

    Raises:
        ConfigError: compilation is not by inductor.
    """
    block = config.get(BLOCK) or {}
    if not isinstance(block, Mapping):
        return dict(config)  # which is refused as it is read
    block = dict(block)
    if getattr(args, "torch_compile", False):
        for name, allowed in (
            ("torch_compile_backend", (None, "inductor")),
            ("torch_compile_mode", (None, "default")),
        ):
            if (value := getattr(args, name, None)) not in allowed:
                raise ConfigError(
                    f"GraphPipelineTrainer: {name}={value!r}: stages are compiled by inductor in its default mode; "
                    "leave it out"
                )
        block.setdefault("compile", True)
    if getattr(args, "activation_checkpointing", None) or getattr(args, "gradient_checkpointing", False):
        memory = block.get("memory") or {}
        if isinstance(memory, Mapping):
            block["memory"] = {"recompute": "full", **memory}
    return {**config, BLOCK: block}


Evaluated = tuple[Tensor | None, tuple[Tensor, ...]]
"""Loss and outputs of a batch."""
MOST_TOGETHER = 64
"""Batches that are evaluated together: the pipeline drains once for all of them."""
MOST_OUTPUT_BYTES = 2**28
"""Of inputs and outputs of batches that are evaluated together, which every rank then has at once."""


def remaining(state: Any) -> int:
    """Return the samples of the last batch that accelerate's loader has given, 0 where it is whole or not the last."""
    return int(state.remainder) if state.end_of_dataloader else 0


class EvaluatedBatches:
    """An evaluation's batches, with what the engine makes of them: it evaluates several of one shape as one.

    Args:
        evaluate: evaluates batches of one shape, or loss units.
        state: of accelerate's loaders.
        has_units: batches are loss units, which may have shapes of their own.

    Attributes:
        inputs, answer: the last batch that was given, and its loss and outputs; ``left`` as of `remaining`.
    """

    def __init__(
        self,
        loader: Any,
        evaluate: Callable[[Sequence[Mapping[str, Any]]], list[Evaluated]],
        *,
        state: Any,
        has_units: bool,
    ) -> None:
        self._loader, self._evaluate, self._state, self._has_units = loader, evaluate, state, has_units
        self._most = 1  # until it is known how much comes out
        self.inputs: Any = None
        self.answer: Evaluated = (None, ())
        self.left = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches in their order."""
        group: list[tuple[Any, int]] = []
        for inputs in self._loader:
            if group and (len(group) == self._most or self._shape(inputs) != self._shape(group[0][0])):
                yield from self._evaluated(group)
                group = []
            group.append((inputs, remaining(self._state)))
        yield from self._evaluated(group)

    def _shape(self, inputs: Mapping[str, Any]) -> Any:
        """Return what batches that are evaluated together have in common."""
        return {
            key: (value.dtype, None if self._has_units else value.shape)
            if isinstance(value, Tensor)
            else repr(value)
            for key, value in inputs.items()
        }

    def _evaluated(self, group: list[tuple[Any, int]]) -> Iterator[Any]:
        if not group:
            return
        answers = self._evaluate([inputs for inputs, _ in group])
        num_bytes = max(
            sum(value.nbytes for value in (*values, *inputs.values()) if isinstance(value, Tensor))
            for (inputs, _), (_, values) in zip(group, answers, strict=True)
        )
        self._most = max(min(MOST_TOGETHER, MOST_OUTPUT_BYTES // max(num_bytes, 1)), 1)
        for (self.inputs, self.left), self.answer in zip(group, answers, strict=True):
            yield self.inputs


class StreamLoader:
    """The batches of an iterable dataset, a pass each time it is iterated over, with a position.

    Where the dataset has ``state_dict`` and ``load_state_dict``, it continues by them; else it reads trained samples
    once more, and drops them. Its state is that after the last batch that it gave, also where a worker prefetches.

    Args:
        options: of the DataLoader within: workers, pinning.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        *,
        batch_size: int,
        collate_fn: Callable[[list[Any]], Any],
        **options: Any,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.collate_fn = collate_fn
        # two workers would each have the whole stream
        options["num_workers"] = min(options.get("num_workers", 0), 1)
        self._options = options
        self._passes = self._num_batches = 0
        self._state: Any = None
        self._drawn: HostStreams | None = None
        self._is_resumed = False

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of a pass, or of what is left of it; as of accelerate, the next one is fetched before."""
        skipped, state = (self._num_batches, self._state) if self._is_resumed else (0, None)
        is_resumed, self._is_resumed, self._num_batches, self._state = self._is_resumed, False, skipped, state
        ahead = AheadStreams()
        if self._passes and hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self._passes)
        stated = _Stated(
            self.dataset, self.batch_size, state=state, skipped=0 if state is not None else skipped
        )
        loader = DataLoader(stated, batch_size=None, collate_fn=as_it_is, **self._options)
        program = host_streams()
        inner = iter(loader)  # draws a seed of workers
        if is_resumed and self._drawn is not None:
            ahead.resume(self._drawn, program)

        def fetch() -> tuple[Any, Any] | None:
            ahead.fetch(0)
            found = next(inner, None)
            if found is None:
                return None
            batch = self.collate_fn(found[0])  # a short one too: one process has it, and draws for it
            return (batch, found[1]) if len(found[0]) == self.batch_size else None

        batch = fetch()
        if batch is None and is_resumed:
            set_host_streams(program)
        while batch is not None:
            following = fetch()
            self._num_batches, self._state = self._num_batches + 1, batch[1]
            self._drawn = ahead.before
            yield batch[0]
            batch = following
        self._passes, self._num_batches, self._state, self._drawn = self._passes + 1, 0, None, None

    def state_dict(self) -> dict[str, Any]:
        """Return where the last batch that was returned ends, and what the next one draws from."""
        drawn = None if self._drawn is None else described_streams(self._drawn)
        return {"passes": self._passes, "batches": self._num_batches, "state": self._state, "random": drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue there when iterated over next."""
        # checkpoints of before call it "given"
        batches = state["batches"] if "batches" in state else state["given"]
        self._passes, self._num_batches, self._state = state["passes"], batches, state["state"]
        drawn = state.get("random")
        self._drawn = None if drawn is None else streams_described(drawn)
        self._is_resumed = True
        if self._num_batches and self._state is None:
            logger.warning(
                "the training stream has no state_dict: %d samples of it are read and dropped to continue where the "
                "checkpoint was saved",
                self._num_batches * self.batch_size,
            )


class _Stated(IterableDataset[Any]):
    """Lists of a dataset's items, the last one maybe shorter, each with the dataset's state behind it."""

    def __init__(self, dataset: Any, size: int, *, state: Any, skipped: int) -> None:
        self._dataset, self._size, self._start, self._skipped = dataset, size, state, skipped

    def __iter__(self) -> Iterator[tuple[list[Any], Any]]:
        dataset = self._dataset
        if self._start is not None:
            dataset.load_state_dict(self._start)
        items = iter(dataset)
        with restored_host_streams():  # what is only read again was drawn before
            for _ in range(self._skipped * self._size):
                next(items, None)
        while taken := list(itertools.islice(items, self._size)):
            # a copy: the dataset continues, and a worker writes it down on a thread of its own
            yield taken, stream_state(dataset)


AUTO = "auto"
_BY_ELEMENT = (
    torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.Adadelta,
)  # fmt: skip
"""Optimizers that ZeRO may step in flat parts, each element by itself, though DeepSpeed's list is without them."""


def engine_config(
    user_config: Mapping[str, Any],
    args: Any,
    *,
    mini_batch: int,
    units: int | None,
    counts_tokens: bool,
    max_steps: int,
) -> dict[str, Any]:
    """Return a whole configuration for `deepspeed.initialize`.

    Args:
        user_config: the user's; with or without a ``graph_pipeline`` block.
        args: the `TrainingArguments`.
        mini_batch: samples of an optimizer step.
        units: loss units of it, where they have shapes of their own.
        max_steps: optimizer steps in all: what an ``auto`` of the schedule comes from; 0 where nothing is trained.
        counts_tokens: losses are means over the labelled tokens of the mini-batch, unless the block says otherwise.

    Raises:
        ConfigError: configuration and arguments contradict each other.

    >>> from types import SimpleNamespace
    >>> args = SimpleNamespace(per_device_train_batch_size=2, max_grad_norm=1.0, bf16=False, fp16=False)
    >>> sizes = {"mini_batch": 8, "units": None, "counts_tokens": False, "max_steps": 10}
    >>> config = engine_config({"train_batch_size": "auto"}, args, **sizes)
    >>> config["train_batch_size"], config["gradient_clipping"], config["graph_pipeline"]
    (8, 1.0, {})
    """
    config = copy.deepcopy(dict(user_config))
    if not (config.get(BLOCK) or {}).get("enabled", True):
        raise ConfigError(f"{BLOCK}.enabled is false: use transformers.Trainer, or enable the block")
    wrong: list[str] = []
    unit, batches = "per_device_train_batch_size", "gradient_accumulation_steps"
    _settle(wrong, config, "train_micro_batch_size_per_gpu", args.per_device_train_batch_size, unit)
    _settle(wrong, config, "train_batch_size", mini_batch, f"{unit} x {batches} x ranks")
    if config.get(batches, AUTO) != AUTO:
        _settle(wrong, config, batches, args.gradient_accumulation_steps, batches)
    config.pop(batches, None)  # of an engine it means the losses of a step, on all ranks
    _settle(wrong, config, "gradient_clipping", float(args.max_grad_norm), "max_grad_norm")
    for key in ("bf16", "fp16"):
        is_wanted = bool(getattr(args, key))
        block = config.get(key)
        if block is None and is_wanted:
            config[key] = {"enabled": True}
        elif isinstance(block, dict):
            _settle(wrong, block, "enabled", is_wanted, key, where=f"{key}.")
    _settle_optimizer(wrong, config, args, max_steps)
    if wrong:
        raise ConfigError("\n".join([*wrong, 'set these keys to "auto", or make them equal']))
    block = dict(config.get(BLOCK) or {})
    if units is not None and block.get("units", units) is not None:
        if block.setdefault("units", units) != units:
            raise ConfigError(
                f"{BLOCK}.units: {block['units']}, and an optimizer step has {units} batches "
                "(gradient_accumulation_steps x ranks); remove the key"
            )
    if counts_tokens:
        block.setdefault("loss_mean", "tokens")
    own = _without_auto({key: value for key, value in config.items() if key != BLOCK})
    if "optimizer" not in own and (own.get("zero_optimization") or {}).get("offload_optimizer"):
        own["zero_force_ds_cpu_optimizer"] = (
            False  # the optimizer is Trainer's: torch's steps on a CPU as well
        )
    return {**own, BLOCK: block}  # in the block "auto" is a value like others


def check_known_ranks(args: Any) -> None:
    """Refuse arguments that know one process of a job of several: all of them would save.

    Raises:
        ConfigError: says both numbers.
    """
    known = max(int(args.world_size), 1)  # of accelerate, which comes first: it joins the ranks
    ranks = dist.get_world_size() if dist.is_initialized() else known
    if known != ranks:
        raise ConfigError(
            f"TrainingArguments: know {known} process where the job has {ranks} ranks, as accelerate found no GPU; "
            "pass use_cpu=True"
        )


_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "auto_find_batch_size": (
        (False,),
        "remove it, and lower per_device_train_batch_size; the plan says what fits, and recomputes where it must",
    ),
    "use_liger_kernel": ((False,), 'remove it; "compile": true in the graph_pipeline block fuses operators'),
    "fp16_full_eval": ((False,), "set bf16=True, which holds in evaluation too"),
    "bf16_full_eval": ((False,), "set bf16=True, which holds in evaluation too"),
}
"""Arguments that change the model outside of what is captured, the values that do not, and what to do instead."""


def check_arguments(args: Any) -> None:
    """Refuse what changes the model or the loss outside of what stages run.

    Raises:
        ConfigError: names the argument.
    """
    for name, (allowed, advice) in _REFUSED.items():
        if (value := getattr(args, name, allowed[0])) not in allowed:
            raise ConfigError(f"GraphPipelineTrainer: {name}={value!r} is not possible with stages; {advice}")
    if getattr(args, "fsdp", None):
        raise ConfigError("GraphPipelineTrainer: fsdp and graph_pipeline both shard the model; remove fsdp")
    asked = getattr(args, "parallelism_config", None)
    for name, key in (("sp", "sequence_parallel"), ("cp", "sequence_parallel"), ("tp", "tensor_parallel")):
        if (size := getattr(asked, f"{name}_size", None) or 1) > 1:
            raise ConfigError(
                f'GraphPipelineTrainer: parallelism_config has {name}_size={size}; remove it and set "{key}": {size} '
                f"in the {BLOCK} block, and divide gradient_accumulation_steps by {size} to keep the mini-batch"
            )
    if getattr(args, "train_sampling_strategy", None) == "batch_rebalance":
        raise ConfigError(
            "GraphPipelineTrainer: train_sampling_strategy 'batch_rebalance' makes batches for ranks, which here "
            "read the same; choose 'random'"
        )
    if args.save_only_model and args.load_best_model_at_end:
        raise ConfigError(
            "GraphPipelineTrainer: load_best_model_at_end loads the engine's checkpoint, which save_only_model leaves "
            "out; remove one of them"
        )


def one_process_arguments(args: Any, num_ranks: int) -> Any:
    """Return a copy of the arguments as one process would have them that accumulates what all ranks would train."""
    kind = type(args)
    own: Any = copy.copy(args)
    one = {
        "world_size": property(lambda self: 1),
        "parallel_mode": property(lambda self: ParallelMode.NOT_PARALLEL),
    }
    own.__class__ = type(kind.__name__, (kind,), {**one, "__module__": kind.__module__})
    own.deepspeed = own.deepspeed_plugin = own.hf_deepspeed_config = None
    own.gradient_accumulation_steps = args.gradient_accumulation_steps * num_ranks
    own._n_gpu = min(args.n_gpu, 1)
    if getattr(args.distributed_state, "distributed_type", None) == DistributedType.DEEPSPEED:
        args.distributed_state.distributed_type = DistributedType.MULTI_GPU  # there is no plugin of it
    # what the block or the model's forward does in place of Trainer
    own.neftune_noise_alpha = own.parallelism_config = None
    own.torch_compile = own.gradient_checkpointing = own.activation_checkpointing = False
    return own


def load_checkpoint(engine: Any, directory: str, **how: Any) -> tuple[str, Any]:
    """Load what Trainer names.

    Raises:
        CheckpointError: no checkpoint of an engine is there: Trainer does not start anew.
    """
    path, client_state = engine.load_checkpoint(directory, **how)
    if path is None:
        raise CheckpointError(
            f"{directory} has no checkpoint of a pipeline; give one that GraphPipelineTrainer saved"
        )
    return path, client_state


def cut(tensors: Any, count: int) -> Any:
    """Return the first samples of tensors, or of containers of them."""
    if isinstance(tensors, Tensor):
        return tensors[:count]
    if isinstance(tensors, Mapping):
        return {key: cut(value, count) for key, value in tensors.items()}
    if isinstance(tensors, (list, tuple)):
        return type(tensors)(cut(value, count) for value in tensors)
    return tensors


def mini_batch_of(args: Any) -> int:
    """Return the samples of an optimizer step, by arguments whose accumulation is that of one process."""
    return int(args.per_device_train_batch_size * args.gradient_accumulation_steps)


def check_length(dataset: Any, args: Any) -> None:
    """Refuse a dataset for training that has no whole mini-batch.

    Raises:
        ConfigError: says both numbers.
    """
    if hasattr(dataset, "__len__") and len(dataset) < mini_batch_of(args):
        raise ConfigError(
            f"train_dataset has {len(dataset)} samples, fewer than a mini-batch of {mini_batch_of(args)} "
            f"(per_device_train_batch_size {args.per_device_train_batch_size} x {args.gradient_accumulation_steps} "
            "batches); lower them"
        )


def settle_zero(optimizer: Any, config: dict[str, Any]) -> None:
    """Allow what steps ZeRO's flat parts as whole parameters; refuse what would step something else in them.

    Raises:
        ConfigError: names both keys.
    """
    if type(optimizer) in _BY_ELEMENT:
        config.setdefault("zero_allow_untested_optimizer", True)
    zero = (config.get("zero_optimization") or {}).get("stage", 0)
    if zero and isinstance(optimizer, Adafactor) and not config.get("zero_allow_untested_optimizer"):
        raise ConfigError(
            f"TrainingArguments.optim: Adafactor has factors of whole matrices, and zero_optimization.stage {zero} "
            "steps flat parts of them; set the stage to 0, or choose another optim, e.g. 'adamw_torch'"
        )


def _settle_optimizer(wrong: list[str], config: dict[str, Any], args: Any, max_steps: int) -> None:
    """Fill in what an ``optimizer`` and a ``scheduler`` block leave to the arguments, and compare the rest of it."""
    # What a block does not name is DeepSpeed's default, as in Trainer; what it names is compared.
    if isinstance(config.get("optimizer"), dict):
        sources = {
            "lr": (args.learning_rate, "learning_rate"),
            "betas": ([args.adam_beta1, args.adam_beta2], "adam_beta1, adam_beta2"),
            "eps": (args.adam_epsilon, "adam_epsilon"),
            "weight_decay": (args.weight_decay, "weight_decay"),
        }
        _settle_params(wrong, config, "optimizer", sources)
    if isinstance(config.get("scheduler"), dict):
        params = config["scheduler"].setdefault("params", {})
        if params.get("warmup_min_lr") == AUTO:
            params["warmup_min_lr"] = 0
        steps = {
            # DeepSpeed refuses a warm-up of 0 steps, which Trainer therefore makes 1
            "warmup_num_steps": (max(1, args.get_warmup_steps(max(max_steps, 1))), "warmup_steps"),
            "total_num_steps": (max(max_steps, 1), "max_steps, or epochs x steps"),
        }
        if not max_steps:  # no schedule is stepped, and it is unknown how many steps there would be
            params.update({key: value for key, (value, _) in steps.items() if key in params})
        rate = {"warmup_max_lr": (args.learning_rate, "learning_rate")}
        _settle_params(wrong, config, "scheduler", rate | steps)


def _settle_params(
    wrong: list[str], config: dict[str, Any], block: str, sources: Mapping[str, tuple[Any, str]]
) -> None:
    params = config[block].setdefault("params", {})
    for key, (value, name) in sources.items():
        if key in params:
            _settle(wrong, params, key, value, name, where=f"{block}.params.")


def why_no_units(config: Mapping[str, Any]) -> str:
    """Return what refuses the ``units`` of a configuration that is well without them; empty where nothing does."""
    block = config[BLOCK]
    try:
        read_config(config)
    except ConfigError as error:
        try:
            read_config({**config, BLOCK: {key: value for key, value in block.items() if key != "units"}})
        except ConfigError:
            return ""  # it is wrong in another way, which the engine says
        return str(error)
    return ""


def _settle(
    wrong: list[str], config: dict[str, Any], key: str, value: Any, name: str, *, where: str = ""
) -> None:
    """Set a key that is missing or ``auto``; note one that says something else than the arguments.

    Args:
        wrong: gets a line with both values.
    """
    found = config.get(key, AUTO)
    if found == AUTO:
        config[key] = value
    elif (list(found) if isinstance(found, tuple) else found) != value:
        wrong.append(
            f"{where}{key}: {found!r} in the DeepSpeed configuration, and TrainingArguments say {value!r} ({name})"
        )


def _without_auto(value: Any) -> Any:
    """Return a configuration without what is left ``auto``: DeepSpeed's own defaults count."""
    if isinstance(value, dict):
        return {key: _without_auto(item) for key, item in value.items() if item != AUTO}
    return value


# What Trainer's loop calls in place of an optimizer and a schedule.


class EngineSteps:
    """Trainer's optimizer: the engine's, whose step is in `train_batch`."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._skipped = engine.skipped_steps
        self.step_was_skipped = False

    def step(self) -> None:
        """Note whether the step that the engine made was skipped for overflow."""
        skipped = self._engine.skipped_steps
        self.step_was_skipped, self._skipped = skipped > self._skipped, skipped

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return those of this rank's stages."""
        return list(self._engine.optimizer.param_groups)


class EngineSchedule:
    """Trainer's schedule: the engine's, which has made one step more once `train_batch` has returned."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._rates: list[float] = []
        self.step()

    def step(self) -> None:
        """Take over the rates of the next step; `train_batch` has advanced the schedule."""
        try:
            self._rates = list(self._engine.lr_scheduler.get_last_lr())
        except (
            # DeepSpeed's have none before their first step; or there is none
            AssertionError,
            AttributeError,
        ):
            self._rates = self._engine.get_lr()

    def get_last_lr(self) -> list[float]:
        """Return the rate of each parameter group, in the last step until `step` is called."""
        return self._rates
