"""`StageGraph`: named stages, their inputs and outputs, and the ranks that run them, as the user writes them down.

What is wrong with one stage alone is refused by `StageGraph.stage`; what is wrong with all of them together,
by `gpp_plugin.model.graph.resolve`, before anything is built.

Source: this project
Tests: tests/stage_graph/test_bad_input.py
"""

from __future__ import annotations

import dataclasses
import datetime
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.capture.tracing.sample_batches import check_batch, pad_records
from gpp_plugin.errors import ConfigError
from gpp_plugin.integrations.huggingface.model_inputs import prepared_inputs

# What is written down about one stage, read strictly: names, ranks, counts and axes, refused in one line each.

Names: TypeAlias = Sequence[str] | Mapping[str, str]


def read_name(name: Any) -> str:
    """Return a stage's name.

    Raises:
        ConfigError: it is no text, is empty, or has a dot.
    """
    if not isinstance(name, str) or not name or "." in name:
        raise ConfigError(f"stage {name!r}: a name is text, not empty, and has no dots")
    return name


def read_pairs(stage: str, what: str, names: Any, *, is_input: bool) -> tuple[tuple[str, str], ...]:
    """Return inputs as (keyword, where from), or outputs as (field, name).

    Raises:
        ConfigError: they are no list of texts and no dict of them, or names repeat.
    """
    if isinstance(names, Mapping):
        _check_texts(stage, what, [*names, *names.values()])
        pairs = tuple(names.items())
    else:
        texts = read_texts(stage, what, names)
        pairs = tuple((text.rpartition(".")[2] if is_input else text, text) for text in texts)
    own = [key for key, _ in pairs] if is_input else [name for _, name in pairs]
    twice = sorted({name for name in own if own.count(name) > 1})
    if twice:
        raise ConfigError(
            f"stage {stage!r}: {what} names {twice[0]!r} twice; a dict gives arguments other names"
        )
    if not is_input and not pairs:
        raise ConfigError(f"stage {stage!r}: it has no outputs; name what its module returns")
    dotted = [name for _, name in pairs if "." in name] if not is_input else []
    if dotted:
        raise ConfigError(f"stage {stage!r}: output {dotted[0]!r} has a dot in its name; leave it out")
    return pairs


def read_texts(stage: str, what: str, texts: Any) -> tuple[str, ...]:
    """Return a list of names; what has no order, such as a set, is in another one on every rank.

    Raises:
        ConfigError: it is no list or tuple of texts.
    """
    if isinstance(texts, str):
        raise ConfigError(f"stage {stage!r}: {what} is the text {texts!r}; give a list: [{texts!r}]")
    if not isinstance(texts, Sequence):
        raise ConfigError(f"stage {stage!r}: {what} is {texts!r}; give a list of names")
    _check_texts(stage, what, texts)
    return tuple(texts)


def _check_texts(stage: str, what: str, texts: Iterable[Any]) -> None:
    wrong = [text for text in texts if not isinstance(text, str) or not text]
    if wrong:
        raise ConfigError(f"stage {stage!r}: {what} holds {wrong[0]!r}; names are texts")


def read_ranks(stage: str, ranks: Any) -> tuple[int, ...]:
    """Return the ranks of a stage.

    Raises:
        ConfigError: they are no list of ranks, or one is listed twice.
    """
    found = tuple(ranks) if isinstance(ranks, Sequence) else ()
    if not found or not all(_is_whole(rank) for rank in found):
        raise ConfigError(f"stage {stage!r}: ranks is {ranks!r}; list one or more global ranks")
    twice = sorted({rank for rank in found if found.count(rank) > 1})
    if twice:
        raise ConfigError(f"stage {stage!r}: rank {twice[0]} is listed twice; a rank runs one stage once")
    return found


def read_count(stage: str, what: str, value: Any) -> int:
    """Return a whole number of at least 1.

    Raises:
        ConfigError: it is none.
    """
    if not _is_whole(value) or value < 1:
        raise ConfigError(f"stage {stage!r}: {what} is {value!r}; give a whole number of at least 1")
    return int(value)


