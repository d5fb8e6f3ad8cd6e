"""Which attributes of its modules a forward reads, and which of these it had written before: noted while it runs.

An attribute that is written first is no state: what the forward before has left there is gone. Of a dict the entries
count, each by itself, and a list is new once it is cleared:

    self.last = loss                          written
    self.features["inner"] = hidden           written, also where it is read behind that
    self.losses.clear(); self.losses += [x]   written
    self.calls += 1                           read

Source: this project
Tests: tests/capture/test_carried_state.py
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

TORCHS_OWN = frozenset(
    (*vars(nn.Module()), "_is_hf_initialized", "_output_capturing_hooks_installed", "forward")
)
"""Attributes that torch and transformers keep on modules for themselves."""


def refill(container: Any, content: Any) -> None:
    """Let a dict, list, deque or set hold other contents, and stay the object that it is."""
    container.clear()
    (container.extend if isinstance(container, (list, deque)) else container.update)(content)


class _NotedDict(dict[Any, Any]):
    """A module's dict for one forward: notes whether an entry is read that this forward has not put there."""

    # The forward before has left {"inner": a, "outer": b}:
    #
    #     features["inner"] = c      its own from now on
    #     features["inner"]          c: nothing old is read
    #     features["outer"]          b: `is_read`, so that the dict is state

    def __init__(self, items: Mapping[Any, Any]) -> None:
        super().__init__(items)
        self._own: set[Any] = set()
        self.is_read = False

    def look(self, keys: Iterable[Any]) -> None:
        """Note that entries are read."""
        self.is_read |= any(key not in self._own for key in keys)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._own.add(key)
        super().__setitem__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Put entries there."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def clear(self) -> None:
        """Begin anew: whatever is found from now on is of this forward."""
        super().clear()
        self._own = set()


class _NotedList(list[Any]):
    """The same of a list: all of it is old until it is cleared."""

    is_read = True

    def clear(self) -> None:
        """Begin anew."""
        super().clear()
        self.is_read = False


def _looking(name: str, keys_of: Callable[..., Iterable[Any]]) -> Any:
    original = getattr(dict, name)

    def method(self: _NotedDict, *args: Any) -> Any:
        self.look(keys_of(self, *args))
        return original(self, *args)

    return method


for _name in ("__getitem__", "__contains__", "get", "pop", "setdefault", "__delitem__"):
    setattr(_NotedDict, _name, _looking(_name, lambda held, key, *default: [key]))
for _name in ("__iter__", "__len__", "keys", "values", "items", "copy", "__eq__", "__or__", "popitem"):
    setattr(_NotedDict, _name, _looking(_name, lambda held, *args: list(dict.keys(held))))


@contextmanager
def _noted_containers(model: nn.Module, first: dict[tuple[int, str], bool]) -> Iterator[None]:
    """Let a dict, or a list, count as written where a forward reads of it only what it has put there itself."""
    held: list[tuple[dict[str, Any], str, Any, Any]] = []
    for module in model.modules():
        if not type(module).__module__.startswith("torch."):
            for name, value in list(vars(module).items()):
                if name not in TORCHS_OWN and type(value) in (dict, list):
                    noted = _NotedDict(value) if type(value) is dict else _NotedList(value)
                    held.append((vars(module), name, value, noted))
                    vars(module)[name] = noted
    try:
        yield
    finally:
        for attributes, name, value, noted in held:
            if attributes.get(name) is noted:
                attributes[name] = value
            refill(value, dict.items(noted) if isinstance(noted, dict) else noted)
            if not noted.is_read:
                first[id(attributes), name] = False


@contextmanager
def noted_accesses(model: nn.Module) -> Iterator[dict[tuple[int, str], bool]]:
    """Note whether each attribute was read before it was written, by the id of the module's ``__dict__``."""
    first: dict[tuple[int, str], bool] = {}
    own, put = object.__getattribute__, nn.Module.__setattr__

    def read(owner: int, name: str) -> None:
        if name not in TORCHS_OWN and not name.startswith("__"):
            first.setdefault((owner, name), True)

    def write(module: nn.Module, name: str, value: Any) -> None:
        first.setdefault((id(own(module, "__dict__")), name), False)
        put(module, name, value)

    setattr(nn.Module, "__setattr__", write)  # noqa: B010
    try:
        with noted_reads(read), _noted_containers(model, first):
            yield first
    finally:
        setattr(nn.Module, "__setattr__", put)  # noqa: B010


@contextmanager
def noted_reads(note: Callable[[int, str], object]) -> Iterator[None]:
    """Call a function at each read of a module's attribute, with the id of its ``__dict__`` and the name; may nest."""
    own = object.__getattribute__
    is_noted = "__getattribute__" in vars(nn.Module)  # by somebody around this
    get = nn.Module.__getattribute__

    def read(module: nn.Module, name: str) -> Any:
        note(id(own(module, "__dict__")), name)
        return get(module, name)

    setattr(nn.Module, "__getattribute__", read)  # noqa: B010
    try:
        yield
    finally:
        if is_noted:
            setattr(nn.Module, "__getattribute__", get)  # noqa: B010
        else:
            delattr(nn.Module, "__getattribute__")
