"""Honest clients of `triforce serve` beside hostile ones: every honest answer must come, and be the text that it is
alone; what the server holds must not grow.

    python examples/measure/serving/hostile_load.py --minutes 30 --json load.json

It starts a server, whose contexts are in a temporary directory, and asks each honest question once while nobody else
asks. Then honest clients ask the same questions again and again, wait as long as they are told to where they are
refused, and compare; beside them are the clients of `hostile_clients.py`. Memory, descriptors and threads are looked at
from outside. Every client has an address of its own in 127.0.0.0/8, all of which is this machine on Linux. Exits with 1
if a promise is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.append(str(Path(__file__).parents[1]))  # where `report` and `serving` are, if this is run as a script
from report import make_parser, print_table, write_json
from triforce.cli.logbook import LogBook
from triforce.cli.terminal.streams import print_note
from triforce.tp.parallel.launch import usable_cores

from serving.bodies import CHAT, COMPLETION
from serving.hostile_clients import KINDS, PATIENCE_S, Tally, hostile_clients
from serving.load import PROMPTS, Reply, ask_from, figures_of, http_request, upload_request
from serving.serve_results import Server, serving

_CONTEXT = "harbour"
_BODIES_A_MINUTE = 10_000 / 30
_SERVER = (
    f"--device cpu --threads {max(1, usable_cores() - 1)} --dtype float32 --max-sequences 8 --max-queue 256 "
    "--max-new-tokens 64 --host-memory 1 --grace 5"
)
"""Clients need a core, too; in float32 an answer is the same in any company."""

_CONTEXTS_MAX = "1500MB"
"""Room for all texts that are saved at the same time (in float32, up to 310 MiB each): a quota of which contexts in use
take too much would refuse uploads with 507. Older uploads still give way to newer ones."""

_MOST_GROWTH = 1.05
_NEAR = 1e-3
"""How far a logarithm of a probability may be from what it is alone: sums of more rows have another order."""

_EARLY_S = 180.0
"""After so long under load clients pause, and it is seen what the server holds while nobody asks: at the end, without
the KV cache, whose limit is its own, and without free memory, it may be `_MOST_GROWTH` times that. So may the resident
memory under load be of what it was then. A run of less than nine minutes pauses after a third."""

_SETTLE_S = 90.0
"""How long connections may take to end after the load; those that nobody reads take 60 s."""

_RESTED = 4
"""Looks, 5 s apart, at which nothing must run before what is held is looked at: a body whose client has left may still
become a prompt, and what it took goes back to the system a moment later."""

_MEMORY = ("settled", "settled_kv_cache", "settled_free_memory", "means", "highest")
_OF_MEMORY = ("kv_cache_bytes", "free_memory_bytes")
"""Metrics of the server: what the KV cache takes, and what it keeps for later use."""

_EXPECTED = "was removed meanwhile", "to keep the quota"
"""In what the log says of a context that a client removes while another request waits to read it, and of one that gives
way to a newer upload."""

_HEALTH_S = 10.0
"""So soon `/health` and `/metrics` must answer."""

_MAX_SHOWN = 20


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="(default 30)")
    parser.add_argument("--honest", type=int, default=64, help="clients (default 64)")
    parser.add_argument("--hostile", type=int, default=32, help="clients (default 32)")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of hostile clients (default {', '.join(KINDS)})")
    parser.add_argument("--bodies", type=int, help="fuzzed ones (default 10,000 in 30 minutes)")
    parser.add_argument(
        "--think",
        type=float,
        metavar="SECONDS",
        help="between an answer and the next question (default: such that honest clients alone keep the server busy "
        "for a third of the time)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of what clients draw")
    parser.add_argument("--model", default="embedded", help="a pair (default embedded)")
    parser.add_argument("--options", default=_SERVER, help=f"of triforce serve (default: {_SERVER})")
    given = parser.parse_args()
    if unknown := set(given.kinds.split(",")) - set(KINDS):
        parser.error(f"--kinds: {', '.join(sorted(unknown))}: there are {', '.join(KINDS)}")
    if "fuzzed bodies" not in given.kinds.split(",") or given.hostile == 0:
        given.bodies = 0
    elif given.bodies is None:
        given.bodies = math.ceil(_BODIES_A_MINUTE * given.minutes)
    with serving(given, TRIFORCE_CONTEXTS_MAX=_CONTEXTS_MAX) as server:
        found = asyncio.run(HostileLoad(given, server).run())
        lines = server.log.read_text().splitlines()[2:]  # the first two say where it listens, and that it is ready
        notes = (line for line in lines if not line.startswith("{") and not any(one in line for one in _EXPECTED))
        found["notes"] = dict(Counter(notes).most_common())
    found["exit_code"] = server.process.returncode
    found["promises"] = promises(given, found)
    show(given, found)
    write_json(given, found)
    sys.exit(not all(one["kept"] for one in found["promises"]))


_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "times": {"type": "integer"}},
    "required": ["name", "times"],
}
"""Of answers in a form."""


@dataclass(frozen=True)
class Question:
    """An honest request, whose answer is drawn with a seed."""

    path: str
    fields: dict[str, Any]

    def request(self, stream: bool) -> bytes:
        return http_request("POST", self.path, self.fields | {"stream": stream})


def questions(context: LogBook) -> list[Question]:
    """Some that a text continues, some about the saved context, some with a text of their own; among each kind are some
    with several answers, with stops, with logprobs, and in a form.

    Args: `context` is what the saved context has.
    """
    found = []
    for number in range(24):
        fields: dict[str, Any] = {"seed": number, "temperature": 1, "max_tokens": (4, 8, 16, 32)[number % 4]}
        if number % 3 == 0:
            fields |= {"prompt": PROMPTS[number // 3 % len(PROMPTS)]}
        else:
            fact = context.facts[number]
            saved = number % 3 == 1
            asked = fact.question if saved else f"{LogBook(100 + number).write(60)}\n{fact.question}"
            fields |= {"messages": [{"role": "user", "content": asked}], "context": _CONTEXT if saved else None}
        path = COMPLETION if "prompt" in fields else CHAT
        if number // 3 % 4 == 1:
            fields |= {"n": 2}
        if number // 3 % 4 == 2:
            fields |= {"stop": [" the", ".\n"]}
        if number // 3 % 4 == 3:
            fields |= {"logprobs": 2} if path == COMPLETION else {"logprobs": True, "top_logprobs": 2}
        if number % 8 == 2:
            fields |= {"response_format": {"type": "json_schema", "json_schema": {"name": "found", "schema": _SCHEMA}}}
        found.append(Question(path, fields))
    return found


@dataclass(frozen=True)
class Said:
    """What an answer's client compares."""

    texts: dict[int, tuple[str, str | None]]
    tokens: list[tuple[int, str]]
    """Of answers with logprobs, each with the number of its answer."""
    logprobs: list[float]

    @classmethod
    def of(cls, reply: Reply) -> Said:
        """Raises:
        ValueError: the reply is no whole answer.
        """
        if reply.status != 200 or reply.rest:
            raise ValueError(f"status {reply.status}: {reply.body[:300]!r} {reply.rest[:100]!r}")
        streamed = reply.headers["content-type"].startswith("text/event-stream")
        if streamed and reply.events[-1:] != ["[DONE]"]:
            raise ValueError(f"the stream ends with {reply.events[-1:]}")
        tokens, logprobs = [], []
        for event in reply.events[:-1] if streamed else [reply.json]:
            for choice in event["choices"]:
                given = choice.get("logprobs") or {}
                several = given.get("content") or []
                tokens += [(choice["index"], word) for word in given.get("tokens") or [one["token"] for one in several]]
                logprobs += given.get("token_logprobs") or [one["logprob"] for one in several]
        order = sorted(range(len(tokens)), key=lambda at: tokens[at][0])  # a stream has answers by turns
        return cls(reply.texts, [tokens[at] for at in order], [logprobs[at] for at in order])

    def is_like(self, other: Said) -> bool:
        near = all(abs(a - b) <= _NEAR for a, b in zip(self.logprobs, other.logprobs, strict=False))
        return self.texts == other.texts and self.tokens == other.tokens and near


