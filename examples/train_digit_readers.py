"""Trains Qwen2.5-VL, LLaVA, Whisper or T5 to name handwritten digits, as a graph of pipeline stages.

    torchrun --nproc-per-node 4 examples/train_digit_readers.py --model qwen2_5_vl
    deepspeed --num_gpus 4 examples/train_digit_readers.py --model llava

The models are small, made from a configuration with random weights. Qwen2.5-VL and LLaVA see the digits; of LLaVA the
vision tower is frozen and the language model has LoRA adapters (it needs `pip install peft`). Whisper hears them, a row
of pixels as a band of its spectrogram, and T5 reads them, a word for each grey pixel. Both launchers start four ranks
with or without GPUs; on a CPU set OMP_NUM_THREADS=1 if it has fewer cores than ranks have threads.
"""

import argparse

import deepspeed
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import Dataset
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import gpp_plugin  # noqa: F401  makes deepspeed.initialize honour the "graph_pipeline" block

PAD, START, END, IMAGE, IMAGE_START, IMAGE_END, IS, DIGIT, GREY = 0, 1, 2, 3, 4, 5, 6, 7, 17
"""Words: those of the frame, then ten digits, then seventeen greys."""
VOCABULARY = GREY + 17
SIDE, PATCHES = 8, 16
"""Images are 8 x 8 pixels in 4 x 4 patches."""
WIDTH, HEADS, LAYERS = 64, 4, 4
TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS // 2, "max_position_embeddings": 64,
    "pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END,
}  # fmt: skip
SPEECH = {
    "d_model": WIDTH, "vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END,
    "decoder_start_token_id": START,
}  # fmt: skip


def make_qwen2_5_vl():
    """Return a Qwen2.5-VL whose tower merges 2 x 2 patches: four tokens an image."""
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={
                **TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
            },
            vision_config={
                "depth": LAYERS, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_heads": HEADS,
                "in_channels": 1, "patch_size": 2, "temporal_patch_size": 1, "spatial_merge_size": 2, "window_size": 8,
                "fullatt_block_indexes": [LAYERS - 1], "out_hidden_size": WIDTH,
            },
            image_token_id=IMAGE, vision_start_token_id=IMAGE_START, vision_end_token_id=IMAGE_END,
        )
    )  # fmt: skip


def make_llava():
    """Return a LLaVA of which the tower is frozen and the language model has adapters."""
    from peft import LoraConfig, get_peft_model

    model = LlavaForConditionalGeneration(
        LlavaConfig(
            text_config={**TEXT, "model_type": "llama"},
            vision_config={
                "model_type": "clip_vision_model", "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH,
                "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "image_size": SIDE, "patch_size": 2,
                "num_channels": 1,
            },
            image_token_index=IMAGE,
        )
    )  # fmt: skip
    adapters = LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=r".*language_model.*\.(q_proj|v_proj|up_proj)",
        modules_to_save=["multi_modal_projector", "embed_tokens", "lm_head"],
    )
    return get_peft_model(model, adapters)


def make_whisper():
    """Return a Whisper whose spectrograms have eight bands, halved in time by its second convolution."""
    return WhisperForConditionalGeneration(
        WhisperConfig(
            **SPEECH, num_mel_bins=SIDE, encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_attention_heads=HEADS,
            decoder_attention_heads=HEADS, encoder_ffn_dim=4 * WIDTH, decoder_ffn_dim=4 * WIDTH,
            max_source_positions=SIDE, max_target_positions=8, suppress_tokens=None, begin_suppress_tokens=None,
        )
    )  # fmt: skip


def make_t5():
    """Return a T5 that reads 64 words of grey."""
    return T5ForConditionalGeneration(
        T5Config(
            **SPEECH,
            d_kv=WIDTH // HEADS,
            d_ff=4 * WIDTH,
            num_layers=LAYERS,
            num_heads=HEADS,
            dropout_rate=0.0,
        )
    )


def with_image(image_tokens):
    """Return a prompt of an image, "is" and the digit; only the digit is to be learned."""

    def words(digit):
        ids = [START, IMAGE_START, *[IMAGE] * image_tokens, IMAGE_END, IS, DIGIT + digit]
        return {
            "input_ids": torch.tensor(ids),
            "attention_mask": torch.ones(len(ids), dtype=torch.long),
            "labels": torch.tensor([-100] * (len(ids) - 1) + [DIGIT + digit]),
        }

    return words


