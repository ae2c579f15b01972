"""Grows a trained decoder by a circuit that finds what a text said before, by what and whom it is about.

The grown decoder has more width and words, and the least needed head of each layer gives way to a planted one; what the
others computed, they still compute (but for RoPE pairs that stand still now). The added width holds, for every token, a
code of itself and a note of its past:

* layer 0 notes the token one back, layer 1 those two and three back, layer 2 the last name (of a ship), the subject;
* layer 3 looks for the place whose note is what the current token and its note will be one token on, in dimensions
  that RoPE leaves still, and writes the code of what stands there where the output reads codes; where nothing agrees
  well enough it looks at the first token, whose code is nothing;
* layer 4 marks whether the log tells anything about the subject at all;
* layer 5 names the subject again where an answer begins.

Left to gradient descent, matching the subject and three tokens at once did not emerge on a CPU; and where training
owned the planted weights too, it had them noisy within fifteen steps. So they are held, and the rest learns around
them: it reads what the circuit notes and finds, and writes nothing into the added width. As the rest grows while it is
trained, norms shrink the added width beside it; `retune` undoes that.
"""

import math
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from triforce.cli.logbook.words import SHIPS

from pair.data import ANSWER
from pair.model import Attention, Block, Decoder, Shape, rotary
from pair.words import WordNotes, fit_words, parts_of_words, spread_codes, with_new_words

SUBJECT, WORD = 16, 13  # dimensions of a code: of a ship's name, and of a word as one of the last three
CODE = SUBJECT + WORD
FAST = 12  # RoPE pairs that turn fast enough to tell a token from its neighbour
SLOW = range(6, 13)  # pairs that turn once in 80 to 1,100 tokens: near against far
STILL = [*range(16, 32), *range(48, 64)]  # dimensions of a head that RoPE leaves still

OF_SUBJECT = 1.5  # the size of a subject in a note: in a match, the square of it
SHARP = 22.0  # logits of a match of 1, where places are compared
MATCHED = 3.5  # a good match, taken away from every key but the first token: what is left is small, and so is its noise
ENOUGH = 3.0  # the match below which the first token is looked at: a subject and a little more
QUIET = 1.5  # by how much more the first token is looked at where nothing is to be copied
# A share of that after a question, so that what it is about gets attention there, by which a retrieval cache chooses.
HARDLY = 0.2
KNOWN_SHARP = 60.0  # logits of a subject's match of 1, where it is looked for in the whole log
KNOWN, KNOWN_ENOUGH = 0.93, 0.82  # the match taken away there, and the one below which the first token is looked at
PEAK = 16.0  # logits a fast pair, of the look one or two back
NEAR = 20.0  # logits a slow pair, of the look at the last name
COPY = 25.0  # a code found is written with so many times the size that tokens have, whose own codes are read too
COPY_LOGIT = 14.0  # what a code found adds to the logit of its token, per squared size of the code (2)


@dataclass(frozen=True)
class Places:
    """Where in the added width things stand: slices and indices into the hidden state."""

    old: int

    @property
    def code(self) -> slice:
        return slice(self.old, self.old + CODE)

    @property
    def subject(self) -> slice:
        return slice(self.old, self.old + SUBJECT)

    @property
    def word(self) -> slice:
        return slice(self.old + SUBJECT, self.old + SUBJECT + WORD)

    @property
    def noted_subject(self) -> slice:
        return slice(self.old + CODE, self.old + CODE + SUBJECT)

    @property
    def noted_words(self) -> slice:
        return slice(self.old + CODE + SUBJECT, self.old + CODE + SUBJECT + WORD)

    def flag(self, name: str) -> int:
        return self.old + CODE + SUBJECT + WORD + ("one", "name", "first", "known", "quiet").index(name)


def grown(
    shape: Shape, first: Decoder, tokenizer: Tokenizer, sample: Tensor, prose: Tensor, recalling: Tensor
) -> Decoder:
    """A decoder of `shape` that does what `first` does, less one head of each layer, and looks things up besides.

    `tokenizer` is that of the grown decoder, with the words of `first` in front; `sample` [B, n] is text in it, `prose`
    [n] a longer one, and `recalling` [B, n] prose in which things return.
    """
    model, known = Decoder(shape), first.shape.vocab
    parts = parts_of_words(tokenizer, known)
    of_known = torch.tensor([rest[0] for rest in [*[[index] for index in range(known)], *parts]])
    order_heads(first, of_known[recalling])
    widen(model, first, parts, of_known[sample])
    vocab = tokenizer.get_vocab()
    names = [vocab[f"\u0120{name}"] for name in (*SHIPS, "key")]  # a pass key is asked for like a ship's berth
    opening = tokenizer.encode(f"\n{ANSWER}", add_special_tokens=False).ids
    silent = dict.fromkeys((".", "\u010a\u010a", "\u0120The", "\u0120was", "\u0120is", "\u0120not"), 1.0)
    silent |= dict.fromkeys(("?", "\u010a", "Answer", ":"), HARDLY)
    quiet = {vocab[word]: share for word, share in silent.items() if word in vocab} | dict.fromkeys(names, 1.0)
    notes = fit_words(tokenizer, prose, spread_codes(shape.vocab, WORD))
    plant(model, first, names, notes, quiet, opening, sample)
    return model


