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
    """The task for every system: the same weights, the same token ids, the same sampling."""

    system: str
    """Its name in the catalogue."""
    model: str
    draft: str | None
    """Directories."""
    given_model: str
    given_draft: str | None
    """The models as given by the user; the name of a preset also gives its settings."""
    device: str
    """`cpu` or `cuda`."""
    dtype: str
    """`float32`, `bfloat16` or `float16`."""
    prompt_ids: list[int]
    max_new_tokens: int
    """The exact number of new tokens: no system stops at an end-of-sequence token."""
    sampling: Sampling
    threads: int
    folder: str
    """A directory for files that one worker of a system writes for the next."""
    questions: list[list[int]] | None = None
    """The tokens after `prompt_ids` in each of several sequences that are decoded together; `None` for one sequence
    without a question."""
    context: str | None = None
    """The saved context that this engine restores the prompt from."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options that only the module of this system uses."""

    @property
    def one_text(self) -> bool:
        """Whether the job determines this engine's text, whatever the draft: it is greedy, or has a seed."""
        return self.sampling.greedy or self.sampling.seed is not None

    @property
    def prompts(self) -> list[list[int]]:
        """The token ids of each sequence."""
        return [[*self.prompt_ids, *question] for question in self.questions or [[]]]

    @property
    def sequences(self) -> int:
        """The number of answers that are written together."""
        return len(self.questions or [[]])

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the longest prompt."""
        return len(self.prompt_ids) + max(map(len, self.questions or [[]]))

    @property
    def conditions(self) -> str:
        """A description of dtype, device and threads."""
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
    """The token ids of the answers, one answer after another."""
    ttft_s: float
    """Seconds from the call to the first token (with several sequences: until each has its first). They include the
    prefill, and everything before it."""
    decode_s: float
    """Seconds from then to the last token."""
    first_tokens: int = 1
    """The number of tokens that were written by then. For one sequence, they were accepted together with the first."""
    details: dict[str, Any] = field(default_factory=dict)


class System(Protocol):
    """A loaded system. `load(job)` of a baseline's module returns it."""

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
    """The number of sequences that were decoded together."""

    @property
    def tbt_s(self) -> float:
        """Time between tokens of each sequence: decoding ÷ the tokens after the first one(s) × sequences; 0 where there
        are none."""
        after = len(self.token_ids) - self.first_tokens
        return self.decode_s / after * self.sequences if after > 0 else 0.0