@dataclass
class Honest:
    """What came of honest requests."""

    waits_s: list[float] = field(default_factory=list)
    """From a question to its whole answer, with all that was waited for where it was refused."""
    refused: Counter[str] = field(default_factory=Counter)
    """Answers that said to ask again, by status and code."""
    wrong: list[str] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)
    asked: int = 0


class HostileLoad:
    """One run."""

    def __init__(self, given: argparse.Namespace, server: Server) -> None:
        self._given, self._server, self._port = given, server, server.port
        self._seconds = 60 * given.minutes
        self._process = psutil.Process(server.pid)
        self._honest, self._tally = Honest(), Tally()
        self._samples: list[dict[str, Any]] = []
        self._began = self._until = time.monotonic()
        self._phase = 0
        self._late_s = 0.0  # the longest time that this program itself kept its clients waiting

    async def run(self) -> dict[str, Any]:
        """What was counted."""
        self._book = LogBook(1)
        self._upload = upload_request(_CONTEXT, self._book.write(1500))
        await self._add_context()
        self._questions = questions(self._book)
        began = time.monotonic()
        self._alone = [Said.of(await self._ask("127.0.0.1", one.request(False))) for one in self._questions]
        if self._given.think is None:
            self._given.think = 3 * self._given.honest * (time.monotonic() - began) / len(self._questions)
        for one, said in zip(self._questions, self._alone, strict=True):
            if not Said.of(await self._ask("127.0.0.1", one.request(True))).is_like(said):
                self._honest.wrong.append(f"streamed, while nobody else asks: {one}")
        first, self._began = await self._sample(), time.monotonic()
        early = min(_EARLY_S, self._seconds / 3)
        settled = []
        for seconds in (early, self._seconds - early):
            await self._load(seconds)
            settled.append(await self._settle(first["descriptors"]))
        return self._figures(first, *settled)

    async def _load(self, seconds: float) -> None:
        """All clients for so long, and until honest ones have their answers."""
        given, self._until = self._given, time.monotonic() + seconds
        self._phase += 1
        seed = f"{given.seed} {self._phase}"
        kinds = hostile_clients(given.kinds.split(","), given.hostile, self._port, seed, self._tally)
        fuzzers = kinds.pop("fuzzed bodies", [])
        hostile = [asyncio.create_task(one.run()) for several in kinds.values() for one in several]
        bodies = math.ceil(given.bodies * seconds / self._seconds)
        shares = [len(range(at, bodies, len(fuzzers))) for at in range(len(fuzzers))]
        fuzzing = [
            asyncio.create_task(one.run_bodies(share, 0.9 * seconds))
            for one, share in zip(fuzzers, shares, strict=True)
        ]
        honest = [asyncio.create_task(self._ask_often(number)) for number in range(given.honest)]
        watch = asyncio.create_task(self._watch())
        tick = asyncio.create_task(self._tick())
        while time.monotonic() < self._until and self._server.process.poll() is None:
            await asyncio.sleep(0.2)
            for one in (*hostile, *fuzzing, *honest, watch, tick):
                if one.done() and not one.cancelled() and (error := one.exception()):
                    raise error
        await self._end([*hostile, watch, tick])
        await asyncio.wait([*honest, *fuzzing], timeout=PATIENCE_S + 10)
        for one in (*honest, *fuzzing):
            if one.done():
                one.result()
        await self._end([*honest, *fuzzing])

    @staticmethod
    async def _end(tasks: list[asyncio.Task[None]]) -> None:
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask_often(self, number: int) -> None:
        """One honest client."""
        draw = random.Random(f"honest {self._given.seed} {self._phase} {number}")
        honest, end, source = self._honest, self._until, f"127.0.1.{number + 1}"
        pause_s = draw.uniform(0, min(self._given.think, self._seconds / 4))
        while True:
            await asyncio.sleep(min(pause_s, max(0.0, end - time.monotonic()) + 0.01))
            pause_s = self._given.think * draw.uniform(0.1, 1.9)
            if time.monotonic() > end or self._server.process.poll() is not None:
                return
            which, stream = draw.randrange(len(self._questions)), draw.random() < 0.5
            label = f"question {which}{', streamed' if stream else ''}"
            honest.asked += 1
            began = time.monotonic()
            try:
                reply = await self._ask(source, self._questions[which].request(stream), draw)
                said = Said.of(reply)
            except TimeoutError:
                honest.unanswered.append(f"{began - self._began:.0f} s, {label}: nothing within {PATIENCE_S:.0f} s")
            except OSError as error:
                honest.unanswered.append(f"{began - self._began:.0f} s, {label}: {type(error).__name__}: {error}")
            except ValueError as error:
                honest.unanswered.append(f"{began - self._began:.0f} s, {label}: {error}")
                if "context_not_found" in str(error):
                    await self._add_context()
            else:
                honest.waits_s.append(time.monotonic() - began)
                if not said.is_like(self._alone[which]):
                    honest.wrong.append(f"{began - self._began:.0f} s, {label}: {said}; alone {self._alone[which]}")

    async def _add_context(self) -> None:
        reply = await self._ask("127.0.0.1", self._upload)
        if reply.status not in (201, 409):
            raise SystemExit(f"the text of the honest questions got {reply.status}: {reply.body.decode()}")

    async def _ask(self, source: str, raw: bytes, draw: random.Random | None = None) -> Reply:
        """Asks, and asks again when it is told to.

        Raises:
            TimeoutError, OSError, ValueError: no whole answer came.
        """
        end = time.monotonic() + PATIENCE_S
        while True:
            reply = await ask_from(source, self._port, raw, max(0.1, end - time.monotonic()))
            if reply.status not in (429, 503):
                return reply
            self._honest.refused[f"{reply.status} {reply.json['error']['code']}"] += 1
            wait_s = float(reply.headers.get("retry-after", 5))
            await asyncio.sleep(wait_s * (draw.uniform(1, 1.2) if draw else 1))
            if time.monotonic() > end:
                raise TimeoutError

    async def _tick(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.1)
            self._late_s = max(self._late_s, time.monotonic() - began - 0.1)

    async def _watch(self) -> None:
        every_s, began = min(10.0, self._seconds / 12), time.monotonic()
        for number in range(10**6):
            await asyncio.sleep(max(0.0, began + number * every_s - time.monotonic()))
            if self._server.process.poll() is not None:
                return
            found = await self._sample()
            self._samples.append(found)
            answered, outcomes = len(self._honest.waits_s), sum(map(Counter.total, self._tally.outcomes.values()))
            mib = found["rss_bytes"] / 2**20
            print_note(
                f"{found['second']:6.0f} s: {answered} honest answers, {self._honest.asked - answered} more asked for, "
                f"{outcomes} ends of hostile requests, {mib:,.0f} MiB, {found['descriptors']} descriptors, "
                f"{found['threads']} threads"
            )

    async def _sample(self) -> dict[str, Any]:
        """The server, as it is seen from outside and as it sees itself."""
        process = self._process
        with process.oneshot():
            found: dict[str, Any] = {
                "second": time.monotonic() - self._began,
                "rss_bytes": process.memory_info().rss,
                "descriptors": process.num_fds(),
                "threads": process.num_threads(),
            }
        found["children"] = len(process.children(recursive=True))
        began = time.monotonic()
        try:
            health = await ask_from("127.0.0.1", self._port, http_request("GET", "/health"), _HEALTH_S)
            found |= {"health": health.status, "health_s": time.monotonic() - began}
            metrics = await ask_from("127.0.0.1", self._port, http_request("GET", "/metrics"), _HEALTH_S)
        except (OSError, ValueError) as error:
            return (
                {"health_s": time.monotonic() - began} | found | {"health": f"{type(error).__name__} {error}".strip()}
            )
        if metrics.status != 200:
            return found | {"health": f"/metrics got {metrics.status}: {metrics.body[:200]!r}"}
        told = figures_of(metrics)
        names = "queue_length", "running_answers", "unread_total", "generated_tokens_total", *_OF_MEMORY
        return found | {name: told[f"triforce_{name}"] for name in names}

    async def _settle(self, descriptors: int) -> dict[str, Any]:
        """The server when nothing runs any more and it has `descriptors` again, or had time for that.

        Raises:
            SystemExit: it has ended.
        """
        end, rested = time.monotonic() + _SETTLE_S, 0
        while True:
            await asyncio.sleep(5.0)
            if (code := self._server.process.poll()) is not None:
                raise SystemExit(f"the server has ended with {code}: {self._server.log.read_text()[-2000:]}")
            now = await self._sample()
            idle = now.get("queue_length") == now.get("running_answers") == 0
            rested = rested + 1 if idle and now["descriptors"] <= descriptors else 0
            if rested == _RESTED or time.monotonic() > end:
                return now

    def _figures(self, first: dict[str, Any], early: dict[str, Any], last: dict[str, Any]) -> dict[str, Any]:
        honest, tally = self._honest, self._tally
        mark_s = early["second"]
        ends = [0.0, *(mark_s + _EARLY_S * number for number in range(1000))]
        windows = [  # whole ones, the first but for the pause
            [one["rss_bytes"] for one in self._samples if begin <= one["second"] < end]
            for begin, end in itertools.pairwise(ends)
            if end <= max(mark_s, last["second"])
        ]
        waits = sorted(honest.waits_s) or [math.nan]
        return {
            "honest": {
                "asked": honest.asked,
                "answered": len(honest.waits_s),
                "wrong": len(honest.wrong),
                "unanswered": len(honest.unanswered),
                "refused": dict(honest.refused),
                "wait_s": {
                    "p50": statistics.median(waits),
                    "p99": waits[int(0.99 * len(waits))],
                    "longest": waits[-1],
                },
                "examples": {"wrong": honest.wrong[:_MAX_SHOWN], "unanswered": honest.unanswered[:_MAX_SHOWN]},
            },
            "longest_delay_here_s": self._late_s,
            "hostile": {kind: dict(several.most_common()) for kind, several in sorted(tally.outcomes.items())},
            "fuzzed_bodies": tally.bodies,
            "faults": {"count": len(tally.faults), "examples": tally.faults},
            "memory": {
                "settled_s": mark_s,
                "at_mark_bytes": max((x for x in self._samples if x["second"] < mark_s), key=lambda x: x["second"])[
                    "rss_bytes"
                ],
                "highest_after_bytes": max(x["rss_bytes"] for x in self._samples if x["second"] >= mark_s),
                "settled_bytes": [one["rss_bytes"] for one in (early, last)],
                **{f"settled_{name}": [one.get(name, math.nan) for one in (early, last)] for name in _OF_MEMORY},
                "means_bytes": [statistics.fmean(several) for several in windows if several],
                "highest_bytes": [max(several) for several in windows if several],
            },
            **{
                name: {
                    "first": first[name],
                    "early": early[name],
                    "max": max(one[name] for one in self._samples),
                    "last": last[name],
                }
                for name in ("descriptors", "threads", "children")
            },
            "health": {
                "longest_s": max(one["health_s"] for one in self._samples),
                "others": [one["health"] for one in self._samples if one["health"] != 200],
            },
            "left": [one.get(name) for one in (early, last) for name in ("queue_length", "running_answers")],
            "alive": self._server.process.poll() is None,
            "samples": self._samples,
        }


