"""Trains a HuggingFace CLIP on handwritten digits and their captions, as a graph of pipeline stages.

    deepspeed --num_gpus 4 examples/train_clip_digits.py --deepspeed_config configs/clip_graph_pipeline.json
    torchrun --nproc-per-node 4 examples/train_clip_digits.py --deepspeed_config configs/clip_graph_pipeline.json

Both start four ranks with or without GPUs; on a CPU set OMP_NUM_THREADS=1 if it has fewer cores than ranks
have threads. What a single-process DeepSpeed script lacks of this is `import gpp_plugin` and the JSON's block.
"""

import argparse

import deepspeed
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import Dataset
from transformers import CLIPConfig, CLIPModel

import gpp_plugin  # noqa: F401  makes deepspeed.initialize honour the "graph_pipeline" block

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
TEMPLATES = ["a photo of the digit {}", "the number {} , handwritten", "a small picture of {}"]
# CLIP pools its text at the end-of-text token: give it the highest id (and not 2).
WORDS = ["<pad>", "<start>", *sorted({*" ".join(TEMPLATES).replace("{}", "").split(), *NAMES}), "<end>"]
LENGTH = max(len(template.split()) for template in TEMPLATES) + 2


def encode(text):
    """Return the ids of a caption and its attention mask, padded to LENGTH."""
    ids = [WORDS.index(word) for word in ["<start>", *text.split(), "<end>"]]
    padding = [0] * (LENGTH - len(ids))
    return torch.tensor(ids + padding), torch.tensor([1] * len(ids) + padding)


class CaptionedDigits(Dataset):
    """Images of digits with a caption each, as CLIPModel.forward takes them."""

    def __init__(self, images, labels):
        self.images = torch.tensor(images / 16 - 0.3, dtype=torch.float32).unsqueeze(1)
        self.labels = labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        ids, mask = encode(TEMPLATES[index % len(TEMPLATES)].format(NAMES[self.labels[index]]))
        return {"input_ids": ids, "attention_mask": mask, "pixel_values": self.images[index]}


def make_model():
    """Return a small CLIP with random weights, the same on every rank."""
    tower = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": len(WORDS) - 1}
    text = {"vocab_size": len(WORDS), "max_position_embeddings": LENGTH, **special}
    vision = {"image_size": 8, "patch_size": 2, "num_channels": 1}
    torch.manual_seed(0)
    return CLIPModel(
        CLIPConfig(text_config={**tower, **text}, vision_config={**tower, **vision}, projection_dim=64)
    )


@torch.no_grad()
def zero_shot_accuracy(model, dataset):
    """Return the share of images that lie nearest to their own digit's captions."""
    ids, masks = zip(*(encode(t.format(name)) for name in NAMES for t in TEMPLATES), strict=True)
    texts = model.get_text_features(torch.stack(ids), torch.stack(masks)).pooler_output
    texts = (texts / texts.norm(dim=-1, keepdim=True)).view(len(NAMES), len(TEMPLATES), -1).mean(dim=1)
    images = model.get_image_features(dataset.images).pooler_output
    predicted = (images @ (texts / texts.norm(dim=-1, keepdim=True)).T).argmax(dim=1)
    return (predicted == torch.tensor(dataset.labels)).float().mean().item()


def main():
    """Train, save, and check what was saved."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save", default="clip_digits", help="directory for the trained model")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by DeepSpeed's launcher")
    parser.add_argument("--deepspeed_config", default="configs/clip_graph_pipeline.json")
    args = parser.parse_args()

    digits = load_digits()
    train_images, test_images, train_labels, test_labels = train_test_split(
        digits.images, digits.target, test_size=0.2, stratify=digits.target, random_state=0
    )
    engine, _, _, _ = deepspeed.initialize(
        model=make_model(),
        config=args.deepspeed_config,
        training_data=CaptionedDigits(train_images, train_labels),
    )
    for step in range(args.steps):
        loss = engine.train_batch()
        if engine.global_rank == 0 and (step + 1) % 50 == 0:
            print(f"step {step + 1}  loss {loss.item():.4f}", flush=True)

    engine.save_pretrained(args.save)
    if engine.global_rank == 0:
        accuracy = zero_shot_accuracy(
            CLIPModel.from_pretrained(args.save).eval(), CaptionedDigits(test_images, test_labels)
        )
        print(f"zero-shot accuracy on held-out digits: {100 * accuracy:.1f} %")


if __name__ == "__main__":
    main()
