"""Agreement between ranks: once a round, rank 0's decisions reach all ranks and its tokens are compared with theirs."""

from __future__ import annotations

from ..tp.errors import TriforceError
from ..tp.parallel.ranks import Ranks
from .settings import MOST_BLOCK_LENGTH


class RankAgreement:
    """The one broadcast of a round.

    All ranks draw the same tokens from the same distributions, but each would choose lengths and refreshes by its own
    clock.
    """

    def __init__(self, ranks: Ranks, num_tiers: int) -> None:
        self._ranks = ranks
        self._room = 2 + num_tiers + MOST_BLOCK_LENGTH + 1
        """Numbers of the largest message: whether to refresh and to end, the draft tokens of each tier, a round's
        tokens."""

    def agree(
        self, tokens: list[int], refresh: bool, draft_tokens: list[int], *, ends: bool = False
    ) -> tuple[bool, list[int], bool]:
        """What rank 0 has decided, for all ranks.

        Args:
            tokens: that this rank drew in the round.
            refresh: whether this rank would refresh the retrieval cache now.
            draft_tokens: the number of them that each of this rank's tiers would ask for next.
            ends: whether the run is to end with this round.

        Returns:
            `refresh`, `draft_tokens` and `ends` of rank 0.

        Raises:
            TriforceError: this rank drew other tokens than rank 0, so the caches are no longer one model's.
        """
        message = self._ranks.share_numbers([int(refresh), int(ends), *draft_tokens, *tokens], self._room)
        first = 2 + len(draft_tokens)
        if message[first:] != tokens:
            raise TriforceError(
                f"rank {self._ranks.rank} drew the tokens {tokens} where rank 0 drew {message[first:]}: the ranks "
                "compute differently (other hardware or versions?), so nothing further would be the model's"
            )
        return bool(message[0]), message[2:first], bool(message[1])
