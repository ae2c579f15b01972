"""What of the program's words and documents depends on time, machine or chance, and what stands in its place in the
golden corpus. Each rule says so little that what is not named here is compared as it is: tokens, counts, planned bytes,
texts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_NUMBER = r"[\d.,]+"
_BYTES = rf"{_NUMBER} [KMGT]?i?B"


@dataclass(frozen=True)
class Rule:
    """What `pattern` matches (line by line) becomes `instead`."""

    why: str
    pattern: str
    instead: str


PACKAGE = Rule("where the package is", r"/\S*/embedded/(target|draft)\b", r"<package>/embedded/\1")

RULES = (
    Rule("lines of progress come by the clock", r"^prefill of [\d,]+ tokens: .* left\n", ""),
    Rule("the device's name", r"\b((?:float32|bfloat16|float16) on (?:\d ranks, each on )?)[^,;\n]+", r"\1<device>"),
    Rule("memory that is free now", rf"{_BYTES} available", "<bytes> available"),
    Rule("room on the disk", rf"{_BYTES} free", "<bytes> free"),
    Rule("memory that the process took", rf"\bpeak {_BYTES}", "peak <bytes>"),
    Rule("an estimate of the time", r"about \d+ s\b", "about <seconds>"),
    Rule("when, by the clock", r"\b\d{4}-\d\d-\d\d \d\d:\d\d\b", "<date>"),
    Rule("time to the first token", rf"^(TTFT +){_NUMBER} s", r"\1<seconds>"),
    Rule(
        "time between tokens",
        rf"^(TBT +)mean {_NUMBER}, p50 {_NUMBER}, p95 {_NUMBER} ms \({_NUMBER} tokens/s\)",
        r"\1mean <ms>, p50 <ms>, p95 <ms> (<rate>)",
    ),
    Rule("what decoding is made of, in time", r"^(a round +)\w+ \d+%.*", r"\1<shares>"),
    Rule("a measured bandwidth", rf"\b(GB(?: read)?) at {_NUMBER} GB/s", r"\1 at <rate>"),
    Rule("waiting", rf"computation waited {_NUMBER} s", "computation waited <seconds>"),
    Rule(
        "answers together",
        rf"^(together +){_NUMBER} tokens/s over (\d+) rounds of {_NUMBER} ms; prefill took {_NUMBER} s",
        r"\1<rate> over \2 rounds of <ms>; prefill took <seconds>",
    ),
    Rule(
        "times in the table of answers, and how wide they make it",
        rf"^(\d+) +(\d+) (\w+) +{_NUMBER} +{_NUMBER} +(\d+%|-) (.*?) *$",
        r"\1 \2 \3 <seconds> <ms> \4 \5",
    ),
    Rule("the same table's head", r"^ +tokens ended by +TTFT s +TBT ms +accepted +question *$", "tokens ended by ..."),
    Rule("what reading took", rf"\btokens in {_NUMBER} s", "tokens in <seconds>"),
    Rule("tokens per second", rf"\({_NUMBER} tokens/s", "(<rate>"),
    Rule("whether models fit into this machine", r"([KMGT]iB +)(?:yes|no|[\d,]+) +(yes|no) *$", r"\1<fits> \2"),
    PACKAGE,
    Rule("the version", r"^triforce \d+\.\d+\.\d+\S*$", "triforce <version>"),
    Rule("the port that was free", r"127\.0\.0\.1:\d+", "127.0.0.1:<port>"),
)
"""Of all that is written for people, in this order."""

SEED = Rule("a seed that was drawn", r"seed \d{4,}", "seed <drawn>")
"""Of command lines without a seed."""

MEASURED = (
    Rule("measured numbers", r"(?<![\w.-])\d+\.\d+(?: (?=[KMGT]iB))?(?:[KMGT]iB| s\b| ms\b| GB/s)?", "<measured>"),
    Rule("how wide numbers make a table", r"(?<=\S) {2,}(?=\S)", " "),
    Rule("the same, of lines that begin with it", r"^ {2,}(?=\S)", " "),
    Rule("spaces at the end of a row", r" +$", ""),
)
"""Of tables of `bench` and `compare`."""

MACHINE = (
    Rule("what this machine has", r"^((?:[\w-]+ ?)+|disk, here)  +\S.*$", r"\1  <machine>"),
    Rule("what it lacks", r"^missing, optional:\n(?:  .*\n)+", "missing, optional: <machine>\n"),
)
"""Of `doctor`."""

SECONDS, MILLISECONDS, RATE, BYTES, DATE = "<seconds>", "<ms>", "<rate>", "<bytes>", "<date>"

KEYS: Mapping[str, str] = {
    **dict.fromkeys(("prefill_s", "ttft_s", "decode_s", "busy_s", "waited_s", "read_s", "total_s", "load_s"), SECONDS),
    **dict.fromkeys(("prompt_ms", "predicted_ms", "time_ms", "ms"), MILLISECONDS),
    **dict.fromkeys(("tokens_per_s", "predicted_per_second"), RATE),
    "host_peak_bytes": BYTES,
    **dict.fromkeys(("created", "used", "date", "time"), DATE),
    "version": "<version>",
    "device_name": "<device>",
    "kernels": "<kernels>",
    "threads": "<threads>",
    "fits": "<fits>",
    "fitting_tokens": "<fits>",
    "request_id": "<id>",
    "machine": "<machine>",
}
"""Of documents: keys whose values vary. Null stays, as does a text or a number where the other is meant."""

INSIDE: Mapping[str, str] = {"tbt_ms": MILLISECONDS, "time_s": SECONDS}
"""Keys under which all numbers vary."""

IN: Mapping[tuple[str, str], str] = {
    ("kv_read", "s"): SECONDS,
    ("kv_read", "gb_per_s"): RATE,
    ("link", "gb_per_s"): RATE,
    ("disk", "gb_per_s"): RATE,
    ("page_locking", "seconds"): SECONDS,
}
"""Keys that vary in objects of these names."""

_PLANNED = ("fits",)
"""Keys that do not vary in documents of `plan`, which is told what hardware there is."""

DIGITS = 6
"""Of the numbers with a fraction that stay: the last ones follow from the machine's arithmetic."""


