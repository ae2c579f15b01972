"""Answers in a form: grammars, and which tokens they allow.

A grammar is part of the distribution from which tokens are drawn. The logits of forbidden tokens are set to minus
infinity before temperature and filters, as a logits processor of `transformers` does. So an answer is drawn exactly
from the target's distribution under the grammar, with any draft, and every complete answer is in the form. llguidance
(github.com/guidance-ai/llguidance) computes which tokens are allowed. Needs no PyTorch.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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
"""The maximum size of a grammar's text in bytes, by its kind. Compiling takes time: up to seconds for a text of maximum
size of the worst kind (a schema with 2,000 properties: 0.6 s, AMD EPYC, 2026-11-27)."""

CHECKED = 32
"""The number of checked grammars that are remembered."""

KEPT_BYTES = 2**17
"""The maximum total size of the sources whose compiled forms are kept, as counted by `_Form.num_bytes`. Compiled forms
take up to 300 times as many bytes."""

_MASK_BYTES, _KEPT_MASKS = 768, 2048
"""Each mask that was made with a compiled form adds so many bytes to the size that counts: the states of its lexer grow
with each mask, by up to 200 KiB (a vocabulary of 5,440). They are shared by all answers in this form, so the form is
only kept for later answers until so many masks were made with it."""

_SHORT_BYTES = 2**12
"""The minimum number of bytes that a source counts as."""

_DENSE = 16
"""The factor for the bytes of a regular expression, or of a grammar in Lark or GBNF: its text is denser."""

_LEXER_STATES, _STEP_FUEL = 2**16, 50_000
"""Limits of llguidance for one answer, or for several that share a compiled form: the number of lexer states so far,
and the work for the next token. With llguidance's own limits, four times as high, one answer took 600 MiB, and 0.3 s
for a token. With these, it takes at most 40 MiB and 30 ms (300 terminals, each of which may begin anywhere; Intel Xeon,
2026-11-27). A text of limited length has a state for each letter."""

_USED_UP = "too many"
"""What llguidance's messages say if a limit of the lexer is reached: too many states, too many expressions."""

_STACK_BYTES = 2**28
"""The stack size of the thread that compiles. llguidance follows references by recursion, about 5 KiB each."""

_WITHOUT_ROLLBACK = re.compile(r"\b(max_tokens|stop|stop_capture|suffix|lazy)\b\s*[=,\]]")
"""Finds attributes of rules in Lark whose tokens cannot be rolled back."""


Kind = Literal["json_schema", "regex", "lark", "tools"]
T = TypeVar("T")


class GrammarError(UsageError):
    """A grammar that cannot be followed."""


@dataclass(frozen=True)
class Reasoning:
    """The reasoning that a model may write before its answer, between two special tokens."""

    opens: int
    """The token id that begins the reasoning."""
    closes: int
    """The token id that ends the reasoning."""
    is_open: bool
    """Whether the prompt has begun the reasoning already."""


