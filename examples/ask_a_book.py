"""The Python API in twenty lines: reads a book once, then goes on from it twice; the second time starts at once.

python examples/ask_a_book.py BOOK.txt [MODEL]
"""

import sys
from pathlib import Path

from triforce.offload import Engine, Sampling
from triforce.tp import Tokenizer, find_pair

book, model = sys.argv[1], (sys.argv[2:] or ["embedded"])[0]
tokenizer = Tokenizer.load(find_pair(model)[0])
engine = Engine.load(model)
prompt = tokenizer.encode(Path(book).read_text(encoding="utf-8"), True)[:8000]

for opening in ("“My dear,” said he, “", "The next morning "):
    ids = prompt + tokenizer.encode(f"\n\n{opening}", False)
    result = engine.generate(ids, Sampling(seed=1), max_new_tokens=64)
    print(f"{opening}{tokenizer.decode(result.token_ids)}\n")
    print(f"  [{result.stats['ttft_s']:.2f} s to the first token, {result.stats['tokens_per_s']:.0f} tokens/s]\n")
