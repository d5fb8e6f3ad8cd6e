"""The graph_pipeline block: what is accepted, and the one line each mistake gets."""

import base64
import json

import pytest
from pydantic import BaseModel, ValidationError

from gpp_plugin.api import make_request
from gpp_plugin.cli import main
from gpp_plugin.config import reader
from gpp_plugin.config.block import GraphPipelineConfig
from gpp_plugin.config.key_names import all_keys
from gpp_plugin.config.reader import batch_arithmetic, check_ranks, read_config, read_options, read_text
from gpp_plugin.errors import ConfigError
from gpp_plugin.plugins import PLANNERS

PLANNER_NAMES = ", ".join(PLANNERS.names())

BACKENDS_ADVICE = 'give "off", "auto", a list of backends, or {"stage name": "backend", ...}'
NO_OPENVNO = (
    "\"openvno\" is not valid; give one of torch, inductor, onnxruntime, openvino; did you mean 'openvino'?"
)
DESIGN_BLOCK = {
    "enabled": True, "planner": "auto", "stages": "auto", "schedule": "auto",
    "micro_batch_sizes": "auto", "slicing": "auto",
    "memory": {"limit_gb": "auto", "recompute": "auto", "swap": "auto"},
    "cluster": "auto", "plan": None, "profile_dir": None,
    "comm_timeout_s": 60, "max_skipped_steps": 20, "locate_nan": False, "trace_path": None,
}  # fmt: skip


def block_of(**keys):
    return {"train_batch_size": 64, "graph_pipeline": keys}


def lines_of(config):
    with pytest.raises(ConfigError) as raised:
        read_config(config)
    return str(raised.value).splitlines()


def test_the_documented_block_is_the_default():
    assert read_config({"graph_pipeline": DESIGN_BLOCK}) == read_config({"graph_pipeline": {}})
    config = read_config({"graph_pipeline": {}})
    assert config == GraphPipelineConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.stages = 4


@pytest.mark.parametrize("config", [{}, {"pipeline": {"stages": 2}}, {"graph_pipeline": {"enabled": False}}])
def test_no_block_or_a_disabled_one_is_none(config):
    assert read_config(config) is None


def test_a_disabled_block_is_checked_all_the_same():
    assert lines_of({"graph_pipeline": {"enabled": False, "stagess": 2}}) == [
        "graph_pipeline.stagess: unknown key (value 2); did you mean 'stages'?"
    ]


@pytest.mark.parametrize(
    ("memory", "ways"),
    [
        ({}, ("recompute", "swap")),
        ({"recompute": "off"}, ("swap",)),
        ({"swap": "off"}, ("recompute",)),
        ({"recompute": "full", "swap": "off"}, ("recompute",)),
        ({"recompute": "off", "swap": "off"}, ()),
    ],
)
def test_memory_says_what_a_planner_may_use(memory, ways):
    config = read_config(block_of(memory=memory))
    assert config is not None and config.memory.optimization == ways