@dataclass(frozen=True)
class Grammar:
    """The required form of an answer."""

    kind: Kind
    """`json_schema`, `regex`, `lark` (also for GBNF) or `tools`."""
    source: str
    """`json_schema`: a JSON schema as JSON. `regex`: a regular expression in the syntax of the crate `regex`. `lark`: a
    grammar in Lark's syntax, or GBNF. `tools`: a grammar in Lark's syntax that this program makes."""
    reasoning: Reasoning | None = None
    """The reasoning that may come before the answer, in which every token is allowed except an end-of-sequence token;
    `None`: none."""

    def check(self) -> None:
        """Checks that the grammar can be compiled.

        Raises:
            GrammarError: it cannot; the message says what is wrong and where.
        """
        _check(self.kind, self.source)

    @property
    def name(self) -> str:
        """The name of the grammar's kind in messages."""
        others = {"json_schema": "JSON schema", "regex": "regular expression", "tools": "grammar of the tools"}
        return others.get(self.kind, "grammar")

    def compiled(self) -> str:
        """The grammar in the format that llguidance reads.

        Raises:
            GrammarError: the schema is not a JSON object, or the GBNF is invalid.
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


def check_length(kind: Kind, num_bytes: int) -> None:
    """Checks the size of a grammar's text.

    Raises:
        GrammarError: it has more bytes than a grammar of this kind may have.
    """
    most = MOST_BYTES[kind]
    if num_bytes > most:
        raise GrammarError(f"the {Grammar(kind, '').name} has more than {most:,} bytes; give a shorter one")


@lru_cache(maxsize=CHECKED)
def _check(kind: Kind, source: str) -> None:
    """See `Grammar.check`."""
    from llguidance import LLMatcher

    grammar = Grammar(kind, source)
    check_length(kind, len(source.encode(errors="replace")))
    if kind == "lark" and (found := _WITHOUT_ROLLBACK.search(source)):
        raise GrammarError(
            f"the grammar cannot be followed: {found[1]} is not supported, as its tokens cannot be rolled back; leave "
            "it out of the grammar"
        )

    def validate() -> tuple[bool, list[str]]:
        return LLMatcher.validate_grammar_with_warnings(grammar.compiled(), limits=_limits())

    is_error, messages = _with_deep_stack(validate)
    if is_error:
        raise GrammarError(f"the {grammar.name} cannot be followed: {in_a_line(messages[0])}")


def _with_deep_stack(work: Callable[[], T]) -> T:
    """Calls `work` in a thread whose stack is deep enough for any grammar of `MOST_BYTES`, and returns its result."""
    with ThreadPoolExecutor(1, "grammar") as pool:
        with _STARTING:
            before = threading.stack_size(_STACK_BYTES)
            try:
                found = pool.submit(work)
            finally:
                threading.stack_size(before)
        return found.result()


_STARTING = threading.Lock()
"""Held while the stack size for new threads is changed."""


def _limits() -> LLParserLimits:
    """The limits of llguidance on time and memory, with messages of one line."""
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False, max_lexer_states=_LEXER_STATES, step_lexer_fuel=_STEP_FUEL)


_SPACES: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space in JSON, as `json.dumps` writes it. If any white space were allowed, a model might write nothing else to
the end."""

ANY_OBJECT = json.dumps({"type": "object"})
"""The schema of any JSON object."""


def json_rule(schema: str) -> str:
    """The body of a rule in Lark's syntax. It matches JSON that fits `schema`, a JSON object that is given as text."""
    return "%json " + json.dumps({**json.loads(schema), "x-guidance": _SPACES})


def _as_object(schema: str) -> str:
    """Returns a schema that is given as JSON, if it is an object. `true` is a schema too, but restricts nothing.

    Raises:
        ValueError: the schema is not a JSON object.
    """
    given = json.loads(schema)
    if not isinstance(given, dict):
        raise ValueError(f"it is {json.dumps(given)[:60]}; it must be a JSON object")
    return schema


def in_a_line(message: str) -> str:
    """A message of llguidance in one line of at most 500 characters."""
    return " ".join(message.replace("<non-verbose/>", "").split())[:500]


@dataclass(eq=False)
class _Form:
    """A compiled grammar. llguidance's copies of a matcher share their lexer, and its limit on states."""

    key: tuple[Kind, str]
    """The kind and the source of the grammar."""
    matcher: LLMatcher
    num_bytes: int
    """The bytes that the form counts against `KEPT_BYTES`: those of its source, and of its masks."""
    answers: int = 0
    """The number of answers that follow or followed a copy of the matcher."""
    masks: int = 0
    """The number of masks that were made with copies of the matcher."""


