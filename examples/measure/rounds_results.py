"""Measures what rounds of speculation bring: lengths, early ends, drafts that are looked up, and drafting that stops.

    python examples/measure/rounds_results.py lengths drafts grid --prompt-file book.txt --store contexts

* `lengths`: over a slow link, at most 24 and at most 128 draft tokens, with and without early ends.
* `drafts`: no draft, a trained one, one that is looked up, and both, for a novel, source code and a table.
* `grid`: three tiers against plain decoding after the first 32 tokens, in pairs of runs that are written in turns, over
  contexts, batches, links, and a trained and a random draft: the mean ratio of the time between tokens and the upper
  end of its 95 % confidence interval.

The text is read once and kept in `--store`, so that a second start reads nothing. Results are written as they come.
"""

from __future__ import annotations

import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from report import as_text, make_parser, print_table, write_json
from safetensors.torch import load_file, save_file
from triforce.cli.terminal.streams import print_note
from triforce.offload import Engine, Request, Sampling
from triforce.offload.contexts.model import ContextRequest
from triforce.offload.contexts.store import ContextStore
from triforce.offload.limits import LIMITS
from triforce.tp.weights.registry import find_pair
from triforce.tp.weights.tokenizer import Tokenizer

FIRST = 32
"""Tokens of an answer in which lengths may still be found."""

AT_MOST = {24: replace(LIMITS, streamed_draft_tokens=(24,)), 128: LIMITS}
"""Limits by the draft tokens that they allow at most."""

LEAST_PAIRS = 5
CLEAR = 0.9
"""A cell of the grid ends after `LEAST_PAIRS` pairs where the upper end is below this ratio."""

LONGEST_ROUND = 129
"""Tokens that a round brings at most, by which an answer may be longer than was asked for."""

TURNS = 12
"""Parts in which each answer of a pair is written."""

SAVED = "rounds"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("parts", nargs="+", choices=("lengths", "drafts", "grid"))
    parser.add_argument("--prompt-file", type=Path, required=True)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--store", type=Path, help="where the text is kept that was read; default: for this start only")
    parser.add_argument("--repeat", type=int, default=3, help="of lengths and drafts; medians are printed")
    parser.add_argument("--new-tokens", type=int, default=192, help="of an answer in lengths and drafts")
    parser.add_argument("--temperatures", type=_numbers(float), default=[0.0, 0.6])
    parser.add_argument("--link-gbps", type=float, default=1.0)
    parser.add_argument("--lengths-contexts", type=_numbers(int), default=[32_768, 131_072])
    parser.add_argument("--drafts-context", type=int, default=8192)
    parser.add_argument("--grid-contexts", type=_numbers(int), default=[1024, 4096, 16_384, 65_536])
    parser.add_argument("--batches", type=_numbers(int), default=[1, 4])
    parser.add_argument("--links", default="none,link", help="of drafts and grid: which of none and link (--link-gbps)")
    parser.add_argument("--drafts", default="trained,random", help="which of trained and random")
    parser.add_argument("--pairs", type=int, default=30)
    given = parser.parse_args()
    tokenizer = Tokenizer.load(find_pair(given.model)[0])
    text = tokenizer.encode(given.prompt_file.read_text(encoding="utf-8"), True)
    found: dict[str, Any] = {}

    def keep(part: str, row: dict[str, Any]) -> None:
        found.setdefault(part, []).append(row)
        write_json(given, found, whole=False)

    with nullcontext(given.store) if given.store else tempfile.TemporaryDirectory() as folder:
        store = ContextStore(Path(folder))
        wanted = {"lengths": given.lengths_contexts, "grid": given.grid_contexts, "drafts": []}
        longest = max((n for part in given.parts for n in wanted[part]), default=0)
        if longest:
            read_once(given.model, text[: longest - given.new_tokens], store)
        for part in given.parts:
            {"lengths": lengths, "drafts": drafts, "grid": grid}[part](given, text, tokenizer, store, keep)
    write_json(given, found)


