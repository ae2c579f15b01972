"""Writes docs/benchmarks.md from the measurements beside it, docs/benchmarks/*.json: no figure in it is typed by hand.

    triforce bench --json docs/benchmarks/NAME.json --plot docs/benchmarks/NAME.png
    triforce compare --json docs/benchmarks/NAME.json
    python examples/measure/benchmark_report.py

A picture that has a measurement's name is shown with it.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from triforce.cli.bench import report as bench_report
from triforce.cli.compare import report as comparison_report
from triforce.cli.measurement import machine_in_words, sampling_in_words
from triforce.offload.planning.measured import BENCH
from triforce.tp.units import gib

DOCS = Path(__file__).parents[2] / "docs"

INTRODUCTION = """# Benchmarks

For anyone who wants to compare the speed of `triforce-cli` with plain decoding and with other systems. Each measurement
has its machine, its command and its figures.

There are two kinds of sections:

* `bench-…` compares decoding with one, two and three tiers. One tier is plain decoding. With two tiers, the target
  drafts with its *retrieval cache*, a small copy of the parts of the KV cache that got most attention. With three
  tiers, a small model drafts as well. These sections were measured with [`triforce bench`](bench.md). That page
  explains the figures.
* `compare-…` compares this engine with other systems. It was measured with `triforce compare`. Each system runs in a
  process of its own. TTFT is the time to first token, TBT the time between tokens.

A section's name has these further parts:

* `8k`, `32k`, `128k`: the length of the prompt, or of the context, in thousands of tokens.
* `amx`: an Intel Xeon with AMX. `zen4`, `zen5`: an AMD EPYC of this generation. Without such a part: an AMD EPYC whose
  generation was not noted.
* `a`, `b`, `c`: prompts from three places of the novel *Emma*. Some names lack this; the commands name the file.
* `greedy`: greedy decoding. `bfloat16`, `float32`: the number format. `embedded`: the model.

The sections use these terms:

* `embedded` is the embedded pair, a target and its draft model, which are installed with `triforce`. Until 2026-11-22
  it was the first edition: its target had 5.8 M parameters instead of 7.7 M, and a KV cache of the same size
  ([model card](../tp/embedded/README.md)).
* *Interleaved runs*: one run with each number of tiers, one after another. Then this series was repeated. In brackets
  after a median: the smallest and the largest value of these runs.
* *Accepted*: the share of the tested draft tokens that were accepted. There are two kinds. The *small model's drafts*
  are tested by the target on its retrieval cache. The *retrieval cache's drafts* are the tokens that the target drafts
  with its retrieval cache. They are tested on the full KV cache.
* *Round*: a pass over the full KV cache that tests draft tokens, and the drafting before it.
* *Floor*: a lower bound of the time of one pass over the full KV cache. With two or three tiers, a pass gives several
  tokens. So the TBT can be less than the floor.
* *The faster of both* (llama.cpp): it was tried with flash attention off and on, and measured with the faster setting.
  *At 8,192 tokens* is the length of the prompt in these trials. *In the warm-up* means that the warm-up runs were the
  trials. *In one format*: weights and KV cache have the same number format.
* *The library's own lengths* (transformers-assisted): transformers itself decides how many tokens are drafted at a
  time.
* *Offloaded to host memory* (DeepSpeed) is a setting. On a CPU, the parameters are in host memory in any case.

The JSON files in [benchmarks](benchmarks) have every run. `examples/measure/benchmark_report.py` writes this page from
them.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--docs", type=Path, default=DOCS, help="the folder of benchmarks.md and benchmarks/")
    options = parser.parse_args()
    (options.docs / "benchmarks.md").write_text(page(options.docs / "benchmarks"), encoding="utf-8")


def page(folder: Path) -> str:
    """The page on the measurements in `folder`, in the order of their names.

    Raises:
        ValueError: a file there is not one.
    """
    sections = [INTRODUCTION]
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        kinds = {BENCH: bench_section, comparison_report.KIND: comparison_section}
        kind = document.get("kind") if isinstance(document, dict) else None
        if kind not in kinds:
            raise ValueError(f"{path} is neither of triforce bench nor of triforce compare")
        sections.append(kinds[kind](document, path))
    if len(sections) == 1:
        sections.append("Nothing is there yet.\n")
    return "\n".join(sections)


def _repeats(runs: int) -> str:
    return f"medians of {runs} runs per system, each" if runs > 1 else "one run per system, each"