def for_qwen2_5_vl(image, digit):
    """Return a sample of Qwen2.5-VL: patches in the order in which 2 x 2 of them are merged, and the image's grid."""
    words = with_image(PATCHES // 4)(digit)
    patches = image.reshape(2, 2, 2, 2, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(PATCHES, 4)
    return {
        **words,
        "pixel_values": patches,
        "image_grid_thw": torch.tensor([1, 4, 4]),
        "mm_token_type_ids": (words["input_ids"] == IMAGE).long(),
    }


def for_llava(image, digit):
    """Return a sample of LLaVA."""
    return {**with_image(PATCHES)(digit), "pixel_values": image[None]}


def for_whisper(image, digit):
    """Return a sample of Whisper: each column of pixels lasts two frames."""
    return {
        "input_features": image.repeat_interleave(2, dim=1),
        "labels": torch.tensor([DIGIT + digit, END]),
    }


def for_t5(image, digit):
    """Return a sample of T5."""
    greys = (GREY + 16 * (image + 0.3)).round().long().flatten()
    return {"input_ids": greys, "labels": torch.tensor([DIGIT + digit, END])}


MODELS = {
    "qwen2_5_vl": (make_qwen2_5_vl, for_qwen2_5_vl),
    "llava": (make_llava, for_llava),
    "whisper": (make_whisper, for_whisper),
    "t5": (make_t5, for_t5),
}


class Digits(Dataset):
    """Handwritten digits as one of the models takes them."""

    def __init__(self, name, images, digits):
        self.make_sample = MODELS[name][1]
        self.images = torch.tensor(images / 16 - 0.3, dtype=torch.float32)
        self.digits = digits

    def __len__(self):
        return len(self.digits)

    def __getitem__(self, index):
        return self.make_sample(self.images[index], int(self.digits[index]))


def collate(samples):
    """Stack samples; the Qwen family has the patches of all images in one list."""
    batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
    if "image_grid_thw" in batch:
        batch["pixel_values"] = batch["pixel_values"].flatten(0, 1)
    return batch


def accuracy(logits, labels):
    """Return the share of digits that are named right."""
    found = logits.argmax(-1)
    if (
        labels.shape[1] > 2
    ):  # a decoder says at each place what comes next; an encoder-decoder has shifted its labels
        found, labels = found[:, :-1], labels[:, 1:]
    is_digit = (labels >= DIGIT) & (labels < GREY)
    return (found == labels)[is_digit].float().mean().item()


def train(name, *, steps, config, save=None):
    """Train one of the models; return the last step's loss, the accuracy on unseen digits, and if this is rank 0."""
    digits = load_digits()
    images, unseen_images, targets, unseen_targets = train_test_split(
        digits.images, digits.target, test_size=64, stratify=digits.target, random_state=0
    )
    torch.manual_seed(0)  # the same weights on every rank
    engine, _, _, _ = deepspeed.initialize(
        model=MODELS[name][0](),
        config=config,
        training_data=Digits(name, images, targets),
        collate_fn=collate,
    )
    for step in range(steps):
        loss = engine.train_batch()
        if engine.global_rank == 0 and (step + 1) % 50 == 0:
            print(f"step {step + 1}  loss {loss.item():.4f}", flush=True)
    unseen = Digits(name, unseen_images, unseen_targets)
    size = engine.train_batch_size()
    shares = []
    for start in range(0, len(unseen), size):
        batch = collate([unseen[i] for i in range(start, start + size)])
        _, logits = engine.eval_batch(iter([batch]), return_logits=True)
        shares.append(accuracy(logits, batch["labels"].to(logits.device)))
    if save:
        engine.save_pretrained(save)
    is_first = engine.global_rank == 0
    engine.destroy()
    return loss.item(), sum(shares) / len(shares), is_first


def main():
    """Train, and say how many digits the model names that it has not seen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="qwen2_5_vl")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save", help="directory for the trained model")
    parser.add_argument("--local_rank", type=int, default=-1, help="given by DeepSpeed's launcher")
    parser.add_argument("--config", default="configs/digit_readers.json")
    options = parser.parse_args()
    _, share, is_first = train(options.model, steps=options.steps, config=options.config, save=options.save)
    if is_first:
        print(f"digits it had not seen, named right: {100 * share:.1f} %", flush=True)


if __name__ == "__main__":
    main()
