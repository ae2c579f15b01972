"""Statistics of a run: counts, times, and the figures that follow from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .transfer.link import Traffic


@dataclass(frozen=True)
class Statistics:
    """Counts and times of one run so far. All values are in seconds, bytes or tokens.

    `draft_*` tokens are drafted by the small model or by lookup, and tested by the retrieval tier. `retrieval_*` tokens
    are drafted by the retrieval tier and tested by the full cache. Nothing after the first rejection of a pass is
    tested.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    """Leading prompt tokens whose keys and values were not computed: they came from an earlier run, from another
    sequence, or from a saved context."""
    token_ids: list[int] = field(default_factory=list)
    """The tokens of the answer."""
    finish_reason: str = "interrupted"
    """`length`, `eos`, or `interrupted` as long as neither happened."""
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    """Seconds to the first token: from the request; in a run of one sequence that no others may join, from the start of
    its prefill."""
    decode_s: float = 0.0
    rounds: int = 0
    """Rounds after the prefill."""
    plain_rounds: int = 0
    """Rounds without draft tokens."""
    token_s: list[float] = field(default_factory=list)
    """For each token after the first, its share of its round's time."""
    draft_s: float = 0.0
    """Seconds in passes of the draft tier."""
    retrieval_s: float = 0.0
    """Seconds in passes over the retrieval cache."""
    verify_s: float = 0.0
    """Seconds in passes over the full cache."""
    refresh_s: float = 0.0
    """Seconds of refreshing the retrieval cache."""
    draft_proposed: int = 0
    draft_accepted: int = 0
    draft_tested: int = 0
    """Accepted and rejected tokens."""
    retrieval_proposed: int = 0
    retrieval_accepted: int = 0
    retrieval_tested: int = 0
    """Accepted and rejected tokens."""
    kv_read_bytes: int = 0
    """Bytes of keys and values that attention over the full cache read while decoding."""
    kv_read_s: float = 0.0
    """Seconds of this attention; 0 on a GPU, where they are not known."""
    link: Traffic = field(default_factory=Traffic)
    """The traffic over the link and the disk while decoding; in the totals of a run, during prefills too."""
    kv_bytes: int = 0
    """Bytes of keys and values, on all ranks."""
    host_peak_bytes: int = 0
    """The peak of host memory of this process."""
    device_peak_bytes: int = 0
    """The peak of memory on this rank's compute device."""

    def after_prefill(self, token: int, seconds: float, ttft_s: float) -> Statistics:
        """These statistics, with a prefill of `seconds` and its first token, `ttft_s` seconds after the request."""
        return self.changed(token_ids=[*self.token_ids, token], prefill_s=seconds, ttft_s=ttft_s)

    def after_round(self, tokens: list[int], seconds: float, refresh_s: float, *, drafted: bool) -> Statistics:
        """These statistics with a further round. It took `seconds`, including `refresh_s` for the retrieval cache."""
        return self.changed(
            token_ids=[*self.token_ids, *tokens],
            rounds=self.rounds + 1,
            plain_rounds=self.plain_rounds + (not drafted),
            decode_s=self.decode_s + seconds,
            refresh_s=self.refresh_s + refresh_s,
            token_s=[*self.token_s, *[seconds / len(tokens)] * len(tokens)],
        )

    def changed(self, **values: Any) -> Statistics:
        """These statistics with other values. Like `dataclasses.replace`, in a sixth of its time: each sequence needs
        it twice in each round."""
        made = object.__new__(Statistics)
        vars(made).update(vars(self), **values)
        return made

    @property
    def draft_acceptance(self) -> float | None:
        """Accepted ÷ tested `draft_*` tokens; `None` if none was tested."""
        return ratio(self.draft_accepted, self.draft_tested)

    @property
    def retrieval_acceptance(self) -> float | None:
        """Accepted ÷ tested tokens of the retrieval tier; `None` if none was tested."""
        return ratio(self.retrieval_accepted, self.retrieval_tested)

    @property
    def other_s(self) -> float:
        """Seconds of decoding outside passes and refreshes."""
        return max(0.0, self.decode_s - self.draft_s - self.retrieval_s - self.verify_s - self.refresh_s)

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first ÷ seconds of decoding; 0 before there are any."""
        return len(self.token_s) / self.decode_s if self.decode_s else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Tokens after the first ÷ rounds; 0 before the first round."""
        return len(self.token_s) / self.rounds if self.rounds else 0.0

    @property
    def tbt_s(self) -> float:
        """Mean time between tokens; 0 before there are two."""
        return self.decode_s / len(self.token_s) if self.token_s else 0.0

    def tbt_percentile(self, percent: float) -> float:
        """The nearest-rank percentile of `token_s` in seconds; 0 before there are two tokens."""
        if not self.token_s:
            return 0.0
        ordered = sorted(self.token_s)
        rank = -(-percent * len(ordered) // 100)
        return ordered[max(0, int(rank) - 1)]


def ratio(part: int, whole: int) -> float | None:
    """`part` ÷ `whole`, or `None` where `whole` is 0."""
    return part / whole if whole else None