def promises(given: argparse.Namespace, found: dict[str, Any]) -> list[dict[str, Any]]:
    """What must hold, whether it was kept, and the figures that say so."""
    honest, memory, faults, bodies = found["honest"], found["memory"], found["faults"]["count"], found["fuzzed_bodies"]
    settled = [memory[f"settled_{name}"] for name in ("bytes", *_OF_MEMORY)]
    lasting = [resident - kv - free for resident, kv, free in zip(*settled, strict=True)]
    health, ended = found["health"], found["alive"] and found["exit_code"] == 143
    mib = {name: ", ".join(f"{one / 2**20:,.0f}" for one in memory[f"{name}_bytes"]) for name in _MEMORY}
    at_mark, highest = (memory[f"{name}_bytes"] for name in ("at_mark", "highest_after"))
    after = memory["means_bytes"][1:]
    means = f"x {after[-1] / after[0]:.3f} from the first to the last" if len(after) > 1 else "too few to compare"
    loaded = f"x {highest / at_mark:.3f}; 3-minute means {mib['means']} ({means}), at most {mib['highest']} MiB"
    growth = f"x {lasting[1] / lasting[0]:.3f}, {mib['settled']} MiB with {mib['settled_kv_cache']} of KV cache and "
    growth += f"{mib['settled_free_memory']} of free memory"
    came = honest["answered"] == honest["asked"] > 0

    def flat(name: str, since: str) -> tuple[str, bool, str]:
        one = found[name]
        figures = f"{one['first']}, {one['early']} at the pause, at most {one['max']}, then {one['last']}"
        return f"{name} do not grow", one["last"] <= one[since] + 2, figures

    rows = [
        ("every honest answer comes", came, f"{honest['answered']} of {honest['asked']}"),
        ("it is the text that it is alone", not honest["wrong"], f"{honest['wrong']} are not"),
        ("all fuzzed bodies are dealt with", bodies >= given.bodies, f"{bodies}"),
        ("no 5xx but 503; errors say why", not faults, f"{faults} other answers"),
        ("nothing waits or runs at the pause, nor afterwards", set(found["left"]) == {0}, f"{found['left']}"),
        (f"memory under load grows at most x {_MOST_GROWTH}", highest <= _MOST_GROWTH * at_mark, loaded),
        (
            f"what is held without answers grows x {_MOST_GROWTH} at most",
            lasting[1] <= _MOST_GROWTH * lasting[0],
            growth,
        ),
        flat("descriptors", "first"),
        flat("threads", "early"),  # pools of threads are filled as they are used
        flat("children", "first"),
        (
            "/health says ready",
            not health["others"],
            f"{len(health['others'])} times not; within {health['longest_s']:.2f} s",
        ),
        ("the log has requests only", not found["notes"], f"{sum(found['notes'].values())} other lines"),
        ("SIGTERM ends the server with 143", ended, f"{found['exit_code']}{'' if found['alive'] else ', before that'}"),
    ]
    return [{"promise": name, "kept": kept, "found": figures} for name, kept, figures in rows]


