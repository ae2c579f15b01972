"""What words are to the planted circuit of `pair/circuit.py`: how it tells places of a text apart by the tokens before
them, and where new words begin.

A place is known by the subject (the last ship named) and by a note of the three tokens before it. Thirteen dimensions
hold three of 5,440 words, so random codes collide too often; the codes and the matrices that make notes of them are
fitted here, on questions about logs, so that among all places with the right subject the one that answers wins, and so
that nothing in prose agrees enough to be taken for a match.
"""

import json
import random
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from triforce.cli.logbook import Fact, LogBook

from pair.data import ANSWER, TRAINING_LOGS, encode

NOTED = 3  # tokens before a place that are noted
SCALE_NOISE = 0.15  # of each token's norm, which the layers' norms do not leave quite alike
SHARPNESS = 10.0  # logits of a match of 1
MOST_IN_PROSE = 1.6  # what words alone may reach where no subject agrees


@dataclass
class WordNotes:
    """Codes [vocab, size] of words, and what notes are made of them.

    The note of place i is `one @ c[i-1] + two @ c[i-2] + three @ one @ c[i-3]`, c being codes; the query of place i is
    `own @ c[i] + past @ note[i]`, to be like the note of the place whose token comes next.
    """

    codes: Tensor
    one: Tensor
    two: Tensor
    three: Tensor
    own: Tensor
    past: Tensor

    def notes(self, before: Tensor) -> Tensor:
        """Notes [..., size] of places whose tokens one, two and three back have the codes `before` [..., 3, size]."""
        back = before[..., 2, :] @ (self.three @ self.one).T
        return before[..., 0, :] @ self.one.T + before[..., 1, :] @ self.two.T + back

    def queries(self, here: Tensor, before: Tensor) -> Tensor:
        """Queries [..., size] of places with the codes `here` [..., size]."""
        return here @ self.own.T + self.notes(before) @ self.past.T


def spread_codes(count: int, size: int, steps: int = 60) -> Tensor:
    """Unit vectors [count, size] that keep away from one another."""
    codes = torch.randn(count, size, requires_grad=True)
    adam = torch.optim.Adam([codes], lr=0.04)
    for _ in range(steps):
        unit = codes / codes.norm(dim=1, keepdim=True)
        some = torch.randperm(count)[:256]
        alike = unit[some] @ unit.T
        alike[torch.arange(len(some)), some] = -1.0
        torch.logsumexp(16 * alike, dim=1).mean().backward()
        adam.step()
        adam.zero_grad()
    return (codes / codes.norm(dim=1, keepdim=True)).detach()


def fit_words(tokenizer: Tokenizer, prose: Tensor, codes: Tensor, steps: int = 600, seed: int = 1) -> WordNotes:
    """Fits everything from unit codes [vocab, size]; `prose` [n] is what must not match itself by chance."""
    size = codes.shape[1]
    torch.manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(size, size)).Q
    found = WordNotes(codes.clone(), turn, 0.8 * turn @ turn, 0.7 * turn @ turn, turn.clone(), turn.clone())
    parameters = [value.requires_grad_() for value in vars(found).values()]
    adam = torch.optim.Adam(parameters, lr=0.02)
    cases = [case for log in range(24) for case in _cases(tokenizer, seed, log)]
    draw = random.Random(seed)
    for step in range(steps):
        for group in adam.param_groups:
            group["lr"] = 0.02 * (1 - step / steps)
        some = draw.sample(cases, 24)
        loss = torch.stack([_case_loss(found, *case) for case in some]).mean() + _chance_loss(found, prose, draw)
        loss.backward()
        adam.step()
        adam.zero_grad()
        with torch.no_grad():
            found.codes /= found.codes.norm(dim=1, keepdim=True).clamp(min=1.0)
    return WordNotes(*(value.detach() for value in vars(found).values()))