def read_coupled(stage: str, coupled: Any) -> bool | None:
    """Return whether a stage mixes samples, or None where that is to be found out.

    Raises:
        ConfigError: it is neither.
    """
    if coupled is None or isinstance(coupled, bool):
        return coupled
    raise ConfigError(f"stage {stage!r}: coupled is {coupled!r}; give True, False, or None to find out")


def read_axes(stage: str, what: str, axes: Any) -> tuple[tuple[str, int], ...]:
    """Return the axis of each named tensor.

    Raises:
        ConfigError: it is no dict from names to axes.
    """
    pairs = _items(stage, what, axes)
    wrong = [name for name, axis in pairs if not _is_whole(axis)]
    if wrong:
        raise ConfigError(
            f"stage {stage!r}: {what} of {wrong[0]!r} is {dict(pairs)[wrong[0]]!r}; give the axis, 0 or more"
        )
    return pairs


def read_layouts(stage: str, layouts: Any) -> tuple[tuple[str, int | str], ...]:
    """Return the batch axis of each named output, or "uniform".

    Raises:
        ConfigError: it is no dict from names to those.
    """
    pairs = _items(stage, "layouts", layouts)
    for output, layout in pairs:
        if not _is_whole(layout) and layout != "uniform":
            raise ConfigError(
                f'stage {stage!r}: the layout of {output!r} is {layout!r}; give its batch axis or "uniform"'
            )
    return pairs


def _items(stage: str, what: str, axes_by_name: Any) -> tuple[tuple[str, Any], ...]:
    if axes_by_name is None:
        return ()
    if not isinstance(axes_by_name, Mapping):
        raise ConfigError(f"stage {stage!r}: {what} is {axes_by_name!r}; give a dict from names to axes")
    return tuple(axes_by_name.items())


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


LOSS = "loss"
RETURN_LOSS = "return_loss"
"""Argument of HuggingFace's contrastive models, which compute a loss only on request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """One rank's place in a stage's grid of data x tensor positions.

    Args:
        stage: the stage's name.
        rank: this global rank.
        device: where the stage computes; the factory may build there or anywhere else, it is moved.
        dtype: training precision; floating parameters are cast to it.
        data_group: ranks of the same tensor position, which hold the same weights and take other samples; None
            only where torch.distributed is not initialised.
        tensor_group: ranks of the same data position, which share out the weights; likewise. It takes tensors of the
            device and of the CPU.
        single_group: this rank alone; likewise.
        data_rank, data_size: this rank's data position, and how many there are.
        tensor_rank, tensor_size: this rank's tensor position, and how many there are.
    """

    stage: str
    rank: int
    device: torch.device
    dtype: torch.dtype
    data_group: dist.ProcessGroup | None
    tensor_group: dist.ProcessGroup | None
    single_group: dist.ProcessGroup | None
    data_rank: int
    data_size: int
    tensor_rank: int
    tensor_size: int

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Return the groups there are."""
        groups = (self.data_group, self.tensor_group, self.single_group)
        return tuple(group for group in groups if group is not None)

    def set_timeout(self, timeout_s: float) -> None:
        """Let collectives in the groups, from now on, wait for so long: the plan's times are known after them."""
        for group in self.groups:
            dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s), group)

    def close(self) -> None:
        """Release the groups; nothing may be under way in them."""
        for group in self.groups:
            dist.destroy_process_group(group)


Maker: TypeAlias = nn.Module | Callable[[StageContext], nn.Module] | Callable[[], nn.Module]
"""A stage's module, or what builds it on the stage's ranks only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """One stage as it was written down.

    Args:
        inputs: (keyword the module is called with, where it comes from: a batch key, an output, "stage.output").
        outputs: (field of what the module returns, name of the output).
        ranks: its grid row by row: data position d, tensor position t is ``ranks[d * tensor + t]``.
        layouts: output -> batch axis, or "uniform"; others are found out by trying two sample counts.
        sharded_inputs, sharded_outputs: arguments and outputs of which each tensor rank has an equal shard ->
            the axis they are cut along.
        reported: outputs that no stage need read: what `eval_batch` may return.
        num_pieces: stages the module is captured and cut into; None: it is run as it is.
    """

    name: str
    make: Maker
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    ranks: tuple[int, ...]
    tensor: int = 1
    micro_batch_size: int | None = None
    coupled: bool | None = None
    layouts: tuple[tuple[str, int | str], ...] = ()
    sharded_inputs: tuple[tuple[str, int], ...] = ()
    sharded_outputs: tuple[tuple[str, int], ...] = ()
    reported: tuple[str, ...] = ()
    num_pieces: int | Literal["auto"] | None = None

    @property
    def needs_loss_flag(self) -> bool:
        """Return whether it is captured and computes its loss, one of its outputs, only on request.

        It is called with ``return_loss=True``, unless its inputs name that themselves.
        """
        if self.num_pieces is None or not isinstance(self.make, nn.Module):
            return False
        is_explicit = any(keyword == RETURN_LOSS for keyword, _ in self.inputs)
        yields = any(field == LOSS for field, _ in self.outputs)
        return yields and not is_explicit and takes_return_loss(self.make)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Return the names of its outputs."""
        return tuple(name for _, name in self.outputs)


