"""The built-in text, for runs that are given none: a harbour's log, and questions whose answers stand in it."""

from __future__ import annotations

import random

from ..logbook import Day, LogBook
from .questions import WantedAnswer

QUESTIONS = 3


def opening(text: str, seed: int) -> list[WantedAnswer]:
    """Questions drawn uniformly from what the log of `seed` tells within `text`, which are its first days, each with
    the entry that answers it; and last the log's continuation.
    """
    book = LogBook(seed)
    days = book.days()
    told: list[tuple[Day, str, str]] = []
    while len(book.text) < len(text):
        day = next(days)
        told += [(day, fact.question, fact.sentence) for fact in day.facts]
    if book.text != text:  # the last day is not there as a whole
        told = [one for one in told if one[0] is not book.written[-1]]
    drawn = random.Random(f"opening {seed}").sample(told, min(QUESTIONS, len(told)))
    asked = [
        WantedAnswer(question, 0, 1, f"{day.text.partition('.')[0]}: {entry}", text.index(entry) / len(text))
        for day, question, entry in drawn
    ]
    return [*asked, WantedAnswer(None, 0, 1)]
