"""The messages between `compare` and its workers, as JSON files: a job, and a measurement or an error.

It imports nothing heavy, so that a worker's memory is its baseline's.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ....offload.speculation.sampling import Sampling


@dataclass(frozen=True)
class Job:
    """What every system is asked to do: the same weights, the same token ids, the same sampling."""

    system: str
    """Its name in the catalogue."""
    model: str
    draft: str | None
    """Directories."""
    given_model: str
    given_draft: str | None
    """As the user named them: a preset's name brings its settings."""
    device: str
    """`cpu` or `cuda`."""
    dtype: str
    """`float32`, `bfloat16` or `float16`."""
    prompt_ids: list[int]
    max_new_tokens: int
    """Written in full: no system stops at an end-of-sequence token."""
    sampling: Sampling
    threads: int
    folder: str
    """A directory for files that one worker of a system writes for the next."""
    questions: list[list[int]] | None = None
    """What follows `prompt_ids` in each of several sequences, to be decoded together; `None` for one sequence without a
    question."""
    context: str | None = None
    """The saved context that this engine restores the prompt from."""
    options: dict[str, Any] = field(default_factory=dict)
    """What only this system's module understands."""

    @property
    def one_text(self) -> bool:
        """Whether this engine's text is determined by the job, whatever drafts for it: it is greedy, or has a seed."""
        return self.sampling.greedy or self.sampling.seed is not None

    @property
    def prompts(self) -> list[list[int]]:
        """The token ids of each sequence."""
        return [[*self.prompt_ids, *question] for question in self.questions or [[]]]

    @property
    def sequences(self) -> int:
        """Answers to be written together."""
        return len(self.questions or [[]])

    @property
    def prompt_tokens(self) -> int:
        """How many the longest prompt has."""
        return len(self.prompt_ids) + max(map(len, self.questions or [[]]))

    @property
    def conditions(self) -> str:
        """Number format, device and threads, in words."""
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"{self.dtype} on {self.device}, {threads}"

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Job:
        given = json.loads(path.read_text(encoding="utf-8"))
        return cls(**given | {"sampling": Sampling(**given["sampling"])})


@dataclass(frozen=True)
class Timed:
    """One generation: its tokens and, measured in the system's own process, when they were written."""

    token_ids: list[int]
    """Of several sequences one answer after another."""
    ttft_s: float
    """From the call to the first token (of several sequences: until each has its first): prefill, and whatever is done
    before it."""
    decode_s: float
    """From then to the last token."""
    first_tokens: int = 1
    """Tokens that were written by the time of the first: of one sequence, those that were accepted together with it."""
    details: dict[str, Any] = field(default_factory=dict)


class System(Protocol):
    """A loaded system. A baseline's module gives one with `load(job)`."""

    ran: str
    """What exactly runs, in words: the library with its version, the calls, and the settings that have an effect."""

    def generate(self, text: list[int], questions: list[list[int]], max_new_tokens: int) -> Timed:
        """Exactly `max_new_tokens` tokens after each prompt, which is `text` and one of `questions`. All are decoded
        together, and no cache of earlier runs is used.

        Args: `questions` has one empty question where a single answer is requested.
        """
        ...


@dataclass(frozen=True)
class Measurement:
    """One timed run of one system. Seconds, bytes, tokens."""

    ran: str
    token_ids: list[int]
    ttft_s: float
    decode_s: float
    first_tokens: int
    load_s: float
    host_peak_bytes: int
    """The maximum that the worker's process held in host memory, libraries and loading included."""
    device_peak_bytes: int
    """The maximum that PyTorch's tensors took on the GPU; 0 on a CPU."""
    details: dict[str, Any] = field(default_factory=dict)
    sequences: int = 1
    """How many were decoded together."""

    @property
    def tbt_s(self) -> float:
        """Time between tokens of each sequence: decoding ÷ the tokens after the first one(s) × sequences; 0 where there
        are none."""
        after = len(self.token_ids) - self.first_tokens
        return self.decode_s / after * self.sequences if after > 0 else 0.0
