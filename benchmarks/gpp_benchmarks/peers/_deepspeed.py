"""What DeepSpeed's unit tests of pipelines, schedules, configurations and gradient accumulation ask of an engine."""

from __future__ import annotations

import functools
import itertools
import json
import operator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_benchmarks.peers._scenario import (
    DIFFERS,
    REFUSED,
    SAME,
    Seen,
    Side,
    raised_by,
    scenario,
    shown_elsewhere,
)
from gpp_benchmarks.peers._stack import (
    CONFIG,
    MICRO,
    OUT,
    WIDTH,
    Stack,
    losses_and_weights,
    mean_square,
    pair,
    pairs,
    stack,
    start,
    trained,
    weights,
)

# ---- pipe ------------------------------------------------------------------------------------------------------


@scenario("pipe", "losses and gradients are those of the layers in one process")
def losses(side: Side) -> Seen:
    return losses_and_weights(side, start(side))


@scenario("pipe", "gradients of accumulated micro-batches are scaled once")
def scaled_once(side: Side) -> Seen:
    layers = [nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)]
    for layer in layers:
        nn.init.ones_(layer.weight)
    ones = torch.ones(MICRO, 1), torch.zeros(MICRO, 1)
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_allow_untested_optimizer": True}
    engine = start(side, sgd, layers=layers, sample=ones)
    engine.set_dataiterator(itertools.repeat(ones))
    return {"loss": float(engine.train_batch()), "weights": weights(engine)}


class _Words(nn.Embedding):
    """An embedding with the same weights wherever it is made: a `TiedLayerSpec` makes its own."""

    def __init__(self) -> None:
        super().__init__(9, WIDTH)
        with torch.no_grad():
            self.weight.copy_(torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(4)))


class _Head(nn.Module):
    """Logits by the weight of an embedding."""

    def __init__(self, embed: nn.Embedding) -> None:
        super().__init__()
        self.embed = embed

    def forward(self, x: Tensor) -> Tensor:
        """Return a logit a word."""
        return nn.functional.linear(x, self.embed.weight)


