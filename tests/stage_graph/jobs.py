"""What each rank runs in the tests of stage graphs; importable by the processes that run it."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import gpp_plugin
from gpp_plugin.errors import GppError
from tests.integrations import engine_jobs
from tests.integrations.engine_jobs import steps
from tests.stage_graph.graphs import WIDTH, Once, U, batch_of, build_graph, mini_batch_of


class SumHooks:
    """An optimizer side that sums gradients and steps nothing."""

    loss_scale = 1.0

    def __init__(self, module: torch.nn.Module, plan: Any, tied: dict[str, tuple[int, ...]]) -> None:
        self.module, self.plan, self.tied = module, plan, tied
        self.rank = dist.get_rank()
        self.stage = plan.stage_of_rank(self.rank)
        groups = [
            [dist.new_group(list(stage.data_ranks(t))) for t in range(stage.tensor)] for stage in plan.stages
        ]
        self.data = groups[self.stage][plan.stages[self.stage].position(self.rank)[1]]
        self.shared = {
            name: dist.new_group(sorted(r for s in stages for r in plan.stages[s].ranks))
            for name, stages in tied.items()
        }
        parameters = dict(module.named_parameters())
        for name, stages in tied.items():  # as the stage engine does: the first stage's value
            if self.stage in stages:
                source = plan.stages[stages[0]].ranks[0]
                dist.broadcast(parameters[name].data, src=source, group=self.shared[name])

    def accumulate(self) -> None:
        pass

    def reduce_data(self) -> None:
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=self.data)

    def reduce_tied(self) -> None:
        parameters = dict(self.module.named_parameters())
        for name, stages in self.tied.items():
            if self.stage in stages:
                gradient = parameters[name].grad
                if self.plan.stages[self.stage].ranks[0] != self.rank:
                    gradient.zero_()
                dist.all_reduce(gradient, group=self.shared[name])

    def step(self) -> None:
        pass


def train_in_double(names: list[str], blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run the first mini-batch of each graph and return loss and gradients, as they are in double precision."""
    return [
        run_in_double(build_graph(name), batch_of(name), mini_batch_of(name), block)
        for name, block in zip(names, blocks, strict=True)
    ]


def run_in_double(
    graph: Any, batch: dict[str, Tensor], mini_batch: int, block: dict[str, Any], *, count: bool = False
) -> dict[str, Any]:
    from gpp_plugin.config.block import GraphPipelineConfig
    from gpp_plugin.config.reader import BatchSizes
    from gpp_plugin.model.model_source import ModelSource
    from gpp_plugin.model.preparation import Setting
    from gpp_plugin.plan.costs.memory_formula import differences
    from gpp_plugin.runtime.messages.transport import make_transport
    from gpp_plugin.runtime.rank_programs import channels_of, make_programs, tied_stages
    from gpp_plugin.runtime.rank_runner import RankRunner
    from gpp_plugin.runtime.ranks.placement_of_ranks import JobPlacement
    from gpp_plugin.runtime.stage_runner import RunnerContext
    from gpp_plugin.schedule.program_sets import RankPrograms

    rank, device = dist.get_rank(), torch.device("cpu")
    setting = Setting(
        rank=rank,
        num_ranks=dist.get_world_size(),
        device=device,
        dtype=torch.float64,
        sizes=BatchSizes(mini_batch, U, None),
        zero_stage=0,
        optimizer_bytes=8.0,
        group=dist.new_group(backend="gloo"),
        placement=JobPlacement.on_one_host(dist.get_world_size(), rank=dist.get_rank()),
    )
    config = GraphPipelineConfig(**block)
    source = ModelSource(graph, config=config, setting=setting)
    reference, plan = source.prepare_plan(batch)
    programs = make_programs(plan, reference)
    transport = make_transport(device=device, channels=channels_of(programs), timeout_s=60.0)
    program = next(program for program in programs if program.rank == rank)
    shared = RunnerContext(
        source=source.stages, reference=reference, transport=transport, device=device, dtype=torch.float64
    )
    runner = RankRunner(RankPrograms(plan=plan, programs={"whole": program}), shared)
    (module,) = source.make_modules(runner, batch)
    runner.bind([module], [SumHooks(module, plan, tied_stages(plan, reference))])
    result = runner.run(batch, count=count)
    counts = next(iter(result.memories.values()), None)
    total = torch.tensor(sum(float(loss) * count for loss, count in result.losses), dtype=torch.float64)
    dist.all_reduce(total)
    gradients: dict[str, Tensor] = {
        name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None
    }
    transport.close()
    own = plan.stage_of_rank(rank)
    return {
        "loss": float(total) / plan.mini_batch,
        "gradients": gradients,
        "counts": counts,
        "differences": [] if counts is None else differences(plan, own, counts),
        "memory": plan.stages[own].memory,
        "saves": sum(m.recomputed_bytes + m.swapped_bytes for s in plan.stages if (m := s.memory)),
        "needs": {s.name: s.memory_bytes for s in plan.stages},
        "stages": [(s.name, s.ranks, s.micro_batch_size, s.schedule, s.num_sliced) for s in plan.stages],
    }


