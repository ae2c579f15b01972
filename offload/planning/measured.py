"""`plan --measured FILE`: uses the measurements of a bench in place of a card's figures and of assumptions."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median_high
from typing import Any

from ...tp.errors import TriforceError, UsageError
from ...tp.matrices import num_parameters
from .calibration import MeasuredMachine, MeasuredPass, fit
from .cards import Card
from .cost_model import Assumptions, pass_work
from .request import RunRequest

BENCH = "triforce bench"
"""The kind of document that `triforce bench --json` writes."""

LIKE = 1.25
"""The factor in the number of parameters from which on two models count as different. Overheads and acceptance of one
do not hold for the other."""


_HEAD = {"contexts", "machine", "measured_bandwidth", "parameters", "model", "dtype", "date"}
_MACHINE = {"world_size", "device_name", "memory_bytes", "device_memory_bytes"}
_RUN = {"passes", "proposed", "time_s", "kv_read", "link", "settings", "rounds", "tbt_ms"}


@dataclass(frozen=True)
class Measured:
    """The JSON of a bench, checked."""

    path: Path
    """The file."""
    document: dict[str, Any]
    """Its content."""

    @classmethod
    def read(cls, path: Path) -> Measured:
        """Reads and checks a file of `triforce bench --json`.

        Raises:
            TriforceError: the file cannot be read, has other content, or has no run.
        """
        try:
            document = json.loads(path.expanduser().read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise TriforceError(f"--measured {path} does not exist; triforce bench --json {path} makes it") from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is not JSON"
            raise TriforceError(f"--measured {path} cannot be read: {reason}") from error
        kind = document.get("kind") if isinstance(document, dict) else None
        if kind != BENCH:
            what = f"of {kind}" if isinstance(kind, str) else "of something else"
            raise TriforceError(f"--measured {path} contains JSON {what}; give a file of triforce bench --json")
        missing = _HEAD - set(document)
        try:
            runs = [run for at in document.get("contexts", ()) for row in at["tiers"] for run in row["runs"]]
            missing |= {key for run in runs for key in _RUN - set(run)}
            missing |= {f"machine.{key}" for key in _MACHINE - set(document.get("machine", _MACHINE))}
        except (KeyError, TypeError, AttributeError) as error:
            raise TriforceError(
                f"--measured {path} does not have the format that triforce bench writes; measure again"
            ) from error
        if missing:
            raise TriforceError(
                f"--measured {path} lacks {', '.join(sorted(missing))}; measure again with this version"
            )
        if not runs:
            raise TriforceError(f"--measured {path} holds no run; measure again, without --shape")
        return cls(path, document)

    @property
    def gpus(self) -> int:
        """The number of ranks of the bench."""
        return self.document["machine"]["world_size"]

    @property
    def dtype(self) -> str:
        """The number format of the bench."""
        return self.document["dtype"]

    @property
    def disk_gb_per_s(self) -> float | None:
        """The measured bandwidth of the disk below host memory, in GB/s; `None` if it was not measured."""
        return self.document["measured_bandwidth"].get("disk_gb_per_s")

    def card(self, link: Card) -> Card:
        """The measured device as a card: with its memory and measured bandwidths. If the link was not measured, its
        bandwidth is that of `link`. The speed (`tflops`) is NaN."""
        machine, carried = self.document["machine"], self.document["measured_bandwidth"]
        total = machine["device_memory_bytes"] or machine["memory_bytes"]
        return Card(
            name=machine["device_name"],
            memory_gib=total / 2**30,
            memory_gb_per_s=carried["memory_gb_per_s"],
            tflops=math.nan,
            link_gb_per_s=carried["link_gb_per_s"] or link.link_gb_per_s,
        )

    def check(self, request: RunRequest, model: str) -> None:
        """Checks that the measurements can be used for `request`.

        Raises:
            UsageError: `request` has a different model, number of GPUs or number format.
        """
        theirs, ours = self.document["parameters"], num_parameters(request.target)
        if not 1 / LIKE < theirs / ours < LIKE:
            raise UsageError(
                f"--measured {self.path} is for {self.document['model']} ({theirs / 1e6:,.1f} M parameters), a "
                f"different model from {model} ({ours / 1e6:,.1f} M); measure {model}, or plan without --measured"
            )
        dtype = str(request.dtype).removeprefix("torch.")
        for option, have, want in (("gpus", request.gpus, self.gpus), ("dtype", dtype, self.dtype)):
            if have != want:
                raise UsageError(
                    f"--measured {self.path} was measured with --{option} {want}, and this plan is for {have}; give "
                    f"--{option} {want}, or measure with {have}"
                )

    def machine(self, request: RunRequest, link_bandwidth: float) -> Calibration:
        """The calibrated machine for passes of `request`.

        Args: `link_bandwidth` is in bytes per second.

        Raises:
            TriforceError: every pass waited for the link or a disk.
            UsageError: three tiers are planned, but no draft was measured: no run had three tiers, or none drafted.
        """
        runs = [_median_run(row["runs"]) for at in self.contexts for row in at["tiers"]]
        passes = [found for run in runs for found in _passes(run, request)]
        if not passes:
            raise TriforceError(
                f"in --measured {self.path}, every pass waited for the link or a disk; measure with --tiers 1,3"
            )
        drafts = [run["time_s"]["draft"] / run["passes"]["draft"] for run in runs if run["passes"]["draft"]]
        if request.settings.tiers == 3 and not drafts:
            if any(run["settings"]["tiers"] == 3 for run in runs):
                raise UsageError(
                    f"in --measured {self.path}, runs with three tiers drafted nothing, because that was not expected "
                    "to pay; measure longer contexts, or measure with --block-length and --draft-length"
                )
            raise UsageError(f"--measured {self.path} has no run with three tiers; plan with --tiers 2")
        besides = [
            (run["time_s"]["refresh"] + run["time_s"]["other"]) / run["rounds"]
            for run in runs
            if run["settings"]["tiers"] > 1
        ]
        line = fit(passes)
        machine = MeasuredMachine(
            line, link_bandwidth, median_high(drafts) if drafts else None, median_high(besides) if besides else 0.0
        )
        return Calibration(self, machine, len(passes), line.worst(passes), self._nearest(request.context))

    @property
    def contexts(self) -> list[dict[str, Any]]:
        """The measurements of each context length."""
        return self.document["contexts"]

    def _nearest(self, context: int) -> tuple[int, float | None, float | None]:
        """The nearest measured context length, and its acceptance rates: of the retrieval cache, of the draft."""
        speculated = [at for at in self.contexts if any(row["tiers"] > 1 for row in at["tiers"])]
        at = min(speculated or self.contexts, key=lambda at: abs(math.log(at["context"] / context)))
        accepted = max(at["tiers"], key=lambda row: row["tiers"])["acceptance"]
        return at["context"], accepted["retrieval_per_token"], accepted["draft_per_token"]


@dataclass(frozen=True)
class Calibration:
    """A machine with times that are fitted to a bench."""

    source: Measured
    machine: MeasuredMachine
    passes: int
    """The number of measured passes to which the line is fitted."""
    worst: float
    """The maximum error of the line, as a share of a measured time."""
    accepted: tuple[int, float | None, float | None]
    """The context length of the acceptance rates; the rate of the retrieval cache; the rate of the draft."""

    def assumptions(self, given: float | None, given_draft: float | None) -> Assumptions:
        """The acceptance rates: those given, else those measured, else the defaults."""
        _, retrieval, draft = self.accepted
        return Assumptions.of(retrieval if given is None else given, draft if given_draft is None else given_draft)

    def terms(self) -> dict[str, Any]:
        """The part of the JSON that gives each term and its source."""
        document, line = self.source.document, self.machine.line
        context, retrieval, draft = self.accepted
        return {
            "file": str(self.source.path),
            "date": document["date"],
            "device_name": document["machine"]["device_name"],
            "measured_model": document["model"],
            "bandwidth": document["measured_bandwidth"],
            "pass_fit": {
                "overhead_ms": 1e3 * line.overhead_s,
                "gb_per_s": 1e-9 / line.byte_s if line.byte_s else None,
                "gflops": 1e-9 / line.operation_s if line.operation_s else None,
                "passes": self.passes,
                "worst": self.worst,
            },
            "draft_step_ms": None if self.machine.draft_s is None else 1e3 * self.machine.draft_s,
            "round_ms": 1e3 * self.machine.round_seconds,
            "measured_acceptance": {"context": context, "retrieval": retrieval, "draft": draft},
        }


def _median_run(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return sorted(runs, key=lambda run: run["tbt_ms"]["mean"])[len(runs) // 2]


def _passes(run: dict[str, Any], request: RunRequest) -> list[MeasuredPass]:
    """The mean pass of each of the target's tiers, without passes over the full cache that waited for link or disk."""
    found: list[MeasuredPass] = []
    counts, proposed, seconds = run["passes"], run["proposed"], run["time_s"]
    waited = run["link"]["bytes_streamed"] or run["settings"].get("disk_bytes")
    if counts["verify"] and not waited:
        tokens = _tokens_read(request, run["kv_read"]["bytes"] / counts["verify"])
        work = pass_work(request, 1 + proposed["retrieval"] / counts["verify"], tokens)
        found.append(MeasuredPass(*work, seconds["verify"] / counts["verify"]))
    if counts["retrieval"]:
        work = pass_work(request, 1 + proposed["draft"] / counts["retrieval"], run["settings"]["budget"])
        found.append(MeasuredPass(*work, seconds["retrieval"] / counts["retrieval"]))
    return found


def _tokens_read(request: RunRequest, num_bytes: float) -> float:
    """The number of tokens that a pass has seen, from the bytes of keys and values that it has read."""
    part = request.part
    beyond = (num_bytes - sum(part.kept_windows.values()) * request.layer_token_bytes) / request.token_bytes
    return max(beyond, num_bytes / part.kv_bytes_per_token(request.dtype))  # the second: below a window
