"""Measures what the model card of the embedded pair claims, on a held-out book.

    python examples/train/pair_figures.py --pair tp/embedded --book BOOKS/emma.txt --json figures.json

Loss and loss by position come from plain PyTorch; recall, answers about logs and acceptance come from the engine, as
a user meets them. `--only loss recall logs values opening acceptance sample` picks parts; figures print as they
arrive and are written after every part.
"""

import argparse
import json
import sys
import time
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pair.data import EOS
from pair.model import Decoder, Shape
from pair.questions import (
    ANSWER_TOKENS,
    Asked,
    ask_logs,
    ask_uniformly,
    log_of_length,
    shares,
    with_beginnings,
)
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from triforce.cli.logbook import LogBook
from triforce.cli.terminal.streams import print_note
from triforce.offload import Engine, Sampling
from triforce.offload.caches.full import FullCache
from triforce.offload.caches.retrieval import RetrievalCache
from triforce.offload.caches.streaming import StreamingCache, prefill_streaming
from triforce.offload.planning.run_plan import planned_budget
from triforce.offload.settings import Settings
from triforce.tp.decoder import Cache

sys.path.append(str(Path(__file__).parents[1] / "measure"))  # where `report` is, if this is run as a script
from report import make_parser, print_table, write_json

CHUNK = 8
PLACES = (0.1, 0.6)
KEY_TOKENS = 7  # a space, five digits and a full stop
TEMPERATURES = (0.0, 0.6, 1.0)
LOSS_BORDERS = (0, 512, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
OPENING_TOKENS, OPENING_QUESTIONS = 12_000, 3  # a log and questions drawn uniformly, to begin with
NEEDLE = "\n\nThe pass key is {key}.\n\n"
QUESTION = "\n\nWhat is the pass key? The pass key is"


def main() -> int:
    options = parse_options()
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        figures = Figures(options)
    except FileNotFoundError as error:
        print_note(f"pair_figures: {error.filename} is missing; give --pair and --book")
        return 2
    for part in options.only:
        began = time.monotonic()
        figures.results[part] = getattr(figures, part)()
        figures.results.setdefault("seconds", {})[part] = round(time.monotonic() - began, 1)
        write_json(options, figures.results, whole=False)
    write_json(options, figures.results)
    return 0


def parse_options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--pair", type=Path, required=True, help="folder with target/ and draft/")
    parser.add_argument("--book", type=Path, required=True, help="held-out text")
    parser.add_argument(
        "--only", nargs="+", default=["loss", "recall", "logs", "acceptance", "sample"], help="parts to measure"
    )
    parser.add_argument(
        "--contexts", nargs="+", type=int, default=[4096, 12288, 32768, 131072], help="recall and logs at these lengths"
    )
    parser.add_argument("--questions", type=int, default=200, help="questions about logs at each length")
    parser.add_argument("--openings", type=int, default=50, help="logs of which three questions each are asked")
    parser.add_argument("--loss-context", type=int, default=32768, help="the longest sample for loss by position")
    parser.add_argument("--acceptance-contexts", nargs="+", type=int, default=[32768], help="lengths for acceptance")
    parser.add_argument("--seeds", type=int, default=2, help="pass keys per depth and place")
    parser.add_argument("--depths", nargs="+", type=float, default=[0.02, 0.25, 0.5, 0.75, 0.95])
    parser.add_argument("--places", type=int, default=4, help="places in the book where acceptance is measured")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens a place and temperature for acceptance")
    parser.add_argument("--budget", type=int, help="tokens of the retrieval cache; default: what the tool plans")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; default: torch's choice")
    return parser.parse_args()


class Figures:
    """The measurements; each public method is one part and returns what goes into the JSON."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.results: dict = {}
        self.target_dir, self.draft_dir = options.pair / "target", options.pair / "draft"
        self.tokenizer = Tokenizer.from_file(str(self.existing(self.target_dir / "tokenizer.json")))
        text = self.existing(options.book).read_text(encoding="utf-8-sig")
        self.book = self.encode(text)
        print_note(f"held-out book: {options.book.name}, {len(self.book):,} tokens")

    def show(self, title: str, rows: dict[str, dict[str, Any]]) -> None:
        """Prints rows by their names."""
        print_table(self.options, title, [{"": name, **row} for name, row in rows.items()])

    @staticmethod
    def existing(path: Path) -> Path:
        if not path.exists():
            raise FileNotFoundError(2, "missing", str(path))
        return path

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def stretch(self, place: float, length: int) -> list[int]:
        """`<s>` and `length - 1` tokens of the book from a relative place on, going round at its end."""
        start = int(place * len(self.book))
        doubled = self.book + self.book
        return [0, *doubled[start : start + length - 1]]

    def reader(self) -> "Reader":
        return Reader(self.target_dir, self.options.budget)

    @torch.inference_mode()
    def loss(self) -> dict:
        """Nats a token, over whole samples of 2,048 and by position in longer ones."""
        model = Decoder(Shape.of(json.loads((self.target_dir / "config.json").read_text(encoding="utf-8"))))
        model.load_hf_state(load_file(self.target_dir / "model.safetensors"))
        short = np.concatenate([token_losses(model, self.stretch(i / 16, 2049)) for i in range(16)])
        print_note(f"loss at 2,048 tokens: {short.mean():.3f} nats")
        places, longest = self.options.places, self.options.loss_context
        far = np.mean([token_losses(model, self.stretch(i / places, longest + 1)) for i in range(places)], axis=0)
        alone = np.mean([self.losses_in_short_samples(model, i / places, longest) for i in range(places)], axis=0)
        windows = [(a, min(b, longest)) for a, b in pairwise(LOSS_BORDERS) if a < longest]
        by_position, short_samples = (
            {f"{a}-{b}": round(float(losses[a:b].mean()), 4) for a, b in windows} for losses in (far, alone)
        )
        held_out = round(float(short.mean()), 4)
        found = {"by_position": by_position, "in_samples_of_2048": short_samples}
        rows = {window: {kind: losses[window] for kind, losses in found.items()} for window in by_position}
        self.show(f"loss in nats, {held_out} at 2,048 tokens", rows)
        return {"held_out_2048": held_out, **found}

    def losses_in_short_samples(self, model: Decoder, place: float, longest: int) -> np.ndarray:
        """Loss of every token of a stretch after its first, each sample of 2,048 read for itself."""
        ids = self.stretch(place, longest + 1)[1:]
        return np.concatenate([token_losses(model, [0, *ids[i : i + 2048]]) for i in range(0, longest, 2048)])

    def recall(self) -> dict:
        """Share of pass keys named in full, by context length and by what the model may look at."""
        options, reader, out = self.options, self.reader(), {}
        for context in options.contexts:
            hits: dict[str, dict[str, list[bool]]] = {way: {} for way in Reader.WAYS}
            # Deepest first, keys innermost: the reader keeps what a prompt shares with the one before it.
            for place, depth in product(PLACES, sorted(options.depths, reverse=True)):
                for seed in range(options.seeds):
                    key = f"{np.random.default_rng((seed, context, int(depth * 1000))).integers(100000):05d}"
                    answers = reader.answers(self.prompt_with_key(key, place, depth, context), KEY_TOKENS)
                    for way, ids in answers.items():
                        found = self.tokenizer.decode(ids).replace(" ", "").startswith(key)
                        hits[way].setdefault(str(depth), []).append(found)
            out[str(context)] = {way: summary(by_depth) for way, by_depth in hits.items()}
            self.show(f"pass-key recall at {context:,}", out[str(context)])
        return out

    def prompt_with_key(self, key: str, place: float, depth: float, context: int) -> list[int]:
        needle, question = self.encode(NEEDLE.format(key=key)), self.encode(QUESTION)
        prose = self.stretch(place, context - len(needle) - len(question) - KEY_TOKENS)
        cut = max(1, int(depth * len(prose)))
        return [*prose[:cut], *needle, *prose[cut:], *question]

    def logs(self) -> dict:
        """Share of questions about logs that are answered word for word, and of unanswerable ones refused."""
        return self.answered("answers about logs", begun=False)

    def values(self) -> dict:
        """Share of values found in logs where the answer's beginning, which the question settles, is given."""
        return self.answered("values found in logs", begun=True)

    def answered(self, label: str, begun: bool) -> dict:
        """Right answers by context length, with the full cache and with the retrieval cache in its place."""
        reader, out = self.reader(), {}
        for context in self.options.contexts:
            asked = ask_logs(self.encode, context, self.options.questions)
            asked = with_beginnings(asked, self.encode) if begun else asked
            out[str(context)] = self.answered_by(reader, asked)
            self.show(f"{label} at {context:,}", out[str(context)])
        return out

    def opening(self) -> dict:
        """Right answers to three questions drawn uniformly from each of `--openings` logs of some 12,000 tokens."""
        asked = [
            question
            for seed in range(self.options.openings)
            for question in ask_uniformly(self.encode, seed, OPENING_TOKENS, OPENING_QUESTIONS)
        ]
        out = self.answered_by(self.reader(), asked)
        self.show("three answers a log", out)
        return out

    def answered_by(self, reader: "Reader", asked: list[Asked]) -> dict:
        """The shares of right answers with the full cache and with the retrieval cache in its place."""
        texts: dict[str, list[str]] = {}
        for question in asked:
            answers = reader.answers(question.prompt, ANSWER_TOKENS, ("full", "retrieval"))
            for way, ids in answers.items():
                texts.setdefault(way, []).append(self.tokenizer.decode(ids))
        return {way: shares(asked, answers) for way, answers in texts.items()}

    def acceptance(self) -> dict:
        """Accepted of tested and of proposed tokens at both levels, by context length, text, choice of chunks and
        temperature: with fixed lengths, and for the retrieval cache's own choice also with those the tool chooses.
        """
        fixed: dict[str, Any] = {"draft_length": 4, "block_length": 12, "refresh": "round"}
        out: dict = {}
        for context in self.options.acceptance_contexts:
            out[str(context)] = {
                **self.accepted(context, "retrieval", fixed),
                **self.accepted(context, "recent", fixed),
                **self.accepted(context, "retrieval", {}),
            }
        return out

    def accepted(self, context: int, way: str, lengths: dict[str, Any]) -> dict:
        """Mean acceptance at one context length, by text and temperature; `lengths` are the engine's settings."""
        engine = Engine.load(self.target_dir, self.draft_dir, device="cpu", budget=self.options.budget, **lengths)
        out: dict = {}
        plain = [self.stretch(i / self.options.places, context) for i in range(self.options.places)]
        # A reader who is asked to repeat what stood far back: what recent tokens alone cannot tell.
        recalling = [ids[: context - 192] + ids[context // 4 : context // 4 + 192] for ids in plain]
        logs = [[0, *log_of_length(LogBook(i), self.encode, context - 1)] for i in range(self.options.places)]
        texts = (("book", plain), ("recall", recalling), ("log", logs))
        for label, prompts in texts:
            by_temperature: dict = {}
            for (index, prompt), temperature in product(enumerate(prompts), TEMPERATURES):
                sampling = Sampling(temperature=temperature, top_p=1.0, top_k=0, seed=index)
                run = engine.stream(prompt, sampling, self.options.new_tokens, ignore_eos=True)
                retrieval = run.sequence.active.retrieval
                if way != "retrieval" and retrieval:
                    retrieval.select = newest
                for _ in run:
                    pass
                note(by_temperature, str(temperature), run.stats()["acceptance"])
            name = f"{label}, {way}, {'fixed' if lengths else 'chosen'} lengths"
            out[name] = means(by_temperature)
            self.show(f"acceptance at {context:,}, {name}", out[name])
        return out

    def sample(self) -> dict:
        """What the pair writes after 1,024 tokens of the book, at temperature 0.8."""
        engine = Engine.load(self.target_dir, self.draft_dir, device="cpu")
        prompt = self.stretch(0.3, 1024)
        sampling = Sampling(temperature=0.8, top_p=0.95, top_k=0, seed=1)
        ids = engine.generate(prompt, sampling, max_new_tokens=200, ignore_eos=True).token_ids
        text = {"prompt_end": self.tokenizer.decode(prompt[-60:]), "text": self.tokenizer.decode(ids)}
        self.show("sample, at temperature 0.8", {name: {"text": part} for name, part in text.items()})
        return text


class Reader:
    """Answers prompts greedily with three views of each; consecutive prompts share what they begin with."""

    WAYS = ("full", "retrieval", "streaming")

    def __init__(self, target: Path, budget: int | None) -> None:
        """Args: `budget`: of the retrieval cache; `None` for what a run plans."""
        self.settings = Settings(tiers=2, budget=budget)
        self.decoder = Engine.load(target, "none", device="cpu", tiers=2).target
        self.full: FullCache | None = None
        self.known: list[int] = []

    @torch.inference_mode()
    def answers(self, prompt: list[int], count: int, ways: tuple[str, ...] = WAYS) -> dict[str, list[int]]:
        """`count` greedy tokens, or fewer up to the end of a text, by each of `ways`: full cache, retrieval cache, the
        draft's kind of cache.

        As in a run, the full cache reads the whole prompt and gives the first token, and by what it looked at last the
        retrieval cache chooses its chunks, once for all that follows.
        """
        full, budget = self._full_cache(len(prompt) + count), planned_budget(self.settings, len(prompt) + count)
        shared = 0
        while shared < min(len(self.known), len(prompt) - 1) and self.known[shared] == prompt[shared]:
            shared += 1
        full.rollback(shared)
        first = int(self.decoder.forward(torch.tensor(prompt[shared:]), full)[-1].argmax())
        retrieval = RetrievalCache(full, self.decoder.rope, budget=budget, chunk_size=CHUNK)
        retrieval.refresh()
        self.known = prompt
        caches: dict[str, Cache] = {"retrieval": retrieval, "full": full}
        if "streaming" in ways:
            streaming = StreamingCache(self.decoder)
            prefill_streaming(self.decoder, streaming, prompt)
            caches = {"streaming": streaming, **caches}
        answers = {way: [first, *self._decode(first, cache, count - 1)] for way, cache in caches.items()}
        full.rollback(len(self.known))
        return answers

    def _decode(self, token: int, cache: Cache, count: int) -> list[int]:
        out = []
        while len(out) < count and token != EOS:
            token = int(self.decoder.forward(torch.tensor([token]), cache)[-1].argmax())
            out.append(token)
        return out

    def _full_cache(self, capacity: int) -> FullCache:
        if self.full is None or self.full.capacity < capacity:
            self.full, self.known = None, []
            decoder = self.decoder
            self.full = FullCache.on_device(
                decoder.config,
                decoder.rope,
                dtype=decoder.dtype,
                device=decoder.device,
                capacity=capacity,
                chunk_size=CHUNK,
            )
        return self.full


def newest(scores: Tensor, count: int) -> Tensor:
    """In place of `select_chunks`, as many chunks in all of sinks (two) and newest."""
    last = torch.arange(scores.shape[1])
    chosen = torch.cat((last[:2], last[max(2, scores.shape[1] - count + 2) :]))
    return chosen.expand(scores.shape[0], -1)


def token_losses(model: Decoder, ids: list[int]) -> np.ndarray:
    """Loss of every token after the first, nats."""
    tokens = torch.tensor([ids])
    hidden = model(tokens[:, :-1], torch.arange(len(ids) - 1)[None])[0]
    parts = zip(hidden.split(4096), tokens[0, 1:].split(4096), strict=True)
    return torch.cat([F.cross_entropy(model.logits(h), t, reduction="none") for h, t in parts]).numpy()


def summary(by_depth: dict[str, list[bool]]) -> dict:
    every = [hit for hits in by_depth.values() for hit in hits]
    shares = {depth: round(sum(hits) / len(hits), 3) for depth, hits in by_depth.items()}
    return {"recall": round(sum(every) / len(every), 3), "keys": len(every), "by_depth": shares}


def note(by_temperature: dict, temperature: str, acceptance: dict) -> None:
    for name, value in acceptance.items():
        if value is not None:
            by_temperature.setdefault(temperature, {}).setdefault(name, []).append(value)


def means(by_temperature: dict) -> dict:
    return {
        temperature: {name: round(sum(values) / len(values), 3) for name, values in named.items()}
        for temperature, named in by_temperature.items()
    }


if __name__ == "__main__":
    raise SystemExit(main())