def _of_words(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def _tied_engine(side: Side, batches: list[Any]) -> Any:
    body = stack()[0]
    layers: list[Any]
    if side.is_peer:
        from deepspeed.pipe import TiedLayerSpec

        def head(embed: nn.Embedding, x: Tensor) -> Tensor:
            return nn.functional.linear(x, embed.weight)

        layers = [TiedLayerSpec("embed", _Words), body, TiedLayerSpec("embed", _Words, forward_fn=head)]
    else:
        embed = _Words()
        layers = [embed, body, _Head(embed)]
    return start(side, layers=layers, loss=_of_words, sample=batches[0])


@scenario("pipe", "a layer tied between the first and the last stage, and its checkpoint")
def tied(side: Side) -> Seen:
    generator = torch.Generator().manual_seed(1)
    words = [torch.randint(0, 9, (MICRO, 4), generator=generator) for _ in range(12)]
    batches = list(zip(words, reversed(words), strict=True))
    engine = _tied_engine(side, batches)
    found = trained(engine, iter(batches), 4)
    engine.save_checkpoint(str(side.own))
    further = trained(engine, iter(batches[8:]), 2)
    other = _tied_engine(side, batches)
    other.load_checkpoint(str(side.own))
    return {"losses": found, "further": further, "again": trained(other, iter(batches[8:]), 2)}


@scenario("pipe", "stages with data-parallel ranks", ranks=4)
def data_parallel(side: Side) -> Seen:
    engine = start(side, {"train_batch_size": 4 * MICRO})
    return {"losses": trained(engine, pairs(side=side, degree=2)), "weights": weights(engine)}


@scenario("pipe", "the same with ZeRO 1", ranks=4)
def data_parallel_zero_1(side: Side) -> Seen:
    engine = start(side, {"train_batch_size": 4 * MICRO, "zero_optimization": {"stage": 1}})
    return {"losses": trained(engine, pairs(side=side, degree=2)), "weights": weights(engine)}


@scenario("pipe", "ZeRO 2 and 3 with a pipeline", here=DIFFERS, why="they train; DeepSpeed refuses them")
def zero_2_and_3(side: Side) -> Seen:
    def train(stage: int) -> None:
        trained(start(side, {"zero_optimization": {"stage": stage}}), pairs())

    return {f"stage {stage}": raised_by(functools.partial(train, stage)) for stage in (2, 3)}


@scenario("pipe", "activations recomputed in every layer")
def recomputed(side: Side) -> Seen:
    engine = start(side, block={"memory": {"recompute": "full"}}, pipe={"activation_checkpoint_interval": 1})
    return losses_and_weights(side, engine)


@scenario("pipe", "inputs of another shape in each step")
def dynamic_shapes(side: Side) -> Seen:
    def words() -> Any:
        for index in range(6):
            generator = torch.Generator().manual_seed(index)
            shape = (MICRO, (4, 8, 6)[index // 2])
            yield (
                torch.randn(*shape, WIDTH, generator=generator),
                torch.randn(*shape, OUT, generator=generator),
            )

    engine = start(side, sample=next(iter(words())), pipe={"dynamic_shape": True})
    return {"losses": trained(engine, words())}


@scenario("pipe", "layers cut by their class")
def cut_by_class(side: Side) -> Seen:
    return losses_and_weights(side, start(side, pipe={"partition_method": "type:Linear"}))


@scenario(
    "pipe",
    "a `PipelineModule` as the model",
    here=REFUSED,
    why="it is cut already: pass the plain model",
)
def pipeline_module(side: Side) -> Seen:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    model = PipelineModule(layers=stack(), num_stages=2, loss_fn=nn.functional.mse_loss)
    config = CONFIG if side.is_peer else {**CONFIG, "graph_pipeline": {"stages": 2}}
    side.keep(deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0])
    return {}


@scenario(
    "pipe", "grids of ranks (`grid`)", here=REFUSED, why="stages may have unlike degrees: `engine.plan`"
)
def grid(side: Side) -> Seen:
    return {"stage": start(side).grid.get_stage_id()}


@scenario("pipe", "`forward`, `backward` and `step` by hand are refused")
def by_hand(side: Side) -> Seen:
    engine = start(side)
    calls = (lambda: engine.forward(pair(0)[0]), lambda: engine.backward(torch.ones(())), engine.step)
    return {str(number): raised_by(call) for number, call in enumerate(calls)}


@scenario("pipe", "a dataset of tuples, which the engine loads")
def own_loader(side: Side) -> Seen:
    x, y = pair(5, size=2 * MICRO)
    # one mini-batch a round, so that the order of samples does not matter
    engine = start(side, training_data=list(zip(x, y, strict=True)))
    return {"losses": [float(engine.train_batch()) for _ in range(2)], "weights": weights(engine)}


@scenario("pipe", "a dataset of tuples that `set_batch_fn` puts in order")
def batch_fn(side: Side) -> Seen:
    x, y = pair(5, size=2 * MICRO)
    data = [(0, label, row) for row, label in zip(x, y, strict=True)]
    engine = start(side, training_data=data)
    engine.set_batch_fn(lambda batch: (batch[2], batch[1]))
    return {"losses": [float(engine.train_batch()) for _ in range(2)]}


@scenario("pipe", "`set_dataloader` in place of training data")
def loader(side: Side) -> Seen:
    engine = start(side)
    engine.set_dataloader([pair(index) for index in range(8)])
    return {"losses": [float(engine.train_batch()) for _ in range(3)]}


@scenario(
    "pipe",
    "each data-parallel rank reads other samples",
    here=REFUSED,
    why="all ranks get one stream, and take their rows",
)
def own_samples(side: Side) -> Seen:
    engine = start(side, {"train_batch_size": 2 * MICRO}, stages=1)
    return {"losses": trained(engine, itertools.cycle([pair(dist.get_rank())]))}


@scenario("pipe", "the engine is an `nn.Module` with parameters and state")
def module(side: Side) -> Seen:
    engine = start(side)
    state = engine.module.state_dict()
    return {
        "is module": isinstance(engine, nn.Module),
        "parameters": sum(parameter.numel() for parameter in engine.parameters()) > 0,
        "tensors": all(torch.is_tensor(value) for value in state.values()),
        "in another module": "engine" in dict(nn.ModuleDict({"engine": engine}).named_children()),
    }


@scenario("pipe", "which rank has the first stage, which the last; the numbers of steps")
def positions(side: Side) -> Seen:
    engine = start(side)
    trained(engine, pairs(), 2)
    names = ("is_first_stage", "is_last_stage")
    own: list[Any] = [[bool(getattr(engine, name)()) for name in names]]
    every: list[Any] = [None, None]
    dist.all_gather_object(every, own)
    counts = ("global_steps", "global_samples", "micro_batches", "num_stages", "micro_batch_size")
    return {"ends": every, **{name: int(getattr(engine, name)) for name in counts}}


@scenario("pipe", "one rank holds the first and the last stage (DualPipeV)")
def dual_pipe_v(side: Side) -> Seen:
    layers = [layer for seed in range(4) for layer in stack(seed)[:2]]
    if side.is_peer:
        import deepspeed
        from deepspeed.pipe import DualPipeVModule

        own: Any = DualPipeVModule(
            layers=layers, num_stages=2, loss_fn=mean_square, partition_method="uniform"
        )
        config = {**CONFIG, "train_batch_size": 5 * MICRO}
        engine = side.keep(
            deepspeed.initialize(model=own, config=config, model_parameters=own.parameters())[0]
        )
    else:
        stages = [
            {"modules": [f"layers.{2 * index}"], "ranks": [rank]} for index, rank in enumerate((0, 1, 1, 0))
        ]
        engine = start(
            side, {"train_batch_size": 5 * MICRO}, layers=layers, loss=mean_square, sample=_square(0),
            block={"stages": "auto", "plan": {"stages": stages}},
        )  # fmt: skip
    return {"losses": [float(engine.train_batch(map(_square, itertools.count()))) for _ in range(2)]}


def _square(index: int) -> tuple[Tensor, Tensor]:
    return pair(index)[0], pair(index + 50)[0]


# ---- schedules -------------------------------------------------------------------------------------------------


@scenario(
    "schedules",
    "the order of forwards and backwards of each stage, 1F1B",
    here=DIFFERS,
    why="the plan says how many micro-batches are in flight: one more hides messages",
)
def order(side: Side) -> Seen:
    engine = start(
        side, {"train_batch_size": 4 * MICRO}, block={"schedule": "1f1b", "micro_batch_sizes": MICRO}
    )
    if side.is_peer:
        from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, TrainSchedule

        letters = {ForwardPass: "F", BackwardPass: "B"}
        schedules = [TrainSchedule(micro_batches=4, stages=2, stage_id=stage).steps() for stage in (0, 1)]
        return {
            "order": [
                "".join(letters.get(type(command), "") for commands in steps for command in commands)
                for steps in schedules
            ]
        }
    engine.record_timelines = True
    trained(engine, pairs(), 1)
    timeline = engine.last_timeline  # of all ranks, on rank 0
    found = []
    for rank in (0, 1) if timeline is not None else ():
        events = [event for event in timeline.events if event.rank == rank and event.task is not None]
        events.sort(key=operator.attrgetter("start_us"))
        found.append("".join(event.kind.value[0].upper() for event in events))
    return {"order": found}


@scenario("schedules", "`eval_batch` returns the loss, and training goes on")
def eval_batch(side: Side) -> Seen:
    engine = start(side)
    before = trained(engine, pairs(), 1)
    batches = (
        pairs(20) if side.is_peer else iter([tuple(map(torch.cat, zip(pair(20), pair(21), strict=True)))])
    )
    found = float(engine.eval_batch(batches))
    return {"losses": [*before, *trained(engine, pairs(2), 2)], "evaluated": found}


@scenario("schedules", "`eval_batch` of `num_micro_batches`")
def eval_several(side: Side) -> Seen:
    engine = start(side)
    return {"evaluated": float(engine.eval_batch(pairs(20), num_micro_batches=3))}


@scenario(
    "schedules",
    "outputs of an evaluation on the last stage",
    here=DIFFERS,
    why="they are returned on every rank, samples in order",
)
def eval_outputs(side: Side) -> Seen:
    engine = start(side)
    if side.is_peer:
        _, logits = engine.eval_batch(pairs(20), return_logits=True)
    else:
        _, logits = engine.eval_batch(iter([pair(20)]), return_logits=True)
    every: list[Any] = [None, None]
    dist.all_gather_object(every, logits is not None)
    return {"on ranks": every}


WARM_UPS: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_max_lr": 0.02, "warmup_num_steps": 4, "warmup_type": "linear"},
    "WarmupDecayLR": {"total_num_steps": 9, "warmup_max_lr": 0.02, "warmup_num_steps": 4},
    "WarmupCosineLR": {"total_num_steps": 9, "warmup_num_steps": 3},
}
CYCLES: dict[str, dict[str, Any]] = {
    "OneCycle": {"cycle_first_step_size": 2, "cycle_second_step_size": 3, "cycle_min_lr": 1e-3, "cycle_max_lr": 2e-2,
                 "decay_step_size": 2, "decay_lr_rate": 0.5, "cycle_min_mom": 0.85, "cycle_max_mom": 0.99},
    "LRRangeTest": {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 2.0},
}  # fmt: skip


def _rates(side: Side, schedulers: dict[str, dict[str, Any]]) -> Seen:
    seen: Seen = {}
    for name, params in schedulers.items():
        engine = start(side, {"scheduler": {"type": name, "params": params}})
        rates, batches = [], pairs()
        for _ in range(7):
            rates.append(float(engine.get_lr()[0]))
            engine.train_batch(batches)
        seen[name] = {"rates": rates, "weights": weights(engine)}
    return seen


@scenario("schedules", "learning rates that warm up: linear, decayed, cosine")
def warm_ups(side: Side) -> Seen:
    return _rates(side, WARM_UPS)


@scenario("schedules", "learning rates in cycles, with momentum, and range tests")
def cycles(side: Side) -> Seen:
    return _rates(side, CYCLES)


@scenario("schedules", "an optimizer and a scheduler that functions return")
def callables(side: Side) -> Seen:
    engine = start(
        side,
        {"optimizer": None},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1),
    )
    rates = []
    batches = pairs()
    for _ in range(5):
        engine.train_batch(batches)
        rates.append(float(engine.get_lr()[0]))
    return {"rates": rates, "weights": weights(engine)}


