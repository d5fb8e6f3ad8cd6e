"""While a model is traced: eager submodules and custom autograd functions leave one operator each.

The ``forward`` of such a module is replaced by a function that tries the real one (`trial_run`), calls an operator of
ours with its tensors, which tracing writes down, and returns fake results in the structure of the real ones. In the
graph that operator becomes the `OpaqueCall` that runs the real forward again.

    traced                                                   in the graph, once placed
    gpp_plugin::eager([weight, bias, hidden], "3")           OpaqueCall("eager decoder.router")(weight, bias, hidden)

A custom autograd function would otherwise be traced through its forward, and lose its backward: whatever its author
wrote there would silently be autograd's of the forward. Torch's own functions are traced as before.

Source: this project
Tests: tests/capture/test_eager.py
"""

from __future__ import annotations

import copy
import functools
import itertools
import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import _SingleLevelFunction
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes

from gpp_plugin.capture.eager.opaque_call import (
    Callee,
    ModuleCallee,
    Observed,
    OpaqueCall,
    ResultSpec,
    extract_tensors,
    holds_symbols,
    insert_tensors,
    is_plain,
)
from gpp_plugin.capture.eager.trial_run import (
    CPU,
    HOOK_OPTIONS,
    MODULE_HOOKS,
    CheckedOnCpu,
    has_hooks,
    is_within,
    made_up,
    observe,
)
from gpp_plugin.capture.tracing.carried_state import class_values, described, initial_values
from gpp_plugin.capture.tracing.clean import on_device
from gpp_plugin.capture.tracing.meta_copy import MetaCopy
from gpp_plugin.capture.tracing.outside import TORCHS_OWN, refill
from gpp_plugin.capture.tracing.symbolic_sizes import tensors_in
from gpp_plugin.capture.tracing.values import ReadingMode
from gpp_plugin.errors import CaptureError, first_line
from gpp_plugin.launch import free_memory_bytes

_LIBRARY = torch.library.Library("gpp_plugin", "FRAGMENT")
_LIBRARY.define("eager(Tensor[] tensors, str call) -> Tensor[]")
_TRACED: dict[str, tuple[ResultSpec, ...]] = {}
"""Calls in traces under way -> what they return; the operator's shapes are looked up here."""
_NUMBERS = itertools.count()
MAX_ANCESTORS = 2000
"""How deep the operators behind an argument may be nested whose value is computed from the batch."""


@torch.library.register_fake("gpp_plugin::eager", lib=_LIBRARY)
def _fake_results(tensors: Sequence[Tensor], call: str) -> list[Tensor]:
    device = tensors[0].device
    return [torch.empty_strided(r.shape, r.strides, dtype=r.dtype, device=device) for r in _TRACED[call]]


class NeedsWholeModule(CaptureError):
    """What calls this cannot be traced: the innermost module around it must run as it is.

    Args:
        within: the module or function that cannot run as it is alone; None where it is none.
    """

    def __init__(self, message: str, within: str | None = None) -> None:
        super().__init__(message)
        self.within = within