def _cases(tokenizer: Tokenizer, seed: int, log: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For some questions: places with the ship as subject, places in the answer, and which of the first are right.

    A place is a row of tokens [here, one, two and three back]; right is [answer places, log places].
    """
    book, draw, cases = LogBook(TRAINING_LOGS + 5000 * seed + log), random.Random(log), []
    book.write(6_000)
    was = tokenizer.token_to_id("\u0120was")
    ships: dict[str, list[Fact]] = {}
    for fact in book.facts:
        ships.setdefault(fact.ship, []).append(fact)
    for facts in draw.sample(list(ships.values()), 12):
        told, owners = [], []
        for index, fact in enumerate(facts):
            ids = encode(tokenizer, f" {fact.sentence} {draw.choice(book.written).text.split('. ')[-1]}").tolist()
            told += ids
            owners += [index] * len(ids)
        log_rows = _rows(told)
        for index, fact in enumerate(facts):
            ids = encode(tokenizer, f"{fact.question}\n{ANSWER} {fact.answer}").tolist()
            start = len(ids) - len(encode(tokenizer, f" {fact.answer}"))
            # From the verb on: what follows a name is for the question to say, and so is what follows "was".
            rows, nexts = _rows(ids)[start + 2 : -1], torch.tensor(ids[start + 3 :])
            rows, nexts = rows[rows[:, 0] != was], nexts[rows[:, 0] != was]
            right = (log_rows[None, :, 0] == nexts[:, None]) & (torch.tensor(owners) == index)
            places = torch.cat((log_rows, _rows(ids)[: start + 1]))
            right = torch.cat((right, right.new_zeros(len(rows), start + 1)), dim=1)
            if right.any(1).all():
                cases.append((places, rows, right))
    return cases


def _rows(ids: list[int]) -> Tensor:
    """[n, 4]: each token and the three before it, zero where there is none."""
    padded = np.array([0] * NOTED + ids)
    return torch.from_numpy(np.stack([padded[NOTED - back : len(padded) - back] for back in range(NOTED + 1)], 1))


def _uneven(codes: Tensor) -> Tensor:
    return codes * torch.exp(SCALE_NOISE * torch.randn(*codes.shape[:-1], 1))


def _case_loss(found: WordNotes, log_rows: Tensor, rows: Tensor, right: Tensor) -> Tensor:
    """Cross-entropy of looking at a right place."""
    keys = _uneven(found.notes(_uneven(found.codes[log_rows[:, 1:]])))
    asked = found.codes[rows]
    queries = _uneven(found.queries(_uneven(asked[:, 0]), _uneven(asked[:, 1:])))
    logits = SHARPNESS * queries @ keys.T
    return (logits.logsumexp(1) - logits.masked_fill(~right, -torch.inf).logsumexp(1)).mean()


def _chance_loss(found: WordNotes, prose: Tensor, draw: random.Random) -> Tensor:
    """How far matches inside a span of prose, also true ones, go above what words alone may reach."""
    start = draw.randrange(len(prose) - 260)
    rows = _rows(prose[start : start + 256].tolist())
    codes = found.codes[rows]
    match = found.queries(codes[:, 0], codes[:, 1:]) @ found.notes(codes[:, 1:]).T
    return 20 * (match - MOST_IN_PROSE).clamp(min=0).square().mean()


def parts_of_words(tokenizer: Tokenizer, known: int) -> list[list[int]]:
    """For each word of `tokenizer` from the id `known` on, the words before that id which stood in its place."""
    raw = json.loads(tokenizer.to_str())
    words = sorted(raw["model"]["vocab"], key=raw["model"]["vocab"].get)
    raw["model"] |= {"vocab": {word: index for index, word in enumerate(words[:known])}, "ignore_merges": False}
    before = Tokenizer.from_str(json.dumps(raw))
    parts = []
    for index, word in enumerate(words[known:], known):
        text = tokenizer.decode([index]).lstrip()  # decoding may drop the space in front
        parts.append(before.encode(f" {text}" if word.startswith("\u0120") else text, add_special_tokens=False).ids)
    return parts


@torch.no_grad()
def with_new_words(known: Tensor, parts: list[list[int]], usual: Tensor) -> Tensor:
    """Embeddings [known + new, width]: each new word lies between its parts, and is rarely predicted.

    `usual` [width] is the mean hidden state; a new word's logit there is that of the rarest hundredth of the known.
    """
    usual = usual / usual.norm()
    rare, size = (known @ usual).quantile(0.01), known.norm(dim=1).mean()
    rows = torch.stack([known[ids].mean(0) + 0.1 * known[ids[0]] for ids in parts])
    rows *= size / rows.norm(dim=1, keepdim=True)
    return torch.cat((known, rows + (rare - rows @ usual)[:, None] * usual))
