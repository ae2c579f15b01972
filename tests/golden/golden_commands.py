"""The command lines of the golden corpus: what is typed, and how what comes of it is written down."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from golden_models import CHECKPOINTS
from golden_process import Outcome, run
from golden_rules import MACHINE, MEASURED, SEED, Rule, document, keys, kinds, plain, shown

CPU = "--device cpu --dtype float32"
WORDS = {
    "TARGET": f"--model target --draft none {CPU} --tiers 1",
    "TWO": f"--model target --draft none {CPU} --budget 64 --block-length 4 --refresh round",
    "PAIR": f"--model target --draft draft {CPU} --budget 64 --draft-length 2 --block-length 4 --refresh round",
    "TALKER": f"--model talker --draft none {CPU} --tiers 1",
    "EMBEDDED": f"{CPU} --tiers 1",
    "BOOK": "--prompt-file book.txt",
    "GREEDY": "--temperature 0 --seed 1",
}
"""What stands for `$WORD` in a command line. Where drafts are made, all that would follow from the clock is given."""

BOOK = "".join(
    f"On day {day} the {ship} came from {port} with {load}.\n"
    for day, (ship, port, load) in enumerate(
        (ship, port, load)
        for ship in ("Petrel", "Snowhelm", "Ardent")
        for port in ("Visby", "Turku", "Riga", "Lübeck")
        for load in ("salt", "rye")
    )
)

FILES = {
    "book.txt": BOOK,
    "asks.txt": "Who came?\n\nFrom where?\n",
    "latin1.txt": "caf\udce9",
    "empty.txt": "",
    "requests.jsonl": "\n".join(
        json.dumps(one)
        for one in (
            {
                "custom_id": "one",
                "url": "/v1/completions",
                "body": {"prompt": "It rained.", "max_tokens": 6, "seed": 1},
            },
            {
                "custom_id": "two",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "messages": [{"role": "user", "content": "Why?"}],
                    "max_tokens": 4,
                    "temperature": 0,
                    "seed": 1,
                    "logprobs": True,
                    "top_logprobs": 2,
                },
            },
            {
                "custom_id": "three",
                "url": "/v1/completions",
                "body": {"prompt": [5, 6, 7], "n": 2, "seed": 4, "max_tokens": 5, "logprobs": 1},
            },
            {"custom_id": "four", "url": "/v1/completions", "body": {"prompt": "It rained.", "tools": [1]}},
            {"custom_id": "five", "url": "/v1/completions", "body": {"prompt": "x" * 9000}},
        )
    )
    + '\n{"custom_id": "six"\n',
}
"""What lies in the folder beside the models."""


@dataclass(frozen=True)
class Session:
    """Command lines that are typed in one folder after one another."""

    name: str
    """`COMMAND/WHAT`."""
    lines: tuple[str, ...]
    stdin: str = ""
    """Of each line."""
    shows: tuple[str, ...] = ()
    """Files that are then looked at."""
    rules: tuple[Rule, ...] = ()
    json: Callable[[Any], Any] = document
    """What becomes of JSON on stdout."""
    anew: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """Texts that lie in the folder besides."""
    prepare: Callable[[Path], None] | None = None
    """Puts into the folder what lies there besides."""
    packages: tuple[str, ...] = ()
    """Those whose version lays out what is seen: what was recorded with one is not compared with another's."""

    @property
    def group(self) -> str:
        """The file that it is recorded in."""
        return self.name.partition("/")[0]


LAYOUT = ("typer", "rich")
HELP = ("", "generate", "chat", "batch", "serve", "read", "contexts", "plan", "bench", "compare", "models", "doctor")


def one(name: str, line: str, **others: Any) -> Session:
    return Session(name, (line,), **others)


def _planned(value: Any) -> Any:
    return document(value, planned=True)


def _drawn(value: Any) -> Any:
    return document(value, drawn_seed=True)


LLAMA = "plan --model llama-3.1-8b-instruct --context 65536"

