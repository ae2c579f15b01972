"""Measures what decoding several sequences together brings: many questions about one text, and texts of their own.

    python examples/measure/batch_results.py --prompt-file book.txt --tokens 32768 --questions 8

Every figure is a median over repeats that take turns; ratios are within one turn.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from report import make_parser, print_table, write_json
from triforce.offload import Engine, Request, Sampling
from triforce.tp.weights.registry import find_pair
from triforce.tp.weights.tokenizer import Tokenizer

QUESTION = "\n\nQuestion {}: what did they say to each other in chapter {}, and why?"
GREEDY = Sampling(temperature=0.0)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--prompt-file", type=Path, required=True)
    parser.add_argument("--more-files", type=Path, nargs="*", default=[], help="texts of sequences that share nothing")
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--own-tokens", type=int, default=16_384, help="of each text that is not shared")
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--link-gbps", type=float, default=1.0)
    parser.add_argument("--parts", default="memory,link,own", help="which of memory, link and own to measure")
    given = parser.parse_args()
    parts, found = given.parts.split(","), dict[str, Any]()
    tokenizer = Tokenizer.load(find_pair(given.model)[0])
    text = tokenizer.encode(given.prompt_file.read_text(encoding="utf-8"), True)[: given.tokens]
    prompts = [[*text, *tokenizer.encode(QUESTION.format(i, i + 3), False)] for i in range(1, given.questions + 1)]
    for part, options in (("memory", {}), ("link", {"link_gbps": given.link_gbps, "resident": 0.0})):
        if part in parts:
            engine = Engine.load(given.model, device="cpu", **options)
            found[part] = questions(engine, prompts, given.new_tokens, given.repeat)
            show(given, part, found[part])
            del engine
    if "own" in parts and given.more_files:
        texts = [
            tokenizer.encode(path.read_text(encoding="utf-8"), True)[: given.own_tokens] for path in given.more_files
        ]
        found["own"] = own_texts(Engine.load(given.model, device="cpu"), texts, given.new_tokens, given.repeat)
        show(given, "own", found["own"])
    write_json(given, found)


def run(engine: Engine, prompts: list[list[int]], new_tokens: int, tiers: int = 3) -> dict[str, Any]:
    """A batch of these prompts; what is kept of the statistics."""
    requests = [Request(prompt, GREEDY, new_tokens, ignore_eos=True) for prompt in prompts]
    batch = engine.batch(requests, tiers=tiers)
    verifications = []
    for index, event in batch:
        if index == 0 and event.index:
            verifications.append(event.seconds)
    stats = batch.stats()
    one = stats["sequences"][0]
    return {
        "sequences": len(prompts),
        "tiers": tiers,
        "tokens_per_s": stats["tokens_per_s"],
        "tbt_ms": statistics.mean(s["tbt_ms"]["mean"] for s in stats["sequences"]),
        "prefill_s": stats["prefill_s"],
        "rounds": stats["rounds"],
        "bytes_per_verification": one["link"]["bytes_streamed"] / max(1, one["rounds"]),
        "time_s": one["time_s"],
        "acceptance": one["acceptance"],
        "settings": one["settings"],
        "token_ids": [s["token_ids"] for s in stats["sequences"]],
    }


def questions(engine: Engine, prompts: list[list[int]], new_tokens: int, repeat: int) -> dict[str, Any]:
    """One question against all of them, in turns."""
    run(engine, prompts[:1], 8)  # the text is read, and kept
    turns = [[run(engine, prompts[:n], new_tokens) for n in (1, len(prompts))] for _ in range(repeat)]
    return summary(turns, [one["token_ids"][0] == many["token_ids"][0] for one, many in turns])


def own_texts(engine: Engine, texts: list[list[int]], new_tokens: int, repeat: int) -> dict[str, Any]:
    """Plain decoding against three tiers, in turns, of texts that share nothing. They are prefilled before, and kept if
    there is memory."""
    run(engine, texts, 8)
    turns = [[run(engine, texts, new_tokens, tiers) for tiers in (1, 3)] for _ in range(repeat)]
    return summary(turns, [one["token_ids"] == three["token_ids"] for one, three in turns])


def summary(turns: list[list[dict[str, Any]]], same: list[bool]) -> dict[str, Any]:
    """Medians of both, and of the ratio of their tokens per second. `same` says of each turn whether both wrote the
    same tokens, as they must where `settings.exact` is true."""
    middle = sorted(turns, key=lambda turn: turn[1]["tokens_per_s"])[len(turns) // 2]
    ratio = statistics.median(b["tokens_per_s"] / a["tokens_per_s"] for a, b in turns)
    for side in middle:
        del side["token_ids"]
    return {"ratio": ratio, "same_tokens": same, "first": middle[0], "second": middle[1]}


def show(given: Any, part: str, found: dict[str, Any]) -> None:
    rows = [
        {
            "sequences": side["sequences"],
            "tiers": side["tiers"],
            "tokens/s": side["tokens_per_s"],
            "TBT, ms": side["tbt_ms"],
            "MB a verification": side["bytes_per_verification"] / 1e6,
            "lengths": f"{side['settings']['draft_length']}/{side['settings']['block_length']}",
            "seconds": ", ".join(f"{of} {spent:.1f}" for of, spent in side["time_s"].items()),
        }
        for side in (found["first"], found["second"])
    ]
    ratio = f"{found['ratio']:.2f} times the tokens per second (median of turns)"
    print_table(given, f"{part}: {ratio}; the same tokens: {found['same_tokens']}", rows)


if __name__ == "__main__":
    main()
