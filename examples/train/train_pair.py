"""Train the embedded pair: tokenizer, long-context target and small draft, from a folder of plain-text files.

    python examples/train/train_pair.py --texts BOOKS --held-out emma.txt --out DIR

The same command resumes: every phase writes checkpoints under `DIR/checkpoints`, and a run continues from the
newest one with the samples that an uninterrupted run would have drawn. `DIR/target` and `DIR/draft` are ordinary
Hugging Face directories and are rewritten after every phase, so a usable pair exists long before the last one ends.
What is trained when, and for how many tokens, are the tables of phases; `--scale` multiplies their tokens (a GPU wants
about 30) and `--minutes` stops early. First comes a smaller model that knows only books, then the target: it begins as
that model, with more width and words and a planted circuit (`pair/circuit.py`). `--first DIR` gives the smaller model,
where one is there.
"""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pair.circuit import grown, hold, retune
from pair.data import EOS, Mix, Sampler, encode, read_texts, train_tokenizer, with_words_of_logs
from pair.model import DRAFT, FIRST, TARGET, Decoder, plant_attention
from pair.output import export, report, save_array, save_atomically
from pair.questions import marked_logs
from pair.training import Phase, Progress, Run, Training
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

FIRST_PHASES = (
    Phase("copying", 256, 16, 0.4e6, (1e-3, 1.5e-3), Mix(0.40, 0.20, 0.20), gaps=0.4),
    Phase("short", 512, 16, 4.0e6, (2e-3, 1.5e-3), Mix(0.10, 0.15, 0.30), gaps=0.4),
    Phase("middle", 2048, 4, 1.2e6, (1.5e-3, 1e-3), Mix(0.05, 0.15, 0.40), gaps=0.2, crowded=0.4),
    Phase("dense-8k", 8192, 1, 0.6e6, (1e-3, 4e-4), Mix(0.02, 0.12, 0.46), gaps=0.2, crowded=0.4),
    Phase("dense-32k", 32768, 1, 0.26e6, (5e-4, 5e-5), Mix(0.0, 0.10, 0.55), gaps=0.15, crowded=0.2),
)
TARGET_PHASES = (
    Phase("answers", 512, 8, 1.2e6, (1.5e-3, 1.5e-3), Mix(0.0, 0.03, 0.07, 0.55), gaps=0.3),
    Phase("short", 512, 16, 10.5e6, (1.5e-3, 1e-3), Mix(0.0, 0.04, 0.08, 0.25), gaps=0.3, crowded=0.3),
    Phase("middle", 2048, 4, 6.5e6, (1e-3, 3e-4), Mix(0.0, 0.05, 0.12, 0.30), gaps=0.3, crowded=0.4),
    Phase("dense-8k", 8192, 1, 0.8e6, (3e-4, 2e-4), Mix(0.0, 0.05, 0.20, 0.40), gaps=0.2, crowded=0.4),
    Phase("cooling", 2048, 4, 2.5e6, (2e-4, 1e-5), Mix(0.0, 0.04, 0.12, 0.30), gaps=0.3, crowded=0.4),
)
DRAFT_PHASES = (
    Phase("books", 496, 16, 5e6, (4e-3, 3e-3), Mix(0.0, 0.0, 0.1, 0.3)),
    Phase("own-samples", 496, 16, 14e6, (3e-3, 1e-3), Mix(0.0, 0.0, 0.1, 0.2), own=0.5),
    Phase("agreement", 496, 16, 8e6, (1e-3, 1e-5), Mix(0.0, 0.0, 0.1, 0.2), own=0.5, agreement=0.7),
)
EVENNESS = 2.0  # nats for a variance of 1 of the logarithm of tokens' root mean squares where they enter a layer
OWN_TEMPERATURES = (1.0, 0.6, 1.0, 0.6, 0.0)
OWN_ROWS = 640
SINKS, WINDOW = 16, 256  # the draft's streaming cache: so many first tokens, and so many tokens with them


