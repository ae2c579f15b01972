"""The texts of the golden corpus: token ids of greedy and seeded answers, by level of the compiled kernels.

All of a level's texts come from one process, in which PyTorch's own arithmetic is that of a processor with AVX2 and no
more (`PINNED`), so that a machine with another one computes the same bits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from golden_models import VOCABULARY, numbers
from golden_process import environment

LEVELS = ("none", "avx2", "avx512", "avx512_bf16", "amx")

PINNED = {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_NUM_THREADS": "1"}
"""Read when PyTorch is imported. Without oneDNN besides (`pin`), which takes 16 bits on some processors only."""

ARITHMETIC = ("torch", "transformers")
"""Packages whose version may change a bit."""

SAID = {"avx2": "AVX2:", "avx512": "AVX-512:", "avx512_bf16": "AVX-512 with", "amx": "AMX:"}
"""What `triforce doctor` calls a level begins with this."""


ENGLISH = (
    "It was late in the autumn, and the old house at the end of the lane stood empty. Nobody had lived in it since the "
    "captain went to sea; the windows were dark, and the garden had grown wild. One evening, as the"
)


def english() -> list[int]:
    """A prompt for the embedded pair."""
    from tokenizers import Tokenizer
    from triforce.tp.weights.registry import find_pair

    return Tokenizer.from_file(str(find_pair("embedded")[0] / "tokenizer.json")).encode(ENGLISH).ids


def text(tokens: int, seed: int = 1) -> list[int]:
    """A prompt: numbers that look random, and come again after some time, as words do in a text."""
    base = [2 + number for number in numbers(tokens, VOCABULARY - 2, seed)]
    return [base[place % 97] if place % 5 < 3 else token for place, token in enumerate(base)]


LENGTHS = {"draft_length": 2, "block_length": 5, "refresh": "round", "early_end": "off"}
"""With these given, nothing follows from the clock."""


@dataclass(frozen=True)
class Text:
    """One entry."""

    name: str
    run: Callable[[Path], Any]
    """Called with the folder of the checkpoints, in a folder of its own; what it returns is written down."""


@dataclass(frozen=True)
class Case:
    """An engine, and what it is asked, one thing after another."""

    model: str = "target"
    draft: str = "draft"
    dtype: str = "float32"
    prompts: tuple[tuple[int, int], ...] = ((300, 1),)
    """Length and seed of each."""
    new: int = 16
    sampling: dict[str, Any] = field(default_factory=lambda: GREEDY)
    settings: dict[str, Any] = field(default_factory=dict)

    def load(self, models: Path, **more: Any) -> Any:
        from triforce.offload import Engine

        def place(name: str) -> str:
            return str(models / name) if (models / name).is_dir() else name

        draft = ",".join(map(place, self.draft.split(",")))
        fixed = {} if self.settings.get("tiers") == 1 else {"budget": 64, **LENGTHS}
        settings = {**fixed, **self.settings, **more}
        return Engine.load(place(self.model), draft, device="cpu", dtype=self.dtype, threads=1, **settings)

    def prompt_ids(self) -> list[list[int]]:
        return [text(*one) for one in self.prompts] or [english()]


GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 0.9, "top_p": 0.95, "top_k": 0, "seed": 7}
SHARP = {"temperature": 0.6, "top_p": 0.9, "top_k": 12, "seed": 8}
LIKELY = {"temperature": 2.0, "top_p": 1.0, "min_p": 0.3, "seed": 3}
ONE, TWO = {"tiers": 1}, {"tiers": 2}


def ran(run: Any) -> dict[str, Any]:
    """A run to its end, and what is written down of it."""
    rounds = list(run)
    stats = run.stats()
    drafted = stats["acceptance"]["draft_per_token"]  # of the small model's tokens, by the retrieval cache
    return {
        "token_ids": stats["token_ids"],
        "finish_reason": stats["finish_reason"],
        "reused_tokens": stats["reused_tokens"],
        "rounds": stats["rounds"],
        "proposed": sum(one.proposed for one in rounds),
        "accepted": sum(one.accepted for one in rounds),
        **({"drafted": f"{drafted:.4f} accepted"} if drafted is not None else {}),
        **({"warnings": stats["warnings"]} if stats["warnings"] else {}),
    }


def alone(case: Case, models: Path) -> Any:
    """Each prompt by itself, one after another, with one engine."""
    from triforce.offload import Sampling

    engine = case.load(models)
    return [ran(engine.stream(ids, Sampling(**case.sampling), case.new)) for ids in case.prompt_ids()]


def follow_ups(case: Case, models: Path) -> Any:
    """A conversation: each prompt stands behind the answer before it."""
    from triforce.offload import Sampling

    engine, said, found = case.load(models), list[int](), []
    for ids in case.prompt_ids():
        found.append(ran(engine.stream([*said, *ids], Sampling(**case.sampling), case.new)))
        said += [*ids, *found[-1]["token_ids"]]
    return found


def below_memory(case: Case, models: Path) -> Any:
    """With as little host memory as there may be: nearly all of the KV cache is on the disk."""
    from triforce.offload import Sampling
    from triforce.tp.errors import CapacityError

    (ids,) = case.prompt_ids()
    capacity, low, high = len(ids) + case.new, 0.0, 1.0
    while high - low > 2**-12:  # GiB
        middle = (low + high) / 2
        try:
            case.load(models, host_memory=middle, capacity=capacity)
        except CapacityError:
            low = middle
        else:
            high = middle
    run = case.load(models, host_memory=high, capacity=capacity).stream(ids, Sampling(**case.sampling), case.new)
    found, settings = ran(run), run.stats()["settings"]
    return [{**found, "on disk": settings["disk_bytes"] > 0, "packed": settings["packed"]}]


def together(
    case: Case, models: Path, *, shared: int = 0, number: bool = False, top: int | None = None, **how: Any
) -> Any:
    """All prompts as one batch, behind `shared` tokens that they have in common."""
    from triforce.offload import Request, Sampling

    engine, before = case.load(models), text(shared, 40)
    requests = [
        Request([*before, *ids], Sampling(**case.sampling), case.new, number=place if number else 0, top_logprobs=top)
        for place, ids in enumerate(case.prompt_ids())
    ]
    batch = engine.batch(requests, **how)
    proposed, accepted = [0] * len(requests), [0] * len(requests)
    for index, one in batch:
        proposed[index] += one.proposed
        accepted[index] += one.accepted
    found = []
    for index, sequence in enumerate(batch.sequences):
        stats = batch.document(index)
        found.append({name: stats[name] for name in ("token_ids", "finish_reason", "reused_tokens")})
        found[-1] |= {"proposed": proposed[index], "accepted": accepted[index]}
        if top is not None:
            found[-1]["logprobs"] = [
                [one.token, f"{one.logprob:.5f}", [[token, f"{value:.5f}"] for token, value in one.top]]
                for one in sequence.logprobs
            ]
    return found


def restored(case: Case, models: Path, *, ranks: int = 1) -> Any:
    """A text is read and saved; another engine, on so many ranks, starts from it."""
    ids, question = case.prompt_ids()
    case.load(models, tiers=1).read(ids, "book")
    return _started(case, models, [*ids, *question], ranks, context="book")


def ranks(case: Case, models: Path, *, of: int = 2) -> Any:
    """The first prompt, on several ranks."""
    return _started(case, models, case.prompt_ids()[0], of)


def _started(case: Case, models: Path, ids: list[int], ranks: int, **more: Any) -> Any:
    from triforce.offload import Sampling

    def run(**where: Any) -> dict[str, Any]:
        engine = case.load(models, **where, **more)
        found = ran(engine.stream(ids, Sampling(**case.sampling), case.new))
        engine.close()
        return found

    return [run()] if ranks == 1 else _on_ranks(run, ranks)


def _on_ranks(run: Callable[..., dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """What each rank says that runs it, in a fork of this process, with torchrun's environment."""
    from forks import Fork, meeting

    _store, shared = meeting(ranks)

    def rank(number: int) -> None:
        Path(f"rank-{number}.json").write_text(json.dumps(run(gpus=ranks)), encoding="utf-8")

    forks: list[Fork] = []
    try:
        for number in range(ranks):
            place = {"RANK": str(number), "LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": str(ranks)}
            forks.append(Fork(partial(rank, number), (0, 1, 2), {**os.environ, **shared, **place}))
        for fork in forks:
            assert fork.wait(300) == 0
    finally:
        for fork in forks:
            fork.kill()
    return [json.loads(Path(f"rank-{number}.json").read_text(encoding="utf-8")) for number in range(ranks)]


