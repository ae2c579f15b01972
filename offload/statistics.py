"""What a run has measured so far: counts, times, and the figures that follow from them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .transfer.link import Traffic


@dataclass(frozen=True)
class Statistics:
    """Counts and times of one run so far. Seconds, bytes and tokens throughout.

    `draft_*` tokens are the small model's, tested by the retrieval tier; `retrieval_*` tokens are the retrieval tier's,
    tested by the full cache. Nothing after the first rejection of a pass is tested.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    """Leading prompt tokens whose keys and values were there: of an earlier run, of another sequence, or saved."""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "interrupted"
    """`length`, `eos`, or `interrupted` as long as neither happened."""
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    decode_s: float = 0.0
    rounds: int = 0
    plain_rounds: int = 0
    """Those for which nothing was drafted."""
    token_s: list[float] = field(default_factory=list)
    """Per token after the first, its share of its round's time."""
    draft_s: float = 0.0
    retrieval_s: float = 0.0
    verify_s: float = 0.0
    refresh_s: float = 0.0
    draft_proposed: int = 0
    draft_accepted: int = 0
    draft_tested: int = 0
    """Accepted and rejected ones."""
    retrieval_proposed: int = 0
    retrieval_accepted: int = 0
    retrieval_tested: int = 0
    """Accepted and rejected ones."""
    kv_read_bytes: int = 0
    """Keys and values that the full cache's attention read while decoding."""
    kv_read_s: float = 0.0
    """Seconds it took for that; 0 on a GPU, where it is not known."""
    link: Traffic = field(default_factory=Traffic)
    """What crossed the link while decoding; in totals of a run, with what its prompts took."""
    kv_bytes: int = 0
    host_peak_bytes: int = 0
    device_peak_bytes: int = 0

    def after_prefill(self, token: int, seconds: float, ttft_s: float) -> Statistics:
        """These statistics with a prefill of `seconds` and its first token added, `ttft_s` after the request."""
        return replace(self, token_ids=[*self.token_ids, token], prefill_s=seconds, ttft_s=ttft_s)

    def after_round(self, tokens: list[int], seconds: float, refresh_s: float, *, drafted: bool) -> Statistics:
        """These statistics with a round added that took `seconds`, of them `refresh_s` for the retrieval cache."""
        return replace(
            self,
            token_ids=[*self.token_ids, *tokens],
            rounds=self.rounds + 1,
            plain_rounds=self.plain_rounds + (not drafted),
            decode_s=self.decode_s + seconds,
            refresh_s=self.refresh_s + refresh_s,
            token_s=[*self.token_s, *[seconds / len(tokens)] * len(tokens)],
        )

    @property
    def draft_acceptance(self) -> float | None:
        """Accepted ÷ tested tokens of the small model; `None` where none was tested."""
        return ratio(self.draft_accepted, self.draft_tested)

    @property
    def retrieval_acceptance(self) -> float | None:
        """Accepted ÷ tested tokens of the retrieval tier; `None` where none was tested."""
        return ratio(self.retrieval_accepted, self.retrieval_tested)

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


def ratio(part: int, whole: int) -> float | None:
    """`part` ÷ `whole`, or `None` where `whole` is 0."""
    return part / whole if whole else None
