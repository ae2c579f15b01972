"""Texts and samples for `train_pair.py`: the tokenizer, the books as token arrays, and what a training sample is
made of.

A model this small never learns to look anything up from plain prose, so samples mix prose with things that must be
recalled: random token sequences said twice, spans of text that return, facts ("The pass key is 48213.") asked for
later, and harbour logs with questions about them. Every sample is a function of (seed, phase, step) alone, which is
what makes a resumed run equal an uninterrupted one. Nothing here knows about models or optimisers.
"""

import json
import random
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from triforce.cli.logbook import Fact, LogBook, words_of_logs

FIRST_VOCAB, VOCAB = 4096, 5440
BOS, EOS = 0, 1
MAX_POSITIONS = 131072
ANSWER = "Answer:"
TRAINING_LOGS = 1_000_000  # seeds from here on are trained on; those below are for measuring
RECALL_WEIGHT = 5.0  # a recalled value is five tokens among thousands: this keeps its gradient audible


def read_texts(folder: Path, held_out: str) -> tuple[dict[str, str], str]:
    """Training texts by file name, and the held-out text.

    Raises:
        FileNotFoundError: `folder` has no `*.txt`, or none called `held_out`.
    """
    files = {path.name: path for path in sorted(folder.glob("*.txt"))}
    if held_out not in files:
        raise FileNotFoundError(f"{folder} has no {held_out}; its text files are: {', '.join(files) or 'none'}")
    if len(files) < 2:
        raise FileNotFoundError(f"{folder} has only the held-out text {held_out}: nothing is left to train on")
    texts = {name: path.read_text(encoding="utf-8-sig") for name, path in files.items()}
    return texts, texts.pop(held_out)


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE of 4,096 words; every digit is a token, `<s>` is 0, `</s>` is 1 and encoding puts `<s>` first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=FIRST_VOCAB,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    return tokenizer


def with_words_of_logs(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer, whose words keep their ids, with names and frequent words of logs as words of their own."""
    seen: Counter[str] = Counter()
    split = tokenizer.pre_tokenizer.pre_tokenize_str  # a Tokenizer's parts are not in its stubs
    for seed in range(20):
        book = LogBook(TRAINING_LOGS + seed)
        written = book.write(10_000)
        asked = (f"{fact.question}\n{ANSWER} {fact.answer}\n\n" for fact in book.facts)
        seen.update(word for word, _ in split(written + "".join(asked)))
    raw = json.loads(tokenizer.to_str())
    vocab: dict[str, int] = raw["model"]["vocab"]
    wanted = [f"\u0120{word}" for word in words_of_logs()] + [word for word, _ in seen.most_common()]
    for word in dict.fromkeys(wanted):
        if len(vocab) < VOCAB and word not in vocab:
            vocab[word] = len(vocab)
    raw["model"]["ignore_merges"] = True  # a word of the vocabulary is one token, whether merges lead to it or not
    return Tokenizer.from_str(json.dumps(raw))


def encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Token ids of a text without `<s>`, uint16."""
    return np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint16)


@dataclass(frozen=True)
class Mix:
    """Shares of the kinds of sample in a phase; what is left over is plain prose."""

    random_repeats: float
    echoes: float
    facts: float
    logs: float = 0.0


@dataclass
class Batch:
    """One step, each [B, n]: `ids`, `targets`, loss `weights`, `positions`, and log-multiplicities `crowd` of keys."""

    ids: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    positions: np.ndarray
    crowd: np.ndarray


@dataclass
class Piece:
    """Tokens of a sample, the weight of each in the loss, and whether it belongs to what is asked for later."""

    ids: np.ndarray
    weights: np.ndarray
    sought: np.ndarray

    @classmethod
    def of(cls, ids: np.ndarray, weight: float, sought: bool = False) -> "Piece":
        return cls(ids, np.full(len(ids), weight), np.full(len(ids), sought))

    @classmethod
    def join(cls, pieces: list["Piece"]) -> "Piece":
        return cls(*(np.concatenate([getattr(p, name) for p in pieces]) for name in ("ids", "weights", "sought")))

    def __getitem__(self, part: slice) -> "Piece":
        return Piece(self.ids[part], self.weights[part], self.sought[part])


