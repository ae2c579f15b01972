"""What a run measured, as it goes and as the JSON that scripts rely on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .transfer.link import Traffic


@dataclass(frozen=True)
class Statistics:
    """Counts and times of one run so far. Seconds, bytes and tokens throughout."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    """Leading prompt tokens whose keys and values were still there from the run before."""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "interrupted"
    """`length`, `eos`, or `interrupted` as long as neither happened."""
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    decode_s: float = 0.0
    rounds: int = 0
    token_s: list[float] = field(default_factory=list)
    """Per token after the first, its share of its round's time."""
    draft_s: float = 0.0
    retrieval_s: float = 0.0
    verify_s: float = 0.0
    refresh_s: float = 0.0
    draft_proposed: int = 0
    draft_accepted: int = 0
    draft_tested: int = 0
    """Those accepted, and those at which a pass stopped accepting."""
    retrieval_proposed: int = 0
    retrieval_accepted: int = 0
    retrieval_tested: int = 0
    kv_read_bytes: int = 0
    """Keys and values that the full cache's attention read while decoding."""
    kv_read_s: float = 0.0
    """Seconds it took for that; 0 on a GPU, where it is not known."""
    link: Traffic = field(default_factory=Traffic)
    """What crossed the link while decoding."""
    kv_bytes: int = 0
    host_peak_bytes: int = 0
    device_peak_bytes: int = 0

    @property
    def other_s(self) -> float:
        return max(0.0, self.decode_s - self.draft_s - self.retrieval_s - self.verify_s - self.refresh_s)

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first per second of decoding; 0 before there are any."""
        return len(self.token_s) / self.decode_s if self.decode_s else 0.0

    @property
    def tokens_per_round(self) -> float:
        return len(self.token_s) / self.rounds if self.rounds else 0.0

    @property
    def tbt_s(self) -> float:
        """Mean time between tokens; 0 before there are two."""
        return self.decode_s / len(self.token_s) if self.token_s else 0.0

    def tbt_percentile(self, percent: float) -> float:
        """The nearest-rank percentile of `token_s`; 0 before there are two tokens."""
        if not self.token_s:
            return 0.0
        ordered = sorted(self.token_s)
        rank = -(-percent * len(ordered) // 100)
        return ordered[max(0, int(rank) - 1)]

    def as_dict(self) -> dict[str, Any]:
        """The measured part of a run's JSON (docs/json.md); who ran what is added by `Generation.stats`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "new_tokens": len(self.token_ids),
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "prefill_s": self.prefill_s,
            "ttft_s": self.ttft_s,
            "decode_s": self.decode_s,
            "tbt_ms": {
                "mean": self.tbt_s * 1e3,
                "p50": self.tbt_percentile(50) * 1e3,
                "p95": self.tbt_percentile(95) * 1e3,
                "p99": self.tbt_percentile(99) * 1e3,
            },
            "tokens_per_s": self.tokens_per_s,
            "rounds": self.rounds,
            "acceptance": {
                "draft": ratio(self.draft_accepted, self.draft_proposed),
                "retrieval": ratio(self.retrieval_accepted, self.retrieval_proposed),
                "draft_per_token": ratio(self.draft_accepted, self.draft_tested),
                "retrieval_per_token": ratio(self.retrieval_accepted, self.retrieval_tested),
                "tokens_per_round": self.tokens_per_round,
            },
            "time_s": {
                "draft": self.draft_s,
                "retrieval": self.retrieval_s,
                "verify": self.verify_s,
                "refresh": self.refresh_s,
                "other": self.other_s,
            },
            "link": {
                "bytes_streamed": self.link.bytes_in,
                "bytes_written_back": self.link.bytes_out,
                "busy_s": self.link.busy_s,
                "waited_s": self.link.waited_s,
                "gb_per_s": self.link.bytes_in / self.link.busy_s / 1e9 if self.link.busy_s else None,
            },
            "kv_read": {
                "bytes": self.kv_read_bytes,
                "s": self.kv_read_s,
                "gb_per_s": self.kv_read_bytes / self.kv_read_s / 1e9 if self.kv_read_s else None,
            },
            "memory": {
                "device_peak_bytes": self.device_peak_bytes,
                "host_peak_bytes": self.host_peak_bytes,
                "kv_bytes": self.kv_bytes,
            },
        }


def ratio(accepted: int, proposed: int) -> float | None:
    """Accepted ÷ proposed, or `None` where nothing was proposed."""
    return accepted / proposed if proposed else None