SESSIONS = (
    *(one(f"help/{command or 'triforce'}", f"{command} --help", packages=LAYOUT) for command in HELP),
    one("help/contexts-list", "contexts list --help", packages=LAYOUT),
    one("help/no-arguments", "", packages=LAYOUT),
    one("help/version", "--version"),
    one("help/no-such-command", "generat", packages=LAYOUT),
    one("generate/plain", "generate $TARGET $BOOK --max-new-tokens 12 $GREEDY"),
    one("generate/three-tiers", "generate $PAIR $BOOK --max-new-tokens 12 $GREEDY"),
    one("generate/json", "generate $PAIR $BOOK --max-new-tokens 12 --seed 3 --temperature 0.8 --json -"),
    one(
        "generate/two-tiers-lookup",
        "generate $TWO --draft lookup $BOOK --max-new-tokens 8 --seed 3 --top-k 20 --json -",
    ),
    one("generate/min-p", "generate $PAIR $BOOK --max-new-tokens 8 --seed 3 --temperature 2 --top-p 1 --min-p 0.3"),
    one("generate/seed-not-given", "generate $TARGET --prompt It --max-new-tokens 3 --temperature 0", rules=(SEED,)),
    one("generate/stdin", "generate $TARGET --prompt-file - --max-new-tokens 4 --seed 2 --top-p 1", stdin="It rained."),
    one("generate/streamed", "generate $TWO $BOOK --resident 0 --max-new-tokens 4 $GREEDY --json -"),
    one(
        "generate/several-questions",
        "generate $PAIR $BOOK --ask Why? --asks asks.txt --max-new-tokens 5 --seed 3 --temperature 1",
    ),
    one("generate/several-answers", "generate $TARGET $BOOK -n 2 --max-new-tokens 4 --seed 3 --json -"),
    one(
        "generate/json-in-a-file",
        "generate $TALKER $BOOK --ask Who? --max-new-tokens 4 $GREEDY --json run.json --ignore-eos",
        shows=("run.json",),
    ),
    one("generate/embedded", "generate $EMBEDDED --prompt 'It was a dark and' --max-new-tokens 10 $GREEDY --json -"),
    one("generate/bfloat16", "generate --device cpu --tiers 1 --prompt 'It is a truth' --max-new-tokens 3 $GREEDY"),
    one("generate/truncated", "generate $TARGET --prompt-file long.txt --truncate middle --max-new-tokens 2 $GREEDY"),
    one("generate/too-long", "generate $TARGET --prompt-file long.txt --max-new-tokens 2"),
    one("generate/no-such-model", "generate --model no-such-model --prompt A"),
    one("generate/not-on-the-hub", "generate --model owner/name --prompt A", anew="huggingface_hub"),
    one("generate/no-such-draft", "generate --draft ./no/such-draft --prompt A"),
    one("generate/no-such-file", "generate --prompt-file nowhere.txt"),
    one("generate/empty-file", "generate $TARGET --prompt-file empty.txt"),
    one("generate/bad-option", "generate --temprature 1", packages=LAYOUT),
    one("generate/bad-number", "generate --prompt A --temperature -1"),
    one("generate/bad-budget", "generate --prompt A --budget 4 --chunk-size 8"),
    one("generate/bad-choice", "generate --prompt A --truncate left"),
    one("generate/two-prompts", "generate --prompt A --prompt-file book.txt"),
    one("generate/too-many-answers", "generate -n 5000"),
    one("generate/empty-question", "generate --prompt A --ask ' '"),
    one("generate/no-such-context", "generate $TARGET --context nothing --ask Why?"),
    one(
        "generate/two-ranks",
        "generate --model target --draft none --device cpu --tiers 1 --gpus 2 --prompt It $GREEDY "
        "--max-new-tokens 4 --json -",
    ),
    one("generate/three-ranks", "generate --model target --draft none --device cpu --gpus 3 --prompt It"),
    one(
        "chat/plain-text",
        "chat $PAIR $BOOK --max-new-tokens 4 --seed 1 --temperature 0.9",
        stdin="Why?\n\nHow?\n/stats\n/undo\n/retry\n/save talk\n/contexts\n/help\n/bogus\n/quit\nnever asked\n",
    ),
    one(
        "chat/template",
        "chat $TALKER --system 'Be brief.' --max-new-tokens 4 --seed 1 --json -",
        stdin="Why?\nHow?\n",
    ),
    one("chat/nothing-asked", "chat $TALKER --json -"),
    one("chat/no-room", "chat $TALKER --max-new-tokens 4090 --seed 1", stdin="Why is there no room?\n"),
    one("chat/two-beginnings", "chat $BOOK --context book"),
    Session(
        "batch/answers",
        (
            "batch requests.jsonl -o answers.jsonl $TARGET --json run.json",
            "batch requests.jsonl -o answers.jsonl $TARGET",
        ),
        shows=("answers.jsonl", "run.json"),
    ),
    one("batch/no-output", "batch requests.jsonl"),
    one("batch/output-is-stdout", "batch requests.jsonl -o -"),
    one("batch/no-such-file", "batch nowhere.jsonl -o answers.jsonl $TARGET"),
    one("serve/no-key", "serve --host 0.0.0.0 --port 0"),
    one("serve/key-twice", "serve --api-key secret --no-auth"),
    one("serve/bad-port", "serve --port 70000"),
    one("serve/no-such-context", "serve --port 0 $TARGET --context nothing"),
    Session(
        "contexts/from-reading-to-removing",
        (
            f"read book.txt --model target {CPU} --pack off",
            f"read book.txt --model target {CPU} --pack off --json -",
            "contexts",
            "contexts list --json -",
            "contexts show book",
            "contexts show book --json -",
            "contexts verify book",
            "contexts verify book --json -",
            "generate $TARGET --context book --ask Who? --max-new-tokens 4 $GREEDY --json -",
            "generate $TARGET $BOOK --max-new-tokens 4 $GREEDY",
            "generate $TARGET --model qwen3 --context book --ask Who?",
            f"read asks.txt --as book --model target {CPU}",
            "contexts prune --keep 0",
            "contexts list",
        ),
    ),
    Session(
        "contexts/template",
        (
            f"read book.txt asks.txt --as 'two files' --system Hm. --model talker {CPU}",
            "generate $TALKER --context 'two files' --ask Who? --max-new-tokens 4 $GREEDY",
            "contexts show 'two files' --json -",
            "contexts rm 'two files'",
            "contexts rm 'two files'",
        ),
    ),
    one("contexts/bad-name", f"read book.txt --as ../book --model target {CPU}"),
    one("contexts/bad-size", "contexts prune --keep many"),
    one("contexts/none-shown", "contexts show nothing"),
    one("contexts/read-nothing", "read"),
    one("contexts/read-no-such-file", f"read nowhere.txt --model target {CPU}"),
    one("contexts/quota", "contexts list", environment={"TRIFORCE_CONTEXTS_MAX": "much"}),
    one("plan/one-card", f"{LLAMA} --gpu rtx4090 --host-memory 64"),
    one("plan/json", f"{LLAMA} --gpu rtx4090 --gpus 2 --host-memory 64 --json -", json=_planned),
    one("plan/below-memory", f"{LLAMA} --gpu rtx4090 --host-memory 4 --disk-gbps 3 --json -", json=_planned),
    one("plan/batch", f"{LLAMA} --gpu a100-80gb --batch 8 --tiers 2 --pack off --json -", json=_planned),
    one("plan/does-not-fit", "plan --model yarn-llama-2-13b-128k --gpu rtx4090 --gpu-memory 12 --host-memory 16"),
    one("plan/tiny", "plan --model target --gpu-memory 1 --link-gbps 10 --host-memory 1 --assume-acceptance 0.8,0.5"),
    one("plan/no-such-card", "plan --gpu rtx1"),
    one("plan/no-such-shape", "plan --model no-such-shape"),
    one("plan/bad-acceptance", "plan --assume-acceptance 1.5"),
    one(
        "bench/run",
        "bench $TARGET $BOOK --tiers 1,2 --contexts 64 --max-new-tokens 4 --repeat 1 --seed 1 --json bench.json",
        rules=MEASURED,
        shows=("bench.json",),
        json=kinds,
    ),
    one("bench/too-short", "bench $TARGET $BOOK --contexts 12 --max-new-tokens 12"),
    one("bench/bad-list", "bench --contexts 8,,9"),
    one(
        "compare/run",
        f"compare --model target --draft none {CPU} $BOOK --baseline autoregressive --repeat 1 --max-new-tokens 4 "
        "--seed 1 --audit --json run.json",
        rules=MEASURED,
        shows=("run.json",),
        json=kinds,
    ),
    one("compare/no-such-baseline", "compare --baseline vllm"),
    one("models/list", "models"),
    one("models/json", "models --json -"),
    one("doctor/list", "doctor", rules=MACHINE),
    one("doctor/json", "doctor --json -", json=keys),
)


