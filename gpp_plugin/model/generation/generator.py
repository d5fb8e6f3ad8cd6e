"""`engine.generate`: HuggingFace's `generate` on the plan's stages, by all ranks together.

    micro-batch   a part of the prompts; a rank generates from several in turns (`micro_batches`)
    replica       one rank of each stage: together they have the whole model. Each replica generates from its part of
                  a micro-batch; there are as many as the stage with the fewest ranks has.
    rank          runs the whole of `generate`, really where its stages compute (`owned_modules`)

Every rank of a replica chooses the next tokens itself, from the same logits and with rank 0's random state. So
tokens are never sent.

Source: this project
Tests: tests/integrations/test_generation.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.config.block import GenerateConfig
from gpp_plugin.errors import CaptureError, CommTimeout, ConfigError, describe_error
from gpp_plugin.integrations.huggingface.generate_calls import (
    RankStreamer,
    argument_facts,
    attention_weights,
    cache_layers,
    check_arguments,
    generating_model,
    joined_tokens,
    kv_width,
    longest_caches,
    samples_of,
    tensor_arguments,
    why_not_cut,
)
from gpp_plugin.ir.memory_report import CacheReport, RankCaches
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.tensors import even_ranges
from gpp_plugin.model.generation.cache_peers import CacheNeed, CachePeers, is_cut, need_of
from gpp_plugin.model.generation.micro_batches import ReplicaLink, ReplicaStopped, Turns, copy_modules
from gpp_plugin.model.generation.owned_modules import (
    DrawsOfAll,
    ReplicaPart,
    ShapeMemory,
    Weights,
    on_all_ranks,
    replicas_of,
    rows_of,
)
from gpp_plugin.model.generation.stage_tensors import ReplicaRun, StageTensor
from gpp_plugin.plan.costs.long_context import cache_bytes, cut_cache_bytes
from gpp_plugin.runtime.messages.sockets import open_pairs, widened_sockets
from gpp_plugin.runtime.random_streams import restored_streams, set_streams, streams_of
from gpp_plugin.runtime.ranks.agreement import agree, describe_tensor
from gpp_plugin.runtime.ranks.collectives import Collectives, exchange
from gpp_plugin.runtime.ranks.failure_board import HERE
from gpp_plugin.runtime.ranks.job_board import job_board
from gpp_plugin.runtime.ranks.placement_of_ranks import Setting

logger = logging.getLogger(__name__)

NOTHING_GENERATED = "engine.cache_report: nothing has been generated yet; call engine.generate() first"


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedModel:
    """The model that is generated with, as one rank has it.

    Args:
        module: the user's.
        held: by stage, the names of the parameters that it holds.
        names: every name of a tensor in the module -> its name there.
        live: returns what this rank trains, by name.
        buffers: returns all buffers on the device, by name.
        join: returns the whole of what this rank has parts of in ``live``, by name, in memory of their own of
            ``joined_bytes``; collective over the tensor ranks of its stages.
    """

    module: nn.Module
    held: Sequence[Sequence[str]]
    names: Mapping[str, str]
    live: Callable[[], Mapping[str, Tensor]]
    buffers: Callable[[], Mapping[str, Tensor]]
    join: Callable[[], Mapping[str, Tensor]] = dict
    joined_bytes: int = 0


class Generator:
    """Generates with a model in training; every method is collective over all ranks.

    Args:
        plan: of training.
        config: how caches lie.
        free_bytes: returns what this rank has free for them, in bytes; None where it is unknown, on all ranks alike.
        collectives: of all ranks.
    """

    def __init__(
        self,
        model: GeneratedModel,
        *,
        plan: PipelinePlan,
        config: GenerateConfig,
        setting: Setting,
        collectives: Collectives,
        free_bytes: Callable[[], int | None],
    ) -> None:
        self._free_bytes = free_bytes
        self._config = config
        self._caches: RankCaches | None = None
        self._cache = "data"
        self._micro_batches = 1
        self._model = model
        self._setting = setting
        self._collectives = collectives
        self._replicas = replicas_of(plan)
        self._plan = plan
        # by micro-batch: a link of each replica
        self._links: list[list[ReplicaLink]] = []
        # of each replica, and, with caches that may be cut, of a position's ranks in all replicas; None elsewhere
        self._replica_groups: list[dist.ProcessGroup | None] = []
        self._peer_groups: list[dist.ProcessGroup | None] = []
        # what modules of other ranks return, by their path; as long as the model is called the same way
        self._memories: dict[str, ShapeMemory] = {}
        self._remembers = ""
        self.is_broken = False
        """Whether a generation ended in a way that other ranks do not share."""

    def generate(self, arguments: Mapping[str, Any]) -> Any:
        """Return what the model's own `generate` returns, the same on every rank.

        Raises:
            ConfigError: the model cannot generate, the ranks' arguments differ, or one is not supported.
            CommTimeout: a rank did not come, or is gone.
        """
        # Three meetings before anything runs, so that all ranks refuse what any of them would, and one behind it:
        #
        #     can it be done     a model without `generate`, an argument that is not supported
        #     the same?          digests of prompts and arguments; where they differ, the facts themselves
        #     is there memory?     bytes of caches, where it is known what is free
        #     what came          tokens of each replica, or what a module of some rank raised
        group = self._setting.group

        def check() -> bool:
            check_arguments(generating_model(self._model.module), arguments)
            return arguments.get("streamer") is not None

        streams = exchange(check, what="a look at what to generate", group=group)
        model = generating_model(self._model.module)
        facts = argument_facts(
            {**arguments, "model.generation_config": model.generation_config}, describe_tensor
        )
        agree(facts, what="a look at what each rank generates from", group=group)
        if any(streams):  # a streamer is rank 0's, whichever rank has one; the others print nothing
            own_streamer = arguments.get("streamer") if self._setting.rank == 0 else None
            arguments = {**arguments, "streamer": RankStreamer(own_streamer)}
        samples = samples_of(model, arguments)
        are_cut = self._are_cut(model, arguments, samples)
        parts = self._parts(samples, is_cut=are_cut)
        number = parts[0].replicas
        self._make_links(len(parts))
        self._cache, self._micro_batches = "sequence" if are_cut else "data", len(parts)
        way = f"{self._cache} {model.config.to_dict()}"
        if way != self._remembers:
            self._memories, self._remembers = {}, way
        own = self._own_replica(number)
        outcomes = self._attempt_all(self._models(model, len(parts)), arguments, own, parts)
        # In one replica of all ranks everybody has the tokens; else the first rank of each replica brings them.
        is_everyone = number == 1 and len(self._replicas[0]) == self._setting.num_ranks
        is_first = own is not None and self._setting.rank == self._replicas[own][0]

        def bring() -> list[Any]:
            for outcome in outcomes:
                if outcome.error is not None:
                    raise outcome.error
            return (
                [_on_device(each.value, torch.device("cpu")) for each in outcomes]
                if is_first and not is_everyone
                else []
            )

        look = functools.partial(self._look_for_waiting, outcomes, own)
        gathered = exchange(bring, what="what was generated", group=group, look=look)
        if is_everyone:
            found = [[outcome.value] for outcome in outcomes]
        else:
            found = [
                [gathered[replica[0]][m] for replica in self._replicas[:number]] for m in range(len(parts))
            ]
        if len(found) == number == 1:
            return _on_device(found[0][0], self._setting.device)
        whole = [
            joined_tokens(model, arguments, tokens)[: part.real_rows(tokens[0].shape[0])]
            for part, tokens in zip(parts, found, strict=True)
        ]
        return _on_device(joined_tokens(model, arguments, whole), self._setting.device)

    def _look_for_waiting(self, outcomes: Sequence[_Outcome], replica: int | None) -> None:
        """Raise an error from before this rank's first tensor where others of the replica wait for that: not theirs."""
        board = job_board()
        unsent = {outcome.unsent: outcome.error for outcome in outcomes if outcome.unsent}
        for seen in board.look(self._replicas[replica]) if board and unsent and replica is not None else ():
            failure = unsent.get(seen.facts.get("waits_for", ""))
            if failure is not None and seen.facts.get("number") == HERE.number:
                self.is_broken = True
                cause = failure.__cause__ if isinstance(failure.__cause__, Exception) else failure
                raise _refused(cause, where=f"rank {self._setting.rank}: ") from cause

    def close(self) -> None:
        """Release the replicas' groups."""
        for group in (*self._replica_groups, *self._peer_groups):
            if group is not None:
                dist.destroy_process_group(group)
        self._links, self._replica_groups, self._peer_groups = [], [], []

    def _parts(self, samples: int | None, *, is_cut: bool) -> list[ReplicaPart]:
        """Return the micro-batches of the prompts, as the first replica has them."""
        # One, where prompts stay together, where a replica is one rank, which waits for nobody, and where caches are
        # cut, as all replicas are in step then. Every replica has prompts of every micro-batch; where caches are cut,
        # copies if need be.
        stages = max(len(replica) for replica in self._replicas)
        number, replicas = 1, min(len(self._replicas), samples or 1)
        if samples and stages > 1 and not is_cut:
            requested = self._config.micro_batches
            number = (
                min(samples, requested) if requested != "auto" else max(1, min(stages, samples // replicas))
            )
        rows = even_ranges(samples or 1, number)
        replicas = len(self._replicas) if is_cut else min(replicas, len(rows[-1]))
        return [
            ReplicaPart(
                number=at,
                samples=len(each),
                first=each.start,
                whole=samples or 1,
                replica=0,
                replicas=replicas,
                is_cut=is_cut,
            )
            for at, each in enumerate(rows)
        ]

    def _models(self, model: Any, number: int) -> list[Any]:
        """Return for each micro-batch a model to generate with.

        Raises:
            ConfigError: there are several, and the model cannot be copied; the same on every rank.
        """
        if number == 1:
            return [model]
        copies: list[Any] = []

        def copy_model() -> None:
            copies.extend(copy_modules(model) for _ in range(number))

        exchange(copy_model, what="copies of a model for micro-batches", group=self._setting.group)
        return copies

    # ---- one rank's part -----------------------------------------------------------------------

    def _attempt_all(
        self,
        models: Sequence[Any],
        arguments: Mapping[str, Any],
        replica: int | None,
        parts: Sequence[ReplicaPart],
    ) -> list[_Outcome]:
        """Return what this rank generated of each micro-batch, or its error; raise what others cannot know of.

        Args:
            models: for each micro-batch one to generate with.
        """
        self._caches = None
        with self._same_streams():
            self.is_broken = True  # until it has come to an end that other ranks come to as well
            joined = self._model.join()  # by ranks that stand by too: the others need their parts
            if replica is None:
                self.is_broken = False
                return [_Outcome()]
            weights = self._weights(generating_model(self._model.module), replica, joined)
            turns = Turns(self._setting.device) if len(parts) > 1 else None
            calls = []
            for model, part in zip(models, parts, strict=True):
                self._links[part.number][replica].turns = turns
                own = dataclasses.replace(part, replica=replica)
                calls.append(functools.partial(self._attempt, model, arguments, own, weights))
            try:
                if turns is None:
                    outcomes = [calls[0]()]
                else:
                    outcomes, streams = turns.run(calls)
                    # As one process that generates from all prompts: it draws for as long as the longest continues.
                    longest = max(range(len(parts)), key=lambda number: outcomes[number].draws)
                    set_streams(self._setting.device, streams[longest])
            except BaseException:
                self._links[0][replica].hang_up()
                raise
            self.is_broken = False
            if all(outcome.caches is not None for outcome in outcomes):
                self._caches = _all_caches([each.caches for each in outcomes if each.caches is not None])
            return outcomes

    def _attempt(
        self, model: Any, arguments: Mapping[str, Any], part: ReplicaPart, weights: Weights
    ) -> _Outcome:
        """Return what this rank generated of one micro-batch, or its error; raise what others cannot know of."""
        # What ends a generation, and what the job does then:
        #
        #     before the first tensor    `generate` refuses arguments: so it does on all ranks, which continue; where
        #                                others wait for that tensor, this rank alone has failed (`_look_for_waiting`)
        #     a module or the streamer   its next tensor says so, the replica's ranks stop there, and continue; but not
        #                                where the module had written to a cache, so that it fails on shapes as well
        #     anything else              only this rank sees it; the others wait for it, and the job ends
        #
        # The first two stop the other micro-batches too: each rank says so with the next tensor that it sends in them.
        # Where caches are cut the other replicas wait as well, in their next layer: any failure ends the job.
        link = self._links[part.number][part.replica]
        before = link.messages
        run = ReplicaRun(link) if len(link.ranks) > 1 else None
        try:
            outcome = self._run(model, self._as_taken(arguments, part), weights, run, part)
            link.finish()
            return outcome
        except ReplicaStopped:
            if part.is_cut:  # the other replicas wait for this one in their next layer
                failure = _named(None if run is None else run.failure, self._setting.rank)
                raise failure or CommTimeout("engine.generate: another rank of this replica failed") from None
            link.finish()
            return _Outcome(error=None if run is None else _named(run.failure, self._setting.rank))
        except Exception as error:
            if run is not None and run.failure is not None:  # what it left half done fails on shapes, too
                raise _refused(run.failure, where=f"rank {self._setting.rank}: ") from run.failure
            is_shared = run is None or (link.messages == before and not isinstance(error, CaptureError))
            if not is_shared or part.is_cut:
                raise
            if link.turns is not None:
                link.turns.is_stopping = True
            refusal = error if isinstance(error, ConfigError) else _refused(error)
            return _Outcome(error=refusal, unsent="" if run is None else link.waits_for)

    @torch.no_grad()
    def _run(
        self,
        model: Any,
        arguments: Mapping[str, Any],
        weights: Weights,
        run: ReplicaRun | None,
        part: ReplicaPart,
    ) -> _Outcome:
        with contextlib.ExitStack() as around:
            around.enter_context(on_all_ranks(model, weights, run, self._memories))
            if (
                run is not None and "streamer" in arguments
            ):  # as of a module: with the next tensor all hear of it
                arguments["streamer"].note = functools.partial(setattr, run, "failure")
            caches: list[Any] = [None]
            note = model.register_forward_pre_hook(functools.partial(_note_cache, caches), with_kwargs=True)
            around.callback(note.remove)
            draws = DrawsOfAll(part.drawn_rows, part.whole)
            if not part.is_whole:
                around.enter_context(draws)
            if part.is_cut:
                # transformers is there by now, and nothing that trains needs it
                from gpp_plugin.integrations.huggingface.sequence_cache import shared_caches

                around.enter_context(shared_caches(model, self._peers_of(part)))
            result = model.generate(**arguments)
            counted = self._counted(model, weights, run, caches[0], part)
            value = result if run is None else run.full(result)
            if run is not None and run.failure is not None:  # of a module whose output nobody read
                raise ReplicaStopped
            return _Outcome(value=value, caches=counted, draws=draws.number)

    def cache_report(self) -> CacheReport:
        """Return what the caches of the last generation took on each rank.

        Raises:
            ConfigError: there was none.
        """
        own = self._caches or RankCaches(
            rank=self._setting.rank, layers=0, rows=0, length=0, predicted_bytes=0, counted_bytes=0
        )
        gathered = self._collectives.gather((own, self._caches is not None), "a report of caches")
        if not any(is_there for _, is_there in gathered):
            raise ConfigError(NOTHING_GENERATED)
        return CacheReport(
            cache=self._cache, micro_batches=self._micro_batches, ranks=tuple(each for each, _ in gathered)
        )

    def _counted(
        self, model: Any, weights: Weights, run: ReplicaRun | None, cache: Any, part: ReplicaPart
    ) -> RankCaches:
        """Return what this rank's caches take, and what they should by the model's configuration."""
        # A layer of the model's cache is this rank's where the weights of its attention are: elsewhere it has a length.
        held = attention_weights(model)
        width, itemsize = kv_width(model), self._setting.dtype.itemsize
        layers = counted = predicted = most_rows = longest = 0
        for place, layer in cache_layers(cache):
            name = held.get(place, "")
            if layer.keys is None or weights.names.get(name, name) not in weights.live:
                continue
            rows, length = layer.keys.shape[0], int(layer.get_seq_length())
            layers += 1
            most_rows, longest = max(most_rows, rows), max(longest, length)
            counted += sum(t.nbytes for t in (layer.keys, layer.values) if not isinstance(t, StageTensor))
            common = {"rows": rows, "length": length, "kv_width": width, "itemsize": itemsize}
            if part.is_cut:
                predicted += cut_cache_bytes(**common, block=self._config.block, ranks=part.replicas)
            else:
                predicted += cache_bytes(**common)
        return RankCaches(
            rank=self._setting.rank,
            layers=layers,
            rows=most_rows,
            length=longest,
            predicted_bytes=predicted,
            counted_bytes=counted,
        )

    def _own_replica(self, number: int) -> int | None:
        """Return which of the first replicas this rank is in."""
        return next(
            (replica for replica in range(number) if self._setting.rank in self._replicas[replica]), None
        )

    def _are_cut(self, model: Any, arguments: Mapping[str, Any], samples: int | None) -> bool:
        """Return whether caches are cut along the sequence; refuse what cannot be, and what does not fit."""
        why_not = why_not_cut(model)
        if len(self._replicas) == 1:
            why_not = "it is cut over the ranks of each stage, and a stage has one (data_parallel)"
        elif samples is None:
            why_not = (
                "prompts are decoded by themselves: not with several tensors of different rows, and not with "
                "logits_processor, stopping_criteria, a streamer or return_dict_in_generate"
            )
        requested = self._config.cache
        if requested == "sequence" and why_not is not None:
            raise ConfigError(f'graph_pipeline.generate.cache: "sequence": {why_not}; use "data"')
        longest, free_bytes = longest_caches(model, arguments), self._free_bytes()
        needs: list[CacheNeed] = []
        if longest is not None and free_bytes is not None:  # alike on all ranks
            # What would be this rank's with whole caches: all prompts in one replica, or the replica's part. With cut
            # ones it holds a part of each prompt.
            prompts = next(iter(tensor_arguments(arguments).values())).shape[0]
            number = 1 if samples is None else min(len(self._replicas), samples)
            replica = self._own_replica(number)
            rows = prompts if number == 1 else len(rows_of(prompts, number, replica or 0, is_cut=False))
            need = need_of(
                model,
                longest,
                held=self._model.live(),
                names=self._names_in(model),
                rows=0 if replica is None else rows,
                prompts=prompts,
                ranks=len(self._replicas),
                block=self._config.block,
                itemsize=self._setting.dtype.itemsize,
                free_bytes=free_bytes,
                weights=self._model.joined_bytes,
            )
            needs = self._collectives.gather(need, "a look at the memory for caches")
        return is_cut(requested, needs, why_not=why_not)

    def _peers_of(self, part: ReplicaPart) -> CachePeers:
        link = self._links[part.number][part.replica]
        return CachePeers(
            position=part.replica,
            number=part.replicas,
            prompts=len(part.rows),
            samples=part.samples,
            block=self._config.block,
            group=self._peer_groups[link.position],
            staging=self._setting.device
            if self._setting.placement.backend == "nccl"
            else torch.device("cpu"),
            timeout_s=link.timeout_s,
        )

    def _names_in(self, model: nn.Module) -> dict[str, str]:
        """Return what the tensors of the module that generates are called in the graph.

        Adapters lie around it: ``base_model.model.lm_head.weight`` there is ``lm_head.weight`` in it.
        """
        path = next(path for path, module in self._model.module.named_modules() if module is model)
        prefix, known = f"{path}." if path else "", self._model.names
        tensors = (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
        return {name: known.get(prefix + name, prefix + name) for name, _ in tensors}

    def _weights(self, model: nn.Module, replica: int, joined: Mapping[str, Tensor]) -> Weights:
        """Return the weights as they lie in a replica, those of this rank as they are now, whole."""
        # Of stages 0 | 1 | 2 on ranks 0 | 1 | 0 the replica is (0, 1): position 0 holds stages 0 and 2. A tied
        # parameter has several positions, and each of these a copy in training.
        holders: dict[str, set[int]] = {}
        for stage, names in zip(self._plan.stages, self._model.held, strict=True):
            position = self._replicas[replica].index(stage.ranks[replica])
            for name in names:
                holders.setdefault(name, set()).add(position)
        return Weights(
            holders={name: tuple(sorted(positions)) for name, positions in holders.items()},
            live={**self._model.live(), **joined},
            buffers=self._model.buffers(),
            names=self._names_in(model),
        )

    def _as_taken(self, arguments: Mapping[str, Any], part: ReplicaPart) -> dict[str, Any]:
        """Return the arguments of a part of the prompts where and in the type that the model computes with."""
        taken = dict(arguments)
        for name, value in tensor_arguments(arguments).items():
            own = value if part.is_whole else value[part.drawn_rows]
            taken[name] = own.to(self._setting.device)
            if own.is_floating_point():
                taken[name] = taken[name].to(self._setting.dtype)
        return taken

    @contextlib.contextmanager
    def _same_streams(self) -> Iterator[None]:
        """Let all ranks draw what rank 0 would; the others draw on as if nothing had been drawn."""
        # As one process with rank 0's seed would draw: rank 0's own generators continue, the others' come back.
        device = self._setting.device
        gathered = self._collectives.broadcast(
            streams_of(device), source=0, what="the random state of a generation"
        )
        if self._setting.rank == 0:
            yield
            return
        with restored_streams(device):
            set_streams(device, gathered)
            yield

    def _make_links(self, micro_batches: int) -> None:
        """Create what joins the ranks of each replica, once: groups, by all ranks in one order, and links over them."""
        setting = self._setting
        limit_s = self._collectives.timeout_s

        def make_group(ranks: Sequence[int], backend: str) -> dist.ProcessGroup | None:
            if len(ranks) < 2:
                return None
            limit = datetime.timedelta(seconds=limit_s)
            with widened_sockets():
                made = dist.new_group(list(ranks), timeout=limit, backend=backend)
            return made if setting.rank in ranks else None

        # Ranks 0 1 | 2 3 of two stages: replicas (0, 2) and (1, 3). With cut caches also the pairs {0, 1} and {2, 3},
        # the ranks at one position of all replicas: together they have the caches of that position's stages.
        if not self._links:
            self._replica_groups = [make_group(ranks, "gloo") for ranks in self._replicas]
            for ranks, group in zip(self._replicas, self._replica_groups, strict=True):
                if group is not None:
                    open_pairs([group], list(itertools.combinations(ranks, 2)), timeout_s=limit_s)
            if self._config.cache != "data":
                peers = zip(*self._replicas, strict=True)
                self._peer_groups = [make_group(ranks, setting.placement.backend) for ranks in peers]
        for number in range(len(self._links), micro_batches):
            self._links.append(
                [
                    ReplicaLink(
                        ranks=ranks,
                        position=ranks.index(setting.rank) if setting.rank in ranks else 0,
                        group=group,
                        device=setting.device,
                        timeout_s=limit_s,
                        micro_batch=number,
                    )
                    for ranks, group in zip(self._replicas, self._replica_groups, strict=True)
                ]
            )


def _note_cache(caches: list[Any], module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Keep the cache of the last forward, which is the generation's."""
    if kwargs.get("past_key_values") is not None:  # an empty one counts as false
        caches[0] = kwargs["past_key_values"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """What a rank has of a micro-batch; ``unsent``: what others wait for if the error is this rank's alone."""

    value: Any = None
    error: Exception | None = None
    unsent: str = ""
    caches: RankCaches | None = None
    draws: int = 0


def _all_caches(each: Sequence[RankCaches]) -> RankCaches:
    """Return what the caches of all micro-batches take on one rank."""
    return RankCaches(
        rank=each[0].rank,
        layers=max(one.layers for one in each),
        rows=sum(one.rows for one in each),
        length=max(one.length for one in each),
        predicted_bytes=sum(one.predicted_bytes for one in each),
        counted_bytes=sum(one.counted_bytes for one in each),
    )


def _named(failure: Exception | None, rank: int) -> Exception | None:
    """Return what a module of this rank raised, as all ranks raise it; None where it was another rank's."""
    return None if failure is None else _refused(failure, where=f"rank {rank}: ")


def _refused(failure: Exception, *, where: str = "") -> ConfigError:
    """Return what all ranks raise: by default what `generate` itself refuses on all of them alike."""
    error = ConfigError(f"engine.generate: {where}{describe_error(failure)}")
    error.__cause__ = failure
    return error


def _on_device(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
