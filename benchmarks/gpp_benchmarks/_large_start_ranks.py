"""All ranks of `gpp bench large-start` on this machine: forked from one process that has imported everything.

python -m gpp_benchmarks._large_start_ranks SETTINGS_JSON

A rank that imports torch and DeepSpeed by itself has some 300 MB of its own; a forked one shares what it does not
change. Every rank counts what it asks of the job's store, by what for, and the process groups that it makes or passes.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WIDTH = 16
_PARENT_ENDS = 1
"""PR_SET_PDEATHSIG of prctl(2): a rank ends with the process that forked it."""


class CountingStore(dist.Store):
    """A store that counts requests and bytes by what they are for, the first parts of a key."""

    def __init__(self, inner: Any, counts: dict[str, dict[str, int]]) -> None:
        super().__init__()
        self._inner = inner
        self._counts = counts

    def _count(self, keys: Any, *, written: int = 0, read: int = 0) -> None:
        key = keys if isinstance(keys, str) else keys[0]
        count = self._counts.setdefault(purpose_of(key), {"requests": 0, "written": 0, "read": 0})
        count["requests"] += 1
        count["written"] += written
        count["read"] += read

    def has_extended_api(self) -> bool:
        """Return whether the store itself has it."""
        return self._inner.has_extended_api()

    def set_timeout(self, limit: datetime.timedelta) -> None:
        """Set the store's own limit."""
        self._inner.set_timeout(limit)

    def clone(self) -> CountingStore:
        """Return another connection that counts into the same counts."""
        return CountingStore(self._inner.clone(), self._counts)


def _counted(name: str, bytes_of: Callable[[Sequence[Any], Any], dict[str, int]]) -> Callable[..., Any]:
    """Return a method that asks the store itself and counts the request, with the bytes of its arguments and answer."""

    def ask(self: CountingStore, *arguments: Any) -> Any:
        answer = getattr(self._inner, name)(*arguments)
        self._count(arguments[0], **bytes_of(arguments, answer))
        return answer

    return ask


for _name, _bytes_of in {
    "set": lambda given, answer: {"written": len(given[1])},
    "get": lambda given, answer: {"read": len(answer)},
    "multi_get": lambda given, answer: {"read": sum(map(len, answer))},
    "multi_set": lambda given, answer: {"written": sum(map(len, given[1]))},
    "append": lambda given, answer: {"written": len(given[1])},
    "compare_set": lambda given, answer: {"written": len(given[2])},
    **dict.fromkeys(("add", "check", "wait", "delete_key"), lambda given, answer: {}),
}.items():
    setattr(CountingStore, _name, _counted(_name, _bytes_of))


def purpose_of(key: str) -> str:
    """Return what a key of the job's store is for.

    >>> [purpose_of(key) for key in ("gpp_plugin/place/1/7", "gpp_plugin/board/1/beat/0", "default_pg//cpu//0")]
    ['placement', 'beats', 'groups']
    """
    parts = key.split("/")
    if parts[0] != "gpp_plugin":
        return "groups"
    if parts[1] == "place":
        return "placement"
    return "processes" if "process" in parts else "beats"


class Layer(nn.Module):
    """One stage of the chain; float32 [batch, `WIDTH`]."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Return the layer's output of its one input, by whatever name."""
        (hidden,) = inputs.values()
        return hidden + torch.tanh(self.linear(hidden))


class LastLayer(Layer):
    """The last stage, and a squared loss."""

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return super().forward(**inputs).square().mean()


def chain(num_stages: int, degree: int) -> Any:
    """Return the smallest graph of so many stages, each on its own ranks; nothing is traced, which takes seconds."""
    import gpp_plugin

    graph = gpp_plugin.StageGraph(name="chain")
    for stage in range(num_stages):
        is_last = stage == num_stages - 1
        kind = LastLayer if is_last else Layer
        graph.stage(
            f"layer{stage}",
            lambda context, kind=kind: kind(),
            inputs=[f"hidden{stage}"],
            outputs=["loss" if is_last else f"hidden{stage + 1}"],
            ranks=list(range(stage * degree, (stage + 1) * degree)),
            micro_batch_size=degree,
        )
    return graph


