"""Fine-tunings with TRL's SFTTrainer and with ours, as one process or several ranks run them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from tests.integrations.trainer_jobs import config_of, logged
from tests.models import build

UNIT, BATCHES, STEPS = 2, 4, 4
"""Samples of a batch, batches and optimizer steps of a job, whatever ranks it has."""

WORDS = "on a quiet lake two boats were waiting for wind that came late and cold".split()
TOKENS = ("<pad>", "<unk>", "<s>", "</s>", "<image>", "user", "assistant", "\n", *dict.fromkeys(WORDS))
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }} </s> {% endgeneration %}{% elif message['content'] is string %}"
    "{{ message['content'] }} </s> {% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<image> {% else %}{{ part['text'] }} {% endif %}{% endfor %}</s> {% endif %}{% endfor %}"
)


def tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: n for n, word in enumerate(TOKENS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens([AddedToken(word, special=True) for word in TOKENS[:5]])
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", bos_token="<s>"
    )
    made.chat_template = TEMPLATE
    return made


def processor() -> Any:
    """Return what prepares the samples of the tiny LLaVA: four patches an image."""
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    size = {"height": 8, "width": 8}
    images = CLIPImageProcessorPil(size=size, crop_size=size)
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer(),
        patch_size=4,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE,
        num_additional_image_tokens=1,
    )


def _phrase(draw: random.Random, most: int) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(2, most)))


def dataset(kind: str, count: int, seed: int = 3) -> Any:
    """Return samples of unlike lengths: texts, conversations, or conversations about an image."""
    from datasets import Dataset, Features, Image, List, Value
    from PIL import Image as Picture

    draw = random.Random(seed)
    if kind == "texts":
        return Dataset.from_list([{"text": _phrase(draw, 9)} for _ in range(count)])
    talks = [
        [{"role": "user", "content": _phrase(draw, 5)}, {"role": "assistant", "content": _phrase(draw, 7)}]
        for _ in range(count)
    ]
    if kind == "talks":
        return Dataset.from_list([{"messages": talk} for talk in talks])
    pictures = [Picture.new("RGB", (8, 8), tuple(draw.randbytes(3))) for _ in talks]
    features = Features(
        {"messages": List({"role": Value("string"), "content": Value("string")}), "images": List(Image())}
    )
    rows = [{"messages": talk, "images": [one]} for talk, one in zip(talks, pictures, strict=True)]
    return Dataset.from_list(rows, features=features)


CASES: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "padded": ("llama", "texts", {}),
    "packed": ("llama", "texts", {"packing": True, "max_length": 16}),
    "wrapped": ("gpt2", "texts", {"packing": True, "max_length": 8, "packing_strategy": "wrapped"}),
    "assistant": ("llama", "talks", {"assistant_only_loss": True, "gradient_checkpointing": True}),
    "lora": ("llama", "talks", {}),
    "focused": ("llama", "texts", {"loss_type": "dft"}),
    "smoothed": ("llama", "texts", {"label_smoothing_factor": 0.1}),
    "images": ("llava", "images", {"max_length": None}),
}
"""Name -> model, samples, arguments."""


def arguments(directory: str, *, ranks: int, **more: Any) -> Any:
    from trl import SFTConfig

    return SFTConfig(
        output_dir=directory,
        per_device_train_batch_size=UNIT,
        gradient_accumulation_steps=BATCHES // ranks,
        **{
            "max_steps": STEPS,
            "learning_rate": 5e-3,
            "weight_decay": 0.05,
            "max_grad_norm": 0.5,
            "logging_steps": 1,
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            "seed": 3,
            "bf16": False,
            "gradient_checkpointing": False,
            "save_strategy": "no",
            "dataloader_pin_memory": False,
            "per_device_eval_batch_size": 3,
            **more,
        },  # fmt: skip
    )


def make(trainer_class: Any, case: str, directory: str, *, ranks: int, **given: Any) -> Any:
    """Return a trainer of a case."""
    name, kind, options = CASES[case]
    options = {**options, **given.pop("arguments", {})}
    torch.manual_seed(1)
    model = build(name)[0]
    if kind == "images":  # the tiny model's own number of the token is beyond the words
        model.config.image_token_index = model.config.image_token_id = TOKENS.index("<image>")
    if case == "lora":
        from peft import LoraConfig

        given["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    return trainer_class(
        model,
        arguments(directory, ranks=ranks, **options),
        train_dataset=dataset(kind, 150 if options.get("packing") else 44),
        eval_dataset=dataset(kind, 7, seed=8),
        processing_class=processor() if kind == "images" else tokenizer(),
        **given,
    )


def fine_tuned(trainer_class: Any, case: str, directory: str, *, ranks: int, **given: Any) -> dict[str, Any]:
    """Train a case and evaluate it; return what was logged of steps and of the evaluation."""
    trainer = make(trainer_class, case, directory, ranks=ranks, **given)
    trainer.train()
    metrics = trainer.evaluate()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    answer = {
        "losses": logged(trainer),
        "tokens": [row["num_tokens"] for row in rows],
        "evaluated": {
            key: metrics[key]
            for key in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy", "eval_num_tokens")
            if key in metrics
        },
        "logged": [row for row in trainer.state.log_history if "eval_loss" in row],
    }
    if getattr(trainer, "engine", None) is not None:
        trainer.engine.destroy()
    return answer


def fine_tune_on_ranks(case: str, directory: str) -> dict[str, Any]:
    from gpp_plugin import GraphPipelineSFTTrainer

    ranks, config = dist.get_world_size(), config_of(0, stages=2)
    return fine_tuned(GraphPipelineSFTTrainer, case, directory, ranks=ranks, config=config)


def resume_on_ranks(case: str, directory: str) -> list[Any]:
    """Return the losses of a job that saves in its middle, and of one that continues there."""
    from gpp_plugin import GraphPipelineSFTTrainer

    answers = []
    for resumes in (False, True):
        trainer = make(
            GraphPipelineSFTTrainer,
            case,
            directory,
            ranks=dist.get_world_size(),
            config=config_of(1, stages=2),
            arguments={"save_strategy": "steps", "save_steps": 2},
        )
        checkpoint = f"{directory}/checkpoint-2" if resumes else None
        trainer.train(resume_from_checkpoint=checkpoint)
        answers.append(logged(trainer))
        trainer.engine.destroy()
        dist.barrier()
    return answers
