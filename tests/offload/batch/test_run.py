"""A run that lasts as long as requests come: each text is the one it has alone, and of what has ended nothing stays."""

import gc
import random
from collections import deque
from typing import Any

import pytest
import torch
from tiny import random_tokens
from triforce.offload import ContextRequest, Ended, Engine, Progress, Request, Sampling, Tokens

GREEDY = Sampling(temperature=0.0)
BOOK = random_tokens(700, seed=3)


class Client:
    """Sends requests to a run at random times, and ends some of its sequences."""

    def __init__(self, chance, requests):
        self.chance, self.waiting = chance, deque(requests)
        self.texts, self.ended, self.reused = {}, {}, {}
        self.most_live = 0

    def source(self, waits):
        if self.waiting and (waits or self.chance.random() < 0.4):
            return self.waiting.popleft()
        return None

    def follow(self, run, cancels=0.0, on_event=lambda event: None):
        """The errors of those that failed."""
        for event in run:
            tag = event.sequence.tag
            assert tag not in self.ended, "nothing follows the end"
            if isinstance(event, Tokens):
                self.texts.setdefault(tag, []).extend(event.round.tokens)
            elif isinstance(event, Ended):
                self.ended[tag] = event.sequence.error
                self.reused[tag] = event.sequence.statistics.reused_tokens
            else:
                assert isinstance(event, Progress) and 0 <= event.sequence.read_share <= 1
            if self.chance.random() < cancels:
                run.end(event.sequence)
            self.most_live = max(self.most_live, len(run.live))
            on_event(event)
        return {tag: error for tag, error in self.ended.items() if error}


def requests_of(chance, count):
    """Some begin alike, some go on from what others were asked, some are impossible."""
    made = []
    for tag in range(count):
        base = chance.choice([[], BOOK, BOOK[:300], *(list(one.prompt_ids) for one in made[-3:])])
        prompt = base[: chance.choice([len(base), 200])] + random_tokens(chance.randint(1, 90), seed=1000 + tag)
        sampling = chance.choice([GREEDY, Sampling(temperature=0.8, seed=tag)])
        made.append(Request(prompt, sampling, chance.randint(1, 20), ignore_eos=True, tag=tag))
        if chance.random() < 0.05:
            made[-1] = Request([10_000], GREEDY, 4, tag=tag)
    return made


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.slow(keep=3)
def test_each_text_is_the_one_it_has_alone_whatever_comes_and_goes(models, seed):
    chance = random.Random(seed)
    settings = {"tiers": chance.choice([1, 2, 3]), "resident": chance.choice([None, 0.0, 1e-4])}
    engine = models.engine("llama", **settings)
    requests = requests_of(chance, 14)
    client, cancels = Client(chance, requests), chance.choice([0.0, 0.05])
    errors = client.follow(engine.run(client.source, max_sequences=chance.choice([1, 3, 8])), cancels)
    assert set(client.ended) == set(range(14))
    for request in requests:
        impossible = 10_000 in request.prompt_ids
        assert (request.tag in errors) == impossible
        if impossible:
            assert "token 10000" in errors[request.tag] and request.tag not in client.texts
            continue
        found = client.texts.get(request.tag, [])
        want = models.engine("llama", **settings).generate(
            request.prompt_ids, request.sampling, request.max_new_tokens, ignore_eos=True
        )
        assert found == want.token_ids[: len(found)]
        assert len(found) == request.max_new_tokens or cancels


