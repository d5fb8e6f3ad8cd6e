"""Cluster descriptions as JSON: nodes, their devices, the levels of the network.

    {"name": "summit", "nodes": 8,
     "devices": [{"name": "V100-16GB", "count": 4, "memory_gb": 16, "tflops": {"fp32": 15.7, "fp16": 125},
                  "memory_gb_per_s": 900, "efficiency": 0.7, "launch_us": 8}],
     "links": [{"name": "NVLink", "span": 4, "gb_per_s": 50, "latency_us": 6},
               {"name": "InfiniBand EDR", "gb_per_s": 12.5, "latency_us": 10, "adapters": 2,
                "all_reduce": {"gb_per_s": 21, "latency_us": 60}, "all_gather": {"gb_per_s": 20}}]}

``devices`` are those of one node, in rank order; several entries make a mixed node; ``tflops`` are the dense peaks by
type, the usual one first, or one number, of whatever type is trained in; ``host_gb_per_s`` is
the link to host memory (25, PCIe 4.0 x16, the default). ``links`` run from the innermost level outwards;
``span`` is how many consecutive ranks a level joins, and the outermost, which joins all, needs none; ``gb_per_s`` is of
each rank, or of each of the ``adapters`` of a group of the level inside, which its ranks share. ``all_reduce`` and
``all_gather`` (of reduce-scatters too) may say what nccl-tests measure over all ranks of a level: the bus bandwidth of
a large one, and microseconds of a small one. GB are 10^9 bytes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gpp_plugin.errors import ConfigError, nearest
from gpp_plugin.ir.cluster import Cluster, Device, Link, MeasuredCollective
from gpp_plugin.ir.serialize import read_json
from gpp_plugin.ir.tensors import TRAINING_DTYPES
from gpp_plugin.ir.typed_leaves import nearest_key, show

CLUSTER_DIR = Path(__file__).resolve().parents[1] / "clusters"
"""Package data; `configs/clusters` is a link to it."""

_DEVICE_KEYS = {"name", "count", "memory_gb", "tflops", "memory_gb_per_s", "efficiency", "launch_us",
                "host_gb_per_s"}  # fmt: skip
_LINK_KEYS = {"name", "span", "gb_per_s", "latency_us", "adapters", "all_reduce", "all_gather"}
_LONGEST_NAME = 200
MOST_DEVICES = 16_384
"""Planners work on each of them."""
_MOST_COUNT = 2**20
MOST_OF_A_UNIT = 1e9
"""GB, teraflops, microseconds: more is another unit's number."""
USUAL_DTYPE = "fp32"
"""Of which a speed is taken to be whose description does not say."""


def cluster_names() -> list[str]:
    """Return the names of the descriptions that come with the package."""
    return sorted(path.stem for path in CLUSTER_DIR.glob("*.json"))


def read_cluster(
    source: str | Path | dict[str, Any], *, num_devices: int | None = None, dtype: str | None = None
) -> Cluster:
    """Return the cluster a description means.

    Args:
        source: a file, the name of a description that comes with the package, or the description.
        num_devices: as many as are wanted: nodes are added or left out; None takes ``nodes``.
        dtype: whose speed counts: ``bf16``, ``fp16`` or ``fp32``; None: the first that all devices have a speed in.

    Raises:
        ConfigError: the file is missing or wrong; one line with the key, the value and the fix.
    """
    if isinstance(source, dict):
        return _cluster_of(source, "cluster", num_devices, dtype)
    if not isinstance(source, str | Path):
        raise ConfigError(
            f"cluster: {str(source)[:_LONGEST_NAME]!r} is a {type(source).__name__}; give a name "
            f"({', '.join(cluster_names())}), a file or a description"
        )
    path = Path(source)
    if not os.path.isfile(path) and path.suffix == "":
        path = CLUSTER_DIR / f"{source}.json"
    if not os.path.isfile(path):
        hint = nearest(Path(source).stem[:100], cluster_names())
        raise ConfigError(
            f"cluster {str(source)[:_LONGEST_NAME]!r}: no such file{hint} (known: {', '.join(cluster_names())})"
        )
    plain = read_json(path, what="a cluster description")
    return _cluster_of(plain, path.name, num_devices, dtype)


