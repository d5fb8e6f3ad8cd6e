"""Stages cut at block borders, each distinct block compiled once; what cannot be compiled says why in one line."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from gpp_plugin.backends.compiled_blocks import (
    MOST_VERSIONS,
    BlockCompiler,
    CompiledStages,
    CutCode,
    compare_results,
    run_both,
    try_code,
)
from gpp_plugin.backends.measured_backends import BackendLog
from gpp_plugin.capture.coarsen import coarsen
from gpp_plugin.errors import BackendRefused, ConfigError, PlanError
from gpp_plugin.ir.plan import Stage
from gpp_plugin.model.backend_planning import (
    CompiledBlocks,
    _check_stage,
    check_paths,
    is_requested,
    measure_compiled,
)
from gpp_plugin.runtime.memory.segments import StageOperators
from gpp_plugin.runtime.stage_module import StageCode, StageFunction, build_stage_function
from tests.compilers import compile_plainly
from tests.models import build, captured_once

aten = torch.ops.aten


class Whole:
    """A model as the code of one stage, with its weights and a batch."""

    def __init__(self, name: str, **options: Any) -> None:
        self.model, make_batch = build(name, **options)
        self.batch = make_batch(4, 0)
        self.captured = captured_once(name, 4, device="cpu", **options)
        self.graph = coarsen(self.captured, granularity="layer")
        self.blocks = {block.name: block.nodes for block in self.graph.blocks}
        loss = self.captured.op_graph.loss
        assert loss is not None
        nodes = [name for names in self.blocks.values() for name in names]
        self.function = build_stage_function(self.captured, nodes, [loss])
        self.state = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        self.parameters = [self.state[name] for name in self.function.tensors]
        self.inputs = [self.batch[key] for key in self.function.batch_inputs]

    def code(self, compiled: CompiledStages, **changes: Any) -> Any:
        own = tuple(self.blocks)
        stage = Stage(name="all", blocks=own, ranks=(0,), micro_batch_size=4, in_flight=1, compiled=own)
        operators = StageOperators(blocks=self.blocks, storage_of={})
        rest: dict[str, Any] = {"tensors": {}, "inputs": {}, "loss": "", "outputs": {}, **changes}
        code = StageCode(function=self.function, operators=operators, **rest)
        return compiled.code(stage, self.function, code)


def stages_with(compile: Callable[[fx.GraphModule, list[Tensor]], Any]) -> CompiledStages:
    stages = CompiledStages()
    stages.compiler = BlockCompiler(compile)
    return stages


def module_of(make: Callable[..., tuple[fx.Node, ...]]) -> fx.GraphModule:
    """Return the code of operators: ``make`` is given what calls one, and the arguments by name."""
    graph = fx.Graph()
    _, *names = inspect.signature(make).parameters
    call = lambda target, *args: graph.call_function(target, args)  # noqa: E731
    graph.output(make(call, *map(graph.placeholder, names)))
    return fx.GraphModule(torch.nn.Module(), graph)


def ours(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what was said by us: tracing logs for itself."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("gpp_plugin")]


def test_a_block_with_dropout_is_refused() -> None:
    whole = Whole("gpt2", dropout=0.2)
    with pytest.raises(
        BackendRefused, match=r"block 'transformer.wte': dropout\S* \(aten.dropout.default\) draws random"
    ):
        CutCode(whole.function.module or fx.GraphModule({}, fx.Graph()), whole.blocks, BlockCompiler())


def test_what_is_wrong_or_fails_leaves_the_stage_on_torch_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def failing(module: fx.GraphModule, tensors: list[Tensor]) -> Callable[..., Sequence[Tensor]]:
        raise RuntimeError("no lowering for aten.embedding.default")

    whole = Whole("gpt2")
    for compile, text in (
        (
            lambda module, _: lambda *given: tuple(1.001 * made for made in module(*given)),
            "output 0 differs by",
        ),
        (failing, " (aten.embedding.default): RuntimeError"),
    ):
        caplog.clear()
        code = whole.code(stages_with(compile))
        with caplog.at_level(logging.WARNING):
            try_code(code, whole.parameters, whole.inputs)
            for _ in range(2):
                own = code(*whole.parameters, *whole.inputs)
        assert torch.equal(own[0], whole.function.call(*whole.parameters, *whole.inputs)[0])
        (line,) = ours(caplog)
        assert "stage all stays on torch instead of compiled code: " in line and text in line


def test_a_shape_that_is_new_in_training_is_said_and_code_for_all_lengths_is_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole, stages = Whole("gpt2"), stages_with(compile_plainly)
    code = whole.code(stages)
    stages.start()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            code(*whole.parameters, *whole.inputs)
        for _ in range(2):
            assert whole.code(stages, is_for_lengths=True) is None
    met, left = ours(caplog)
    assert "stage all met a new shape: " in met and " blocks compiled in " in met
    assert left.startswith(
        "stage all: lengths change: at others than the sample batch's it runs on torch's operators"
    )


@pytest.mark.parametrize("wrong_in", ["nothing", "outputs", "gradients", "the first run"])
def test_a_version_that_training_meets_first_is_held_against_torch(
    wrong_in: str, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(module: fx.GraphModule, tensors: list[Tensor]) -> Callable[..., Sequence[Tensor]]:
        made = compile_plainly(module, tensors)

        def run(*given: Tensor) -> Sequence[Tensor]:
            if wrong_in == "the first run":
                raise RuntimeError("no such kernel")
            if wrong_in == "outputs":
                return tuple(each * 1.001 for each in made(*given))
            # the right values, of one and a half times the right gradient
            return [each + (each - each.detach()) / 2 for each in made(*given)]

        return made if wrong_in == "nothing" else run

    whole, stages = Whole("gpt2"), stages_with(compile_plainly)
    code = whole.code(stages)
    try_code(code, whole.parameters, whole.inputs)
    stages.start()
    code.stage._compiler = BlockCompiler(wrong)
    # the same code in a module of its own, as another shape's is
    function = whole.function
    module = copy.deepcopy(function.module if function.choice is None else function.choice.module)
    other = dataclasses.replace(code, function=dataclasses.replace(function, module=module, choice=None))
    right = run_both(function.call, whole.parameters, whole.inputs)
    state = torch.random.get_rng_state()
    with caplog.at_level(logging.WARNING):
        code(*whole.parameters, *whole.inputs)
        assert not ours(caplog)
        other(*whole.parameters, *whole.inputs)
        assert torch.equal(state, torch.random.get_rng_state())
        for _ in range(2):
            own = run_both(other, whole.parameters, whole.inputs)
            assert compare_results(own, right) <= (1e-6 if wrong_in == "nothing" else 0.0)
    assert all(parameter.grad is None for parameter in whole.parameters)
    (line,) = ours(caplog)
    start = "stage all stays on torch instead of compiled code: "
    said = {
        "nothing": "stage all met a new shape: ",
        "outputs": start + "output 0 differs by",
        "gradients": start + "gradient ",
        "the first run": start + "its first run failed: RuntimeError: no such kernel",
    }
    assert line.startswith(said[wrong_in])


def test_what_an_evaluation_meets_first_is_compiled_with_its_backward() -> None:
    whole, stages = Whole("gpt2"), stages_with(compile_plainly)
    code = whole.code(stages)
    stages.start()
    with torch.no_grad():
        code(*whole.parameters, *whole.inputs)
    own = run_both(code, whole.parameters, whole.inputs)
    right = run_both(whole.function.call, whole.parameters, whole.inputs)
    assert stages.compiler.num_compiled and compare_results(own, right) <= 1e-6


def test_of_shapes_beyond_the_limit_nothing_is_kept() -> None:
    whole = Whole("gpt2")
    stage = whole.code(stages_with(compile_plainly)).stage
    assert whole.function.module is not None
    modules = [copy.deepcopy(whole.function.module) for _ in range(MOST_VERSIONS + 2)]
    found = [stage.forward_of(module, {}) is not None for module in modules]
    assert found == [True] * MOST_VERSIONS + [False] * 2
    assert len(stage._cuts) == MOST_VERSIONS


def test_results_that_are_no_numbers_are_not_compared() -> None:
    nothing = torch.full((2,), float("nan"))
    with pytest.raises(BackendRefused, match="torch's own results are not numbers"):
        compare_results(((nothing,), ()), ((nothing,), ()))


def test_what_a_block_reads_of_its_own_results_is_compiled_with_it() -> None:
    def made(call: Any, given: fx.Node) -> tuple[fx.Node, ...]:
        a1, b1 = call(aten.relu.default, given), call(aten.sin.default, given)
        between = call(aten.neg.default, a1)
        b2 = call(aten.mul.Tensor, between, b1)
        return call(aten.add.Tensor, a1, b2), b2

    module, x = module_of(made), torch.randn(5)
    for blocks, names in (
        ({"a": ["relu_default", "add_tensor"]}, ["a"]),
        ({"a": ["relu_default", "add_tensor"], "b": ["sin_default", "mul_tensor"]}, ["a and b"]),
    ):
        cut = CutCode(module, blocks, BlockCompiler(compile_plainly))
        assert list(cut.blocks) == names
        for own, right in zip(cut.forward(x), module(x), strict=True):
            assert torch.equal(own, right)


def test_blocks_whose_order_is_mixed_are_put_in_one() -> None:
    def made(call: Any, given: fx.Node) -> tuple[fx.Node, ...]:
        a1, b1 = call(aten.relu.default, given), call(aten.neg.default, given)
        a2 = call(aten.sin.default, a1)
        return a2, call(aten.mul.Tensor, b1, a2)

    module = module_of(made)
    blocks = {"a": ["relu_default", "sin_default"], "b": ["neg_default", "mul_tensor"]}
    cut = CutCode(module, blocks, BlockCompiler(compile_plainly))
    x = torch.randn(5)
    for own, right in zip(cut.forward(x), module(x), strict=True):
        assert torch.equal(own, right)


# ---- measured before stages are cut ------------------------------------------------------------------------------


def measured(whole: Whole, requested: Any, compiler: BlockCompiler, folder: Path) -> CompiledBlocks:
    options: dict[str, Any] = {"requested": requested, "log": BackendLog(folder), "compiler": compiler}
    return measure_compiled(whole.captured, whole.graph, state=whole.state, batch=whole.batch, **options)


def test_each_distinct_block_is_measured_once_and_kept_on_disk(tmp_path: Path) -> None:
    whole, compiler = Whole("gpt2", layers=3), BlockCompiler(compile_plainly)
    found = measured(whole, {"transformer.h": True}, compiler, tmp_path)
    (own,) = found.costs
    assert own[0] == tuple(f"transformer.h.{i}" for i in range(3)) and found.taken == set(own[0])
    assert own[1].both_us > own[1].forward_us > 0 and own[1].saved_bytes == own[1].torch_saved_bytes > 0
    before = compiler.num_compiled
    assert (
        measured(whole, {"transformer.h": True}, compiler, tmp_path) == found
        and compiler.num_compiled == before == 1
    )
    (line,) = found.lines()
    assert line.startswith("compile: transformer.h.0 and 2 like it compiled: forward and backward ")


def test_auto_takes_what_wins_by_more_than_noise(tmp_path: Path) -> None:
    # operators one by one, and more around them
    found = measured(Whole("gpt2"), "auto", BlockCompiler(compile_plainly), tmp_path)
    assert len(found.costs) > 1 and not found.taken


@pytest.mark.parametrize(
    ("asked", "block", "is_it"),
    [
        (True, "a.b", True),
        ("auto", "a.b", True),
        ({"language_model": True}, "model.language_model.layers.0", True),
        ({"layers.1": True}, "layers.10", False),
        ({"layers.1": False}, "layers.1", False),
    ],
)
def test_paths_of_modules_say_which_blocks(asked: Any, block: str, is_it: bool) -> None:
    assert is_requested(asked, block) == is_it


def test_a_path_of_nothing_is_one_line() -> None:
    with pytest.raises(
        ConfigError,
        match=r"graph_pipeline\.compile\.langauge: no block of the model lies in a module of that path; did you mean "
        r"'language'\?; blocks are vision\.0, language\.0, \.\.\.",
    ):
        check_paths({"langauge": True}, ["vision.0", "language.0"])


def test_the_function_of_a_stage_is_kept() -> None:
    whole = Whole("gpt2")
    assert isinstance(whole.code(CompiledStages()).function, StageFunction)
    stage: Any = {"name": "a", "blocks": ("b",), "micro_batch_size": 4, "in_flight": 1}
    for options, why in (
        ({"ranks": (0,), "schedule": "zero_bubble"}, "schedule 'zero_bubble' makes"),
        ({"ranks": (0, 1), "tensor": 2}, "2 tensor ranks share it out; plan"),
    ):
        with pytest.raises(PlanError, match=f"stage 'a': its blocks are compiled, and {why}"):
            _check_stage(Stage(**stage, **options))
