"""Systems that misbehave in what they write: a worker of `triforce compare` loads this as a baseline's module."""

from dataclasses import replace
from pathlib import Path

from triforce.cli.compare.baselines.protocol import Timed

FLIPPED_AT = 5
"""The token that `flips` gets wrong, of a batch that of its second sequence and those after it."""


def load(job):
    systems = {"stops early": StopsEarly, "flips": Flips, "steady": Steady, "breaks": Breaks}
    return systems[job.system](job)


class Flips:
    """Transformers, with one token changed."""

    def __init__(self, job):
        from triforce.cli.compare.baselines.transformers_baseline import Transformers

        self.system = Transformers(job)
        self.ran = self.system.ran

    def generate(self, text, questions, max_new_tokens):
        timed, start = self.system.generate(text, questions, max_new_tokens), FLIPPED_AT
        start += max_new_tokens if len(questions) > 1 else 0
        return flipped(timed, range(start, len(timed.token_ids), max_new_tokens))


def flipped(timed, places):
    tokens = list(timed.token_ids)
    for place in places:
        tokens[place] = (tokens[place] + 1) % 320
    return replace(timed, token_ids=tokens)


class StopsEarly(Flips):
    def generate(self, text, questions, max_new_tokens):
        return self.system.generate(text, questions, max_new_tokens - 1)


class Steady:
    """Writes one token again and again, in no time."""

    ran = ""

    def __init__(self, job):
        self.job = job

    def generate(self, text, questions, max_new_tokens):
        return Timed([7] * max_new_tokens, 1.0, 2.0)


class Breaks(Steady):
    """The same, once."""

    def generate(self, text, questions, max_new_tokens):
        once = Path(self.job.folder, "once")
        if max_new_tokens == self.job.max_new_tokens and len(text) and text == self.job.prompt_ids:
            if once.exists():
                raise RuntimeError("it broke")
            once.touch()
        return super().generate(text, questions, max_new_tokens)
