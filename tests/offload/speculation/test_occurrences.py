"""What is looked up: occurrences of the last tokens, and when a model that drafts beside them pays."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from tiny import random_tokens
from triforce.offload.speculation.control import DraftControl
from triforce.offload.speculation.drafting_pays import PROBE_EVERY
from triforce.offload.speculation.lengths import LOOKUP_SECONDS, PassCost
from triforce.offload.speculation.lookup import LookupControl, LookupTier
from triforce.offload.speculation.occurrences import SHORTEST, Lookup, Occurrences
from triforce.tp.weights.registry import parse_draft

PASSAGE = random_tokens(40, seed=2)


@given(
    steps=st.lists(
        st.one_of(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.integers(0, 20)), min_size=1, max_size=12
    )
)
@examples(300)
def test_the_longest_match_is_found_after_any_growing_and_cutting(steps):
    """Tokens are added, or so many cut off."""
    occurrences, text = Occurrences(), []
    for step in steps:
        if isinstance(step, list):
            text += step
        else:
            del text[max(0, len(text) - step) :]
        occurrences.follow(text)
    place, matching = occurrences.longest()
    run = text[-SHORTEST:]
    ends = [end for end in range(SHORTEST, len(text)) if text[end - SHORTEST : end] == run]
    if len(text) < SHORTEST or not ends:
        assert matching == 0
        return

    def length(end):
        n = SHORTEST
        while n < end and text[end - 1 - n] == text[len(text) - 1 - n]:
            n += 1
        return n

    latest = ends[::-1][:16]
    assert matching == max(map(length, latest))
    assert place == next(end for end in latest if length(end) == matching)
    assert occurrences.after(place, 5)[: len(text) - place] == text[place : place + 5]


def test_what_reaches_the_end_of_the_text_goes_on_as_it_began():
    occurrences = Occurrences()
    occurrences.follow([7, 1, 2, 3, 1, 2, 3])
    assert occurrences.longest() == (4, 3)
    assert occurrences.after(4, 8) == [1, 2, 3, 1, 2, 3, 1, 2]


@pytest.mark.parametrize(
    ("given", "model", "looks_up"),
    [("lookup", "none", True), ("a/b,lookup", "a/b", True), ("a/b", "a/b", False), (None, None, False)],
)
def test_a_draft_s_name_says_whether_it_is_looked_up(given, model, looks_up):
    assert parse_draft(given) == (model, looks_up)


class ModelControl:
    """Of a model at a price."""

    def __init__(self, seconds):
        self.seconds, self.steady = seconds, True

    def choose_lengths(self, batch):
        return self.seconds

    def ends_early(self, tokens):
        return True

    def judge(self, sequence, proposed, accepted):
        pass


class Model:
    """Drafts ones."""

    def __init__(self, control):
        self.control, self.asked = control, []

    def extend(self, sequences, counts, least_chance):
        self.asked.append(counts)
        return [([1] * count, torch.empty(0)) for count in counts]


def sequence_of(context) -> Any:
    sampler = SimpleNamespace(until_end=lambda tokens: tokens, noise=None)
    return SimpleNamespace(context=context, lookup=Lookup(), sampler=sampler)


def test_a_model_that_does_not_pay_is_left_out_and_tried_now_and_then():
    upper = DraftControl("retrieval", PassCost(1.0, 0.0))
    seconds: Any = ModelControl(5.0)
    model: Any = Model(seconds)
    control = LookupControl(seconds, upper, 8)
    decoder: Any = SimpleNamespace(device="cpu")
    tier = LookupTier(control, model, decoder, 97)
    new, known = sequence_of(list(range(90))), sequence_of(PASSAGE * 2)
    while control.choose_lengths() > LOOKUP_SECONDS:  # a few times, to see what it is worth
        assert tier.extend([new], [8])[0][0] == [1] * control.draft_tokens
        control.judge(new, 1, 1)
        assert len(model.asked) < 8
    assert model.asked and control.draft_tokens == 0 and new.lookup.model.rate > known.lookup.long.rate
    model.asked.clear()
    for _ in range(PROBE_EVERY):
        assert tier.extend([new], [8])[0][0] == []
    assert tier.extend([known], [8])[0][0] == PASSAGE[:8] and not model.asked
    assert control.steady and tier.extend([new], [8])[0][0] == [1] and model.asked == [[1]] and not control.steady
    known.lookup.model = new.lookup.model
    assert tier.extend([known], [8])[0][0] == PASSAGE[:8], "it costs nothing, though the model is right more often"
    seconds.seconds = 0.01
    assert LOOKUP_SECONDS < control.choose_lengths() <= 0.01
    assert tier.extend([known, new], [8, 8])[0][0] == [1] * 8 and model.asked[1:] == [[8, 8]]
