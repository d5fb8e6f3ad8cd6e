"""Trains a model with two encoders of different kinds, vision and audio, into one language model.

The encoders run beside each other, each on its own rank and with its own micro-batch; the language model is
data-parallel over two more. All three are HuggingFace models with random weights, as explicit stages: each is built by
a function on its own ranks only. The data are made up: an image with a bright quarter and a tone of some pitch,
and the language model learns to say which they are.

On one machine, with or without GPUs (on a CPU set OMP_NUM_THREADS=1 if it has fewer cores than ranks have threads):

    torchrun --nproc-per-node 4 examples/train_two_encoders.py
    deepspeed --num_gpus 4 examples/train_two_encoders.py

On two machines with two GPUs each, the encoders on the first:

    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint first-host:29500 \\
        examples/train_two_encoders.py
    deepspeed --hostfile hosts --num_nodes 2 --num_gpus 2 examples/train_two_encoders.py

(torchrun on both machines, deepspeed on the first; ``hosts`` has a line ``name slots=2`` of each.)
"""

import argparse
import math
import os

import deepspeed
import torch
from torch import nn
from torch.utils.data import TensorDataset, default_collate
from transformers import CLIPVisionConfig, CLIPVisionModel, LlamaConfig, LlamaForCausalLM, WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

import gpp_plugin

HIDDEN, QUARTERS, PITCHES = 64, 4, 8
IMAGE_SIZE, PATCH, MELS, FRAMES = 8, 4, 16, 16
IMAGE_LENGTH, AUDIO_LENGTH = (IMAGE_SIZE // PATCH) ** 2, FRAMES // 2
START, FIRST_QUARTER, FIRST_PITCH = 0, 1, 1 + QUARTERS
VOCABULARY = FIRST_PITCH + PITCHES


class Vision(nn.Module):
    """CLIP's vision model; image_embeds [batch, patches, hidden]."""

    def __init__(self):
        super().__init__()
        self.clip = CLIPVisionModel(
            CLIPVisionConfig(
                hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=2, num_attention_heads=4,
                image_size=IMAGE_SIZE, patch_size=PATCH,
            )
        )  # fmt: skip

    def forward(self, pixel_values):
        """Encode images, without the class token's embedding."""
        return self.clip(pixel_values).last_hidden_state[:, 1:]


class Audio(nn.Module):
    """Whisper's encoder; audio_embeds [batch, frames / 2, hidden]."""

    def __init__(self):
        super().__init__()
        self.whisper = WhisperEncoder(
            WhisperConfig(
                d_model=HIDDEN, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=2 * HIDDEN,
                num_mel_bins=MELS, max_source_positions=AUDIO_LENGTH,
            )
        )  # fmt: skip

    def forward(self, input_features):
        """Encode spectrograms."""
        return self.whisper(input_features).last_hidden_state


class Language(nn.Module):
    """A Llama that reads what both encoders saw and heard, then text."""

    def __init__(self):
        super().__init__()
        self.llama = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=2, num_attention_heads=4,
                vocab_size=VOCABULARY, max_position_embeddings=64,
            )
        )  # fmt: skip

    def forward(self, image_embeds, audio_embeds, input_ids):
        """Return the loss of telling each token from those before it."""
        words = self.llama.get_input_embeddings()(input_ids)
        logits = self.llama(inputs_embeds=torch.cat([image_embeds, audio_embeds, words], dim=1)).logits
        length = input_ids.shape[1]
        return nn.functional.cross_entropy(logits[:, -length:-1].flatten(0, 1), input_ids[:, 1:].flatten())


def make_dataset(num_samples, seed):
    """Return images, spectrograms and what is to be said of them: the bright quarter, then the pitch."""
    generator = torch.Generator().manual_seed(seed)
    images = 0.3 * torch.randn(num_samples, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
    sounds = 0.3 * torch.randn(num_samples, MELS, FRAMES, generator=generator)
    quarters = torch.randint(0, QUARTERS, (num_samples,), generator=generator)
    pitches = torch.randint(0, PITCHES, (num_samples,), generator=generator)
    half = IMAGE_SIZE // 2
    for i in range(num_samples):
        row, column = divmod(int(quarters[i]), 2)
        images[i, :, row * half : (row + 1) * half, column * half : (column + 1) * half] += 2.0
        sounds[i, int(pitches[i]) * MELS // PITCHES] += 2.0
    start = torch.full((num_samples,), START)
    return TensorDataset(
        images, sounds, torch.stack([start, FIRST_QUARTER + quarters, FIRST_PITCH + pitches], dim=1)
    )


def collate(samples):
    """Return a batch by the names that the stages read."""
    return dict(zip(("pixel_values", "input_features", "input_ids"), default_collate(samples), strict=True))


def make_graph():
    """Return the model as a graph of stages."""
    graph = gpp_plugin.StageGraph(name="two_encoders")
    graph.stage(
        "vision", lambda context: Vision(), inputs=["pixel_values"], outputs=["image_embeds"], ranks=[0],
        micro_batch_size=16,
    )  # fmt: skip
    graph.stage(
        "audio", lambda context: Audio(), inputs=["input_features"], outputs=["audio_embeds"], ranks=[1],
        micro_batch_size=8,
    )  # fmt: skip
    graph.stage(
        "language", lambda context: Language(), inputs=["image_embeds", "audio_embeds", "input_ids"], outputs=["loss"],
        ranks=[2, 3],
    )  # fmt: skip
    return graph


def main():
    """Train, and say how well unseen images and sounds are described."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by DeepSpeed's launcher")
    parser.add_argument(
        "--deepspeed_config",
        default=os.path.join(os.path.dirname(__file__), "..", "configs", "two_encoders.json"),
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
        chance = (math.log(QUARTERS) + math.log(PITCHES)) / 2
        print(f"loss on what it has not seen or heard: {loss.item():.4f} (guessing: {chance:.4f})")


if __name__ == "__main__":
    main()
