"""Cluster descriptions as JSON: nodes, their devices, the levels of the network.

    {"name": "summit", "nodes": 8,
     "devices": [{"name": "V100-16GB", "count": 4, "memory_gb": 16, "tflops": 15.7,
                  "memory_gb_per_s": 900, "efficiency": 0.7, "launch_us": 8}],
     "links": [{"name": "NVLink", "span": 4, "gb_per_s": 50, "latency_us": 6},
               {"name": "InfiniBand EDR", "gb_per_s": 12.5, "latency_us": 10}]}

``devices`` are those of one node, in rank order; several entries make a mixed node; ``host_gb_per_s`` is
the link to host memory (25, PCIe 4.0 x16, where not given). ``links`` go from the innermost level outwards;
``span`` is how many consecutive ranks a level joins, and the outermost, which joins all, needs none. GB are
10^9 bytes.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.cluster import Cluster, Device, Link

CLUSTER_DIR = Path(__file__).resolve().parents[1] / "clusters"
"""Package data; `configs/clusters` is a link to it."""

_DEVICE_KEYS = {"name", "count", "memory_gb", "tflops", "memory_gb_per_s", "efficiency", "launch_us",
                "host_gb_per_s"}  # fmt: skip
_LINK_KEYS = {"name", "span", "gb_per_s", "latency_us"}


def cluster_names() -> list[str]:
    """Return the names of the descriptions that come with the package."""
    return sorted(path.stem for path in CLUSTER_DIR.glob("*.json"))


def read_cluster(source: str | Path | dict[str, Any], *, num_devices: int | None = None) -> Cluster:
    """Return the cluster a description means.

    Args:
        source: a file, the name of a description that comes with the package, or the description.
        num_devices: as many as are wanted: nodes are added or left out; None takes ``nodes``.

    Raises:
        ConfigError: the file is missing or wrong; one line with the key, the value and the fix.
    """
    if isinstance(source, dict):
        return _cluster_of(source, "cluster", num_devices)
    path = Path(source)
    if not path.is_file() and path.suffix == "":
        path = CLUSTER_DIR / f"{source}.json"
    if not path.is_file():
        close = difflib.get_close_matches(Path(source).stem, cluster_names(), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"cluster {str(source)!r}: no such file{hint} (known: {', '.join(cluster_names())})"
        )
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"cluster {path.name}: not readable as JSON ({error})") from error
    return _cluster_of(plain, path.name, num_devices)


def describe_cluster(cluster: Cluster) -> dict[str, Any]:
    """Return the description that `read_cluster` makes the same cluster of."""
    devices: list[dict[str, Any]] = []
    for device in cluster.devices:
        entry = {
            "name": device.name,
            "count": 1,
            "memory_gb": device.memory_bytes / 1e9,
            "tflops": device.flops_per_s / 1e12,
            "memory_gb_per_s": device.memory_bytes_per_s / 1e9,
            "efficiency": device.efficiency,
            "launch_us": device.launch_us,
            "host_gb_per_s": device.host_bytes_per_s / 1e9,
        }
        if devices and {**devices[-1], "count": 1} == entry:
            devices[-1]["count"] += 1
        else:
            devices.append(entry)
    links = [
        {
            "name": link.name,
            "span": link.span,
            "gb_per_s": link.bytes_per_s / 1e9,
            "latency_us": link.latency_us,
        }
        for link in cluster.links
    ]
    return {"name": cluster.name, "devices": devices, "links": links}


def _cluster_of(plain: Any, where: str, num_devices: int | None) -> Cluster:
    _check_keys(plain, {"name", "nodes", "devices", "links"}, {"name", "devices", "links"}, where)
    node: list[Device] = []
    for i, entry in enumerate(_items(plain, "devices", where)):
        at = f"{where}: devices[{i}]"
        _check_keys(entry, _DEVICE_KEYS, {"name", "memory_gb", "tflops", "memory_gb_per_s"}, at)
        device = Device(
            name=str(entry["name"]),
            memory_bytes=round(_positive(entry, "memory_gb", at) * 1e9),
            flops_per_s=_positive(entry, "tflops", at) * 1e12,
            memory_bytes_per_s=_positive(entry, "memory_gb_per_s", at) * 1e9,
            efficiency=_positive(entry, "efficiency", at, default=0.5),
            launch_us=_positive(entry, "launch_us", at, default=5.0, may_be_zero=True),
            host_bytes_per_s=_positive(entry, "host_gb_per_s", at, default=25.0) * 1e9,
        )
        if device.efficiency > 1:
            raise ConfigError(
                f"{at}.efficiency is {device.efficiency}; it is a fraction of the peak, at most 1"
            )
        node += [device] * _count(entry, "count", at)
    nodes = _count(plain, "nodes", where)
    total = len(node) * nodes
    if num_devices is not None:
        if num_devices < 1:
            raise ConfigError(f"{where}: {num_devices} devices are asked for; at least 1 is needed")
        total = num_devices
    devices = tuple(node[i % len(node)] for i in range(total))
    return Cluster(name=str(plain["name"]), devices=devices, links=_links(plain, where, total))


def _links(plain: dict[str, Any], where: str, total: int) -> tuple[Link, ...]:
    entries = _items(plain, "links", where)
    links: list[Link] = []
    for i, entry in enumerate(entries):
        at = f"{where}: links[{i}]"
        _check_keys(entry, _LINK_KEYS, {"name", "gb_per_s"}, at)
        is_last = i == len(entries) - 1
        if "span" not in entry and not is_last:
            raise ConfigError(f"{at} ({entry['name']}) has no span: how many consecutive ranks it joins")
        span = _count(entry, "span", at) if "span" in entry else total
        if links and span <= links[-1].span and "span" in entry:
            raise ConfigError(f"{at}.span is {span}; levels go outwards, it must exceed {links[-1].span}")
        if links and "span" in entry and span % links[-1].span:
            raise ConfigError(f"{at}.span is {span}, not a multiple of the inner level's {links[-1].span}")
        links.append(
            Link(
                name=str(entry["name"]),
                span=max(span, 1),
                bytes_per_s=_positive(entry, "gb_per_s", at) * 1e9,
                latency_us=_positive(entry, "latency_us", at, default=5.0, may_be_zero=True),
            )
        )
    if links[-1].span < total:
        raise ConfigError(
            f"{where}: no link joins all {total} devices (the outermost, {links[-1].name}, spans "
            f"{links[-1].span}); add a level without span"
        )
    return tuple(links)


def _items(plain: dict[str, Any], key: str, where: str) -> list[Any]:
    items = plain[key]
    if not isinstance(items, list) or not items:
        raise ConfigError(f"{where}: {key} must be a list with at least one entry")
    return items


def _check_keys(plain: Any, known: set[str], needed: set[str], where: str) -> None:
    if not isinstance(plain, dict):
        raise ConfigError(f"{where}: expected an object, found {type(plain).__name__}")
    for key in sorted(set(plain) - known):
        close = difflib.get_close_matches(key, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; the keys are {', '.join(sorted(known))}"
        raise ConfigError(f"{where}: unknown key {key!r}{hint}")
    missing = sorted(needed - set(plain))
    if missing:
        raise ConfigError(f"{where}: {missing[0]} is missing; add it")


def _positive(
    plain: dict[str, Any], key: str, where: str, *, default: float | None = None, may_be_zero: bool = False
) -> float:
    value: Any = plain.get(key, default)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or value < 0 or (value == 0 and not may_be_zero):
        raise ConfigError(f"{where}.{key} is {value!r}; it must be a number above 0")
    return float(value)


def _count(plain: dict[str, Any], key: str, where: str) -> int:
    value = plain.get(key, 1)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{where}.{key} is {value!r}; it must be a positive integer")
    return value
