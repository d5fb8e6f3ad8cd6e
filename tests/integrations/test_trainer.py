"""HuggingFace's Trainer on a graph of stages: the numbers of a plain Trainer in one process."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import default_data_collator

from gpp_plugin import GraphPipelineTrainer
from gpp_plugin.errors import ConfigError
from gpp_plugin.integrations.huggingface import model_inputs
from gpp_plugin.integrations.trainer import trainer_config
from gpp_plugin.integrations.trainer.trainer_config import engine_config, pads_to_longest, why_no_units
from tests.integrations import trainer_jobs as jobs
from tests.ranks import run_kept_ranks


def check_alike(found: list[Any], wanted: list[Any], *, tolerance: float = 1e-6) -> None:
    assert len(found) == len(wanted) == jobs.STEPS
    for (loss, *_), (other, *_) in zip(found, wanted, strict=True):
        assert abs(loss - other) <= tolerance * max(other, 1)
    for (_, norm, rate), (_, norm_2, rate_2) in zip(found, wanted, strict=True):
        assert abs(norm - norm_2) <= 1e-4 * max(norm, 1) and rate == rate_2


def test_arguments_that_know_one_rank_of_several_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """TrainingArguments without use_cpu where there is no GPU."""
    monkeypatch.setattr(trainer_config.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(trainer_config.dist, "get_world_size", lambda: 2)
    trainer_config.check_known_ranks(SimpleNamespace(world_size=2))
    with pytest.raises(ConfigError, match="know 1 process where the job has 2 ranks.*pass use_cpu=True"):
        trainer_config.check_known_ranks(SimpleNamespace(world_size=1))


def test_zero_steps_trainers_optimizers_where_each_element_is_by_itself() -> None:
    from transformers import Adafactor

    weights = [torch.nn.Parameter(torch.ones(2, 2))]
    for zero, optimizer in ((0, Adafactor), (1, torch.optim.SGD), (1, torch.optim.AdamW)):
        config: dict[str, Any] = {"zero_optimization": {"stage": zero}}
        own = SimpleNamespace(create_optimizer=lambda kind=optimizer: kind(weights), lr_scheduler=None)
        own.args = SimpleNamespace(lr_scheduler_type="linear")
        own.create_scheduler = None
        GraphPipelineTrainer._recipes(own, config, 1)  # type: ignore[arg-type]
        assert config.get("zero_allow_untested_optimizer", False) == (optimizer is torch.optim.SGD)
    factored = "Adafactor has factors of whole matrices, and zero_optimization.stage 2"
    with pytest.raises(ConfigError, match=factored):
        trainer_config.settle_zero(Adafactor(weights), {"zero_optimization": {"stage": 2}})


class Texts(Dataset[dict[str, list[int]]]):
    """Rows of token ids, as tokenizers give them, of these lengths."""

    def __init__(self, *lengths: int) -> None:
        self.rows = [{"input_ids": [1] * length} for length in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self.rows[index]


def pad(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad to the longest, in a function that has no ``padding``."""
    width = max(len(row["input_ids"]) for row in rows)
    return {
        "input_ids": torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows])
    }


def test_whether_a_collator_pads_to_the_longest_is_told_by_it_or_tried() -> None:
    class Says:
        def __init__(self, padding: Any) -> None:
            self.padding = padding

        __call__ = staticmethod(pad)

    def pads(collator: Any, *lengths: int) -> bool:
        return pads_to_longest(collator, DataLoader(Texts(*lengths), batch_size=2, collate_fn=collator))

    assert pads(pad, *[5] * 90, 7) is False, "none of those that are tried is longer"
    assert pads(pad, *[5] * 40, *[7] * 40) and pads(Says(True), 5, 5)
    assert not pads(pad, 5, 5, 5) and not pads(Says("max_length"), 5, 7)
    assert not pads(default_data_collator, 5, 7)

    def pairs(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        first, second = rows
        return pad([first, second])

    assert not pads(pairs, 5, 7), "it makes batches of two alone"


@pytest.mark.parametrize("streams", [True, False])
def test_resumed_in_the_middle_it_is_bit_equal_on_the_same_data(streams: bool, tmp_path: Path) -> None:
    config = jobs.config_of(1, stages=2)
    for found in run_kept_ranks(jobs.resume, 2, str(tmp_path), "gpt2", config, streams):
        jobs.check_resumed(found)


@pytest.fixture(
    scope="module",
    params=[jobs.config_of(0, stages=2), jobs.config_of(3, stages=1, data_parallel=2)],
    ids=["two stages", "zero 3"],
)
def evaluated(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], list[dict[str, Any]], Path]:
    """Return what Trainer found in one process, what ours found on each rank, and where both saved."""
    from transformers import Trainer

    folder = tmp_path_factory.mktemp("evaluated")
    plain = jobs.evaluating(Trainer, str(folder / "plain"), ranks=1)
    return plain, run_kept_ranks(jobs.evaluate_on_ranks, 2, str(folder / "ranks"), request.param), folder