@torch.no_grad()
def order_heads(model: Decoder, text: Tensor) -> None:
    """Makes that head of each layer the last one without which the loss on `text` [B, n] grows least."""
    size, positions = model.shape.head_dim, torch.arange(text.shape[1] - 1).expand(len(text), -1)

    def loss() -> float:
        logits = model.logits(model(text[:, :-1], positions))
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).item()

    for layer in model.layers:
        attention = cast(Block, layer).self_attn
        written, without = attention.o_proj.weight, []
        for head in range(model.shape.heads):
            kept = written.clone()
            written[:, head * size : (head + 1) * size] = 0.0
            without.append(loss())
            written.copy_(kept)
        least = without.index(min(without))
        order = [*(head for head in range(model.shape.heads) if head != least), least]
        rows = torch.cat([torch.arange(head * size, (head + 1) * size) for head in order])
        written.copy_(written[:, rows])
        for project in (attention.q_proj, attention.k_proj, attention.v_proj):
            project.weight.copy_(project.weight[rows])


@torch.no_grad()
def widen(model: Decoder, first: Decoder, parts: list[list[int]], sample: Tensor) -> None:
    """Puts `first` into the front dimensions and heads of the fresh `model`; all else, and the last head, become zero.

    `parts` holds, for each token that `first` does not know, the tokens it knew in its place. The new tokens begin as
    improbable as the rarest hundredth of the known ones after the tokens of `sample` [B, n].
    """
    mine, theirs = dict(model.named_parameters()), dict(first.named_parameters())
    for name, weight in theirs.items():
        grown = mine[name]
        grown.fill_(1.0 if grown.ndim == 1 else 0.0)
        grown[tuple(slice(0, size) for size in weight.shape)] = weight
    for layer in model.layers:
        attention = cast(Block, layer).self_attn
        for project in (attention.q_proj, attention.k_proj, attention.v_proj):
            project.weight[-model.shape.head_dim :] = 0.0
        attention.o_proj.weight[:, -model.shape.head_dim :] = 0.0
    usual = first(sample, torch.arange(sample.shape[1]).expand_as(sample)).flatten(0, 1).mean(0)
    rows = with_new_words(first.embed_tokens.weight, parts, usual)
    model.embed_tokens.weight[:, : rows.shape[1]] = rows


@torch.no_grad()
def plant(
    model: Decoder,
    first: Decoder,
    names: list[int],
    notes: WordNotes,
    quiet: dict[int, float],
    opening: list[int],
    sample: Tensor,
) -> None:
    """Plants the circuit into the added part of a widened `model`.

    `names` are the tokens that name ships, `quiet` those after which nothing is copied, and how sure that is, `opening`
    the three that an answer's first word follows; `sample` [B, n] is a text by which the scale of each layer's input is
    measured.
    """
    at = Places(old := first.shape.width)
    embedding = model.embed_tokens.weight
    unit = 0.25 * embedding.norm(dim=1).mean().item()
    with torch.enable_grad():
        subject = spread_codes(len(names), SUBJECT)
    everyone = torch.randn(len(embedding), SUBJECT)
    everyone /= everyone.norm(dim=1, keepdim=True)
    everyone[names] = subject
    embedding[:, at.subject], embedding[:, at.word] = unit * everyone, unit * notes.codes
    embedding[0, at.code] = 0.0
    embedding[1:, at.flag("one")] = embedding[0, at.flag("first")] = unit
    embedding[names, at.flag("name")] = unit
    embedding[list(quiet), at.flag("quiet")] = unit * torch.tensor(list(quiet.values()))
    head = model.shape.head_dim * (model.shape.heads - 1)

    for index, block in enumerate(model.layers):
        block = cast(Block, block)
        scale, shrunk = _scales(model, first, index, sample)
        block.input_layernorm.weight[:old] *= shrunk
        block.input_layernorm.weight[old:] = scale / unit  # codes and flags of the added width get size 1
        attention = Head(block.self_attn, head, at)
        if index == 0:
            attention.look_back(1, model.shape.inverse_frequencies)
            attention.carry(at.word, at.noted_words, notes.one, unit)
        elif index == 1:
            attention.look_back(2, model.shape.inverse_frequencies)
            attention.carry(at.word, at.noted_words, notes.two, unit)
            attention.carry(at.noted_words, at.noted_words, notes.three, unit)
        elif index == 2:
            attention.look_at_last_name()
            attention.carry(at.subject, at.noted_subject, OF_SUBJECT * torch.eye(SUBJECT), unit)
        elif index == 3:
            attention.match(notes)
            attention.carry(at.code, at.code, torch.eye(CODE), COPY * unit)
        elif index == 4:
            attention.match_subject()
            flag = slice(at.flag("one"), at.flag("one") + 1)  # which the first token does not have
            attention.carry(flag, slice(at.flag("known"), at.flag("known") + 1), torch.eye(1), COPY * unit)
        else:
            attention.name_the_subject(notes, opening, sample)
            attention.carry(at.code, at.code, torch.eye(CODE), COPY * unit)
        _, shrunk = _scales(model, first, index, sample, after_attention=True)
        block.post_attention_layernorm.weight[:old] *= shrunk
    scale, shrunk = _scales(model, first, len(model.layers), sample)
    model.norm.weight[:old] *= shrunk
    model.norm.weight[old:] = 0.0
    model.norm.weight[at.code] = COPY_LOGIT * scale / (COPY * unit**2)
    assert model.shape.width > at.flag("quiet")