# ---- accumulation ----------------------------------------------------------------------------------------------


@scenario(
    "accumulation",
    "clipping over micro-batches",
    here=DIFFERS,
    why="by the norm of all stages, as in one process; DeepSpeed's is of the first stage",
)
def clipping(side: Side) -> Seen:
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_allow_untested_optimizer": True}
    engine = start(side, {**sgd, "gradient_clipping": 0.05})
    return losses_and_weights(side, engine)


@scenario(
    "accumulation",
    "no `gradient_clipping` in the JSON",
    here=DIFFERS,
    why="nothing is clipped, as in one process; DeepSpeed clips to 1.0",
)
def no_clipping(side: Side) -> Seen:
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_allow_untested_optimizer": True}
    layers = stack()
    with torch.no_grad():
        for parameter in layers[-1].parameters():
            parameter.mul_(30)
    return losses_and_weights(side, start(side, {**sgd, "gradient_clipping": None}, layers=layers))


@scenario("accumulation", "`set_train_batch_size`")
def batch_size(side: Side) -> Seen:
    engine = start(side)
    batches = pairs()
    before = trained(engine, batches, 1)
    engine.set_train_batch_size(3 * MICRO)
    after = trained(engine, batches, 2)
    return {"losses": before + after, "sizes": [engine.train_batch_size(), engine.micro_batches]}