def test_losses_and_evaluations_on_the_way_are_trainers(evaluated: Any) -> None:
    plain, of_ranks, _ = evaluated
    for found in of_ranks:
        assert found["flos"] == plain["flos"]
        check_alike(found["losses"], plain["losses"])
        for key in ("before", "during"):
            assert torch.allclose(torch.tensor(found[key]), torch.tensor(plain[key]), rtol=1e-4), key


def test_the_best_model_and_its_predictions_are_trainers(evaluated: Any) -> None:
    from transformers import GPT2LMHeadModel

    plain, of_ranks, folder = evaluated
    for found in of_ranks:
        assert found["best"] == plain["best"]
        assert torch.allclose(torch.tensor(found["metrics"]), torch.tensor(plain["metrics"]), rtol=1e-4)
        assert abs(found["predictions"] - plain["predictions"]).max() < 1e-4
    saved, wanted = (
        GPT2LMHeadModel.from_pretrained(folder / name / "final").state_dict() for name in ("ranks", "plain")
    )
    assert all(torch.allclose(saved[name], value, atol=1e-5) for name, value in wanted.items())


@pytest.mark.parametrize("streams", [False, True])
def test_data_that_draw_are_those_of_one_process_whatever_the_model_draws(
    streams: bool, tmp_path: Path
) -> None:
    from transformers import Trainer

    plain = jobs.augmenting(Trainer, str(tmp_path / "plain"), ranks=1, dropout=0.0, streams=streams)
    given = str(tmp_path / "ranks"), jobs.config_of(0, stages=2), streams
    for found in run_kept_ranks(jobs.augment_on_ranks, 2, *given):
        for own in (found["0.0"], found["0.3"]):  # before, the model was captured with some
            assert own["seen"][-len(plain["seen"]) :] == plain["seen"]
            assert own["held out"] == plain["held out"]
        for (loss, *_), (other, *_) in zip(found["0.0"]["losses"], plain["losses"], strict=True):
            assert abs(loss - other) <= 1e-6
        assert found["0.0"]["evaluated"] == pytest.approx(plain["evaluated"], rel=1e-5)
        straight, resumed = found["0.3"], found["resumed"]
        assert resumed["losses"] == straight["losses"] and resumed["evaluated"] == straight["evaluated"]
        assert resumed["held out"][-7:] == straight["held out"][-7:]


@pytest.mark.parametrize("streams", [False, True])
def test_the_batch_that_one_process_reads_ahead_is_drawn_at_an_epochs_end_too(
    streams: bool, tmp_path: Path
) -> None:
    from transformers import Trainer, TrainingArguments, set_seed

    def drawn(trainer_class: Any, count: int) -> tuple[list[float], float]:
        rows = jobs.Augmented(21)  # two mini-batches of 8, two batches and a half of no mini-batch

        def collate(samples: list[Any]) -> Any:
            rows.seen.append(len(samples) + float(torch.rand(())))
            return jobs.stack(samples)

        args = TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            use_cpu=True,
            max_steps=2,
            remove_unused_columns=False,
        )
        trainer = trainer_class(
            torch.nn.Linear(1, 1),
            args,
            train_dataset=jobs.AugmentedStream(rows) if streams else rows,
            data_collator=collate,
        )
        set_seed(3)
        batches = iter(trainer.get_train_dataloader())
        for _ in range(count):
            next(batches)
        return rows.seen, float(torch.rand(()))

    for count in (8, *([10] if streams else [])):  # a stream is read to its end
        assert drawn(GraphPipelineTrainer, count) == drawn(Trainer, count)