@torch.no_grad()
def retune(model: Decoder, first: Shape, sample: Tensor) -> None:
    """Gives codes, notes and flags of a planted model the size again that they had in each layer when planted.

    `sample` [B, n] is the text by which the scale of each layer's input is measured.
    """
    old, at = first.width, Places(first.width)
    unit = model.embed_tokens.weight[1, at.flag("one")].item()
    positions = torch.arange(sample.shape[1], device=sample.device).expand_as(sample)
    cos, sin = rotary(positions, model.shape.inverse_frequencies)
    x = model.embed_tokens(sample)
    for layer in model.layers:
        block = cast(Block, layer)
        block.input_layernorm.weight[old:] = usual_size(x) / unit
        x = block(x, cos, sin, None)
    model.norm.weight[at.code] = COPY_LOGIT * usual_size(x) / (COPY * unit**2)


def usual_size(x: Tensor) -> float:
    """The root mean square of hidden states [..., width], on average."""
    return x.square().mean(-1).sqrt().mean().item()


def hold(model: Decoder, first: Shape) -> None:
    """Keeps gradients from all planted weights, and from all that writes into the added width.

    Optimisers must not decay weights: what has no gradient is to stay.
    """
    old, head = first.width, model.shape.head_dim * (model.shape.heads - 1)

    def keep(weight: Tensor, part: tuple[slice, ...]) -> None:
        free = torch.ones_like(weight)
        free[part] = 0.0
        weight.register_hook(lambda gradient: gradient * free)

    keep(model.embed_tokens.weight, (slice(None), slice(old, None)))
    keep(model.norm.weight, (slice(old, None),))
    for layer in model.layers:
        block = cast(Block, layer)
        for norm in (block.input_layernorm, block.post_attention_layernorm):
            keep(norm.weight, (slice(old, None),))
        for written in (block.self_attn.o_proj, block.mlp.down_proj):
            keep(written.weight, (slice(old, None),))
        for project in (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj):
            keep(project.weight, (slice(head, None),))


