"""Measures answers in a form: how many are complete and of their schemas, and what following a grammar costs.

    python examples/measure/form_results.py --schemas 500

Random bounded schemas at temperature 1, eight answers at a time; the time of a mask over the answers that came; and
rounds with a grammar against rounds without, over the same tokens, in turns.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections import Counter
from typing import Any

import jsonschema
from random_schemas import random_schema
from report import figure_rows, make_parser, print_table, write_json
from triforce.cli.terminal.streams import print_note
from triforce.offload import Engine, Grammar, Request, Sampling
from triforce.offload.speculation.grammar import GrammarError
from triforce.tp.weights.registry import find_pair
from triforce.tp.weights.tokenizer import Tokenizer

ASK = "Question: Describe the harbour as JSON.\nAnswer:"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first schema")
    parser.add_argument("--new-tokens", type=int, default=400)
    parser.add_argument("--together", type=int, default=8, help="answers that are written at a time")
    parser.add_argument("--tokens", type=int, default=8192, help="of the text before the rounds that are timed")
    parser.add_argument("--repeat", type=int, default=9)
    given = parser.parse_args()
    tokenizer = Tokenizer.load(find_pair(given.model)[0])
    engine = Engine.load(given.model, device="cpu")
    answers, found = campaign(engine, tokenizer, given)
    found["us_a_mask"] = time_of_masks(engine, answers)
    print_table(given, f"{given.schemas} schemas", figure_rows(found))
    found["rounds"] = [timed(engine, tokenizer, answers, given, tiers) for tiers in (1, 3)]
    print_table(given, f"rounds with a grammar and without, after {given.tokens:,} tokens", found["rounds"])
    write_json(given, found)


Answers = list[tuple[Grammar, list[int]]]
"""Grammars, and the tokens of complete answers without their end."""


def campaign(engine: Engine, tokenizer: Tokenizer, given: Any) -> tuple[Answers, dict[str, Any]]:
    """Complete answers with their grammars, and what came of all."""
    counts, began = Counter[str](), time.perf_counter()
    answers: Answers = []
    prompt, ends = tokenizer.encode(ASK, True), engine.target.config.eos_token_ids
    requests: list[tuple[Grammar, Request]] = []
    for seed in range(given.first, given.first + given.schemas):
        grammar = Grammar("json_schema", json.dumps(random_schema(random.Random(seed))))
        try:
            grammar.check()
        except GrammarError as error:
            counts["refused"] += 1
            print_note(f"schema {seed}: {error}")
            continue
        requests.append((grammar, Request(prompt, Sampling(1.0, 1.0, seed=seed), given.new_tokens, grammar=grammar)))
    for start in range(0, len(requests), given.together):
        some = requests[start : start + given.together]
        batch = engine.batch([request for _, request in some])
        for _ in batch:
            pass
        for (grammar, _), one in zip(some, batch.stats()["sequences"], strict=True):
            counts[one["finish_reason"]] += 1
            if one["finish_reason"] == "eos":
                tokens = [token for token in one["token_ids"] if token not in ends]
                jsonschema.validate(json.loads(tokenizer.decode(tokens)), json.loads(grammar.source))
                answers.append((grammar, tokens))
    return answers, {**counts, "valid": len(answers), "seconds": time.perf_counter() - began}


def time_of_masks(engine: Engine, answers: Answers) -> float:
    """Microseconds that it takes to follow a token and say what may come next, on average."""
    assert engine.grammars
    spent, masks = 0.0, 0
    for grammar, tokens in answers:
        matcher = engine.grammars.matcher(grammar, 0)
        for end in range(len(tokens) + 1):
            began = time.perf_counter()
            matcher.allowed(tokens[:end], [])
            spent += time.perf_counter() - began
        masks += len(tokens) + 1
    return 1e6 * spent / masks


def timed(engine: Engine, tokenizer: Tokenizer, answers: Answers, given: Any, tiers: int) -> dict[str, Any]:
    """Milliseconds of a round over a long text, with a grammar and without, in turns: of plain decoding over the tokens
    of an answer to a schema, of all tiers over the greedy text, which a grammar of any text leaves as it is."""
    text = tokenizer.encode("The Ardent came in with coal. " * given.tokens, True)[: given.tokens]
    if tiers == 1:
        grammar, tokens = max(answers, key=lambda answer: len(answer[1]))
    else:
        grammar, tokens = Grammar("regex", r"(?s:.*)"), []
    sides: dict[str, list[float]] = {"without": [], "with": []}
    written: set[tuple[int, ...]] = set()
    for _ in range(given.repeat):
        for side, form in (("without", None), ("with", grammar)):
            run = engine.stream(text, Sampling(0.0), len(tokens) or 128, ignore_eos=False, tiers=tiers, grammar=form)
            spent = []
            for index, event in enumerate(run):
                spent.append(event.seconds)
                if tokens:
                    run.replace_last(tokens[index])
            written.add(tuple(tokens or run.statistics.token_ids))
            sides[side].append(1e3 * statistics.mean(spent[1:]))
    ratios = [with_it / without for with_it, without in zip(sides["with"], sides["without"], strict=True)]
    medians = {f"{side}_ms": statistics.median(values) for side, values in sides.items()}
    return {"tiers": tiers, **medians, "ratio": statistics.median(ratios), "same_tokens": len(written) == 1}


if __name__ == "__main__":
    main()