def record(session: Session, models: Path, folder: Path) -> str:
    """Types a session's lines in `folder`, and writes down what comes of each. `models` has the checkpoints."""
    for name in CHECKPOINTS:
        (folder / name).symlink_to(models / name)
    if session.prepare:
        session.prepare(folder)
    for name, text in {**FILES, "long.txt": BOOK * 5, **session.files}.items():
        (folder / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    return "".join(_recorded(session, folder))


def _recorded(session: Session, folder: Path) -> Iterator[str]:
    for line in session.lines:
        full = line
        for word, meant in WORDS.items():
            full = full.replace(f"${word}", meant)
        outcome = run(shlex.split(full), folder, session.stdin, session.anew, **session.environment)
        yield f"$ triforce {line}\n" + _described(session, outcome, "--json -" in full)
    for name in session.shows:
        yield f"{name}:\n{_indented(_file(session, (folder / name).read_text(encoding='utf-8')))}"


def _described(session: Session, outcome: Outcome, has_json: bool) -> str:
    out = outcome.out
    is_json = has_json and out and outcome.code in (0, 1)
    out = shown(session.json(json.loads(out))) + "\n" if is_json else plain(out, session.rules)
    err = plain(outcome.err, session.rules)
    parts = (
        f"exit code {outcome.code}\n",
        *(f"{name}:\n{_indented(text)}" for name, text in (("stdout", out), ("stderr", err)) if text),
    )
    return "".join(parts)


def _file(session: Session, text: str) -> str:
    """Of JSON lines, which come in the order in which answers end, each by itself."""
    try:
        return shown(session.json(json.loads(text))) + "\n"
    except ValueError:
        rows = sorted((json.loads(line) for line in text.splitlines()), key=lambda row: str(row.get("custom_id")))
        return "".join(shown(session.json(row)) + "\n" for row in rows)


def _indented(text: str) -> str:
    ended = text if text.endswith("\n") else f"{text}(no newline)\n"
    return "".join(f"    {line}".rstrip() + "\n" for line in ended.splitlines())
