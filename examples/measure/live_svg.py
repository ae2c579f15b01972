"""Draws docs/images/live.svg: the live display as it stands in the middle of a real run.

    python examples/measure/live_svg.py [--model M --draft D --prompt-file FILE] [--tokens 160] [--out FILE]

The numbers in it are those of the machine that runs this.
"""

import argparse
import io
from pathlib import Path

from rich.console import Console
from triforce.cli.session.prompt import build_prompt
from triforce.cli.session.source import read_source
from triforce.cli.terminal.live import LiveDisplay
from triforce.cli.terminal.live_picture import AnswerRow
from triforce.offload import Engine, Sampling
from triforce.tp.weights.registry import find_pair
from triforce.tp.weights.tokenizer import TextStream, Tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws the live display of a run as an SVG.")
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--draft")
    parser.add_argument("--prompt-file", type=Path)
    parser.add_argument("--tokens", type=int, default=160, help="tokens written when the picture is taken")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--size", default="100x30")
    parser.add_argument("--out", type=Path, default=Path("docs/images/live.svg"))
    options = parser.parse_args()
    width, height = map(int, options.size.split("x"))

    engine = Engine.load(options.model, draft=options.draft)
    tokenizer = Tokenizer.load(find_pair(options.model)[0])
    source = read_source(options.prompt_file, None, print)
    prompt = build_prompt(source, None, tokenizer, engine.target.config, options.max_new_tokens, "tail")
    run = engine.stream(prompt.token_ids, Sampling(seed=options.seed), options.max_new_tokens, ignore_eos=True)
    console = Console(file=io.StringIO(), record=True, force_terminal=True, width=width, height=height)
    name = Path(options.model).name
    stats = run.sequence.document(run.lengths, [])
    display = LiveDisplay(
        console,
        f"triforce · {name} · {len(prompt.token_ids):,} tokens read · {stats['device']} {stats['dtype']}",
        lambda: [AnswerRow.of("", run.sequence, options.max_new_tokens, ended=False)],
        lambda: run.lengths,
        single=True,
        device=engine.target.device,
    )
    text = TextStream(tokenizer.decode)
    for event in run:
        display.note(text.push(event.tokens), event)
        if len(run.statistics.token_ids) >= options.tokens:
            break
    console.print(display)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    console.save_svg(str(options.out), title="triforce generate", unique_id="triforce-live")


if __name__ == "__main__":
    main()