def main() -> int:
    options = parse_options()
    torch.manual_seed(options.seed)
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        texts, held_out = read_texts(options.texts, options.held_out)
    except FileNotFoundError as error:
        print(f"train_pair: {error}", file=sys.stderr)
        return 2
    run = Run(options.out, torch.device(options.device), use_compiler(options), options.scale, options.deadline)
    before = options.first / "tokenizer.json" if options.first else run.out / "first-tokenizer.json"
    first_tokenizer = made_once(before, lambda: train_tokenizer(list(texts.values())))
    tokenizer = made_once(run.out / "tokenizer.json", lambda: with_words_of_logs(first_tokenizer))
    if "first" in options.only and not options.first:
        sampler = Sampler(list(texts.values()), first_tokenizer, options.seed)
        if not FirstTraining(run, first_tokenizer, sampler, encode(first_tokenizer, held_out)).train():
            return 0
    sampler = Sampler(list(texts.values()), tokenizer, options.seed)
    report(f"{len(texts)} texts, {sampler.tokens / 1e6:.2f} M tokens; held out: {options.held_out}")
    if "target" in options.only:
        first = options.first or run.out / "first"
        if not TargetTraining(run, tokenizer, sampler, encode(tokenizer, held_out), first).train():
            return 0
    if "draft" in options.only:
        DraftTraining(run, tokenizer, sampler).train()
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--texts", type=Path, required=True, help="folder of *.txt files")
    parser.add_argument("--held-out", default="emma.txt", help="file name in --texts that is never trained on")
    parser.add_argument(
        "--out", type=Path, required=True, help="checkpoints and results; an earlier run there is resumed"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop, resumably, after so many minutes")
    parser.add_argument(
        "--only",
        nargs="+",
        default=["first", "target", "draft"],
        choices=("first", "target", "draft"),
        help="only these",
    )
    parser.add_argument(
        "--first",
        type=Path,
        help="folder of a model that knows books, from which the target grows",
    )
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the tokens of every phase")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; default: torch's choice")
    parser.add_argument(
        "--compile",
        default="auto",
        choices=("auto", "on", "off"),
        help="torch.compile (needs a C++ compiler)",
    )
    options = parser.parse_args()
    options.deadline = time.monotonic() + 60 * options.minutes
    return options


def use_compiler(options: argparse.Namespace) -> bool:
    """Whether to compile: as told, or if the compiler that torch.compile would call exists."""
    if options.compile == "auto":
        return options.device == "cuda" or shutil.which(os.environ.get("CXX", "g++")) is not None
    return options.compile == "on"