def test_workers_that_draw_continue_where_a_checkpoint_was_saved(tmp_path: Path) -> None:
    from accelerate import skip_first_batches
    from transformers import TrainingArguments, set_seed

    def started(seed: int) -> tuple[Any, Any]:
        args = TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            use_cpu=True,
            max_steps=2,
            remove_unused_columns=False,
            dataloader_num_workers=2,
        )
        rows = jobs.Augmented(33)
        model = torch.nn.Linear(1, 1)
        trainer = GraphPipelineTrainer(model, args, train_dataset=rows, data_collator=jobs.stack)
        set_seed(3)
        loader = trainer.get_train_dataloader()
        set_seed(seed)  # workers count from what is drawn next
        trainer._whole_steps = loader.batch_sampler
        return trainer, loader

    def values(trainer: Any, batches: Any, count: int) -> list[list[float]]:
        found, _ = trainer.get_batch_samples(batches, count, None)
        return [batch["x"].flatten().tolist() for batch in found]

    for trained in (1, 3, 6):
        trainer, loader = started(3)
        batches = iter(loader)
        values(trainer, batches, trained)
        state = trainer._whole_steps.workers.state()
        left = values(trainer, batches, 8 - trained)
        again, loader = started(4)
        again._whole_steps.workers.resume(state)
        resumed = iter(skip_first_batches(loader, trained))
        assert values(again, resumed, 8 - trained) == left, trained


def test_masks_that_numpy_draws_in_a_forward_are_refused_in_the_constructor(tmp_path: Path) -> None:
    from transformers import TrainingArguments, Wav2Vec2Config, Wav2Vec2ForCTC

    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    small |= {"conv_dim": [4], "conv_stride": [4], "conv_kernel": [4], "num_feat_extract_layers": 1}
    small |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 1, "vocab_size": 8}
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    model = Wav2Vec2ForCTC(Wav2Vec2Config(**small, mask_time_prob=0.0, mask_feature_prob=0.25))
    with pytest.raises(ConfigError, match=r"mask_feature_prob 0.25.*apply_spec_augment = False"):
        GraphPipelineTrainer(model, args)
    model.config.apply_spec_augment = False
    GraphPipelineTrainer(model, args)


def test_a_dataset_that_differs_between_ranks_is_refused_in_the_constructor(tmp_path: Path) -> None:
    for unseeded, seeded in run_kept_ranks(jobs.own_generators_on_ranks, 2, str(tmp_path), [None, 5]):
        assert "ranks read 2 different first samples" in unseeded and "a seed" in unseeded
        assert not seeded


def test_a_short_last_batch_is_cut_where_seq2seq_trainer_cuts_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

    from gpp_plugin import GraphPipelineSeq2SeqTrainer
    from gpp_plugin.integrations.trainer import trainer as trainer_module

    found = []

    def loop(self: Any, *passed: Any, **named: Any) -> Any:
        found.append(self.gather_function(torch.arange(2)).tolist())
        self.gather_function = self.accelerator.gather_for_metrics  # as Trainer's own does behind it
        return SimpleNamespace(metrics={}, num_samples=1)

    monkeypatch.setattr(Trainer, "evaluation_loop", loop)
    monkeypatch.setattr(trainer_module, "remaining", lambda state: 1)
    args = Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True)
    trainer = GraphPipelineSeq2SeqTrainer(torch.nn.Linear(1, 1), args, eval_dataset=[{"x": 1}])
    trainer._engine = SimpleNamespace()
    trainer.evaluation_loop([])  # as the trainers of HuggingFace's question answering call it
    Seq2SeqTrainer.evaluate(trainer)
    trainer.evaluation_loop([])
    assert found == [[0], [0, 1], [0]]


@pytest.mark.parametrize(
    ("name", "outputs"),
    [
        ("gpt2", ("logits",)),
        ("clip", ("logits_per_image", "logits_per_text", "text_embeds", "image_embeds")),
        ("t5", ("logits", "encoder_last_hidden_state")),
        ("bert", ("logits",)),
    ],
)
def test_every_tensor_but_the_loss_is_gathered(name: str, outputs: tuple[str, ...]) -> None:
    rows = jobs.data_of(name, 2)
    model = jobs.model_of(name, dropout=0.2)
    modes, drawn = [part.training for part in model.modules()], torch.get_rng_state()
    assert model_inputs.tensor_outputs(model, jobs.stack(list(rows.rows))) == outputs
    assert [part.training for part in model.modules()] == modes and torch.equal(drawn, torch.get_rng_state())
    with pytest.raises(ConfigError, match="cannot be called with a batch of .*prediction_outputs"):
        model_inputs.tensor_outputs(model, {"pixels": torch.ones(2)})