def heading(document: dict[str, Any], path: Path) -> list[str]:
    """What was measured, where, when, and with which command."""
    where = document["machine"]
    return [
        f"## {path.stem}",
        "",
        f"Model {document['model']} in {document['dtype']} on {machine_in_words(where)} ({where['cores']} cores, "
        f"{gib(where['memory_bytes'])} of memory). Measured on {document['date']} with triforce {document['version']}, "
        f"PyTorch {where['torch']} and Python {where['python']}. [JSON of every run]({path.parent.name}/{path.name}).",
        "",
        "<!-- not run: minutes to hours, on an idle machine -->",
        "```bash",
        document["command"],
        "```",
        "",
    ]


def bench_section(document: dict[str, Any], path: Path) -> str:
    derived = "derived" if any(at["floor"] for at in document["contexts"]) else "-"
    lines = heading(document, path)
    lines += [
        f"{capitalised(bench_report.conditions(document))}.",
        "",
        "| context | tiers | TBT, ms | tokens/s | speed-up | accepted (small model's drafts) "
        f"| accepted (retrieval cache's drafts) | tokens/round | floor, ms ({derived}) | prefill, s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for at in document["contexts"]:
        for row in at["tiers"]:
            tbt, accepted = row["tbt_ms"], row["acceptance"]
            spread = f" ({tbt['min']:.1f} to {tbt['max']:.1f})" if tbt["min"] < tbt["max"] else ""
            times = f"{tbt['median']:.1f}{spread}{', modelled' if row['modelled'] else ''}"
            cells = [
                f"{at['context']:,}",
                str(row["tiers"]),
                times,
                f"{1e3 / tbt['median']:.1f}",
                number(row["speedup"] if row["tiers"] > 1 else None),
                number(accepted["draft_per_token"]),
                number(accepted["retrieval_per_token"]),
                number(accepted["tokens_per_round"] if row["tiers"] > 1 else None, 1),
                number(at["floor"]["ms"] if at["floor"] else None, 1),
                number(at["prefill_s"], 1),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    lines += [f"* {note}" for note in bench_report.notes(document)]
    picture = path.with_suffix(".png")
    if picture.exists():
        lines += ["", f"![time between tokens against context]({path.parent.name}/{picture.name})"]
    return "\n".join(lines) + "\n"


def comparison_section(document: dict[str, Any], path: Path) -> str:
    lines = heading(document, path)
    interrupted = "; interrupted" if document["interrupted"] else ""
    batch = document.get("batch")
    sequences = f"{batch} sequences together over one text, each with a question of its own; " if batch else ""
    lines += [
        f"{sequences}{document['prompt_tokens']:,} prompt tokens, {document['new_tokens']:,} new tokens, "
        f"{sampling_in_words(document['sampling'])}; {_repeats(document['repeats'])} in a process of its own"
        f"{interrupted}. Speed-up of triforce: the system's TBT ÷ triforce's TBT."
        f"{' Tokens/s of all sequences together; TTFT: until each sequence has its first token.' if batch else ''}",
        "",
        "| system | TTFT, s | TBT, ms | tokens/s | peak memory of the process | speed-up of triforce "
        "| greedy text, compared with triforce's |",
        "|---|---|---|---|---|---|---|",
    ]
    for system in document["systems"]:
        if "runs" not in system:
            why = system["failure"] or "not measured"
            lines.append(f"| {system['name']} | - | - | - | - | - | {why} |")
            continue
        cells = [
            system["name"],
            number(system["ttft_s"]),
            number(system["tbt_ms"], 1),
            number(system["tokens_per_s"], 1),
            gib(system["memory"]["host_peak_bytes"]),
            number(system["speedup_of_triforce"]["tbt"] if system["name"] != "triforce" else None),
            text_of(system, document),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    lines += [f"* {system['name']}: {system['ran']}" for system in document["systems"] if "ran" in system]
    return "\n".join(lines) + "\n"


def text_of(system: dict[str, Any], document: dict[str, Any]) -> str:
    """How a system's greedy text compares with triforce's."""
    if system["name"] == "triforce" or document["sampling"]["temperature"] != 0:
        return "-"
    found = system["first_difference"]
    if found and document.get("batch"):
        return (
            f"{len(system['differences'])} of {document['batch']} sequences differ, one from token {found['index']} on"
        )
    if found:
        return f"differs from token {found['index']} on"
    written = {system["name"]: [run["token_ids"] for run in system.get("runs", ())] for system in document["systems"]}
    ours, theirs = written["triforce"], written[system["name"]]
    return "the same tokens" if ours and all(ids == ours[0] for ids in theirs) else "-"


def capitalised(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    main()
