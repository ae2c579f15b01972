"""Tiny models that talk: with a chat template, and with words of their own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% if m['role'] == 'assistant' %}</s>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)

THINKING = TEMPLATE.replace(
    "{{ m['content'] }}", "{{ m['content'].split('</think>')[-1] if not loop.last else m['content'] }}"
)
"""Leaves out what earlier answers have thought."""

CALLING = TEMPLATE + "{% if tools %}<tool_call>{% endif %}"
"""Knows tools, whose calls are in Hermes' form."""

EOS = 1
"""`</s>` of `save_tokenizer`'s tokenizers."""


def with_template(model: Path, folder: Path, template: str = TEMPLATE) -> Path:
    """A copy of a model with a chat template."""
    directory = folder / "model-with-template"
    shutil.copytree(model, directory)
    (directory / "chat_template.jinja").write_text(template)
    return directory


def saying(model: Path, folder: Path, token: int, words: str) -> Path:
    """A copy of a model whose `token` reads as `words`, wherever it writes it; of a text these words give other tokens,
    as they did before."""
    directory = folder / "model-with-words"
    shutil.copytree(model, directory)
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    (before,) = [piece for piece, number in vocabulary.items() if number == token]
    del vocabulary[before]
    vocabulary[words.replace("\n", "Ċ").replace(" ", "Ġ")] = token  # how a byte-level tokenizer writes them
    tokenizer["model"]["merges"] = [pair for pair in merges if before not in (*pair, "".join(pair))]
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    return directory


def with_added(model: Path, folder: Path, added: Mapping[int, str], control: Collection[str] = ()) -> Path:
    """A copy of a model with added tokens that have the ids of others: those read as they do, and of other texts become
    the same ids as before. Those of `control` are control tokens, which decoding leaves out."""
    directory = folder / "model-with-added-tokens"
    shutil.copytree(model, directory)
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    for token, content in added.items():
        tokenizer["model"]["vocab"][content] = token
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append({"id": token, "content": content, "special": content in control, **flags})
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    return directory
