"""The parts of the embedded pair's recipe that need no training: samples, the shape's RoPE, questions about logs."""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from triforce.cli.logbook import LogBook
from triforce.tp.model.rope_scaling import RopeConfig
from triforce.tp.weights.registry import PRESETS
from triforce.tp.weights.tokenizer import Tokenizer as Loaded

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples" / "train"))

from pair import circuit, questions  # noqa: E402
from pair import data as pair_data  # noqa: E402
from pair.model import FIRST, TARGET, Block, Decoder, Losses, Shape  # noqa: E402
from pair.optim import orthogonalised  # noqa: E402
from pair.output import export  # noqa: E402
from pair.words import WordNotes  # noqa: E402

PROSE = "It was a dull day, and nobody in the house had anything to say about it that was worth the breath. " * 40


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return pair_data.with_words_of_logs(pair_data.train_tokenizer([PROSE, LogBook(1).write(3_000)]))


@pytest.fixture(scope="module")
def encode(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    return lambda text: pair_data.encode(tokenizer, text).tolist()


def test_words_of_logs_are_tokens_and_prose_keeps_its_own(tokenizer: Tokenizer) -> None:
    before = pair_data.train_tokenizer([PROSE, LogBook(1).write(3_000)])
    known = before.get_vocab()
    assert {word: index for word, index in tokenizer.get_vocab().items() if word in known} == known
    assert tokenizer.encode("The Stormgull", add_special_tokens=False).tokens[-1] == "\u0120Stormgull"
    assert tokenizer.decode(tokenizer.encode(PROSE).ids) == PROSE


@pytest.mark.parametrize("length", [256, 1024])
def test_a_log_sample_answers_its_questions_from_its_own_text(tokenizer: Tokenizer, length: int) -> None:
    sampler = pair_data.Sampler([PROSE], tokenizer, seed=1)
    batch = sampler.batch((0, 0), 3, length, pair_data.Mix(0.0, 0.0, 0.0, 1.0), 0.0, 0.0)
    assert batch.ids.shape == (3, length)
    for row in batch.ids:
        text = tokenizer.decode(row.tolist(), skip_special_tokens=False)
        answers = [(match.start(), match[1]) for match in re.finditer(r"Answer: The ([^<]*)\.</s>", text)]
        assert answers
        for place, answer in answers:
            assert answer in text[:place] or answer.endswith("is not in the log")


def test_facts_in_prose_are_asked_for_as_the_chat_template_asks(tokenizer: Tokenizer) -> None:
    sampler = pair_data.Sampler([PROSE * 4], tokenizer, seed=1)
    batch = sampler.batch((0, 0), 8, 1024, pair_data.Mix(0.0, 0.0, 1.0), 0.0, 0.0)
    asked = 0
    for row in batch.ids:
        text = tokenizer.decode(row.tolist(), skip_special_tokens=False)
        for match in re.finditer(r"\n\nWhat is the pass key\?\nAnswer: (The pass key is \d{5}\.)</s>\n\n", text):
            asked += match[1] in text[: match.start()]
    assert asked > 2


def test_samples_depend_on_their_key_alone(tokenizer: Tokenizer) -> None:
    mix = pair_data.Mix(0.0, 0.2, 0.3, 0.4)
    first, again = (
        pair_data.Sampler([PROSE], tokenizer, seed=1).batch((1, 5), 4, 300, mix, 0.3, 0.3) for _ in range(2)
    )
    for one, other in zip(vars(first).values(), vars(again).values(), strict=True):
        assert np.array_equal(one, other)


def test_questions_are_spread_over_a_log_and_fit_the_context(encode: Callable[[str], list[int]]) -> None:
    asked = questions.ask_logs(encode, 3_000, 20)
    told = [ask for ask in asked if ask.depth is not None]
    assert (len(told), len(asked)) == (20, 24)
    assert max(len(ask.prompt) for ask in asked) + questions.ANSWER_TOKENS <= 3_000
    assert [int(4 * ask.depth) for ask in told if ask.depth is not None].count(0) in range(3, 8)
    result = questions.shares(asked, [f" {ask.answer} And more." for ask in asked])
    assert result["right"] == result["refused"] == 1.0
    assert questions.shares(asked, ["The"] * len(asked))["right"] == 0.0
    begun = questions.with_beginnings(asked, encode)
    assert [f"{ask.given} {rest.answer}." for ask, rest in zip(told, begun, strict=True)] == [
        ask.answer for ask in told
    ]


def test_questions_drawn_uniformly_differ_by_seed(encode: Callable[[str], list[int]]) -> None:
    one, again, other = (questions.ask_uniformly(encode, seed, 2_000, 3) for seed in (4, 4, 5))
    assert one == again and [ask.answer for ask in one] != [ask.answer for ask in other]
    assert max(len(ask.prompt) for ask in one) < 2_060


def test_answers_in_a_training_text_are_marked_with_their_end(tokenizer: Tokenizer, encode) -> None:
    marked = questions.marked_logs(encode, 3, 1_000)
    assert len({tuple(one.ids) for one in marked}) == 3
    for one in marked:
        assert 900 < len(one.ids) <= 1_000 and len(one.answers) > 5
        told = [tokenizer.decode(one.ids[span], skip_special_tokens=False) for span in one.answers]
        assert all(re.fullmatch(r" The .+\.</s>", answer) for answer in told)
        assert 1 <= sum("is not in the log" in answer for answer in told) < len(told)


def test_a_chat_is_what_training_shows(tokenizer: Tokenizer, encode, tmp_path: Path) -> None:
    export(Decoder(replace(TARGET, layers=1)), tokenizer, tmp_path)
    loaded = Loaded.load(tmp_path)
    book = LogBook(3)
    log = tokenizer.decode(questions.log_of_length(book, encode, 500))
    one, other = book.facts[:2]
    said = [("user", log + one.question), ("assistant", f" {one.answer}"), ("user", other.question)]
    messages = [{"role": role, "content": content} for role, content in said]
    assert loaded.render is not None
    expected = f"{log}{questions.question_of(one)} {one.answer}</s>\n\n{questions.question_of(other)}"
    assert loaded.encode(loaded.render(messages), False) == [0, *encode(expected)]


@pytest.mark.parametrize("shape", [FIRST, TARGET])
def test_rope_is_what_the_config_says(shape: Shape) -> None:
    config = RopeConfig.from_raw(shape.config(), shape.max_positions)
    expected = config.inverse_frequencies(shape.head_dim, torch.tensor([0]))
    torch.testing.assert_close(shape.inverse_frequencies, expected)
    assert Shape.of(shape.config()) == shape


def blocks(model: Decoder) -> list[Block]:
    return [cast(Block, layer) for layer in model.layers]


def gradient(weight: torch.Tensor) -> torch.Tensor:
    assert weight.grad is not None
    return weight.grad


def small_model() -> Decoder:
    """A decoder whose attention matters, in which the heads 1 of all layers write nothing."""
    torch.manual_seed(0)
    model = Decoder(replace(FIRST, width=64, heads=3, head_dim=16, mlp=96, vocab=50))
    with torch.no_grad():
        model.embed_tokens.weight.mul_(10)
        for layer in blocks(model):
            layer.self_attn.o_proj.weight.normal_(std=0.3)
            layer.self_attn.o_proj.weight[:, 16:32] = 0.0
    return model


@torch.no_grad()
def test_the_head_that_adds_nothing_becomes_the_last_and_gives_way() -> None:
    model, text, positions = small_model(), torch.randint(50, (32, 1)), torch.arange(40).expand(32, -1)
    while text.shape[1] < 40:  # its own, which it thinks likelier than any other model does
        chances = model.logits(model(text, positions[:, : text.shape[1]]))[:, -1].softmax(-1)
        text = torch.cat((text, torch.multinomial(chances, 1)), dim=1)
    before = model.logits(model(text, positions))
    circuit.order_heads(model, text)
    for layer in blocks(model):
        assert not layer.self_attn.o_proj.weight[:, 32:].any() and layer.self_attn.o_proj.weight[:, 16:32].any()
    torch.testing.assert_close(model.logits(model(text, positions)), before)

    grown = Decoder(replace(model.shape, vocab=60))
    circuit.widen(grown, model, [[3, 4]] * 10, text)
    torch.testing.assert_close(grown.logits(grown(text, positions))[..., :50], before)
    assert not any(layer.self_attn.q_proj.weight[32:].any() for layer in blocks(grown))


@torch.no_grad()
def test_what_is_planted_gets_its_size_again() -> None:
    """Codes and flags enter every layer with the size 1, however much larger the rest has become."""
    old = small_model().shape
    model = Decoder(replace(old, width=128, vocab=51))
    circuit.widen(model, small_model(), [[1]], torch.randint(50, (2, 40)))
    at, text = circuit.Places(old.width), torch.randint(1, 50, (4, 64))
    embedding = model.embed_tokens.weight
    embedding[1:, at.flag("one")] = embedding[0, at.flag("first")] = unit = 0.1
    written: list[float] = []
    for growth in (1.0, 3.0):
        embedding[:, : old.width] *= growth
        circuit.retune(model, old, text)
        sizes: list[torch.Tensor] = []
        model(text, torch.arange(64).expand(4, -1), None, sizes)
        for layer, size in zip(blocks(model), sizes, strict=True):
            entering = layer.input_layernorm.weight[at.flag("one")] * unit / size.exp().mean()
            assert entering == pytest.approx(1.0, rel=0.02)
        written.append(model.norm.weight[at.code][0].item())
    assert written[1] > 1.02 * written[0]  # what leaves the last layer has grown beside the codes


def test_what_is_planted_is_held_also_against_uneven_sizes() -> None:
    model, old = small_model(), replace(FIRST, width=40)
    circuit.hold(model, old)
    ids = torch.randint(50, (2, 33))
    sizes: list[torch.Tensor] = []
    hidden = model(ids[:, :-1], torch.arange(32).expand(2, -1), None, sizes)
    uneven = torch.stack([size.var() for size in sizes]).sum()
    Losses().predict(model, hidden, ids[:, 1:], torch.ones(2, 32), uneven)
    embedding, layer = gradient(model.embed_tokens.weight), blocks(model)[1]
    assert embedding[:, :40].any() and not embedding[:, 40:].any()
    written, looked = gradient(layer.mlp.down_proj.weight), gradient(layer.self_attn.q_proj.weight)
    assert written[:40].any() and not written[40:].any()
    assert looked[:32].any() and not looked[32:].any()
    assert not gradient(model.norm.weight)[40:].any()

    alone = small_model()
    hidden = alone(ids[:, :-1], torch.arange(32).expand(2, -1))
    Losses().predict(alone, hidden, ids[:, 1:], torch.ones(2, 32))
    assert not torch.allclose(gradient(alone.embed_tokens.weight)[:, :40], embedding[:, :40])


def test_a_draft_is_taught_to_agree_where_that_is_wanted() -> None:
    torch.manual_seed(0)
    draft, teacher = small_model(), small_model()
    hidden, wanted = torch.randn(2, 8, 64), torch.randn(2, 8, 64)

    def distribution(model: Decoder, states: torch.Tensor) -> torch.Tensor:
        return (states @ model.embed_tokens.weight.T).softmax(-1).detach()

    p, q = distribution(teacher, wanted), distribution(draft, hidden)
    weights = torch.ones(2, 8)
    for agreement, expected in ((0.0, -(p * q.log()).sum(-1)), (1.0, -torch.minimum(p, q).sum(-1).log())):
        leaf = hidden.clone().requires_grad_()
        loss = Losses().imitate(draft, leaf * 1.0, teacher, wanted, weights, agreement)
        assert loss == pytest.approx(expected.mean().item(), rel=1e-4)
        stepped = distribution(draft, hidden - 0.5 * gradient(leaf))
        assert torch.minimum(p, stepped).sum() > torch.minimum(p, q).sum()


def test_the_pair_can_be_split_and_grown() -> None:
    assert PRESETS["embedded"].directories()[0] is not None
    assert TARGET.heads == FIRST.heads == 4 and TARGET.width > FIRST.width and TARGET.layers == FIRST.layers


@pytest.mark.parametrize("rows, columns", [(24, 60), (60, 24)])
def test_orthogonalised_has_singular_values_near_one(rows: int, columns: int) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalised(torch.randn(rows, columns)))
    assert values.min() > 0.5 and values.max() < 1.3


def test_a_query_is_like_the_note_of_the_next_place() -> None:
    torch.manual_seed(0)
    turn = torch.linalg.qr(torch.randn(8, 8)).Q
    codes = torch.nn.functional.normalize(torch.randn(30, 8), dim=1)
    notes = WordNotes(codes, turn, turn @ turn, turn @ turn, turn, turn)
    text = codes[torch.randint(30, (6,))]
    query = notes.queries(text[3], text[[2, 1, 0]])
    note = notes.notes(text[[3, 2, 1]])
    beyond = text[0] @ torch.linalg.matrix_power(turn, 4).T  # what the query knows of one token more
    torch.testing.assert_close(query, note + beyond)
