"""What HuggingFace's example scripts read: small models with random weights, tokenizers, samples, metrics.

`cases.json` has a row a script. All is drawn from one seed. Texts are of unlike lengths and classes uneven, so that an
order or a weight that is wrong is seen in losses. Metrics, and what would be downloaded beside them, are local modules.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import string
import wave
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

TABLES: Mapping[str, Mapping[str, Any]] = json.loads(
    Path(__file__).with_name("cases.json").read_text(encoding="utf-8")
)
CASES = TABLES["scripts"]
"""Name of a script -> its model's class and fields, the function below that writes samples, arguments, metrics."""

WORDS = "on a quiet lake two boats were waiting for wind that came late and cold".split()
NAMES = "river tower garden engine letter winter".split()
KNOWN = ("<pad>", "<unk>", "<s>", "</s>", "<mask>", *WORDS, *NAMES, ".", "?", "what", "is", "the")
"""Token numbers; models have 40 of them."""

LETTERS = string.ascii_lowercase

TRAINED, HELD_OUT = 48, 11

METRIC = """import datasets
import evaluate
import numpy

INT, TEXT, LIST = datasets.Value("int64"), datasets.Value("string"), datasets.Sequence


class Metric(evaluate.Metric):
    def _info(self):
        features = datasets.Features({features})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references, **options):
        hits = [{hit} for p, r in zip(predictions, references)]
        mean = sum(hits) / len(hits)
        return {result}
"""
DROPOUT = ("dropout", "pdrop", "drop_path", "layerdrop", "mask_time_prob", "mask_feature_prob")
"""In the names of a configuration's fields: what a model draws in training."""
NLTK = """def sent_tokenize(text):
    return text.split(". ")


class data:
    find = staticmethod(str)
"""
"""What run_summarization asks of it; the real one would download."""


def make_inputs(name: str, here: Path, *, has_dropout: bool) -> None:
    """Write the model, what prepares its samples, the samples and the metrics of a script into a folder."""
    case = CASES[name]
    SAMPLES[case["samples"]](here, random.Random(3))
    _make_model(case, here / "model", has_dropout=has_dropout)
    if "small/model" in case["arguments"]:  # a script that takes a folder for a checkpoint
        shutil.copytree(here / "model", _in_cache(here, "models", "small/model"), dirs_exist_ok=True)
    modules = {f"{metric}/{metric}": _metric(**TABLES["metrics"][metric]) for metric in case["metrics"]}
    for module, text in {**modules, "modules/nltk": NLTK}.items():
        file = here / f"{module}.py"
        file.parent.mkdir()
        file.write_text(text, encoding="utf-8")


def _metric(*, features: str, hit: str, names: list[str], result: str = "") -> str:
    return METRIC.format(features=features, hit=hit, result=result or f"dict.fromkeys({names}, mean)")


def _in_cache(here: Path, kind: str, name: str) -> Path:
    """Return the new folder of a model or a data set in the hub's cache, as if it had been downloaded."""
    cached = here / "cache/hub" / f"{kind}--{name.replace('/', '--')}"
    revision = "0" * 40
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text(revision, encoding="utf-8")
    (folder := cached / "snapshots" / revision).mkdir(parents=True)
    return folder


def _make_model(case: Mapping[str, Any], folder: Path, *, has_dropout: bool) -> None:
    import torch
    import transformers

    model_class = getattr(transformers, case["model"])
    config = model_class.config_class(**case["fields"])
    parts = (config, *(part for part in vars(config).values() if hasattr(part, "model_type")))
    for part in () if has_dropout else parts:
        for key in vars(part):
            if any(word in key for word in DROPOUT) and isinstance(getattr(part, key), float):
                setattr(part, key, 0.0)
    torch.manual_seed(5)
    model_class(config).save_pretrained(folder)
    processor = None
    if "processor" in case:
        name, fields = case["processor"]
        processor = getattr(transformers, name)(**fields)
        processor.save_pretrained(folder)
    if case["model"].startswith("Whisper"):
        transformers.WhisperProcessor(processor, _letters()).save_pretrained(folder)
    elif "--tokenizer_name_or_path" in case["arguments"]:  # else ranks may remove each other's vocabulary
        numbers = {letter: number for number, letter in enumerate(["[PAD]", "[UNK]", "|", *LETTERS])}
        (folder / "vocab.json").write_text(json.dumps(numbers), encoding="utf-8")
        words = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
        transformers.Wav2Vec2CTCTokenizer(folder / "vocab.json", **words).save_pretrained(folder)
    elif case.get("has_text", True):
        _make_tokenizer(folder)


