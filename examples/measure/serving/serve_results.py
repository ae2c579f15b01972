"""Measures `triforce serve` from outside: many clients for minutes, four answers while a book is read, eight clients
with one book against one, a long chat about a book.

    python examples/measure/serving/serve_results.py --prompt-file book.txt --parts load --minutes 10
    python examples/measure/serving/serve_results.py --prompt-file book.txt --parts reading,clients,link,chat

Each part starts a server of its own, whose contexts are in a temporary directory. Exits with 1 if a promise of the part
`load` does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # where `report` and `serving` are, if this is run as a script
from report import figure_rows, make_parser, print_table, write_json
from triforce.cli.terminal.streams import print_note
from triforce.tp.weights.registry import find_pair
from triforce.tp.weights.tokenizer import Tokenizer

from serving.bodies import CHAT
from serving.load import Load, ask, connection, http_request, metrics, upload_request

_QUESTION = "What did they say to each other in chapter {}, and why?"
_PATIENCE_S = 1800.0
_LIMITED = """
from triforce.cli.app import main
from triforce.offload import Engine
load = Engine.load
Engine.load = lambda *given, **named: load(*given, **named | {"link_gbps": GBPS})
main()
"""


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--prompt-file", type=Path, required=True, help="a book")
    parser.add_argument("--parts", default="load,reading,clients,link,chat")
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--options", default="--device cpu", help="further ones of triforce serve")
    parser.add_argument("--tokens", type=int, default=32_768, help="of the book that is read or asked about")
    parser.add_argument("--minutes", type=float, default=10.0, help="of load")
    parser.add_argument("--clients", type=int, default=64, help="of load")
    parser.add_argument("--bodies", type=int, default=10_000, help="of load: malformed ones")
    parser.add_argument("--seconds", type=float, default=20.0, help="of reading: before and after it")
    parser.add_argument("--about-tokens", type=int, default=4096, help="of reading: of the text the four are about")
    parser.add_argument("--new-tokens", type=int, default=128, help="of clients and link: of each answer")
    parser.add_argument("--repeat", type=int, default=3, help="of clients and link: medians are of so many")
    parser.add_argument("--link-gbps", type=float, default=1.0, help="of link: what streams over it a second")
    parser.add_argument("--turns", type=int, default=20, help="of chat")
    given = parser.parse_args()
    texts = Texts(given)
    parts: dict[str, Callable[[argparse.Namespace, Texts], dict[str, Any]]] = {
        "load": load, "reading": reading, "clients": clients, "link": clients_with_link, "chat": chat,
    }  # fmt: skip
    found = {}
    for part in given.parts.split(","):
        print_note(f"{part}:")
        found[part] = parts[part](given, texts)
        write_json(given, found, whole=False)
    write_json(given, found)
    sys.exit(bool(found.get("load", {}).get("failures")))


class Texts:
    """Cuts texts out of the book."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._tokenizer = Tokenizer.load(find_pair(given.model)[0])
        self._ids = self._tokenizer.encode(given.prompt_file.read_text(encoding="utf-8"), False)

    def cut(self, tokens: int, first: int = 0) -> str:
        if first + tokens > len(self._ids):
            raise SystemExit(f"the book has {len(self._ids):,} tokens; {first + tokens:,} are needed")
        return self._tokenizer.decode(self._ids[first : first + tokens])


