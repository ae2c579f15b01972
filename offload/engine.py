"""The engine: loads a target and a draft, plans what was left to it, and starts runs. It never prints."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..tp.devices import device_name, resolve_device, resolve_dtype, to_device
from ..tp.errors import UsageError
from ..tp.model.config import ModelConfig
from ..tp.model.decoder import Cache, Decoder
from ..tp.parallel.place import Place
from ..tp.parallel.ranks import ALONE, Ranks
from ..tp.parallel.split import check_split
from ..tp.weights.registry import find_pair, published_settings
from .caches.kept import KeptCache, reusable
from .caches.refreshing import RefreshingCache
from .caches.retrieval import RetrievalCache
from .caches.streaming import StreamingCache
from .checks import checked_prompt, tokens_are_exact
from .contexts.home import user_store
from .contexts.manifest import ContextError, Manifest
from .contexts.model import ContextPlan, ContextRequest, ModelContexts
from .contexts.store import ContextStore
from .generation import Generation, Result
from .graphs.passes import Graphs, Passes, capture_for
from .planning.cost_model import PassTimes, hardware_of
from .planning.memory import plan_here
from .planning.request import RunRequest
from .planning.run_plan import RunPlan, make_plan
from .run_document import run_identity
from .settings import Settings
from .speculation.noise import CommonNoise, FreshNoise, Noise, key_of
from .speculation.refresh import RefreshPolicy
from .speculation.sampler import Sampler
from .speculation.sampling import Sampling
from .speculation.tiers import Tier
from .speculation.vocabulary import check_draft


@dataclass(frozen=True)
class _RunOrder:
    """What a run is asked for; all ranks do rank 0's."""

    prompt: list[int]
    sampling: Sampling
    fresh_seed: int
    """Starts the generator of a run without a seed."""
    max_new_tokens: int
    ignore_eos: bool
    tiers: int
    reuse: int | None
    contexts: ContextPlan


