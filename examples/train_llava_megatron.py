"""Trains a LLaVA-like model: a HuggingFace CLIP vision tower beside a Megatron-core language model.

The tower is data-parallel over two ranks, the language model tensor-parallel over two others. Everything is random: the
images, with one quarter in some colour, are made up, and the language model learns to say which and where.

On one machine, with or without GPUs (on a CPU set OMP_NUM_THREADS=1 if it has fewer cores than ranks have threads):

    torchrun --nproc-per-node 4 examples/train_llava_megatron.py
    deepspeed --num_gpus 4 examples/train_llava_megatron.py

On two machines with two GPUs each; ranks 2 and 3, which exchange most, are on one of them:

    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint first-host:29500 \\
        examples/train_llava_megatron.py
    deepspeed --hostfile hosts --num_nodes 2 --num_gpus 2 examples/train_llava_megatron.py

(torchrun on both machines, deepspeed on the first; ``hosts`` has a line ``name slots=2`` of each.)
"""

import argparse
import os

import deepspeed
import torch
from megatron.core.transformer import TransformerConfig
from torch import nn
from torch.utils.data import TensorDataset, default_collate
from transformers import CLIPVisionConfig, CLIPVisionModel

import gpp_plugin
from gpp_plugin.integrations.megatron import gpt_stage

HIDDEN, IMAGE_SIZE, PATCH = 64, 16, 4
PATCHES = (IMAGE_SIZE // PATCH) ** 2
QUARTERS, COLOURS = ["nw", "ne", "sw", "se"], ["red", "green", "blue"]
WORDS = ["<image>", "<start>", "<end>", "the", "is", *QUARTERS, *COLOURS]
VOCABULARY = 16  # a multiple of the tensor size
LENGTH = PATCHES + 6


class VisionTower(nn.Module):
    """CLIP's vision model and a projector into the language model's space."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.clip = CLIPVisionModel(
            CLIPVisionConfig(
                hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=2, num_attention_heads=4,
                image_size=IMAGE_SIZE, patch_size=PATCH,
            )
        )  # fmt: skip
        self.projector = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN))

    def forward(self, pixel_values):
        """Return embeddings [batch, patches, hidden] of images, without the class token's."""
        return self.projector(self.clip(pixel_values).last_hidden_state[:, 1:])


def make_dataset(num_samples, seed):
    """Return images with a quarter in some colour, and what is to be said of each."""
    generator = torch.Generator().manual_seed(seed)
    images = 0.3 * torch.randn(num_samples, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
    quarters = torch.randint(0, len(QUARTERS), (num_samples,), generator=generator)
    colours = torch.randint(0, len(COLOURS), (num_samples,), generator=generator)
    half, texts = IMAGE_SIZE // 2, []
    for image, quarter, colour in zip(images, quarters, colours, strict=True):
        row, column = half * (quarter // 2), half * (quarter % 2)
        image[colour, row : row + half, column : column + half] += 2.0
        words = ["<start>", "the", QUARTERS[quarter], "is", COLOURS[colour], "<end>"]
        texts.append([WORDS.index(word) for word in words])
    said = torch.tensor(texts)
    ids = torch.cat([torch.zeros(num_samples, PATCHES, dtype=torch.long), said], dim=1)
    labels = torch.full_like(ids, -100)  # the next token, where there is something to say
    labels[:, PATCHES:-1] = said[:, 1:]
    return TensorDataset(images, ids, labels)


def collate(samples):
    """Return a batch by the names that the stages read."""
    return dict(zip(("pixel_values", "input_ids", "labels"), default_collate(samples), strict=True))


def make_graph():
    """Return the model as a graph of stages; the language model is built on its own ranks only."""
    language = TransformerConfig(
        num_layers=2, hidden_size=HIDDEN, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0
    )
    graph = gpp_plugin.StageGraph(name="llava")
    graph.capture(
        "vision", VisionTower(), inputs=["pixel_values"], outputs=["image_embeds"], ranks=[0, 1], stages=1
    )
    graph.stage(
        "language",
        gpt_stage(language, vocab_size=VOCABULARY, max_sequence_length=LENGTH, merge={"image_embeds": 0}),
        inputs=["input_ids", "image_embeds", "labels"],
        outputs=["loss"],
        ranks=[2, 3],
        tensor=2,
    )
    return graph


def main():
    """Train, and say how well unseen images are described."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by DeepSpeed's launcher")
    parser.add_argument(
        "--deepspeed_config",
        default=os.path.join(os.path.dirname(__file__), "..", "configs", "llava_megatron.json"),
    )
    args = parser.parse_args()

    engine, _, _, _ = deepspeed.initialize(
        model=make_graph(),
        config=args.deepspeed_config,
        training_data=make_dataset(2048, seed=1),
        collate_fn=collate,
    )
    for step in range(args.steps):
        loss = engine.train_batch()
        if engine.global_rank == 0 and (step + 1) % 25 == 0:
            print(f"step {step + 1}  loss {loss.item():.4f}", flush=True)

    unseen = make_dataset(64, seed=2)
    loss = engine.eval_batch(iter([collate([unseen[i] for i in range(len(unseen))])]))
    if engine.global_rank == 0:
        print(f"loss on unseen images: {loss.item():.4f}")


if __name__ == "__main__":
    main()