def describe_cluster(cluster: Cluster) -> dict[str, Any]:
    """Return the description that `read_cluster` makes the same cluster of."""
    devices: list[dict[str, Any]] = []
    for device in cluster.devices:
        # by type, that which counts first; one number where only that is known
        peaks = sorted(device.peaks, key=lambda peak: peak[0] != device.dtype)
        entry = {
            "name": device.name,
            "count": 1,
            "memory_gb": device.memory_bytes / 1e9,
            "tflops": {dtype: peak / 1e12 for dtype, peak in peaks} or device.flops_per_s / 1e12,
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
            **({} if link.adapters is None else {"adapters": link.adapters}),
            **_describe_measured("all_reduce", link.all_reduce),
            **_describe_measured("all_gather", link.all_gather),
        }
        for link in cluster.links
    ]
    return {"name": cluster.name, "devices": devices, "links": links}


def _describe_measured(key: str, measured: MeasuredCollective | None) -> dict[str, Any]:
    if measured is None:
        return {}
    latency = {} if measured.latency_us is None else {"latency_us": measured.latency_us}
    return {key: {"gb_per_s": measured.bytes_per_s / 1e9, **latency}}


def _cluster_of(plain: Any, where: str, num_devices: int | None, dtype: str | None) -> Cluster:
    _check_keys(plain, {"name", "nodes", "devices", "links"}, {"name", "devices", "links"}, where)
    entries = _items(plain, "devices", where)
    for i, entry in enumerate(entries):
        at = f"{where}: devices[{i}]"
        _check_speeds(entry, len(entries) > 1, at)
        _check_keys(entry, _DEVICE_KEYS, {"name", "memory_gb"}, at)
    peaks = [_peaks(entry, f"{where}: devices[{i}]") for i, entry in enumerate(entries)]
    dtype = _dtype_of(entries, peaks, where, dtype)
    node: list[Device] = []
    for i, (entry, known) in enumerate(zip(entries, peaks, strict=True)):
        at = f"{where}: devices[{i}]"
        device = Device(
            name=_name(entry, at),
            memory_bytes=round(_positive(entry, "memory_gb", at) * 1e9),
            flops_per_s=known[dtype] if known else _positive(entry, "tflops", at) * 1e12,
            dtype=dtype,
            peaks=tuple(known.items()),
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
        if len(node) > MOST_DEVICES:
            raise ConfigError(f"{at}.count: {len(node)} devices in a node; give at most {MOST_DEVICES}")
    nodes = _count(plain, "nodes", where)
    total = len(node) * nodes
    if num_devices is not None:
        if not 1 <= num_devices <= MOST_DEVICES:
            raise ConfigError(
                f"{where}: {num_devices} devices are requested; give at least 1 and at most {MOST_DEVICES}"
            )
        total = num_devices
    if total > MOST_DEVICES:
        raise ConfigError(f"{where}.nodes is {nodes}: {total} devices in all; give at most {MOST_DEVICES}")
    devices = tuple(node[i % len(node)] for i in range(total))
    return Cluster(name=_name(plain, where), devices=devices, links=_links(plain, where, total))


def _check_speeds(entry: Any, is_mixed: bool, where: str) -> None:
    """Refuse a device without a speed, and say why it is needed where devices differ."""
    missing = [key for key in ("tflops", "memory_gb_per_s") if isinstance(entry, dict) and key not in entry]
    if missing:
        why = "; heterogeneous devices get work by their speeds" if is_mixed else ""
        raise ConfigError(
            f"{where} ({entry.get('name', 'without a name')}): {missing[0]} is missing{why}: add it, or measure the "
            "machine: gpp doctor --gpus --output FILE"
        )


def _peaks(entry: dict[str, Any], where: str) -> dict[str, float]:
    """Return FLOP/s by type; empty where one number stands for any."""
    if not isinstance(entry["tflops"], dict):
        return {}
    at = f"{where}.tflops"
    _check_keys(entry["tflops"], set(TRAINING_DTYPES), set(), at)
    if not entry["tflops"]:
        raise ConfigError(f"{at} is empty; give at least one of {', '.join(TRAINING_DTYPES)}")
    return {dtype: _positive(entry["tflops"], dtype, at) * 1e12 for dtype in entry["tflops"]}


def _dtype_of(
    entries: list[dict[str, Any]], peaks: list[dict[str, float]], where: str, dtype_wanted: str | None
) -> str:
    """Return the type whose speeds are taken: the requested one, or the first that all devices have."""
    known = [found for found in peaks if found]
    common = [dtype for dtype in (known[0] if known else ()) if all(dtype in found for found in known)]
    if dtype_wanted is not None and dtype_wanted not in TRAINING_DTYPES:
        raise ConfigError(f"dtype {dtype_wanted!r}: is not known; give one of {', '.join(TRAINING_DTYPES)}")
    if not known or dtype_wanted in common:
        return dtype_wanted or USUAL_DTYPE
    if dtype_wanted is None and common:
        return common[0]
    lacking = next(
        i for i, found in enumerate(peaks) if found and (dtype_wanted or next(iter(known[0]))) not in found
    )
    has = f"devices[{lacking}] ({entries[lacking]['name']}) has a speed in {', '.join(peaks[lacking])}"
    if dtype_wanted is not None:
        raise ConfigError(
            f"{where}: {has} and none in {dtype_wanted}; train in one of these, or add tflops.{dtype_wanted}"
        )
    raise ConfigError(
        f"{where}: no type has a speed on all devices: {has}; add what the others have to its tflops"
    )


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
        adapters = _count(entry, "adapters", at) if "adapters" in entry else None
        inner = links[-1].span if links else 1
        if adapters is not None and adapters > inner:
            raise ConfigError(
                f"{at}.adapters is {adapters}; the {inner} ranks of the level inside can use at most one each"
            )
        links.append(
            Link(
                name=_name(entry, at),
                span=max(span, 1),
                adapters=adapters,
                bytes_per_s=_positive(entry, "gb_per_s", at) * 1e9,
                latency_us=_positive(entry, "latency_us", at, default=5.0, may_be_zero=True),
                all_reduce=_measured(entry, "all_reduce", at),
                all_gather=_measured(entry, "all_gather", at),
            )
        )
    if links[-1].span < total:
        raise ConfigError(
            f"{where}: no link joins all {total} devices (the outermost, {links[-1].name}, spans "
            f"{links[-1].span}); add a level without span"
        )
    return tuple(links)


def _measured(entry: dict[str, Any], key: str, where: str) -> MeasuredCollective | None:
    """Return what was measured of one kind of collective over all ranks of a level."""
    if key not in entry:
        return None
    plain, at = entry[key], f"{where}.{key}"
    _check_keys(plain, {"gb_per_s", "latency_us"}, {"gb_per_s"}, at)
    return MeasuredCollective(
        bytes_per_s=_positive(plain, "gb_per_s", at) * 1e9,
        latency_us=_positive(plain, "latency_us", at) if "latency_us" in plain else None,
    )


def _items(plain: dict[str, Any], key: str, where: str) -> list[Any]:
    items = plain[key]
    if not isinstance(items, list) or not items:
        raise ConfigError(f"{where}: {key} must be a list with at least one entry")
    return items


def _check_keys(plain: Any, known: set[str], needed: set[str], where: str) -> None:
    if not isinstance(plain, dict):
        raise ConfigError(f"{where}: expected an object, found {type(plain).__name__}")
    for key in sorted(set(plain) - known, key=str):
        raise ConfigError(f"{where}: unknown key {key!r}; {nearest_key(key, sorted(known))}")
    missing = sorted(needed - set(plain))
    if missing:
        raise ConfigError(f"{where}: {missing[0]} is missing; add it")


def _name(plain: dict[str, Any], where: str) -> str:
    name = plain["name"]
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME:
        raise ConfigError(
            f"{where}.name is {show(name)}; it must be a text of 1 to {_LONGEST_NAME} characters"
        )
    return name


def _positive(
    plain: dict[str, Any], key: str, where: str, *, default: float | None = None, may_be_zero: bool = False
) -> float:
    value: Any = plain.get(key, default)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MOST_OF_A_UNIT or (value == 0 and not may_be_zero):  # true of NaN
        least = "of at least 0" if may_be_zero else "above 0"
        raise ConfigError(
            f"{where}.{key} is {show(value)}; it must be a number {least}, at most {MOST_OF_A_UNIT:g}"
        )
    return float(value)


def _count(plain: dict[str, Any], key: str, where: str) -> int:
    value = plain.get(key, 1)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST_COUNT:
        raise ConfigError(
            f"{where}.{key} is {show(value)}; it must be a positive integer, at most {_MOST_COUNT}"
        )
    return value
