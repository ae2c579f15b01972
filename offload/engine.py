"""The engine: loads a target and a draft, plans the settings that were left open, and starts runs. It never prints."""

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
from ..tp.pages import HUGE_PAGE, available_memory, reserve_memory
from ..tp.parallel.place import Place
from ..tp.parallel.ranks import ALONE, Ranks
from ..tp.parallel.split import check_split
from ..tp.rope import rope_bytes
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
from .planning.memory import plan_here, shortage_explained
from .planning.request import RunRequest
from .planning.run_plan import LEFT_TO_OTHERS, RunPlan, make_plan
from .settings import MOST_SEQUENCES, Settings
from .speculation.grammar import Grammar, Grammars
from .speculation.sampling import Sampling
from .system import THIS_MACHINE, System
from .vocabulary import check_draft

_TABLES = 1 / 8
"""The maximum share of what `host_memory` leaves beside process and weights for RoPE's tables of all positions."""


class Engine:
    """A target model, optionally a draft model, and the caches that are kept between runs.

    If a prompt begins like an earlier one (a follow-up question about the same book), its run reuses the keys and
    values that are still there. There is one run at a time: starting another ends the one before.

    On several ranks, each rank has an engine. All ranks start the same runs, with the same methods or with `follow`.
    They draw the same random numbers for the same distributions. Prompt, lengths and outcome are those of rank 0.
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
        names: the names of target and draft in statistics.
        system: the machine, or a substitute for it in tests.

        Raises:
            ModelError: target and draft do not share a vocabulary.
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
        self._setup: SequenceSetup | None = None  # of the last run, with what it has measured
        self.contexts: ModelContexts | None = None
        """The saved contexts that runs may start from and save to; `None` if the engine was not loaded from files."""
        self._context = ContextRequest()
        self.grammars: Grammars | None = None
        """Compiles grammars for the model's tokens; `None` if the engine was not loaded from files."""

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
        """Loads a target and its draft.

        Args:
            model: the name of a preset, a directory, or a model of the hub (`owner/name`). A model of the hub is
                downloaded if it is not there.
            draft: a draft model, given like `model`. `None`: the draft of the preset, if `model` is a preset, else no
                draft. `"none"`: no draft, so two tiers. `"lookup"`: copies draft tokens from an earlier place in the
                text where the same tokens came before. `"D,lookup"`: the draft `D` and lookup. `"mtp"`: the target's
                own multi-token-prediction head.
            device: `auto` (CUDA if available), `cpu` or `cuda`.
            dtype: `auto` (the checkpoint's own), `float32`, `bfloat16` or `float16`.
            gpus: the number of ranks that share the model. More than 1 needs torchrun with as many processes. With 1
                under torchrun, the number is that of torchrun's processes.
            resident: GiB of the KV cache kept on each device. The rest streams from host memory. `None`: on a GPU as
                much as fits, on a CPU all that fits into host memory.
            link_gbps: on a CPU, the maximum bandwidth of the link to the streamed part, in gigabytes a second.
            capacity: the number of tokens of the run, prompt and answer, if known. Memory for them is then checked
                before weights load.
            room: further tokens for which a new cache gets room, if they fit. A longer run can then reuse the cache.
            context: the name of a saved context. Runs reuse its tokens as far as their prompts begin like it.
            store: the store of saved contexts; `None`: this user's.
            system: the machine, or a substitute for it in tests.
            tiers, budget and all others: see `Settings`. A budget or chunk size that is left open is the preset's, or
                is planned.

        Raises:
            UsageError, ModelError, CapacityError: the message has the value and the remedy.
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
        """Generates an answer to its end and returns it; for the arguments and errors, see `stream`."""
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
        """Prepares a run. Iterating over it does the work and yields one `Round` per round.

        Args:
            prompt_ids: token ids, a list or a 1-D tensor, at least one.
            sampling: default `Sampling()`.
            max_new_tokens: the maximum number of tokens to generate, at least 1.
            ignore_eos: whether to go on after an end-of-sequence token.
            tiers: the number of tiers in this run, at most that of the settings; `None`: that of the settings.
            reuse: the maximum number of leading tokens to take over from earlier runs. `None`: all that are the same.
                0: none, and the caches of earlier runs are freed first.
            on_memory: called while the host memory that blocks stream from is allocated, with the allocated share, 0
                to 1.
            on_prefill: called with the finished share of the prefill, 0 to 1.
            interrupted: called on rank 0 after each round, and about ten times a second in the prefill. `True` ends
                the run on all ranks. The next run can reuse the tokens that were read.
            contexts: what to do with saved contexts; default: start from the one that the engine was loaded with.
            grammar: the required form of the answer.

        Raises:
            ContextError: the requested context cannot be used.
            UsageError: the prompt is empty or has a token outside the vocabulary; `max_new_tokens` is below 1; `tiers`
                is not from 1 to that of the settings; `reuse` is below 0; no context can have the requested name; the
                grammar cannot be followed, or `ignore_eos` is set beside it.
            CapacityError: the model has too few positions, or there is too little memory.
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
        """Prepares several sequences that are decoded together. Iterating over the batch does the work and yields the
        index of a sequence with each of its rounds.

        A shared prefix of prompts is read and held once. If a request cannot be answered, only its sequence fails; see
        `Batch.sequences`.

        Args:
            requests: at least one; further ones can be added while the batch runs.
            max_sequences: the maximum number of sequences that are decoded together, 1 to 64; further ones wait. Higher
                numbers count as 64.
            expected: the number of sequences for which memory is planned at the start, if more than `requests` are to
                join.
            in_slices: whether the prompt of a joining sequence is read in slices between the rounds of the others. TBT
                then at most doubles, and a short prompt does not wait for the end of a long one. Otherwise the others
                wait, and the whole batch is done sooner.
            on_prefill: called with the index of a sequence and the finished share of its prefill, 0 to 1.
            tiers, interrupted: see `stream`.
            reuse, on_memory, contexts: see `stream`; for the first sequence that is not refused.

        Raises:
            ContextError: the requested context cannot be used.
            UsageError: there is no request; `tiers` is not from 1 to that of the settings; `reuse` or `max_sequences`
                is out of range; or no context can have the requested name.
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
        """Prepares a run that lasts as long as there are requests. Iterating over it does the work. If a request cannot
        be answered, only its sequence ends.

        Args:
            source: called between rounds, and with `in_slices` during a prefill, as long as another sequence may run.
                Returns the next request, or `None` if there is none at the moment. It is called with `True` if nothing
                else is left to do: it may wait then, and `None` ends the run. A request can start from a context that
                was saved during the run.
            max_sequences, expected, in_slices: see `batch`.
            tiers, interrupted, on_memory: see `stream`.
            on_prefill: called with a sequence and the finished share of its prefill, 0 to 1.

        Raises:
            UsageError: `tiers` is not from 1 to that of the settings, or `max_sequences` is below 1.
        """

        def more(waits: bool) -> BatchSequence | None:
            request = source(waits)
            if request is None:
                return None
            checked = replace(request, contexts=request.contexts or self._context)
            try:
                order = Order.or_error(checked, self.target.config, self.contexts)
            except Exception as error:  # the request is malformed
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
        """The order that all ranks follow: that of rank 0.

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
        """Reads a text and saves its keys and values as the context `name`. Tokens that are saved already are not read
        again.

        Returns:
            The manifest of the saved context.

        Raises:
            ContextError: the engine was not loaded from files; another text or another model has this name; the
                context's manifest is damaged; or the context cannot be written.
            UsageError: see `stream`; or no context can have this name.
            CapacityError: see `stream`.
        """
        contexts, ranks = self._contexts_of_files(), self.target.ranks
        prompt = checked_prompt(token_ids, self.target.config, 1)
        if ranks.share(contexts.missing(name, prompt) if ranks.rank == 0 else 0, patiently=True):
            for _ in self.reading(prompt, name, on_prefill=on_prefill):
                pass
        return contexts.store.load(name)

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
            frame: what surrounds the text, for example the beginning of a user's message in the chat template.
            on_memory, on_prefill, interrupted: see `stream`.

        Raises:
            ContextError, UsageError, CapacityError: see `read`.
        """
        self._contexts_of_files()
        save = ContextRequest(save=name, frame=frame, required=True)
        calls: dict[str, Any] = {"on_memory": on_memory, "on_prefill": on_prefill, "interrupted": interrupted}
        return self.stream(token_ids, Sampling(0.0), 1, tiers=1, contexts=save, **calls)

    def _contexts_of_files(self) -> ModelContexts:
        if self.contexts is None:
            raise ContextError("this engine was not loaded from files, so its model has no saved contexts")
        return self.contexts

    def held(self) -> Held:
        """The tensors on the compute device that last from one round to the next, each with its part of the plan; see
        `offload.held`. A tensor may come twice."""
        for decoder in (self.target, self.draft):
            yield from decoder.held() if decoder else ()
        yield from self._kept.held()
        if self._running:
            yield from self._running.held()

    def start_threads(self) -> None:
        """Starts the threads that copy blocks of the KV cache during computation, and the threads that read and write
        blocks on a disk. Without this call, an engine starts them when a cache first has blocks to copy."""
        self._kept.start_threads()

    def reserve_memory(self, beside: int = 0) -> int:
        """Takes the host memory of later caches from the system now, and keeps it as long as this process runs: what
        `host_memory` leaves beside this process and the weights. If less memory is available, it takes less, and leaves
        what a run takes beside its caches, what the caller will take, and a part for other programs.

        RoPE's tables are a part of this memory. They are computed now, unless they depend on the length of the prompt:
        for all positions if these tables take at most an eighth of what `host_memory` leaves, otherwise for as many
        positions as caches have room for. So caches and tables do not make this process grow later, and other programs
        cannot take their memory meanwhile. Does nothing on a GPU, without `host_memory`, or if nothing is left for
        caches. A collective call, before the first run, once per process.

        Args: `beside` is the number of bytes that the caller will take on each rank besides.

        Returns:
            The bytes that were taken on this rank, without the tables.

        Raises:
            CapacityError: the system refuses the memory.
        """
        limit, ranks = self.settings.host_memory, self.target.ranks
        if limit is None or self.target.device.type != "cpu":
            return 0
        request, config = self._models.request(1), self.target.config
        bare = make_plan(request)
        loaded = request.process_bytes + bare.weights + bare.embedding
        left = max(0, int(limit * 2**30) // ranks.local_size - loaded)
        most, rope = config.max_position_embeddings, rope_bytes(config, 1)
        longest = max(1, min(most, left // (request.token_bytes + rope)))
        plan = make_plan(replace(request, context=longest))
        # With the retrieval cache: a plan counts only the larger of a prefill and a round, and a round includes it.
        besides = plan.host_total - loaded - plan.rope - plan.resident_kv - plan.streamed_kv - plan.draft_kv
        positions = 0
        if not self.target.rope.depends_on_prompt:
            positions = (most if rope * most <= _TABLES * left else longest) + self.system.limits.largest_block
        tables = max(plan.rope, rope * positions)
        available = available_memory(ranks.local_size)
        available -= int(LEFT_TO_OTHERS * available) + besides + tables + beside
        # No rank takes memory before every rank has seen what is available.
        (available,) = ranks.least([available], patiently=True)
        size = min(left - tables, available) // HUGE_PAGE * HUGE_PAGE
        if size <= 0:
            return 0
        reserve_memory(size)
        with shortage_explained(self.target.device, self.system.device_memory):
            self.target.rope.reserve(positions)
        return size

    def follow(self) -> Run | None:
        """Prepares the run that rank 0 starts next; `None` after `finish`. For ranks above 0, which wait for rank 0.

        Raises:
            RuntimeError: this is rank 0.
            CapacityError, UsageError: a run of one sequence that cannot be answered. After a `CapacityError`, this can
                be called again for the next run.
        """
        if self.target.ranks.rank == 0:
            raise RuntimeError("follow is for ranks above 0: rank 0 starts the runs")
        order = self.target.ranks.share(None, patiently=True)
        return None if order is None else self._run(order)

    def finish(self) -> None:
        """Tells the ranks that call `follow` that no further run comes. For rank 0."""
        self.target.ranks.share(None, patiently=True)

    def close(self) -> None:
        """Leaves the group of ranks, if there are several. Every rank calls it when no run is left. Captured passes are
        freed first, even if the caller still holds a run: NCCL waits for them."""
        self._graphs.clear()
        self.target.ranks.leave()

    @torch.inference_mode()
    def logits(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> Tensor:
        """Computes the target's logits for an answer, in a prefill with the full cache. Ends a run in progress. On
        several ranks, each rank must call it, with the same tokens.

        Returns:
            `[len(answer_ids) + 1, vocab_size]`, float32: for each token of the answer the logits before it, then those
            after the last token.

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
        """Draws a token for each position of an answer, by decoding token by token with the full cache. Each token has
        its own pass, after the prompt and the answer up to that position. If an exact engine (see `Settings.exact`)
        wrote the answer with this `sampling`, the result is `answer_ids`. On several ranks, each rank must call it,
        with the same tokens.

        Raises:
            UsageError: `sampling` is not greedy and has no seed; else see `stream`.
            CapacityError: see `stream`.
        """
        if not sampling.greedy and sampling.seed is None:
            raise UsageError("tokens can be drawn again only with a seed or at temperature 0; set one of them")
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
        """Ends the run in progress, before something else begins."""
        if self._running:
            self._running.close()
            self._kept.end_all(broken=self._running.broken)
            self._running = None  # it holds the cache, whose memory may be needed
        self._graphs.clear()

    def _run(self, order: RunOrder, *given: Any) -> Run:
        self._end_run()
        setup = self._new_setup(order)
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
        batch = Batch(order, self._new_setup(order), self._graphs, *given)
        self._begin(batch.run, order)
        return batch

    def _new_setup(self, order: RunOrder) -> SequenceSetup:
        """Makes the setup that opens the sequences of a new run."""
        self._graphs = Graphs(self._capture, self.target.ranks)
        expected = max(1, min(order.most, order.expected))
        earlier = self._setup and self._setup.measured
        self._setup = SequenceSetup(self._models, self._graphs, order.tiers, order.fresh_seed, expected, earlier)
        return self._setup

    def _begin(self, run: Run, order: RunOrder) -> Run:
        self._running = run
        if order.alone:
            run.open_first()
        return run

    @property
    def reads_together(self) -> bool:
        """Whether several prompts can be computed in one pass."""
        return self._models.reads_together

    @property
    def _models(self) -> Models:
        loaded = self.target, self.draft, self.settings, self._names
        return Models(*loaded, self._kept, self.contexts, self.grammars, self.system, self._locks_embedding)

    def plan(self, context: int, answer: int | None = None) -> RunPlan:
        """The plan of a run over `context` tokens, prompt and answer, with the memory that is free on this rank. When
        the run begins, the ranks agree on its plan, and a kept cache may be reused.

        Args: `answer` is the maximum number of these tokens that are generated; `None`: any number, which may take more
            memory.
        """
        return self._kept.planned_alone(self._models.request(context, answer=answer))
