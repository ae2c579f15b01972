"""Agreement between ranks: once a round, all ranks get rank 0's decisions and compare its tokens with theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..tp.errors import TriforceError
from ..tp.parallel.ranks import Ranks
from .settings import MOST_BLOCK_LENGTH


@dataclass(frozen=True)
class RoundDecision:
    """The tokens of one sequence in a round, and the decisions about this sequence."""

    tokens: list[int]
    refresh: bool = False
    """Whether the retrieval cache is refreshed after this round."""
    ends: bool = False
    """Whether the sequence is to end with this round."""


def agree(
    ranks: Ranks,
    drawn: Sequence[RoundDecision],
    decisions: list[int],
    unwanted: Sequence[bool] = (),
    *,
    joining: int = 0,
    ends: bool = False,
) -> tuple[list[RoundDecision], list[int], list[bool], int, bool]:
    """Broadcasts rank 0's decisions of a round to all ranks. All ranks draw the same tokens from the same
    distributions, but each would choose lengths and refreshes by its own clock.

    Args:
        drawn: for each sequence of the round, the tokens that this rank drew and its own decision.
        decisions: those of this rank's tiers, see `DraftControl.decisions`.
        unwanted: for each waiting sequence, whether it is to end.
        joining: the number of sequences that are to join.
        ends: whether the whole batch is to end.

    Returns:
        The same values in this order, from rank 0.

    Raises:
        TriforceError: this rank drew other tokens than rank 0, so the caches no longer belong to one text.
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
                f"rank {ranks.rank} drew the tokens {one.tokens} where rank 0 drew {tokens}: the ranks compute "
                "differently, so further tokens would be wrong; use the same hardware and versions on all ranks"
            )
        decided.append(RoundDecision(one.tokens, bool(refresh), bool(ending)))
        at += 3 + count
    return decided, decided_of_tiers, [*map(bool, ended)], message[0], bool(message[1])
