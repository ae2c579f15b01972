"""Prompts and tasks of what clients send: completions and messages, behind a saved context where one is named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...offload.contexts.model import ContextRequest
from ...tp.errors import TriforceError, UsageError
from ...tp.model.config import ModelConfig
from ...tp.weights.tokenizer import Tokenizer
from .prompt import Context, Exchange, Prompt, QuestionForm, encode_behind
from .session import Task
from .wire import CHAT, AnswerRequest, BodyError, Message


def request_task(request: AnswerRequest, prompt: Prompt, number: int, owner: Any, save: str | None = None) -> Task:
    """What the engine is to do for one of a request's answers.

    Args:
        prompt: the request's.
        number: of the answer, from 0.
        owner: whatever the command knows it by.
        save: the name of the context that the prompt is saved as, if it is.
    """
    contexts = ContextRequest(name=request.context, find=request.context is None, save=save, origin="client")
    return Task(
        prompt,
        contexts,
        request.sampling,
        request.max_new_tokens,
        number=number,
        top_logprobs=request.top_logprobs,
        owner=owner,
    )


def request_prompt(request: AnswerRequest, tokenizer: Tokenizer, config: ModelConfig) -> Prompt:
    """The prompt of a checked request.

    Raises:
        BodyError: messages in an order that has no form here, no token, more than the model has positions for, or a
            saved context that cannot be used.
        ModelError: the chat template fails.
    """
    context = None
    if request.context is not None:
        try:
            context = Context.saved(request.context, tokenizer, config)
        except TriforceError as error:
            raise BodyError(str(error), "context", code="context_not_usable") from error
    if request.endpoint == CHAT:
        name, prompt = "messages", _message_prompt(request, context, tokenizer)
    else:
        name, prompt = "prompt", _text_prompt(request.prompt, context, tokenizer, config)
    tokens, positions = len(prompt.token_ids), config.max_position_embeddings
    if not tokens:
        raise BodyError(f"{name} gives no token; give a longer text", name)
    if tokens + request.max_new_tokens > positions:
        raise BodyError(
            f"{name} has {tokens:,} tokens and {request.max_new_tokens:,} more are asked for, but {config.name} has "
            f"{positions:,} positions{config.positions_note}; shorten it, or lower max_tokens",
            name, code="context_length_exceeded",
        )  # fmt: skip
    return Prompt(prompt.token_ids, prompt.answers, (*request.stops, *prompt.stops))


def _text_prompt(text: str | list[int], context: Context | None, tokenizer: Tokenizer, config: ModelConfig) -> Prompt:
    """The prompt of a completion: a text as it is, or token ids, behind that of the context."""
    before = context.token_ids if context else []
    if not isinstance(text, str):
        unknown = [token for token in text if not 0 <= token < config.vocab_size]
        if unknown:
            last = config.vocab_size - 1
            raise BodyError(f"prompt has the token {unknown[0]}; the model knows 0 to {last:,}", "prompt")
        return Prompt([*before, *text])
    return Prompt([*before, *(encode_behind(text, tokenizer) if before else tokenizer.encode(text, True))])


def _message_prompt(request: AnswerRequest, context: Context | None, tokenizer: Tokenizer) -> Prompt:
    """The prompt of messages. Where the user's first message has several parts, the first part is a text and the
    others are a question about it."""
    messages, arguments, name = request.messages, request.template_arguments, "chat_template_kwargs"
    try:
        tokenizer = tokenizer.with_arguments(arguments, name)
    except UsageError as error:
        raise BodyError(str(error), name) from error
    has_text = context is None and _has_text(messages)
    if context is None and tokenizer.render is not None and not has_text:
        text = tokenizer.render([(one.role, one.text) for one in messages])
        return Prompt(tokenizer.encode(text, False), answers=True)
    system, exchanges, question = _turns(messages)
    if system is not None and (context is not None or tokenizer.render is None):
        where = "a saved context begins with its own" if context else "this model has no chat template"
        raise BodyError(f"messages has a system message, but {where}; put it into the question", "messages")
    if has_text:
        text, *rest = next(one.content for one in messages if one.role == "user")
        context, asked = Context.read(text, "", tokenizer, system=system), "".join(rest)
        exchanges, question = ([(asked, exchanges[0][1]), *exchanges[1:]], question) if exchanges else ([], asked)
    form = QuestionForm.of(tokenizer, context)
    if arguments and form.template is None:
        raise BodyError(f"{name} is given, but the context stands outside the chat template; leave it out", name)
    return form.prompt(exchanges, question, context, tokenizer)


def _has_text(messages: Sequence[Message]) -> bool:
    """Whether messages are in the order of questions and answers, the first of which has a text before it."""
    users = [one for one in messages if one.role == "user"]
    return bool(users) and len(users[0].content) > 1 and _is_in_turns(messages)


def _is_in_turns(messages: Sequence[Message]) -> bool:
    rest = messages[messages[0].role == "system" :]
    wanted = [("user", "assistant")[index % 2] for index in range(len(rest))]
    return [one.role for one in rest] == wanted and len(rest) % 2 == 1


def _turns(messages: Sequence[Message]) -> tuple[str | None, list[Exchange], str]:
    """A system message, earlier questions with their answers, and the question.

    Raises:
        BodyError: the messages are in another order.
    """
    if not _is_in_turns(messages):
        raise BodyError(
            "messages must be of user and assistant in turn here, with a user's at the end: "
            f"they are of {', '.join(one.role for one in messages)}",
            "messages",
        )
    system = messages[0].text if messages[0].role == "system" else None
    texts = [one.text for one in messages[system is not None :]]
    return system, list(zip(texts[:-1:2], texts[1::2], strict=True)), texts[-1]
