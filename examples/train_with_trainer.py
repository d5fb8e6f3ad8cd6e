"""Trains a small GPT-2 to count, with HuggingFace's Trainer on a graph of pipeline stages.

    torchrun --nproc-per-node 4 examples/train_with_trainer.py --config configs/trainer_graph_pipeline.json
    deepspeed --num_gpus 4 examples/train_with_trainer.py --config configs/trainer_graph_pipeline.json

Both start four ranks with or without GPUs; on a CPU set OMP_NUM_THREADS=1 if it has fewer cores than ranks have
threads. What a script for Trainer lacks of this is the class's name and the configuration. Started again with
`--resume` it goes on from the last checkpoint, with the samples that come next.
"""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from gpp_plugin import GraphPipelineTrainer

WORDS, LENGTH = 32, 12


class Counting(Dataset):
    """Rows that count upwards by 1, 2 or 3 from a first number."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        ids = (torch.arange(LENGTH) * (1 + index % 3) + index // 3) % WORDS
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def accuracy(prediction):
    """Return the share of next numbers that are right; a row's first two do not say by how much it counts."""
    found = prediction.predictions[:, 1:-1].argmax(-1)
    return {"accuracy": float((found == prediction.label_ids[:, 2:]).mean())}


def main():
    """Train, evaluate, and save the model as HuggingFace has it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/trainer_graph_pipeline.json")
    parser.add_argument("--output", default="build/counting")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--local_rank", type=int, default=-1, help="given by DeepSpeed's launcher")
    options = parser.parse_args()
    torch.manual_seed(0)  # the same weights on every rank
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=WORDS,
            n_positions=LENGTH,
            n_embd=64,
            n_layer=4,
            n_head=4,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    args = TrainingArguments(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        warmup_steps=5,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=20,
        save_steps=20,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
    )
    trainer = GraphPipelineTrainer(
        model,
        args,
        config=options.config,
        train_dataset=Counting(960),
        eval_dataset=Counting(96),
        compute_metrics=accuracy,
    )
    trainer.train(resume_from_checkpoint=options.resume)
    metrics = trainer.evaluate()
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"accuracy of the best model: {metrics['eval_accuracy']:.2f}")
    trainer.engine.destroy()


if __name__ == "__main__":
    main()
