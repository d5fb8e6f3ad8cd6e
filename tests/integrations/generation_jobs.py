"""What each rank runs in the tests of generation; importable by the processes that run it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tests.integrations import adapter_jobs
from tests.integrations.engine_jobs import B, U, config_of, make_engine, said_of, steps
from tests.models import Built, build

VOCABULARY = 64
WHOLE_UNITS = ("qwen2_5_vl",)
"""Models whose mini-batches come as whole loss units: patches of images tell no samples apart."""

PAD = 0


def generating(name: str) -> Built:
    """Return a small model that generates, whose dropout is on in training."""
    if name == "qwen2_5_vl":
        from gpp_benchmarks.zoo._catalogue import CATALOGUE, build_model

        zoo = CATALOGUE[name]
        return build_model(zoo), lambda number, seed=0: zoo.batch(number, 12)
    if name != "bart":
        return build(name, layers=4 if name in ("gpt2", "llama") else 2, dropout=0.1)
    from transformers import BartConfig, BartForConditionalGeneration

    towers = {
        f"{tower}_{size}": number
        for tower in ("encoder", "decoder")
        for size, number in {"layers": 2, "attention_heads": 4, "ffn_dim": 64}.items()
    }
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "max_position_embeddings": 32, **towers}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = BartForConditionalGeneration(BartConfig(**sizes, dropout=0.1, forced_eos_token_id=None))
    return model.train(), build("t5")[1]


def prompts(name: str, number: int = 4) -> dict[str, Tensor]:
    """Return prompts of unequal length: decoders' are padded on the left."""
    batch = {k: v for k, v in generating(name)[1](number, 11).items() if k != "labels"}
    if name in ("gpt2", "llama"):
        mask = torch.arange(8) >= torch.tensor([0, 3, 1, 5, 2])[:number, None]
        batch |= {"attention_mask": mask.long(), "input_ids": batch["input_ids"] * mask}
    if name == "llava":
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    return batch


def engine_of(name: str, change: Callable[[Any], nn.Module] = lambda model: model, **changes: Any) -> Any:
    """Return an engine that has trained a small model for three steps.

    Args:
        change: makes of the model what is trained.
    """
    model, make_batch = generating(name)
    batch = make_batch(U if name in WHOLE_UNITS else B, 0)
    engine = make_engine(change(model), batch, config_of(**changes))
    train(engine, name, range(3))
    return engine