class Engine:
    """A target model, perhaps a draft model, and the caches they keep between runs.

    A run whose prompt begins like the one before it (a follow-up question about the same book) starts from the keys and
    values that are already there. One run at a time: starting another ends the one before.

    On several ranks every rank has an engine and starts the same runs, with the same methods or with `follow`. Each
    draws the same random numbers for the same distributions; rank 0's prompt, lengths and outcome are what counts.
    """

    def __init__(
        self, target: Decoder, draft: Decoder | None, settings: Settings, names: tuple[str, str | None] = ("", None)
    ) -> None:
        """Args: `names` of target and draft are what statistics call them.

        Raises:
            ModelError: the two do not share a vocabulary.
        """
        if draft is not None:
            check_draft(target.config, draft.config)
        self.target, self.draft, self.settings = target, draft, settings
        self._names = names
        self._kept = KeptCache(target, settings.link_gbps)
        self._padded = settings.exact == "on" or (settings.exact == "auto" and target.device.type == "cuda")
        self._exact = tokens_are_exact(target, settings.planned_chunk_size, self._padded)
        self._hardware = hardware_of(target.device, device_name(target.device), settings.link_gbps)
        self._capture = capture_for(target.device)
        self._graphs = Graphs()  # of the last run
        self._running: Generation | None = None
        self.contexts: ModelContexts | None = None
        """The saved contexts that runs may start from and save to; an engine that was loaded from files has them."""
        self._context = ContextRequest()

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
    ) -> Engine:
        """Loads a pair.

        Args:
            model: a preset's name, a directory, or a model of the hub (`owner/name`), downloaded if it is not there.
            draft: the same; `None` is the preset's own, if `model` is one, else none; `"none"` runs two tiers.
            device: `auto` (CUDA where there is one), `cpu` or `cuda`.
            dtype: `auto` (the checkpoint's own), `float32`, `bfloat16` or `float16`.
            gpus: ranks that share the model; more than 1 under torchrun, which then says how many there are.
            resident: GiB of the KV cache kept on each device, the rest streams from host memory; `None`: on a GPU as
                much as fits, on a CPU all.
            link_gbps: on a CPU, what the link to the streamed part may carry, in gigabytes a second.
            capacity: tokens the run will hold, prompt and answer, if known: memory is then checked before weights load.
            room: tokens that the cache kept between runs has room for beyond a run's, if they fit, for a longer one.
            context: the saved context that runs start from, as far as their prompts begin like it.
            store: where saved contexts are; `None`: those of this user.
            tiers, budget, chunk_size, draft_length, block_length, refresh, exact: see `Settings`; what is left open is
                as published for the preset, or planned.

        Raises:
            UsageError, ModelError, CapacityError: with the value and the remedy.
        """
        place = Place.among(gpus)
        settings = Settings(tiers, budget, chunk_size, draft_length, block_length, refresh, resident, exact, link_gbps)
        settings = settings.with_defaults(published_settings(model, place.size if place else 1))
        target_directory, draft_directory = find_pair(model, draft if settings.tiers == 3 else "none")
        target_config = ModelConfig.load(target_directory)
        draft_config = ModelConfig.load(draft_directory) if draft_directory else None
        if draft_config:
            check_draft(target_config, draft_config)
        if place:
            check_split(target_config, place.size)
        where = resolve_device(device, place.local_rank if place else 0)
        ranks = Ranks.join(place, where) if place else ALONE
        kind = resolve_dtype(dtype, target_config)
        request = RunRequest(target_config, draft_config, kind, capacity or 1, settings, ranks.size)
        plan_here(request, where, ranks).check()
        ranks.share(None)  # no rank loads before every rank has found that there is room
        target = Decoder.load(target_directory, dtype=kind, device=where, ranks=ranks)
        small = Decoder.load(draft_directory, dtype=kind, device=where) if draft_directory else None
        engine = cls(target, small, settings, (str(model), str(draft or model) if small else None))
        engine.contexts = ModelContexts(store or user_store(), target_directory, str(model), target)
        engine._context, engine._kept.room = ContextRequest(name=context), room
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
        contexts: ContextRequest | None = None,
    ) -> Generation:
        """Prepares a run; iterating over it does the work, one event a round.

        Args:
            prompt_ids: token ids, a list or a 1-D tensor, at least one.
            sampling: default `Sampling()`.
            max_new_tokens: at least 1.
            ignore_eos: go on after an end-of-sequence token.
            tiers: for this run fewer than the settings have; `None` is as many.
            reuse: leading tokens to take over from the run before at most; `None` is all that are the same, and 0 gives
                its memory back first.
            on_memory: called with the share of the host memory taken that blocks stream from, 0 to 1.
            on_prefill: called with the share of the prefill done, 0 to 1.
            contexts: what to do with saved contexts; default: start from the one that the engine was loaded with.

        Raises:
            ContextError: the context that is asked for cannot be used.
            UsageError: no token, one outside the vocabulary, an impossible length, more tiers than the settings have.
            CapacityError: more tokens than the model's positions or the memory hold.
        """
        sampling = sampling or Sampling()
        prompt = checked_prompt(prompt_ids, self.target.config, max_new_tokens)
        most = self.settings.tiers
        if tiers is not None and not 1 <= tiers <= most:
            raise UsageError(f"tiers is {tiers}; this engine was loaded for 1 to {most}")
        if reuse is not None and reuse < 0:
            raise UsageError(f"reuse is {reuse}; it must be 0 or more")
        fresh_seed = secrets.randbelow(2**31)
        plan = ContextPlan()
        if self.contexts and self.target.ranks.rank == 0:
            plan = self.contexts.plan(prompt, contexts or self._context, reusable(prompt))
        order = _RunOrder(prompt, sampling, fresh_seed, max_new_tokens, ignore_eos, tiers or most, reuse, plan)
        return self._start(self.target.ranks.share(order), on_prefill, on_memory)

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
        if ranks.share(self.contexts.missing(name, prompt) if ranks.rank == 0 else 0):
            save = ContextRequest(save=name, required=True)
            run = self.stream(prompt, Sampling(0.0), 1, tiers=1, on_prefill=on_prefill, contexts=save)
            for _ in run:
                pass
        return self.contexts.store.load(name)

    def follow(self) -> Generation | None:
        """Prepares the run that rank 0 starts next, for a rank that is told nothing of it; `None` after `finish`."""
        if self.target.ranks.rank == 0:
            raise RuntimeError("follow is for ranks above 0: rank 0 starts the runs")
        order = self.target.ranks.share(None)
        return None if order is None else self._start(order)

    def finish(self) -> None:
        """Tells ranks that `follow` that no further run comes; for rank 0."""
        self.target.ranks.share(None)

    def close(self) -> None:
        """Parts with the other ranks, if any; every rank calls it when no run is left. Captured passes are freed first,
        whoever holds a run, as NCCL waits for them."""
        self._graphs.clear()
        self.target.ranks.leave()

    @torch.inference_mode()
    def logits(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> Tensor:
        """What the target with its full cache says of an answer, computed in one pass; ends the run under way. Of
        several ranks each must call it, with the same tokens.

        Returns:
            `[len(answer_ids) + 1, vocab_size]`, float32: the logits that each token of the answer follows from, and
            those after the last.

        Raises:
            UsageError, CapacityError: see `stream`.
        """
        tokens = checked_prompt([*prompt_ids, *answer_ids], self.target.config, 1)
        self._end_run(len(prompt_ids))
        request = self._request(replace(self.settings, tiers=1), len(tokens))
        full, plan = self._kept.prepare(tokens, request, reuse=0)
        full.begin(mass_rows=plan.mass_rows)
        rows = self.target.forward(to_device(tokens, self.target.device), full, num_logits=len(answer_ids) + 1)
        self._kept.context = tokens
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

    def _end_run(self, prompt_length: int) -> None:
        """Ends the run under way, before one whose prompt has so many tokens."""
        if self._running:
            self._running.close()
            if self._running.broken:
                self._kept.distrust()
            self._running = None  # it holds the cache, whose memory may be wanted back
        self._graphs.clear()
        if self.target.rope.begin(prompt_length):
            self._kept.context = []  # what the cache holds was rotated otherwise

    def _start(
        self,
        order: _RunOrder,
        on_prefill: Callable[[float], None] | None = None,
        on_memory: Callable[[float], None] | None = None,
    ) -> Generation:
        prompt, sampling = order.prompt, order.sampling
        self._end_run(len(prompt))
        # Memory is planned for all of the engine's tiers, as a later run may want them on the same cache.
        request = self._request(self.settings, len(prompt) + order.max_new_tokens)
        full, plan = self._kept.prepare(prompt, request, order.reuse, on_memory)
        speculates = order.tiers > 1
        full.begin(mass_rows=plan.mass_rows if speculates else 0)
        retrieval = streaming = None
        graphs = self._graphs = Graphs(self._capture, self.target.ranks)
        adapts = sampling.seed is None or self._exact
        # Where lengths follow from these costs for good, they must not depend on what memory is free.
        lengths = plan if adapts else make_plan(request)
        costs = PassTimes(lengths, self._hardware).costs()

        def tier(name: str, decoder: Decoder, cache: Cache) -> Tier:
            passes = Passes(decoder, cache, graphs, padded=self._padded and name == "verify")
            return Tier(name, decoder, cache, passes, costs[name], self.target.config.vocab_size, adapts_to_time=adapts)

        if not speculates:
            tiers = [tier("verify", self.target, full)]
        else:
            retrieval = RetrievalCache(
                full,
                self.target.rope,
                budget=plan.budget,
                chunk_size=plan.chunk_size,
                join=self.target.mean_over_copies,
            )
            tiers = [tier("verify", self.target, RefreshingCache(full, retrieval))]
            tiers.append(tier("retrieval", self.target, retrieval))
            if self.draft and order.tiers == 3:
                streaming = StreamingCache(self.draft)
                tiers.append(tier("draft", self.draft, streaming))
        most = lengths.verify_draft, lengths.retrieval_draft
        for upper, lower, tokens in zip(tiers, tiers[1:], most, strict=False):
            upper.drafter, upper.longest = lower, tokens.most
            upper.fixed = tokens.fixed is not None
            upper.draft_tokens = tokens.fixed or upper.draft_tokens
        eos = () if order.ignore_eos else self.target.config.eos_token_ids
        sampler = Sampler(sampling, self._noise(sampling, order.fresh_seed), frozenset(eos))
        self._kept.context = prompt
        self._running = Generation(
            context=prompt,
            max_new_tokens=order.max_new_tokens,
            full=full,
            retrieval=retrieval,
            streaming=streaming,
            tiers=tiers,
            graphs=graphs,
            sampler=sampler,
            refresh=RefreshPolicy(self.settings.refresh),
            identity=run_identity(
                self.target,
                self._names,
                self.settings,
                sampling,
                tiers=len(tiers),
                seed=order.fresh_seed if sampling.seed is None else sampling.seed,
                budget=plan.budget if speculates else 0,
                exact=self._exact,
                resident_bytes=full.blocks.resident_bytes,
            ),
            on_prefill=on_prefill,
            saved=self.contexts.use(order.contexts) if self.contexts else None,
        )
        return self._running

    def _noise(self, sampling: Sampling, fresh_seed: int) -> Noise:
        """What a run draws with."""
        if sampling.greedy:
            return CommonNoise(None)
        if sampling.seed is not None:
            return CommonNoise(key_of(sampling.seed))
        return FreshNoise(torch.Generator(self.target.device).manual_seed(fresh_seed))

    def _request(self, settings: Settings, context: int) -> RunRequest:
        """A run over `context` tokens on this engine's models, without the memory it may take."""
        target, draft = self.target, self.draft.config if self.draft else None
        return RunRequest(target.config, draft, target.dtype, context, settings, target.ranks.size)

    def plan(self, context: int) -> RunPlan:
        """The plan of a run over `context` tokens, prompt and answer, as this rank alone sees the memory that is free
        now. The run's own plan is agreed between ranks, and takes over the cache that is kept."""
        return plan_here(self._request(self.settings, context), self.target.device, loaded=True)