class Sampler:
    """Draws batches from tokenised books."""

    def __init__(self, texts: list[str], tokenizer: Tokenizer, seed: int):
        self.tokenizer, self.vocab = tokenizer, tokenizer.get_vocab_size()
        self.seed = seed
        self.books = [encode(tokenizer, text) for text in texts]
        self.book_share = np.array([len(book) for book in self.books], dtype=float)
        self.book_share /= self.book_share.sum()
        words = Counter(re.findall(r"\b[a-z]{4,9}\b", "\n".join(texts)))
        self.words = sorted(word for word, count in words.items() if count >= 30)

    @property
    def tokens(self) -> int:
        return sum(len(book) for book in self.books)

    def batch(self, key: tuple[int, int], rows: int, length: int, mix: Mix, gaps: float, crowded: float) -> Batch:
        """The batch that belongs to `key` (phase and step): `rows` samples of `length` tokens.

        A share `crowded` of them is to be attended as if its far part were many times as long, and a share `gaps`
        of the others has gaps in its positions.
        """
        rng = np.random.default_rng((self.seed, *key))
        samples = [self._sample(rng, length + 1, mix) for _ in range(rows)]
        ids = np.stack([s.ids for s in samples]).astype(np.int64)
        weights = np.stack([s.weights for s in samples]).astype(np.float32)
        positions = np.tile(np.arange(length, dtype=np.int64), (rows, 1))
        crowd = np.zeros((rows, length), dtype=np.float32)
        for row, sample in enumerate(samples):
            kind = rng.random()
            if kind < crowded:
                crowd[row], positions[row] = crowd_far_part(rng, sample.sought[:-1])
            elif kind < crowded + (1 - crowded) * gaps:
                positions[row] = spread_positions(rng, length)
        return Batch(ids[:, :-1], ids[:, 1:], weights[:, 1:], positions, crowd)

    def prose(self, rng: np.random.Generator, length: int) -> np.ndarray:
        """A span of a book drawn by its length, at a random place."""
        book = self.books[rng.choice(len(self.books), p=self.book_share)]
        length = min(length, len(book) - 1)
        start = int(rng.integers(len(book) - length))
        return book[start : start + length]

    def _sample(self, rng: np.random.Generator, length: int, mix: Mix) -> Piece:
        kind = rng.random()
        if kind < mix.random_repeats:
            body = self._random_repeats(rng, length - 1)
        elif kind < mix.random_repeats + mix.echoes:
            body = self._with_inserts(rng, length - 1, self._echoes(rng, length))
        elif kind < mix.random_repeats + mix.echoes + mix.facts:
            body = self._with_inserts(rng, length - 1, self._facts(rng, length))
        elif kind < mix.random_repeats + mix.echoes + mix.facts + mix.logs:
            body = self._log(rng, length - 1)
        else:
            body = self._with_inserts(rng, length - 1, [])
        return Piece.join([Piece.of(np.array([BOS], dtype=np.uint16), 0.0, sought=True), body])

    def _log(self, rng: np.random.Generator, length: int) -> Piece:
        """A log, in which questions may follow a day, and questions at its end."""
        book = LogBook(TRAINING_LOGS + int(rng.integers(1 << 30)))
        draw = random.Random(int(rng.integers(1 << 30)))
        asked_at_end = max(2, min(24, length // 48), length // 200)
        room = length - 20 * asked_at_end
        ends = draw.random() < 0.5  # the text is the end of a longer log, rather than its beginning
        pieces: list[Piece] = []
        have, days = 0, book.days()
        while have < room:
            pieces.append(Piece.of(encode(self.tokenizer, next(days).text + "\n\n"), 1.0))
            have += len(pieces[-1].ids)
            if not ends and book.facts and draw.random() < 0.1:
                pieces += [self._question(book, draw) for _ in range(draw.randint(1, 3))]
                have += sum(len(piece.ids) for piece in pieces[-3:])
        text = Piece.join(pieces)
        text = text[len(text.ids) - room :] if ends else text[:room]
        # What was cut away cannot be asked for: only ships that still stand in the text are.
        told = self.tokenizer.decode(text.ids.tolist())
        left = [fact for fact in book.facts if fact.sentence in told]
        body = [text] if told.endswith("\n\n") else [text, Piece.of(encode(self.tokenizer, "\n\n"), 0.0)]
        while sum(len(piece.ids) for piece in body) < length:
            body.append(self._question(book, draw, left))
        return Piece.join(body)[:length]

    def _question(self, book: LogBook, draw: random.Random, facts: list[Fact] | None = None) -> Piece:
        """A question about the log with its answer and `</s>`, the answer weighted by `RECALL_WEIGHT`."""
        facts = book.facts if facts is None else facts
        fact = draw.choice(facts) if facts and draw.random() < 0.8 else book.unanswerable(draw)
        answer = Piece.of(encode(self.tokenizer, f" {fact.answer}"), RECALL_WEIGHT)
        return Piece.join(
            [
                Piece.of(encode(self.tokenizer, f"{fact.question}\n{ANSWER}"), 0.2, sought=True),
                answer,
                Piece.of(np.array([EOS], dtype=np.uint16), 1.0),
                Piece.of(encode(self.tokenizer, "\n\n"), 0.2),
            ]
        )

    def _random_repeats(self, rng: np.random.Generator, length: int) -> Piece:
        """Random sequences, each followed by itself once or more; only the repeats count.

        The tokens come from a part of the vocabulary, small as often as large: copying is found sooner among few words
        seen often, and what finds it there holds for the others.
        """
        pieces, have = [], 0
        while have < length:
            period = int(np.exp(rng.uniform(np.log(4), np.log(min(length / 3, 512)))))
            times = int(rng.integers(2, 9))
            words = int(np.exp(rng.uniform(np.log(64), np.log(self.vocab - 2))))
            ids = np.tile(rng.integers(2, 2 + words, period).astype(np.uint16), times)
            piece = Piece.of(ids, 1.0)
            piece.weights[: period + 1] = 0.0
            pieces.append(piece)
            have += len(ids)
        return Piece.join(pieces)[:length]

    def _with_inserts(self, rng: np.random.Generator, length: int, inserts: list[tuple[int, Piece]]) -> Piece:
        """Prose of `length` tokens with pieces put in at the given offsets of the prose."""
        prose = self.prose(rng, length)
        while len(prose) < length:
            prose = np.concatenate((prose, self.prose(rng, length - len(prose))))
        pieces, done = [], 0
        for place, piece in sorted(inserts, key=lambda insert: insert[0]):
            place = min(place, length)
            pieces += [Piece.of(prose[done:place], 1.0), piece]
            done = place
        pieces.append(Piece.of(prose[done:], 1.0))
        # What was put in pushes text out at the end; dropping it at the front would lose what is asked for.
        return Piece.join(pieces)[:length]

    def _echoes(self, rng: np.random.Generator, length: int) -> list[tuple[int, Piece]]:
        """Spans, random tokens or prose from elsewhere, that return after a distance."""
        inserts = []
        for _ in range(count_inserts(rng, length)):
            size = int(rng.integers(16, min(160, length // 6)))
            random_tokens = rng.random() < 0.5
            ids = rng.integers(2, self.vocab, size).astype(np.uint16) if random_tokens else self.prose(rng, size)
            first, *later = draw_places(rng, length)
            inserts.append((first, Piece.of(ids, 0.0 if random_tokens else 1.0, sought=True)))
            again = Piece.of(ids, 1.5, sought=True)
            again.weights[:2] = 0.0
            inserts += [(place, again) for place in later]
        return inserts

    def _facts(self, rng: np.random.Generator, length: int) -> list[tuple[int, Piece]]:
        """Statements with a value that cannot be guessed, and questions for it further on."""
        inserts = []
        for index in range(count_inserts(rng, length)):
            value = self._value(rng)
            name = f"{rng.choice(self.words)} {rng.choice(self.words)}"
            statement, question = UNNAMED_FACT if index == 0 else NAMED_FACTS[rng.integers(len(NAMED_FACTS))]
            if index == 0:
                value = f"{rng.integers(100000):05d}"
            first, *later = draw_places(rng, length)
            inserts.append((first, self._fill(rng, statement, name, value, 0.0)))
            for place in later:
                if "?" in question and rng.random() < 0.4:
                    inserts.append((place, self._asked(question, name, value)))
                    continue
                form = question if rng.random() < 0.75 else statement
                inserts.append((place, self._fill(rng, form, name, value, RECALL_WEIGHT)))
        return inserts

    def _asked(self, form: str, name: str, value: str) -> Piece:
        """A question for a fact and its answer, as the chat template asks, the value weighted by `RECALL_WEIGHT`."""
        question, answer = form.format(name=name, value="\0").split("? ")
        before, after = answer.split("\0")
        parts = ((f"\n\n{question}?\n{ANSWER} {before.rstrip()}", 1.0), (f" {value}", RECALL_WEIGHT), (after, 1.0))
        told = [Piece.of(encode(self.tokenizer, text), weight, sought=True) for text, weight in parts]
        end = Piece.of(np.array([EOS], dtype=np.uint16), 1.0)
        return Piece.join([*told, end, Piece.of(encode(self.tokenizer, "\n\n"), 0.2)])

    def _value(self, rng: np.random.Generator) -> str:
        if rng.random() < 0.75:
            return "".join(map(str, rng.integers(10, size=int(rng.integers(3, 8)))))
        return " ".join(rng.choice(self.words, size=int(rng.integers(1, 4))))

    def _fill(self, rng: np.random.Generator, form: str, name: str, value: str, weight: float) -> Piece:
        """A fact as tokens, its value weighted by `weight`, set off from the prose by spaces or lines."""
        before, after = form.format(name=name, value="\0").split("\0")
        left, right = (("\n\n", "\n\n"), ("\n", "\n"), (" ", ""))[rng.integers(3)]
        parts = ((left + before.rstrip(" "), 1.0), (" " + value, weight), (after + right, 1.0))
        return Piece.join([Piece.of(encode(self.tokenizer, text), share, sought=True) for text, share in parts])


UNNAMED_FACT = ("The pass key is {value}.", "What is the pass key? The pass key is {value}.")
NAMED_FACTS = (
    (
        "The pass key of the {name} is {value}.",
        "What is the pass key of the {name}? The pass key of the {name} is {value}.",
    ),
    ("The number of the {name} is {value}.", "What is the number of the {name}? It is {value}."),
    ("The {name} has the sign {value}.", "Which sign has the {name}? The {name} has the sign {value}."),
    ("{name}: {value}", "{name}: {value}"),
    ("{name} = {value}", "{name} = {value}"),
)


def count_inserts(rng: np.random.Generator, length: int) -> int:
    """How many things a sample asks to be recalled: 1 or 2 in short ones, some tens in long ones."""
    most = max(2, length // 400)
    return int(rng.integers(max(1, most // 3), most + 1))


def draw_places(rng: np.random.Generator, length: int) -> list[int]:
    """A place for a statement and one to three later ones, at log-uniform or uniform distances from it."""
    first = int(rng.integers(0, max(1, length * 3 // 4)))
    room = length - first
    places = [first]
    for _ in range(int(rng.integers(1, 4))):
        if rng.random() < 0.5:
            distance = int(np.exp(rng.uniform(np.log(8), np.log(room))))
        else:
            distance = int(rng.integers(1, room))
        places.append(first + distance)
    return [places[0], *sorted(places[1:])]


def spread_positions(rng: np.random.Generator, length: int) -> np.ndarray:
    """Positions [length] with one to three gaps of log-uniform total size, below 131,072."""
    positions = np.arange(length, dtype=np.int64)
    cuts = np.sort(rng.integers(1, length, size=int(rng.integers(1, 4))))
    total = np.exp(rng.uniform(np.log(length / 4), np.log(MAX_POSITIONS - length)))
    for cut, part in zip(cuts, rng.dirichlet(np.ones(len(cuts))), strict=True):
        positions[cut:] += int(part * total)
    return positions


def crowd_far_part(rng: np.random.Generator, sought: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Log-multiplicities [n] and positions [n] of a sample whose first part stands for a text up to 32 times as long.

    What is asked for later, and the first token, stand for themselves: a long text holds them once.
    """
    length = len(sought)
    cut = int(rng.integers(length // 4, length * 3 // 4))
    most = min(32.0, (MAX_POSITIONS - length) / cut)
    times = float(np.exp(rng.uniform(np.log(1.5), np.log(most))))
    far = np.arange(length) < cut
    crowd = np.where(far & ~sought, np.log(times), 0.0).astype(np.float32)
    positions = np.arange(length, dtype=np.int64) + np.where(far, 0, int(cut * (times - 1)))
    return crowd, positions