class Spans(torch.nn.Module):
    """Finds where answers begin and end; Python reads a value of the batch."""

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        if float(x.sum()) < 0:
            return {}
        return {"loss": x.mean(), "start_logits": x, "end_logits": x, "hidden_states": (x, x)}


def test_outputs_are_found_where_python_reads_values() -> None:
    assert model_inputs.tensor_outputs(Spans(), {"x": torch.ones(2, 3)}) == ("start_logits", "end_logits")


def test_trainer_itself_is_told_what_to_use() -> None:
    """accelerate calls `deepspeed.initialize` for Trainer, from this module."""
    import deepspeed

    space = {"__name__": "accelerate.accelerator", "initialize": deepspeed.initialize}
    with pytest.raises(ConfigError, match="gpp_plugin.GraphPipelineTrainer in place of Trainer"):
        exec("initialize(model=None, config={'graph_pipeline': {}})", space)


@pytest.mark.parametrize(
    ("name", "divides"), [("gpt2", True), ("llava", True), ("bert", False), ("t5", False)]
)
def test_a_model_is_told_of_its_labelled_tokens_only_where_its_loss_is_divided_by_them(
    name: str, divides: bool
) -> None:
    batch = jobs.stack(list(jobs.data_of(name, 2).rows))
    assert model_inputs.divides_by_items(jobs.model_of(name), batch) == divides


def smoothed(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Return a loss of the user's, of logits and labels."""
    logits = torch.log_softmax(outputs["logits"], -1).mean()
    return -logits * labels.numel() / (num_items_in_batch or labels.numel())


@pytest.mark.parametrize("name", ["gpt2", "bert"])
@pytest.mark.parametrize("more", [{"label_smoothing_factor": 0.1}, {"compute_loss_func": smoothed}])
def test_the_forward_returns_the_loss_that_trainer_makes_outside_of_it(
    name: str, more: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import Trainer

    batch = jobs.stack(list(jobs.data_of(name, 2).rows))
    passed = {key: more[key] for key in ("compute_loss_func",) if key in more}
    args = jobs.arguments(
        str(tmp_path), total=jobs.UNIT, ranks=1, **{k: v for k, v in more.items() if k not in passed}
    )
    wanted = Trainer(jobs.model_of(name), args, **passed).compute_loss(
        plain := jobs.model_of(name), dict(batch), num_items_in_batch=torch.tensor(7)
    )
    own = GraphPipelineTrainer(jobs.model_of(name), args, **passed)
    assert own._settle_loss(batch, is_training=False)
    model: Any = own.model
    assert type(model).__name__ == type(plain).__name__ and isinstance(model, type(plain))
    for copied in (model, copy.deepcopy(model)):
        found = copied(**batch, num_items_in_batch=torch.tensor(7))["loss"]
        assert torch.allclose(found, wanted, rtol=1e-6)
    assert "loss" not in model(**{key: value for key, value in batch.items() if key != "labels"})


def test_losses_that_trainer_adds_up_are_multiplied_in_training_alone(tmp_path: Path) -> None:
    args = jobs.arguments(str(tmp_path), total=8 * jobs.UNIT, ranks=1)
    batch = jobs.stack(list(jobs.data_of("bert", 2).rows))
    for block, factor in (({}, 8), ({"loss_mean": "units"}, 1)):
        own = GraphPipelineTrainer(jobs.model_of("bert"), args, config={"graph_pipeline": block})
        assert not own._settle_loss(batch, is_training=True)
        losses = [float(own.model.train(mode)(**batch)["loss"]) for mode in (True, False)]
        assert losses[0] == pytest.approx(factor * losses[1])


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("bert", {}),
        ("t5", {}),
        ("gpt2", {"label_smoothing_factor": 0.1}),
        ("bert", {"label_smoothing_factor": 0.1}),
        ("gpt2", {"gradient_checkpointing": True}),
        ("gpt2", {"neftune_noise_alpha": 1e-4}),
    ],
)
def test_losses_and_gradients_are_trainers_whoever_divides(
    name: str, more: dict[str, Any], tmp_path: Path
) -> None:
    total, count = jobs.UNIT * jobs.ACCUMULATION * 2, 24
    plain = jobs.logged(jobs.train_plain(name, str(tmp_path / "plain"), total=total, count=count, **more))
    given = name, str(tmp_path / "ranks"), [jobs.config_of(0, stages=2)], count, more
    for (found,) in run_kept_ranks(jobs.train_on_ranks, 2, *given):
        check_alike(found, plain, tolerance=1e-6 if "neftune_noise_alpha" not in more else 1e-3)