class Head:
    """One head of an attention layer, planted piece by piece; codes and flags reach it with size 1."""

    def __init__(self, attention: Attention, start: int, at: Places):
        self.attention, self.start, self.at, self.used = attention, start, at, 0
        self.root = attention.q_proj.weight.new_tensor(64.0).sqrt().item()  # logits are divided by it

    def _set(self, which: str, row: int, column: int, value: float) -> None:
        weight = getattr(self.attention, f"{which}_proj").weight
        weight[self.start + row, column] += value

    def _constant(self, row: int, logits: float, flag: str = "one") -> None:
        """Adds so many logits to every key, or to those that have a flag.

        A norm that differs from token to token scales all logits of a key; taking away a constant first keeps what is
        scaled small.
        """
        size = math.sqrt(abs(logits) * self.root)
        self._set("q", row, self.at.flag("one"), size)
        self._set("k", row, self.at.flag(flag), math.copysign(size, logits))

    def look_back(self, distance: int, frequencies: Tensor) -> None:
        """Attention to the token `distance` back."""
        size = math.sqrt(PEAK * self.root)
        for pair in range(FAST):
            angle = float(frequencies[pair]) * distance
            self._set("q", pair, self.at.flag("one"), size * math.cos(angle))
            self._set("q", pair + 32, self.at.flag("one"), -size * math.sin(angle))
            self._set("k", pair, self.at.flag("one"), size)
        self._constant(STILL[0], 10.0 - FAST * PEAK)

    def _near(self, logits: float) -> None:
        for pair in SLOW:
            self._constant(pair, logits)

    def look_at_last_name(self) -> None:
        """Attention to the latest name within some fifteen tokens, or else to the first token."""
        self._near(NEAR)
        self._constant(STILL[0], -NEAR * len(SLOW) - 1.8 * NEAR)  # a near name has about none left
        self._constant(STILL[1], 2 * NEAR, "name")
        self._constant(STILL[2], -1.2 * NEAR, "first")

    def match(self, notes: WordNotes) -> None:
        """Attention to the places whose notes are those that the next token will have."""
        self._match_subjects(SHARP)
        size = math.sqrt(SHARP * self.root)
        for place in range(WORD):
            row = STILL[SUBJECT + place]
            self._set("k", row, self.at.noted_words.start + place, size)
            for column in range(WORD):
                self._set("q", row, self.at.word.start + column, size * float(notes.own[place, column]))
                self._set("q", row, self.at.noted_words.start + column, size * float(notes.past[place, column]))
        row = STILL[SUBJECT + WORD]
        self._constant(row, SHARP * (ENOUGH - MATCHED), "first")
        self._constant(row + 2, -SHARP * MATCHED)
        size = math.sqrt(QUIET * SHARP * self.root)
        self._set("q", row + 1, self.at.flag("quiet"), size)
        self._set("k", row + 1, self.at.flag("first"), size)

    def match_subject(self) -> None:
        """Attention to the words of a log with the same subject, which questions lack, or else to the first token."""
        self._match_subjects(KNOWN_SHARP / OF_SUBJECT**2)
        self._constant(STILL[SUBJECT], KNOWN_SHARP * (KNOWN_ENOUGH - KNOWN), "first")
        self._constant(STILL[SUBJECT + 1], -KNOWN_SHARP * KNOWN)
        self._constant(STILL[SUBJECT + 2], -KNOWN_SHARP / HARDLY, "quiet")

    def _match_subjects(self, logits: float) -> None:
        size = math.sqrt(logits * self.root)
        for place in range(SUBJECT):
            for which in "qk":
                self._set(which, STILL[place], self.at.noted_subject.start + place, size)

    def name_the_subject(self, notes: WordNotes, opening: list[int], sample: Tensor) -> None:
        """Attention to the latest name one token after the three tokens `opening`, and else to the first token."""
        self._near(NEAR)
        self._constant(STILL[0], -NEAR * len(SLOW))
        self._constant(STILL[1], 0.47 * NEAR, "first")
        codes = notes.codes[opening]
        before = notes.notes(codes.flip(0))
        usual = notes.notes(torch.stack([notes.codes[sample.roll(back, 1)] for back in (1, 2, 3)], dim=-2)).flatten(
            0, 1
        )
        spread = usual.T @ usual / len(usual)
        agreed = torch.linalg.solve(spread + 0.01 * spread.trace() / WORD * torch.eye(WORD), before)
        agreed /= agreed @ before  # 1 for the opening, and as little as can be for what usually stands in a text
        size = math.sqrt(6 * NEAR * self.root)
        self._set("k", STILL[2], self.at.flag("name"), size)
        # Of 2, where the note is that of the opening and the token is "The", after which nothing else is copied.
        self._set("q", STILL[2], self.at.flag("one"), -1.65 * size)
        self._set("q", STILL[2], self.at.flag("quiet"), size)
        for place in range(WORD):
            self._set("q", STILL[2], self.at.noted_words.start + place, size * float(agreed[place]))

    def carry(self, source: slice, goal: slice, how: Tensor, size: float) -> None:
        """Adds `size * how @ source`, as it stands where the head looks, to `goal`."""
        rows = range(source.stop - source.start)
        for place in rows:
            self._set("v", self.used + place, source.start + place, 1.0)
        columns = slice(self.start + self.used, self.start + self.used + len(rows))
        self.attention.o_proj.weight[goal, columns] += size * how
        self.used += len(rows)


def _scales(
    model: Decoder, first: Decoder, layer: int, sample: Tensor, after_attention: bool = False
) -> tuple[float, float]:
    """Root mean square of the hidden state at a layer (or at its MLP), and its ratio to that of the old part alone."""
    x = model.trace(sample, layer, after_attention)
    old = x[..., : first.shape.width]
    whole, part = x.square().mean(-1).sqrt(), old.square().mean(-1).sqrt()
    return whole.mean().item(), (whole / part).mean().item()