def show(given: argparse.Namespace, found: dict[str, Any]) -> None:
    """Prints the tables, and examples of what went wrong."""
    honest = found["honest"]
    waits = ", ".join(f"{name} {seconds:.1f}" for name, seconds in honest["wait_s"].items())
    late = f"(this program kept clients waiting for {found['longest_delay_here_s']:.1f} s at most)"
    refused = ", ".join(f"{code}: {count}" for code, count in honest["refused"].items()) or "never"
    wrong = *honest["examples"]["wrong"][:3], *honest["examples"]["unanswered"][:3], *found["faults"]["examples"][:5]
    outcomes = [
        {"hostile clients": kind, "outcomes": ", ".join(f"{outcome}: {count}" for outcome, count in several.items())}
        for kind, several in found["hostile"].items()
    ]
    notes = [f"wait for an honest answer in s: {waits} {late}", f"honest clients were told to ask again: {refused}"]
    notes += [str(one)[:600] for one in (*wrong, *list(found["notes"].items())[:5])]
    clients = f"{given.honest} honest and {given.hostile} hostile clients, {given.minutes:g} minutes"
    print_table(given, "what came of hostile clients' requests", outcomes, ("hostile clients", "outcomes"))
    print_table(given, clients, found["promises"], notes=notes)


if __name__ == "__main__":
    main()
