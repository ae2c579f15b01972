"""Answers in a form: grammars, and which tokens may follow within them.

A grammar is part of the distribution that tokens are drawn from: what it forbids is taken from the logits before
temperature and filters, as `transformers` does with a logits processor. So an answer is drawn exactly from the target's
distribution under the grammar, whatever drafted it, and every complete answer is in the form. What may follow is
computed by llguidance (github.com/guidance-ai/llguidance). Needs no PyTorch.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from ...tp.errors import UsageError
from ...tp.weights.tokenizer import backend_json

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    from ...tp.model.config import ModelConfig

MOST_BYTES = {"json_schema": 2**16, "regex": 2**14, "lark": 2**14, "tools": 2**18}
"""Of a grammar's text, by its kind: compiling takes time, up to seconds for as many of the worst kind (a schema with
2,000 properties: 0.6 s, AMD EPYC, 2026-11-27)."""

COMPILED = 32
"""Grammars whose compiled form is kept."""

_STACK_BYTES = 2**28
"""Of the thread that compiles: llguidance follows references by recursion, some 5 KiB each."""

_WITHOUT_ROLLBACK = re.compile(r"\b(max_tokens|stop|stop_capture|suffix|lazy)\b\s*[=,\]]")
"""In Lark, attributes of rules whose tokens cannot be taken back."""


Kind = Literal["json_schema", "regex", "lark", "tools"]
T = TypeVar("T")


class GrammarError(UsageError):
    """A grammar that cannot be followed."""


@dataclass(frozen=True)
class Reasoning:
    """What a model may write before its answer, between two tokens."""

    opens: int
    closes: int
    is_open: bool
    """Whether the prompt has opened it already."""


@dataclass(frozen=True)
class Grammar:
    """The form of an answer."""

    kind: Kind
    source: str
    """A JSON schema as JSON; a regular expression (of the crate `regex`); a grammar in Lark's syntax, or GBNF; or, of
    `tools`, one in Lark's syntax that was made here."""
    reasoning: Reasoning | None = None
    """What comes before it, in any form."""

    def check(self) -> None:
        """Raises:
        GrammarError: it cannot be compiled; the message says where in it what is wrong.
        """
        _check(self.kind, self.source)

    @property
    def name(self) -> str:
        """What messages call it."""
        others = {"json_schema": "JSON schema", "regex": "regular expression", "tools": "grammar of the tools"}
        return others.get(self.kind, "grammar")

    def compiled(self) -> str:
        """As llguidance takes it.

        Raises:
            GrammarError: a schema that is no JSON object, or a grammar in GBNF that is none.
        """
        from llguidance import LLMatcher, grammar_from

        try:
            if self.kind == "json_schema":
                return LLMatcher.grammar_from_json_schema(_as_object(self.source), overrides=_SPACES)
            if self.kind == "tools":
                return LLMatcher.grammar_from_lark(self.source)
            return grammar_from("regex" if self.kind == "regex" else "grammar", self.source)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"the {self.name} cannot be read: {in_a_line(str(error))}") from error


@lru_cache(maxsize=COMPILED)
def _check(kind: Kind, source: str) -> None:
    """See `Grammar.check`."""
    from llguidance import LLMatcher

    grammar, most = Grammar(kind, source), MOST_BYTES[kind]
    if len(source.encode(errors="replace")) > most:
        raise GrammarError(f"the {grammar.name} has more than {most:,} bytes; give a shorter one")
    if kind == "lark" and (found := _WITHOUT_ROLLBACK.search(source)):
        raise GrammarError(f"the grammar cannot be followed: {found[1]} is not supported, as its tokens must stay")

    def validate() -> tuple[bool, list[str]]:
        return LLMatcher.validate_grammar_with_warnings(grammar.compiled(), limits=_limits())

    is_error, messages = _with_deep_stack(validate)
    if is_error:
        raise GrammarError(f"the {grammar.name} cannot be followed: {in_a_line(messages[0])}")


def _with_deep_stack(work: Callable[[], T]) -> T:
    """What `work` gives, in a thread whose stack is deep enough for any grammar of `MOST_BYTES`."""
    with ThreadPoolExecutor(1, "grammar") as pool:
        with _STARTING:
            before = threading.stack_size(_STACK_BYTES)
            try:
                found = pool.submit(work)
            finally:
                threading.stack_size(before)
        return found.result()


_STARTING = threading.Lock()
"""Held while the size of new threads' stacks is another one."""


def _limits() -> LLParserLimits:
    """Those of llguidance, which bound time and memory, with messages in a line."""
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False)


_SPACES: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space of JSON: as `json.dumps` writes it. Where any may come, a model may write nothing else to the end."""

ANY_OBJECT = json.dumps({"type": "object"})
"""The schema of any JSON object."""


def json_rule(schema: str) -> str:
    """The body of a rule in Lark's syntax for JSON of a schema, which is an object given as JSON."""
    return "%json " + json.dumps({**json.loads(schema), "x-guidance": _SPACES})


def _as_object(schema: str) -> str:
    """A schema that is given as JSON, if it is an object: `true`, which is one too, restricts nothing.

    Raises:
        ValueError: it is none.
    """
    given = json.loads(schema)
    if not isinstance(given, dict):
        raise ValueError(f"it is {json.dumps(given)[:60]}, and an object belongs there")
    return schema


def in_a_line(message: str) -> str:
    """What llguidance says of a grammar, in a line."""
    return " ".join(message.replace("<non-verbose/>", "").split())[:500]


