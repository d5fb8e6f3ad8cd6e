"""`GraphPipelineTrainer` and `GraphPipelineSeq2SeqTrainer`: HuggingFace's trainers, over a graph of pipeline stages.

Each rank runs Trainer's own loop as one process would, on the whole stream of batches; in place of forward, backward
and step there is `engine.train_batch`, and in place of a forward for evaluation `engine.eval_batch`. Callbacks,
logging, best models and limits on checkpoints are Trainer's own. accelerate prepares neither model nor optimizer.

    Trainer                               here
    batches of a step on W processes      per_device_train_batch_size x gradient_accumulation_steps x W, on every rank
    forward, backward, clip, step         one `train_batch` when the last of these is there
    optimizer, scheduler                  a recipe of each, for every stage
    checkpoint-N/                         weights as HuggingFace has them, and the engine's checkpoint beside them

Source: transformers, Trainer and Seq2SeqTrainer (release 5.23)
Tests: tests/integrations/test_trainer.py, tests/soak/generation.py
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import deepspeed
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import Seq2SeqTrainer, Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_utils import seed_worker

from gpp_plugin.config.block import BLOCK
from gpp_plugin.config.reader import load_deepspeed_json, read_config
from gpp_plugin.engine.loading.rank_shard import check_same_samples, sample_from_dataset
from gpp_plugin.errors import ConfigError
from gpp_plugin.integrations.deepspeed.config_values import read_deepspeed
from gpp_plugin.integrations.deepspeed.dispatch import GraphPipelineModule
from gpp_plugin.integrations.huggingface.model_inputs import (
    add_noise,
    arguments_of_own_loss,
    base_model,
    check_model,
    check_others_losses,
    divides_by_items,
    multiply_loss,
    return_loss_of,
    tensor_outputs,
)
from gpp_plugin.integrations.trainer.trainer_config import (
    EngineSchedule,
    EngineSteps,
    Evaluated,
    EvaluatedBatches,
    StreamLoader,
    WholeSteps,
    as_one_process,
    check_arguments,
    check_known_ranks,
    check_length,
    cut,
    engine_config,
    load_checkpoint,
    mini_batch_of,
    one_process_arguments,
    pads_to_longest,
    remaining,
    settle_zero,
    why_no_units,
    with_arguments,
)
from gpp_plugin.runtime.random_streams import (
    HostStreams,
    WorkerStreams,
    host_streams,
    restored_host_streams,
    set_host_streams,
)

logger = logging.getLogger(__name__)

_METRIC_SCHEDULES = ("reduce_lr_on_plateau", "greedy")


class GraphPipelineTrainer(Trainer):
    """Trains, evaluates and predicts as Trainer does, with the model on a graph of pipeline stages.

    Mini-batches are those of a Trainer on as many processes: ``per_device_train_batch_size x
    gradient_accumulation_steps x ranks`` samples, in the order in which one process would have them; the loss of one
    is that of a single process with that many accumulation steps. Batches of ``per_device_train_batch_size`` are loss
    units. The last, incomplete mini-batch of an epoch is left out.

    Args:
        config: the DeepSpeed configuration with a ``graph_pipeline`` block, a dict or a file; None:
            ``TrainingArguments.deepspeed``, or the defaults where that is missing too.
        prediction_outputs: what `evaluate` and `predict` gather of the model's outputs; None: all that are tensors, but
            for the loss and what the model's configuration ignores.
        passed: as of Trainer.

    Raises:
        ConfigError: an argument requests what a pipeline cannot do.
    """

    optimizer: Any
    lr_scheduler: Any
    _own_losses: ClassVar[tuple[Any, ...]] = (Trainer.compute_loss,)
    """What computes the model's own loss, and need not be tried."""

    def __init__(
        self,
        model: nn.Module | None = None,
        args: Any = None,
        *positional: Any,
        config: Mapping[str, Any] | str | None = None,
        prediction_outputs: Sequence[str] | None = None,
        **passed: Any,
    ) -> None:
        if args is None:
            raise ConfigError(
                "GraphPipelineTrainer: args is missing; pass transformers.TrainingArguments(...)"
            )
        check_known_ranks(args)
        self._num_ranks = max(int(args.world_size), 1)
        own = one_process_arguments(args, self._num_ranks)
        self._user_config = with_arguments(load_deepspeed_json(config or args.deepspeed or {BLOCK: {}}), args)
        self._user_args = args
        self._engine: Any = None
        self._units: int | None = None
        self._has_trained = self._has_schedule = False
        self._cuts_last = True
        self._buffered: list[Any] = []
        self._random_states: HostStreams | None = None
        self._whole_steps: WholeSteps | None = None
        self._ahead: EvaluatedBatches | None = None
        self._prediction_outputs = prediction_outputs
        self._arguments_of: Callable[[Mapping[str, Any]], dict[str, Any]] = self._entries
        # before Trainer's constructor: those of others, which call it, prepare whole datasets
        check_arguments(args)
        self._check_calls(model, own, *positional, **passed)
        super().__init__(model, own, *positional, **passed)
        if type(self).compute_loss not in self._own_losses:
            self._arguments_of = self._try_own_loss()
        if self._num_ranks > 1 and self.train_dataset is not None:
            with restored_host_streams():
                check_same_samples(self.get_train_dataloader())
        self._num_parameters = 0
        if hasattr(self.model, "num_parameters"):  # a stage's share of it is all that stays here
            self._num_parameters = self.model.num_parameters(exclude_embeddings=True)

    def _check_calls(self, model: Any, own: Any, *positional: Any, **passed: Any) -> None:
        """Refuse what the rest of the arguments, or the class, would have Trainer do, and what the engine would refuse.

        Raises:
            ConfigError: names it, and what to do instead.
        """
        if type(self).create_optimizer_and_scheduler is not Trainer.create_optimizer_and_scheduler:
            raise ConfigError(
                f"{type(self).__name__}.create_optimizer_and_scheduler would not be called: stages own optimizer and "
                "schedule; give others by create_optimizer and create_scheduler"
            )
        check_model(model)
        config = engine_config(
            self._user_config,
            own,
            mini_batch=mini_batch_of(own),
            units=None,
            counts_tokens=False,
            max_steps=0,
        )
        read_config(config)
        read_deepspeed(config)
        if self._own_losses[0] is Trainer.compute_loss:
            check_others_losses(type(self))
        try:
            given = inspect.signature(super().__init__).bind_partial(model, own, *positional, **passed)
        except TypeError:  # the constructor itself says so
            return
        _, schedule = given.arguments.get("optimizers") or (None, None)
        if not isinstance(config.get("scheduler"), Mapping):
            if own.lr_scheduler_type in _METRIC_SCHEDULES:
                raise ConfigError(
                    f"lr_scheduler_type: {own.lr_scheduler_type!s} follows a metric; choose one of steps, e.g. "
                    "'linear'"
                )
            if schedule is not None:
                raise ConfigError(
                    "optimizers: the scheduler is bound to an optimizer of the whole model; pass None for it and set "
                    "lr_scheduler_type, or subclass create_scheduler"
                )
        check_length(given.arguments.get("train_dataset"), own)

    def _entries(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return what of a batch the model is called with."""
        return dict(batch)

    def _try_own_loss(self) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        """Call a subclass's `compute_loss` once; return what makes of a batch the arguments it calls the model with.

        Raises:
            ConfigError: it returns another loss than the model, or there is no dataset.
        """
        name = f"{type(self).__name__}.compute_loss"
        if self.train_dataset is None:
            raise ConfigError(f"{name} is tried on train_dataset, which is missing; pass one")
        logger.warning(
            "%s returns the model's own loss, which stages compute: what else it does is not done in training",
            name,
        )
        sample = self._sample(self.get_train_dataloader())
        compute = functools.partial(self.compute_loss, self.model)
        return arguments_of_own_loss(self.model, sample, compute, name=name)

    @property
    def engine(self) -> Any:
        """Return the `GraphPipelineEngine`, or None before the first `train`, `evaluate` or `predict`."""
        return self._engine

    # ---- what accelerate does -----------------------------------------------------------------------

    def _build_accelerator_args(self, **passed: Any) -> dict[str, Any]:
        """Let accelerate leave precision, devices and models alone: they are the engine's."""
        built: dict[str, Any] = super()._build_accelerator_args(**passed)
        return {**built, "mixed_precision": "no", "deepspeed_plugin": None, "device_placement": False}

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: each rank takes its own stages to its device."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        """Return what stands for the model in Trainer's loops."""
        return _Stand(self._engine)

    # ---- data -------------------------------------------------------------------------------------------

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:
        """Return the loader that a single process would have, cut to whole mini-batches where it is for training."""
        args = self.args
        collate = self._get_collator_with_removed_columns(self.data_collator, description=description)
        if hasattr(dataset, "column_names") and hasattr(dataset, "set_format"):  # of `datasets`
            dataset, collate = (
                self._remove_unused_columns(dataset, description=description),
                self.data_collator,
            )
        options: dict[str, Any] = {
            "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory,
            "prefetch_factor": args.dataloader_prefetch_factor,
        }
        if isinstance(dataset, IterableDataset):
            if is_training:
                return StreamLoader(dataset, batch_size=batch_size, collate_fn=collate, **options)
            loader = DataLoader(dataset, batch_size=batch_size, collate_fn=collate, **options)
            return as_one_process(loader, data_seed=args.data_seed)
        options["persistent_workers"] = args.dataloader_persistent_workers
        sampler: Any = sampler_fn(dataset) if sampler_fn is not None else None
        if is_training:
            check_length(dataset, args)
            step = args.gradient_accumulation_steps

            def read(indices: list[int]) -> None:
                several = getattr(dataset, "__getitems__", None)
                collate(several(indices) if several else [dataset[index] for index in indices])

            count, workers = args.dataloader_num_workers, None
            if count:
                seed = functools.partial(seed_worker, num_workers=count, rank=0)
                collate = workers = WorkerStreams(collate, count, seed=seed)
            whole = WholeSteps(sampler, batch_size, step=step, read=None if count else read, workers=workers)
            start = None if workers is None else workers.start
            loader = DataLoader(
                dataset, batch_sampler=whole, collate_fn=collate, worker_init_fn=start, **options
            )
        else:
            options["drop_last"] = args.dataloader_drop_last
            loader = DataLoader(
                dataset, batch_size=batch_size, sampler=sampler, collate_fn=collate, **options
            )
        return as_one_process(loader, data_seed=args.data_seed)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """Return the batches of a mini-batch, none where fewer are left, and no count: the engine makes its own."""
        batches: list[Any] = []
        for _ in range(num_batches):
            try:
                batch = next(epoch_iterator)
            except StopIteration:
                return [], None
            if self._whole_steps is not None and (workers := self._whole_steps.workers) is not None:
                batch = workers.take(batch, is_last=self.accelerator.gradient_state.end_of_dataloader)
            batches.append(batch)
        return batches, None

    # ---- the engine ---------------------------------------------------------------------------------------

    def _sample(self, loader: Any) -> Mapping[str, Any]:
        with restored_host_streams():
            count = self.args.per_device_train_batch_size
            return sample_from_dataset(loader.dataset, num_samples=count, collate_fn=loader.collate_fn)

    def _make_engine(self, loader: Any, max_steps: int) -> Any:
        """Return the engine, made at the first call; collective.

        Args:
            loader: whose first samples the model is captured with.
            max_steps: optimizer steps, of the schedule; 0 makes neither optimizer nor schedule.
        """
        if self._engine is not None:
            return self._engine
        sample = self._arguments_of(self._sample(loader))
        if self._prediction_outputs is None and not self.args.prediction_loss_only:
            self._prediction_outputs = tensor_outputs(self.model, sample)
        counts_tokens = self._settle_loss(sample, is_training=max_steps > 0)
        sizes: dict[str, Any] = {
            "mini_batch": mini_batch_of(self.args),
            "counts_tokens": counts_tokens,
            "max_steps": max_steps,
        }
        if max_steps and self._units is None:
            with restored_host_streams():
                self._units = self._units_of(loader, sizes)
        config = engine_config(self._user_config, self._user_args, units=self._units, **sizes)
        self._units = config[BLOCK].get("units")
        self._has_schedule = max_steps > 0
        more = self._recipes(config, max_steps) if self._has_schedule else {}
        self.model.train()  # as Trainer calls it before each step: a model that overrides it has its say
        self._engine = deepspeed.initialize(
            model=GraphPipelineModule(self.model, sample_batch=sample), config=config, **more
        )[0]
        return self._engine

    def _settle_loss(self, sample: Mapping[str, Any], *, is_training: bool) -> bool:
        """Let the model's forward return the loss that Trainer computes; return whether it is a mean over tokens.

        Trainer passes the labelled tokens of a step, and then adds up the losses of its batches: a loss that is not
        divided by them is so many times as large.
        """
        loss_of = self._loss_function(sample)
        accepts = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        if loss_of is not None:
            return_loss_of(self.model, loss_of, counts=accepts)
        if (alpha := self._user_args.neftune_noise_alpha) is not None:
            add_noise(self.model.get_input_embeddings(), alpha)
        if not accepts or not isinstance(sample.get("labels"), Tensor):
            return False
        with restored_host_streams():
            divides = divides_by_items(self.model, sample)
        if not divides and is_training and (self._user_config.get(BLOCK) or {}).get("loss_mean") is None:
            multiply_loss(self.model, self.args.gradient_accumulation_steps)
        return divides

    def _loss_function(self, sample: Mapping[str, Any]) -> Callable[..., Tensor] | None:
        """Return what computes the loss of a model's outputs and labels outside of its forward; None: nothing does."""
        if self.compute_loss_func is not None:
            return self.compute_loss_func
        if (smoother := self.label_smoother) is None:
            return None
        shifts = type(base_model(self.model)).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        return functools.partial(smoother, **({"shift_labels": True} if shifts else {}))

    def _units_of(self, loader: Any, sizes: Mapping[str, Any]) -> int | None:
        """Return the loss units of a step whose batches have lengths of their own; None where they are alike.

        A collator that says that it pads to the longest requests them. One whose batches were tried does so only where
        the user's block leaves ``units`` open, and has nothing that refuses them.

        Args:
            sizes: to `engine_config`.
        """
        units = int(self.args.gradient_accumulation_steps)
        is_tried = getattr(self.data_collator, "padding", None) is None
        if "units" in (self._user_config.get(BLOCK) or {}) and is_tried:
            return None
        if not pads_to_longest(self.data_collator, loader):
            return None
        if not is_tried:
            return units
        why_not = why_no_units(engine_config(self._user_config, self._user_args, units=units, **sizes))
        if why_not:
            logger.warning(
                "the data collator makes batches of different shapes, and %s.units is not set for them: %s",
                BLOCK,
                why_not,
            )
            return None
        logger.info(
            "%s.units is set to %d: the data collator makes batches of different shapes; null leaves it off",
            BLOCK,
            units,
        )
        return units

    def _recipes(self, config: dict[str, Any], max_steps: int) -> dict[str, Any]:
        """Return what makes every stage's optimizer and schedule, where the configuration has none.

        Args:
            config: gets a key that allows an optimizer that ZeRO may step though DeepSpeed's list lacks it.
        """
        more: dict[str, Any] = {}
        if not isinstance(config.get("optimizer"), Mapping):
            optimizer = more["optimizer"] = self.create_optimizer()
            self.optimizer = None
            settle_zero(optimizer, config)
        if not isinstance(config.get("scheduler"), Mapping):
            make = self.create_scheduler

            def schedule(optimizer: Any) -> Any:
                found = make(num_training_steps=max_steps, optimizer=optimizer)
                self.lr_scheduler = None
                return found

            more["lr_scheduler"] = schedule
        return more

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> Any:
        """Make the engine and load a checkpoint, with the position in a stream."""
        if self._has_trained or (self._engine is not None and not self._has_schedule):
            raise ConfigError(
                "GraphPipelineTrainer: train() is called once a trainer, with the train_dataset it was made with; make "
                "another one, with resume_from_checkpoint to continue"
            )
        engine, self._has_trained = self._make_engine(train_dataloader, max_steps), True
        self.deepspeed = self.model_wrapped = engine
        self.optimizer, self.lr_scheduler = EngineSteps(engine), EngineSchedule(engine)
        # accelerate reads of it whether a step was skipped
        self.accelerator._optimizers.append(self.optimizer)
        self._whole_steps = getattr(train_dataloader, "batch_sampler", None)
        if isinstance(train_dataloader, StreamLoader):  # its position is saved and restored
            engine.set_dataloader(train_dataloader)
        if resume_from_checkpoint is not None:
            _, client_state = load_checkpoint(engine, resume_from_checkpoint)
            self._random_states = host_streams()
            ahead = client_state.get("ahead")
            if ahead is not None and self._whole_steps is not None and not self.args.ignore_data_skip:
                self._whole_steps.resume(ahead, self._random_states)
                self._random_states = None
            self.lr_scheduler.step()
        stand = _Stand(engine)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return stand, train_dataloader

    def _init_training_state(self, *passed: Any) -> tuple[int, int]:
        """Let a stream continue by itself: Trainer would skip in it what was trained in all passes."""
        epochs, steps = super()._init_training_state(*passed)
        return epochs, 0 if isinstance(self.train_dataset, IterableDataset) else steps

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the samples of an optimizer step."""
        return int(self._train_batch_size * args.gradient_accumulation_steps)

    # ---- a step ----------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Keep a batch; train on all of the mini-batch when its last one is there, and return their loss."""
        self._buffered.append(self._arguments_of(inputs))
        zero = torch.zeros((), device=self.args.device)
        if len(self._buffered) < self.current_gradient_accumulation_steps:
            return zero
        batches, self._buffered = self._buffered, []
        loss: Tensor = self._engine.train_batch(iter(batches))
        return loss.detach().to(zero.device)

    def _clip_grad_norm(self, model: Any) -> Any:
        """Return the norm of the step's gradients, which the engine has clipped."""
        return self._engine.get_global_grad_norm()

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self._engine.get_global_grad_norm()

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:
        """Return the operations of a batch, of the whole model."""
        found = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        return 6 * found.numel() * self._num_parameters if isinstance(found, Tensor) else 0

    # ---- evaluation ------------------------------------------------------------------------------------------

    def evaluation_loop(self, dataloader: Any, *passed: Any, **more: Any) -> Any:
        """Make the engine where nothing was trained yet, and evaluate."""
        if self._engine is None:
            max_steps = 0
            loader = dataloader
            if self.train_dataset is not None:
                loader = self.get_train_dataloader()
                max_steps = self.set_initial_training_values(self.args, loader)[-1]
            self._make_engine(loader, max_steps)
        # Seq2SeqTrainer gathers all of its own evaluations, so that its mean loss counts a short last batch as whole
        gather: Any = vars(self)["gather_function"]
        self._cuts_last = gather != self.accelerator.gather
        self.gather_function = self._as_one_process
        given = inspect.signature(Trainer.evaluation_loop).bind(self, dataloader, *passed, **more).arguments
        loss_only, ignore_keys = given.get("prediction_loss_only"), given.get("ignore_keys")
        loss_only = self.args.prediction_loss_only if loss_only is None else loss_only

        def evaluate(batches: Sequence[Mapping[str, Any]]) -> list[Evaluated]:
            return self._eval_together(batches, *self._requested(batches[0], loss_only, ignore_keys))

        if self._evaluates_ahead(loss_only):
            has_units = self._engine.config.units is not None
            state = self.accelerator.gradient_state
            dataloader = self._ahead = EvaluatedBatches(
                dataloader, evaluate, state=state, has_units=has_units
            )
        try:
            return super().evaluation_loop(dataloader, *passed, **more)
        finally:
            self._ahead = None

    def _evaluates_ahead(self, loss_only: bool) -> bool:
        """Return whether batches are evaluated before Trainer's loop comes to them, several together."""
        is_ours = type(self).prediction_step.__module__ == __name__
        return is_ours and not self.args.batch_eval_metrics and hasattr(self._engine, "eval_batches")

    def _as_one_process(self, tensors: Any, **_: Any) -> Any:
        """Return what one process would gather: every rank has all of it, and of the last batch as much as there is."""
        if not self._cuts_last:
            return tensors
        left = remaining(self.accelerator.gradient_state) if self._ahead is None else self._ahead.left
        return cut(tensors, left) if left > 0 else tensors

    def _requested(
        self, inputs: Mapping[str, Any], loss_only: bool, ignore_keys: Sequence[str] | None
    ) -> tuple[tuple[str, ...], bool]:
        """Return the outputs that are gathered of a batch, and whether it has a loss."""
        if ignore_keys is None:
            config = getattr(self.model, "config", None)
            ignore_keys = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])
        names = tuple(key for key in self._prediction_outputs or () if key not in ignore_keys)
        returns_loss = bool(inputs.get("return_loss", self.can_return_loss))
        has_labels = all(inputs.get(name) is not None for name in self.label_names)
        return () if loss_only else names, has_labels if self.label_names else returns_loss

    def _eval_together(
        self, batches: Sequence[Mapping[str, Any]], names: tuple[str, ...], has_loss: bool
    ) -> list[Evaluated]:
        """Return loss and outputs of each batch, which are of one shape, or loss units; on every rank."""
        if not names and not has_loss:
            return [(None, ()) for _ in batches]
        batches = [self._arguments_of(each) for each in batches]
        if not hasattr(self._engine, "eval_batches"):  # DeepSpeed's own, which has losses alone
            return [(self._engine.eval_batch(iter([each])), ()) for each in batches]
        found: list[Evaluated] = []
        answer: Any
        outputs: Any
        for answer in self._engine.eval_batches(batches, outputs=names, compute_loss=has_loss):
            loss, outputs = (answer if names else (answer, {})) if has_loss else (None, answer)
            values = outputs.values() if len(names) != 1 else [outputs]
            # of units, one here, the outputs are a list
            found.append((loss, tuple(v[0] if isinstance(v, list) else v for v in values)))
        return found

    def prediction_step(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Return loss, outputs and labels of a batch, on every rank."""
        if self._ahead is not None and self._ahead.inputs is inputs:
            loss, values = self._ahead.answer
        else:
            ((loss, values),) = self._eval_together(
                [inputs], *self._requested(inputs, prediction_loss_only, ignore_keys)
            )
        if not values:
            return loss, None, None
        outputs = values[0] if len(values) == 1 else values
        if loss is None:
            return loss, outputs, None
        labels = tuple(self._prepare_input(inputs.get(name)) for name in self.label_names)
        return loss, outputs, labels[0] if len(labels) == 1 else labels or None

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model as HuggingFace has it, a part a stage, with tokenizer and arguments; collective."""
        target = output_dir or self.args.output_dir
        if self._engine is None:
            super().save_model(target, _internal_call)
            return
        os.makedirs(target, exist_ok=True)
        self._engine.save_pretrained(target)
        if self.args.should_save:
            if self.processing_class is not None:
                self.processing_class.save_pretrained(target)
            torch.save(self._user_args, os.path.join(target, "training_args.bin"))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write the engine's checkpoint: weights, optimizer, schedule, random states, position in a stream."""
        client_state: dict[str, Any] = {}
        if (whole := self._whole_steps) is not None:
            batches = self.state.global_step * self.args.gradient_accumulation_steps
            if (position := whole.position(batches)) is not None:
                client_state["ahead"] = position
        self._engine.save_checkpoint(output_dir, client_state=client_state)

    def _save_scaler(self, output_dir: str) -> None:
        """Do nothing: the loss scale is in the engine's checkpoint."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Do nothing: random states are in the engine's checkpoint."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore what the engine's checkpoint had, where Trainer would: after batches were skipped."""
        if self._random_states is not None:
            set_host_streams(self._random_states)
            self._random_states = None

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Do nothing yet: the engine that is made next loads it."""

    def _load_best_model(self) -> None:
        """Load the best checkpoint's weights into the stages."""
        load_checkpoint(self._engine, self.state.best_model_checkpoint, load_module_only=True)


class GraphPipelineSeq2SeqTrainer(GraphPipelineTrainer, Seq2SeqTrainer):
    """Trains as `GraphPipelineTrainer`; with ``predict_with_generate`` evaluation and prediction generate.

    Its step of prediction is HuggingFace's, with the engine's `generate` and forward in place of the model's.

    Args:
        passed: as of `GraphPipelineTrainer`; the arguments are ``Seq2SeqTrainingArguments``.
    """

    def _evaluates_ahead(self, loss_only: bool) -> bool:
        generates = self.args.predict_with_generate and not loss_only
        return not generates and super()._evaluates_ahead(loss_only)

    def prediction_step(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[Any, Any, Any]:
        """Return loss, generated tokens and labels of a batch, on every rank."""
        if not self.args.predict_with_generate or prediction_loss_only:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        trainer: Any = self
        own, stand = trainer.model, _Generating(self._engine, trainer.model)
        trainer.model = stand
        try:
            answer: tuple[Any, Any, Any] = Seq2SeqTrainer.prediction_step(
                trainer, stand, inputs, prediction_loss_only, ignore_keys, **gen_kwargs
            )
        finally:
            trainer.model = own
        return answer


class _Generating:
    """What HuggingFace's step of prediction calls on a model: the engine does it; the rest is the model's."""

    def __init__(self, engine: Any, model: Any) -> None:
        self.generate = engine.generate
        self._engine, self._model = engine, model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> dict[str, Any]:
        return {"loss": self._engine.eval_batch(iter([inputs]))}


class _Stand:
    """What Trainer's loops call on a model, of which nothing is to be done: the engine does it in its step."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def train(self, mode: bool = True) -> _Stand:
        return self

    def eval(self) -> _Stand:
        return self

    def zero_grad(self) -> None:
        """Do nothing: `train_batch` leaves no gradients."""

    def parameters(self) -> Iterator[nn.Parameter]:
        return iter(self._engine.module.parameters())
