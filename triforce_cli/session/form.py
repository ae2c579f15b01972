"""The form that answers are to have, as options and clients ask for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ...offload.speculation.grammar import Grammar, Reasoning
from ...tp.errors import UsageError
from ...tp.weights.tokenizer import Tokenizer
from .answer_parts import THINKS, THOUGHT, AnswerSyntax
from .calls import CallForm, Tool
from .source import read_file, read_option

_AT_THE_END = 4
"""Tokens of a prompt among which a chat template has opened such a part, or closed an empty one; before these is what
begins the answer."""


def grammar_of_options(
    json_schema: Path | None, regex: str | None, grammar: Path | None, note: Callable[[str], None]
) -> Grammar | None:
    """What `--json-schema`, `--regex` or `--grammar` ask for.

    Raises:
        UsageError: several of them, or a grammar that cannot be followed.
        TriforceError: a file that cannot be read.
    """
    given = {"--json-schema": json_schema, "--regex": regex, "--grammar": grammar}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)} are both given, but an answer has one form; give one")
    found = None
    if json_schema is not None:
        found = Grammar("json_schema", read_file(json_schema, "--json-schema", note).text)
    elif regex is not None:
        found = Grammar("regex", read_option("--regex", regex, note))
    elif grammar is not None:
        found = Grammar("lark", read_file(grammar, "--grammar", note).text)
    if found:
        found.check()
    return found


def reasoning_of(token_ids: Sequence[int], tokenizer: Tokenizer) -> Reasoning | None:
    """What the model may write before its answer to a question, where `THINKS` and `THOUGHT` are tokens. The prompt,
    `token_ids`, may have opened it, or closed it, where nothing is written."""
    if tokenizer.render is None:
        return None
    opens, closes = (tokenizer.encode(text, False) for text in (THINKS, THOUGHT))
    if len(opens) != 1 or len(closes) != 1:
        return None
    marks = [token for token in token_ids[-_AT_THE_END:] if token in (opens[0], closes[0])]
    if marks[-1:] == closes:
        return None
    return Reasoning(opens[0], closes[0], is_open=marks[-1:] == opens)


def syntax_of(
    token_ids: Sequence[int], tokenizer: Tokenizer, form: CallForm | None = None, tools: Sequence[Tool] = ()
) -> AnswerSyntax:
    """How the answer to a prompt of the chat template is to be read.

    Args:
        token_ids: the prompt's.
        form: of the calls that it may have; `None`: it has none.
        tools: those that the prompt describes.
    """
    reasoning = reasoning_of(token_ids, tokenizer)
    return AnswerSyntax(reasoning and reasoning.is_open, form, {tool.name: tool.for_reading(form) for tool in tools})