def text_of(name: str, how: Callable[..., Any], case: Case, **more: Any) -> Text:
    return Text(name, lambda models: how(case, models, **more))


HALF: dict[str, Any] = {"dtype": "bfloat16"}
LONG: dict[str, Any] = {"model": "deep", "draft": "none", "prompts": ((3000, 5),), "new": 6}
FOUR = ((40, 11), (70, 12), (33, 13), (52, 14))
MANY: dict[str, Any] = {"prompts": FOUR, "new": 10}

TEXTS = (
    text_of("float32/plain-greedy", alone, Case(settings=ONE)),
    text_of("float32/plain-seeded", alone, Case(sampling=SEEDED, settings=ONE)),
    text_of("float32/plain-seeded-top-k", alone, Case(sampling=SHARP, settings=ONE)),
    text_of("float32/two-tiers-greedy", alone, Case(settings=TWO)),
    text_of("float32/two-tiers-seeded", alone, Case(sampling=SEEDED, settings=TWO)),
    text_of("float32/three-tiers-greedy", alone, Case()),
    text_of("float32/three-tiers-seeded", alone, Case(sampling=SEEDED)),
    text_of("float32/three-tiers-seeded-top-k", alone, Case(sampling=SHARP)),
    text_of("float32/three-tiers-seeded-min-p", alone, Case(sampling=LIKELY)),
    text_of("float32/refresh-never", alone, Case(sampling=SEEDED, settings={"refresh": "never"})),
    text_of("float32/refresh-every-third", alone, Case(sampling=SEEDED, settings={"refresh": 3, "chunk_size": 16})),
    text_of("float32/lookup", alone, Case(draft="lookup", sampling=SEEDED)),
    text_of("float32/draft-and-lookup", alone, Case(draft="draft,lookup", settings={"early_end": "0.2"})),
    text_of("float32/streamed", alone, Case(sampling=SEEDED, prompts=((900, 2),), settings={"resident": 0.0})),
    text_of(
        "float32/partly-streamed-over-a-slow-link",
        alone,
        Case(prompts=((900, 2),), settings={"resident": 0.0008, "link_gbps": 2.0}),
    ),
    text_of("float32/below-memory", below_memory, Case(**LONG, sampling=SEEDED, settings=ONE)),
    text_of("float32/mistral-window", alone, Case(model="mistral", sampling=SEEDED)),
    text_of("float32/qwen2", alone, Case(model="qwen2", draft="none", settings=TWO)),
    text_of("float32/qwen3", alone, Case(model="qwen3", sampling=SEEDED)),
    text_of("float32/llama3-rope", alone, Case(model="stretched", draft="none", sampling=SEEDED, settings=TWO)),
    text_of("float32/follow-ups", follow_ups, Case(prompts=((200, 3), (30, 4), (40, 5)), sampling=SEEDED)),
    text_of("float32/batch-shared-prefix", together, Case(**MANY, sampling=SEEDED), shared=1200, number=True),
    text_of("float32/batch-in-slices", together, Case(**MANY, settings=ONE), max_sequences=2, in_slices=True),
    text_of("float32/logprobs", together, Case(prompts=FOUR[:2], new=5, sampling=SHARP), top=2),
    text_of("float32/ends", alone, Case(model="ender", prompts=((90, 1), (91, 2), (92, 3)), sampling=SEEDED)),
    text_of("float32/restored", restored, Case(prompts=((260, 6), (20, 7)), sampling=SEEDED)),
    text_of("float32/two-ranks", ranks, Case(sampling=SEEDED)),
    text_of("float32/restored-by-two-ranks", restored, Case(prompts=((260, 6), (20, 7)), settings=ONE), ranks=2),
    text_of("bfloat16/plain-greedy", alone, Case(**HALF, settings=ONE)),
    text_of("bfloat16/plain-seeded", alone, Case(**HALF, sampling=SEEDED, settings=ONE)),
    text_of("bfloat16/three-tiers-exact", alone, Case(**HALF, sampling=SEEDED, settings={"exact": "on"})),
    text_of("bfloat16/three-tiers", alone, Case(**HALF)),
    text_of(
        "bfloat16/streamed-packed",
        alone,
        Case(**HALF, sampling=SEEDED, prompts=((900, 2),), settings={"resident": 0.0, "pack": "on"}),
    ),
    text_of("bfloat16/below-memory-packed", below_memory, Case(**LONG, **HALF, settings={**ONE, "pack": "on"})),
    text_of("bfloat16/qwen2", alone, Case(**HALF, model="qwen2", draft="none", sampling=SEEDED, settings=ONE)),
    text_of("bfloat16/mistral-window", alone, Case(**HALF, model="mistral", draft="none", settings=ONE)),
    text_of("bfloat16/batch", together, Case(**HALF, **MANY, sampling=SEEDED), shared=40),
    text_of(
        "bfloat16/restored-packed",
        restored,
        Case(**HALF, prompts=((260, 6), (20, 7)), sampling=SEEDED, settings={"pack": "on"}),
    ),
    text_of("bfloat16/two-ranks", ranks, Case(**HALF, settings=ONE)),
    text_of(
        "embedded/three-tiers-seeded",
        alone,
        Case(model="embedded", draft="embedded", dtype="float32", prompts=(), sampling=SEEDED, new=12),
    ),
    text_of(
        "embedded/bfloat16-plain",
        alone,
        Case(model="embedded", draft="none", dtype="bfloat16", prompts=(), new=12, settings=ONE),
    ),
)


