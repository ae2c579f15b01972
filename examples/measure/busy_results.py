"""Measures how much longer a token takes while other processes take the cores.

    python examples/measure/busy_results.py --prompt-file book.txt --tokens 8192 --tiers 1,3

Each answer of a model is written in three windows of a few seconds, beside no busy process, beside one, and beside one
for each core, in this order and in the other; a window is timed from when the processes have run for a second. Shown
are medians over all answers, and the median ratio to the first window. The machine must be idle otherwise.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from report import make_parser, print_table, write_json
from triforce.offload import Engine, Request, Round, Sampling
from triforce.tp.parallel.launch import usable_cores
from triforce.tp.weights.registry import find_pair
from triforce.tp.weights.tokenizer import Tokenizer

SETTLING_S = 1.0
MOST_TOKENS = 20_000


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--prompt-file", type=Path, required=True, help="a text of at least --tokens tokens")
    parser.add_argument("--model", default="embedded", help="a pair (default embedded)")
    parser.add_argument("--tokens", type=int, default=8192, help="of the prompt (default 8,192)")
    parser.add_argument("--tiers", default="1,3", help="default 1,3")
    parser.add_argument("--pairs", type=int, default=30, help="answers (default 30)")
    parser.add_argument("--seconds", type=float, default=1.5, help="of a window that are timed (default 1.5)")
    given = parser.parse_args()
    target, _ = find_pair(given.model)
    prompt = Tokenizer.load(target).encode(given.prompt_file.read_text(encoding="utf-8"), True)[: given.tokens]
    engine = Engine.load(given.model, device="cpu")
    busy = tuple(dict.fromkeys((0, 1, usable_cores())))
    found = {}
    for tiers in map(int, given.tiers.split(",")):
        request = Request(prompt, Sampling(0.0), MOST_TOKENS, ignore_eos=True)
        seconds: dict[int, list[float]] = {number: [] for number in busy}
        for pair in range(given.pairs):
            batch = engine.batch([request], tiers=tiers)
            answer = iter(batch)
            next(answer)  # the prompt is read
            for number in busy if pair % 2 else reversed(busy):
                with processes(number):
                    write(answer, SETTLING_S)
                    seconds[number].append(write(answer, given.seconds))
            batch.close()
        found[tiers] = seconds
        rows = [
            {
                "busy processes": number,
                "ms a token": 1e3 * statistics.median(windows),
                "ratio": statistics.median(x / alone for x, alone in zip(windows, seconds[0], strict=True)),
            }
            for number, windows in seconds.items()
        ]
        print_table(given, f"{tiers} tiers, {given.tokens:,} tokens of prompt, {given.pairs} answers", rows)
    write_json(given, found)


def write(answer: Iterator[tuple[int, Round]], seconds: float) -> float:
    """Writes for so long; returns the seconds a token took."""
    began, tokens = time.perf_counter(), 0
    while (took := time.perf_counter() - began) < seconds or not tokens:
        _, event = next(answer)
        tokens += len(event.tokens)
    return took / tokens


@contextmanager
def processes(number: int) -> Iterator[None]:
    """So many processes that each take a core, as far as they get one."""
    started = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
