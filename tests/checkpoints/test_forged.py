"""Checkpoints forged with right checksums: refused before anything changes, or passed over for the one before.

Each variant edits the newest of two checkpoints as JSON and bytes, and all sums are made anew (`Forged.write`). The
engine has masters, moments, a schedule, a loss scale, a buffer and random states; one rank, without an engine's data.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpp_plugin.engine.checkpoints.checkpoint_files import checksum, text_sum
from gpp_plugin.engine.checkpoints.conversion import (
    read_checkpoint,
    read_torch,
    read_universal,
    write_checkpoint,
    write_torch,
    write_universal,
)
from gpp_plugin.engine.checkpoints.save_checkpoint import save_checkpoint
from gpp_plugin.engine.engine_files import load_checkpoint
from gpp_plugin.engine.loading.row_loader import check_position
from gpp_plugin.engine.rank_engine import StageEngine
from gpp_plugin.engine.stage_groups import StageGroups
from gpp_plugin.errors import CheckpointError, GppError
from gpp_plugin.ir.plan import PipelinePlan, Stage
from tests.checkpoints.killed_saves import state_of
from tests.integrations import toy
from tests.integrations.test_stage_engine import allow_fp16, make_config
from tests.ranks import run_kept_ranks

MODEL, OPTIMIZER, RANK = (
    f"{name}.safetensors" for name in ("model-00-all", "optimizer-00-all-00000", "rank-00000")
)
OTHER_MODEL = (
    "is it a checkpoint of this model?",
    "into the model it was saved of",
    "is trained here, and was not",
)
"""What is said of a checkpoint that is whole and fits another model; it names directory and tensor."""
SHARDS = 4
POSITION = {
    "kind": "samples", "mini_batches": 2, "lists": 2, "list_size": 8, "samples": 40, "generator": None, "sampler": None
}  # fmt: skip


def sum_of(data: bytes) -> str:
    total = checksum()
    total.update(data)
    return str(total.hexdigest())


class Forged:
    """A checkpoint as JSON and bytes, to be edited and written with right sums."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.manifest = json.loads((target / "manifest.json").read_text())["manifest"]
        self.texts = {
            path.name: path.read_text() for path in target.glob("*.json") if path.name != "manifest.json"
        }
        self.headers: dict[str, Any] = {}
        self.bodies: dict[str, bytes] = {}
        for path in target.glob("*.safetensors"):
            data = path.read_bytes()
            end = 8 + int.from_bytes(data[:8], "little")
            self.headers[path.name], self.bodies[path.name] = json.loads(data[8:end]), data[end:]

    def write(self) -> None:
        for name, text in self.texts.items():
            (self.target / name).write_text(text)
            if isinstance(self.manifest, dict) and isinstance(self.manifest.get("texts"), dict):
                self.manifest["texts"][name] = text_sum(text)
        for name, header in self.headers.items():
            text = (header if isinstance(header, str) else json.dumps(header)).encode()
            first = len(text).to_bytes(8, "little") + text
            (self.target / name).write_bytes(first + self.bodies[name])
            try:
                sums = self.manifest["files"][name]["sums"]
                sums.update(num_bytes=len(first + self.bodies[name]), header=sum_of(first))
                for key in sums["tensors"]:
                    begin, end = header[key]["data_offsets"]
                    sums["tensors"][key] = sum_of(self.bodies[name][begin:end])
            except (KeyError, TypeError, AttributeError, ValueError):
                pass  # what is forged is not there, or none
        body = (
            self.manifest
            if isinstance(self.manifest, str)
            else json.dumps(self.manifest, separators=(",", ":"))
        )
        (self.target / "manifest.json").write_text(
            f'{{"format":2,"checksum":"{text_sum(body)}",\n"manifest":{body}}}\n'
        )

    def edit_text(self, name: str, path: str, value: Any) -> None:
        plain = json.loads(self.texts[name])
        put(plain, path, value)
        self.texts[name] = json.dumps(plain)

    def edit_beside(self, path: str, value: Any) -> None:
        plain = json.loads(self.headers[RANK]["__metadata__"]["gpp_plugin"])
        put(plain, path, value)
        self.headers[RANK]["__metadata__"]["gpp_plugin"] = json.dumps(plain)


GONE = object()
DEEP = json.loads("[" * 300 + "]" * 300)