@pytest.mark.parametrize("zeros", [[0, 3], [1, 2]])
def test_the_configuration_goes_into_the_arguments(zeros: list[int], tmp_path: Path) -> None:
    jobs.model_of("gpt2").save_pretrained(tmp_path / "model")
    total = jobs.UNIT * jobs.ACCUMULATION * 2
    plain = jobs.logged(jobs.train_plain("gpt2", str(tmp_path / "plain"), total=total, count=24))
    given = str(tmp_path / "model"), str(tmp_path / "ranks"), zeros
    for answers in run_kept_ranks(jobs.train_as_documented, 2, *given):
        assert [zero for zero, _ in answers] == zeros
        for _, found in answers:
            check_alike(found, plain)


def test_huggingface_builds_whole_models_for_a_block_and_parts_without_one() -> None:
    from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

    zero: dict[str, Any] = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    for more, is_whole in (
        ({"graph_pipeline": {}}, True),
        ({"graph_pipeline": {"enabled": False}}, False),
        ({}, False),
    ):
        config = HfDeepSpeedConfig({**zero, **more})
        assert is_deepspeed_zero3_enabled() == config.is_offload() == (not is_whole)
        assert config.config["zero_optimization"] == zero["zero_optimization"]
    assert HfDeepSpeedConfig({"graph_pipeline": {}}).config["zero_optimization"] == {"stage": 0}


def test_noise_is_drawn_on_embeddings_in_training_alone() -> None:
    table, ids = torch.nn.Embedding(5, 4), torch.arange(5)[None]
    model_inputs.add_noise(table, 10.0)
    noise = (table(ids) - table.weight).abs()
    assert 0 < float(noise.max()) <= 10 / 20**0.5 and torch.equal(table.eval()(ids)[0], table.weight)


def test_arguments_are_honoured_in_the_block() -> None:
    asked = SimpleNamespace(torch_compile=True, activation_checkpointing=True)
    for block, wanted in (
        ({}, {"compile": True, "memory": {"recompute": "full"}}),
        ({"memory": {"limit_gb": 1}}, {"compile": True, "memory": {"recompute": "full", "limit_gb": 1}}),
        ({"compile": "auto", "memory": ["recompute"]}, {"compile": "auto", "memory": ["recompute"]}),
        ({"memory": {"recompute": "off"}}, {"compile": True, "memory": {"recompute": "off"}}),
    ):
        found = trainer_config.with_arguments({"graph_pipeline": block}, asked)
        assert found["graph_pipeline"] == wanted
    with pytest.raises(ConfigError, match="torch_compile_backend='eager': .*leave it out"):
        trainer_config.with_arguments({}, SimpleNamespace(torch_compile=True, torch_compile_backend="eager"))