class Grammars:
    """What follows the answers of one model's sequences: it knows the tokens' texts."""

    def __init__(self, directory: Path, config: ModelConfig) -> None:
        """Args: `directory` has the model's tokenizer, which is read when it is first needed."""
        self._directory, self._config = directory, config
        self._compiled = lru_cache(maxsize=COMPILED)(self._compile)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """Raises:
        GrammarError: the model's tokenizer is of a kind that llguidance does not know.
        """
        from llguidance import LLTokenizer

        try:
            text, size = backend_json(self._directory)
            size = max(size, self._config.vocab_size)
            return LLTokenizer(text, n_vocab=size, eos_token=list(self._config.eos_token_ids))
        except Exception as error:  # llguidance raises nothing narrower
            raise GrammarError(
                f"no grammar can be followed with the tokenizer of {self._config.name}: {in_a_line(str(error))}"
            ) from error

    def matcher(self, grammar: Grammar, start: int) -> Matcher:
        """What follows an answer from its beginning on, which is the position `start` of the text.

        Raises:
            GrammarError: see `Grammar.check`; no text is of the form; or the model has no end-of-sequence token, with
                which an answer in a form must end.
        """
        if not self._config.eos_token_ids:
            raise GrammarError(
                f"{self._config.name} has no end-of-sequence token, so that no answer in a form could end"
            )
        found = self._compiled(grammar.kind, grammar.source).deep_copy()
        return Matcher(found, grammar.reasoning, self._config, start)

    def prepare(self, grammar: Grammar) -> None:
        """Compiles a grammar, so that its first answer does not wait for that; from any thread.

        Raises:
            GrammarError: see `matcher`.
        """
        self._compiled(grammar.kind, grammar.source)

    def _compile(self, kind: Kind, source: str) -> LLMatcher:
        from llguidance import LLMatcher

        grammar, tokenizer = Grammar(kind, source), self._tokenizer
        grammar.check()

        def compiled() -> LLMatcher:
            found = LLMatcher(tokenizer, grammar.compiled(), log_level=0, limits=_limits())
            if not found.is_error():
                found.compute_bitmask()
            return found

        found = _with_deep_stack(compiled)
        if found.stop_reason().startswith("NoExtension"):
            raise GrammarError(f"the {grammar.name} cannot be followed: no text is of this form")
        if found.is_error():
            raise GrammarError(f"the {grammar.name} cannot be followed: {in_a_line(found.get_error())}")
        return found


class Matcher:
    """Follows one answer."""

    def __init__(self, matcher: LLMatcher, reasoning: Reasoning | None, config: ModelConfig, start: int) -> None:
        self._matcher, self._reasoning, self._start = matcher, reasoning, start
        self._ends, self._vocab = frozenset(config.eos_token_ids), config.vocab_size
        self._consumed: list[int] = []  # tokens of the form; an end of sequence is never among them

    def allowed(self, context: Sequence[int], proposed: Sequence[int], *, decides: bool = True) -> np.ndarray:
        """Which tokens may follow `context`, and each of the proposed tokens behind it: `[len(proposed) + 1, vocab]`
        bool. Behind a token that may not come, as some drafts have it, all may.

        Args: `decides`: whether all of `context` was drawn with these masks; a draft's end may not be.

        Raises:
            ValueError: the grammar has become too complex, or nothing can follow; with the reason.
        """
        answer, found = [*context[self._start :]], np.ones((len(proposed) + 1, self._vocab), bool)
        for i in range(len(proposed) + 1):
            begin = self._begin(answer)
            if begin is None:
                found[i, list(self._ends)] = False
            elif self._go_to(answer[begin:]):
                found[i] = self._mask()
                if not answer and self._reasoning:
                    found[i, self._reasoning.opens] = True
            elif decides and i == 0:
                raise ValueError("the answer so far does not follow it")
            if i < len(proposed):
                token = proposed[i]
                if not found[i, token] or token in self._ends:
                    break
                answer.append(token)
        return found

    def forced(self, context: Sequence[int], most: int) -> list[int]:
        """Tokens, up to `most`, that spell what must follow `context`."""
        answer = context[self._start :]
        begin = self._begin(answer)
        try:
            if begin is None or (not answer and self._reasoning) or not self._go_to(answer[begin:]):
                return []
        except ValueError:  # as `allowed` says, which is asked next
            return []
        return [token for token in self._matcher.compute_ff_tokens()[:most] if token not in self._ends]

    def _begin(self, answer: Sequence[int]) -> int | None:
        """Where the form begins in an answer so far; `None`: behind it."""
        reasoning = self._reasoning
        if reasoning is None or not (reasoning.is_open or answer[:1] == [reasoning.opens]):
            return 0
        return answer.index(reasoning.closes) + 1 if reasoning.closes in answer else None

    def _go_to(self, tokens: Sequence[int]) -> bool:
        """Has consumed these tokens and no others, if they are possible: a token that is not would end all."""
        known, matcher = self._consumed, self._matcher
        common = len(known)
        if tokens[:common] != known:
            common = next((i for i, (a, b) in enumerate(zip(known, tokens, strict=False)) if a != b), len(tokens))
            matcher.rollback(len(known) - common)
            del known[common:]
        further = list(tokens[common:])
        possible = matcher.is_error() or matcher.validate_tokens(further) == len(further)
        if possible and further:
            matcher.consume_tokens(further)
            known += further
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return possible

    def _mask(self) -> np.ndarray:
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise ValueError(self._matcher.get_error())
        return np.unpackbits(words, bitorder="little", count=self._vocab).astype(bool)
