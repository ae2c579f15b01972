"""The conversations over HTTP of the golden corpus: what is asked of a server, and how its answers are written down.

Each scenario has a server of its own, so that what is known before a request does not depend on other scenarios.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import signal
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from forks import Fork
from golden_commands import BOOK, WORDS
from golden_process import command, environment, imported
from golden_rules import document, plain, shown

CHAT, COMPLETION, CONTEXTS = "/v1/chat/completions", "/v1/completions", "/v1/contexts"

HEADERS = (
    "content-type",
    "cache-control",
    "x-accel-buffering",
    "x-content-type-options",
    "content-security-policy",
    "referrer-policy",
    "retry-after",
    "www-authenticate",
    "allow",
)
"""Those of an answer that are written down."""

LONG_S = 120
"""How long anything may take."""


@dataclass(frozen=True)
class Ask:
    """A request."""

    method: str
    path: str
    body: dict[str, Any] | bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    note: str = ""
    """What stands for a body that is too long to be written down."""


def chat(*said: str, **fields: Any) -> Ask:
    """Questions and answers in turn; greedy where nothing is said of sampling."""
    messages = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(said)]
    return Ask("POST", CHAT, {"messages": messages, "max_tokens": 5, "temperature": 0, "seed": 1} | fields)


def complete(prompt: Any, **fields: Any) -> Ask:
    return Ask("POST", COMPLETION, {"prompt": prompt, "max_tokens": 5, "temperature": 0, "seed": 1} | fields)


def posted(path: str, body: Any, **headers: str) -> Ask:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Ask("POST", path, raw, {name.replace("_", "-"): value for name, value in headers.items()})


def upload(name: str, text: str, **fields: str) -> Ask:
    parts = [f'name="{part}"\r\n\r\n{value}' for part, value in {"name": name, **fields}.items()]
    parts.append(f'name="file"; filename="a.txt"\r\nContent-Type: text/plain\r\n\r\n{text}')
    body = "".join(f"--edge\r\nContent-Disposition: form-data; {part}\r\n" for part in parts) + "--edge--\r\n"
    note = f"a form: {json.dumps({'name': name, **fields})}, and a file of {len(text.encode()):,} bytes"
    return Ask("POST", CONTEXTS, body.encode(), {"Content-Type": "multipart/form-data; boundary=edge"}, note)


@dataclass(frozen=True)
class Scenario:
    name: str
    asks: tuple[Ask, ...]
    options: str = "$TARGET"
    """Of `triforce serve`; words as in golden_commands.WORDS."""
    play: Callable[[Server], Iterator[str]] | None = None
    """What is done besides."""

    @property
    def group(self) -> str:
        return self.name.partition("/")[0]


class Server:
    """`triforce serve` as a fork of this process, at a port that was free."""

    def __init__(self, fork: Fork, log: IO[bytes]) -> None:
        self.fork, self._log, self.port, self.lines = fork, log, 0, 0
        self.wait(lambda: "\nready\n" in self.said)
        found = re.search(r"127\.0\.0\.1:(\d+)", self.said)
        assert found, self.said
        self.port = int(found[1])

    @property
    def said(self) -> str:
        """All of its log."""
        return os.pread(self._log.fileno(), 2**24, 0).decode()

    def wait(self, holds: Callable[[], object]) -> None:
        end = time.monotonic() + LONG_S
        while not holds():
            assert self.fork.ended() is None and time.monotonic() < end, f"it never came: {self.said}"
            time.sleep(0.005)

    def open(self, ask: Ask) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LONG_S)
        raw = json.dumps(ask.body).encode() if isinstance(ask.body, dict) else ask.body
        connection.request(ask.method, ask.path, raw, ask.headers)
        return connection

    def answer(self, ask: Ask) -> tuple[http.client.HTTPResponse, bytes]:
        """A whole answer, once the server has noted it in its log: it does so when the client has it already."""
        connection = self.open(ask)
        response = connection.getresponse()
        body = response.read()
        connection.close()
        self.noted()
        return response, body

    def noted(self) -> None:
        """Waits for one more line in the log."""
        self.lines += 1
        self.wait(lambda: self.said.count('\n{"time"') >= self.lines)

    def metric(self, name: str) -> float:
        """A value of /metrics."""
        _, body = self.answer(Ask("GET", "/metrics"))
        found = re.search(rf"^triforce_{name} (\S+)$", body.decode(), re.MULTILINE)
        assert found, body
        return float(found[1])


@contextmanager
def serving(options: str, models: Path, folder: Path) -> Iterator[Server]:
    """A server in `folder`."""
    imported()
    for checkpoint in models.iterdir():
        (folder / checkpoint.name).symlink_to(checkpoint)
    for word, meant in WORDS.items():
        options = options.replace(f"${word}", meant)
    arguments = ["serve", *shlex.split(options), "--port", "0"]
    with tempfile.TemporaryFile() as log, open(os.devnull, "rb") as nothing:
        fork = Fork(command(arguments), (nothing.fileno(), log.fileno(), log.fileno()), environment(), folder=folder)
        try:
            yield Server(fork, log)
        finally:
            fork.kill()


def record(scenario: Scenario, models: Path, folder: Path) -> str:
    """Plays a scenario in `folder`, and writes down what comes."""
    with serving(scenario.options, models, folder) as server:
        parts = [f"$ triforce serve {scenario.options}\n"]
        parts += [_asked(ask) + _answered(*server.answer(ask)) for ask in scenario.asks]
        parts += scenario.play(server) if scenario.play else ()
        os.kill(server.fork.pid, signal.SIGTERM)
        code = server.fork.wait(LONG_S)
        parts.append(f"SIGTERM: exit code {code}\nlog:\n{_indented(_log(server.said))}")
    return "".join(parts)


def _asked(ask: Ask) -> str:
    headers = "".join(f"> {name}: {value}\n" for name, value in ask.headers.items())
    given = ask.body.decode() if isinstance(ask.body, bytes) else shown(ask.body) if ask.body is not None else ""
    return f"> {ask.method} {ask.path}\n{headers}{_indented(ask.note or given)}"


def _answered(response: http.client.HTTPResponse, body: bytes) -> str:
    given = {name.lower(): value for name, value in response.getheaders()}
    parts = [f"< {response.status}\n", *(f"< {name}: {given[name]}\n" for name in HEADERS if name in given)]
    kind = given.get("content-type", "")
    if kind.startswith("text/event-stream"):
        parts.append(_indented(_stream(body.decode())))
    elif kind.startswith("application/json"):
        parts.append(_indented(shown(document(json.loads(body)))))
    elif "version=0.0.4" in kind:
        parts.append(_indented(_metric_names(body.decode())))
    else:
        parts.append(_indented(f"{len(body.decode().splitlines()):,} lines that begin with: {body.decode()[:60]!r}"))
    return "".join(parts)


def _metric_names(text: str) -> str:
    """What is measured, with its labels; the numbers, and the borders of histograms, are left out."""
    found = {
        re.sub(r'le="[^"]*"', "le", line.rpartition(" ")[0]): None
        for line in text.splitlines()
        if line.startswith("triforce_")
    }
    return "\n".join(found)


def _stream(text: str) -> str:
    """A stream, whose pieces come as the clock has it: the kinds of events in their order, of each choice by itself;
    pieces put together; and whole what comes once."""
    kinds, choices, once = list[str](), defaultdict[int, dict[str, Any]](dict), list[Any]()
    progress = False
    for event in text.removesuffix("\n\n").split("\n\n"):
        if event.startswith(":"):
            continue  # a sign of life, after a time
        data = event.removeprefix("data: ")
        found: Any = data if data == "[DONE]" else json.loads(data)
        kind, choice = _kind(found)
        if choice is not None:
            _gather(choices[choice], found, kind)
        if not kinds or kinds[-1] != kind:
            kinds.append(kind if choice is None else "choices")
            if kinds[-2:-1] == ["choices"] and choice is not None:
                kinds.pop()
        if kind not in ("text", "[DONE]") and not (kind == "progress" and progress):
            once.append(_once(found))  # of how a prompt is read the first word: how many follow is the clock's
        progress = progress or kind == "progress"
    ordered = sorted(once, key=lambda event: event["choices"][0]["index"] if event.get("choices") else 0)
    described = {"kinds": kinds, "choices": [choices[index] for index in sorted(choices)], "events": ordered}
    return shown(document(described))


def _kind(event: dict[str, Any] | str) -> tuple[str, int | None]:
    """What an event says, in a word, and of which choice."""
    if isinstance(event, str):
        return event, None
    if "error" in event or "prompt_progress" in event:
        return "error" if "error" in event else "progress", None
    if not event.get("choices"):
        return "usage" if "usage" in event else "other", None
    choice = event["choices"][0]
    kind = "end" if choice["finish_reason"] else "role" if "role" in choice.get("delta", ()) else "text"
    return kind, choice["index"]


def _gather(choice: dict[str, Any], event: dict[str, Any], kind: str) -> None:
    """Adds a piece of a choice to what is known of it."""
    found, kinds = event["choices"][0], choice.setdefault("kinds", [])
    kinds += [] if kinds[-1:] == [kind] else [kind]
    text = found.get("text", found.get("delta", {}).get("content", ""))
    choice["text"] = choice.get("text", "") + (text or "")
    for name, values in (found.get("logprobs") or {}).items():
        choice.setdefault("logprobs", {}).setdefault(name, []).extend(values or [])
    choice["fields"] = sorted({*choice.get("fields", []), *event, *found})
    choice["finish_reason"] = found.get("finish_reason") or choice.get("finish_reason")


def _once(event: dict[str, Any]) -> Any:
    """An event that does not come in pieces; of how far reading is, what the clock does not say."""
    if "prompt_progress" in event:
        progress = event["prompt_progress"]
        return {**event, "prompt_progress": {**progress, "processed": "<tokens>"}}
    return event


def _log(text: str) -> str:
    rows = []
    for line in text.splitlines():
        rows.append(json.dumps(document(json.loads(line))) if line.startswith("{") else plain(line + "\n").rstrip("\n"))
    # How often the metrics were asked for until something was so is the clock's.
    return "\n".join(row for row, before in zip(rows, ["", *rows], strict=False) if row and row != before)


def _indented(text: str) -> str:
    return "".join(f"    {line}".rstrip() + "\n" for line in text.splitlines())


def _full_queue(server: Server) -> Iterator[str]:
    """One answer is written, one request waits, and there is no room for a third."""
    first = server.open(complete("A long answer", max_tokens=4000, ignore_eos=None, stream=True))
    stream = first.getresponse()
    stream.readline()
    waiting: list[Any] = []
    second = threading.Thread(target=lambda: waiting.append(_whole(server, chat("Who waits?"))))
    second.start()
    end = time.monotonic() + LONG_S
    while server.metric("queue_length") < 1:
        assert time.monotonic() < end
        time.sleep(0.01)
    third = chat("Is there room?")
    yield "(an answer is being written, and a request waits)\n" + _asked(third) + _answered(*server.answer(third))
    stream.close()
    first.close()
    second.join(LONG_S)
    server.noted()
    server.noted()
    yield "(the first client goes away, and the second request is answered)\n" + _answered(*waiting[0])


def _whole(server: Server, ask: Ask) -> tuple[http.client.HTTPResponse, bytes]:
    """As `Server.answer`, from another thread, which does not wait for the log."""
    connection = server.open(ask)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response, body


def _too_long(server: Server) -> Iterator[str]:
    """A body above the limit is refused before it is sent."""
    ask = Ask("POST", COMPLETION, None, {"Content-Length": str(2**25 + 1)})
    yield _asked(ask) + _answered(*server.answer(ask))


TEMPERATURE = {"temperature": 0.9, "seed": 7}

SCENARIOS = (
    Scenario("pages/all", tuple(Ask("GET", path) for path in ("/", "/page.css", "/page.js", "/health", "/v1/models"))),
    Scenario("pages/metrics", (Ask("GET", "/health"), complete("It"), Ask("GET", "/nowhere"), Ask("GET", "/metrics"))),
    Scenario(
        "chat/greedy-then-a-follow-up",
        (chat("Who came?"), chat("Who came?", "The Ardent.", "From where?", max_tokens=4)),
        "$TALKER",
    ),
    Scenario(
        "chat/sampled",
        (chat("Who came?", **TEMPERATURE), chat("Who came?", n=3, max_tokens=4, **TEMPERATURE)),
        "$TALKER",
    ),
    Scenario(
        "chat/streamed",
        (
            chat("Who came?", stream=True),
            chat("From where?", stream=True, stream_options={"include_usage": True}, return_progress=True),
            chat("With what?", stream=True, n=2, logprobs=True, top_logprobs=2, timings_per_token=True, **TEMPERATURE),
        ),
        "$TALKER",
    ),
    Scenario("chat/logprobs", (chat("Who came?", logprobs=True, top_logprobs=3, max_tokens=3),), "$TALKER"),
    Scenario(
        "chat/roles-and-parts",
        (
            posted(
                CHAT,
                {
                    "model": "talker",
                    "messages": [
                        {"role": "developer", "content": "Be brief."},
                        {
                            "role": "user",
                            "content": [{"type": "text", "text": "Who "}, {"type": "text", "text": "came?"}],
                        },
                    ],
                    "max_completion_tokens": 3,
                    "seed": 2,
                    "user": "somebody",
                    "tools": [],
                },
            ),
        ),
        "$TALKER",
    ),
    Scenario("chat/without-a-template", (chat("Who came?"), chat("Who came?", "The Ardent.", "When?"))),
    Scenario("chat/three-tiers", (chat(BOOK[:500], max_tokens=12), complete(BOOK[:400], max_tokens=12)), "$PAIR"),
    Scenario(
        "completions/greedy-and-sampled",
        (
            complete("It rained."),
            complete([5, 6, 7], **TEMPERATURE),
            complete("It", temperature=1, top_k=5, top_p=0.5),
            complete("It", temperature=1.5, min_p=0.9),
        ),
    ),
    Scenario(
        "completions/stop",
        (
            complete("It rained.", max_tokens=24, stop=["alZ", "zz"]),
            complete("It rained.", max_tokens=24, stop="alZ", stream=True),
            complete("It rained.", max_tokens=6, stop="alZ", stream=True),
        ),
    ),
    Scenario(
        "completions/streamed",
        (
            complete("It rained.", stream=True, logprobs=2, stream_options={"include_usage": True}),
            complete("It snowed.", stream=True, n=2, **TEMPERATURE),
        ),
    ),
    Scenario("completions/logprobs", (complete("It rained.", logprobs=2, max_tokens=3),)),
    Scenario(
        "completions/defaults-of-the-server",
        (posted(COMPLETION, {"prompt": "It rained."}),),
        "$TARGET --max-new-tokens 6 --seed 4 --temperature 0.7 --top-k 9",
    ),
    Scenario(
        "contexts/from-upload-to-removal",
        (
            upload("book", BOOK[:600]),
            Ask("GET", CONTEXTS),
            upload("book", BOOK[:600]),
            upload("book", "Another text."),
            chat("Who came?", context="book"),
            complete(" And then", context="book", stream=True, return_progress=True),
            upload("notes", BOOK[600:900], return_progress="true"),
            upload("../notes", "Text."),
            upload("empty", ""),
            Ask("DELETE", f"{CONTEXTS}/notes"),
            Ask("DELETE", f"{CONTEXTS}/notes"),
            Ask("DELETE", f"{CONTEXTS}/.notes"),
            chat("Who came?", context="notes"),
            Ask("POST", CONTEXTS, b"{}", {"Content-Type": "application/json"}),
        ),
        "$TALKER",
    ),
    Scenario(
        "errors/bodies",
        (
            posted(CHAT, b"{"),
            posted(CHAT, b"[]"),
            posted(CHAT, {}),
            posted(CHAT, {"messages": []}),
            posted(CHAT, {"messages": [{"role": "tool", "content": "x"}]}),
            posted(CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
            chat("x", tools=[{"type": "function"}]),
            chat("x", response_format={"type": "xml"}),
            chat("x", prompt="x"),
            chat("x", top_logprobs=2),
            chat("x", logprobs=True, top_logprobs=21),
            chat("x", model="gpt-4"),
            chat("x", context="nothing"),
            chat("x", stream="yes"),
            chat("x", stream_options={"include_usage": True}),
            posted(COMPLETION, {}),
            complete([]),
            complete([5, 320]),
            complete("x", temperature=-1),
            complete("x", temperature="hot"),
            complete("x", top_p=0),
            complete("x", min_p=1.5),
            complete("x", n=129),
            complete("x", max_tokens=0),
            complete("x", seed=-1),
            complete("x", seed=2**63),
            complete(["x", [5]]),
            complete(["x"] * 65, n=2),
            complete([[5], [320]]),
            complete("x", stop=""),
            complete("x", stop=5),
            complete("x", echo=True),
            complete("x" * 5000),
            complete("x", max_tokens=5000, stream=True),
        ),
    ),
    Scenario(
        "errors/paths-and-methods",
        (
            Ask("GET", "/v1/nothing"),
            Ask("GET", "/v1/models/target"),
            Ask("GET", "/v1/models/other"),
            Ask("GET", CHAT),
            Ask("POST", "/health"),
            Ask("GET", f"{CONTEXTS}/"),
        ),
    ),
    Scenario(
        "errors/hosts-and-origins",
        (
            Ask("GET", "/v1/models", None, {"Host": "elsewhere.example"}),
            Ask("GET", "/v1/models", None, {"Origin": "https://elsewhere.example"}),
            Ask("GET", "/v1/models", None, {"Host": "chat.example"}),
        ),
        "$TARGET --allow-host chat.example",
    ),
    Scenario(
        "errors/keys",
        (
            Ask("GET", "/v1/models"),
            Ask("GET", "/v1/models", None, {"Authorization": "Bearer wrong"}),
            Ask("GET", "/v1/models", None, {"Authorization": "Bearer secret"}),
            Ask("GET", "/metrics"),
            Ask("GET", "/health"),
        ),
        "$TARGET --api-key secret",
    ),
    Scenario("errors/body-too-long", (), play=_too_long),
    Scenario("errors/full-queue", (), "$TARGET --max-sequences 1 --max-queue 1", play=_full_queue),
)