def put(plain: Any, path: str, value: Any) -> None:
    """Set what a path of keys, ``files/x/sums``, leads to; `GONE` removes it, and ``|`` is a slash in a key."""
    *way, last = (key.replace("|", "/") for key in path.split("/"))
    for key in way:
        plain = plain[int(key)] if isinstance(plain, list) else plain[key]
    at: Any = int(last) if isinstance(plain, list) else last
    assert isinstance(plain, list) or value is not GONE or at in plain, path
    if value is GONE:
        del plain[at]
    else:
        plain[at] = copy.deepcopy(value)


def variants() -> list[tuple[str, str, Callable[[Forged], None]]]:
    """Return each variant: the file that the error names, what it is, and the edit."""
    found: list[tuple[str, str, Callable[[Forged], None]]] = []

    def add(file: str, kind: str, path: str, *values: Any) -> None:
        for value in values:

            def edit(forged: Forged, value: Any = value) -> None:
                if kind == "manifest":
                    put(forged.manifest, path, value)
                elif kind == "header":
                    put(forged.headers[file], path, value)
                elif kind == "beside":
                    forged.edit_beside(path, value)
                else:
                    forged.edit_text(file, path, value)

            said = "gone" if value is GONE else "deep" if value is DEEP else repr(value)[:30]
            found.append((file, f"{kind} {path} {said}", edit))

    a, m = f"files/{MODEL}/tensors/layer.weight", f"files/{OPTIMIZER}/tensors/exp_avg|layer.weight"
    for path, *values in (
        ("step", "x", -3, None, 1 << 70, GONE),
        ("saved_ns", "x", -3),
        ("files", [], "x", GONE),
        ("texts", []),
        ("numbers", [], {"layer.weight": 3}),
        ("groups", {}, [3], [{}]),
        ("names", [1], {"a": "x"}),
        ("stages", "x", [{}], [{"name": "x"}]),
        ("versions", 3, DEEP),
        (f"{a}/shape", [-5, 5], [5], "x", [1 << 40, 1 << 40], [["5"], 5]),
        (f"{a}/count", 24, 26, "25", -1),
        (f"{a}/start", 1, 1 << 50, -1),
        (f"{a}/dtype", "float64", "object", "load", 3),
        (f"{a}/shard", [2, 2], [0, 0], [0], "x"),
        (f"{a}/stage", -1, "x"),
        (f"{a}/axis", -1, "x"),
        (f"{a}/stride", 0),
        (f"{a}/name", "norm.weight", "nothing", 3),
        (f"{a}/what", "nothing"),
        (f"{m}/count", 3, 26),
        (f"{m}/start", 3, 1 << 61),
        (f"{m}/shape", [25], [50, 5], []),
        (f"{m}/shard", [1, 2], [0, 1 << 30]),
        (f"files/{OPTIMIZER}/tensors/master|norm.weight/name", "out.bias"),
        (f"files/{OPTIMIZER}/tensors/exp_avg|norm.weight", GONE, {}),
        (f"files/{MODEL}/sums/tensors", {}, []),
        (f"files/{RANK}/tensors", GONE, {}),
        ("numbers/layer.weight/step", "x", -3, 2.5, {"$float": "nan"}, {"$scalar": ["float32", -3.0]}, [1], None,
         {"$tensor": "x"}, {"$embedded": ["load", [1], ""]}, {"$scalar": [3]}, {"$dict": [3]}, {"$float": [1, 2]}),
        ("numbers/layer.weight/exp_avg", 3),
        ("numbers/layer.weight", GONE, {"$tuple": [1]}),
        ("groups/0/options/foreach", []),
        ("groups/0/options/amsgrad", True),
        ("groups/0/options/lr", "x", {"$float": "inf"}, {"$float": "nan"}, None, []),
        ("groups/0/options/betas", 3, {"$tuple": [0.9]}, {"$tuple": [0.9, 1.5]}, {"$tuple": ["x", 0.9]}),
        ("groups/0/options", {"$tuple": [1]}, {"$counter": 3}, DEEP),
        ("groups/0/number", -1),
        ("groups/0/names", "x", [3]),
    ):  # fmt: skip
        add("manifest.json", "manifest", path, *values)
    for file, key in (
        (MODEL, "layer.weight"),
        (OPTIMIZER, "exp_avg|layer.weight"),
        (RANK, "rank.random.torch"),
    ):
        for path, *values in (
            ("dtype", "F64", "OBJ", 3, GONE),
            ("shape", [24], [5, 5, 5], "x", [-1], GONE, DEEP),
            ("data_offsets", [0], "x", [0, 1 << 60], [8, 4], [-4, 96], GONE),
        ):
            add(file, "header", f"{key}/{path}", *values)
        add(file, "header", key, GONE, 3, [])
        add(file, "header", "__metadata__", 3, {"x": 3})
        for text in ("[" * 5000, "[]", "null", '{"x":', "\ud7ff", '{"a":1,"a":2}'):
            found.append(
                (
                    file,
                    f"header {text[:9]!r}",
                    lambda forged, file=file, text=text: forged.headers.update({file: text}),
                )
            )
    for path, *values in (
        ("engine", GONE, 3, [], "x"),
        ("engine/counters", GONE, 3, {}, []),
        ("engine/counters/global_steps", "x", -3, 1.5, None, 1 << 63, True, GONE),
        ("engine/counters/skipped_steps", "x", -3),
        ("engine/counters/global_samples", [1], {"$tuple": []}),
        ("engine/learning_rates", 3, {}, None),
        ("engine/learning_rates/groups/0/foreach", []),
        ("engine/learning_rates/groups/0/betas", {"$tuple": [0.9, 1.5]}),
        ("engine/learning_rates/groups", [], "x", [3], [{"lr": "x"}]),
        ("engine/learning_rates/scheduler", None, {}, 3, {"last_batch_iteration": "x"}, {"last_batch_iteration": -3},
         {"last_batch_iteration": 2, "step": 3}),
        ("engine/loss_scaler", 3, {"cur_scale": "x"}, {"cur_scale": 0}, {"cur_scale": {"$float": "inf"}},
         {"cur_iter": -3}, {"cur_hysteresis": None}, {"update_scale": 1}),
        ("client_state", 3, None, [], GONE, {"$tuple": [1]}, {"x": {"$tensor": "nothing"}}, {"x": {"$bytes": "?"}},
         {"x": {"$array": ["O", [1], ""]}}, {"x": {"$tensor": []}}, {"x": {"$eval": "1"}}, DEEP),
        ("data", 3, [], {}, {"kind": "x"}, {"kind": "samples"}, {**POSITION, "lists": -1}, {**POSITION, "mini_batches": "x"},
         {**POSITION, "generator": 3}, {**POSITION, "sampler": {"$dict": [["$eval", 3]]}}, {"kind": "given", "states": []}),
    ):  # fmt: skip
        add("state.json", "text", path, *values)
    for path, *values in (
        ("random", GONE, 3, {}),
        ("random/torch", GONE, 3, {"$tensor": "nothing"}, {"$embedded": ["uint8", [1], "AQ=="]}),
        ("random/python", GONE, []),
        ("random/python/version", "x", 9),
        ("random/python/words", GONE, [1, 2], {"$embedded": ["int64", [1], "AQAAAAAAAAA="]}),
        ("random/python/gauss", "x", []),
        ("random/numpy", 3, {"words": 3}),
        ("random/numpy/rest/0", 9999, -3),
    ):
        add(RANK, "beside", path, *values)
    for file, key, value in (
        (MODEL, "layer.weight", "I16"), (OPTIMIZER, "exp_avg|layer.weight", "I32"),
        (OPTIMIZER, "master|layer.weight", "I32"),
    ):  # fmt: skip

        def cast(forged: Forged, file: str = file, key: str = key, value: str = value) -> None:
            put(forged.headers[file], f"{key}/dtype", value)
            put(forged.manifest, f"files/{file}/tensors/{key}/dtype", {"I16": "int16", "I32": "int32"}[value])

        found.append((file, f"both {key} {value}", cast))

    def without(forged: Forged, key: str) -> None:
        del forged.headers[OPTIMIZER][key]
        del forged.manifest["files"][OPTIMIZER]["tensors"][key]
        del forged.manifest["files"][OPTIMIZER]["sums"]["tensors"][key]

    for key in ("exp_avg/layer.weight", "exp_avg_sq/scale", "master/out.bias"):
        file = OPTIMIZER if "master" in key else "manifest.json"
        found.append((file, f"without {key}", lambda forged, key=key: without(forged, key)))
    found.append((RANK, "no state", lambda forged: forged.headers[RANK].pop("__metadata__")))
    for path, *values in (
        ("schema", 9, "x"),
        ("type", "Profile", 3),
        ("value", 3, [], GONE, DEEP),
        ("value/mini_batch", "x", -3, 0),
        ("value/stages", [], 3, [{}]),
        ("value/stages/0/ranks", [1], "x", [-1]),
        ("value/stages/0/name", "another"),
    ):
        add("plan.json", "text", path, *values)
    for text in ("", "[" * 5000, "null", "{}"):
        for name in ("plan.json", "state.json"):
            found.append(
                (
                    name,
                    f"text {text[:9]!r}",
                    lambda forged, name=name, text=text: forged.texts.update({name: text}),
                )
            )
    return [(file, said, edit) for file, said, edit in found]