@pytest.mark.parametrize(
    ("keys", "granularity"),
    [
        ({}, "layer"),
        ({"planner": "vpipe"}, "layer"),
        ({"planner": "dawnpiper"}, "node"),
        ({"planner": "dawnpiper", "granularity": "layer"}, "layer"),
        ({"granularity": "node"}, "node"),
    ],
)
def test_granularity_is_that_of_the_planners_paper_unless_given(keys, granularity):
    config = read_config(block_of(**keys))
    assert config is not None and config.granularity == granularity


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (
            {"recompute": "full"},
            'recompute: unknown key (value "full"); write "memory": {"recompute": "full"}',
        ),
        ({"memory.limit_gb": 4}, 'memory.limit_gb: unknown key (value 4); write "memory": {"limit_gb": 4}'),
        ({"seed": 2**63}, "seed: 9223372036854775808 is not valid; give a whole number from 0 to 2^63 - 1"),
        ({"look_ahead": 2}, 'frozen_prefetch: 2 is not valid; give "auto", 0 or 1'),
        (
            {"look_ahead": 0, "frozen_prefetch": 0},
            "look_ahead: is now frozen_prefetch, which is there as well; remove look_ahead",
        ),
        (
            {"mini_batch": 8},
            'mini_batch: unknown key (value 8); write "train_batch_size": 8 beside graph_pipeline',
        ),
        *(
            ({key: 8}, f"{key}: unknown key (value 8); it is DeepSpeed's: move it beside graph_pipeline")
            for key in (
                "train_batch_size",
                "gradient_accumulation_steps",
                "zero_optimization",
                "optimizer",
                "fp16",
            )
        ),
        ({"eager": "model.layers"}, 'eager: "model.layers" is not valid; give a list: ["model.layers"]'),
        (
            {"frozen_prefetch": 1, "mode": "async"},
            "frozen_prefetch: 1 is not possible in mode async, whose pipeline never drains; write mode "
            '"sync" or remove it',
        ),
        (
            {"repeat_steps": "suspicious"},
            "repeat_steps: steps are no longer run twice; remove the key. Rank 0 logs losses far above the usual range "
            '(value "suspicious")',
        ),
        ({"memory": {"zzz": 3}}, "memory.zzz: unknown key (value 3); the keys are limit_gb, recompute, swap"),
        ({"stages": True}, 'stages: true is not valid; give "auto" or a whole number of at least 1'),
        ({"comm_timeout_s": 0}, "comm_timeout_s: 0 is not valid; give a number of seconds above 0"),
        ({"lengths": 5}, "lengths: 5 is not valid; give null or an object with max, typical"),
        (
            {"lengths": {"max": 0}},
            'lengths.max: 0 is not valid; give a whole number of at least 1, or {"key of the batch": number, ...}',
        ),
        (
            {"lengths": {"max": {"input_ids": 512, "labels": 64}, "typical": [{"input_ids": 128}]}},
            'lengths.typical[0]: {"input_ids": 128} is not of the form of lengths.max, '
            '{"input_ids": 512, "labels": 64}; give numbers, or objects with the same keys',
        ),
        (
            {"memory": {"recompute": "ful"}},
            "memory.recompute: \"ful\" is not valid; give one of auto, off, full; did you mean 'full'?",
        ),
        (
            {"slicing": 0},
            'slicing: 0 is not valid; give "auto", "on", "off" or a number of micro-batches of at least 1',
        ),
        (
            {"micro_batch_sizes": [1]},
            'micro_batch_sizes: [1] is not valid; give "auto", "search", a number of samples for all stages, '
            'or {"stage name, or * for all": number or "full", ...}',
        ),
        ({"plan": 3}, "plan: 3 is not valid; give null, a file name, or an object"),
        ({"backends": "openvino"}, 'backends: "openvino" is not valid; give a list: ["openvino"]'),
        ({"backends": "of"}, f"backends: \"of\" is not valid; {BACKENDS_ADVICE}; did you mean 'off'?"),
        ({"backends": {"vision": "openvno"}}, f"backends.vision: {NO_OPENVNO}"),
    ],
)
def test_each_mistake_gets_its_line(keys, line):
    assert lines_of(block_of(**keys)) == [f"graph_pipeline.{line}"]


def test_every_problem_has_a_line():
    assert lines_of(block_of(stages=0, plannr="auto", micro_batch_sizes={"loss": 0, "a.b": "all"})) == [
        'graph_pipeline.stages: 0 is not valid; give "auto" or a whole number of at least 1',
        "graph_pipeline.micro_batch_sizes.loss: 0 is not valid; give a whole number of samples of at least 1, "
        'or "full"',
        'graph_pipeline.micro_batch_sizes.a.b: "all" is not valid; give a whole number of samples of at least '
        '1, or "full"',
        "graph_pipeline.plannr: unknown key (value \"auto\"); did you mean 'planner'?",
    ]


@pytest.mark.parametrize(
    "key",
    ["graph_pipline", "graph-pipeline", "graphPipeline", "pipeline_graph", "Graph_Pipeline", "GRAPHPIPELINE"],
)
def test_a_mistyped_block_is_not_ignored(key):
    assert lines_of({"train_batch_size": 8, key: {}}) == [
        f"{key}: unknown key, and DeepSpeed would ignore it; did you mean 'graph_pipeline'?"
    ]


def test_a_block_that_is_no_object():
    assert lines_of({"graph_pipeline": True}) == [
        "graph_pipeline: true is not an object; write {} for the defaults or remove the key"
    ]