@dataclass(frozen=True)
class Server:
    """A process that serves."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path
    """What it writes to stdout and stderr."""

    @property
    def pid(self) -> int:
        return self.process.pid

    def upload(self, name: str, text: str) -> dict[str, Any]:
        reply = ask(self.port, upload_request(name, text), _PATIENCE_S)
        if reply.status != 201:
            raise RuntimeError(f"the upload got {reply.status}: {reply.body.decode()}")
        return reply.json

    def chat(self, question: str, tokens: int, **fields: Any) -> dict[str, Any]:
        """A whole answer about the context `book`."""
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": tokens, **fields}
        reply = ask(self.port, http_request("POST", CHAT, {"context": "book", **body}), _PATIENCE_S)
        if reply.status != 200:
            raise RuntimeError(f"a question got {reply.status}: {reply.body.decode()}")
        return reply.json

    def stream(self, messages: list[dict[str, str]], tokens: int, **fields: Any) -> Iterator[tuple[float, Any]]:
        """Events of an answer with the time at which each came."""
        body = {"messages": messages, "temperature": 0, "max_tokens": tokens, "stream": True, **fields}
        body |= {"timings_per_token": True, "stream_options": {"include_usage": True}}
        with (
            connection(self.port, http_request("POST", CHAT, body), _PATIENCE_S) as found,
            closing(found.makefile("rb")) as lines,
        ):
            status = lines.readline()
            for line in lines:
                if line.startswith(b"data: {"):
                    yield time.perf_counter(), json.loads(line[6:])
        if b" 200 " not in status:
            raise RuntimeError(f"a question got {status.decode()}")


@contextmanager
def serving(
    given: argparse.Namespace, *options: str, link_gbps: float | None = None, **environment: str
) -> Iterator[Server]:
    """A server, once it is ready. It gets SIGTERM at the end."""
    program = ["-m", "triforce.cli"] if link_gbps is None else ["-c", _LIMITED.replace("GBPS", str(link_gbps))]
    command = [sys.executable, *program, "serve", "--model", given.model, "--port", "0", *given.options.split()]
    with tempfile.TemporaryDirectory() as home, open(Path(home) / "log", "wb") as log:
        variables = os.environ | {"TRIFORCE_HOME": home} | environment
        process = subprocess.Popen([*command, *options], stdout=log, stderr=log, env=variables)
        try:
            while b"\nready\n" not in (text := Path(log.name).read_bytes()):
                if process.poll() is not None:
                    raise SystemExit(text.decode())
                time.sleep(0.2)
            found = re.search(rb"listening at http://[\d.]+:(\d+)", text)
            assert found
            yield Server(int(found[1]), process, Path(log.name))
        except BaseException:
            lines = Path(log.name).read_text().splitlines(keepends=True)
            sys.stderr.writelines(line for line in lines if not line.startswith("{"))
            raise
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                process.kill()


def load(given: argparse.Namespace, _: Texts) -> dict[str, Any]:
    """Many clients; in float32, so that a request's answer is the same in any company."""
    with serving(given, "--dtype", "float32", "--max-new-tokens", "8") as server:
        locked = locked_bytes(server.pid)
        run = Load(server.port, clients=given.clients, seconds=60 * given.minutes, bodies=given.bodies)
        found = run.run(print_note)
        if locked_bytes(server.pid) > locked:
            found["failures"].append(f"locked memory: {locked} bytes before, {locked_bytes(server.pid)} after")
    figures = {"longest_wait_s": found["longest_wait_s"], **found["memory"], **found["counts"]}
    title = f"{given.clients} clients, {given.minutes:g} minutes; requests by what came of them"
    print_table(given, title, figure_rows(figures), notes=found["failures"] or ["every promise holds"])
    return found