def make_engine() -> StageEngine:
    stage = Stage(name="all", blocks=("all",), ranks=(0,), micro_batch_size=8, in_flight=1)
    plan = PipelinePlan(
        model="toy", graph="0" * 16, planner="by hand", mini_batch=8, loss_unit=1, stages=(stage,), edges=()
    )
    module = toy.Holder((*toy.SHAPES, "frozen.weight"))
    module.register_buffer("running_mean", torch.zeros(2))
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}
    scale = {"enabled": True, "initial_scale_power": 6}
    config = make_config(0, "fp32", scheduler=schedule, fp16=scale)
    return toy.engine_of(module, config, plan=plan, rank=0, groups=StageGroups.create(plan, timeout_s=60))


def all_of(engine: StageEngine) -> tuple[list[Tensor], Any]:
    """Return everything that a load may change."""
    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    tensors = [*engine.held_weights().values(), *engine.updater.own_tensors(), torch.get_rng_state()]
    options = [{k: v for k, v in group.items() if k != "params"} for group in inner.param_groups]
    return [each.clone() for each in tensors], copy.deepcopy(
        (engine.shared_state(), options, random.getstate())
    )


def same(one: tuple[list[Tensor], Any], other: tuple[list[Tensor], Any]) -> bool:
    return (
        repr(one[1]) == repr(other[1])
        and len(one[0]) == len(other[0])
        and all(map(torch.equal, one[0], other[0]))
    )


