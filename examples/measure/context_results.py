"""Measures what saved contexts cost and save: reading with and without writing, and first words after restoring.

    python examples/measure/context_results.py --prompt-file book.txt --tokens 32768

Restoring is measured with the files in the page cache and without (`posix_fadvise` drops them), beside the speed at
which the same files are read sequentially with direct reads in the same minute.
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from pathlib import Path

from report import figure_rows, make_parser, print_table, write_json
from triforce.offload import Engine, Sampling
from triforce.offload.contexts.model import ContextRequest
from triforce.offload.contexts.store import ContextStore
from triforce.tp.weights.registry import find_pair
from triforce.tp.weights.tokenizer import Tokenizer

QUESTION = "\n\nWhat did she say to him then, and why?"
_PIECE = 4 << 20


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--prompt-file", type=Path, required=True)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--repeat", type=int, default=3, help="of restoring; medians are printed")
    parser.add_argument("--readings", type=int, default=3, help="pairs of readings with and without writing")
    parser.add_argument("--pack", choices=("auto", "on", "off"), default="auto", help="of what is written")
    parser.add_argument("--store", type=Path, help="where to write; default: a temporary directory")
    given = parser.parse_args()
    tokenizer = Tokenizer.load(find_pair(given.model)[0])
    text = tokenizer.encode(given.prompt_file.read_text(encoding="utf-8"), True)[: given.tokens]
    question = tokenizer.encode(QUESTION, False)
    with tempfile.TemporaryDirectory(dir=given.store) as folder:
        root = Path(folder)
        reading = compare_reading(given.model, text, root, given.readings, given.pack)
        kept = root / f"{given.readings - 1}"
        files = sorted((kept / "book").glob("*.safetensors"))
        size, kv = sum(path.stat().st_size for path in files), ContextStore(kept).load("book").kv_bytes
        found = {"kv_bytes": kv, "disk_bytes": size, "disk_over_kv": size / kv, **reading}
        for warm in (False, True):
            seconds = [first_words(given.model, kept, [*text, *question], files, warm) for _ in range(given.repeat)]
            found[f"first_word_s{'_in_page_cache' if warm else ''}"] = statistics.median(seconds)
            if not warm:
                direct = statistics.median(direct_speed(files) for _ in range(given.repeat))
                found |= {"direct_gb_per_s": direct / 1e9, "bound_s": size / 0.8 / direct + 0.5}
    bound = "bound_s: the bytes on disk at 0.8 times the speed of direct reads, and 0.5 s"
    print_table(given, f"{len(text):,} tokens, medians", figure_rows(found), notes=[bound])
    write_json(given, found)


def compare_reading(model: str, text: list[int], root: Path, repeats: int, pack: str) -> dict[str, float]:
    """Median seconds of reading without and with writing, and the median of the pairs' ratios."""
    plain, writing = [], []
    for repeat in range(repeats):
        for saves in (False, True) if repeat % 2 else (True, False):
            engine = Engine.load(model, store=ContextStore(root / str(repeat)), pack=pack)
            contexts = ContextRequest(save="book", required=True) if saves else None
            run = engine.stream(text, Sampling(0.0), 1, tiers=1, contexts=contexts)
            began = time.perf_counter()
            for _ in run:
                pass
            (writing if saves else plain).append(time.perf_counter() - began)
    ratios = [with_it / without for with_it, without in zip(writing, plain, strict=True)]
    several = {"reading_s": plain, "reading_and_writing_s": writing, "ratio_of_pairs": ratios}
    return {name: statistics.median(values) for name, values in several.items()}


def first_words(model: str, root: Path, prompt: list[int], files: list[Path], warm: bool) -> float:
    """Seconds from the request to the first token in an engine that has read nothing."""
    engine = Engine.load(model, store=ContextStore(root), capacity=len(prompt) + 2)
    for path in files:
        drop_from_cache(path)
        if warm:
            path.read_bytes()
    began = time.perf_counter()
    run = engine.stream(prompt, Sampling(0.0), 2, contexts=ContextRequest("book"))
    next(run)
    seconds = time.perf_counter() - began
    if run.stats()["context"] != "book":
        raise RuntimeError(f"nothing was restored: {run.warnings}")
    run.close()
    return seconds


def drop_from_cache(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def direct_speed(files: list[Path]) -> float:
    """Bytes a second of sequential direct reads."""
    buffer, total, began = mmap.mmap(-1, _PIECE), 0, time.perf_counter()
    for path in files:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        offset = 0
        while got := os.preadv(descriptor, [buffer], offset):
            offset, total = offset + got, total + got
        os.close(descriptor)
    return total / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