def test_a_next_turn_goes_on_from_kept_keys_and_values_while_others_run(models):
    engine = models.engine("llama", room=200)
    first = Request(BOOK, GREEDY, 8, ignore_eos=True, tag="first")
    other = Request(random_tokens(90, seed=5), GREEDY, 60, ignore_eos=True, tag="other")
    client = Client(random.Random(0), [first])

    def turn(event):
        if isinstance(event, Tokens) and event.sequence.tag == "first" and event.round.index == 0:
            client.waiting.append(other)
        if isinstance(event, Ended) and event.sequence.tag == "first":
            prompt = BOOK + client.texts["first"] + [7, 8, 9] * 8
            client.waiting.append(Request(prompt, GREEDY, 5, ignore_eos=True, tag="next"))

    run = engine.run(client.source)
    assert not client.follow(run, on_event=turn)
    assert list(client.ended) == ["first", "next", "other"], "it did not wait for the other one"
    assert client.reused["next"] >= len(BOOK)
    alone = models.engine("llama").generate(BOOK + client.texts["first"] + [7, 8, 9] * 8, GREEDY, 5, ignore_eos=True)
    assert client.texts["next"] == alone.token_ids


def test_what_was_answered_last_stays_for_the_next_turn(models):
    """Not what was answered first: whoever talks goes on from what was said."""
    engine = models.engine("llama", room=200)
    prompts = {"a": BOOK, "b": random_tokens(400, seed=8)}
    requests = [Request(prompt, GREEDY, 4, ignore_eos=True, tag=tag) for tag, prompt in prompts.items()]
    client = Client(random.Random(1), requests)

    def turn(event):
        if isinstance(event, Ended) and event.sequence.tag == "b":
            prompt = prompts["b"] + client.texts["b"] + [5] * 30
            client.waiting.append(Request(prompt, GREEDY, 4, ignore_eos=True, tag="b again"))

    client.follow(engine.run(client.source), on_event=turn)
    assert client.reused["b again"] >= len(prompts["b"])


def test_an_answer_ends_with_the_round_after_which_its_check_says_so(models):
    seen = []

    def stops(tokens):
        seen.extend(tokens)
        return len(seen) >= 5

    request = Request(BOOK, GREEDY, 50, ignore_eos=True, stops=stops, tag=0)
    client = Client(random.Random(0), [request])
    assert not client.follow(models.engine("llama").run(client.source))
    assert client.texts[0] == seen and 5 <= len(seen) < 50


def test_what_is_saved_meanwhile_is_found(models, tmp_path, monkeypatch):
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path))
    save, find = ContextRequest(save="book", required=True), ContextRequest(name="book")
    saving = Request(BOOK, GREEDY, 1, contexts=save, tag="save")
    client = Client(random.Random(0), [saving, Request([4] * 300, GREEDY, 2, ignore_eos=True, tag="between")])

    def turn(event):
        if isinstance(event, Ended) and event.sequence.tag == "between":
            client.waiting.append(Request([*BOOK, 5, 6], GREEDY, 3, ignore_eos=True, contexts=find, tag="find"))
            client.waiting.append(Request([9], GREEDY, 3, contexts=ContextRequest(name="none"), tag="missing"))

    engine = Engine.load(models["llama"][0], device="cpu", dtype="float32", tiers=1)
    errors = client.follow(engine.run(client.source), on_event=turn)
    assert client.reused["find"] > 500 and list(errors) == ["missing"]


def test_nothing_is_kept_of_what_has_ended(models):
    engine, prompt = models.engine("llama"), random_tokens(30, seed=1)
    want = engine.generate(prompt, GREEDY, 2, ignore_eos=True).token_ids
    counts = []
    requests = [Request(prompt, GREEDY, 2, ignore_eos=True, tag=tag) for tag in range(120)]
    client = Client(random.Random(2), requests)

    def count(event):
        if isinstance(event, Ended) and event.sequence.tag in (40, 110):
            gc.collect()
            counts.append(len(gc.get_objects()))

    client.follow(engine.run(client.source, max_sequences=3), on_event=count)
    assert list(client.texts.values()) == [want] * 120 and client.most_live <= 4
    per_request = (counts[1] - counts[0]) / 70
    assert per_request < 6, f"{per_request:.1f} objects are kept of each"


