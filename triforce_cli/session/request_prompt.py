"""Makes prompts and tasks from the requests of clients: completions and messages, after a saved context if one is
named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ...offload.contexts.model import ContextRequest
from ...offload.speculation.grammar import ANY_OBJECT, GrammarError
from ...tp.errors import ModelError, TriforceError, UsageError
from ...tp.model.config import ModelConfig
from ...tp.weights.tokenizer import Tokenizer
from .calls import CallForm, Tool, call_grammar
from .form import syntax_of
from .prompt import Context, Exchange, Prompt, QuestionForm, as_array, encode_behind, line_ends_behind
from .session import Task
from .wire import COMPLETION, MAX_WRITTEN_DEPTH, AnswerRequest, BodyError, Message, depth_of

_THINKS = "enable_thinking"
"""The variable that tells chat templates whether answers begin with reasoning."""

TIMES_POSITIONS = 4
"""The prompts of one request may together have this many times the model's positions as tokens."""


def request_task(
    request: AnswerRequest, prompts: Sequence[Prompt], number: int, owner: Any, save: str | None = None
) -> Task:
    """The engine's task for one answer of a request.

    Args:
        prompts: those of the request.
        number: that of the answer, from 0, see `AnswerRequest.n`. Its tokens are drawn as if its prompt were alone.
        owner: any object by which the command identifies the task.
        save: the name of the context as which the prompt is saved, if it is saved.
    """
    contexts = ContextRequest(name=request.context, find=request.context is None, save=save, origin="client")
    prompt = prompts[number // request.n]
    return Task(
        prompt,
        contexts,
        request.sampling,
        request.max_new_tokens,
        number=number,
        draw=number % request.n,
        top_logprobs=request.top_logprobs,
        grammar=prompt.grammar,
        owner=owner,
    )


def request_prompts(request: AnswerRequest, tokenizer: Tokenizer, config: ModelConfig) -> tuple[Prompt, ...]:
    """The prompts of a checked request: one, or several for a completion.

    Raises:
        BodyError: the order of messages is not supported; a prompt has no token, or more than the model has positions
            for; the saved context cannot be used; or the grammar is not supported.
        ModelError: the chat template fails.
    """
    context = None
    if request.grammar:
        with grammar_errors(request.grammar_field):
            request.grammar.check()
    if request.context is not None:
        try:
            context = Context.saved(request.context, tokenizer, config)
        except TriforceError as error:
            raise BodyError(str(error), "context", code="context_not_usable") from error
    if request.endpoint != COMPLETION:
        return (_checked("messages", _message_prompt(request, context, tokenizer), request, config),)
    names = [f"prompt[{index}]" for index in range(len(request.prompts))] if len(request.prompts) > 1 else ["prompt"]
    prompts, tokens, most = [], 0, TIMES_POSITIONS * config.max_position_embeddings
    for name, text in zip(names, request.prompts, strict=True):
        prompts.append(_checked(name, _text_prompt(name, text, context, tokenizer, config), request, config))
        tokens += len(prompts[-1].token_ids)
        if tokens > most:
            raise BodyError(
                f"prompt has several prompts of more than {most:,} tokens together; give them in several requests",
                "prompt", code="context_length_exceeded",
            )  # fmt: skip
    return tuple(prompts)


@contextmanager
def grammar_errors(field: str | None) -> Iterator[None]:
    """Within this context, an unsupported grammar becomes an error of the field that asks for it."""
    try:
        yield
    except GrammarError as error:
        raise BodyError(str(error), field, code="grammar_not_usable") from error


def _checked(name: str, prompt: Prompt, request: AnswerRequest, config: ModelConfig) -> Prompt:
    """Checks a prompt of the field `name`, and adds the stop texts of its request. Its tokens are stored in four bytes
    each instead of the 36 of a list, because many prompts may wait.

    Raises:
        BodyError: it has no token, or more than the model has positions for.
    """
    tokens, positions = len(prompt.token_ids), config.max_position_embeddings
    if not tokens:
        raise BodyError(f"{name} has no tokens; give a longer text", name)
    if tokens + request.max_new_tokens > positions:
        raise BodyError(
            f"{name} has {tokens:,} tokens and {request.max_new_tokens:,} more are asked for, but {config.name} has "
            f"{positions:,} positions{config.positions_note}; shorten it, or lower max_tokens",
            name, code="context_length_exceeded", may_lower="max_tokens" if tokens < positions else None,
        )  # fmt: skip
    return replace(
        prompt,
        token_ids=as_array(prompt.token_ids),
        stops=(*request.stops, *prompt.stops),
        grammar=prompt.grammar or request.grammar,
    )


def _text_prompt(
    name: str, text: str | list[int], context: Context | None, tokenizer: Tokenizer, config: ModelConfig
) -> Prompt:
    """The prompt of a completion: a text unchanged, or token ids, after the text of the context."""
    before = as_array(context.token_ids if context else [])
    if not isinstance(text, str):
        unknown = [token for token in text if not 0 <= token < config.vocab_size]
        if unknown:
            last = config.vocab_size - 1
            raise BodyError(f"{name} has the token {unknown[0]}; the model knows 0 to {last:,}", name)
        return Prompt(before + as_array(text))
    text = tokenizer.as_content(text)
    return Prompt(before + as_array(encode_behind(text, tokenizer) if before else tokenizer.encode(text, True)))


def _message_prompt(request: AnswerRequest, context: Context | None, tokenizer: Tokenizer) -> Prompt:
    """The prompt of messages. If the user's first message has several parts, the first part is a text, and the others
    are a question about it."""
    messages, arguments, name = request.messages, request.template_arguments, "chat_template_kwargs"
    if request.thinks is not None and _THINKS in tokenizer.template_arguments:
        arguments = {_THINKS: request.thinks, **arguments}
    try:
        tokenizer = tokenizer.with_arguments(arguments, name)
    except UsageError as error:
        raise BodyError(str(error), name) from error
    if request.tools or any(one.role == "tool" or one.tool_calls for one in messages):
        return _tool_prompt(request, context, tokenizer)
    has_text = context is None and _has_text(messages)
    if context is None and tokenizer.render is not None and not has_text:
        text = tokenizer.render([_for_template(one) for one in messages])
        return _with_syntax(Prompt(tokenizer.encode(text, False), answers=True), tokenizer)
    system, exchanges, question = _turns(messages)
    if system is not None and (context is not None or tokenizer.render is None):
        where = "that of a saved context is given when it is saved" if context else "this model has no chat template"
        raise BodyError(f"messages has a system message, but {where}; put it into the question", "messages")
    if has_text:
        text, *rest = next(one.content for one in messages if one.role == "user")
        context, asked = Context.read(text, "", tokenizer, system=system), "".join(rest)
        exchanges, question = ([(asked, exchanges[0][1]), *exchanges[1:]], question) if exchanges else ([], asked)
    form = QuestionForm.of(tokenizer, context)
    if arguments and form.template is None:
        raise BodyError(f"{name} is given, but the context was saved without the chat template; leave it out", name)
    prompt = form.prompt(exchanges, question, context, tokenizer)
    return _with_syntax(prompt, tokenizer) if form.template else prompt


def _with_syntax(
    prompt: Prompt, tokenizer: Tokenizer, form: CallForm | None = None, tools: Sequence[Tool] = ()
) -> Prompt:
    return replace(prompt, syntax=syntax_of(prompt.token_ids, tokenizer, form, tools))


def _tool_prompt(request: AnswerRequest, context: Context | None, tokenizer: Tokenizer) -> Prompt:
    """The prompt of messages about tools. The chat template makes all of it."""
    about, given = ("tools", "is given") if request.tools else ("messages", "has tool calls or their results")
    if context is not None:
        says = "a saved context comes before the place where the chat template puts tools"
        raise BodyError(f"{about} {given}, but {says}; leave one of them out", about)
    form = CallForm.of(tokenizer)
    if tokenizer.render is None or form is None:
        template = "no chat template" if tokenizer.render is None else "a chat template without a known format of calls"
        raise BodyError(f"{about} {given}, but this model has {template}", about, code="unsupported_field")
    prompt = Prompt(tokenizer.encode(_rendered(request, tokenizer.render), False), answers=True)
    calls = request.calls
    if calls is None:
        return _with_syntax(prompt, tokenizer)
    if calls.takes_grammar or request.grammar:
        schema = request.grammar.source if request.grammar else None
        if form.style == "bare" and schema == ANY_OBJECT and calls.tools:
            says = "asks for any JSON object, from which this model's calls, plain JSON objects, cannot be told"
            raise BodyError(f"{request.grammar_field} {says}; give a json_schema, or no tools", request.grammar_field)
        with grammar_errors("tools"):
            calls.check()
            grammar = call_grammar(form, calls, tokenizer, schema)
            grammar.check()
        prompt = replace(prompt, grammar=grammar)
    return _with_syntax(prompt, tokenizer, form if calls.tools else None, request.tools)


def _rendered(request: AnswerRequest, render: Callable[..., str]) -> str:
    """Renders messages about tools with the chat template.

    Raises:
        ModelError: the template fails.
    """
    names: dict[str, str] = {}  # of called tools, by the ids of the calls
    messages = list[dict[str, Any]]()
    for one in request.messages:
        names |= {call.id: call.function.name for call in one.tool_calls}
        messages.append(_for_template(one, names))
    first = next((at for at, one in enumerate(request.messages) if one.role == "user"), None)
    if first is not None and len(parts := request.messages[first].content) > 1:  # a text, and a question about it
        messages[first]["content"] = parts[0] + line_ends_behind(parts[0]) + "".join(parts[1:])
    tools = {"tools": [tool.for_template for tool in request.tools]} if request.tools else {}
    try:
        return render(messages, **tools)
    except ModelError:
        merged = _with_texts_in_results(messages)
        if len(merged) == len(messages):
            raise
        return render(merged, **tools)


def _with_texts_in_results(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, in which a user's text after the result of a call becomes part of that result. Some templates
    require that the model's answer follows the result."""
    found: list[dict[str, Any]] = []
    for one in messages:
        if one["role"] == "user" and found and found[-1]["role"] == "tool":
            found[-1] = found[-1] | {"content": f"{found[-1]['content']}\n\n{one['content']}"}
        else:
            found.append(one)
    return found


def _for_template(one: Message, names: Mapping[str, str] | None = None) -> dict[str, Any]:
    """A message in the format of chat templates.

    Args:
        names: those of the tools that were called, by the ids of the calls.
    """
    given: dict[str, Any] = {"role": one.role, "content": one.text}
    if one.reasoning_content:
        given["reasoning_content"] = one.reasoning_content
    if one.tool_calls:
        called = ((call.id, call.function) for call in one.tool_calls)
        given["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": of.name, "arguments": _as_object(of.arguments)}}
            for id, of in called
        ]
    if one.role == "tool":
        given["tool_call_id"] = one.tool_call_id
        if name := one.name or (names or {}).get(one.tool_call_id or ""):
            given["name"] = name
    return given


def _as_object(arguments: str) -> Any:
    """The arguments as an object for templates, if they are JSON and not nested too deeply; otherwise the text. A model
    may have written something that is not JSON."""
    try:
        found = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    fits = isinstance(found, dict) and depth_of(found, MAX_WRITTEN_DEPTH) <= MAX_WRITTEN_DEPTH
    return found if fits else arguments


def _has_text(messages: Sequence[Message]) -> bool:
    """Whether messages are questions and answers in turn, and the first question has a text before it."""
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
            "messages must have the roles user and assistant in turn here, after at most one system message, and end "
            f"with user; their roles are {', '.join(one.role for one in messages)}",
            "messages",
        )
    system = messages[0].text if messages[0].role == "system" else None
    texts = [one.text for one in messages[system is not None :]]
    return system, list(zip(texts[:-1:2], texts[1::2], strict=True)), texts[-1]
