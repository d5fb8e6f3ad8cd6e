"""Profiles of users' modules on disk: looked up before a stage is timed, kept after, under what the module is.

What a module is is described as JSON types (`describe_module`): whoever has the same description computes the same
operators. A module is described by its classes, their parameters' shapes and all attributes down to plain values, and
by the source of every Python module that the code it names can reach (torch and Python itself by their versions,
elsewhere). Where an attribute says nothing of what it does (an object of compiled code, something typed into a
session), there is no description, rather than one that two different modules share.

Source: this project
Tests: tests/stage_graph/test_module_cost.py
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import logging
import platform
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.ir.profile import Profile
from gpp_plugin.model.graph.given_module import GivenModule
from gpp_plugin.model.graph.module_trial import Place
from gpp_plugin.model.graph.probe import Survey
from gpp_plugin.model.graph.resolve import GraphStage
from gpp_plugin.profile.busy_stream import clock_of
from gpp_plugin.profile.cost_store import CostStore
from gpp_plugin.profile.machine import describe_device, processor_name

logger = logging.getLogger(__name__)

FORM = "kept storages by number, split backwards compared"
"""What such profiles hold; older files hold something else."""


class StoredProfile:
    """The stored profile of one stage's module, if there can be one.

    Args:
        options: what else times depend on: how it is measured.
    """

    def __init__(
        self,
        stage: GraphStage,
        own: GivenModule,
        place: Place,
        survey: Survey,
        *,
        counts: Sequence[int],
        cache_dir: str | None,
        options: dict[str, Any],
    ) -> None:
        # The key is all that times and bytes depend on, as JSON types: what the module is, what it is called with and
        # returns, how many ranks share it, on what machine, and how it is measured (``options``). The values of its
        # weights are not in it, nor its rank numbers, so that a trained tower on other ranks is found again.
        #
        #     inputs {"x": float32 [8, 64], batch axis 0}   grid [4 ranks, tensor 2]   counts [1, 4, 8]   torch 2.6 ...
        #
        # None stands for a module that cannot be told from others: then nothing is looked up or kept.
        self._stage = stage.name
        self._store = CostStore(cache_dir)
        self._key: dict[str, Any] | None = None
        try:
            description = describe_module(own.given)
        except (NotDescribed, OSError) as error:
            logger.info(
                "stage %s: its profile is not stored, but measured each time: nothing tells one such module from "
                "another, as %s",
                stage.name,
                error,
            )
            return
        shapes = survey.shapes
        inputs = {keyword: shapes.tensors[node] for keyword, node in stage.received}
        inputs |= {keyword: shapes.inputs[key] for keyword, key in stage.batch_inputs}
        self._key = {
            "stage": stage.name,
            "module": description,
            "inputs": {keyword: dataclasses.asdict(spec) for keyword, spec in inputs.items()},
            "outputs": [list(node) for node in stage.nodes],
            "losses": list(stage.losses),
            "sharded": [list(stage.spec.sharded_inputs), list(stage.spec.sharded_outputs)],
            "grid": [len(stage.spec.ranks), stage.spec.tensor],
            "counts": list(counts),
            "dtype": str(place.dtype),
            "device": describe_device(place.device, torch.get_num_threads()),
            "processor": processor_name(),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "form": FORM,
            **clock_of(place.device.type),
            **options,
        }

    def find(self) -> Profile | None:
        """Return it, or None."""
        if self._key is None:
            return None
        found = self._store.find(self._key)
        if found is not None:
            logger.info("stage %s: using the profile stored in %s", self._stage, self._store.path(self._key))
        return found

    def put(self, profile: Profile) -> None:
        """Keep a profile."""
        if self._key is not None:
            self._store.put(self._key, profile)


KNOWN_BY_VERSION = frozenset({"torch", "numpy"}) | frozenset(sys.stdlib_module_names)
"""Top-level packages whose source is not read."""
PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type(Ellipsis),
    torch.dtype,
    torch.device,
    torch.layout,
)
REGISTERED = ("_parameters", "_buffers", "_modules")


class NotDescribed(Exception):
    """Something says nothing of what it does; the text names it."""


def describe_module(module: nn.Module) -> dict[str, Any]:
    """Return the description of a module: its structure and the digest of the source it can reach.

    Raises:
        NotDescribed: part of it cannot be described.
    """
    found = _Description()
    structure = found.of(module, "module")
    return {"structure": structure, "source": _source_digest(found.modules)}


class _Description:
    def __init__(self) -> None:
        self.modules: set[str] = set()
        self._seen: dict[int, int] = {}
        self._held: list[Any] = []  # so that no identity recurs

    def of(self, value: Any, path: str) -> Any:
        """Return a value in JSON types; what was described before by its number."""
        if isinstance(value, PLAIN):
            # of a device its type alone: a profile that was measured on cuda:0 is that of a stage on cuda:3
            text = value.type if isinstance(value, torch.device) else str(value)
            return [type(value).__name__, text]
        if isinstance(value, Tensor):
            return ["tensor", str(value.dtype), list(value.shape), value.requires_grad]
        if isinstance(value, enum.Enum):
            return ["enum", self._name(type(value)), value.name]
        if id(value) in self._seen:
            return ["again", self._seen[id(value)]]
        self._seen[id(value)] = len(self._held)
        self._held.append(value)
        if isinstance(value, Mapping):
            rows = [[self.of(k, path), self.of(v, f"{path}[{k!r}]")] for k, v in value.items()]
            return ["dict", self._name(type(value)), rows]
        if isinstance(value, (set, frozenset)):
            return ["set", sorted(map(str, (self.of(v, path) for v in value)))]
        if isinstance(value, (list, tuple)):
            return [
                "list",
                self._name(type(value)),
                [self.of(v, f"{path}[{i}]") for i, v in enumerate(value)],
            ]
        if isinstance(value, nn.Module):
            return self._module(value, path)
        if isinstance(value, dist.ProcessGroup):
            return ["group", value.size()]
        if (
            callable(value)
            and not hasattr(value, "__dict__")
            or isinstance(value, (type, types.FunctionType))
        ):
            return self._code(value, path)
        return self._object(value, path)

    def _name(self, thing: Any) -> str:
        module = getattr(thing, "__module__", None) or "builtins"
        self.modules.add(module)
        return f"{module}.{getattr(thing, '__qualname__', type(thing).__name__)}"

    def _module(self, module: nn.Module, path: str) -> Any:
        own: list[Any] = []
        for name, value in sorted(vars(module).items()):
            if name in REGISTERED:
                rows = {k: v for k, v in value.items() if v is not None}
                own.append([name, [[k, self.of(v, f"{path}.{k}")] for k, v in rows.items()]])
            elif name.endswith("_hooks"):  # by numbers that grow with every hook of the process
                own.append([name, [self.of(hook, f"{path}.{name}") for hook in value.values()]])
            elif name != "training":
                own.append([name, self.of(value, f"{path}.{name}")])
        return ["module", self._name(type(module)), own]

    def _code(self, value: Any, path: str) -> Any:
        """Return a class by its name, a function by its name and what it closes over: their source is read."""
        name = self._name(value)
        if not isinstance(value, types.FunctionType):
            return ["code", name]
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        bound = [value.__defaults__, value.__kwdefaults__, cells]
        return ["function", name, _code_digest(value.__code__), self.of(bound, path)]

    def _object(self, value: Any, path: str) -> Any:
        if isinstance(value, functools.partial):
            return ["partial", self.of([value.func, value.args, value.keywords], path)]
        if isinstance(value, types.MethodType):
            return ["method", self.of([value.__func__, value.__self__], path)]
        if dataclasses.is_dataclass(value):
            fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
        elif hasattr(value, "__dict__") and type(value).__flags__ & _IS_HEAP_TYPE:
            fields = vars(value)
        else:
            raise NotDescribed(f"{path} is a {type(value).__module__}.{type(value).__qualname__}")
        rows = [[name, self.of(item, f"{path}.{name}")] for name, item in sorted(fields.items())]
        return ["object", self._name(type(value)), rows]


def _code_digest(code: types.CodeType) -> str:
    """Return what tells functions of one name apart: two lambdas of a line."""
    constants = [
        _code_digest(c)
        if isinstance(c, types.CodeType)
        else sorted(map(repr, c))
        if isinstance(c, frozenset)  # whose order is another one in every process
        else repr(c)
        for c in code.co_consts
    ]
    return hashlib.sha256(code.co_code + repr((code.co_names, constants)).encode()).hexdigest()


_IS_HEAP_TYPE = 1 << 9
"""Of a class made by Python code, not by an extension."""


def _source_digest(names: Iterable[str]) -> str:
    """Return a digest of the source of modules, and of all that these name, and so on.

    Raises:
        NotDescribed: one has no file.
    """
    waiting, done = list(names), set[str]()
    digest = hashlib.sha256()
    files: dict[str, str] = {}
    while waiting:
        name = waiting.pop()
        if name in done or name.partition(".")[0] in KNOWN_BY_VERSION:
            continue
        done.add(name)
        module = sys.modules.get(name)
        if module is None:
            continue  # named, and not loaded: nothing of it runs
        path = getattr(module, "__file__", None)
        if path is None and not hasattr(module, "__path__"):
            raise NotDescribed(f"module {name} has no file")
        if path is not None:
            files[name] = path
        for value in list(vars(module).values()):
            found = (
                value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
            )
            if isinstance(found, str):
                waiting.append(found)
    for name, path in sorted(files.items()):
        digest.update(name.encode() + b"\0" + hashlib.sha256(Path(path).read_bytes()).digest())
    return digest.hexdigest()