class TestFiles:
    def test_json_and_json_with_comments(self, tmp_path):
        plain = tmp_path / "plain.json"
        plain.write_text(json.dumps(block_of(stages=2)))
        commented = tmp_path / "commented.json"
        commented.write_text('{\n  # as DeepSpeed\'s reader takes it\n  "graph_pipeline": {"stages": 2}\n}\n')
        assert read_config(plain) == read_config(str(plain)) == read_config(commented)
        assert read_config(plain) == GraphPipelineConfig(stages=2)

    def test_base64_as_the_launcher_passes_it(self):
        text = base64.urlsafe_b64encode(json.dumps(block_of(stages=2)).encode()).decode()
        assert read_config(text) == GraphPipelineConfig(stages=2)

    def test_a_missing_file(self, tmp_path):
        path = tmp_path / "missing.json"
        assert lines_of(str(path)) == [
            f"{path}: cannot be read (No such file or directory); give the path of a DeepSpeed configuration"
        ]

    def test_a_broken_file(self, tmp_path):
        path = tmp_path / "broken.json"
        path.write_text('{"graph_pipeline": {"stages": 2}')
        assert lines_of(path)[0].startswith(f"{path}: not JSON at line 1, column 33")

    def test_a_list(self, tmp_path):
        path = tmp_path / "list.json"
        path.write_text("[]")
        assert lines_of(path) == [f"{path}: holds a list; a DeepSpeed configuration is an object"]

    def test_neither_dict_nor_file(self):
        assert lines_of(3) == ["config: expected a dict or a file name, found int"]


def sizes(mini_batch=None, micro_batch=None, accumulation=None, **block):
    given = {
        "train_batch_size": mini_batch,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "graph_pipeline": block or None,
    }
    return {key: value for key, value in given.items() if value is not None}


FULL = {"loss": "full"}


class TestBatchArithmetic:
    @pytest.mark.parametrize(
        ("config", "expected"),
        [
            (sizes(64), (64, 64, None)),
            (sizes(64, 8), (64, 8, None)),
            (sizes(64, "auto"), (64, 64, None)),
            (sizes(64, None, 4), (64, 16, 4)),
            (sizes(64, 8, 4), (64, 8, 4)),
            (sizes(64, 64, 1, micro_batch_sizes={**FULL, "text_model": 8}), (64, 64, 1)),
            (sizes(None, 8, 4, data_parallel=2), (64, 8, 4)),
        ],
    )
    def test_sizes(self, config, expected):
        assert batch_arithmetic(config, num_ranks=4) == expected

    def test_one_rank_needs_no_mini_batch(self):
        assert batch_arithmetic(sizes(None, 8, 4), num_ranks=1) == (32, 8, 4)

    @pytest.mark.parametrize(
        ("config", "line"),
        [
            (
                sizes(None, 8, 4),
                "train_batch_size: missing; give the samples of one optimizer step over the whole graph "
                "(stages may have different numbers of ranks, so it does not follow from the other sizes)",
            ),
            (sizes(0), "train_batch_size: 0 is not valid; give a whole number of samples of at least 1"),
            (
                sizes(64, 24),
                "train_micro_batch_size_per_gpu: 24 does not divide train_batch_size 64; give 16 or 32",
            ),
            (
                sizes(64, None, 100),
                "gradient_accumulation_steps: 100 does not divide train_batch_size 64; give 64",
            ),
            (
                sizes(64, 16, 3),
                "gradient_accumulation_steps: 3 does not divide the 4 losses of a step (train_batch_size 64 / "
                "train_micro_batch_size_per_gpu 16); remove it",
            ),
            (
                sizes(64, 16, micro_batch_sizes=FULL),
                'graph_pipeline.micro_batch_sizes.loss: "full" computes one loss on all 64 samples, but '
                "train_micro_batch_size_per_gpu makes losses of 16 samples; remove it or set it to 64",
            ),
            (
                sizes(64, None, 2, micro_batch_sizes=FULL),
                'graph_pipeline.micro_batch_sizes.loss: "full" computes one loss on all 64 samples, but '
                "gradient_accumulation_steps makes 2 losses a step; remove it",
            ),
            (
                sizes(64, micro_batch_sizes={"text_model": 5}),
                "graph_pipeline.micro_batch_sizes.text_model: 5 does not divide train_batch_size 64; "
                "give 4 or 8",
            ),
        ],
    )
    def test_contradictions(self, config, line):
        with pytest.raises(ConfigError) as raised:
            batch_arithmetic(config, num_ranks=4)
        assert str(raised.value) == line


