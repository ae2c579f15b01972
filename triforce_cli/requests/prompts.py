"""Prompts of checked requests: token ids by the model's chat template, after a saved context where one is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...tp.errors import TriforceError, UsageError
from ...tp.model.config import ModelConfig
from ...tp.weights.tokenizer import Tokenizer
from ..chat.forms import Exchange, Opening, PlainForm, form_of
from ..generate.prompt import encode_after, saved_text
from ..session.wire import CHAT, AnswerRequest, BodyError


@dataclass(frozen=True)
class RequestPrompt:
    """A prompt, and how its answer becomes text."""

    token_ids: list[int]
    stops: tuple[str, ...]
    """Texts that the answer ends before: the request's, and those of plain questions and answers."""
    continues: bool
    """Whether the answer's text goes on from the prompt's; else it begins anew, as a message."""
    plain: bool
    """Whether questions and answers stand in the prompt as plain text, as there is no chat template."""


class PromptMaker:
    """Makes the prompts of one model."""

    def __init__(self, tokenizer: Tokenizer, config: ModelConfig) -> None:
        self._tokenizer, self._config = tokenizer, config
        self._opening: tuple[str, Opening] | None = None  # of the last request that named a context

    def make(self, request: AnswerRequest) -> RequestPrompt:
        """Raises:
        BodyError: messages in an order that has no form here, no token, or more than the model has positions for.
        ContextError: the saved context cannot be used.
        ModelError: the chat template fails.
        """
        prompt = self._of_messages(request) if request.endpoint == CHAT else self._of_text(request)
        name = "messages" if request.endpoint == CHAT else "prompt"
        tokens, most = len(prompt.token_ids), self._config.max_position_embeddings
        if not tokens:
            raise BodyError(f"{name} gives no token; give a longer text", name)
        if tokens + request.max_new_tokens > most:
            raise BodyError(
                f"{name} has {tokens:,} tokens and {request.max_new_tokens:,} more are asked for, but "
                f"{self._config.name} has {most:,} positions{self._config.positions_note}; shorten it, or lower "
                "max_tokens",
                name, code="context_length_exceeded",
            )  # fmt: skip
        return prompt

    def _of_text(self, request: AnswerRequest) -> RequestPrompt:
        """The prompt of a completion: the text as it is, after that of the context."""
        before = self._context(request.context).token_ids if request.context else []
        if not isinstance(request.prompt, str):
            unknown = [token for token in request.prompt if not 0 <= token < self._config.vocab_size]
            if unknown:
                last = self._config.vocab_size - 1
                raise BodyError(f"prompt has the token {unknown[0]}; the model knows 0 to {last:,}", "prompt")
            token_ids = request.prompt
        elif before:
            token_ids = encode_after(request.prompt, self._tokenizer)
        else:
            token_ids = self._tokenizer.encode(request.prompt, True)
        return RequestPrompt([*before, *token_ids], request.stops, continues=True, plain=False)

    def _of_messages(self, request: AnswerRequest) -> RequestPrompt:
        arguments, name = request.template_arguments, "chat_template_kwargs"
        try:
            tokenizer = self._tokenizer.with_arguments(arguments, name)
        except UsageError as error:
            raise BodyError(str(error), name) from error
        if tokenizer.render is not None and request.context is None:
            token_ids = tokenizer.encode(tokenizer.render(request.messages), False)
            return RequestPrompt(token_ids, request.stops, continues=False, plain=False)
        system, exchanges, question = _turns(request.messages)
        opening = self._context(request.context) if request.context else None
        if system is not None and (opening is not None or tokenizer.render is None):
            where = "a saved context begins with its own" if opening else "this model has no chat template"
            raise BodyError(f"messages has a system message, but {where}; put it into the question", "messages")
        form = form_of(tokenizer, opening, None)
        if arguments and isinstance(form, PlainForm):
            raise BodyError(f"{name} is given, but the context stands outside the chat template; leave it out", name)
        text = form.render(exchanges, question)
        if opening is None:
            token_ids = tokenizer.encode(text, form.begins_text)
        else:
            token_ids = [*opening.token_ids, *tokenizer.encode(text.partition(form.mark)[2], False)]
        stops = (*request.stops, *form.stops)
        return RequestPrompt(token_ids, stops, continues=False, plain=isinstance(form, PlainForm))

    def _context(self, name: str) -> Opening:
        """A saved context, as what the conversation begins with.

        Raises:
            BodyError: it cannot be used.
        """
        if self._opening is None or self._opening[0] != name:
            try:
                found = saved_text(name, self._config)
            except TriforceError as error:
                raise BodyError(str(error), "context", code="context_not_usable") from error
            self._opening = name, Opening.of(*found, self._tokenizer, name)
        return self._opening[1]


def _turns(messages: Sequence[tuple[str, str]]) -> tuple[str | None, list[Exchange], str]:
    """A system message, earlier questions with their answers, and the question.

    Raises:
        BodyError: the messages come in another order.
    """
    system = messages[0][1] if messages[0][0] == "system" else None
    rest = messages[system is not None :]
    wanted = [("user", "assistant")[index % 2] for index in range(len(rest))]
    if [role for role, _ in rest] != wanted or len(rest) % 2 == 0:
        raise BodyError(
            "messages must be of user and assistant in turn here, with a user's at the end: "
            f"they are of {', '.join(role for role, _ in messages)}",
            "messages",
        )
    exchanges = [(rest[index][1], rest[index + 1][1]) for index in range(0, len(rest) - 1, 2)]
    return system, exchanges, rest[-1][1]