def test_configurations_are_settled() -> None:
    args = SimpleNamespace(
        per_device_train_batch_size=2, gradient_accumulation_steps=3, max_grad_norm=0.5, bf16=True, fp16=False,
        learning_rate=1e-3, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-7, weight_decay=0.1,
        max_steps=-1, get_warmup_steps=lambda steps: steps // 10,
    )  # fmt: skip
    warm_up = {"warmup_num_steps": "auto", "total_num_steps": "auto"}
    given = {
        "train_batch_size": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": warm_up},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"},
        "graph_pipeline": {"stages": "auto"},
    }
    assert engine_config(given, args, mini_batch=12, units=6, counts_tokens=True, max_steps=50) == {
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.8, 0.9]}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5, "total_num_steps": 50}},
        "zero_optimization": {"stage": 1},
        "graph_pipeline": {"stages": "auto", "units": 6, "loss_mean": "tokens"},
    }
    for wrong in ({"train_batch_size": 8}, {"gradient_clipping": 1.0}, {"graph_pipeline": {"units": 2}}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            engine_config(wrong, args, mini_batch=12, units=6, counts_tokens=False, max_steps=50)


def units_asked(block: dict[str, Any]) -> int | None:
    """Return the units that a Trainer with this block finds for samples of unlike lengths, which are stacked."""

    def stack(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {"input_ids": torch.tensor([row["input_ids"] for row in rows])}

    config = {"graph_pipeline": block}
    own = SimpleNamespace(args=FEW, data_collator=stack, _user_config=config, _user_args=FEW)
    loader = DataLoader(Texts(5, 7), batch_size=2, collate_fn=stack)
    return GraphPipelineTrainer._units_of(own, loader, TOLD)  # type: ignore[arg-type]


FEW = SimpleNamespace(
    per_device_train_batch_size=2, gradient_accumulation_steps=4, max_grad_norm=1.0, bf16=False, fp16=False
)
"""The arguments that units depend on."""
TOLD: dict[str, Any] = {"mini_batch": 8, "counts_tokens": False, "max_steps": 1}


def test_units_by_trial_leave_a_way_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert units_asked({}) == 4
    assert "graph_pipeline.units is set to 4" in caplog.text
    caplog.clear()
    for refusing in ({"compile": True}, {"mode": "async"}, {"micro_batch_sizes": 2}, {"slicing": 2}):
        assert units_asked(refusing) is None
        assert next(iter(refusing)) in caplog.records[-1].getMessage()
    assert len(caplog.records) == 4
    for known in (None, 4):
        assert units_asked({"units": known}) is None and len(caplog.records) == 4
    wrong = {"units": 4, "stages": -1}
    config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "graph_pipeline": wrong}
    assert why_no_units(config) == "", "what is wrong without them too is the engine's to say"
    null = {"graph_pipeline": {"units": None}}
    assert engine_config(null, FEW, units=4, **TOLD)["graph_pipeline"] == {"units": None}


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"bf16_full_eval": True}, "bf16_full_eval=True .*; set bf16=True"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True .*; remove it, and lower"),
        ({"save_only_model": True, "load_best_model_at_end": True, "save_strategy": "steps", "eval_steps": 5,
          "save_steps": 5, "eval_strategy": "steps"}, "save_only_model"),
    ],
)  # fmt: skip
def test_arguments_that_change_the_loss_are_refused(wrong: Any, named: str, tmp_path: Path) -> None:
    args = jobs.arguments(str(tmp_path), total=jobs.UNIT, ranks=1, **wrong)
    with pytest.raises(ConfigError, match=named):
        GraphPipelineTrainer(jobs.model_of("gpt2"), args)