@pytest.mark.parametrize("resident", [None, 0.0], ids=["resident", "streamed"])
@pytest.mark.parametrize("cache", ["full", "retrieval", "streaming"])
@pytest.mark.slow(keep=("retrieval-streamed",))
def test_numbers_that_are_not_finite_end_one_sequence_and_nobody_else(models, cache, resident):
    engine = models.engine("llama", resident=resident, draft_length=2, block_length=4)
    prompts = {tag: random_tokens(300, seed=seed) for tag, seed in (("good", 21), ("bad", 22), ("also good", 23))}
    requests = [
        Request(prompt, Sampling(0.7, seed=5), 40, ignore_eos=True, tag=tag, number=tag == "good")
        for tag, prompt in prompts.items()
    ]
    client = Client(random.Random(0), requests)

    @torch.inference_mode()
    def damage(event):
        if isinstance(event, Tokens) and event.sequence.tag == "bad" and event.round.index == 3:
            for _, tensor in getattr(event.sequence.active, cache).held():
                if tensor.is_floating_point():
                    tensor.fill_(float("nan"))

    errors = client.follow(engine.run(client.source), on_event=damage)
    assert list(errors) == ["bad"] and "not finite numbers" in errors["bad"] and 4 <= len(client.texts["bad"]) < 40
    for request in requests:
        alone = models.engine("llama", resident=resident).batch([request])
        list(alone)
        tag, want = request.tag, alone.sequences[0].statistics.token_ids
        assert client.texts[tag] == want[: len(client.texts[tag])], tag
    assert len(client.texts["good"]) == len(client.texts["also good"]) == 40


def test_a_stop_check_that_fails_ends_its_sequence_alone(models):
    def stops(tokens):
        raise ZeroDivisionError("a deliberate fault")

    requests = [
        Request(BOOK, GREEDY, 20, ignore_eos=True, tag="good"),
        Request(BOOK[:300], GREEDY, 20, ignore_eos=True, stops=stops, tag="bad"),
    ]
    client = Client(random.Random(0), requests)
    assert client.follow(models.engine("llama").run(client.source)) == {"bad": "a deliberate fault"}
    assert len(client.texts["good"]) == 20 and len(client.texts["bad"]) == 1


def test_a_request_that_is_not_valid_ends_alone(models):
    requests = [Request(BOOK, GREEDY, 20, ignore_eos=True, tag="good")]
    for tag, bad in {
        "words": {"prompt_ids": ["x"]},
        "nothing": {"prompt_ids": None},
        "length": {"max_new_tokens": "3"},
    }.items():
        given: dict[str, Any] = {"prompt_ids": [5, 6], "max_new_tokens": 3} | bad
        requests.append(Request(sampling=GREEDY, tag=tag, **given))
    client = Client(random.Random(0), requests)
    errors = client.follow(models.engine("llama").run(client.source))
    assert list(errors) == ["words", "nothing", "length"] and all("is not valid" in error for error in errors.values())
    assert len(client.texts["good"]) == 20


@pytest.mark.parametrize("resident", [None, 0.0], ids=["resident", "streamed"])
def test_numbers_that_are_not_finite_stay_in_no_cache(models, resident):
    engine = models.engine("llama", resident=resident)
    prompt = BOOK[:400]
    client = Client(random.Random(0), [Request(prompt, GREEDY, 30, ignore_eos=True, tag="bad")])

    @torch.inference_mode()
    def damage(event):
        if isinstance(event, Tokens) and event.sequence.tag == "bad" and event.round.index == 2:
            for _, tensor in event.sequence.active.full.held():
                if tensor.is_floating_point():
                    tensor.fill_(float("nan"))
        if isinstance(event, Ended) and event.sequence.tag == "bad":
            client.waiting.append(Request(prompt, GREEDY, 12, ignore_eos=True, tag="again"))

    errors = client.follow(engine.run(client.source), on_event=damage)
    assert list(errors) == ["bad"] and "not finite" in errors["bad"]
    want = engine.generate(prompt, GREEDY, 12, ignore_eos=True, reuse=0).token_ids
    assert client.texts["again"] == want