@pytest.mark.parametrize(
    "keys", [{}, {"stages": 4}, {"stages": 8}, {"stages": 3, "data_parallel": 2}, {"data_parallel": 4}]
)
def test_ranks_that_suffice_are_accepted(keys):
    check_ranks(GraphPipelineConfig(**keys), 4)


def test_more_data_parallel_ranks_than_there_are_is_refused():
    with pytest.raises(ConfigError) as raised:
        check_ranks(GraphPipelineConfig(data_parallel=8), 4)
    assert str(raised.value) == (
        "graph_pipeline.data_parallel: 8 ranks is more than the 4 there are; lower it or start more"
    )


@pytest.mark.parametrize("asked", [False, True, "auto", {"language_model": True}])
def test_compile_is_kept_and_leaves_tasks_whole(asked):
    config = read_config(block_of(compile=asked))
    assert config.compile == asked
    assert config.memory.optimization == (() if asked else ("recompute", "swap"))
    assert config.slicing == ("off" if asked else "auto")


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (
            {"memory": {"recompute": "full"}},
            'memory.recompute "full": what is compiled is not run again in parts',
        ),
        ({"schedule": "zero_bubble"}, 'schedule "zero_bubble": a compiled backward is not made in two parts'),
        ({"slicing": 2}, "slicing 2: halves would be compiled beside the whole"),
        ({"mode": "async"}, 'mode "async": its weights change between a forward and its backward'),
        ({"lengths": {"max": 8}}, "lengths.max 8: what is compiled is for one length"),
        ({"units": 4}, "units 4: each shape of a unit would be compiled"),
        ({"locate_nan": True}, "locate_nan true: operators of compiled code are out of sight"),
        ({"tensor_parallel": 2}, "tensor_parallel 2: what tensor ranks share out is not compiled"),
        (
            {"tensor_parallel": {"vision": 2}},
            'tensor_parallel {"vision": 2}: what tensor ranks share out is not compiled',
        ),
        ({"granularity": "node"}, 'granularity "node": compiling single operators gains nothing'),
    ],
)
def test_what_compile_does_not_go_with_is_one_line(keys, text):
    (line,) = lines_of(block_of(compile=True, **keys))
    assert line == f"graph_pipeline.compile: true does not go with {text}; remove one of them"


@pytest.mark.parametrize("asked", ["atuo", 1, {"language_model": 1}, ["language_model"]])
def test_a_wrong_compile_is_one_line(asked):
    (line,) = lines_of(block_of(compile=asked))
    assert line.startswith("graph_pipeline.compile: ")
    assert ' is not valid; give true, false, "auto", or {"path of a module": true, ...}' in line


def test_numbers_that_are_not_finite_are_not_looked_for_where_backends_hide_them():
    (line,) = lines_of(block_of(backends="auto", locate_nan=True))
    assert line.startswith(
        "graph_pipeline.locate_nan: true looks at what every operator returns, and backends"
    )


