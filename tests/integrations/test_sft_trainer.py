"""TRL's SFTTrainer on a graph of stages: the numbers of SFTTrainer in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="trl is not installed: pip install 'gpp_plugin[trl]'")

from trl import DPOTrainer, SFTTrainer

from gpp_plugin import GraphPipelineSFTTrainer, GraphPipelineTrainer
from gpp_plugin.errors import ConfigError
from gpp_plugin.integrations.trainer.sft_trainer import token_loss, token_metrics
from tests.integrations import sft_jobs as jobs
from tests.ranks import run_kept_ranks


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep TRL from telling its hub what is trained."""
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.setattr(SFTTrainer, "_send_telemetry", lambda self: None)


@pytest.mark.parametrize("case", jobs.CASES)
def test_losses_gradients_and_evaluations_are_trls(case: str, tmp_path: Path) -> None:
    plain = jobs.fine_tuned(SFTTrainer, case, str(tmp_path / "plain"), ranks=1)
    assert len(plain["losses"]) == jobs.STEPS and plain["losses"][0][0] > 0.01
    for found in run_kept_ranks(jobs.fine_tune_on_ranks, 2, case, str(tmp_path / "ranks")):
        for (loss, norm, rate), (other, norm_2, rate_2) in zip(found["losses"], plain["losses"], strict=True):
            assert loss == pytest.approx(other, rel=1e-5) and norm == pytest.approx(norm_2, rel=1e-4)
            assert rate == rate_2
        assert found["tokens"] == plain["tokens"]
        assert found["evaluated"] == pytest.approx(plain["evaluated"], rel=1e-4)
        assert len(found["evaluated"]) == 4


def test_it_resumes_bit_equal(tmp_path: Path) -> None:
    for straight, resumed in run_kept_ranks(jobs.resume_on_ranks, 2, "lora", str(tmp_path)):
        assert len(straight) == jobs.STEPS and resumed == straight


@pytest.mark.parametrize(
    ("case", "arguments", "given", "named"),
    [
        ("padded", {"activation_offloading": True}, {}, 'activation_offloading.*"swap": "auto"'),
        ("padded", {"gradient_checkpointing_kwargs": {"selective": True}}, {}, "selective.*recompute"),
        ("padded", {"use_liger_kernel": True}, {}, "use_liger_kernel"),
        ("padded", {}, {"quantization_config": object()}, "quantization_config.*bf16=True"),
        ("padded", {}, {"config": {"graph_pipeline": {"stagse": 2}}}, "stagse"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused_before_the_dataset_is_read(
    case: str, arguments: dict[str, Any], given: dict[str, Any], named: str, tmp_path: Path
) -> None:
    class Unread(GraphPipelineSFTTrainer):
        def _prepare_dataset(self, *_: Any) -> Any:
            raise AssertionError("it was tokenised")

    with pytest.raises(ConfigError, match=named):
        jobs.make(Unread, case, str(tmp_path), ranks=1, arguments=arguments, **given)
    with pytest.raises(AssertionError, match="tokenised"):
        jobs.make(Unread, case, str(tmp_path), ranks=1)


def test_models_that_cannot_separate_packed_rows_are_refused(tmp_path: Path) -> None:
    class Changed(GraphPipelineSFTTrainer):
        attention, layers = "sdpa", ["full_attention"] * 2

        def __init__(self, model: Any, *passed: Any, **more: Any) -> None:
            model.config._attn_implementation_internal = self.attention
            model.config.layer_types = self.layers
            super().__init__(model, *passed, **more)

    with pytest.raises(ConfigError, match="flash_attention_2.*attn_implementation='sdpa'"):
        jobs.make(
            type("Flash", (Changed,), {"attention": "flash_attention_2"}), "packed", str(tmp_path), ranks=1
        )
    linear = type("Linear", (Changed,), {"layers": ["full_attention", "linear_attention"]})
    with pytest.raises(ConfigError, match="linear_attention.*packing=False"):
        jobs.make(linear, "packed", str(tmp_path), ranks=1)
    jobs.make(linear, "padded", str(tmp_path), ranks=1)


def test_trls_trainers_beside_the_plain_one_are_refused_with_the_class_to_use(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    for base, named in (
        (SFTTrainer, "use gpp_plugin.GraphPipelineSFTTrainer"),
        (DPOTrainer, "several forwards"),
    ):
        mixed = type("Mixed", (GraphPipelineTrainer, base), {})
        with pytest.raises(ConfigError, match=named):
            mixed(torch.nn.Linear(2, 2), TrainingArguments(str(tmp_path), use_cpu=True))
    with pytest.raises(ConfigError, match=r"args is a TrainingArguments; pass trl.SFTConfig"):
        GraphPipelineSFTTrainer(torch.nn.Linear(2, 2), TrainingArguments(str(tmp_path), use_cpu=True))


def test_a_subclass_may_return_the_models_own_loss_and_no_other(tmp_path: Path) -> None:
    def own(self: Any, *passed: Any, **more: Any) -> Any:
        return super(kept, self).compute_loss(*passed, **more)

    def twice(self: Any, *passed: Any, **more: Any) -> Any:
        return 2 * super(doubled, self).compute_loss(*passed, **more)

    kept = type("Kept", (GraphPipelineSFTTrainer,), {"compute_loss": own})
    doubled = type("Doubled", (GraphPipelineSFTTrainer,), {"compute_loss": twice})
    trainer = jobs.make(kept, "packed", str(tmp_path), ranks=1)
    batch = next(iter(trainer.get_train_dataloader()))
    assert "cu_seq_lens_q" in batch and trainer._arguments_of(batch).keys() == {
        "input_ids",
        "labels",
        "position_ids",
    }
    assert "forward" not in vars(trainer.model), "the model has its own forward again"
    with pytest.raises(ConfigError, match=r"Doubled.compute_loss would not be called"):
        jobs.make(doubled, "padded", str(tmp_path), ranks=1)


def test_metrics_and_losses_of_a_row_by_hand() -> None:
    logits = torch.log(torch.tensor([[[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [1.0, 1.0, 1.0]]]))
    labels = torch.tensor([[7, 1, 1]])
    entropies = [
        1.5 * torch.log(torch.tensor(2.0)),
        -(0.8 * torch.log(torch.tensor(0.8))) + 0.2 * torch.log(torch.tensor(10.0)),
    ]
    expected = [[float(sum(entropies)), 1.0, 2.0]]
    torch.testing.assert_close(token_metrics({"logits": logits}, labels), torch.tensor(expected))
    nll = -torch.log(torch.tensor([0.25, 0.8]))
    torch.testing.assert_close(token_loss({"logits": logits}, labels, focuses=False), nll.mean())
    focused = token_loss({"logits": logits}, labels, torch.tensor(4), focuses=True)
    torch.testing.assert_close(focused, (nll * torch.tensor([0.25, 0.8])).sum() / 4)
    masked = torch.full_like(labels, -100)
    assert token_metrics({"logits": logits}, masked).tolist() == [[0.0, 0.0, 0.0]]
    assert token_loss({"logits": logits}, masked, focuses=False) == 0