def takes_return_loss(module: nn.Module) -> bool:
    """Return whether a module has an argument that says whether to compute its loss."""
    return RETURN_LOSS in inspect.signature(module.forward).parameters


class UnnamedBatch(ConfigError):
    """The entries of a batch are not the arguments of ``forward`` by position; ``batch`` is what they are."""

    def __init__(self, message: str, batch: Any) -> None:
        super().__init__(message)
        self.batch = batch


def named_batch(model: nn.Module | StageGraph, batch: Any) -> Any:
    """Return a tuple of inputs, or one tensor, as a dict: positions are those of ``forward``, as in ``model(*batch)``.

    Raises:
        UnnamedBatch: there are no such positions.
    """
    if not isinstance(batch, Tensor | list | tuple):
        return batch
    values = (batch,) if isinstance(batch, Tensor) else tuple(batch)
    if values and all(isinstance(value, Mapping) for value in values):
        return batch  # samples that nothing has collated
    ways = (
        "give deepspeed.initialize a collate_fn that returns a dict by argument names, or call "
        "engine.set_batch_fn(a function that makes such dicts) first"
    )
    if isinstance(model, StageGraph):
        raise UnnamedBatch(
            f"a batch is a {type(batch).__name__}, and stages read inputs by name: {ways}", batch
        )
    parameters = [
        parameter
        for parameter in inspect.signature(model.forward).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    least = sum(parameter.default is parameter.empty for parameter in parameters)
    if not least <= len(values) <= len(parameters):
        raise UnnamedBatch(
            f"a batch has {len(values)} entries, and forward of {type(model).__name__} takes "
            f"{least if least == len(parameters) else f'{least} to {len(parameters)}'} by position "
            f"({', '.join(parameter.name for parameter in parameters)}): {ways}",
            batch,
        )
    return {parameter.name: value for parameter, value in zip(parameters, values, strict=False)}


def prepare_batch(model: nn.Module | StageGraph, batch: Any) -> dict[str, Any]:
    """Return the batch as the model is called with it; a graph's stages say themselves what they read of it.

    Contrastive models compute a loss only on request: ``return_loss=True`` is added where the
    model's forward takes it and the batch does not say, as HuggingFace's Trainer does. Tuples get names
    (`named_batch`). Lists of dicts of tensors (a detector's labels) become padded tensors. What a model
    would make of the batch in Python, and can take, is made here (`prepared_inputs`).
    """
    prepared = pad_records(check_batch(named_batch(model, batch)))
    if isinstance(model, StageGraph):
        takes_flag = any(stage.needs_loss_flag for stage in model.stages)
    else:
        takes_flag = takes_return_loss(model)
    if takes_flag and RETURN_LOSS not in prepared:
        prepared[RETURN_LOSS] = True
    return prepared if isinstance(model, StageGraph) else prepared | prepared_inputs(model, prepared)


class StageGraph:
    """A model as a graph of stages, passed to `deepspeed.initialize` in place of a module.

    Args:
        name: for plans and reports.
        losses: outputs that are losses, ``"loss"`` or ``"stage.loss"``; several are added up. By default every
            output that is called ``loss``.

    >>> graph = StageGraph(name="two")
    >>> graph.stage("body", nn.Linear(4, 4), inputs={"input": "x"}, outputs=["hidden"], ranks=[0])
    >>> graph.stage("head", nn.Linear(4, 1), inputs={"input": "hidden"}, outputs=["loss"], ranks=[1])
    >>> [stage.name for stage in graph.stages]
    ['body', 'head']
    """

    def __init__(self, name: str = "graph", *, losses: Sequence[str] | None = None) -> None:
        if isinstance(losses, str):
            raise ConfigError(
                f"stage graph {name!r}: losses is the text {losses!r}; give a list: [{losses!r}]"
            )
        self.name = str(name)
        self.losses = None if losses is None else tuple(losses)
        self._stages: dict[str, StageSpec] = {}
        self._ties: list[tuple[str, ...]] = []

    @property
    def stages(self) -> tuple[StageSpec, ...]:
        """Return the stages in the user's order."""
        return tuple(self._stages.values())

    @property
    def ties(self) -> tuple[tuple[str, ...], ...]:
        """Return the groups of parameters that are one, as "stage.parameter"."""
        return tuple(self._ties)

    @property
    def is_one_capture(self) -> bool:
        """Return whether it is one captured module and nothing else: a plain model, and treated as one.

        Then nothing has its stage's name in front: blocks, parameters and files are called as the module calls them.
        """
        return len(self._stages) == 1 and not self._ties and self.stages[0].num_pieces is not None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of stages that are modules, as the graph calls them, for optimizer groups.

        That is "stage.parameter"; or what the module calls it, where it is the whole model.
        """
        for stage in self.stages:
            if isinstance(stage.make, nn.Module):
                prefix = "" if self.is_one_capture else f"{stage.name}."
                for name, parameter in stage.make.named_parameters():
                    yield f"{prefix}{name}", parameter

    def stage(
        self,
        name: str,
        module: Maker,
        *,
        inputs: Names,
        outputs: Names,
        ranks: Sequence[int],
        tensor: int = 1,
        micro_batch_size: int | None = None,
        coupled: bool | None = None,
        layouts: Mapping[str, int | str] | None = None,
        sharded_inputs: Mapping[str, int] | None = None,
        sharded_outputs: Mapping[str, int] | None = None,
        reported: Sequence[str] = (),
    ) -> None:
        """Add a stage; its module is called ``module(**inputs)`` and returns a tensor, a tuple or a dict.

        Args:
            module: a module, or a factory that is called on the stage's ranks only, with a `StageContext` if it takes
                an argument. Where a factory has a method ``check(stage, tensor)``, that is called now, and may refuse
                the grid; one with ``shards(inputs, outputs)`` says what of those is sharded if ``tensor`` is more
                than 1.
            inputs: names of earlier outputs ("embeds" or "vision.embeds") and batch keys; a dict maps the
                module's own argument names to them.
            outputs: names of what it returns, in order, or by key where it returns a dict; a dict maps the
                module's own keys to names.
            ranks: global ranks, ``tensor`` of them a data position: data-parallel over the rest.
            micro_batch_size: samples the whole stage takes at a time; None leaves it to the planner.
            coupled: whether it mixes samples and computes on whole loss units; None: where it yields a loss, or is
                seen to mix them when it is tried.
            layouts: output -> its batch axis, or "uniform" for what is the same for every sample; what is not
                named is found out by running the stage at two sample counts.
            sharded_inputs, sharded_outputs: arguments and outputs of which each tensor rank has an equal part along
                an axis (sequence parallelism), by the argument's and the output's name; others are whole on each.
            reported: outputs that no stage need read, for ``eval_batch(return_logits=True, outputs=...)``.

        Raises:
            ConfigError: names repeat, ranks are taken or do not form a grid, or an option names no output.
        """
        # Long by its arguments and what is said of them, each of which is one line of a user's call.
        # Each reader refuses its own mistakes in one line that names the stage. Names in a list stand for both
        # sides: inputs=["ids"] is {"ids": "ids"}; outputs likewise.
        spec = _read(name, module, inputs, outputs, ranks, micro_batch_size, reported)
        shards = None if isinstance(module, nn.Module) else getattr(module, "shards", None)
        if sharded_inputs is None and sharded_outputs is None and tensor != 1 and shards is not None:
            sharded_inputs, sharded_outputs = shards([key for key, _ in spec.inputs], [*spec.output_names])
        self._add(
            dataclasses.replace(
                spec,
                tensor=read_count(name, "tensor", tensor),
                coupled=read_coupled(name, coupled),
                layouts=read_layouts(name, layouts),
                sharded_inputs=read_axes(name, "sharded_inputs", sharded_inputs),
                sharded_outputs=read_axes(name, "sharded_outputs", sharded_outputs),
            )
        )

    def capture(
        self,
        name: str,
        module: nn.Module,
        *,
        inputs: Names,
        outputs: Names,
        ranks: Sequence[int],
        stages: int | Literal["auto"] = "auto",
        micro_batch_size: int | None = None,
        reported: Sequence[str] = (),
    ) -> None:
        """Add an ordinary module that is traced, and cut by the planner into stages of its ranks.

        A graph of one captured module and nothing else is that plain model: same plan, same checkpoints.

        Args:
            module: a (HuggingFace) module; it may be on the meta device.
            inputs: as for `stage`; entries of the batch that are no tensors are constants of the capture
                (``return_loss=True``, which a contrastive model gets anyway where its loss is an output).
            outputs: fields of its output, such as ``{"last_hidden_state": "image_hidden"}``, or names as they are; a
                loss may be among them. `eval_batch` without labels needs none that its ``forward`` has defaults for.
            stages: exactly that many stages, or as many as are quickest.

        Raises:
            ConfigError: as for `stage`.
        """
        if not isinstance(module, nn.Module):
            raise ConfigError(f"stage {name!r}: capture takes a module, found {type(module).__name__}")
        # no grid: a captured stage's ranks are data-parallel within the pieces that the planner makes of it
        pieces = stages if stages == "auto" else read_count(name, "stages", stages)
        spec = _read(name, module, inputs, outputs, ranks, micro_batch_size, reported)
        self._add(dataclasses.replace(spec, num_pieces=pieces))

    def tie(self, *parameters: str) -> None:
        """Make parameters of different stages one: ``graph.tie("language.embedding.weight", "loss.head.weight")``.

        Raises:
            ConfigError: fewer than two are named, or a name's stage does not exist.
        """
        wrong = [name for name in parameters if not isinstance(name, str)]
        if wrong:
            raise ConfigError(
                f"graph.tie: {wrong[0]!r} is no text; give each parameter as an argument of its own"
            )
        if len(set(parameters)) < 2:
            raise ConfigError(f"graph.tie: {parameters} are no two parameters; name two or more")
        for parameter in parameters:
            stage = parameter.partition(".")[0]
            if stage not in self._stages or "." not in parameter:
                raise ConfigError(
                    f'graph.tie: {parameter!r} is not "stage.parameter"; the stages are {", ".join(self._stages)}'
                )
        self._ties.append(tuple(dict.fromkeys(parameters)))

    def _add(self, stage: StageSpec) -> None:
        if stage.name in self._stages:
            raise ConfigError(f"stage {stage.name!r}: there is one of this name already; give each its own")
        if hasattr(nn.Module, stage.name):
            raise ConfigError(
                f"stage {stage.name!r}: torch modules have an attribute of this name; choose another"
            )
        if not isinstance(stage.make, nn.Module) and not callable(stage.make):
            raise ConfigError(
                f"stage {stage.name!r}: its module is a {type(stage.make).__name__}; give a torch module, or a "
                "function of a StageContext that makes one"
            )
        if len(stage.ranks) % stage.tensor:
            raise ConfigError(
                f"stage {stage.name!r}: its {len(stage.ranks)} ranks {list(stage.ranks)} are no multiple of "
                f"tensor={stage.tensor}; list tensor ranks for each data position"
            )
        # ranks [4, 5, 6, 7] with tensor=2 are data positions (4, 5) and (6, 7)
        rows = [list(stage.ranks[i : i + stage.tensor]) for i in range(0, len(stage.ranks), stage.tensor)]
        if any(row != sorted(row) for row in rows):
            raise ConfigError(
                f"stage {stage.name!r}: its tensor-parallel ranks {rows} do not ascend, as process groups number them; "
                "list each data position's ranks in ascending order"
            )
        for other in self._stages.values():
            both = sorted(set(other.ranks) & set(stage.ranks))
            is_same = (stage.ranks, stage.tensor) == (other.ranks, other.tensor)
            if both and max(stage.tensor, other.tensor) > 1 and not is_same:
                raise ConfigError(
                    f"stage {stage.name!r}: rank {both[0]} is a rank of stage {other.name!r} too, on another grid; "
                    "stages with tensor ranks share all their ranks, or none: give both the same ranks and tensor size"
                )
        arguments = [keyword for keyword, _ in stage.inputs]
        for what, names, known, are in (
            ("layouts", [n for n, _ in stage.layouts], stage.output_names, "outputs"),
            ("sharded_outputs", [n for n, _ in stage.sharded_outputs], stage.output_names, "outputs"),
            ("sharded_inputs", [n for n, _ in stage.sharded_inputs], arguments, "inputs"),
            ("reported", list(stage.reported), stage.output_names, "outputs"),
        ):
            unknown = [name for name in names if name not in known]
            if unknown:
                raise ConfigError(
                    f"stage {stage.name!r}: {what} names {unknown[0]!r}; its {are} are {', '.join(known)}"
                )
        if not isinstance(stage.make, nn.Module) and hasattr(stage.make, "check"):
            stage.make.check(stage.name, stage.tensor)
        self._stages[stage.name] = stage


def _read(
    name: Any, make: Maker, inputs: Any, outputs: Any, ranks: Any, micro_batch_size: Any, reported: Any
) -> StageSpec:
    """Return a stage with what is written down of any."""
    size = micro_batch_size
    return StageSpec(
        name=read_name(name),
        make=make,
        inputs=read_pairs(name, "inputs", inputs, is_input=True),
        outputs=read_pairs(name, "outputs", outputs, is_input=False),
        ranks=read_ranks(name, ranks),
        micro_batch_size=None if size is None else read_count(name, "micro_batch_size", size),
        reported=read_texts(name, "reported", reported),
    )


def make_contexts(
    stages: Sequence[StageSpec],
    *,
    rank: int,
    device: torch.device,
    dtype: torch.dtype,
    timeout_s: float,
    backend: str = "gloo",
) -> dict[str, StageContext]:
    """Return this rank's contexts by stage; collective over all ranks where torch.distributed is initialised.

    Args:
        stages: all of them, in the same order on every rank, their ranks checked.
        timeout_s: how long a collective in its groups waits for its peers.
        backend: what moves the device's tensors (`JobPlacement.backend`).
    """
    own: dict[str, StageContext] = {}
    timeout = datetime.timedelta(seconds=timeout_s)
    for stage in stages:
        rows = [stage.ranks[i : i + stage.tensor] for i in range(0, len(stage.ranks), stage.tensor)]
        columns = [stage.ranks[i :: stage.tensor] for i in range(stage.tensor)]
        # gloo alone serves both, through host memory, where ranks share a device
        both = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
        tensor_group = _own_group(rows, rank, timeout, backend=both)
        data_group = _own_group(columns, rank, timeout, backend=backend)
        single_group = _own_group([[r] for r in stage.ranks], rank, timeout, backend=backend)
        if rank in stage.ranks:
            data_rank, tensor_rank = divmod(stage.ranks.index(rank), stage.tensor)
            own[stage.name] = StageContext(
                stage=stage.name,
                rank=rank,
                device=device,
                dtype=dtype,
                data_group=data_group,
                tensor_group=tensor_group,
                single_group=single_group,
                data_rank=data_rank,
                data_size=len(rows),
                tensor_rank=tensor_rank,
                tensor_size=stage.tensor,
            )
    assert own, "every rank is in a stage"
    return own


def _own_group(
    members: Sequence[Sequence[int]], rank: int, timeout: datetime.timedelta, *, backend: str
) -> dist.ProcessGroup | None:
    """Create a group of each of ``members`` and return the one that ``rank`` is in."""
    if not dist.is_initialized():
        return None
    found = None
    for ranks in members:
        if len(ranks) == 1 and rank not in ranks:
            continue  # a rank's own is its own affair: of many ranks nobody passes through all of them
        group = dist.new_group(
            list(ranks), timeout=timeout, backend=backend, use_local_synchronization=len(ranks) == 1
        )
        if rank in ranks:
            assert isinstance(group, dist.ProcessGroup)
            found = group
    return found
