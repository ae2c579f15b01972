"""The required form of answers, as options and clients give it."""

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
"""The number of last tokens of a prompt in which a chat template may have opened reasoning, or closed empty reasoning.
They follow the tokens that begin the answer."""


def grammar_of_options(
    json_schema: Path | None, regex: str | None, grammar: Path | None, note: Callable[[str], None]
) -> Grammar | None:
    """The grammar of `--json-schema`, `--regex` or `--grammar`; `None` without these options.

    Raises:
        UsageError: several of these options are given, or the grammar is not supported.
        TriforceError: a file cannot be read.
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
    """The reasoning that the model may write before its answer, if `THINKS` and `THOUGHT` are tokens of the model.

    Args:
        token_ids: the prompt. It may have opened the reasoning; or it may have closed it, so that there is none.
    """
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
    """How the parts of the answer to a prompt of the chat template are found.

    Args:
        token_ids: the prompt.
        form: that of the calls that the answer may have; `None`: it has no calls.
        tools: the tools that the prompt describes.
    """
    reasoning = reasoning_of(token_ids, tokenizer)
    return AnswerSyntax(reasoning and reasoning.is_open, form, {tool.name: tool.for_reading(form) for tool in tools})