@pytest.mark.parametrize(("size", "key"), [("sp", "sequence"), ("cp", "sequence"), ("tp", "tensor")])
def test_ranks_that_accelerate_would_make_are_refused_with_the_key_of_the_block(
    size: str, key: str, tmp_path: Path
) -> None:
    args = jobs.arguments(str(tmp_path), total=jobs.UNIT, ranks=1)
    args.parallelism_config = SimpleNamespace(**{f"{size}_size": 2})
    with pytest.raises(
        ConfigError, match=f'{size}_size=2; remove it and set "{key}_parallel": 2 in the graph_'
    ):
        GraphPipelineTrainer(jobs.model_of("gpt2"), args)
    args.parallelism_config = SimpleNamespace(sp_size=1, cp_size=1, tp_size=1)
    GraphPipelineTrainer(jobs.model_of("gpt2"), args)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"config": {"graph_pipeline": {"stagse": 2}}}, "stagse.*did you mean"),
        ({"config": {"graph_pipeline": {}, "gradient_cliping": 1.0}}, "gradient_cliping.*did you mean"),
        ({"config": {"graph_pipeline": {}, "train_batch_size": 7}}, "train_batch_size: 7"),
        ({"optimizers": (None, object())}, "optimizers: the scheduler is bound"),
        ({"train_dataset": [1]}, "train_dataset has 1 samples, fewer than a mini-batch of 2"),
    ],
)
def test_everything_is_refused_before_trainers_own_constructor(
    given: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Trainer

    def prepare(self: Any, model: Any, args: Any, data_collator: Any = None, train_dataset: Any = None,
                optimizers: Any = None) -> None:  # fmt: skip
        raise AssertionError("a whole dataset was prepared")

    monkeypatch.setattr(Trainer, "__init__", prepare)
    with pytest.raises(ConfigError, match=said):
        GraphPipelineTrainer(object(), jobs.arguments(str(tmp_path), total=jobs.UNIT, ranks=1), **given)


def test_what_would_not_be_called_is_refused(tmp_path: Path) -> None:
    name = "create_optimizer_and_scheduler"
    own = type("Own", (GraphPipelineTrainer,), {name: lambda self, *given, **more: None})
    args = jobs.arguments(str(tmp_path), total=jobs.UNIT, ranks=1)
    with pytest.raises(ConfigError, match=f"Own.{name} would not be called"):
        own(jobs.model_of("gpt2"), args)


def returns_own(
    self: Any, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **more: Any
) -> Any:
    """As TRL's trainers do: set an argument, leave one out, and look at the outputs."""
    inputs.pop("weights", None)
    outputs = model(**{**inputs, "use_cache": False})
    self.seen = float(outputs.logits.mean())
    return (outputs.loss, outputs) if return_outputs else outputs.loss


def scales(self: Any, model: Any, inputs: dict[str, Any], **more: Any) -> Any:
    return 2 * model(**inputs).loss


def calls_twice(self: Any, model: Any, inputs: dict[str, Any], **more: Any) -> Any:
    return [model(**inputs).loss for _ in range(2)][-1]


def shifts(self: Any, model: Any, inputs: dict[str, Any], **more: Any) -> Any:
    return model(**{**inputs, "labels": inputs["labels"].clone()}).loss


@pytest.mark.parametrize("compute_loss", [returns_own, scales, calls_twice, shifts])
def test_a_compute_loss_that_returns_the_models_own_is_taken_and_no_other(
    compute_loss: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = type("Own", (GraphPipelineTrainer,), {"compute_loss": compute_loss})
    rows = [{**row, "weights": torch.ones(())} for row in jobs.data_of("gpt2", 8).rows]
    given: dict[str, Any] = {"data_collator": jobs.stack, "train_dataset": rows}
    args = jobs.arguments(str(tmp_path), total=jobs.UNIT, ranks=1, remove_unused_columns=False)
    with pytest.raises(ConfigError, match="Own.compute_loss is tried on train_dataset"):
        own(jobs.model_of("gpt2"), args)
    drawn = torch.get_rng_state()
    if compute_loss is not returns_own:
        rows = [{key: value for key, value in row.items() if key != "weights"} for row in rows]
        with pytest.raises(
            ConfigError, match="Own.compute_loss would not be called.*return outputs.loss as it is"
        ):
            own(jobs.model_of("gpt2"), args, data_collator=jobs.stack, train_dataset=rows)
        return
    with caplog.at_level("WARNING"):
        found = own(jobs.model_of("gpt2"), args, **given)
    assert "Own.compute_loss returns the model's own loss" in caplog.text and len(drawn)
    batch = jobs.stack(rows[:2])
    wanted = {**{key: batch[key] for key in ("input_ids", "attention_mask", "labels")}, "use_cache": False}
    assert found._arguments_of(batch).keys() == wanted.keys() and not found.model._forward_hooks


def test_batches_are_evaluated_together_up_to_a_number_and_bytes() -> None:
    """The first alone, to see how much comes out; a batch of another shape begins anew."""
    groups: list[list[int]] = []

    def evaluate(batches: Any) -> list[Any]:
        groups.append([int(batch["x"][0, 0]) for batch in batches])
        return [(torch.tensor(0.0), (torch.zeros(1),)) for _ in batches]

    def batches_of(count: int, width: int) -> list[dict[str, torch.Tensor]]:
        return [{"x": torch.full((2, 3 if number < count - 1 else width), number)} for number in range(count)]

    state = SimpleNamespace(end_of_dataloader=False, remainder=0)
    found = trainer_config.EvaluatedBatches(batches_of(20, 2), evaluate, state=state, has_units=False)
    assert [int(inputs["x"][0, 0]) for inputs in found] == list(range(20))
    assert groups == [[0], list(range(1, 19)), [19]]
    groups.clear()
    huge = [{"x": torch.full((2, 2**22), 1.0)} for _ in range(12)]  # 32 MiB each
    assert len(list(trainer_config.EvaluatedBatches(huge, evaluate, state=state, has_units=False))) == 12
    assert [len(group) for group in groups] == [1, 7, 4]


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(6))


def test_a_stream_continues_from_positions_with_the_key_of_before() -> None:
    def make() -> trainer_config.StreamLoader:
        return trainer_config.StreamLoader(Numbers(), batch_size=2, collate_fn=list)

    loader = make()
    assert next(iter(loader)) == [0, 1]
    state = loader.state_dict()
    before = {"passes": state["passes"], "given": state["batches"], "state": state["state"]}
    for position in (state, before):
        continued = make()
        continued.load_state_dict(position)
        assert list(continued) == [[2, 3], [4, 5]]
