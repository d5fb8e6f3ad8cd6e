"""The table of planners, schedules and transports: what is found, what is refused, and in which words."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gpp_plugin.config.reader import read_config
from gpp_plugin.errors import ExtensionError
from gpp_plugin.plugins import (
    PLANNERS,
    PLUGIN_KINDS,
    SCHEDULES,
    TRANSPORTS,
    PluginKind,
    Schedule,
    TransportFactory,
    find_planner,
    find_schedule,
    find_transport,
    is_schedule_name,
    look_again,
    may_split_backward,
    planning_schedule,
    schedule_names,
)

MODULE = """
from gpp_plugin.plan.baselines.stock_chain import uniform_plan as halves
from gpp_plugin.schedule.orders.kfkb import ONE_F_ONE_B as patient, KfKb
from gpp_plugin.runtime.messages.transport import NATIVE_TRANSPORT as relay
number = 3
class Nothing:
    pass
nothing = Nothing()
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return what makes a package of entry points, as pip leaves it in a folder of ``sys.path``."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "gpp_example_doors.py").write_text(MODULE)

    def make(package: str, points: dict[str, dict[str, str]]) -> None:
        folder = tmp_path / f"{package.replace('-', '_')}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = []
        for group, entries in points.items():
            lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
        (folder / "entry_points.txt").write_text("\n".join(lines))
        look_again()

    yield make
    sys.modules.pop("gpp_example_doors", None)
    monkeypatch.undo()
    look_again()


def planners(**entries: str) -> dict[str, dict[str, str]]:
    return {"gpp_plugin.planners": entries}


@pytest.mark.parametrize("door", PLUGIN_KINDS, ids=lambda door: door.kind)
def test_everything_built_in_can_be_loaded_and_has_its_shape(door: PluginKind) -> None:
    for name in door.built_in:
        assert door.wrong_shape(door.load(name)) == "", name
        assert name in door
    assert door.names()[: len(door.built_in)] == tuple(door.built_in)


def test_what_a_package_adds_is_listed_named_and_loaded(install) -> None:
    install(
        "gpp-example",
        {
            "gpp_plugin.planners": {"halves": "gpp_example_doors:halves"},
            "gpp_plugin.schedules": {"patient": "gpp_example_doors:patient"},
            "gpp_plugin.transports": {"relay": "gpp_example_doors:relay"},
        },
    )
    assert PLANNERS.names() == (*PLANNERS.built_in, "halves")
    assert schedule_names() == ("auto", "1f1b", "2f2b", "kfkb", "gpipe", "greedy", "zero_bubble", "patient")
    assert TRANSPORTS.names() == ("native", "megatron", "relay")
    assert "gpp_example_doors" not in sys.modules, "names are listed without an import"
    config = read_config({"graph_pipeline": {"planner": "halves", "schedule": "patient", "p2p": "relay"}})
    assert config is not None
    assert (config.planner, config.schedule, config.p2p) == ("halves", "patient", "relay")
    assert find_planner("halves") is find_planner("uniform")
    assert find_schedule("patient") is find_schedule("1f1b")
    assert find_transport("relay") is find_transport("native")
    assert is_schedule_name("patient") and planning_schedule("patient") == "1f1b"


@pytest.mark.parametrize(
    ("kind", "key", "value", "words"),
    [
        (
            "planner",
            "planner",
            "gpp_missing_module:plan",
            "cannot be loaded: ModuleNotFoundError: No module named 'gpp_missing_module'",
        ),
        (
            "planner",
            "planner",
            "gpp_example_doors:number",
            "is an object of type int; a planner is a function of one PlanRequest (gpp_plugin.plugins.Planner)",
        ),
        ("schedule", "schedule", "gpp_example_doors:KfKb", "is the class KfKb; name an instance of it"),
        (
            "transport",
            "p2p",
            "gpp_example_doors:nothing",
            "is an object of type Nothing without make and check; derive a class from "
            "gpp_plugin.plugins.TransportFactory and name an instance of it",
        ),
    ],
)
def test_what_cannot_be_used_is_one_line(install, kind: str, key: str, value: str, words: str) -> None:
    install("gpp-example", {f"gpp_plugin.{kind}s": {"mine": value}})
    with pytest.raises(ExtensionError) as raised:
        read_config({"graph_pipeline": {key: "mine"}})
    assert str(raised.value) == (
        f"gpp_plugin.{kind}s: {kind} 'mine' of package 'gpp-example' ({value}) {words}; repair or uninstall the package, "
        f"or use another {kind}"
    )
    assert read_config({"graph_pipeline": {"planner": "uniform", "schedule": "gpipe", "p2p": "native"}})


def test_a_name_of_ours_is_refused_where_it_is_used(install) -> None:
    install("gpp-example", planners(uniform="gpp_example_doors:halves"))
    with pytest.raises(ExtensionError) as raised:
        read_config({"graph_pipeline": {"planner": "uniform"}})
    assert str(raised.value) == (
        "gpp_plugin.planners: planner 'uniform' of package 'gpp-example' has a name that gpp_plugin uses itself; give its "
        "entry point another name, or uninstall the package"
    )
    assert find_planner("autopipe") is not None
    assert PLANNERS.names() == tuple(PLANNERS.built_in)


@pytest.mark.parametrize("name", ["auto", "kfkb", "3f3b", "2f3b"])
def test_schedules_keep_their_own_words(install, name: str) -> None:
    install("gpp-example", {"gpp_plugin.schedules": {name: "gpp_example_doors:patient"}})
    line = f"schedule {name!r} of package 'gpp-example' has a name that gpp_plugin"
    with pytest.raises(ExtensionError, match=line):
        read_config({"graph_pipeline": {"schedule": name}})


def test_two_packages_with_one_name_are_both_named(install) -> None:
    install("gpp-example", planners(halves="gpp_example_doors:halves"))
    install("gpp-other", planners(halves="gpp_example_doors:halves"))
    line = "planner 'halves' is offered by the packages 'gpp-.*' and 'gpp-.*'; uninstall all but one"
    with pytest.raises(ExtensionError, match=line):
        find_planner("halves")


def test_what_is_lent_is_there_for_a_while() -> None:
    class Own(Schedule):
        splits_backward = True

        def order(self, plan, index, behind):
            raise NotImplementedError

    own = Own()
    with SCHEDULES.lent("own", own):
        assert find_schedule("own") is own
        assert may_split_backward("own")
        with (
            pytest.raises(ExtensionError, match="there is a schedule 'own' already"),
            SCHEDULES.lent("own", own),
        ):
            pass
    assert "own" not in SCHEDULES
    with pytest.raises(ExtensionError, match="is an object of type TransportFactory|without"):
        with TRANSPORTS.lent("own", type("Empty", (TransportFactory,), {})()):
            pass