def forge_each(directory: str, first: int, every: int) -> list[str]:
    """Load each variant, by tag and without; return what is wrong of which."""
    allow_fp16()
    root = Path(directory)
    engine = make_engine()
    before: list[Any] = []
    restore = before.append
    for step, tag in enumerate(("first", "second")):
        toy.feed(engine, step, 1)
        engine.step()
        save_checkpoint([engine], root, tag, client_state={"best": torch.ones(3)}, data=POSITION)
    good = {path: path.read_bytes() for path in (root / "second").iterdir()}
    load_checkpoint([engine], root, "first")
    wanted = all_of(engine)
    toy.feed(engine, 2, 1)
    engine.step()
    start, wrong = all_of(engine), []
    for file, said, edit in variants()[first::every]:
        forged = Forged(root / "second")
        edit(forged)
        forged.write()
        before.clear()
        try:
            load_checkpoint([engine], root, "second", restore_data=restore)
            wrong.append(f"{said}: loaded")
        except GppError as error:
            text = str(error)
            is_named = any(of in text for of in (file, MODEL, "state.safetensors", *OTHER_MODEL))
            if re.search(r": \w+(Error|Exception)\(", text) or "\n" in text or not is_named:
                wrong.append(f"{said}: says {text}")
        except Exception as error:
            wrong.append(f"{said}: raw {error!r}")
        if before or not same(start, all_of(engine)):
            wrong.append(f"{said}: something changed")
        try:
            loaded = load_checkpoint([engine], root, restore_data=restore)
            if loaded is None or loaded.directory.name != "first" or not same(wanted, all_of(engine)):
                wrong.append(f"{said}: loaded {loaded} without a tag")
            toy.feed(engine, 2, 1)
            engine.step()
        except GppError:
            pass
        except Exception as error:
            wrong.append(f"{said}: raw {error!r} without a tag")
        start = all_of(engine)
        for path, data in good.items():
            path.write_bytes(data)
    load_checkpoint([engine], root, "second")
    return wrong