def made_once(path: Path, make: Callable[[], Tokenizer]) -> Tokenizer:
    """The tokenizer in the file, which is written first where it is not there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        make().save(str(path))
    return Tokenizer.from_file(str(path))


class Predicting(Training):
    """Predicts the next token of samples that ask for recall."""

    held_out: np.ndarray
    even = False
    """Whether tokens are to be of even size where they enter layers."""

    def backward(self, phase: Phase, key: tuple[int, int]) -> float:
        batch = self.sampler.batch(key, phase.rows, phase.length, phase.mix, phase.gaps, phase.crowded)
        ids, targets, weights, positions, crowd = map(self.run.to_device, vars(batch).values())
        sizes: list[Tensor] | None = [] if self.even else None
        hidden = self.model(ids, positions, crowd if phase.crowded else None, sizes)
        uneven = EVENNESS * torch.stack([size[:, 1:].var() for size in sizes]).sum() if sizes else None
        return self.losses.predict(self.model, hidden, targets, weights, uneven)

    def summary(self) -> str:
        return f"held-out loss {self.held_out_loss():.3f} nats at 2,048 tokens"

    @torch.no_grad()
    def right_answers(self, logs: int = 8, length: int = 1024) -> tuple[float, float, float]:
        """Of questions about logs never trained on: the share of answers right in every token, of those that have one
        and of those to be refused, and the share of right tokens.
        """
        whole: dict[bool, list[bool]] = {True: [], False: []}
        tokens: list[bool] = []
        refusal = self.tokenizer.token_to_id("\u0120not")
        for marked in marked_logs(lambda text: encode(self.tokenizer, text).tolist(), logs, length):
            padded = [*marked.ids, *[EOS] * (length - len(marked.ids))]  # of one length: each would compile anew
            ids = self.run.to_device(np.array([padded]))
            with self.run.autocast:
                best = self.model.logits(self.model(ids[:, :-1], positions_of(ids[:, :-1]))).argmax(-1)[0]
            hits = best == ids[0, 1:]
            for span in marked.answers:
                answer = hits[span.start - 1 : span.stop - 1].tolist()
                whole[refusal not in marked.ids[span]].append(all(answer))
                tokens += answer
        told, refused = (sum(hits) / max(1, len(hits)) for hits in (whole[True], whole[False]))
        return told, refused, sum(tokens) / len(tokens)

    @torch.no_grad()
    def held_out_loss(self, length: int = 2048, samples: int = 8) -> float:
        """Mean loss in nats a token on evenly spaced spans of the held-out text."""
        starts = np.linspace(0, len(self.held_out) - length, samples).astype(int)
        ids = np.stack([np.concatenate(([0], self.held_out[start : start + length])) for start in starts]).astype(
            np.int64
        )
        positions = torch.arange(length, device=self.run.device).expand(samples, -1)
        tokens = self.run.to_device(ids)
        with self.run.autocast:
            logits = self.model.logits(self.model(tokens[:, :-1], positions))
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()).item()


class FirstTraining(Predicting):
    """The smaller model, which reads books and facts in them."""

    def __init__(self, run: Run, tokenizer: Tokenizer, sampler: Sampler, held_out: np.ndarray):
        super().__init__(run, "first", FIRST, FIRST_PHASES, tokenizer, sampler)
        self.held_out = held_out
        if self.progress == Progress():
            plant_attention(self.model)


class TargetTraining(Predicting):
    """The long-context model, which begins as the smaller one with the circuit planted."""

    even = True  # norms divide by that size, planted codes and notes, too

    def __init__(self, run: Run, tokenizer: Tokenizer, sampler: Sampler, held_out: np.ndarray, first: Path):
        super().__init__(run, "target", TARGET, TARGET_PHASES, tokenizer, sampler)
        self.held_out = held_out
        hold(self.model, FIRST)
        self.usual = torch.from_numpy(sampler.batch((999, 0), 4, 512, Mix(0.0, 0.0, 0.0, 0.5), 0.0, 0.0).ids)
        if self.progress == Progress():
            begin = Decoder(FIRST)
            begin.load_hf_state(load_file(first / "model.safetensors"))
            prose = torch.from_numpy(sampler.prose(np.random.default_rng(sampler.seed), 60_000).astype(np.int64))
            recalling = torch.from_numpy(sampler.batch((998, 0), 8, 512, Mix(0.0, 0.5, 0.5), 0.0, 0.0).ids)
            planted = grown(self.model.shape, begin, tokenizer, self.usual, prose, recalling)
            self.model.load_state_dict(planted.state_dict())
            report(f"planted; {self.summary()}")
            export(self.model, tokenizer, run.out / "snapshots" / "target-planted")
        self.usual = self.usual.to(run.device)

    def settle(self) -> None:
        retune(self.model, FIRST, self.usual)

    def summary(self) -> str:
        told, refused, tokens = self.right_answers()
        return (
            f"{super().summary()}; answers at 1,024 tokens: {told:.2f} right, {refused:.2f} of the unanswerable "
            f"refused, {tokens:.3f} of their tokens right"
        )


class DraftTraining(Training):
    """The draft: imitates the target's distribution from what its streaming cache will show it.

    The target reads a whole sample; the draft reads windows of it, the first `SINKS` tokens and a stretch that
    follows them without a gap in its positions, as the streaming cache lays them out.
    """

    FIRST_COUNTED = 48  # in steady state the cache is full: the first rows of a window know less than they ever will

    def __init__(self, run: Run, tokenizer: Tokenizer, sampler: Sampler):
        super().__init__(run, "draft", DRAFT, DRAFT_PHASES, tokenizer, sampler)
        weights = load_file(run.out / "target" / "model.safetensors")
        self.target = Decoder(TARGET, run.compiled).to(run.device).requires_grad_(False)
        self.target.load_hf_state(weights)
        self.own: np.ndarray | None = None
        if self.progress == Progress():
            self._inherit_embedding()

    @torch.no_grad()
    def _inherit_embedding(self) -> None:
        """Starts from the directions in which the target's embeddings differ most: the best small copy of them."""
        theirs = self.target.embed_tokens.weight
        directions = torch.linalg.svd(theirs, full_matrices=False).Vh[: self.model.shape.width]
        self.model.embed_tokens.weight.copy_(theirs @ directions.T)

    def backward(self, phase: Phase, key: tuple[int, int]) -> float:
        ids = self._samples(phase, key)
        with torch.no_grad():
            wanted = self.target(ids, positions_of(ids))
        windows = window_indices(ids.shape[1]).to(ids.device)  # [windows, WINDOW]
        seen = ids[:, windows].flatten(0, 1)
        hidden = self.model(seen, positions_of(seen))
        weights = torch.ones(seen.shape, device=ids.device)
        weights[:, : self.FIRST_COUNTED] = 0.0
        return self.losses.imitate(
            self.model, hidden, self.target, wanted[:, windows].flatten(0, 1), weights, phase.agreement
        )

    def _samples(self, phase: Phase, key: tuple[int, int]) -> Tensor:
        ids = self.sampler.batch(key, phase.rows, phase.length, phase.mix, 0.0, 0.0).ids
        rows = round(phase.rows * phase.own)
        if rows:
            if self.own is None:
                self.own = load_or_write_own_samples(self.run, self.sampler, phase.length)
            rng = np.random.default_rng((*key, 1))
            ids[:rows] = self.own[rng.choice(len(self.own), rows, replace=False)]
        return self.run.to_device(ids)

    def summary(self) -> str:
        return f"overlap with the target at temperature 1: {self.held_in_overlap():.3f}"

    @torch.no_grad()
    def held_in_overlap(self, rows: int = 32) -> float:
        """Mean sum of min(target, draft) over fresh samples: the acceptance rate at temperature 1 to expect there."""
        batch = self.sampler.batch((len(self.phases), 0), rows, self.phases[-1].length, Mix(0.0, 0.0, 0.0), 0.0, 0.0)
        ids = self.run.to_device(batch.ids)
        windows = window_indices(ids.shape[1]).to(ids.device)
        seen = ids[:, windows].flatten(0, 1)
        with self.run.autocast:
            p = self.target.logits(self.target(ids, positions_of(ids)))[:, windows].flatten(0, 1).float().softmax(-1)
            q = self.model.logits(self.model(seen, positions_of(seen))).float().softmax(-1)
        return torch.minimum(p, q).sum(-1)[:, self.FIRST_COUNTED :].mean().item()


