"""Questions about harbour logs: prompts of a wanted length, and what share of the answers is right.

The logs' seeds are below those that `train_pair.py` draws from, so none was trained on.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from triforce.cli.logbook import Fact, LogBook

from pair.data import ANSWER, EOS, TRAINING_LOGS

ANSWER_TOKENS = 22  # the longest answer has 18
ASKED_OF_A_LOG = 50
UNANSWERABLE = 0.2  # as many more questions as this share, about ships that are not in the log


@dataclass(frozen=True)
class Marked:
    """A log and questions with their answers, as training shows them: token ids, and where each answer stands."""

    ids: list[int]
    answers: list[slice]


@dataclass(frozen=True)
class Asked:
    """A prompt's token ids, the right answer, and how deep in the text it stands (0 to 1), or `None` for nowhere.

    `given` is the answer's beginning, which the question settles.
    """

    prompt: list[int]
    answer: str
    depth: float | None
    given: str = ""


def ask_logs(encode: Callable[[str], list[int]], context: int, count: int) -> list[Asked]:
    """`count` questions at places spread over logs that fill `context` tokens, and some that have no answer.

    Questions about one log follow one another; their prompts share all but the end.
    """
    asked: list[Asked] = []
    for index in range(-(-count // ASKED_OF_A_LOG)):
        seed = context + index
        assert seed < TRAINING_LOGS
        book, draw = LogBook(seed), random.Random(seed)
        ids = [0, *log_of_length(book, encode, context - 64)]
        facts, wanted = book.facts, min(ASKED_OF_A_LOG, count - index * ASKED_OF_A_LOG)
        chosen = [facts[int((i + draw.random()) * len(facts) / wanted)] for i in range(wanted)]
        for fact in chosen:
            depth = book.text.index(fact.sentence) / len(book.text)
            asked.append(Asked([*ids, *encode(question_of(fact))], fact.answer, depth, fact.given))
        for _ in range(round(UNANSWERABLE * wanted)):
            fact = book.unanswerable(draw)
            asked.append(Asked([*ids, *encode(question_of(fact))], fact.answer, None))
    return asked


def ask_uniformly(encode: Callable[[str], list[int]], seed: int, tokens: int, count: int) -> list[Asked]:
    """`count` questions drawn uniformly from what a log of `tokens` tokens tells."""
    book, draw = LogBook(seed), random.Random(seed)
    ids = [0, *log_of_length(book, encode, tokens)]
    return [
        Asked(
            [*ids, *encode(question_of(fact))], fact.answer, book.text.index(fact.sentence) / len(book.text), fact.given
        )
        for fact in draw.sample(book.facts, count)
    ]


def question_of(fact: Fact) -> str:
    """The text between a log and the answer."""
    return f"{fact.question}\n{ANSWER}"


def log_of_length(book: LogBook, encode: Callable[[str], list[int]], tokens: int) -> list[int]:
    """Whole days of a log, `tokens` of them or a few less; the book is left with those days."""
    ids: list[int] = []
    for day in book.days():
        more = encode(day.text + "\n\n")
        if len(ids) + len(more) > tokens:
            book.written.pop()
            return ids
        ids += more
    raise AssertionError("a log has no end")


def marked_logs(encode: Callable[[str], list[int]], logs: int, length: int) -> list[Marked]:
    """`logs` logs, each followed by different questions with right answers, `length` tokens or a few less.

    Where a model predicts every token of an answer here, it gives that answer when it decodes greedily.
    """
    marked = []
    for seed in range(logs):
        book, draw = LogBook(seed), random.Random(seed)
        ids, answers = [0, *log_of_length(book, encode, length * 2 // 3)], []
        facts = draw.sample(book.facts, len(book.facts))
        while facts:
            fact = book.unanswerable(draw) if draw.random() < UNANSWERABLE else facts.pop()
            asked, answer = encode(question_of(fact)), encode(f" {fact.answer}")
            if len(ids) + len(asked) + len(answer) + 2 > length:
                break
            ids += asked
            answers.append(slice(len(ids), len(ids) + len(answer) + 1))
            ids += [*answer, EOS, *encode("\n\n")]
        marked.append(Marked(ids, answers))
    return marked


def with_beginnings(asked: list[Asked], encode: Callable[[str], list[int]]) -> list[Asked]:
    """The questions that have an answer, each with the beginning of it in the prompt: what is left is to be found."""
    return [
        Asked([*ask.prompt, *encode(f" {ask.given}")], ask.answer[len(ask.given) :].strip(" ."), ask.depth)
        for ask in asked
        if ask.depth is not None
    ]


def is_right(text: str, answer: str) -> bool:
    """Whether a text begins with the answer, up to its full stop."""
    return " ".join(text.split()).startswith(answer)


def shares(asked: list[Asked], texts: list[str]) -> dict:
    """Share of right answers of all that have one, by quarter of the text, and of the others the share refused."""
    hits = [(ask.depth, is_right(text, ask.answer)) for ask, text in zip(asked, texts, strict=True)]
    told = [hit for depth, hit in hits if depth is not None]
    quarters = [[hit for depth, hit in hits if depth is not None and int(4 * depth) == q] for q in range(4)]
    refused = [hit for depth, hit in hits if depth is None]
    return {
        "right": round(sum(told) / len(told), 3),
        "questions": len(told),
        "by_quarter": [round(sum(quarter) / max(1, len(quarter)), 3) for quarter in quarters],
        "refused": round(sum(refused) / max(1, len(refused)), 3),
        "unanswerable": len(refused),
    }
