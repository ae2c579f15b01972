"""Agreement between ranks: once a round, rank 0's decisions reach all ranks and its tokens are compared with theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..tp.errors import TriforceError
from ..tp.parallel.ranks import Ranks
from .settings import MOST_BLOCK_LENGTH


@dataclass(frozen=True)
class RoundDecision:
    """What a round brought a sequence, and what is decided about it."""

    tokens: list[int]
    refresh: bool = False
    """Whether its retrieval cache is refreshed now."""
    ends: bool = False
    """Whether it ends with this round, asked to."""


def agree(
    ranks: Ranks,
    drawn: Sequence[RoundDecision],
    decisions: list[int],
    unwanted: Sequence[bool] = (),
    *,
    joining: int = 0,
    ends: bool = False,
) -> tuple[list[RoundDecision], list[int], list[bool], int, bool]:
    """The broadcast of a round: what rank 0 has decided, for all ranks. All draw the same tokens from the same
    distributions, but each would choose lengths and refreshes by its own clock.

    Args:
        drawn: of each sequence of the round, as this rank has drawn and would decide.
        decisions: of this rank's tiers, see `DraftControl.decisions`.
        unwanted: of each sequence that waits, whether it is to end.
        joining: sequences that are to join.
        ends: whether the whole batch is to end.

    Returns:
        The same, of rank 0.

    Raises:
        TriforceError: this rank drew other tokens than rank 0, so the caches are no longer one model's.
    """
    numbers = [joining, int(ends), *decisions, *map(int, unwanted)]
    at = len(numbers)
    for one in drawn:
        numbers += [int(one.refresh), int(one.ends), len(one.tokens), *one.tokens]
    message = ranks.share_numbers(numbers, at + len(drawn) * (3 + MOST_BLOCK_LENGTH + 1))
    decided_of_tiers, ended = message[2 : 2 + len(decisions)], message[2 + len(decisions) : at]
    decided = []
    for one in drawn:
        refresh, ending, count = message[at : at + 3]
        tokens = message[at + 3 : at + 3 + count]
        if tokens != one.tokens:
            raise TriforceError(
                f"rank {ranks.rank} drew the tokens {one.tokens} where rank 0 drew {tokens}: the ranks "
                "compute differently (other hardware or versions?), so nothing further would be the model's"
            )
        decided.append(RoundDecision(one.tokens, bool(refresh), bool(ending)))
        at += 3 + count
    return decided, decided_of_tiers, [*map(bool, ended)], message[0], bool(message[1])