def _numbers(kind: type) -> Callable[[str], list[Any]]:
    return lambda value: [kind(part) for part in value.split(",")]


def read_once(model: str, text: list[int], store: ContextStore) -> None:
    engine = Engine.load(model, device="cpu", draft="none", tiers=1, store=store)
    print_note(f"reading {len(text):,} tokens, unless they are saved")
    engine.read(text, SAVED)


def run(engine: Engine, prompt: list[int], new_tokens: int, temperature: float, tiers: int = 3) -> dict[str, Any]:
    """An answer; what is kept of its statistics."""
    generation = engine.stream(
        prompt, Sampling(temperature, 0.9), new_tokens, ignore_eos=True, tiers=tiers, contexts=ContextRequest(SAVED)
    )
    for _ in generation:
        pass
    stats = generation.stats()
    names = ("acceptance", "rounds", "plain_rounds", "settings", "time_s", "reused_tokens")
    return {"tbt_ms": stats["tbt_ms"]["mean"], **{name: stats[name] for name in names}}


def middle(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The run with the median time between tokens."""
    return sorted(runs, key=lambda one: one["tbt_ms"])[len(runs) // 2]


def lengths(given: Any, text: list[int], tokenizer: Tokenizer, store: ContextStore, keep: Callable) -> None:
    engine = Engine.load(given.model, device="cpu", resident=0.0, link_gbps=given.link_gbps, store=store)
    for context, temperature in product(given.lengths_contexts, given.temperatures):
        prompt = text[: context - given.new_tokens]
        run(engine, prompt, 8, temperature)
        kinds = list(product(AT_MOST, ("off", "auto")))
        runs: dict[tuple[int, str], list[dict[str, Any]]] = {kind: [] for kind in kinds}
        for repeat in range(given.repeat):
            for most, early in kinds if repeat % 2 else kinds[::-1]:
                engine.settings = replace(engine.settings, early_end=early)
                engine.system = replace(engine.system, limits=AT_MOST[most])
                runs[most, early].append(run(engine, prompt, given.new_tokens, temperature))
        rows = [
            {"context": context, "temperature": temperature, "most": most, "early_end": early, "runs": several}
            for (most, early), several in runs.items()
        ]
        for row in rows:
            keep("lengths", row)
        show(given, f"lengths, {context:,} tokens, temperature {temperature}", rows, "most", "early_end")


def show(given: Any, title: str, rows: list[dict[str, Any]], *names: str) -> None:
    """Prints a row for the runs of one kind, which `names` tell apart."""
    shown = []
    for row in rows:
        one = middle(row["runs"])
        accepted, settings = one["acceptance"], one["settings"]
        shares = accepted["draft_per_token"], accepted["retrieval_per_token"]
        shown.append(
            {name: row[name] for name in names}
            | {
                "TBT, ms": one["tbt_ms"],
                "of all runs": " ".join(f"{other['tbt_ms']:.2f}" for other in row["runs"]),
                "drafted": accepted["draft_tokens_per_round"],
                "a round": accepted["tokens_per_round"],
                "accepted": " / ".join(map(as_text, shares)),
                "lengths": f"{settings['draft_length']} / {settings['block_length']}",
            }
        )
    print_table(given, title, shown, notes=[MEANING])


MEANING = (
    "The figures are those of the run with the median TBT. drafted, a round: tokens that a round tests, and that it "
    "brings. accepted: the draft's tokens / the retrieval cache's. lengths: draft / block."
)


def drafts(given: Any, text: list[int], tokenizer: Tokenizer, store: ContextStore, keep: Callable) -> None:
    size = given.drafts_context - given.new_tokens
    texts = {"novel": text[:size], "code": code(tokenizer, size), "table": table(tokenizer, size)}
    kinds = {"none": "none", "trained": None, "lookup": "lookup", "both": f"{given.model},lookup"}
    for link in given.links.split(","):
        options = _options(given, link)
        engines = {
            name: Engine.load(given.model, kind, device="cpu", store=store, **options) for name, kind in kinds.items()
        }
        for kind, temperature in [(kind, temperature) for kind in texts for temperature in given.temperatures]:
            runs: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
            for engine in engines.values():
                run(engine, texts[kind], 8, temperature)
            for repeat in range(given.repeat):
                for name in list(engines) if repeat % 2 else reversed(engines):
                    runs[name].append(run(engines[name], texts[kind], given.new_tokens, temperature))
            rows = [
                {"link": link, "text": kind, "temperature": temperature, "draft": name, "runs": several}
                for name, several in runs.items()
            ]
            for row in rows:
                keep("drafts", row)
            show(given, f"drafts, link {link}, {kind}, temperature {temperature}", rows, "draft")


def _options(given: Any, link: str) -> dict[str, Any]:
    """What an engine is loaded with for one of `--links`."""
    return {"resident": 0.0, "link_gbps": given.link_gbps} if link == "link" else {}


def code(tokenizer: Tokenizer, size: int) -> list[int]:
    """Source code of this project, and a question that quotes one of its functions, with the quotation begun again."""
    folder = Path(__file__).resolve().parents[2] / "offload" / "speculation"
    source = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py")))
    start = source.index("def expected_tokens(")
    function = source[start : source.index("\n\n\n", start)]
    question = f"\n\nWhat does this function do?\n\n{function}\n\nThe function is:\n\ndef expected_tokens("
    asked = tokenizer.encode(question, False)
    return [*tokenizer.encode(source, True)[: size - len(asked)], *asked]


def table(tokenizer: Tokenizer, size: int) -> list[int]:
    """A table with a row a line, and its first rows in another form."""
    names = ["Ada", "Bernard", "Clara", "Daniel", "Emma", "Frank", "Grace", "Henry"]
    rows = [
        (f"{names[i % 8]} {names[i // 8 % 8]}", str(1800 + i * 37 % 200), f"{i * 7919 % 1000} pounds")
        for i in range(600)
    ]
    begun = "\n".join("; ".join(row) for row in rows[:4])
    asked = tokenizer.encode(f"\n\nThe same table with semicolons:\n\n{begun}\n", False)
    lines = tokenizer.encode("\n".join(" | ".join(row) for row in rows), True)
    return [*lines[: size - len(asked)], *asked]


def grid(given: Any, text: list[int], tokenizer: Tokenizer, store: ContextStore, keep: Callable) -> None:
    questions = [
        tokenizer.encode(f"\n\nQuestion {i}: what did they say in chapter {i}?", False)
        for i in range(max(given.batches))
    ]
    with tempfile.TemporaryDirectory() as folder:
        random = random_draft(Path(folder))
        for link, draft in product(given.links.split(","), given.drafts.split(",")):
            slow = link == "link"
            small = None if draft == "trained" else random
            engines = {
                tiers: Engine.load(given.model, small, device="cpu", store=store, **_options(given, link))
                for tiers in (1, 3)
            }
            rows = []
            for context, batch in product(given.grid_contexts, given.batches):
                room = given.new_tokens + max(map(len, questions))
                prompts = [[*text[: context - room], *question] for question in questions[:batch]]
                row = cell(engines, prompts, given.pairs, 32 if slow else 96, slow)
                row |= {"context": context, "batch": batch, "link": link, "draft": draft}
                rows.append(row | {"pairs": len(row["ratios"]), "lengths": str(row["lengths"])})
                keep("grid", row)
                print_note(f"{context:,} tokens, batch {batch}, link {link}, {draft} draft: {row['ratio']:.3f}")
            columns = ("context", "batch", "ratio", "upper", "pairs", "three_ms", "plain_ms", "lengths")
            print_table(given, f"three tiers ÷ plain decoding, link {link}, {draft} draft", rows, columns)


def cell(engines: dict[int, Engine], prompts: list[list[int]], pairs: int, tokens: int, slow: bool) -> dict[str, Any]:
    """Three tiers against plain decoding, each on an engine of its own. The two answers of a pair are written in turns
    of a few tokens, so that a machine that is busy for a while is so for both.

    Args: `slow`: whether plain decoding, whose tokens all take as long, is measured on fewer of them.
    """
    first, wanted = {1: 2 if slow else FIRST, 3: FIRST}, {1: 16 if slow else tokens, 3: tokens}
    ratios: list[float] = []
    times: dict[int, list[float]] = {1: [], 3: []}
    upper, lengths = math.inf, {}
    while len(ratios) < pairs and not (len(ratios) >= LEAST_PAIRS and upper < CLEAR):
        answers = {tiers: Answer(engines[tiers], prompts, tiers, first[tiers], wanted[tiers]) for tiers in engines}
        order = (1, 3) if len(ratios) % 2 else (3, 1)
        while all(answers[tiers].go_on(max(1, wanted[tiers] // TURNS)) for tiers in order):
            pass
        lengths = answers[3].lengths
        for tiers, answer in answers.items():
            times[tiers].append(answer.seconds_per_token)
            answer.close()
        ratios.append(times[3][-1] / times[1][-1])
        upper = upper_end(ratios)
    return {
        "ratio": math.exp(statistics.mean(map(math.log, ratios))),
        "upper": upper,
        "ratios": ratios,
        "three_ms": 1e3 * statistics.median(times[3]),
        "plain_ms": 1e3 * statistics.median(times[1]),
        "lengths": lengths,
    }


class Answer:
    """An answer to each of several prompts, decoded together, of which a part is timed."""

    def __init__(self, engine: Engine, prompts: list[list[int]], tiers: int, first: int, tokens: int) -> None:
        """Args: behind the first `first` tokens of every sequence `tokens` are timed."""
        most = 2 * (first + tokens + LONGEST_ROUND)  # of the sequence that is ahead of the others
        requests = [Request(prompt, Sampling(0.6, 0.9), most, ignore_eos=True) for prompt in prompts]
        self._batch = engine.batch(requests, tiers=tiers, contexts=ContextRequest(SAVED))
        self._written, self._seconds, self._end, self._most = [0] * len(prompts), 0.0, first, most
        self.go_on(first)
        self._first, self._seconds, self._end = sum(self._written), 0.0, min(self._written) + tokens

    def go_on(self, tokens: int) -> bool:
        """Writes so many further tokens of each sequence; whether there are more to write."""
        goal = min(min(self._written) + tokens, self._end)
        while min(self._written) < goal and max(self._written) < self._most:
            began = time.perf_counter()
            index, event = next(self._batch)
            self._seconds += time.perf_counter() - began
            self._written[index] += len(event.tokens)
        return min(self._written) < self._end and max(self._written) < self._most

    @property
    def seconds_per_token(self) -> float:
        """Of a sequence, on average."""
        return self._seconds * len(self._written) / (sum(self._written) - self._first)

    @property
    def lengths(self) -> dict[str, int]:
        return self._batch.lengths

    def close(self) -> None:
        self._batch.close()


def upper_end(ratios: Sequence[float]) -> float:
    """Of the 95 % confidence interval of the mean logarithm, by Student's t."""
    if len(ratios) < 2:
        return math.inf
    logs, free = [math.log(ratio) for ratio in ratios], len(ratios) - 1
    quantile = 1.96 + 2.4 / free + 3.2 / free**2
    return math.exp(statistics.mean(logs) + quantile * statistics.stdev(logs) / math.sqrt(len(logs)))


def random_draft(folder: Path) -> Path:
    """A draft like the embedded one, with random weights of the same size."""
    _, draft = find_pair("embedded")
    assert draft is not None
    shutil.copytree(draft, folder / "draft")
    weights = load_file(draft / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, tensor in weights.items():
        if tensor.dim() > 1:
            spread = tensor.float().std()
            weights[name] = (torch.randn(tensor.shape, generator=generator) * spread).to(tensor.dtype)
    save_file(weights, folder / "draft" / "model.safetensors", metadata={"format": "pt"})
    return folder / "draft"


if __name__ == "__main__":
    main()