def pin() -> str:
    """Has PyTorch compute alike everywhere; the capability that it says it has, which must be the pinned one."""
    import torch

    torch.backends.mkldnn.enabled = False
    torch.set_num_threads(1)
    found = torch.backends.cpu.get_cpu_capability()
    assert found == "AVX2", f"PyTorch computes with {found}, though {PINNED} are set"
    return found


def run_all(models: Path, names: list[str]) -> Iterator[tuple[str, Any]]:
    """Runs texts by name, in this process, whose environment is pinned already."""
    pin()
    for one in TEXTS:
        if one.name in names:
            with tempfile.TemporaryDirectory() as home:
                os.environ["TRIFORCE_HOME"] = home
                os.chdir(home)
                yield one.name, one.run(models)
                os.chdir("/")


def texts_of(level: str, models: Path, names: list[str]) -> dict[str, str]:
    """Texts of a level, by name, computed in a process of its own."""
    given = environment(**PINNED, TRIFORCE_CPU_LEVEL=level, PYTHONPATH=os.pathsep.join(sys.path))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "texts.json"
        done = subprocess.run(
            [sys.executable, "-P", __file__, str(models), str(out), *names],
            env=given,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return {name: written(found) for name, found in json.loads(out.read_text(encoding="utf-8")).items()}


def written(found: list[dict[str, Any]]) -> str:
    """An answer a paragraph, a fact a line."""
    return "".join("".join(f"{key}: {json.dumps(value)}\n" for key, value in one.items()) + "\n" for one in found)


def highest_level(models: Path) -> str:
    """The level that the kernels have here, in the words of LEVELS: what `triforce doctor` says."""
    from golden_process import run

    with tempfile.TemporaryDirectory() as folder:
        done = run(["doctor", "--json", "-"], Path(folder), TRIFORCE_CPU_LEVEL="")
        said = json.loads(done.out)["compiled_kernels"]
    found = [level for level, word in SAID.items() if said and said.startswith(word)]
    return found[0] if found else "none"


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(dict(run_all(Path(sys.argv[1]), sys.argv[3:]))), encoding="utf-8")