def positions_of(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)


def window_indices(length: int) -> Tensor:
    """Indices [windows, WINDOW] into a sample: its sinks, then the stretches that partition the rest.

    Raises:
        ValueError: the rest is not a multiple of what a window holds beside the sinks.
    """
    recent = WINDOW - SINKS
    if (length - SINKS) % recent:
        raise ValueError(f"a draft sample of {length} tokens is not {SINKS} + a multiple of {recent}")
    starts = range(SINKS, length, recent)
    return torch.stack([torch.cat((torch.arange(SINKS), torch.arange(s, s + recent))) for s in starts])


def load_or_write_own_samples(run: Run, sampler: Sampler, length: int) -> np.ndarray:
    """Texts [n, length] that the target continued from a third of book, at temperatures 1, 0.6 and 0."""
    path = run.out / "checkpoints" / "own-samples.npy"
    if path.exists():
        return np.load(path)
    from transformers import AutoModelForCausalLM  # slow to import, and only needed here

    model: Any = AutoModelForCausalLM.from_pretrained(run.out / "target", dtype=run.dtype)
    model.to(run.device)
    parts = []
    for index, temperature in enumerate(OWN_TEMPERATURES):
        torch.manual_seed(sampler.seed * 1000 + index)
        prompt = sampler.batch((1000, index), OWN_ROWS, length // 3, Mix(0.0, 0.0, 0.1, 0.4), 0.0, 0.0).ids
        how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        ids = run.to_device(prompt)
        new = length - ids.shape[1]
        out = model.generate(ids, attention_mask=torch.ones_like(ids), min_new_tokens=new, max_new_tokens=new, **how)
        parts.append(out.cpu().numpy())
        report(f"own samples: {index + 1} of {len(OWN_TEMPERATURES)} parts")
    own = np.concatenate(parts)
    save_atomically(path, lambda p: save_array(p, own))
    return own


if __name__ == "__main__":
    raise SystemExit(main())