def _letters() -> Any:
    """Return Whisper's tokenizer of single letters."""
    import transformers

    roles = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    numbers = {word: number for number, word in enumerate([*roles.values(), *LETTERS, "\u0120"])}
    return transformers.WhisperTokenizer(vocab=numbers, merges=[], **roles)


def _make_tokenizer(folder: Path) -> None:
    """Save one that knows the words of the samples and adds <s> and </s>."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    numbers = {word: number for number, word in enumerate(KNOWN)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B </s>",
        special_tokens=[(word, numbers[word]) for word in ("<s>", "</s>")],
    )
    roles = {
        "pad": "<pad>",
        "unk": "<unk>",
        "bos": "<s>",
        "eos": "</s>",
        "cls": "<s>",
        "sep": "</s>",
        "mask": "<mask>",
    }
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=64,
        **{f"{role}_token": word for role, word in roles.items()},
    ).save_pretrained(folder)


def _sentence(draw: random.Random, least: int = 3, most: int = 19) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))


def _write(here: Path, row: Callable[[int], dict[str, Any]], *, key: str = "") -> None:
    """Write train.json and validation.json, a sample a line, or a list of them under ``key``."""
    for name, numbers in (("train", range(TRAINED)), ("validation", range(TRAINED, TRAINED + HELD_OUT))):
        rows = [row(number) for number in numbers]
        text = json.dumps({key: rows}) if key else "\n".join(map(json.dumps, rows))
        (here / f"{name}.json").write_text(text, encoding="utf-8")


def _texts(here: Path, draw: random.Random) -> None:
    for name, count in (("train", TRAINED), ("validation", HELD_OUT)):
        text = "\n".join(_sentence(draw) for _ in range(count))
        (here / f"{name}.txt").write_text(text, encoding="utf-8")


def _pairs(here: Path, draw: random.Random) -> None:
    _write(
        here,
        lambda n: {
            "sentence1": _sentence(draw),
            "sentence2": _sentence(draw, 1, 7),
            "label": int(n % 4 == 1),
        },
    )


def _labelled(here: Path, draw: random.Random) -> None:
    _write(here, lambda n: {"sentence": _sentence(draw), "label": ("calm", "storm", "calm", "fog")[n % 4]})


def _questions(here: Path, draw: random.Random) -> None:
    def row(number: int) -> dict[str, Any]:
        before, answer, after = _sentence(draw, 2, 9), draw.choice(NAMES), _sentence(draw, 1, 9)
        return {
            "id": str(number),
            "question": f"what is the {draw.choice(WORDS)} ?",
            "context": f"{before} {answer} {after}",
            "answers": {"text": [answer], "answer_start": [len(before) + 1]},
        }

    _write(here, row, key="data")


def _tags(here: Path, draw: random.Random) -> None:
    def row(number: int) -> dict[str, Any]:
        tokens = [draw.choice(NAMES if draw.random() < 0.3 else WORDS) for _ in range(draw.randint(3, 15))]
        return {"tokens": tokens, "ner_tags": ["B-PLACE" if token in NAMES else "O" for token in tokens]}

    _write(here, row)


def _translations(here: Path, draw: random.Random) -> None:
    _write(here, lambda n: {"translation": {"en": _sentence(draw), "fr": _sentence(draw, 2, 8)}})


def _summaries(here: Path, draw: random.Random) -> None:
    _write(here, lambda n: {"text": _sentence(draw, 6, 30), "summary": _sentence(draw, 2, 6)})


def _endings(here: Path, draw: random.Random) -> None:
    def row(number: int) -> dict[str, Any]:
        endings = {f"ending{n}": _sentence(draw, 1, 7) for n in range(4)}
        return {
            "sent1": _sentence(draw),
            "sent2": _sentence(draw, 1, 3),
            "label": (3, 1, 3, 0)[number % 4],
            **endings,
        }

    _write(here, row)


SPLITS = (("train", TRAINED), ("validation", HELD_OUT))


def _images(here: Path, draw: random.Random) -> None:
    import numpy as np
    from PIL import Image

    numbers = np.random.default_rng(draw.randrange(2**31))
    for split, count in SPLITS:
        for number in range(count):
            folder = here / "pictures" / split / ("boat", "lake", "boat")[number % 3]
            folder.mkdir(parents=True, exist_ok=True)
            size = draw.randint(18, 31), draw.randint(18, 31), 3
            Image.fromarray(numbers.integers(0, 255, size, dtype=np.uint8)).save(folder / f"{number}.png")


def _captions(here: Path, draw: random.Random) -> None:
    _images(here, draw)
    files = [str(file) for split, _ in SPLITS for file in sorted((here / "pictures" / split).rglob("*.png"))]
    _write(here, lambda n: {"image_path": files[n], "caption": _sentence(draw)})


def _segments(here: Path, draw: random.Random) -> None:
    """Write images with a class a pixel, and the names of the classes where a download would be."""
    import numpy as np
    from PIL import Image

    numbers = np.random.default_rng(draw.randrange(2**31))
    for split, count in SPLITS:
        (folder := here / "segments" / split).mkdir(parents=True)
        rows = []
        for number in range(count):
            pixels = numbers.integers(0, 255, (draw.randint(34, 47), draw.randint(34, 47), 3), dtype=np.uint8)
            classes = np.where(pixels[..., 0] > 160, 2, pixels[..., 1] // 128).astype(np.uint8)
            rows.append({"image_file_name": f"{number}.png", "annotation_file_name": f"{number}_classes.png"})
            Image.fromarray(pixels).save(folder / rows[-1]["image_file_name"])
            Image.fromarray(classes).save(folder / rows[-1]["annotation_file_name"])
        (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    names = {"0": "sky", "1": "lake", "2": "boat"}
    (_in_cache(here, "datasets", "segments") / "id2label.json").write_text(
        json.dumps(names), encoding="utf-8"
    )


RATE = 2000
"""Samples a second of a sound."""


def _sound(file: Path, draw: random.Random, milliseconds: int) -> None:
    """Write a tone with noise."""
    pitch = draw.randint(60, 400)
    with wave.open(str(file), "wb") as out:
        out.setparams((1, 2, RATE, 0, "NONE", ""))
        for n in range(RATE * milliseconds // 1000):
            level = round(9000 * math.sin(2 * math.pi * pitch * n / RATE)) + draw.randint(-4000, 4000)
            out.writeframesraw(level.to_bytes(2, "little", signed=True))


def _sounds(here: Path, draw: random.Random) -> None:
    for split, count in SPLITS:
        for number in range(count):
            folder = here / "sounds" / split / ("gust", "wave", "gust")[number % 3]
            folder.mkdir(parents=True, exist_ok=True)
            # those of an evaluation are not cut to a length
            _sound(folder / f"{number}.wav", draw, draw.randint(400, 700) if split == "train" else 500)


def _speech(here: Path, draw: random.Random) -> None:
    for split, count in SPLITS:
        (folder := here / "speech" / split).mkdir(parents=True)
        rows = [{"file_name": f"{number}.wav", "text": _sentence(draw, 1, 3)} for number in range(count)]
        (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        for row in rows:
            _sound(folder / row["file_name"], draw, draw.randint(500, 900))


SAMPLES: Mapping[str, Callable[[Path, random.Random], None]] = {
    "captions": _captions,
    "endings": _endings,
    "images": _images,
    "labelled": _labelled,
    "pairs": _pairs,
    "questions": _questions,
    "segments": _segments,
    "sounds": _sounds,
    "speech": _speech,
    "summaries": _summaries,
    "tags": _tags,
    "texts": _texts,
    "translations": _translations,
}