def locked_bytes(pid: int) -> int:
    """Memory of a process that is locked or pinned, on Linux; 0 elsewhere."""
    status = Path(f"/proc/{pid}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("VmLck:", "VmPin:")))


def reading(given: argparse.Namespace, texts: Texts) -> dict[str, Any]:
    """TBT of four streaming answers before, while and after a new book is read."""
    arrived: list[tuple[float, float, int]] = []  # when, seconds since the answer's last event, tokens
    ended, failed = threading.Event(), threading.Event()

    def answers(number: int, server: Server) -> None:
        question = [{"role": "user", "content": _QUESTION.format(number)}]
        try:
            while not ended.is_set():
                last: tuple[float, int] | None = None
                for now, event in server.stream(question, 1000, context="book", temperature=1, seed=number):
                    if "timings" in event and event["choices"]:
                        tokens = event["timings"]["predicted_n"]
                        if last and tokens > last[1]:
                            arrived.append((now, now - last[0], tokens - last[1]))
                        last = now, tokens
                    if ended.is_set():
                        break
        except BaseException:
            failed.set()
            raise

    with serving(given) as server:
        server.upload("book", texts.cut(given.about_tokens))
        threads = [threading.Thread(target=answers, args=(number, server)) for number in range(1, 5)]
        for thread in threads:
            thread.start()
        while metrics(server.port)["triforce_running_answers"] < 4 or len(arrived) < 40:
            if failed.is_set():
                raise SystemExit("an answer failed")
            time.sleep(0.2)
        marks = [time.perf_counter()]
        time.sleep(given.seconds)
        marks.append(time.perf_counter())
        server.upload("new", texts.cut(given.tokens, given.about_tokens))
        marks.append(time.perf_counter())
        time.sleep(given.seconds)
        marks.append(time.perf_counter())
        ended.set()
        for thread in threads:
            thread.join()
    found: dict[str, Any] = {"tokens": given.tokens, "about_tokens": given.about_tokens}
    for name, begin, end in zip(("before", "during", "after"), marks, marks[1:], strict=False):
        within = [(spent, tokens) for now, spent, tokens in arrived if begin <= now < end]
        shares = sorted(spent / tokens for spent, tokens in within for _ in range(tokens))
        found[name] = {
            "seconds": end - begin,
            "tokens": len(shares),
            "tbt_ms": {
                "mean": 1e3 * statistics.mean(shares),
                "p50": 1e3 * shares[len(shares) // 2],
                "p95": 1e3 * shares[int(0.95 * len(shares))],
            },
            "longest_gap_ms": 1e3 * max(spent for spent, _ in within),
        }
    found["ratio"] = found["during"]["tbt_ms"]["mean"] / found["before"]["tbt_ms"]["mean"]
    rows = [{"time": name, **found[name], **found[name]["tbt_ms"]} for name in ("before", "during", "after")]
    columns = ("time", "seconds", "tokens", "mean", "p50", "p95", "longest_gap_ms")
    title = f"TBT in ms of four answers, before, while and after a book of {given.tokens:,} tokens is read"
    print_table(given, title, rows, columns, [f"during, against before: x {found['ratio']:.2f}"])
    return found


def clients(given: argparse.Namespace, texts: Texts, *options: str, link_gbps: float | None = None) -> dict[str, Any]:
    """Tokens per second of eight clients with questions about one book, and of one; all of it counts, from the first
    request to the last answer."""
    questions, speeds = [_QUESTION.format(number) for number in range(1, 9)], dict[int, list[float]]()
    with serving(given, *options, link_gbps=link_gbps) as server:
        server.upload("book", texts.cut(given.tokens))
        server.chat(questions[0], 8)
        for _ in range(given.repeat):
            for count in (1, 8):
                counts: list[int] = []

                def one(question: str, counts: list[int] = counts) -> None:
                    counts.append(server.chat(question, given.new_tokens)["usage"]["completion_tokens"])

                began = time.perf_counter()
                threads = [threading.Thread(target=one, args=(question,)) for question in questions[:count]]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                assert len(counts) == count, "an answer is missing"
                speeds.setdefault(count, []).append(sum(counts) / (time.perf_counter() - began))
    ratio = statistics.median(many / one for one, many in zip(speeds[1], speeds[8], strict=True))
    row = {"one": statistics.median(speeds[1]), "eight": statistics.median(speeds[8]), "ratio": ratio}
    print_table(given, f"tokens/s of clients about a book of {given.tokens:,} tokens", [row])
    return {"tokens": given.tokens, "one": speeds[1], "eight": speeds[8], "ratio": ratio}


def clients_with_link(given: argparse.Namespace, texts: Texts) -> dict[str, Any]:
    """The same with all keys and values beyond a limited link."""
    return clients(given, texts, "--resident", "0", link_gbps=given.link_gbps) | {"link_gbps": given.link_gbps}


def chat(given: argparse.Namespace, texts: Texts) -> dict[str, Any]:
    """TTFT of a chat's turns about a book."""
    rows, messages = [], list[dict[str, str]]()
    with serving(given) as server:
        book = server.upload("book", texts.cut(given.tokens))
        for turn in range(1, given.turns + 1):
            asked = " ".join([_QUESTION.format(turn)] * (1 + turn % 4 * 3))
            messages.append({"role": "user", "content": asked})
            began, said, usage, first_s = time.perf_counter(), "", None, None
            for now, event in server.stream(messages, 32, context="book"):
                text = "".join(choice["delta"].get("content", "") for choice in event["choices"])
                if text and first_s is None:
                    first_s = now - began
                said, usage = said + text, event.get("usage") or usage
            assert usage is not None, "the answer broke off"
            messages.append({"role": "assistant", "content": said or " "})
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            rows.append({"prompt": usage["prompt_tokens"], "cached": cached, "ttft_s": first_s})
            print_note(f"turn {turn}: {rows[-1]}")
    title = f"turns about a book of {book['tokens']:,} tokens, read in {book['read_s']:.1f} s"
    print_table(given, title, [{"turn": turn, **row} for turn, row in enumerate(rows, 1)])
    return {"tokens": book["tokens"], "read_s": book["read_s"], "turns": rows}


if __name__ == "__main__":
    main()