def start_rank(rank: int, settings: dict[str, Any], port: int, folder: Path) -> None:
    """Train two steps as one rank and write down what was counted; does not return."""
    ctypes.CDLL(None).prctl(_PARENT_ENDS, signal.SIGKILL)
    num_ranks = settings["num_ranks"]
    stream = (folder / f"rank{rank}.log").open("w")
    os.dup2(stream.fileno(), 1)
    os.dup2(stream.fileno(), 2)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    code = 1
    try:
        (folder / f"rank{rank}.json").write_text(json.dumps(_train(rank, settings)), encoding="utf-8")
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        stream.flush()
        os._exit(code)


def _train(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    import deepspeed

    counts: dict[str, dict[str, int]] = {}
    groups: list[tuple[int, bool]] = []
    make_store, make_group = dist.TCPStore, dist.new_group

    def counted_group(ranks: Any = None, *args: Any, **options: Any) -> Any:
        members = list(range(settings["num_ranks"])) if ranks is None else list(ranks)
        if not options.get("use_local_synchronization") or rank in members:
            groups.append((len(members), rank in members))
        return make_group(ranks, *args, **options)

    kept: list[CountingStore] = []  # what wraps a store keeps its C++ half alive, not the Python one

    def counted_store(*args: Any, **options: Any) -> CountingStore:
        kept.append(CountingStore(make_store(*args, **options), counts))
        return kept[-1]

    vars(dist).update(TCPStore=counted_store, new_group=counted_group)
    started = time.perf_counter()
    torch.manual_seed(0)
    mini_batch = 2 * settings["degree"]
    config = {
        "train_batch_size": mini_batch,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "graph_pipeline": {"comm_timeout_s": settings["timeout_s"], "verify": False},
    }
    data = [{"hidden0": row} for row in torch.randn(4 * mini_batch, WIDTH)]
    model = chain(settings["num_stages"], settings["degree"])
    engine, _, _, _ = deepspeed.initialize(model=model, config=config, training_data=data)
    ready_s = time.perf_counter() - started
    counted = {name: dict(count) for name, count in counts.items()}
    losses = [float(engine.train_batch()) for _ in range(2)]
    trained_s = time.perf_counter() - started
    found = {
        "counts": counted,
        "groups": groups,
        "sockets": _sockets(),
        "losses": losses,
        "ready_s": ready_s,
        "trained_s": trained_s,
        "own_mb": _own_mb(),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }
    engine.destroy()
    return found


def _sockets() -> int:
    """Return how many sockets this process has open."""
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return sum(os.path.lexists(link) and os.readlink(link).startswith("socket:") for link in links)


def _own_mb() -> float:
    """Return the memory that is this process's alone, in MB."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    sizes = {line.split(":")[0]: float(line.split()[1]) for line in lines}
    return (sizes["Private_Clean"] + sizes["Private_Dirty"]) / 1e3


def main() -> None:
    """Fork the ranks, wait for them and report what they counted."""
    import gc

    import deepspeed  # noqa: F401  (imported once, for all ranks)

    import gpp_plugin.api
    import gpp_plugin.engine.engine
    import gpp_plugin.integrations.deepspeed.dispatch  # noqa: F401
    from gpp_plugin.launch import emit_event, reserved_port

    settings = json.loads(sys.argv[1])
    gc.collect()
    gc.freeze()  # objects that ranks share are not looked at, and so not copied
    with tempfile.TemporaryDirectory(prefix="gpp_large_") as name, reserved_port() as port:
        folder = Path(name)
        ranks: dict[int, int] = {}
        for rank in range(settings["num_ranks"]):
            pid = os.fork()
            if pid == 0:
                start_rank(rank, settings, port, folder)
            ranks[pid] = rank
        while ranks:
            pid, status = os.wait()
            rank = ranks.pop(pid)
            if status:
                for other in ranks:
                    os.kill(other, signal.SIGTERM)
                sys.stderr.write((folder / f"rank{rank}.log").read_text(errors="replace")[-3000:])
                sys.exit(f"rank {rank} of {settings['num_ranks']} ended with status {status}")
        logs = [folder / f"rank{rank}.json" for rank in range(settings["num_ranks"])]
        emit_event(found=[json.loads(log.read_text(encoding="utf-8")) for log in logs])


if __name__ == "__main__":
    main()
