"""A harbour's log book, generated from a seed: a text about which answers to questions can be checked.

Ships come from a port with a cargo, lie at a berth, are mended, pay, and sail again days or weeks later. Between these
entries are the weather, the people of the harbour and the accounts. The text never repeats itself. Each fact that
questions are about is in one sentence, in which the words directly after the ship's name belong only to this fact. The
log of a seed is the same on every machine. This module does not use models or tokens; lengths are counted in words.
"""

from __future__ import annotations

import datetime
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from .words import (
    FACTS,
    FIRST_NAMES,
    GOODS,
    KINDS,
    LEAD_INS,
    MORE,
    NEEDS,
    PORTS,
    QUAYS,
    REMARKS,
    SHIPS,
    SURNAMES,
    TRADES,
    UNITS,
    WEATHER,
    WINDS,
    WORKS,
)

VISITS = (("origin", "berth", "captain", "cargo"), ("need", "mender", "dues"), ("goal", "load", "guests"))
"""The kinds of fact about a ship's arrival, repair and departure; an entry has some of those of its visit."""

UNKNOWN = "The {ship} is not in the log."
"""The answer to every question about a ship that the log does not name."""


@dataclass(frozen=True)
class Fact:
    """A fact about a ship.

    `sentence` is in the log word for word. `answer` is the part of it that answers `question`, as a sentence. It begins
    with `given`, the part that follows from the question; then comes the value.
    """

    ship: str
    question: str
    answer: str
    sentence: str
    given: str = ""


@dataclass(frozen=True)
class Day:
    """The entries of one day: a paragraph of text, and the facts in it, in their order."""

    text: str
    facts: tuple[Fact, ...]


@dataclass
class LogBook:
    """An endless log, generated day by day from `seed`. Questions are about the days that were `written` so far."""

    seed: int
    written: list[Day] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = rng = random.Random(f"log book {self.seed}")
        self._date = datetime.date(rng.randint(1801, 1880), rng.randint(1, 12), rng.randint(1, 28))
        self._names = rng.sample(SHIPS, len(SHIPS))
        self._absent = [self._names.pop() for _ in range(len(SHIPS) // 8)]
        self._people = [f"{rng.choice(FIRST_NAMES)} {rng.choice(SURNAMES)}" for _ in range(14)]
        self._forms = {name: rng.sample(forms, len(forms) - rng.randint(0, 1)) for name, forms in FACTS.items()}
        self._due: list[tuple[int, str, int]] = []
        self._remarks: list[str] = []
        self._busy = rng.uniform(0.45, 0.75)

    def days(self) -> Iterator[Day]:
        """Writes days, and yields each day. All days are kept in `written`."""
        while True:
            day = self._day()
            self.written.append(day)
            yield day

    def write(self, words: int) -> str:
        """The log from its first day up to the end of the day that brings it to `words` words or more."""
        have = sum(len(day.text.split()) for day in self.written)
        days = self.days()
        while have < words:
            have += len(next(days).text.split())
        return self.text

    @property
    def text(self) -> str:
        """The whole text so far: a paragraph for each day, with an empty line after it."""
        return "".join(day.text + "\n\n" for day in self.written)

    @property
    def facts(self) -> list[Fact]:
        """All facts that were written so far, in the order of the log."""
        return [fact for day in self.written for fact in day.facts]

    def unanswerable(self, rng: random.Random) -> Fact:
        """A question about a ship that this log never names, and the answer that says so."""
        ship = rng.choice(self._absent)
        form = rng.choice(rng.choice(list(FACTS.values())))
        question = form.question.format(ship=ship, unit=rng.choice(UNITS), good=rng.choice(GOODS))
        return Fact(ship, question, UNKNOWN.format(ship=ship), "")

    def _day(self) -> Day:
        rng, number = self._rng, len(self.written)
        parts = [f"{self._date.day} {self._date:%B %Y}. {self._fill(rng.choice(WEATHER))}"]
        facts: list[Fact] = []
        entries: list[tuple[str, int]] = []
        while self._due and self._due[0][0] <= number:
            _, ship, visit = self._due.pop(0)
            entries.append((ship, visit))
        while self._names and rng.random() < self._busy and len(entries) < 4:
            entries.append((self._names.pop(), 0))
        for ship, visit in entries:
            for fact, more in self._entry(ship, visit):
                facts.append(fact)
                parts += [fact.sentence, more] if more else [fact.sentence]
            if rng.random() < 0.35:
                parts.append(self._remark())
            if visit < 2:
                self._due = sorted([*self._due, (number + rng.randint(1, 30), ship, visit + 1)])
        parts += [self._remark() for _ in range(rng.randint(1, 3))]
        self._date += datetime.timedelta(days=1 if rng.random() < 0.8 else rng.randint(2, 4))
        return Day(" ".join(parts), tuple(facts))

    def _entry(self, ship: str, visit: int) -> list[tuple[Fact, str]]:
        """The facts about a ship on one visit, each with a further sentence or an empty text."""
        rng, entry = self._rng, []
        kinds = [kind for kind in VISITS[visit] if kind in ("origin", "goal") or rng.random() < 0.75]
        for index, kind in enumerate(kinds):
            form = rng.choice(self._forms[kind])
            values = self._values() | {"ship": ship}
            body = form.statement.format(**values)
            lead_in = f"The {rng.choice(KINDS)} " if index == 0 else rng.choice(LEAD_INS)
            given = f"The {ship}{form.statement.removeprefix('{ship}').partition('{')[0]}".rstrip()
            fact = Fact(ship, form.question.format(**values), f"The {body}.", f"{lead_in}{body}.", given)
            entry.append((fact, self._fill(rng.choice(MORE[kind])) if rng.random() < 0.4 else ""))
        return entry

    def _values(self) -> dict[str, object]:
        rng = self._rng
        return {
            "port": rng.choice(PORTS),
            "berth": rng.randint(2, 99),
            "first": rng.choice(FIRST_NAMES),
            "last": rng.choice(SURNAMES),
            "number": rng.randint(11, 989),
            "few": rng.randint(2, 60),
            "unit": rng.choice(UNITS),
            "good": rng.choice(GOODS),
            "need": rng.choice(NEEDS),
        }

    def _remark(self) -> str:
        if not self._remarks:  # each once before any is repeated
            self._remarks = self._rng.sample(REMARKS, len(REMARKS))
        return self._fill(self._remarks.pop())

    def _fill(self, template: str) -> str:
        rng = self._rng
        one, other = rng.sample(self._people, 2)
        stranger = f"{rng.choice(FIRST_NAMES)} {rng.choice(SURNAMES)}"
        filled = template.format(
            one=one,
            other=other,
            stranger=stranger,
            wind=rng.choice(WINDS),
            quay=rng.choice(QUAYS),
            trade=rng.choice(TRADES),
            work=rng.choice(WORKS),
            good=rng.choice(GOODS),
            port=rng.choice(PORTS),
            n=rng.randint(2, 30),
            sum=rng.randint(3, 400),
        )
        return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", filled)


def words_of_logs() -> list[str]:
    """The names and values that should be single words for a tokenizer, each as it is after a space."""
    phrases = [*SHIPS, *FIRST_NAMES, *SURNAMES, *PORTS, *GOODS, *UNITS, *KINDS]
    return sorted({word for phrase in phrases for word in phrase.split()})
