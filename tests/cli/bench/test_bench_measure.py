"""A bench from within: the order of its runs, what it counts of them, and the time that it says is left."""

import io

import pytest
from rich.console import Console
from tiny import greedy_oracle, random_tokens
from transformers import LlamaForCausalLM
from triforce.cli.bench.measure import ContextRuns, Run, Step, measure, steps
from triforce.cli.bench.progress import Display, Forecast
from triforce.cli.bench.report import as_document, notes
from triforce.offload import Engine, Sampling

CONTEXTS, NEW_TOKENS = (200, 400), 12


def test_every_tier_writes_what_transformers_writes_from_one_prefill(pair):
    model = LlamaForCausalLM.from_pretrained(pair[0])
    engine = Engine.load(*pair, device="cpu", dtype="float32", budget=64)
    tokens, found, prefilled = random_tokens(500, 320, seed=4), [], []
    slices = engine.target.slices

    def counted(token_ids, cache, **options):
        if options.get("on_progress"):
            prefilled.append(len(token_ids))
        return slices(token_ids, cache, **options)

    engine.target.slices = counted
    order = steps(CONTEXTS, (1, 2, 3), 2)
    measure(
        engine, tokens, order, Sampling(temperature=0.0), NEW_TOKENS,
        results=found, observer=Ignored(), advance=lambda batch: next(batch, None),
    )  # fmt: skip
    assert [at.context for at in found] == list(CONTEXTS)
    for at in found:
        prompt = tokens[: at.context - NEW_TOKENS]
        want = greedy_oracle(model, prompt, NEW_TOKENS)
        assert at.warm_up.stats["prompt_tokens"] == len(prompt)
        assert [run.step.tiers for run in at.runs] == [1, 2, 3, 2, 3, 1]
        assert [run.token_ids for run in (at.warm_up, *at.runs)] == [want] * 7
        assert [run.stats["settings"]["tiers"] for run in at.runs] == [1, 2, 3, 2, 3, 1]
        assert at.warm_up.stats["reused_tokens"] == 0 < at.warm_up.stats["prefill_s"]
    whole = [context - NEW_TOKENS for context in CONTEXTS]
    assert prefilled == [whole[0], *[8] * 6, whole[1], *[8] * 6], "each prompt is read whole once"


class Ignored:
    def begin(self, step):
        pass

    def prefill(self, share):
        pass

    def round(self, tokens):
        pass

    def end(self, run):
        pass


def test_runs_take_turns_and_each_is_first_in_its_turn():
    order = [(step.context, step.repeat, step.tiers) for step in steps((8, 16), (1, 3), 2)]
    assert order == [
        (8, 0, 3), (8, 1, 1), (8, 1, 3), (8, 2, 3), (8, 2, 1),
        (16, 0, 3), (16, 1, 1), (16, 1, 3), (16, 2, 3), (16, 2, 1),
    ]  # fmt: skip


def test_passes_are_counted_as_they_happen(pair, monkeypatch):
    engine = Engine.load(*pair, device="cpu", dtype="float32", budget=64, draft_length=3, block_length=5)
    calls = {"retrieval": 0, "draft": 0}
    run = engine.stream(random_tokens(300, 320), Sampling(temperature=0.0), 30, ignore_eos=True)
    next(run)
    for tier in run.batch.tiers[1:]:
        passes = run.sequence.active.passes[tier.name]
        forward = passes.forward

        def counted(*arguments, forward=forward, name=tier.name):
            calls[name] += 1
            return forward(*arguments)

        monkeypatch.setattr(passes, "forward", counted)
    for _ in run:
        pass
    assert Run.of(Step(330, 3, 1), run.batch).passes == {"verify": run.statistics.rounds, **calls}


def test_a_terminal_shows_what_runs_and_the_time_left_on_one_line():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    order = steps((100,), (1, 3), 2)
    with Display(console, order, 10) as display:
        for step in order:
            display.begin(step)
            display.prefill(0.5)
            display.round(5)
            display.end(Run(step, [], {"decode_s": 30.0, "prefill_s": 20.0, "tbt_ms": {"mean": 1.0}}, {}, {}))
    text = screen.getvalue()
    for words in ("100 tokens: prefill", "100 tokens: 1 tier, run 1 of 2", "3 tiers, run 2 of 2", "about 2 min left"):
        assert words in text
    assert text.count("\n") == 1, "one line, drawn over and over"


def test_a_forecast_knows_nothing_at_first_and_is_exact_about_what_repeats():
    order = steps((100, 400), (1, 3), 2)
    forecast = Forecast(order, 10)
    assert forecast.left_s(0) is None
    forecast.note(order[0], decode_s=1.0, prefill_s=2.0)
    forecast.note(Step(100, 1, 1), decode_s=3.0, prefill_s=0.0)
    rest_here = forecast.left_s(2)
    assert rest_here is not None
    # Left at 100 tokens: three tiers twice, one tier once. At 400: a prompt four times as long, and everything else.
    prefill, three, one = 2.0 * 4**1.5, 4 * 1.0, 4 * 3.0
    assert rest_here == pytest.approx((2 * 1.0 + 3.0) + prefill + 3 * three + 2 * one)
    assert forecast.left_s(len(order)) == 0


def test_tokens_that_differ_from_plain_decoding_are_reported():
    def run(tiers, token_ids):
        accepted = dict.fromkeys(("draft_per_token", "retrieval_per_token", "tokens_per_round"), 1.0)
        stats = dict.fromkeys(
            ("new_tokens", "seed", "tokens_per_s", "rounds", "time_s", "link", "kv_read", "memory", "reused_tokens"), 0
        )
        stats |= {"tbt_ms": {"mean": 1.0}, "acceptance": accepted, "warnings": [], "settings": {"resident_bytes": 0}}
        stats |= {"prompt_tokens": 188, "prefill_s": 1.0}
        return Run(Step(200, tiers, 1), token_ids, stats, {"verify": 0}, {})

    at = ContextRuns(200, run(3, [1, 2, 3]), [run(1, [1, 2, 3]), run(3, [1, 2, 4])])
    head = {"sampling": {"temperature": 0.0}, "dtype": "float32", "batches": None, "measured_bandwidth": {}}
    head |= {"prompt": {"name": "--prompt", "text_tokens": 200, "repeated": False}}
    document = as_document(head, [at], False)
    assert [row["first_difference"] for row in document["contexts"][0]["tiers"]] == [None, 2]
    note = "Greedy tokens differ from plain decoding (an error) at 200 (from token 2 on, 3 tiers)."
    assert note in notes(document)