@scenario("accumulation", "batch sizes that follow from two of three keys")
def batch_sizes(side: Side) -> Seen:
    sizes: dict[str, dict[str, Any]] = {
        "all": {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
        "whole and steps": {"train_micro_batch_size_per_gpu": None, "gradient_accumulation_steps": 2},
        "whole": {"train_micro_batch_size_per_gpu": None},
    }
    seen: Seen = {}
    for name, changes in sizes.items():
        engine = start(side, changes, sample=pair(0, size=12))
        seen[name] = [engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()]
    return seen


@scenario(
    "accumulation",
    "a mini-batch that follows from micro-batches and steps",
    here=REFUSED,
    why="stages may have unlike degrees: give `train_batch_size`",
)
def no_batch_size(side: Side) -> Seen:
    engine = start(
        side, {"train_batch_size": None, "gradient_accumulation_steps": 3}, sample=pair(0, size=12)
    )
    return {"size": engine.train_batch_size()}


@scenario("accumulation", "batch sizes that do not divide are refused")
def wrong_sizes(side: Side) -> Seen:
    wrong = {"train_batch_size": 33, "train_micro_batch_size_per_gpu": 17, "gradient_accumulation_steps": 2}
    return {"start": raised_by(lambda: start(side, wrong))}


@scenario("accumulation", "the configuration as a path, and none at all")
def config_files(side: Side) -> Seen:
    import deepspeed

    path = side.own.with_suffix(".json")
    block = {} if side.is_peer else {"graph_pipeline": {"stages": 2, "verify": False}}
    path.write_text(json.dumps({**CONFIG, **block}))
    dist.barrier()
    model: Any
    if side.is_peer:
        from deepspeed.pipe import PipelineModule

        model = PipelineModule(layers=stack(), num_stages=2, loss_fn=mean_square)
        more: dict[str, Any] = {"model_parameters": list(model.parameters())}
    else:
        import gpp_plugin

        model, more = gpp_plugin.GraphPipelineModule(Stack(stack(), mean_square), sample_batch=pair(0)), {}
    engine = side.keep(deepspeed.initialize(model=model, config=str(path), **more)[0])
    return {"losses": trained(engine, pairs()), "none": raised_by(lambda: deepspeed.initialize(model=model))}


@scenario(
    "accumulation",
    "`no_sync`, and boundaries set by hand",
    here=REFUSED,
    why="a step is a `train_batch`",
)
def boundaries(side: Side) -> Seen:
    engine = start(side)

    def alone() -> None:
        with engine.no_sync():
            pass

    return {
        "no_sync": raised_by(alone),
        "boundary": raised_by(lambda: engine.set_gradient_accumulation_boundary(True)),
    }


@scenario("accumulation", "1-bit and 0/1 optimizers are refused")
def one_bit(side: Side) -> Seen:
    def begin(name: str) -> None:
        start(side, {"optimizer": {"type": name, "params": {"lr": 1e-3}}})

    names = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")
    return {name: raised_by(functools.partial(begin, name)) for name in names}


@scenario("accumulation", "optimizers of the JSON: Adam, AdamW, SGD")
def optimizers(side: Side) -> Seen:
    seen: Seen = {}
    for name, params in {
        "Adam": {"lr": 1e-2, "torch_adam": True, "adam_w_mode": False, "weight_decay": 0.1},
        "AdamW": {"lr": 1e-2, "torch_adam": True, "betas": [0.8, 0.9], "eps": 1e-6},
        "SGD": {"lr": 1e-1, "momentum": 0.9, "nesterov": True},
    }.items():
        config = {"optimizer": {"type": name, "params": params}, "zero_allow_untested_optimizer": True}
        seen[name] = losses_and_weights(side, start(side, config))
    return seen


@scenario("accumulation", "bf16 with fp32 masters", most=2e-2)
def bfloat16(side: Side) -> Seen:
    engine = start(side, {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}})
    batches = pairs()
    if side.is_peer:
        batches = ((x.bfloat16(), y.bfloat16()) for x, y in batches)
    return {"losses": trained(engine, batches), "weights": weights(engine)}


@scenario("accumulation", "fp16 on a device that does not compute it is refused")
def half_precision(side: Side) -> Seen:
    return {"start": raised_by(lambda: start(side, {"fp16": {"enabled": True}}))}


shown_elsewhere(
    "accumulation",
    "an fp16 overflow skips the step; the scale sinks",
    here=SAME,
    test="integrations/test_stage_engine.py::test_overflow_on_one_stage_skips_all",
)


@scenario("accumulation", "losses and learning rates in a CSV monitor")
def monitor(side: Side) -> Seen:
    csv = {"enabled": True, "output_path": str(side.own), "job_name": "job"}
    engine = start(side, {"csv_monitor": csv, "steps_per_print": 1})
    trained(engine, pairs())
    dist.barrier()
    names = sorted(path.stem for path in (side.own / "job").glob("*.csv"))
    return {"has": {name: name in names for name in ("Train_Samples_train_loss", "Train_Samples_lr")}}