class Grammars:
    """Compiles grammars for one model's tokens, and makes the matchers of its sequences."""

    def __init__(self, directory: Path, config: ModelConfig) -> None:
        """Args: `directory` has the model's tokenizer, which is read when it is first needed."""
        self._directory, self._config = directory, config
        self._lock = threading.Lock()
        self._compiled: OrderedDict[tuple[Kind, str], _Form] = OrderedDict()  # in the order of their last use
        self._compiling: threading.Event | None = None

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """The model's tokenizer for llguidance.

        Raises:
            GrammarError: llguidance does not support the model's tokenizer.
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
        """Makes a matcher that follows an answer. The answer begins at position `start` of the text.

        Raises:
            GrammarError: see `Grammar.check`; no text has the form; the model's tokenizer is not supported; or the
                model has no end-of-sequence token, which an answer in a form needs as its end.
        """
        if not self._config.eos_token_ids:
            raise GrammarError(
                f"{self._config.name} has no end-of-sequence token, so an answer in a form could not end"
            )
        return Matcher(self, self._of(grammar), grammar.reasoning, self._config, start)

    def prepare(self, grammar: Grammar) -> None:
        """Compiles a grammar, so that its first answer does not wait for it. May be called from any thread.

        Raises:
            GrammarError: see `matcher`.
        """
        self._of(grammar)

    def compile_beside(self, grammar: Grammar) -> threading.Event | None:
        """Compiles a grammar in a thread. Returns an event that is set when compiling has ended, even with an error. It
        is set already if the compiled grammar is kept. Returns `None` while an earlier call still compiles a grammar:
        this method compiles one at a time."""
        done = threading.Event()
        with self._lock:
            if (grammar.kind, grammar.source) in self._compiled:
                done.set()
                return done
            if self._compiling and not self._compiling.is_set():
                return None
            self._compiling = done

        def compile_it() -> None:
            try:
                with suppress(Exception):  # `matcher` raises it again when the grammar is used
                    self.prepare(grammar)
            finally:
                done.set()

        threading.Thread(target=compile_it, name="grammar beside", daemon=True).start()
        return done

    def count_mask(self, form: _Form) -> None:
        """Counts a mask that is made with a compiled form, and drops kept forms if they are too large then."""
        with self._lock:
            form.masks += 1
            form.num_bytes += _MASK_BYTES
            self._drop_some(form)

    def _of(self, grammar: Grammar) -> _Form:
        """The compiled form of a grammar, compiled here if it is not kept."""
        key = grammar.kind, grammar.source
        with self._lock:
            found = self._compiled.get(key)
        found = found or self.compile(*key)
        with self._lock:
            self._compiled[key] = found
            self._compiled.move_to_end(key)
            self._drop_some(found)
        return found

    def _drop_some(self, used: _Form) -> None:
        """Drops the form that is being used if it was used too much, and then kept ones until the rest is small enough:
        those with the most masks first, and of those with about as many the least recently used. The lock must be
        held."""
        kept = self._compiled
        if used.masks >= _KEPT_MASKS and kept.get(used.key) is used:
            del kept[used.key]
        while len(kept) > 1 and sum([form.num_bytes for form in kept.values()]) > KEPT_BYTES:
            del kept[max(kept, key=lambda key: kept[key].masks // 64)]

    def compile(self, kind: Kind, source: str) -> _Form:
        """Compiles a grammar. The form is not kept for other answers.

        Raises:
            GrammarError: see `matcher`.
        """
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
            raise GrammarError(f"the {grammar.name} cannot be followed: no text has this form")
        if found.is_error():
            raise GrammarError(f"the {grammar.name} cannot be followed: {in_a_line(found.get_error())}")
        dense = 1 if kind in ("json_schema", "tools") else _DENSE
        return _Form((kind, source), found, max(_SHORT_BYTES, len(source.encode(errors="replace")) * dense))


class Matcher:
    """Follows one answer, and says which tokens may come next."""

    def __init__(
        self, grammars: Grammars, form: _Form, reasoning: Reasoning | None, config: ModelConfig, start: int
    ) -> None:
        self._grammars, self._reasoning, self._start = grammars, reasoning, start
        self._follow(form)
        self._ends, self._vocab = frozenset(config.eos_token_ids), config.vocab_size

    def _follow(self, form: _Form) -> None:
        """Begins to follow a copy of a compiled form."""
        form.answers += 1
        self._form, self._matcher = form, form.matcher.deep_copy()
        self._consumed: list[int] = []  # tokens of the form, without an end-of-sequence token

    def allowed(self, context: Sequence[int], proposed: Sequence[int], *, decides: bool = True) -> np.ndarray:
        """Which tokens may follow `context`, and which may follow each of the proposed tokens after it, as bool
        `[len(proposed) + 1, vocab]`. A draft may contain a forbidden token: after it, all tokens are allowed.

        Args: `decides`: whether all of `context` was drawn with these masks. Draft tokens at its end may not have been:
            after a context that does not follow the grammar, all tokens are allowed then.

        Raises:
            ValueError: the grammar has become too complex, nothing can follow, or `context` does not follow the grammar
                although `decides` is set; the message has the reason.
        """
        answer, found = [*context[self._start :]], np.ones((len(proposed) + 1, self._vocab), bool)
        follows = decides  # whether the answer so far is known to follow the grammar
        for i in range(len(proposed) + 1):
            begin = self._begin(answer)
            if begin is None:
                found[i, list(self._ends)] = False
            elif (mask := self._mask_after(answer[begin:], follows)) is not None:
                found[i], follows = mask, True
                if not answer and self._reasoning:
                    found[i, self._reasoning.opens] = True
            elif follows:
                raise ValueError("the answer so far does not follow the grammar")
            if i < len(proposed):
                token = proposed[i]
                if not found[i, token] or token in self._ends:
                    break
                answer.append(token)
        return found

    def forced(self, context: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens that spell the text that must follow `context`; none if the grammar leaves a choice."""
        answer = [*context[self._start :]]
        begin = self._begin(answer)
        try:
            if begin is None or (not answer and self._reasoning) or not self._go_to(answer[begin:]):
                return []
        except ValueError:  # `allowed` is called next and raises it again
            return []
        return [token for token in self._matcher.compute_ff_tokens()[:most] if token not in self._ends]

    def _begin(self, answer: Sequence[int]) -> int | None:
        """The index in the answer so far at which the form begins; `None` while the reasoning goes on."""
        reasoning = self._reasoning
        if reasoning is None or not (reasoning.is_open or answer[:1] == [reasoning.opens]):
            return 0
        return answer.index(reasoning.closes) + 1 if reasoning.closes in answer else None

    def _mask_after(self, tokens: Sequence[int], follows: bool) -> np.ndarray | None:
        """Which tokens may follow `tokens`, as bool `[vocab]`; `None` if these are not all allowed. If answers in the
        same form have used up the states of its lexer, this answer goes on with a compiled form of its own.

        Args: `follows`: whether it is known that the tokens are allowed.

        Raises:
            ValueError: the grammar has become too complex, or nothing can follow.
        """
        alone = self._form.answers == 1
        try:
            found = self._mask() if self._go_to(tokens) else None
            if found is not None or not follows or alone:
                return found
        except ValueError as error:
            if alone or _USED_UP not in str(error):
                raise
        self._follow(self._grammars.compile(*self._form.key))
        found = self._mask()
        # With a mask after each token, as at first: llguidance limits the work between two masks.
        for stop in range(1, len(tokens) + 1):
            found = self._mask() if self._go_to(tokens[:stop]) else None
        return found

    def _go_to(self, tokens: Sequence[int]) -> bool:
        """Brings the matcher to the state after these tokens. Returns whether all of them are allowed. If not, the
        matcher does not consume the new ones: a forbidden token would end it."""
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
        self._grammars.count_mask(self._form)
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise ValueError(self._matcher.get_error())
        return np.unpackbits(words, bitorder="little", count=self._vocab).astype(bool)
