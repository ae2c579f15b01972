"""What a round does for the retrieval caches of its sequences: as little as possible while nothing is drafted."""

from __future__ import annotations

from collections.abc import Sequence

from ..rank_agreement import Drawn
from ..speculation.switch import Upkeep
from ..speculation.tiers import Tier
from ..system import System
from .sequence import BatchSequence


def begin_round(top: Tier, sequences: Sequence[BatchSequence]) -> None:
    """Has the next pass of the full caches keep the attention that chunks are chosen by, or not."""
    for sequence in sequences:
        caches = sequence.opened
        caches.full.begin(caches.mass_rows if top.upkeep >= Upkeep.REBUILD else 0)


def end_round(
    top: Tier,
    done: Upkeep,
    sequences: Sequence[BatchSequence],
    drawn: Sequence[Drawn],
    began: float,
    system: System,
) -> float:
    """Brings the retrieval caches up to what was verified, with their chunks chosen anew or not.

    Args:
        done: the upkeep that was decided on before the round.
        began: when the round began, by the clock of `system`.

    Returns:
        The seconds it took.
    """
    if done is Upkeep.NONE or sequences[0].opened.retrieval is None:
        top.after_round = 0.0
        return 0.0
    now, refreshed = system.clock(), []
    for sequence, one in zip(sequences, drawn, strict=True):
        retrieval = sequence.opened.retrieval
        assert retrieval is not None
        if done is Upkeep.REBUILD:
            retrieval.refresh(at_once=True)
        elif one.refresh:
            retrieval.refresh()
            refreshed.append(sequence.opened.refresh)
        else:
            retrieval.update_tail()
    if refreshed and top.adapts_to_time and refreshed[0].mode == "auto":
        system.synchronize(sequences[0].opened.full.blocks.device)  # its cost decides when the next one comes
    seconds = system.clock() - now
    for policy in refreshed:
        policy.done(seconds if top.adapts_to_time else 0.0, now - began)
    top.after_round = seconds
    return seconds
