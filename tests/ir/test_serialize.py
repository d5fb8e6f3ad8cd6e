"""Readers of JSON: what they refuse, and that a line says where and what to write instead."""

import argparse
import dataclasses
import json
import os
import re
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest

from gpp_plugin.errors import ReadError
from gpp_plugin.ir.plan import PipelinePlan, Stage, StageEdge
from gpp_plugin.ir.serialize import (
    dumps,
    from_plain,
    load,
    loads,
    output_path,
    parse_json,
    read_json,
    save,
    to_plain,
    write_text_whole,
)
from gpp_plugin.ir.tensors import TensorSpec, batch_layout

SPEC = TensorSpec(name="h", dtype="float32", shape=(4, 8), num_samples=4, layout=batch_layout())
STAGE = Stage(name="a", blocks=("x",), ranks=(0,), micro_batch_size=4, in_flight=1, forward_us=1.0)
PLAN = PipelinePlan(
    model="m",
    graph="0" * 16,
    planner="uniform",
    mini_batch=8,
    loss_unit=4,
    stages=(STAGE, dataclasses.replace(STAGE, name="b", blocks=("y",), ranks=(1,))),
    edges=(StageEdge(src=0, dst=1, batch_tensors=("h",)),),
    tensors=(SPEC,),
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not JSON at line 1, column 1"),
        ("[1, 2", "not JSON"),
        ('{"a": NaN}', "NaN is no number"),
        ('{"a": -Infinity}', "-Infinity is no number"),
        ("1e999", "too large for 64 bits"),
        ("9" * 30, "too large for 64 bits"),
        ("9" * 5000, "too large for 64 bits"),
        ('{"a": 1, "b": 2, "a": 3}', 'key "a" is there twice'),
        ("[" * 65 + "]" * 65, "nested more than 64 levels"),
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ('["\\ud800"]', "half a character"),
        ("[" + "[]," * 6_000_000 + "[]]", "values"),
    ],
    ids=range(13),
)
def test_texts_that_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ReadError, match=reason) as caught:
        parse_json(text, what="a plan")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_what_is_read() -> None:
    value = {"a": [1, 2.5, None, True, "ü\U0001f600"], "b": {"": -(2**63)}}
    assert parse_json(json.dumps(value), what="a value") == value
    assert parse_json("[" * 64 + "]" * 64, what="a value") is not None


def test_files_that_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    with pytest.raises(
        ReadError, match=r"x\.json: cannot be read \(No such file or directory\); give the path of a plan"
    ):
        read_json(file, what="a plan")
    with pytest.raises(ReadError, match="cannot be read"):
        read_json(tmp_path, what="a plan")
    with pytest.raises(ReadError, match="is no path"):
        read_json("a\0b", what="a plan")
    with pytest.raises(ReadError, match="is larger than 1,000 bytes"):
        read_json("/dev/zero", what="a plan", max_bytes=1000)
    file.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ReadError, match=r"x\.json: is no text"):
        read_json(file, what="a plan")


def _changed(path: str, value: object) -> str:
    plain = json.loads(dumps(PLAN))
    *way, last = re.findall(r"\w+", path)
    at = plain["value"]
    for key in way:
        at = at[int(key) if key.isdecimal() else key]
    at[int(last) if last.isdecimal() else last] = value
    return json.dumps(plain)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("mini_batch", "8", '"8" is not valid; give a whole number'),
        ("mini_batch", -8, "-8 is not valid; give a whole number from 1 to"),
        ("mini_batch", 8.0, "8.0 is not valid; give a whole number"),
        ("mini_batch", True, "true is not valid; give a whole number"),
        ("mini_batch", 2**40, "is not valid; give a whole number from 1 to"),
        ("stages[1].ranks[0]", -1, "-1 is not valid; give a whole number from 0 to"),
        ("stages[1].ranks", 1, "1 is not valid; give a list"),
        ("stages[1].forward_us", -0.5, "-0.5 is not valid; give a number from 0"),
        ("stages[1].forward_us", 1e300, "1e[+]300 is not valid"),
        ("stages[1].name", None, "null is not valid; give a text"),
        ("stages[1].name", "x" * 20_000, "has 20000 characters"),
        ("stages[0]", [1], r"\[1\] is not valid; give an object, a Stage"),
        ("stages[0].rank", [0], "unknown keys .*did you mean 'ranks'"),
        ("tensors[0].layout.kind", "rows", '"rows" is not valid; give one of batch, uniform, unit'),
        ("vertical_sync", 0, "0 is not valid; give true or false"),
        ("mode", "often", '"often" is not valid; give one of sync, async'),
    ],
    ids=str,
)
def test_leaves_that_are_refused(path: str, value: object, reason: str) -> None:
    place = re.escape(path if "unknown" not in reason else path.rpartition(".")[0])
    with pytest.raises(ReadError, match=rf"^value\.{place}: .*{reason}"):
        loads(PipelinePlan, _changed(path, value))


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    save(PLAN, tmp_path / "plan.json")
    assert load(PipelinePlan, tmp_path / "plan.json") == PLAN
    assert from_plain(PipelinePlan, to_plain(PLAN)) == PLAN
    (tmp_path / "plan.json").write_text(_changed("stages[0].in_flight", "no"))
    with pytest.raises(ReadError, match=r"plan\.json: value\.stages\[0\]\.in_flight: "):
        load(PipelinePlan, tmp_path / "plan.json")


def test_what_is_written_whole_is_for_others_too(tmp_path: Path) -> None:
    """As any new file is, by the umask; one that is written again keeps what it was."""
    plain, whole = tmp_path / "plain", tmp_path / "whole"
    plain.write_text("a")
    write_text_whole(whole, "a")
    assert whole.stat().st_mode == plain.stat().st_mode
    whole.chmod(0o640)
    write_text_whole(whole, "b")
    assert whole.stat().st_mode & 0o777 == 0o640 and whole.read_text() == "b"


def test_only_a_regular_file_is_replaced(tmp_path: Path) -> None:
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    (tmp_path / "kept").write_text("a")
    link.symlink_to("kept")
    write_text_whole(link, "b")
    assert link.is_symlink() and (tmp_path / "kept").read_text() == "b"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text_whole(pipe, "c")
    assert pipe.is_fifo() and os.read(reader, 10) == b"c"
    os.close(reader)
    with pytest.raises(OSError, match="/dev/full"):
        write_text_whole("/dev/full", "d" * 10000)
    assert Path("/dev/full").is_char_device()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # files below /dev are files
        write_text_whole(Path(folder, "new", "out"), "e")
        assert Path(folder, "new", "out").read_text() == "e"


@pytest.mark.parametrize("path", ["kept/out", "folder", "socket", "/proc/x/out"])
def test_what_cannot_be_written_is_refused_before_work_begins(
    path: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("kept").touch()
    Path("folder").mkdir()
    socket.socket(socket.AF_UNIX).bind("socket")
    with pytest.raises(
        argparse.ArgumentTypeError, match=f"{path} cannot be written \\(.*\\); give another path"
    ):
        output_path(path)
    assert output_path("kept") == Path("kept") and output_path("new/folder/out") == Path("new/folder/out")
    assert not Path("new").exists() and output_path("/dev/null") == Path("/dev/null")
