"""Conversations with answers that nobody has to compute."""

from __future__ import annotations

from collections.abc import Sequence

from templates import EOS
from triforce.cli.chat.conversation import Conversation, NextTurn, Turn
from triforce.cli.session.prompt import Context, QuestionForm
from triforce.cli.session.text import AnswerText
from triforce.tp.weights.tokenizer import Tokenizer


def conversation_with(
    tokenizer: Tokenizer,
    *,
    context: Context | None = None,
    system: str | None = None,
    positions: int = 1024,
    new: int = 16,
    seed: int | None = None,
    trim: bool = False,
) -> Conversation:
    form = QuestionForm.of(tokenizer, context, system)
    return Conversation(form, tokenizer, positions=positions, max_new_tokens=new, context=context, seed=seed, trim=trim)


def answer(conversation: Conversation, asked: NextTurn, token_ids: Sequence[int]) -> Turn:
    """Takes an answer of these tokens, which come one at a time."""
    reply = AnswerText(conversation.tokenizer, conversation.prompt(asked), [EOS])
    shown = "".join(reply.update(token_ids[: n + 1]) for n in range(len(token_ids))) + reply.finish()
    turn = conversation.add(asked, reply, {"token_ids": list(token_ids)})
    assert shown == turn.answer
    return turn


def say(conversation: Conversation, tokenizer: Tokenizer, question: str, text: str, *, ends: bool = True) -> NextTurn:
    """A turn with a given answer."""
    asked = conversation.ask(question)
    answer(conversation, asked, [*tokenizer.encode(text, False), *([EOS] if ends else [])])
    return asked
