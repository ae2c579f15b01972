"""The engine: loads a target and a draft, plans what was left to it, and starts runs. It never prints."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..tp.decoder import Decoder
from ..tp.devices import resolve_device, resolve_dtype, set_threads
from ..tp.errors import UsageError
from ..tp.model.config import ModelConfig
from ..tp.parallel.place import Place
from ..tp.parallel.ranks import ALONE, Ranks
from ..tp.parallel.split import check_split
from ..tp.weights.checkpoint import Checkpoint
from ..tp.weights.registry import MTP, find_pair, parse_draft, published_cache
from .batch.batch import Batch
from .batch.kept import KeptCache, reusable
from .batch.reading import forward_in_parts
from .batch.request import Order, Request, RunOrder
from .batch.run import Run
from .batch.sequence import BatchSequence
from .batch.sequence_setup import Models, SequenceSetup
from .checks import checked_prompt, host_locks_embeddings
from .contexts.home import user_store
from .contexts.manifest import NO_FRAME, ContextError, Frame, Manifest
from .contexts.model import ContextRequest, ModelContexts
from .contexts.store import ContextStore
from .generation import Generation, Result
from .graphs.capture import capture_for
from .graphs.passes import Graphs
from .held import Held
from .planning.memory import plan_here
from .planning.request import RunRequest
from .planning.run_plan import RunPlan
from .settings import MOST_SEQUENCES, Settings
from .speculation.grammar import Grammar, Grammars
from .speculation.sampling import Sampling
from .system import THIS_MACHINE, System
from .vocabulary import check_draft


class Engine:
    """A target model, perhaps a draft model, and the caches they keep between runs.

    A run whose prompt begins like an earlier one (a follow-up question about the same book) starts from the keys and
    values that are still there. One run at a time: starting another ends the one before.

    On several ranks each has an engine and starts the same runs, with the same methods or with `follow`, and draws the
    same random numbers for the same distributions; rank 0's prompt, lengths and outcome are what counts.
    """

    def __init__(
        self,
        target: Decoder,
        draft: Decoder | None,
        settings: Settings,
        names: tuple[str, str | None] = ("", None),
        system: System = THIS_MACHINE,
    ) -> None:
        """Args:
        names: of target and draft, what statistics call them.
        system: the machine, or what stands for it.

        Raises:
            ModelError: the two do not share a vocabulary.
        """
        if draft is not None:
            check_draft(target.config, draft.config)
        self.target, self.draft, self.settings, self.system = target, draft, settings, system
        self._names = names
        locks = host_locks_embeddings(target, draft)
        self._locks_embedding = target.ranks.least([int(locks)], patiently=True) == [1]  # ranks make the same plan
        self._kept = KeptCache(target, settings.link_gbps, system, draft)
        self._capture = capture_for(target.device, target.ranks)
        self._graphs = Graphs()  # of the last run
        self._running: Run | None = None
        self.contexts: ModelContexts | None = None
        """The saved contexts that runs may start from and save to; an engine that was loaded from files has them."""
        self._context = ContextRequest()
        self.grammars: Grammars | None = None
        """What follows answers with a grammar; an engine that was loaded from files has it."""

    @classmethod
    def load(
        cls,
        model: str | Path,
        draft: str | Path | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        gpus: int = 1,
        resident: float | None = None,
        host_memory: float | None = None,
        link_gbps: float | None = None,
        capacity: int | None = None,
        room: int = 0,
        context: str | None = None,
        store: ContextStore | None = None,
        tiers: int = 3,
        budget: int | None = None,
        chunk_size: int | None = None,
        draft_length: int | None = None,
        block_length: int | None = None,
        refresh: str | int = "auto",
        exact: str = "auto",
        early_end: str | float = "auto",
        pack: str = "auto",
        threads: int | None = None,
        rope_scaling: str | None = None,
        system: System = THIS_MACHINE,
    ) -> Engine:
        """Loads a pair.

        Args:
            model: a preset's name, a directory, or a model of the hub (`owner/name`), downloaded if it is not there.
            draft: the same; `None` is the preset's own, if `model` is one, else none; `"none"` runs two tiers;
                `"lookup"` proposes what followed the last tokens when they came before, `"D,lookup"` either; `"mtp"` is
                the target's own multi-token-prediction head.
            device: `auto` (CUDA where there is one), `cpu` or `cuda`.
            dtype: `auto` (the checkpoint's own), `float32`, `bfloat16` or `float16`.
            gpus: ranks that share the model; more than 1 under torchrun, which then says how many there are.
            resident: GiB of the KV cache kept on each device, the rest streams from host memory; `None`: on a GPU as
                much as fits, on a CPU all that fits into host memory.
            link_gbps: on a CPU, what the link to the streamed part may carry, in gigabytes a second.
            capacity: tokens the run will hold, prompt and answer, if known: memory is then checked before weights load.
            room: tokens that the cache kept between runs has room for beyond a run's, if they fit, for a longer one.
            context: the saved context that runs start from, as far as their prompts begin like it.
            store: where saved contexts are; `None`: those of this user.
            system: the machine, or what stands for it.
            tiers, budget and all others: see `Settings`; if open, budget and chunk size are the preset's, or planned.

        Raises:
            UsageError, ModelError, CapacityError: with the value and the remedy.
        """
        place = Place.among(gpus)
        wanted, lookup = parse_draft(draft)
        others = exact, lookup, link_gbps, early_end, pack, host_memory, threads, rope_scaling
        settings = Settings(tiers, budget, chunk_size, draft_length, block_length, refresh, resident, *others)
        set_threads(threads)
        settings = settings.with_defaults(published_cache(model, place.size if place else 1))
        target_directory, draft_directory = find_pair(model, wanted if settings.tiers == 3 else "none")
        target_config = ModelConfig.load(target_directory).with_rope_scaling(rope_scaling)
        draft_config = ModelConfig.load(draft_directory) if draft_directory else None
        has_head = str(wanted) == MTP and settings.tiers == 3
        if has_head:
            draft_config = target_config.mtp_head
        if draft_config:
            check_draft(target_config, draft_config)
        check_split(target_config, place.size if place else 1)
        where = resolve_device(device, place.local_rank if place else 0)
        ranks = Ranks.join(place, where, system.wait_limit_s) if place else ALONE
        kind = resolve_dtype(dtype, target_config)
        limits = system.limits
        request = RunRequest(target_config, draft_config, kind, capacity or 1, settings, ranks.size, limits=limits)
        store = store or user_store()
        memory = system.device_memory
        plan = plan_here(request, where, ranks, free_disk=store.free_bytes, device_memory=memory)
        if plan.embedding and not plan.fits:  # the embeddings might, on the GPU
            request = replace(request, locks_embedding=False)
            other = plan_here(request, where, ranks, free_disk=store.free_bytes, device_memory=memory)
            plan = other if other.fits else plan
        plan.check()
        ranks.share(None)  # no rank loads before every rank has found that there is room
        given: dict[str, Any] = {"tiling": limits.tiling}
        if plan.embedding:
            given["host_memory"] = system.make_link(where, None).host_memory
        of_head = Checkpoint(target_directory, kind, where, further_tokens=True) if has_head else None
        target = Decoder.load(target_directory, target_config, dtype=kind, device=where, ranks=ranks, **given)
        if of_head:
            small = Decoder.mtp_head(of_head, target)
        else:
            small = Decoder.load(draft_directory, dtype=kind, device=where, **given) if draft_directory else None
        names = str(model), str(draft or model) if small or lookup else None
        engine = cls(target, small, settings, names, system)
        engine.contexts = ModelContexts(store, target_directory, str(model), target, settings.pack)
        engine.grammars = Grammars(target_directory, target_config)
        engine._kept.room, engine._kept.folder, engine._context = room, store.root, ContextRequest(name=context)
        return engine

    def generate(
        self,
        prompt_ids: Sequence[int] | Tensor,
        sampling: Sampling | None = None,
        max_new_tokens: int = 256,
        **options: Any,
    ) -> Result:
        """Runs to the end; see `stream`."""
        run = self.stream(prompt_ids, sampling, max_new_tokens, **options)
        for _ in run:
            pass
        return Result(run.statistics.token_ids, run.stats())

    def stream(
        self,
        prompt_ids: Sequence[int] | Tensor,
        sampling: Sampling | None = None,
        max_new_tokens: int = 256,
        *,
        ignore_eos: bool = False,
        tiers: int | None = None,
        reuse: int | None = None,
        on_memory: Callable[[float], None] | None = None,
        on_prefill: Callable[[float], None] | None = None,
        interrupted: Callable[[], bool] | None = None,
        contexts: ContextRequest | None = None,
        grammar: Grammar | None = None,
    ) -> Generation:
        """Prepares a run; iterating over it does the work, one event a round.

        Args:
            prompt_ids: token ids, a list or a 1-D tensor, at least one.
            sampling: default `Sampling()`.
            max_new_tokens: at least 1.
            ignore_eos: go on after an end-of-sequence token.
            tiers: for this run fewer than the settings have; `None` is as many.
            reuse: leading tokens to take over from runs before at most; `None` is all that are the same, and 0 gives
                their memory back first.
            on_memory: called with the share of the host memory taken that blocks stream from, 0 to 1.
            on_prefill: called with the share of the prefill done, 0 to 1.
            interrupted: asked on rank 0 after each round, and twice a second while the prompt is read; `True` ends the
                run there, on all ranks. What was read stays for the next one.
            contexts: what to do with saved contexts; default: start from the one that the engine was loaded with.
            grammar: the form that the answer is to have.

        Raises:
            ContextError: the context that is asked for cannot be used.
            UsageError: no token, one outside the vocabulary, an impossible length, more tiers than the settings have, a
                grammar that cannot be followed.
            CapacityError: more tokens than the model's positions or the memory hold.
        """
        request = Request(prompt_ids, sampling, max_new_tokens, ignore_eos, grammar=grammar)
        orders = [Order.of(request, self.target.config)]
        order = self._ordered(orders, tiers, reuse, contexts, alone=True)
        report = on_prefill and (lambda _, share: on_prefill(share))
        return Generation(self._batch(order, interrupted, report, on_memory))

    def batch(
        self,
        requests: Sequence[Request],
        *,
        tiers: int | None = None,
        reuse: int | None = None,
        max_sequences: int = MOST_SEQUENCES,
        expected: int = 1,
        in_slices: bool = False,
        on_memory: Callable[[float], None] | None = None,
        on_prefill: Callable[[int, float], None] | None = None,
        interrupted: Callable[[], bool] | None = None,
        contexts: ContextRequest | None = None,
    ) -> Batch:
        """Prepares several sequences that are decoded together; iterating over it does the work, and gives the index of
        a sequence with each of its rounds.

        What prompts begin with alike is read and held once. A request that cannot be answered fails alone; see
        `Batch.sequences`.

        Args:
            requests: at least one; further ones can be added while the batch runs.
            max_sequences: that are decoded together; further ones wait.
            expected: sequences that memory is planned for at the start, where more than `requests` are to join.
            in_slices: whether the prompt of one that joins others is read in slices between their rounds: TBT at most
                doubles. Otherwise they wait, which is sooner done in all.
            on_prefill: called with a sequence's index and the share of its prefill done, 0 to 1.
            tiers, interrupted: see `stream`.
            reuse, on_memory, contexts: see `stream`; of the first sequence that is not refused.

        Raises:
            ContextError: the context that is asked for cannot be used.
            UsageError: no request, or more tiers than the settings have.
        """
        if not requests:
            raise UsageError("a batch needs at least one request")
        first, *others = requests
        saved = self.contexts if self.target.ranks.rank == 0 else None
        orders = [Order.or_error(first, self.target.config)]
        orders += [Order.or_error(request, self.target.config, saved) for request in others]
        limits = {"most": max_sequences, "expected": expected, "in_slices": in_slices}
        order = self._ordered(orders, tiers, reuse, contexts, alone=False, **limits)
        return self._batch(order, interrupted, on_prefill, on_memory)

    def run(
        self,
        source: Callable[[bool], Request | None],
        *,
        tiers: int | None = None,
        max_sequences: int = MOST_SEQUENCES,
        expected: int = 1,
        in_slices: bool = True,
        interrupted: Callable[[], bool] | None = None,
        on_prefill: Callable[[BatchSequence, float], None] | None = None,
        on_memory: Callable[[float], None] | None = None,
    ) -> Run:
        """Prepares a run that lasts as long as there are requests; iterating over it does the work. A request that
        cannot be answered ends alone.

        Args:
            source: asked between rounds, as long as one more may run: the next request, or `None` where there is none
                now. Called with `True` where nothing else is left to be done: then it may wait, and `None` ends the
                run. Its requests find saved contexts as they say, also those that were saved meanwhile.
            max_sequences, expected, in_slices: see `batch`.
            tiers, interrupted, on_memory: see `stream`.
            on_prefill: called with a sequence and the share of its prefill done, 0 to 1.

        Raises:
            UsageError: more tiers than the settings have, or `max_sequences` below 1.
        """

        def more(waits: bool) -> BatchSequence | None:
            request = source(waits)
            if request is None:
                return None
            checked = replace(request, contexts=request.contexts or self._context)
            try:
                order = Order.or_error(checked, self.target.config, self.contexts)
            except Exception as error:  # of a request that is not what it should be
                order = Order.refused(request.number, UsageError(f"the request is not valid: {error}"))
            return BatchSequence(order, self.system.clock(), request)

        limits = {"most": max_sequences, "expected": expected, "in_slices": in_slices}
        order = self._ordered([], tiers, None, None, alone=False, **limits)
        return self._run(order, more, interrupted, on_prefill, on_memory)

    def _ordered(
        self,
        orders: list[Order],
        tiers: int | None,
        reuse: int | None,
        contexts: ContextRequest | None,
        *,
        alone: bool,
        most: int = 1,
        expected: int = 1,
        in_slices: bool = False,
    ) -> RunOrder:
        """What all ranks are to do: rank 0's order.

        Raises:
            ContextError, UsageError: see `stream`.
        """
        if most < 1:
            raise UsageError(f"max-sequences is {most}; it must be 1 or more")
        most_tiers = self.settings.tiers
        if tiers is not None and not 1 <= tiers <= most_tiers:
            raise UsageError(f"tiers is {tiers}; this engine was loaded for 1 to {most_tiers}")
        if reuse is not None and reuse < 0:
            raise UsageError(f"reuse is {reuse}; it must be 0 or more")
        first = next((i for i, order in enumerate(orders) if order.error is None), None)
        if self.contexts and first is not None and self.target.ranks.rank == 0:
            prompt = orders[first].prompt
            plan = self.contexts.plan(prompt, contexts or self._context, reusable(prompt))
            orders[first] = replace(orders[first], contexts=plan)
        limits = tiers or most_tiers, reuse, most, expected, in_slices
        return self.target.ranks.share(RunOrder(orders, alone, secrets.randbelow(2**31), *limits), patiently=True)

    def read(
        self, token_ids: Sequence[int] | Tensor, name: str, *, on_prefill: Callable[[float], None] | None = None
    ) -> Manifest:
        """Reads a text and saves its keys and values as the context `name`; what of it is saved already is not read.

        Raises:
            ContextError: another text has this name, or it cannot be written.
            UsageError, CapacityError: see `stream`.
        """
        if self.contexts is None:
            raise ContextError("this engine was not loaded from files, so its model has no saved contexts")
        prompt = checked_prompt(token_ids, self.target.config, 1)
        ranks = self.target.ranks
        if ranks.share(self.contexts.missing(name, prompt) if ranks.rank == 0 else 0, patiently=True):
            for _ in self.reading(prompt, name, on_prefill=on_prefill):
                pass
        return self.contexts.store.load(name)

    def reading(
        self,
        token_ids: Sequence[int] | Tensor,
        name: str,
        *,
        frame: Frame = NO_FRAME,
        on_memory: Callable[[float], None] | None = None,
        on_prefill: Callable[[float], None] | None = None,
        interrupted: Callable[[], bool] | None = None,
    ) -> Generation:
        """Prepares the run that reads a text and saves its keys and values as the context `name`.

        Args:
            frame: what of it is not the text, as a chat template has it.
            on_memory, on_prefill, interrupted: see `stream`.

        Raises:
            ContextError, UsageError, CapacityError: see `read`.
        """
        save = ContextRequest(save=name, frame=frame, required=True)
        calls: dict[str, Any] = {"on_memory": on_memory, "on_prefill": on_prefill, "interrupted": interrupted}
        return self.stream(token_ids, Sampling(0.0), 1, tiers=1, contexts=save, **calls)

    def held(self) -> Held:
        """Tensors on the compute device that last from one round to the next, each with its part of the plan: see
        `offload.held`. Some come twice."""
        for decoder in (self.target, self.draft):
            yield from decoder.held() if decoder else ()
        yield from self._kept.held()
        if self._running:
            yield from self._running.held()

    def start_threads(self) -> None:
        """Starts the threads that copy blocks of the KV cache beside computation, and read and write those on a disk.
        By itself an engine starts them when a cache first has such blocks."""
        self._kept.start_threads()

    def follow(self) -> Run | None:
        """Prepares what rank 0 starts next, for a rank that is told nothing of it; `None` after `finish`."""
        if self.target.ranks.rank == 0:
            raise RuntimeError("follow is for ranks above 0: rank 0 starts the runs")
        order = self.target.ranks.share(None, patiently=True)
        return None if order is None else self._run(order)

    def finish(self) -> None:
        """Tells ranks that `follow` that no further run comes; for rank 0."""
        self.target.ranks.share(None, patiently=True)

    def close(self) -> None:
        """Parts with the other ranks, if any; every rank calls it when no run is left. Captured passes are freed first,
        whoever holds a run, as NCCL waits for them."""
        self._graphs.clear()
        self.target.ranks.leave()

    @torch.inference_mode()
    def logits(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> Tensor:
        """What the target with its full cache says of an answer, read like a prompt; ends the run under way. Of several
        ranks each must call it, with the same tokens.

        Returns:
            `[len(answer_ids) + 1, vocab_size]`, float32: the logits that each token of the answer follows from, and
            those after the last.

        Raises:
            UsageError, CapacityError: see `stream`.
        """
        tokens = checked_prompt([*prompt_ids, *answer_ids], self.target.config, 1)
        self._end_run()
        self._kept.rotate_for(len(prompt_ids))
        self._kept.forget_all()
        full, _ = self._kept.prepare(tokens, self._models.request(len(tokens)))
        try:
            full.keep_mass(rows=0)
            rows = forward_in_parts(self.target, full, tokens, num_logits=len(answer_ids) + 1)
        except BaseException:
            self._kept.forget(tokens)
            raise
        self._kept.end(tokens)
        return rows

    def drawn_alone(self, prompt_ids: Sequence[int], answer_ids: Sequence[int], sampling: Sampling) -> list[int]:
        """What decoding token by token, with the full cache, draws at each position of an answer: one token at a time
        in a pass of its own, after the prompt and the answer so far. Of an exact engine's greedy or seeded answer, the
        answer itself. On several ranks each must call it, with the same tokens.

        Raises:
            UsageError: sampling without a seed; see `stream`.
            CapacityError: see `stream`.
        """
        if not sampling.greedy and sampling.seed is None:
            raise UsageError("tokens can be drawn again with a seed, or at temperature 0, only")
        drawn: list[int] = []
        run = self.stream(prompt_ids, sampling, max(1, len(answer_ids)), ignore_eos=True, tiers=1, reuse=0)
        try:
            for token in answer_ids:
                drawn += next(run).tokens
                run.replace_last(token)
        finally:
            run.close()
        return drawn

    def _end_run(self) -> None:
        """Ends what is under way, before something else begins."""
        if self._running:
            self._running.close()
            self._kept.end_all(broken=self._running.broken)
            self._running = None  # it holds the cache, whose memory may be wanted back
        self._graphs.clear()

    def _run(self, order: RunOrder, *given: Any) -> Run:
        self._end_run()
        setup = self._setup(order)
        return self._begin(Run(order, setup, self._graphs, *given, system=self.system), order)

    def _batch(
        self,
        order: RunOrder,
        interrupted: Callable[[], bool] | None,
        on_prefill: Callable[[int, float], None] | None,
        on_memory: Callable[[float], None] | None,
    ) -> Batch:
        self._end_run()
        given = interrupted, on_prefill, on_memory, self.system
        batch = Batch(order, self._setup(order), self._graphs, *given)
        self._begin(batch.run, order)
        return batch

    def _setup(self, order: RunOrder) -> SequenceSetup:
        """What opens the sequences of a run that begins."""
        self._graphs = Graphs(self._capture, self.target.ranks)
        expected = max(1, min(order.most, order.expected))
        return SequenceSetup(self._models, self._graphs, order.tiers, order.fresh_seed, expected)

    def _begin(self, run: Run, order: RunOrder) -> Run:
        self._running = run
        if order.alone:
            run.open_first()
        return run

    @property
    def _models(self) -> Models:
        loaded = self.target, self.draft, self.settings, self._names
        return Models(*loaded, self._kept, self.contexts, self.grammars, self.system, self._locks_embedding)

    def plan(self, context: int, answer: int | None = None) -> RunPlan:
        """The plan of a run over `context` tokens, prompt and answer, as this rank alone sees the memory that is free
        now. The run's own plan is agreed between ranks, and takes over the cache that is kept.

        Args: `answer` is how many of the tokens are generated, at most; `None`: any may be, which may take more room.
        """
        return self._kept.planned_alone(self._models.request(context, answer=answer))