def train(engine: Any, name: str, seeds: Iterable[int]) -> list[float]:
    """Train for a step of each seed and return the losses."""
    make_batch = generating(name)[1]
    if engine.config.look_ahead == 1:  # takes a mini-batch more than it trains
        batches = iter([make_batch(B, seed) for seed in (*seeds, 0)])
        return [float(engine.train_batch(data_iter=batches)) for _ in seeds]
    if name not in WHOLE_UNITS:
        return steps(engine, [make_batch(B, seed) for seed in seeds])
    units = ([make_batch(U, 10 * seed + unit) for unit in range(B // U)] for seed in seeds)
    return [float(engine.train_batch(data_iter=iter(each))) for each in units]


ENDS = torch.arange(3, VOCABULARY, 3).tolist()
"""Many tokens end a sequence, so that prompts of small random models end early, and not together."""

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 4},
    "sampled": {"do_sample": True, "top_k": 12, "temperature": 1.5},
}


def ways(name: str) -> dict[str, dict[str, Any]]:
    common = {"max_new_tokens": 7, "pad_token_id": PAD, "eos_token_id": ENDS[4:7]}
    return {way: {**common, **own} for way, own in WAYS.items()}


def alone(
    name: str,
    state: dict[str, Tensor],
    number: int = 4,
    wanted: tuple[str, ...] = tuple(WAYS),
    change: Callable[[Any], nn.Module] = lambda model: model,
) -> dict[str, list[list[int]]]:
    """Return the tokens of one process with these weights."""
    model: Any = change(generating(name)[0]).eval()
    model.load_state_dict(state, strict=False)
    answers = {}
    for way in wanted:
        torch.manual_seed(5)
        answers[way] = model.generate(**prompts(name, number), **ways(name)[way]).tolist()
    return answers


def generate_ways(
    engine: Any, name: str, given: dict[str, Tensor] | None = None
) -> dict[str, list[list[int]]]:
    """Generate in all ways; ranks are seeded apart, since rank 0 decides."""
    found = {}
    for way, options in ways(name).items():
        torch.manual_seed(5 + engine.global_rank)
        found[way] = engine.generate(**copy.deepcopy(given or prompts(name)), **options).tolist()
    return found


def generate_all(
    names: tuple[str, ...], block: dict[str, Any], refuses: bool = False, micro_batches: tuple[Any, ...] = ()
) -> dict[str, Any]:
    """Train each model for three steps, and generate in all ways; on rank 0 also in one process.

    Args:
        micro_batches: generate once more in so many parts, each.
    """
    answers: dict[str, Any] = {}
    for name in names:
        engine = engine_of(name, block=block)
        state = engine.gather_state_dict()
        expected = alone(name, state) if engine.global_rank == 0 else {}
        found = generate_ways(engine, name)
        report = engine.cache_report()
        for number in micro_batches:
            answers[f"{name} in {number}"] = in_micro_batches(engine, name, number) | {"expected": expected}
        answers[name] = {
            "found": found,
            "expected": expected,
            "report": report,
            "refused": refuse(engine, generating(name)[0]) if refuses else {},
            "streamed": stream(engine, name) if refuses else [],
            "after": train(engine, name, [9]),
        }
        engine.destroy()
    return answers


def in_micro_batches(engine: Any, name: str, number: Any) -> dict[str, Any]:
    """Generate in all ways, in parts of the prompts; and from prompts of which one fails in its module."""
    set_generation(engine, micro_batches=number)
    given = prompts(name)
    found, report = generate_ways(engine, name), engine.cache_report()
    given["input_ids"][3, -1] = 10**6  # no such token: the rank of the embedding fails in one part
    said = said_of(lambda: engine.generate(**given, **ways(name)["greedy"]))
    set_generation(engine, micro_batches=1)
    return {"found": found, "report": report, "said": said}


def set_generation(engine: Any, **settings: Any) -> None:
    """Change the settings of a generator that is there already: a second engine costs more than the test."""
    generator = engine._generator
    generator._config = generator._config.model_copy(update=settings)


def with_adapters(model: Any) -> nn.Module:
    """Return it with LoRA whose matrices are random."""
    with torch.random.fork_rng(devices=[]):
        return adapter_jobs.with_lora(model)


def with_frozen_tower(model: Any) -> nn.Module:
    """Return a LLaVA whose vision tower trains nothing."""
    model.model.vision_tower.requires_grad_(False)
    return model


SETTINGS: dict[str, tuple[int, str, Callable[[Any], nn.Module], dict[str, Any]]] = {
    "zero 1": (4, "llama", lambda m: m, {"zero_optimization": {"stage": 1}, "block": {"stages": 2, "data_parallel": 2}}),
    "zero 2": (4, "gpt2", lambda m: m, {"zero_optimization": {"stage": 2}, "block": {"stages": 2, "data_parallel": 2}}),
    "bf16": (2, "llama", lambda m: m.bfloat16(), {"bf16": {"enabled": True}, "block": {"stages": 2}}),
    "mode async": (2, "llama", lambda m: m, {"block": {"stages": 2, "mode": "async"}}),
    "look-ahead": (2, "llava", with_frozen_tower, {"block": {"stages": 2, "look_ahead": 1}}),
    "eager leaves": (2, "llama", lambda m: m, {"block": {"stages": 2, "eager": ["model.layers.1.mlp"]}}),
    "adapters": (2, "llama", with_adapters, {"block": {"stages": 2}}),
    "zero 3": (2, "llama", lambda m: m, {"zero_optimization": {"stage": 3}, "block": {"stages": 1, "data_parallel": 2}}),
    "tensor ranks": (2, "llama", lambda m: m, {"block": {"stages": 1, "data_parallel": 1, "tensor_parallel": 2}}),
    "tensor ranks, zero 3": (4, "llama", lambda m: m, {
        "zero_optimization": {"stage": 3}, "block": {"stages": 1, "data_parallel": 2, "tensor_parallel": 2}}),
    "tensor ranks of two stages": (4, "t5", lambda m: m, {"block": {
        "stages": 2, "data_parallel": 1, "tensor_parallel": 2, "generate": {"micro_batches": 2}}}),
    "tensor ranks of one stage of two": (3, "gpt2", lambda m: m, {"block": {
        "stages": 2, "data_parallel": 1, "tensor_parallel": {"transformer.wte": 2, "transformer.h.0": 2, "transformer.h.1": 2}}}),
    "tensor ranks share caches": (2, "llama", lambda m: m, {"block": {
        "stages": 1, "data_parallel": 1, "tensor_parallel": 2, "generate": {"cache": "sequence", "block": 2}}}),
    "parts and a stage of its own": (2, "t5", lambda m: m, {"block": {"stages": 4, "generate": {"micro_batches": 4}}}),
}  # fmt: skip
"""By name: ranks, a model, what is made of it, and what is configured."""


def generate_in_setting(setting: str, directory: str | None = None) -> dict[str, Any]:
    """Train in a setting, and generate in all ways; on rank 0 also in one process.

    Args:
        directory: compare the steps that follow with those from a checkpoint of before the generation.
    """
    _, name, change, changes = SETTINGS[setting]
    engine = engine_of(name, change, **copy.deepcopy(changes))
    if directory is not None:
        engine.save_checkpoint(directory)
    found = generate_ways(engine, name)
    report, state = engine.cache_report(), engine.gather_state_dict()
    expected = alone(name, state, change=change) if engine.global_rank == 0 else {}
    # a seed of its own: the same one twice, and nothing drawn in between, would go unnoticed
    seed = 1000 * list(SETTINGS).index(setting) + engine.global_rank
    torch.manual_seed(seed)
    after = without = train(engine, name, [9, 10])
    if directory is not None:
        engine.load_checkpoint(directory)
        torch.manual_seed(seed)
        without = train(engine, name, [9, 10])
    engine.destroy()
    answer = {"found": found, "expected": expected, "report": report, "after": after, "without": without}
    return {setting: answer}


class Kept:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        self.tokens += value.reshape(-1).tolist()

    def end(self) -> None:
        self.tokens.append(-1)


def stream(engine: Any, name: str) -> list[int]:
    """Return what is streamed on this rank, of a prompt of which rank 0 alone asks for it."""
    streamer = Kept() if engine.global_rank == 0 else None
    found = engine.generate(**prompts(name, 1), **ways(name)["greedy"], streamer=streamer)
    assert streamer is None or streamer.tokens == [*found.reshape(-1).tolist(), -1]
    return found.tolist()


def refuse(engine: Any, model: nn.Module) -> dict[str, str]:
    """Return what is said to wrong calls; the engine goes on after each of them."""
    rank, given = engine.global_rank, prompts("gpt2")
    other = {**given, "input_ids": given["input_ids"] + rank}
    long = {name: value.repeat(1, 4) for name, value in given.items()}
    calls: dict[str, dict[str, Any]] = {
        "prompts": {**other, "max_new_tokens": 2},
        "arguments": {**given, "max_new_tokens": 2 + rank},
        "assisted": {**given, "assistant_model": model},
        "lookup": {**given, "prompt_lookup_num_tokens": 3},
        "static": {**given, "cache_implementation": "static"},
        "clock": {**given, "max_time": 1.0},
        "nothing": {"max_new_tokens": 2},
        "unknown": {**given, "max_new_tokns": 2},
        "too long": {**long, "max_new_tokens": 2},  # the table of positions ends: on the rank that holds it
    }
    return {name: said_of(functools.partial(engine.generate, **given)) for name, given in calls.items()}


def share_prompts(name: str, cases: tuple[tuple[int, str], ...], are_cut: bool = True) -> dict[str, Any]:
    """Stages of two data-parallel ranks share the prompts; where these have no room, they share the caches.

    Args:
        cases: how many prompts, and how to generate from them.
        are_cut: do each again with one byte less room than whole caches take: "auto" cuts them then.
    """
    answers: dict[str, Any] = {}
    engine = engine_of(name, block={"stages": 2, "data_parallel": 2, "generate": {"block": 2}})
    state = engine.gather_state_dict()

    def generate(number: int, way: str, free_bytes: int | None = None) -> dict[str, Any]:
        if engine._generator is not None:
            engine._generator._free_bytes = lambda: free_bytes
        torch.manual_seed(5 + engine.global_rank)
        tokens = engine.generate(**prompts(name, number), **ways(name)[way]).tolist()
        return {"found": {way: tokens}, "report": engine.cache_report()}

    for number, way in cases:
        expected = {"expected": alone(name, state, number, (way,)) if engine.global_rank == 0 else {}}
        whole = generate(number, way)
        answers[f"data {number} {way}"] = whole | expected
        if are_cut:
            room = max(each.counted_bytes for each in whole["report"].ranks) - 1
            answers[f"sequence {number} {way}"] = generate(number, way, room) | expected
            if number > 1:
                set_generation(engine, micro_batches=2)
                answers[f"data {number} {way} in 2"] = generate(number, way) | expected
                set_generation(engine, micro_batches=1)
    said = said_of(lambda: generate(*cases[-1], 100))
    answers["no room"] = {"found": {}, "expected": {}, "report": whole["report"], "said": said}
    engine.destroy()
    return answers


def break_down(module: nn.Module) -> None:
    """Let a module fail on tensors, and not on shapes."""
    works = module.forward

    def forward(hidden: Tensor) -> Tensor:
        if type(hidden) is Tensor:
            raise ValueError("this layer is broken")
        return works(hidden)

    module.forward = forward  # type: ignore[method-assign]


def fail_on_one_rank(rank: int, block: dict[str, Any], name: str) -> tuple[str, str]:
    """Return what is said to a generation in which a module of the last stage fails on a rank, and who failed first."""
    from gpp_plugin.runtime.ranks.job_board import job_board

    models: list[Any] = []
    engine = engine_of(
        "llama",
        lambda model: models.append(model) or model,  # type: ignore[func-returns-value]
        block={"stages": 2, **block},
    )
    if engine.global_rank == rank and name == "hook":  # around the whole model, before any tensor
        models[0].register_forward_pre_hook(lambda module, args: fail_here())
    elif engine.global_rank == rank and name != "streamer":
        break_down(models[0].get_submodule(name))
    given = {"streamer": BrokenStreamer()} if name == "streamer" else {}
    asked = prompts("llama", 1 if given else 4)
    said = said_of(lambda: engine.generate(**asked, **ways("llama")["greedy"], **given))
    board = job_board()
    assert board is not None
    if board.first is None:
        said += f"; then {train(engine, 'llama', [9])[0] > 0}"
    return said, str(board.first)


def fail_here() -> None:
    raise ValueError("this layer is broken")


class BrokenStreamer(Kept):
    """A streamer that fails before any rank has computed something."""

    def put(self, value: Tensor) -> None:
        raise ValueError("this layer is broken")


def predict(directory: str, block: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train T5 for two steps with Seq2SeqTrainer, evaluate and predict by generating.

    Args:
        block: of stages; None: in one process.
    """
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    from gpp_plugin import GraphPipelineSeq2SeqTrainer

    is_alone = block is None
    model, make_batch = build("t5")
    whole = make_batch(16, 0)
    whole["labels"] = whole["labels"].clamp_min(PAD)
    rows = [{key: value[at] for key, value in whole.items()} for at in range(16)]
    args = Seq2SeqTrainingArguments(
        output_dir=directory, per_device_train_batch_size=4, max_steps=2, report_to="none",
        gradient_accumulation_steps=2 if is_alone else 1,
        disable_tqdm=True, use_cpu=True, save_strategy="no", logging_steps=100, learning_rate=4e-3,
        per_device_eval_batch_size=3, predict_with_generate=True, generation_max_length=9, generation_num_beams=2,
        dataloader_pin_memory=False,
    )  # fmt: skip

    def count(prediction: Any) -> dict[str, float]:
        return {
            "sum": float(prediction.predictions.sum()),
            "right": float((prediction.predictions[:, 1:7] == prediction.label_ids[:, :6]).sum()),
        }

    common = {"train_dataset": rows, "eval_dataset": rows[:7], "compute_metrics": count}
    if is_alone:
        trainer: Any = Seq2SeqTrainer(model, args, **common)
    else:
        config = config_of(block=block)
        trainer = GraphPipelineSeq2SeqTrainer(
            model, args, config={"graph_pipeline": config["graph_pipeline"]}, **common
        )
    trainer.train()
    metrics = trainer.evaluate()
    found = trainer.predict(rows[7:12], num_beams=3)
    if not is_alone:
        trainer.engine.destroy()
    keys = ("eval_loss", "eval_sum", "eval_right")
    return {"metrics": [metrics[key] for key in keys], "predictions": found.predictions.tolist()}
