"""How a prompt is made of a text and a question, how it is cut, and how tokens become text."""

import shutil

import pytest
from command import CONTEXT, TEXT
from transformers import AutoTokenizer
from triforce.cli.generate.question_list import WantedAnswer, log_questions, wanted_answers
from triforce.cli.session.prompt import Prompt, build_prompt, build_prompts, cut, long_prompt
from triforce.cli.session.source import Source, cut_log, read_source
from triforce.tp.errors import TriforceError
from triforce.tp.model.config import ModelConfig
from triforce.tp.weights.tokenizer import TextStream, Tokenizer


def test_truncation_drops_the_part_it_names():
    tokens = list(range(10))
    assert cut(tokens, 4, "head") == [6, 7, 8, 9]
    assert cut(tokens, 4, "tail") == [0, 1, 2, 3]
    assert cut(tokens, 5, "middle") == [0, 1, 2, 8, 9]
    assert cut(tokens, 1, "middle") == [0]
    assert cut(tokens, 10, "middle") == tokens


@pytest.mark.parametrize("part", ["head", "tail", "middle"])
def test_the_question_is_never_cut(pair, part):
    tokenizer, config = Tokenizer.load(pair[0]), ModelConfig.load(pair[0])
    prompt = build_prompt(Source(TEXT * 20, "a book"), "Who was it?", tokenizer, config, 24, part)
    assert len(prompt.token_ids) == CONTEXT - 24
    assert tokenizer.decode(prompt.token_ids).endswith("\n\nQuestion: Who was it?\nAnswer:")


def test_the_question_goes_through_the_chat_template(pair, tmp_path):
    template = "{% for m in messages %}<s>[{{ m.role }}] {{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %} >>{% endif %}"
    shutil.copytree(pair[0], tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text(template)
    tokenizer, config = Tokenizer.load(tmp_path / "chat"), ModelConfig.load(pair[0])
    prompt = build_prompt(Source("Long ago.", ""), "When?", tokenizer, config, 8, "error")
    oracle = AutoTokenizer.from_pretrained(tmp_path / "chat")
    message = {"role": "user", "content": "Long ago.\n\nWhen?"}
    assert prompt.token_ids == oracle.apply_chat_template([message], add_generation_prompt=True)["input_ids"]
    long = build_prompt(Source(TEXT * 20, ""), "When?", tokenizer, config, 8, "tail")
    assert len(long.token_ids) == CONTEXT - 8
    assert tokenizer.decode(long.token_ids).startswith("[user] It was")
    assert tokenizer.decode(long.token_ids).endswith("\n\nWhen? >>")


def test_streamed_text_is_the_text_of_all_tokens_and_never_half_a_character(pair):
    tokenizer = Tokenizer.load(pair[0])
    ids = tokenizer.encode(TEXT, True)
    for size in (1, 2, 3, 7):
        stream = TextStream(tokenizer.decode)
        pieces = [stream.push(ids[i : i + size]) for i in range(0, len(ids), size)]
        assert not any("�" in piece for piece in pieces)
        assert "".join(pieces) + stream.flush() == TEXT == stream.text


def test_streamed_text_is_exact_for_tokens_that_make_no_sense(pair):
    tokenizer = Tokenizer.load(pair[0])
    for seed in range(20):
        ids = [(seed * 7919 + i * i * 31 + i * 17) % 320 for i in range(200)]
        stream = TextStream(tokenizer.decode)
        for token in ids:
            stream.push([token])
        stream.flush()
        assert stream.text == tokenizer.decode(ids)


def test_built_in_prompt_fits_any_model_and_ends_with_a_day(pair):
    tokenizer, config = Tokenizer.load(pair[0]), ModelConfig.load(pair[0])
    source = read_source(None, None, print)
    for wanted in (100, 700):
        prompt = build_prompt(source, None, tokenizer, config, wanted, "error")
        assert 0 < len(prompt.token_ids) <= CONTEXT - wanted
        text = tokenizer.decode(prompt.token_ids)
        assert text.endswith("\n\n") and source.text.startswith(text)


def test_built_in_log_has_questions_whose_answers_stand_in_it(pair):
    tokenizer = Tokenizer.load(pair[0])
    source = read_source(None, None, print)
    for seed in range(3):
        source = cut_log(read_source(None, None, print, log_seed=seed), tokenizer, 2_500)
        *asked, last = log_questions(source.text, seed)
        assert len(asked) == 3 and last == WantedAnswer(None, 0, 1)
        for one in asked:
            assert one.entry is not None
            date, _, entry = one.entry.partition(": ")
            day = next(day for day in source.text.split("\n\n") if entry in day)
            assert day.startswith(f"{date}. ") and source.text.index(entry) / len(source.text) == one.depth
        assert log_questions(source.text, seed) == [*asked, last]
    assert [one.question for one in log_questions(source.text[:60], 2)] == [None]


def test_mark_and_line_ends_of_other_systems_are_read_as_text(tmp_path):
    path = tmp_path / "dos.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    notes = []
    assert read_source(path, None, notes.append).text == "one\ntwo\n"
    assert len(notes) == 1


def test_a_short_text_is_repeated_to_a_million_tokens_at_once(pair):
    tokenizer = Tokenizer(encode=lambda text, special: [0] * special + [1, 2, 3], decode=str)
    prompt = long_prompt(Source("some", "--prompt"), tokenizer, ModelConfig.load(pair[0]), 2**20)
    assert prompt.token_ids == ([0] + [1, 2, 3] * 2**19)[: 2**20] and prompt.text_tokens == 4
    assert long_prompt(Source("some", "--prompt"), tokenizer, ModelConfig.load(pair[0]), 2).token_ids == [0, 1]


def test_the_most_answers_are_counted_with_those_to_each_question(tmp_path):
    (tmp_path / "asks.txt").write_text("a\n\nb\nc\n")
    with pytest.raises(TriforceError, match=r"line 3: more than 1,024 .*512 to each"):
        wanted_answers(["x"], tmp_path / "asks.txt", 512)
    found = wanted_answers([], tmp_path / "asks.txt", 300)
    assert len(found) == 900 and [one.question for one in found[298:302]] == ["a", "a", "b", "b"]


def test_all_questions_are_about_the_same_part_of_a_text_that_is_cut(pair):
    tokenizer, config = Tokenizer.load(pair[0]), ModelConfig.load(pair[0])
    questions = ["Why?", "And how was all of it, in the end, when nobody asked?", "Why?", "why " * 700]
    for part in ("head", "tail", "middle"):
        built = build_prompts(Source(TEXT * 20, "a book"), questions, tokenizer, config, 24, part)
        short, long, same, failed = built
        assert isinstance(short, Prompt) and isinstance(long, Prompt) and isinstance(failed, TriforceError)
        assert short == same and short.dropped == long.dropped > 0
        assert short.text_tokens and short.token_ids[: short.text_tokens] == long.token_ids[: short.text_tokens]
        assert len(long.token_ids) == 1024 - 24 > len(short.token_ids)
