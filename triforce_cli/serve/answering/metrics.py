"""The metrics for Prometheus (`GET /metrics`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from ....offload import Round
from ....offload.statistics import Statistics
from ....offload.transfer.link import Traffic

_TTFT_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TBT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class Metrics:
    """The metrics of one server. Any thread may add to them."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self.requests = self._make(Counter, "requests", "Requests by endpoint and status", ("endpoint", "status"))
        self.unread = self._make(Counter, "unread", "Connections closed because the client did not read the answer")
        self._prompt = self._make(
            Counter, "prompt_tokens", "Tokens of prompts and of uploaded texts, counted after their prefill"
        )
        self._cached = self._make(
            Counter, "cached_tokens", "Tokens of prompts and of uploaded texts that needed no prefill"
        )
        self._saved = self._make(Counter, "uploaded_tokens", "Of prompt_tokens, those of uploaded texts")
        self._new = self._make(Counter, "generated_tokens", "Tokens of answers")
        self._drafted = self._make(Counter, "draft_tokens", "Draft tokens given to passes over the full cache")
        self._accepted = self._make(Counter, "draft_tokens_accepted", "Draft tokens that were accepted")
        self._link = [
            self._make(Counter, name, f"{what}; of rank 0 if there are several ranks")
            for name, what in (
                ("link_bytes", "Bytes of KV cache that streamed to the device"),
                ("link_stored_bytes", "Bytes of KV cache that went to host memory"),
                ("link_busy_seconds", "Time in which something streamed to the device"),
                ("link_waited_seconds", "Time in which computation waited for streamed bytes"),
            )
        ]
        self._traffic = Traffic()
        self._kv = self._make(
            Gauge,
            "kv_cache_bytes",
            "Memory of the KV cache of answers, of texts during their prefill, and of kept caches; with the buffers "
            "through which blocks stream",
        )
        self._ttft = self._make(
            Histogram, "time_to_first_token_seconds", "From a request to its first token, waiting included", (), _TTFT_S
        )
        self._tbt = self._make(
            Histogram,
            "time_between_tokens_seconds",
            "Time of a round divided by the tokens of an answer in it",
            (),
            _TBT_S,
        )
        gauge = self._make(Gauge, "device_memory_bytes", "GPU memory that PyTorch has allocated; 0 without a GPU")
        gauge.set_function(lambda: torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0)

    def watch(self, name: str, help: str, value: Callable[[], float]) -> None:
        """Adds a gauge. `value` is called when the gauge is read."""
        self._make(Gauge, name, help).set_function(value)

    def add_prompt(self, statistics: Statistics) -> None:
        """Adds a request whose prefill is done."""
        self._prompt.inc(statistics.prompt_tokens)
        self._cached.inc(statistics.reused_tokens)

    def add_text(self, statistics: Statistics) -> None:
        """Adds an uploaded text that is read and saved."""
        self.add_prompt(statistics)
        self._saved.inc(statistics.prompt_tokens)

    def add_first_token(self, seconds: float) -> None:
        """Adds an answer that began `seconds` after its request."""
        self._ttft.observe(seconds)
        self._new.inc()

    def add_round(self, event: Round) -> None:
        """Adds a round of an answer, except its first."""
        self._new.inc(len(event.tokens))
        self._drafted.inc(event.proposed)
        self._accepted.inc(event.accepted)
        for _ in event.tokens:
            self._tbt.observe(event.seconds / len(event.tokens))

    def update(self, traffic: Traffic, kv_bytes: int) -> None:
        """Sets totals.

        Args:
            traffic: the total traffic over the link so far.
            kv_bytes: the bytes that KV caches take at present.
        """
        new, self._traffic = traffic.since(self._traffic), traffic
        for counter, value in zip(self._link, (new.bytes_in, new.bytes_out, new.busy_s, new.waited_s), strict=True):
            counter.inc(max(0, value))
        self._kv.set(kv_bytes)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _make(
        self, kind: Any, name: str, help: str, labels: tuple[str, ...] = (), buckets: tuple[float, ...] | None = None
    ) -> Any:
        more = {"buckets": buckets} if buckets else {}
        return kind(name, help, labels, namespace="triforce", registry=self._registry, **more)