@pytest.mark.parametrize("shard", range(SHARDS))
def test_forged_with_right_sums(shard: int, tmp_path: Path) -> None:
    assert len(variants()) >= 240
    (wrong,) = run_kept_ranks(forge_each, 1, str(tmp_path), shard, SHARDS)
    assert not wrong, "\n".join(wrong)


# ---- files that `gpp convert` reads ----------------------------------------------------------------------

BAD_STATE: list[tuple[str, Any]] = [
    ("module", 3), ("module", {"a": 3}), ("optimizer/state", 3), ("optimizer/state", {0: 3}),
    ("optimizer/state", {0: {"step": "x"}}), ("optimizer/state", {0: {"step": -3}}),
    ("optimizer/state", {0: {"exp_avg": torch.zeros(2)}}), ("optimizer/state", {0: {"exp_avg": "x"}}),
    ("optimizer/param_groups", 3), ("optimizer/param_groups", [3]), ("optimizer/param_groups", [{}]),
    ("optimizer/param_groups", [{"params": "x"}]), ("optimizer/param_groups", [{"params": [0], "param_names": [3]}]),
    ("optimizer/param_groups", [{"params": [[0]], "param_names": ["a"]}]),
    ("optimizer/param_groups", [{"params": [0], "param_names": ["a"], "lr": "x"}]),
    ("optimizer/param_groups", [{"params": [0], "param_names": ["a"], "betas": 3}]),
    ("step", "x"), ("step", -3), ("step", float("inf")), ("step", [1]),
]  # fmt: skip
BAD_MODULE: list[tuple[str, Any]] = [
    ("param_groups", 3), ("param_groups", [{"params": ["nothing"]}]), ("param_groups", [{"params": ["a"], "lr": "x"}]),
    ("step", "x"), ("step", -3), ("names", 3), ("names", {"a": 3}), ("buffers", 3), ("buffers", ["nothing", "a"]),
    ("module", 3), ("module", {"b": "x"}),
]  # fmt: skip
BAD_PARTS: list[tuple[str, Any]] = [
    ("fp32", {}), ("fp32", 3), ("fp32", {"param": "x"}), ("exp_avg", {}), ("exp_avg", {"param": torch.zeros(2)}),
    ("exp_avg", "x"), ("step", "x"), ("step", -3), ("step", {"param": -3}), ("step", {}),
]  # fmt: skip


def test_files_to_convert_are_refused_in_one_line(tmp_path: Path) -> None:
    read: list[tuple[str, Callable[[Path], Any], Path]] = []
    for number, (path, value) in enumerate(BAD_STATE):
        file = tmp_path / f"{number}.pt"
        write_torch(state_of(1), file)
        plain = torch.load(file, weights_only=True)
        put(plain, path, value)
        torch.save(plain, file)
        read.append((f"{path} {value}", read_torch, file))
    for number, (part, value) in enumerate([*BAD_MODULE, *BAD_PARTS]):
        folder = tmp_path / f"universal-{number}"
        write_universal(state_of(1), folder)
        if number < len(BAD_MODULE):
            plain = torch.load(folder / "module.pt", weights_only=True)
            put(plain, part, value)
            torch.save(plain, folder / "module.pt")
        else:
            torch.save(value, folder / "zero" / "a" / f"{part}.pt")
        read.append((f"{part} {value}", read_universal, folder))
    for number, (path, value) in enumerate(
        [("numbers/a/step", "x"), ("numbers/a/step", -3), ("numbers/a", {"$tuple": []}), ("numbers", {"z": {}}),
         ("groups/0/options/lr", "x"), ("groups/0/names", ["z"]), ("step", -3)]
    ):  # fmt: skip
        forged = Forged(write_checkpoint(state_of(1), tmp_path / f"own-{number}", "tag"))
        put(forged.manifest, path, value)
        forged.write()
        read.append((f"{path} {value}", read_checkpoint, forged.target))
    for said, reader, file in read:
        with pytest.raises(CheckpointError) as caught:
            print(said, reader(file))
        text = str(caught.value)
        assert str(file) in text or "manifest.json" in text, said
        assert "\n" not in text, said


def test_positions_in_the_data() -> None:
    check_position(POSITION)
    check_position({"kind": "given", "states": [None]})
    for key in ("mini_batches", "lists", "list_size", "samples", "kind"):
        for value in ("x", -3, 1.5, [], 1 << 63):
            with pytest.raises(CheckpointError, match="position in training_data cannot be read"):
                check_position({**POSITION, key: value})
