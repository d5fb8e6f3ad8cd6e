"""The cost store: hits, misses, damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpp_plugin.errors import ProfileError
from gpp_plugin.ir.profile import BlockCost, Profile
from gpp_plugin.profile.machine import CostStore, default_directory

KEY = {"graph": "abc", "samples": [1, 2], "device": "cpu (1 thread)"}


def profile_of(us: float) -> Profile:
    cost = BlockCost(block="a", samples=(1, 2), forward_us=(us, 2 * us), backward_us=(us, 2 * us))
    return Profile(graph="abc", device="cpu (1 thread)", source="measured", costs=(cost,))


def test_what_is_stored_is_found_and_not_measured_again(tmp_path: Path) -> None:
    store = CostStore(tmp_path)
    calls = []

    def measure() -> Profile:
        calls.append(1)
        return profile_of(3.25)

    assert store.find_or_measure(KEY, measure) == profile_of(3.25)
    assert CostStore(tmp_path).find_or_measure(KEY, measure) == profile_of(3.25)
    assert len(calls) == 1
    assert store.find_or_measure({**KEY, "device": "cpu (2 threads)"}, measure) == profile_of(3.25)
    assert len(calls) == 2


@pytest.mark.parametrize("damage", ["", "{", '{"schema": 1, "type": "Profile", "value": {"graph": 1}}', "[]"])
def test_a_damaged_file_is_measured_anew_with_a_warning(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CostStore(tmp_path)
    store.find_or_measure(KEY, lambda: profile_of(1.0))
    store.path(KEY).write_text(damage)
    assert store.find_or_measure(KEY, lambda: profile_of(2.0)) == profile_of(2.0)
    assert "measuring again" in caplog.text and store.path(KEY).name in caplog.text
    assert store.find_or_measure(KEY, lambda: profile_of(3.0)) == profile_of(2.0)


def test_a_directory_that_cannot_be_written_costs_only_the_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    store = CostStore(tmp_path / "file" / "profiles")
    assert store.find_or_measure(KEY, lambda: profile_of(1.0)) == profile_of(1.0)
    assert "profile_dir" in caplog.text


def test_an_empty_profile_is_an_error(tmp_path: Path) -> None:
    empty = Profile(graph="abc", device="cpu", source="measured", costs=())
    with pytest.raises(ProfileError, match="no blocks"):
        CostStore(tmp_path).find_or_measure(KEY, lambda: empty)
    assert not list(tmp_path.iterdir())


def test_the_default_directory_follows_the_cache_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_directory() == tmp_path / "gpp_plugin" / "profiles"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_directory() == Path.home() / ".cache" / "gpp_plugin" / "profiles"
