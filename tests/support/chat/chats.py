"""Conversations with tiny models: a chat template, and answers that nobody has to compute."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from triforce.cli.chat.conversation import Conversation, NextTurn, Turn
from triforce.cli.chat.forms import Opening, form_of
from triforce.tp.weights.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% if m['role'] == 'assistant' %}</s>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)

THINKING = TEMPLATE.replace(
    "{{ m['content'] }}", "{{ m['content'].split('</think>')[-1] if not loop.last else m['content'] }}"
)
"""Leaves out what earlier answers have thought."""

EOS = 1
"""`</s>` of `save_tokenizer`'s tokenizers."""


def with_template(model: Path, folder: Path, template: str = TEMPLATE) -> Path:
    """A copy of a model with a chat template."""
    directory = folder / "model-with-template"
    shutil.copytree(model, directory)
    (directory / "chat_template.jinja").write_text(template)
    return directory


def conversation_with(
    tokenizer: Tokenizer,
    *,
    opening: Opening | None = None,
    system: str | None = None,
    positions: int = 1024,
    new: int = 16,
    seed: int | None = None,
    trim: bool = False,
) -> Conversation:
    form = form_of(tokenizer, opening, system)
    return Conversation(form, tokenizer, positions=positions, max_new_tokens=new, opening=opening, seed=seed, trim=trim)


def answer(conversation: Conversation, asked: NextTurn, token_ids: Sequence[int]) -> Turn:
    """Takes an answer of these tokens, which come one at a time."""
    reply = conversation.reply(asked, [EOS])
    shown = "".join(reply.update(token_ids[: n + 1]) for n in range(len(token_ids))) + reply.finish()
    turn = conversation.add(asked, reply, {"token_ids": list(token_ids)})
    assert shown == turn.answer
    return turn


def say(conversation: Conversation, tokenizer: Tokenizer, question: str, text: str, *, ends: bool = True) -> NextTurn:
    """A turn with a given answer."""
    asked = conversation.ask(question)
    answer(conversation, asked, [*tokenizer.encode(text, False), *([EOS] if ends else [])])
    return asked
