"""What `train_pair.py` writes and shows: atomic files, Hugging Face directories, and how far a phase is."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich import progress
from safetensors.torch import save_file
from tokenizers import Tokenizer

from pair.data import FIRST_VOCAB
from pair.model import Decoder

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ 'Answer: ' + message['content'] | trim + eos_token + '\\n\\n' }}"
    "{% else %}{{ message['content'] + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Answer:' }}{% endif %}"
)


def report(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def save_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Writes beside `path` and renames, so that an interrupted write leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    write(temporary)
    os.replace(temporary, path)


def export(model: Decoder, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes a Hugging Face directory: weights in bfloat16, config, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    save_atomically(folder / "model.safetensors", lambda p: save_file(model.hf_state(), p, {"format": "pt"}))
    save_atomically(folder / "config.json", lambda p: p.write_text(json.dumps(model.shape.config(), indent=2) + "\n"))
    save_atomically(folder / "tokenizer.json", lambda p: tokenizer.save(str(p)))
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": model.shape.max_positions,
        "clean_up_tokenization_spaces": False,
    }
    if model.shape.vocab > FIRST_VOCAB:
        names["chat_template"] = CHAT_TEMPLATE
    save_atomically(folder / "tokenizer_config.json", lambda p: p.write_text(json.dumps(names, indent=2) + "\n"))


def save_array(path: Path, array: np.ndarray) -> None:
    with path.open("wb") as file:
        np.save(file, array)


class Meter:
    """Loss, speed and time left of a phase: a bar on a terminal, elsewhere a line every ten seconds."""

    def __init__(self, label: str, tokens_a_step: int, steps: int, step: int, every: float = 10.0) -> None:
        self.label, self.tokens_a_step, self.steps, self.every = label, tokens_a_step, steps, every
        self.losses: list[float] = []
        self.since, self.step = time.monotonic(), step
        self.bar = make_bar() if sys.stdout.isatty() else None
        self.task = self.bar.add_task(label, total=steps, completed=step, figures="") if self.bar else None

    def __enter__(self) -> "Meter":
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()

    def update(self, step: int, loss: float) -> None:
        self.losses.append(loss)
        now = time.monotonic()
        if now - self.since < (1.0 if self.bar else self.every) and step < self.steps:
            return
        rate = (step - self.step) / (now - self.since)
        figures = f"loss {sum(self.losses) / len(self.losses):.3f}, {rate * self.tokens_a_step:,.0f} tok/s"
        if self.bar and self.task is not None:
            self.bar.update(self.task, completed=step, figures=figures)
        else:
            report(f"{self.label} {step}/{self.steps} {figures}, {(self.steps - step) / rate / 60:.1f} min left")
        self.losses, self.since, self.step = [], now, step


def make_bar() -> progress.Progress:
    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[figures]}"),
        progress.TimeRemainingColumn(),
    )