def config_of(name: str, *, block: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    block = {"verify": True, **(block or {})}
    return engine_jobs.config_of(train_batch_size=mini_batch_of(name), block=block, **changes)


def make_engine(name: str, config: dict[str, Any]) -> Any:
    return engine_jobs.make_engine(build_graph(name), batch_of(name), config)


def train_lengths(zero: int) -> dict[str, Any]:
    """Five steps of three lengths on a diamond, clipped."""
    config = config_of("diamond", zero_optimization={"stage": zero}, gradient_clipping=0.05)
    engine = make_engine("diamond", config)
    batches = [batch_of("diamond", tokens=tokens, seed=tokens) for tokens in (3, 5, 2, 5, 3)]
    losses, norms = [], []
    for batch in batches:
        losses += steps(engine, [batch])
        norms.append(engine.get_global_grad_norm())
    return {"losses": losses, "norms": norms, "stage": engine.stage_name, "first": engine.is_first_stage()}


def train_and_reload(directory: str) -> dict[str, Any]:
    """Six steps; and again from a checkpoint after three, in an engine that starts from other weights."""
    batches = [batch_of("tied", seed=seed) for seed in range(6)]
    config = config_of("tied", zero_optimization={"stage": 1})
    engine = make_engine("tied", config)
    first = steps(engine, batches[:3])
    engine.save_checkpoint(directory, client_state={"here": 3})
    rest = steps(engine, batches[3:])
    state = engine.gather_state_dict()
    engine.save_pretrained(f"{directory}/export")
    again = make_engine("tied", config)
    steps(again, [batch_of("tied", seed=9)])
    _, client = again.load_checkpoint(directory)
    return {
        "first": first,
        "rest": rest,
        "reloaded": steps(again, batches[3:]),
        "client": client,
        "names": sorted(dict(engine.module.named_parameters())),
        "state": state,
        "tied": engine.plan.stages[-1].name,
    }


def evaluate() -> dict[str, Any]:
    """Batches of any size: a loss, and reported outputs, between training steps."""
    engine = make_engine("tied", config_of("tied"))
    answers: dict[str, Any] = {}
    for rows in (8, 3, 10):
        ids = batch_of("tied", seed=rows)["ids"].repeat(2, 1)[:rows]
        loss, logits = engine.eval_batch(iter([{"ids": ids}]), return_logits=True)
        answers[str(rows)] = (float(loss), logits)
    steps(engine, [batch_of("tied")])
    other = make_engine("diamond", config_of("diamond"))
    inputs = {"x": batch_of("diamond")["x"][:5]}  # the loss's stage has no target: it does not run
    answers["c_out"] = other.eval_batch(iter([inputs]), compute_loss=False, outputs=("c_out",))
    return answers


def _wrong(name: str) -> Any:
    """Return a graph of a body and a head with one mistake."""

    class Returns(torch.nn.Module):
        def __init__(self, make: Any) -> None:
            super().__init__()
            self.make = make

        def forward(self, x: Tensor) -> Any:
            return self.make(x)

    def fail(context: Any) -> Any:
        raise ValueError("no such weights\nand more")

    class Head(torch.nn.Linear):
        def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
            product = Once.apply(hidden, self.weight) if name == "in_parts" else super().forward(hidden)  # type: ignore[no-untyped-call]
            difference = (product - target) ** 2
            return difference.mean(-1) if name == "no_number" else difference.mean()

    bodies: dict[str, Any] = {
        "factory": fail,
        "two_arguments": lambda width, depth, bias=True: torch.nn.Linear(width, depth, bias),
        "no_module": lambda context: 3,
        "missing_field": Returns(lambda x: {"other": x}),
        "too_many": Returns(lambda x: (x, x)),
        "no_tensor": Returns(lambda x: (None,)),
        "rejects": Returns(lambda x: x[..., :5]),
    }
    body = bodies.get(name, torch.nn.Linear(WIDTH, WIDTH))
    layouts: Any = {"not_uniform": {"hidden": "uniform"}, "wrong_axis": {"hidden": 1}}.get(name)
    inputs = {"y": "x"} if name == "argument" else ["x"] if name in bodies else {"input": "x"}
    size = 4 if name == "size" else None
    graph = gpp_plugin.StageGraph("two")
    graph.stage("body", body, inputs=inputs, outputs=["hidden"], ranks=[0], layouts=layouts)
    graph.stage(
        "head", Head(WIDTH, WIDTH), inputs=["hidden", "target"], outputs=["loss"], ranks=[1], micro_batch_size=size
    )  # fmt: skip
    if name == "tie":
        graph.tie("body.wait", "head.weight")
    if name == "tie_shape":
        graph.tie("body.weight", "head.bias")
    return graph


def build_wrongly(names: list[str]) -> dict[str, str]:
    """Return what `deepspeed.initialize` says of each mistake on this rank."""
    said = {}
    for name in names:
        blocks = {"planner": {"planner": "graphpipe"}, "in_parts": {"schedule": "zero_bubble"}}
        block = blocks.get(name, {})
        try:
            engine_jobs.make_engine(_wrong(name), batch_of("chain"), config_of("chain", block=block))
            said[name] = "no error"
        except GppError as error:
            said[name] = str(error)
    return said


def report() -> dict[str, Any]:
    """A timeline of a step, what the ranks hold beside what the plan says, and the plan given again."""
    from gpp_plugin.ir.serialize import dumps

    engine = make_engine("diamond", config_of("diamond"))
    engine.record_timelines = True
    steps(engine, [batch_of("diamond")])
    timeline = engine.last_timeline
    saved = json.loads(dumps(engine.plan))
    again = make_engine("diamond", config_of("diamond", block={"plan": saved}))
    return {
        "is_same_plan": again.plan == engine.plan,
        "loss": steps(again, [batch_of("diamond")])[0],
        "timeline": set() if timeline is None else {(e.rank, e.kind.value) for e in timeline.events},
        "memory": engine.memory_report(),
        "depth": engine.plan.depth,
    }


def train_asynchronously(memory: dict[str, dict[str, Any]], num_batches: int) -> dict[str, dict[str, Any]]:
    """Mini-batches of graphs whose stages step after every micro-batch, with these ``memory`` blocks."""
    answers = {}
    for name, block in memory.items():
        engine = make_engine(name, config_of(name, block={"mode": "async", "memory": block}))
        losses = steps(engine, [batch_of(name, seed=seed) for seed in range(num_batches)])
        engine.flush()
        answers[name] = {
            "losses": losses,
            "held": {stage.name: stage.in_flight for stage in engine.plan.stages},
            "staleness": engine.staleness,
            "recomputed": [stage.memory is not None for stage in engine.plan.stages],
            "parameters": {name: p.detach().clone() for name, p in engine.module.named_parameters()},
            "differences": engine.memory_report().differences,
        }
        engine.destroy()
    return answers
