"""The log book: the same for a seed everywhere, every template filled, and every answer standing in its entry."""

import random
import re

import pytest
from triforce.cli.logbook import UNKNOWN, LogBook, words_of_logs
from triforce.cli.logbook.words import FACTS, FIRST_NAMES, GOODS, PORTS, REMARKS, SHIPS, SURNAMES, WEATHER

WORDS = 12_000


@pytest.fixture(scope="module")
def log() -> LogBook:
    book = LogBook(7)
    book.write(WORDS)
    return book


def test_a_seed_gives_one_log(log: LogBook) -> None:
    again, other = LogBook(7), LogBook(8)
    assert again.write(WORDS) == log.text
    assert again.facts == log.facts
    assert other.write(WORDS) != log.text


def test_writing_on_continues_the_same_log(log: LogBook) -> None:
    book = LogBook(7)
    start = book.write(1_000)
    assert log.text.startswith(start)
    assert book.write(WORDS) == log.text
    assert book.write(1_000) == log.text, "a log that is long enough is left as it is"


def test_a_log_of_a_hundred_thousand_words_never_repeats_a_day() -> None:
    book = LogBook(3)
    paragraphs = book.write(100_000).strip().split("\n\n")
    assert len(set(paragraphs)) == len(paragraphs) == len(book.written)
    assert len({fact.ship for fact in book.facts}) > 500


def test_each_answer_is_quoted_from_one_sentence_of_the_log(log: LogBook) -> None:
    for fact in log.facts:
        assert log.text.count(fact.sentence) >= 1
        said = fact.answer.removeprefix("The ").removesuffix(".")
        assert said in fact.sentence
        assert fact.answer.startswith(f"{fact.given} ")
        assert said.startswith(fact.ship) and fact.ship in fact.question


def test_a_question_has_one_answer(log: LogBook) -> None:
    answers: dict[str, str] = {}
    for fact in log.facts:
        assert answers.setdefault(fact.question, fact.answer) == fact.answer


def test_facts_come_in_the_order_of_the_text(log: LogBook) -> None:
    at = 0
    for fact in log.facts:
        at = log.text.index(fact.sentence, at)


def test_the_words_after_a_name_belong_to_one_kind_of_fact() -> None:
    beginnings = [form.statement.split("{", 2)[1:] for forms in FACTS.values() for form in forms]
    relations = [parts[0].removeprefix("ship} ") for parts in beginnings]
    assert len(set(relations)) == len(relations)


def test_an_unknown_ship_is_nowhere_in_the_log(log: LogBook) -> None:
    rng = random.Random(1)
    long = LogBook(7)
    text = long.write(60_000)
    for _ in range(100):
        question = log.unanswerable(rng)
        assert question.ship in question.question
        assert question.ship not in text
        assert question.answer == UNKNOWN.format(ship=question.ship)


def test_sentences_are_filled_and_end(log: LogBook) -> None:
    assert not re.search(r"[{}]|  |\.\.| [.,;]", log.text)
    for day in log.written:
        assert re.match(r"\d{1,2} [A-Z][a-z]+ 18\d\d\. [A-Z]", day.text)
        assert day.text.endswith(".")
        assert not re.search(r"\b[Aa] [aeiou]|\b[Aa]n [^aeiou]", day.text)
        # After a full stop comes a capital or a number.
        assert not re.search(r"\. [a-z]", day.text)


def test_lists_have_no_word_twice() -> None:
    for words in (SHIPS, FIRST_NAMES, SURNAMES, PORTS, GOODS, WEATHER, REMARKS):
        assert len(set(words)) == len(words)
    assert len(SHIPS) >= 1_000
    assert not set(FIRST_NAMES) & set(SURNAMES)


def test_words_for_a_tokenizer_cover_the_names(log: LogBook) -> None:
    words = set(words_of_logs())
    assert {fact.ship for fact in log.facts} <= words
    assert all(" " not in word for word in words)