def plain(text: str, rules: tuple[Rule, ...] = ()) -> str:
    """What was written for people, after the rules; spaces at the ends of lines and signs that no editor shows are
    spelled out or dropped."""
    for rule in (*RULES, *rules):
        text = re.sub(rule.pattern, rule.instead, text, flags=re.MULTILINE)
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    return "".join(letter if letter == "\n" or letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def document(value: Any, *, drawn_seed: bool = False, planned: bool = False, name: str = "", of: str = "") -> Any:
    """A document after the rules, as far as it is called `name` in one called `of`."""
    if isinstance(value, dict):
        found = {
            key: document(one, drawn_seed=drawn_seed, planned=planned, name=key, of=name) for key, one in value.items()
        }
        # What the files of a saved context take follows from the file system.
        return found | {"disk_bytes": BYTES} if "planned_tokens" in found else found
    if isinstance(value, list):
        return [document(one, drawn_seed=drawn_seed, planned=planned, name=name, of=of) for one in value]
    if name == "kernels":
        return KEYS[name]  # null where the processor has no level
    if name == "arithmetic" and value == 0:
        from triforce.kernels import arithmetic  # PyTorch takes its number of threads from the environment first

        return 0 if arithmetic() else 1  # where the processor has no level, it stands for that of the recording
    if value is None or (isinstance(value, bool) and name != "fits"):
        return value
    instead = IN.get((of, name)) or (INSIDE.get(of) if isinstance(value, float | int) else None)
    instead = instead or (None if planned and name in _PLANNED else KEYS.get(name))
    if instead:
        return instead
    if name == "seed" and drawn_seed:
        return "<drawn>"
    if (isinstance(value, float) and "logprobs" in (name, of, of[-8:], name[-8:])) or name == "logprob":
        return f"{value:.5f}"
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, str) and name in ("target", "draft"):
        return re.sub(PACKAGE.pattern, PACKAGE.instead, value)
    return (
        re.sub(r"^(chatcmpl|cmpl|batch)[-_].+", r"\1-<id>", value) if name == "id" and isinstance(value, str) else value
    )


def kinds(value: Any) -> Any:
    """A document's keys alone, each with the kind of its value: where all is measured, or the machine's."""
    if isinstance(value, dict):
        return {key: kinds(one) for key, one in value.items()}
    if isinstance(value, list):
        return [kinds(one) for one in value if isinstance(one, dict | list)] or "<list>"
    return "<number>" if isinstance(value, float | int) and not isinstance(value, bool) else f"<{type(value).__name__}>"


def keys(value: Any) -> Any:
    """A document's keys alone, where even the kinds follow from the machine."""
    return {key: keys(one) for key, one in value.items()} if isinstance(value, dict) else "<machine>"


SHORT = 100
"""Letters of what stands in one line."""


def shown(value: Any) -> str:
    """A document as JSON that one can read: a key a line, short objects and lists of plain values in one."""
    return _shown(value, "")


def _shown(value: Any, before: str) -> str:
    inner, short = before + "  ", json.dumps(value)
    if isinstance(value, dict) and len(short) <= SHORT and not any(isinstance(one, dict) for one in value.values()):
        return short
    if isinstance(value, dict) and value:
        rows = (f"{inner}{json.dumps(key)}: {_shown(one, inner)}" for key, one in value.items())
        return "{\n" + ",\n".join(rows) + f"\n{before}}}"
    if isinstance(value, list) and any(isinstance(one, dict | list) for one in value):
        return "[\n" + ",\n".join(inner + _shown(one, inner) for one in value) + f"\n{before}]"
    return short


_FRACTION = re.compile(r"-?\d+\.\d{4,}(?:e-?\d+)?")

CLOSE = 1e-3
"""By how much a log-probability may differ that another processor computed."""


def settled(want: str, found: str) -> str:
    """`found`, with the numbers of `want` where only long fractions differ, and those hardly."""
    wanted, lines = want.splitlines(keepends=True), found.splitlines(keepends=True)
    if len(wanted) != len(lines):
        return found
    return "".join(one if _alike(one, line) else line for one, line in zip(wanted, lines, strict=True))


def _alike(one: str, other: str) -> bool:
    if _FRACTION.sub("#", one) != _FRACTION.sub("#", other):
        return False
    pairs = zip(_FRACTION.findall(one), _FRACTION.findall(other), strict=True)
    return all(abs(float(a) - float(b)) <= CLOSE for a, b in pairs)
