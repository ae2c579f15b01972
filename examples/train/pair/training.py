"""What every training of the embedded pair shares: phases, checkpoints that the same command resumes, and a meter.

Knows neither what a step computes nor which phases there are; `train_pair.py` says both.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from pair.data import Mix, Sampler
from pair.model import Decoder, Losses, Shape
from pair.optim import Optimisers, multiplies_bfloat16
from pair.output import Meter, export, report, save_atomically

CHECKPOINT_SECONDS = 180.0
SUMMARY_SECONDS = 300.0  # of training between two reports of the figure
WARMUP_STEPS = 20
SETTLE_STEPS = 25


@dataclass(frozen=True)
class Phase:
    """One stretch of training: samples of `length` tokens, `rows` a step, until `tokens` are seen.

    The learning rate falls linearly from `lr[0]` to `lr[1]`. `gaps` is the share of samples whose positions have
    gaps, `crowded` the share attended as if their far part were longer. Of drafts only: `own` is the share of rows the
    target wrote, `agreement` that of the loss which is about overlap.
    """

    name: str
    length: int
    rows: int
    tokens: float
    lr: tuple[float, float]
    mix: Mix
    gaps: float = 0.0
    crowded: float = 0.0
    own: float = 0.0
    agreement: float = 0.0

    def steps(self, scale: float) -> int:
        return max(1, round(self.tokens * scale / (self.length * self.rows)))


@dataclass(frozen=True)
class Run:
    """Where a run writes, what it computes on, how phases are stretched, and when (monotonic seconds) it stops."""

    out: Path
    device: torch.device
    compiled: bool
    scale: float
    deadline: float

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16 where the device multiplies it fast, or else float32."""
        return torch.bfloat16 if multiplies_bfloat16(self.device) else torch.float32

    @property
    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)


@dataclass
class Progress:
    """How far a training is: the phase, the step in it, and seconds spent so far over all runs."""

    phase: int = 0
    step: int = 0
    seconds: float = 0.0


class Training:
    """Takes one model through its phases, resuming where the last run stopped; subclasses say what a step is."""

    def __init__(
        self,
        run: Run,
        name: str,
        shape: Shape,
        phases: tuple[Phase, ...],
        tokenizer: Tokenizer,
        sampler: Sampler,
    ):
        self.run, self.name, self.phases, self.tokenizer, self.sampler = run, name, phases, tokenizer, sampler
        self.model = Decoder(shape, run.compiled).to(run.device)
        self.losses = Losses(run.compiled)
        self.optimisers = Optimisers(self.model)
        self.progress = Progress()
        self.checkpoint_path = run.out / "checkpoints" / f"{name}.pt"
        if self.checkpoint_path.exists():
            self._load()

    def backward(self, phase: Phase, key: tuple[int, int]) -> float:
        """Loss of the batch that belongs to `key` (phase and step), its gradient left in the model."""
        raise NotImplementedError

    def settle(self) -> None:
        """Called every `SETTLE_STEPS` steps, and when a phase ends."""

    def summary(self) -> str:
        """A figure to report at the end of a phase."""
        raise NotImplementedError

    def train(self) -> bool:
        """Runs what is left of the phases; False if the run's minutes were over before."""
        while self.progress.phase < len(self.phases):
            phase = self.phases[self.progress.phase]
            if not self._run_phase(phase, phase.steps(self.run.scale)):
                report("out of time: the same command resumes")
                return False
            self.progress = Progress(self.progress.phase + 1, 0, self.progress.seconds)
            self.settle()
            self._save()
            export(self.model, self.tokenizer, self.run.out / "snapshots" / f"{self.name}-{phase.name}")
            export(self.model, self.tokenizer, self.run.out / self.name)
            report(f"{self.name}: end of {phase.name} after {self.progress.seconds / 60:.1f} min; {self.summary()}")
        return True

    def _run_phase(self, phase: Phase, steps: int) -> bool:
        saved = clock = time.monotonic()
        reported = self.progress.seconds
        with Meter(f"{self.name} {phase.name}", phase.length * phase.rows, steps, self.progress.step) as meter:
            while self.progress.step < steps:
                loss = self._step(phase, steps)
                now = time.monotonic()
                self.progress.step += 1
                self.progress.seconds += now - clock
                clock = now
                meter.update(self.progress.step, loss)
                if now > self.run.deadline or now - saved > CHECKPOINT_SECONDS:
                    self._save()
                    saved = now
                if self.progress.seconds - reported > SUMMARY_SECONDS:
                    report(f"{self.name} {phase.name} {self.progress.step}/{steps}: {self.summary()}")
                    reported, clock = self.progress.seconds, time.monotonic()
                if now > self.run.deadline:
                    return False
        return True

    def _step(self, phase: Phase, steps: int) -> float:
        step, index = self.progress.step, self.progress.phase
        with self.run.autocast:
            loss = self.backward(phase, (index, step))
        warmup = min(1.0, (step + 1) / WARMUP_STEPS) if index == 0 else 1.0
        self.optimisers.step(warmup * (phase.lr[0] + (phase.lr[1] - phase.lr[0]) * step / steps))
        if step % SETTLE_STEPS == 0:
            self.settle()
        return loss

    def _load(self) -> None:
        state = torch.load(self.checkpoint_path, map_location=self.run.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimisers.load_state_dict(state["optimisers"])
        self.progress = Progress(**state["progress"])
        report(f"resumed {self.checkpoint_path} at phase {self.progress.phase}, step {self.progress.step}")

    def _save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimisers": self.optimisers.state_dict(),
            "progress": vars(self.progress),
        }
        save_atomically(self.checkpoint_path, lambda path: torch.save(state, path))