MISTAKES = {
    "unknown key": (
        ({"stagess": 3}, "graph_pipeline.stagess: unknown key (value 3); did you mean 'stages'?"),
        (["--set", "stagess=3"], "--set stagess: unknown key (value 3); did you mean 'stages'?"),
        ({"stagess": 3}, "stagess: unknown key (value 3); did you mean 'stages'?"),
    ),
    "key of an object, beside it": (
        ({"limit_gb": 8}, 'graph_pipeline.limit_gb: unknown key (value 8); write "memory": {"limit_gb": 8}'),
        (["--set", "limit_gb=8"], "--set limit_gb: unknown key (value 8); write --memory-limit-gb 8"),
        ({"limit_gb": 8}, "limit_gb: unknown key (value 8); write memory_limit_gb=8"),
    ),
    "value that no plan without a job may have, misspelt": (
        (
            {"memory": {"recompute": "ful"}},
            'graph_pipeline.memory.recompute: "ful" is not valid; give one of auto, off, full; did you mean \'full\'?',
        ),
        (["--memory-recompute", "ful"], '--memory-recompute: "ful" is not valid; give one of auto, off'),
        ({"memory_recompute": "ful"}, 'memory_recompute: "ful" is not valid; give one of auto, off'),
    ),
    "unknown key of an object": (
        ({"memory": {"swp": "off"}}, "graph_pipeline.memory.swp: unknown key (value \"off\"); did you mean 'swap'?"),
        (["--memory", '{"swp": "off"}'], "--memory: swp: unknown key (value \"off\"); did you mean 'swap'?"),
        ({"memory": {"swp": "off"}}, "memory['swp']: unknown key (value \"off\"); did you mean 'swap'?"),
    ),
    "out of range": (
        ({"stages": 0}, 'graph_pipeline.stages: 0 is not valid; give "auto" or a whole number of at least 1'),
        (["--stages", "0"], '--stages: 0 is not valid; give "auto" or a whole number of at least 1'),
        ({"stages": 0}, 'stages: 0 is not valid; give "auto" or a whole number of at least 1'),
    ),
    "out of range, of an object": (
        ({"memory": {"limit_gb": -1}}, 'graph_pipeline.memory.limit_gb: -1 is not valid; give "auto" or a number of GB above 0'),
        (["--memory-limit-gb", "-1"], '--memory-limit-gb: -1 is not valid; give "auto" or a number of GB above 0'),
        ({"memory_limit_gb": -1}, 'memory_limit_gb: -1 is not valid; give "auto" or a number of GB above 0'),
    ),
    "no such name": (
        ({"planner": "grahpipe"}, f"graph_pipeline.planner: \"grahpipe\" is not valid; give one of {PLANNER_NAMES}; did you mean 'graphpipe'?"),
        (["--planner", "grahpipe"], f"--planner: \"grahpipe\" is not valid; give one of {PLANNER_NAMES}; did you mean 'graphpipe'?"),
        ({"planner": "grahpipe"}, f"planner: \"grahpipe\" is not valid; give one of {PLANNER_NAMES}; did you mean 'graphpipe'?"),
    ),
    "contradiction": (
        ({"vertical_sync": True}, 'graph_pipeline.vertical_sync: true has no meaning in mode sync, where all stages step at once; write mode "async" or remove it'),
        (["--vertical-sync"], "--vertical-sync: true has no meaning in mode sync, where all stages step at once; write --mode async or remove it"),
        ({"vertical_sync": True}, "vertical_sync: true has no meaning in mode sync, where all stages step at once; write mode='async' or remove it"),
    ),
    "contradiction of two": (
        ({"mode": "async", "slicing": 2}, 'graph_pipeline.slicing: 2 is not possible in mode async, which runs 1F1B of whole micro-batches; write mode "sync" or remove it'),
        (["--mode", "async", "--slicing", "2"], '--slicing: 2 is not possible in mode async, which runs 1F1B of whole micro-batches; write --mode sync or remove it'),
        ({"mode": "async", "slicing": 2}, 'slicing: 2 is not possible in mode async, which runs 1F1B of whole micro-batches; write mode=\'sync\' or remove it'),
    ),
    "longer than the longest": (
        ({"lengths": {"max": 8, "typical": [9]}}, "graph_pipeline.lengths.typical[0]: 9 is longer than lengths.max, 8; raise lengths.max"),
        (["--length", "9", "--max-length", "8"], "--length[0]: 9 is longer than --max-length, 8; raise --max-length"),
        ({"length": 9, "max_length": 8}, "length[0]: 9 is longer than max_length, 8; raise max_length"),
    ),
    "sizes that do not divide": (
        ({"micro_batch_sizes": 5}, "graph_pipeline.micro_batch_sizes: 5 does not divide train_batch_size 64; give 4 or 8"),
        (["--micro-batch", "5", "--mini-batch", "64"], "--micro-batch: 5 does not divide --mini-batch 64; give 4 or 8"),
        ({"micro_batch_sizes": 5, "mini_batch": 64}, "micro_batch_sizes: 5 does not divide mini_batch 64; give 4 or 8"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_the_same_advice_in_the_users_own_words(mistake, capsys):
    """In the DeepSpeed JSON, on the command line, and in Python."""
    (keys, in_json), (arguments, on_command_line), (options, in_python) = MISTAKES[mistake]
    with pytest.raises(ConfigError) as raised:
        batch_arithmetic(block_of(**keys), num_ranks=4)
    assert str(raised.value) == in_json
    try:
        code = main(["plan", "mmt", "--devices", "4", *arguments])
    except SystemExit as end:  # a value that is wrong in itself is wrong usage
        code = end.code
    (line,) = capsys.readouterr().err.splitlines()
    assert code in (1, 2) and line.removesuffix("; see gpp plan --help") == f"gpp plan: {on_command_line}"
    with pytest.raises(ConfigError) as raised:
        make_request("mmt", num_devices=4, **options)
    assert str(raised.value) == in_python


def test_every_key_can_be_set_on_the_command_line():
    """Each by the default of its field, as JSON."""
    for path, key in all_keys().items():
        default = key.field.default
        if not isinstance(default, BaseModel) and not path.startswith("lengths."):
            assert read_text(path, json.dumps(default)) == default


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("stages", "3", 3), ("stages", "auto", "auto"), ("trace_path", "3", "3"), ("memory.limit_gb", "1.5", 1.5),
        ("memory", "recompute,swap", ["recompute", "swap"]), ("memory", "swap", ["swap"]),
        ("micro_batch_sizes", "loss=full,*=4", {"loss": "full", "*": 4}), ("lengths.typical", "8,4", [8, 4]),
        ("tensor_parallel", "model.text=2", {"model.text": 2}), ("eager", "layers.*.router", ["layers.*.router"]),
        ("backends", '["torch", "inductor"]', ["torch", "inductor"]), ("compile", "true", True), ("plan", "null", None),
        ("cluster", '{"name": "x"}', {"name": "x"}), ("slicing", "off", "off"), ("zero", "2", 2), ("zero", "auto", "auto"),
    ],
)  # fmt: skip
def test_values_on_a_command_line(path, text, value):
    assert read_text(path, text) == value


def test_options_by_path_by_argument_and_by_deepspeeds_key_are_the_same():
    options = read_options({"memory_limit_gb": 8, "train_batch_size": 32, "length": (8, 4), "stages": None})
    assert options == read_options({"memory.limit_gb": 8, "mini_batch": 32, "lengths": {"typical": [8, 4]}})
    assert (options.memory.limit_gb, options.memory.optimization, options.mini_batch) == (8, (), 32)
    assert options.lengths.max == 8 and options.stages == "auto"
    assert read_options({"memory": ["swap"]}).memory.optimization == ("swap",)
    for twice in ({"memory": ["swap"], "memory_swap": "off"}, {"memory.swap": "auto", "memory_swap": "off"}):
        with pytest.raises(
            ConfigError, match='^graph_pipeline.memory.swap: "auto" and "off"; give one value$'
        ):
            read_options(twice)


def test_a_key_of_an_earlier_release_is_read_with_one_line_of_advice(caplog):
    reader._advise.cache_clear()
    configs = [read_config(block_of(look_ahead=1)) for _ in range(2)]
    assert configs == [GraphPipelineConfig(frozen_prefetch=1)] * 2 and configs[0].look_ahead == 1
    (record,) = caplog.records
    assert record.message.startswith("graph_pipeline.look_ahead: is now frozen_prefetch;")


def test_a_named_zero_stage_holds_beside_auto():
    """DeepSpeed's own section is what the engine runs with: auto fills it where it names no stage."""
    block = {"graph_pipeline": {"zero": "auto"}}
    for zero, wanted in ((None, "auto"), ({}, "auto"), ({"stage": 0}, None), ({"stage": 2}, None)):
        config = read_config({**block, "zero_optimization": zero})
        assert config is not None and config.zero == wanted
    refused = {"zero": "auto", "backends": "auto"}
    with pytest.raises(
        ConfigError, match="may choose ZeRO 3, which backends .auto. cannot run; name a stage"
    ):
        read_config({"graph_pipeline": refused})