class WholeCalls:
    """The calls that one trace keeps whole.

    Args:
        meta_copy: what is traced, without weights; the user's model has them, or is on the meta device.
        paths: of modules, and of functions that are attributes of modules (a HuggingFace model's ``loss_function``).
        entries: the batch, whose tensors are what calls are tried with.
        training: gradients matter, and so do custom backwards.
        receives: entries of the batch take a gradient, which tracing does not know of: any tensor may.
    """

    def __init__(
        self,
        meta_copy: MetaCopy,
        paths: Sequence[str],
        entries: Mapping[str, Any],
        *,
        training: bool,
        receives: bool = False,
    ) -> None:
        self._receives = receives
        self._model, self._original, self._paths = meta_copy.model, meta_copy.original, tuple(paths)
        self._entries = entries
        self._training = training
        self._calls: dict[str, OpaqueCall] = {}
        self._inputs: dict[fx.Node, Tensor] = {}
        self._is_trying = False
        self._gives_modules = False
        self.left_by_hooks: set[tuple[str, str]] = set()
        """Module and attribute that hooks of eager submodules have left something in, outside of these."""
        # weights by the meta_copy's modules: the same path in both
        self._weights = {
            (path, name): tensor
            for path, module in self._original.named_modules(remove_duplicate=False)
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        }
        for name, tensor in initial_values(self._original, described(meta_copy.carried)).items():
            path, _, leaf = name.rpartition(".")
            self._weights[path, leaf] = tensor
        # attributes inside eager submodules, which these carry themselves, and the state outside
        self.states_inside = [
            state
            for state in meta_copy.carried
            if state.structure and any(is_within(state.name, path) for path in self._paths)
        ]
        self.states_around = [state for state in meta_copy.carried if state not in self.states_inside]

    def note_inputs(self, inputs: Mapping[str, Tensor]) -> None:
        """Take the traced tensors of the batch's entries: what is made of them alone has a value in a trial."""
        for key, fake in inputs.items():
            node, entry = _node_of(fake), self._entries[key]
            if node is not None and not entry.is_meta and not isinstance(entry, FakeTensor):
                with _disable_current_modes():
                    self._inputs[node] = entry.detach().to(device="cpu", dtype=fake.dtype)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Keep the calls whole while a block traces the model."""
        with ExitStack() as stack:
            for path in self._paths:
                self._replace(path, stack)
            setattr(_SingleLevelFunction, "apply", classmethod(self._apply))  # noqa: B010
            stack.callback(delattr, _SingleLevelFunction, "apply")
            stack.callback(self._forget)
            yield

    def place(self, graph: fx.Graph, bodies: Mapping[str, Any]) -> None:
        """Put the calls into a traced graph, and into the bodies of its regions, in place of our operator."""
        for node in graph.nodes:
            if node.target is torch.ops.gpp_plugin.eager.default:
                node.target = self._calls[node.args[1]]
                node.args = tuple(node.args[0])
        for body in bodies.values():
            if isinstance(body, fx.GraphModule):
                inner = {name: part for name, part in body.named_children()}
                self.place(body.graph, inner)
                body.recompile()

    def _forget(self) -> None:
        for key in self._calls:
            _TRACED.pop(key, None)
        self._inputs = {}

    # ---- what stands in for modules, and for functions that are attributes -----------------------------------

    def _replace(self, path: str, stack: ExitStack) -> None:
        owner_path, _, name = path.rpartition(".")
        owner = self._model.get_submodule(owner_path)
        target: Any = getattr(owner, name) if path else owner
        if not isinstance(target, nn.Module):
            stand_in = self._stand_in(path, Callee(target), [])
            held = vars(owner).get(f"_{name}", target)
            setattr(owner, name, stand_in)
            stack.callback(setattr, owner, name, held)
            return
        # by identity: a tensor that the module holds twice is one of its own tensors, in two places
        slots: dict[int, list[tuple[nn.Module, str]]] = {}
        names: list[tuple[str, str]] = []
        for inner_path, module in target.named_modules():
            for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    if id(tensor) not in slots:
                        names.append((".".join(part for part in (path, inner_path) if part), leaf))
                    slots.setdefault(id(tensor), []).append((module, leaf))
        states = [
            (target.get_submodule(state.name.removeprefix(path).lstrip(".").rpartition(".")[0]), state)
            for state in self.states_inside
            if is_within(state.name, path)
        ]
        function: Callable[..., Any] = target.forward
        if has_hooks(original := self._original.get_submodule(path)):
            function = _CalledWithHooks(target, original)
        callee = ModuleCallee(function, tuple(tuple(places) for places in slots.values()), tuple(states))
        target.__dict__["forward"] = self._stand_in(path, callee, names)
        stack.callback(target.__dict__.pop, "forward")

    def _stand_in(self, path: str, callee: Callee, names: Sequence[tuple[str, str]]) -> Callable[..., Any]:
        where = (
            f"{path or 'the model itself'} ({type(self._model.get_submodule(path)).__name__})"
            if names or isinstance(callee, ModuleCallee)
            else path
        )

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_trying:  # a module inside one that is being tried
                return callee.function(*args, **kwargs)
            own: list[Tensor] = []
            if isinstance(callee, ModuleCallee):
                # as tracing has put them there, each under its first name
                own = [
                    module._parameters.get(name, module._buffers.get(name))  # type: ignore[misc]
                    for (module, name), *_ in callee.places
                ]
            weights = [self._weights[name] for name in names]
            try:
                return self._record(f"eager {path}", where, callee, own, weights, (args, kwargs))
            except NeedsWholeModule as error:
                error.within = path
                raise

        return call

    # ---- what stands in for custom autograd functions --------------------------------------------------------

    def _apply(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Keep a custom function with its backward, where its backward matters and it is not torch's own."""
        original: Any = super(_SingleLevelFunction, function).apply  # type: ignore[misc]
        tensors: list[Tensor] = []
        pattern = extract_tensors((args, kwargs), tensors)
        if self._is_trying:
            self._gives_modules |= not is_plain(pattern)
            return original(*args, **kwargs)
        is_traced = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        takes_gradient = torch.is_grad_enabled() and any(map(self._takes_gradient, tensors))
        if not (is_traced and takes_gradient and self._training) or function.__module__.startswith("torch."):
            return original(*args, **kwargs)
        name = f"{function.__module__}.{function.__qualname__}"
        if not is_plain(pattern):
            raise NeedsWholeModule(
                f"custom autograd function {name} takes more than tensors and numbers, and loses its backward alone"
            )
        where = f"custom autograd function {name}"
        before = class_values(function)
        made = self._record(
            f"function {name}", where, Callee(function.apply), [], [], (args, kwargs), is_function=True
        )
        changed = [own for own, value in class_values(function).items() if before.get(own) != value]
        for own in changed:
            setattr(function, own, before.get(own))
        if changed:
            raise CaptureError(
                f"{where} keeps {changed[0]} on its class, which no stage and no checkpoint would have; keep it in a "
                "buffer, and pass that to apply"
            )
        return made

    def _takes_gradient(self, traced: Tensor) -> bool:
        may = self._receives and traced.is_floating_point() and not isinstance(traced, nn.Parameter)
        return traced.requires_grad or may

    # ---- both ------------------------------------------------------------------------------------------------

    def _record(
        self,
        title: str,
        where: str,
        callee: Callee,
        own: Sequence[Tensor],
        weights: Sequence[Tensor],
        arguments: Any,
        *,
        is_function: bool = False,
    ) -> Any:
        """Try a call, let tracing write it down, and return its fake results as the real ones are structured."""
        operands: list[Tensor] = []
        pattern = extract_tensors(arguments, operands)
        call = OpaqueCall(
            title=title,
            where=where,
            callee=callee,
            num_own=len(own),
            pattern=pattern,
            observed=Observed(results=()),
            is_function=is_function,
            home=([*own, *operands] or [torch.empty(())])[0].device.type,
        )
        if not own and not operands:
            raise NeedsWholeModule(f"{where} is called without tensors")
        if holds_symbols(pattern) or any(not all(type(n) is int for n in t.shape) for t in operands):
            raise NeedsWholeModule(f"{where} is called with numbers, or shapes, that depend on values")
        returned = self._try(call, [*own, *operands], weights)
        key = str(next(_NUMBERS))
        self._calls[key] = call
        _TRACED[key] = call.observed.results
        made = torch.ops.gpp_plugin.eager([*own, *operands], key)
        return insert_tensors(returned, made)

    def _try(self, call: OpaqueCall, traced: Sequence[Tensor], weights: Sequence[Tensor]) -> Any:
        """Run a call for real, note what was observed, and return the pattern of what it returned."""
        requires_grad = [torch.is_grad_enabled() and self._takes_gradient(t) for t in traced]
        patterns: list[Any] = []
        function = call.callee.function

        def noting(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            patterns.append(extract_tensors(result, []))
            return result

        path = call.title.removeprefix("eager ")
        is_hooked = isinstance(call.callee, ModuleCallee) and any(
            map(has_hooks, self._original.get_submodule(path).modules())
        )
        with _disable_current_modes():
            left = _LeftByHooks(self._original, path) if is_hooked else None
        made = sum(4 * t.numel() for t in weights if t.is_meta or isinstance(t, FakeTensor))
        if made > (free := free_memory_bytes()) / 2:
            raise NeedsWholeModule(
                f"{call.where}, which is to run as it is, has {made / 2**30:.1f} GiB of weights to be tried with, and "
                f"{free / 2**30:.1f} GiB are free"
            )
        nodes = [_node_of(tensor) for tensor in traced[len(weights) :]]
        self._is_trying, self._gives_modules = True, False
        call.callee.function = noting
        try:
            # made-up operands and weights are drawn; the capture sees no number that is not the model's own
            with (
                _disable_current_modes(),
                ReadingMode.paused(),
                torch.random.fork_rng(devices=[]),
                torch.set_grad_enabled(self._training and torch.is_grad_enabled()),
            ):
                real = [
                    _weight(weight, like) for weight, like in zip(weights, traced, strict=False)
                ] + self._operands(traced[len(weights) :], nodes)
                call.observed = self._observe(call, real, requires_grad, traced[0].device)
        except Exception as error:
            raise NeedsWholeModule(
                f"{call.where}, which is to run as it is, fails on tensors of its shapes: {type(error).__name__}: "
                f"{first_line(error)[:300]}"
            ) from error
        finally:
            call.callee.function = function
            self._is_trying = False
            written = [] if left is None else left.undone()
            self.left_by_hooks |= set() if left is None else left.attributes
        if written:
            raise CaptureError(
                f"a hook on {call.where} writes into {written[0]}, which is not that module's, so that no stage would "
                "have what it leaves: let it write into a buffer of its first argument, the module"
            )
        if isinstance(call.callee, ModuleCallee):
            call.callee.stays_bound |= self._gives_modules
        return patterns[-1]

    def _observe(
        self, call: OpaqueCall, real: Sequence[Tensor], requires_grad: Sequence[bool], home: torch.device
    ) -> Observed:
        """Try a call on the CPU, where memory is, and where that fails on the device it is for (kernels of its own)."""
        try:
            return observe(call, real, requires_grad)
        except Exception:
            if home.type == "cpu":
                raise
            with CheckedOnCpu(home.type):
                return observe(call, [tensor.to(home) for tensor in real], requires_grad)

    @torch.no_grad()
    def _operands(self, traced: Sequence[Tensor], nodes: Sequence[fx.Node | None]) -> list[Tensor]:
        """Return the values of what is made of the batch alone (masks, labels, positions), made-up ones of the rest."""
        known: dict[fx.Node, Any] = dict(self._inputs)
        operands = []
        for tensor, node in zip(traced, nodes, strict=True):
            value: Any = None if node is None else _value(node, known)
            fits = isinstance(value, Tensor) and value.shape == tensor.shape and value.dtype == tensor.dtype
            operands.append(value.clone() if fits else made_up(tensor.shape, tensor.dtype))
        return operands


class _LeftByHooks:
    """What hooks leave on the user's model when a call is tried; it is put back.

    Args:
        model: the user's.
        path: the module that is tried, on copies of its own tensors.
    """

    def __init__(self, model: nn.Module, path: str) -> None:
        outside = {
            name: tensor
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
            if not is_within(name, path)
        }
        # A version changes when a tensor is written. Parameters are not cloned, as they may be large: a write to one
        # is refused, and none is put back.
        self._tensors = {name: (tensor, tensor._version) for name, tensor in outside.items()}
        self._values = {
            name: tensor.detach().clone()
            for name, tensor in outside.items()
            if not isinstance(tensor, nn.Parameter)
        }
        self.attributes: set[tuple[str, str]] = set()
        # containers by their contents: a hook that appends to a list leaves the list itself in place
        self._before = []
        for path, module in model.named_modules():
            values = dict(vars(module))
            own = {n: v for n, v in values.items() if n not in TORCHS_OWN}
            held = {n: copy.copy(v) for n, v in own.items() if isinstance(v, (dict, list, deque, set))}
            self._before.append((path, vars(module), values.keys(), own, held))

    def undone(self) -> list[str]:
        """Put back what was left, and return the names of tensors that were written."""
        for path, attributes, names, own, held in self._before:
            for name in attributes.keys() - names:
                self.attributes.add((path, name))
                del attributes[name]
            for name, value in own.items():
                content = held.get(name)
                if attributes.get(name) is not value or not _holds_the_same(content, value):
                    self.attributes.add((path, name))
                attributes[name] = value
                if content is not None:
                    refill(value, content)
        written = [name for name, (tensor, version) in self._tensors.items() if tensor._version != version]
        with torch.no_grad(), _disable_current_modes():
            for name in written:
                if name in self._values:
                    self._tensors[name][0].copy_(self._values[name])
        return written


def _holds_the_same(one: Any, other: Any) -> bool:
    """Return whether two containers hold the same objects; what is no container does."""
    if one is None:
        return True
    parts = [
        list(map(id, (*each, *each.values()) if isinstance(each, dict) else each)) for each in (one, other)
    ]
    return parts[0] == parts[1]


_AT_REST: ContextVar[bool] = ContextVar("_AT_REST", default=False)


@contextmanager
def hooks_at_rest() -> Iterator[None]:
    """Call no hooks of eager submodules while the context lasts, unless they change what is computed.

    A model is timed on made-up values, many times: whoever logs or keeps activations is to have none of these.
    """
    token = _AT_REST.set(True)
    try:
        yield
    finally:
        _AT_REST.reset(token)


class _CalledWithHooks:
    """Calls an eager submodule with the hooks that its user's module has at that time.

    Args:
        module: the copy whose forward runs, and which hooks receive; tracing finds no hooks on it.
        original: the user's module.
    """

    def __init__(self, module: nn.Module, original: nn.Module) -> None:
        self._module, self._original = module, original
        self._changes: bool | None = None
        """Whether a forward hook has returned or written something; None before the first call."""
        self._none = {name: type(getattr(original, name))() for name in (*MODULE_HOOKS, *HOOK_OPTIONS)}
        vars(module).update(self._none, _is_full_backward_hook=None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        own, original = vars(self._module), self._original
        stand_in = own.pop("forward", None)
        if self._changes is not False or not _AT_REST.get():
            own.update({name: getattr(original, name) for name in self._none})
            own["_is_full_backward_hook"] = original._is_full_backward_hook
            for name in ("_forward_pre_hooks", "_forward_hooks"):
                own[name] = {key: functools.partial(self._call_hook, hook) for key, hook in own[name].items()}
        try:
            returned = self._module(*args, **kwargs)
            self._changes = bool(self._changes)
            return returned
        finally:
            own.update(self._none, _is_full_backward_hook=None)
            if stand_in is not None:
                own["forward"] = stand_in

    def _call_hook(self, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        passed = tensors_in((args, kwargs))
        before = [(tensor._version, tensor.requires_grad) for tensor in passed]
        returned = hook(*args, **kwargs)
        is_left = before == [(tensor._version, tensor.requires_grad) for tensor in passed]
        self._changes = self._changes or returned is not None or not is_left
        return returned


def _node_of(traced: Tensor) -> fx.Node | None:
    """Return the node that tracing has written down for a tensor."""
    mode = get_proxy_mode()
    slot: Any = None if mode is None else get_proxy_slot(traced, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def _value(wanted: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """Return the value of a node that depends on nothing but those that are known; None of any other.

    Example: ``extended = (1 - mask[:, None]) * -1e9`` of an entry ``mask`` has one; ``linear(hidden, weight)`` has
    none.
    """
    # depth first with a stack of our own, what a node reads before the node
    stack = [wanted]
    while stack:
        node = stack[-1]
        missing = [source for source in node.all_input_nodes if source not in known]
        if node in known or not missing:
            stack.pop()
            if node not in known:
                known[node] = _compute(node, known)
        elif len(stack) > MAX_ANCESTORS:
            return None
        else:
            stack.extend(missing)
    return known[wanted]


def _compute(node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
    target: Any = node.target
    seen: Any = node.meta.get("val")
    if isinstance(seen, FakeTensor) and seen.constant is not None:
        return seen.constant  # made of Python's numbers (sizes of feature maps): tracing has its values
    if node.op != "call_function" or torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
        return None
    sources = [known[source] for source in node.all_input_nodes]
    is_ours = target is torch.ops.gpp_plugin.eager.default
    if is_ours or any(source is None for source in sources) or not isinstance(target, torch._ops.OpOverload):
        if target is not operator.getitem or sources[0] is None:
            return None
    if isinstance(seen, Tensor) and seen.device.type != "cpu":  # known values are on the CPU
        args, kwargs = on_device((node.args, node.kwargs), CPU, of_type=seen.device.type)
    else:
        args, kwargs = node.args, node.kwargs
    try:
        return target(*fx.map_arg(args, known.__getitem__), **fx.map_arg(kwargs, known.__getitem__))
    except Exception:  # whatever an operator raises: the value then is made up
        return None


def _weight(weight: Tensor, like: Tensor) -> Tensor:
    """Return a weight to try a module with, on the CPU: buffers are copies, as the module may write into them."""
    if weight.is_meta or isinstance(weight, FakeTensor):
        if not like.dtype.is_floating_point:
            return torch.zeros(like.shape, dtype=like.dtype)
        return torch.randn(like.shape, dtype=torch.float32).mul_(0.02).to(like.dtype)
    copied = not isinstance(weight, nn.Parameter)
    return weight.detach().to(device="cpu", dtype=like.dtype, copy=copied)
