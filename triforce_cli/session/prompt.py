"""Makes prompts: converts texts, questions and saved contexts to token ids, by one rule for all commands.

If a text and a question are given separately (as options, a saved context, or two parts of a message), they are encoded
separately, and the text in the same way as by `triforce read`. Otherwise, all is encoded as a whole. A question is
rendered with the model's chat template; without a template, it becomes `Question: … Answer:`. Texts and questions are
content: names of control tokens in them stay text (`Tokenizer.as_content`).
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ...offload.contexts.manifest import NO_FRAME, ContextError, Frame
from ...offload.speculation.grammar import Grammar
from ...tp.errors import CapacityError, TriforceError, UsageError
from ...tp.model.config import ModelConfig
from ...tp.weights.chat_template import Messages, message
from ...tp.weights.tokenizer import Tokenizer
from .answer_parts import PLAIN, AnswerSyntax
from .source import Source, cut_log

Exchange = tuple[str, str]
"""A question and its answer."""

_TEXT_LEFT_OUT = "the model's chat template leaves the text out; give the question inside the prompt"


@dataclass(frozen=True)
class Prompt:
    """Token ids for the engine, and how the tokens after them become text."""

    token_ids: Sequence[int]
    answers: bool = False
    """Whether the following tokens answer a question; otherwise, they continue the text."""
    stops: tuple[str, ...] = ()
    """The stop texts: the answer ends before the first of them."""
    text_tokens: int | None = None
    """How many ids at the beginning are the text without the question; `None`: all."""
    dropped: int = 0
    """The number of tokens of the text that were left out."""
    syntax: AnswerSyntax = PLAIN
    """How the parts of an answer's text are found."""
    grammar: Grammar | None = None
    """The required form of the answer."""


@dataclass(frozen=True)
class Context:
    """A text that questions are about, as token ids."""

    token_ids: Sequence[int]
    frame: Frame
    """The text around it."""
    line_ends: str
    """The line ends between it and the first question."""
    name: str
    """A description for people."""

    @classmethod
    def read(
        cls, text: str, name: str, tokenizer: Tokenizer, *, system: str | None = None, raw: bool = False
    ) -> Context:
        """A text as the beginning of a user's message in the chat template; the text alone if `raw`, or if the model
        has no chat template.

        Raises:
            UsageError: `system` is given, but there is no place for a system message; or the text has no tokens.
        """
        frame = Frame(chat=tokenizer.render is not None and not raw, system=system)
        if system and not frame.chat:
            reason = "--raw leaves it out" if raw else "this model has no chat template for it"
            raise UsageError(f"--system is given, but {reason}; put it into the text")
        form = QuestionForm.of(tokenizer, cls([], frame, "", name))
        before = form.split_around_text([], "")[0]
        token_ids = tokenizer.encode(before + tokenizer.as_content(text), form.begins_text)
        if not token_ids:
            raise UsageError("the text has no tokens; give a longer one")
        return cls(token_ids, frame, line_ends_behind(text), name)

    @classmethod
    def saved(cls, name: str, tokenizer: Tokenizer, config: ModelConfig) -> Context:
        """The saved context `name`.

        Raises:
            ContextError: see `saved_text`.
        """
        token_ids, frame = saved_text(name, config)
        return cls(token_ids, frame, line_ends_behind(tokenizer.decode(list(token_ids[-16:]))), f"the context {name}")


def line_ends_behind(text: str) -> str:
    """The line ends that separate a text from a question."""
    return "\n" * (2 - min(2, len(text) - len(text.rstrip("\n"))))


def saved_text(name: str, config: ModelConfig) -> tuple[array[int], Frame]:
    """The ids of a saved context, and the frame of its text.

    Raises:
        ContextError: the context does not exist, belongs to another model, is damaged, or is not complete.
    """
    from ...offload.contexts.home import user_store

    store = user_store()
    manifest = store.load(name)
    if not manifest.complete:
        raise ContextError(
            f"the context {name!r} is not complete: {manifest.saved:,} of {manifest.tokens:,} tokens are saved; "
            "triforce read completes it"
        )
    token_ids, largest = _token_ids(store.root, name, manifest.created, manifest.saved)
    shape, ours = manifest.shape, (config.kv_layers, config.num_kv_heads, config.head_dim)
    if (shape.num_layers, shape.num_kv_heads, shape.head_dim) != ours or largest >= config.vocab_size:
        raise ContextError(
            f"the context {name!r} was saved with a different model, number format or RoPE scaling: not with "
            f"{config.name}; give --model {manifest.model}"
        )
    return token_ids, manifest.frame


@lru_cache(maxsize=1)
def _token_ids(root: Path, name: str, created: float, saved: int) -> tuple[array[int], int]:
    """The ids of a saved context and the largest of them, cached for the next question about it.

    Args:
        created, saved: those of the manifest. They differ if another text is saved under the name later.
    """
    from ...offload.contexts.store import ContextStore

    token_ids = array("i", ContextStore(root).token_ids(name))
    return token_ids, max(token_ids)


@dataclass(frozen=True)
class QuestionForm:
    """How questions and answers become one text: messages by a chat template, or `Question: … Answer: …`."""

    template: Callable[[Messages], str] | None
    frame: Frame
    """The text around the context's text, if there is one."""
    placeholder: str = ""
    """A random word that replaces the context's text in the template, so that the place of the text can be found. It is
    in a message of the user or, if the context is a conversation, in the last answer."""
    line_ends: str = ""
    """The line ends between the context's text and a question."""
    as_content: Callable[[str], str] = str
    """See `Tokenizer.as_content`."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, context: Context | None = None, system: str | None = None) -> QuestionForm:
        """The form for a model, and for the text that questions are about. It uses the chat template if there is one
        and the context is in it.

        Args:
            system: a message before the first question. A context has its own.

        Raises:
            UsageError: there is no place for the system message.
            TriforceError: the template leaves out the text.
        """
        frame = context.frame if context else Frame(chat=True, system=system)
        placeholder, line_ends = (f"text-{secrets.token_hex(8)}", context.line_ends) if context else ("", "")
        if tokenizer.render is None or not (frame.chat or frame.answered):
            if system:
                raise UsageError("--system is given, but there is no chat template here; put it into the question")
            return cls(None, NO_FRAME, placeholder, line_ends, tokenizer.as_content)
        form = cls(tokenizer.render, frame, placeholder, line_ends, tokenizer.as_content)
        if placeholder not in form.render([], "?"):
            raise TriforceError(_TEXT_LEFT_OUT)
        return form

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop texts of an answer."""
        return () if self.template else ("\nQuestion:",)

    @property
    def begins_text(self) -> bool:
        """Whether the tokenizer must add the tokens that begin a text (BOS), because the form does not include them."""
        return self.template is None

    @property
    def answered_frame(self) -> Frame:
        """The frame of a saved context that contains a conversation up to the last token of an answer."""
        return Frame(system=self.frame.system, answered=True) if self.template else NO_FRAME

    def render(self, exchanges: Sequence[Exchange], question: str) -> str:
        """The whole text before the answer to `question`."""
        before = self.placeholder + self.line_ends
        if self.template is None:
            texts = [*exchanges, (question, "")]
            asked = [f"Question: {self.as_content(one)}\nAnswer:{self.as_content(answer)}" for one, answer in texts]
            return before + "\n\n".join(asked)
        messages = [message("system", self.frame.system)] if self.frame.system else []
        if self.frame.answered:
            messages += [message("user", "?"), message("assistant", self.placeholder)]
            before = ""
        for asked, answer in exchanges:
            messages += [message("user", before + asked), message("assistant", answer)]
            before = ""
        return self.template([*messages, message("user", before + question)])

    def split_around_text(self, exchanges: Sequence[Exchange], question: str) -> tuple[str, str]:
        """The text before the context's text, and the text after it up to the answer to `question`."""
        before, found, after = self.render(exchanges, question).partition(self.placeholder)
        if not found:
            raise TriforceError(_TEXT_LEFT_OUT)
        return before, after

    def prompt(
        self, exchanges: Sequence[Exchange], question: str, context: Context | None, tokenizer: Tokenizer
    ) -> Prompt:
        """The prompt of a question about a context, if there is one, after earlier questions and their answers."""
        if context is None:
            return Prompt(tokenizer.encode(self.render(exchanges, question), self.begins_text), True, self.stops)
        rest = encode_behind(self.split_around_text(exchanges, question)[1], tokenizer)
        token_ids = as_array(context.token_ids) + array("i", rest)  # of an array, its memory is copied
        return Prompt(token_ids, True, self.stops, len(context.token_ids))


def as_array(token_ids: Sequence[int]) -> array[int]:
    """Token ids as an array of C's `int`, which is not copied if it is one already."""
    return token_ids if isinstance(token_ids, array) and token_ids.typecode == "i" else array("i", token_ids)


def encode_behind(text: str, tokenizer: Tokenizer) -> list[int]:
    """The ids of a text that follows another text. This matters because some tokenizers put a space before the first
    word."""
    anchor, both = tokenizer.encode("x", False), tokenizer.encode(f"x{text}", False)
    return both[len(anchor) :] if both[: len(anchor)] == anchor else tokenizer.encode(text, False)


def build_prompts(
    source: Source,
    asks: Sequence[str | None],
    tokenizer: Tokenizer,
    config: ModelConfig,
    max_new_tokens: int,
    truncate: str = "error",
) -> list[Prompt | TriforceError]:
    """The prompts of several questions about one text; the question `None` is its continuation. Each is the result of
    `build_prompt`, or its error. If the text must be cut, all prompts get the same part of it, so that it has one
    prefill.
    """

    def build(ask: str | None, drop: int) -> Prompt | TriforceError:
        try:
            return build_prompt(source, ask, tokenizer, config, max_new_tokens, truncate, drop=drop)
        except TriforceError as error:
            return error

    built = {ask: build(ask, 0) for ask in asks}
    largest = max((prompt.dropped for prompt in built.values() if isinstance(prompt, Prompt)), default=0)
    for ask, prompt in built.items():
        if isinstance(prompt, Prompt) and prompt.dropped < largest:
            built[ask] = build(ask, largest)
    return [built[ask] for ask in asks]


def build_prompt(
    source: Source,
    ask: str | None,
    tokenizer: Tokenizer,
    config: ModelConfig,
    max_new_tokens: int,
    truncate: str = "error",
    *,
    drop: int = 0,
) -> Prompt:
    """The ids of a text and of the question about it, if there is one, cut to the model's positions.

    Args:
        truncate: the part of the text that is cut: `head`, `tail` or `middle`; `error` refuses a text that is too long.
        drop: the minimum number of tokens of the text to drop (not of a saved context).

    Raises:
        CapacityError: the text is too long, with `error`, or the question leaves no room for it.
        ContextError: see `saved_text`.
        UsageError: the saved context needs a question; or the text has no token.
    """
    from ...offload.checks import check_context

    if source.context is not None:
        context = Context.saved(source.context, tokenizer, config)
        if ask is not None:
            prompt = QuestionForm.of(tokenizer, context).prompt([], ask, context, tokenizer)
        elif context.frame.chat:
            raise UsageError("the context holds the beginning of a user's message; give the question with --ask")
        else:
            prompt = Prompt(context.token_ids)
        check_context(config, len(prompt.token_ids), max_new_tokens)
        return prompt
    before, after, form = _surroundings(source.text, ask, tokenizer)
    stops, limit = form.stops if form else (), config.max_position_embeddings - max_new_tokens
    special = form is None or form.begins_text
    last = encode_behind(after, tokenizer)
    if source.log_seed is not None:
        source = cut_log(source, tokenizer, limit - len(tokenizer.encode(before, special)) - len(last))
    content = tokenizer.as_content(source.text)
    text = tokenizer.encode(before + content, special)
    if not text and not last:
        raise UsageError("the prompt has no tokens; give a longer text")
    if not drop and (len(text) + len(last) <= limit or truncate == "error"):
        check_context(config, len(text) + len(last), max_new_tokens)
        return Prompt([*text, *last], form is not None, stops, len(text))

    if truncate == "tail":  # the text before the question may now end inside a line
        before, after, _ = _surroundings("", ask, tokenizer)
        last = encode_behind(after, tokenizer)
    # What stands before the text is encoded apart too, so that the cut falls inside the text.
    text, first = tokenizer.encode(content, False), tokenizer.encode(before, special)
    room = limit - len(first) - len(last)
    if room < 1:
        taken = f"--max-new-tokens takes {max_new_tokens:,}"
        if ask is not None:
            taken = f"--ask takes {len(first) + len(last):,} tokens and {taken}"
        raise CapacityError(
            f"{taken}, which leaves no room for the text in the {config.max_position_embeddings:,} positions of "
            f"{config.name}; {'lower it' if ask is None else 'shorten the question, or lower --max-new-tokens'}"
        )
    kept = cut(text, max(1, min(room, len(text) - drop)), truncate)
    read = len(first) + len(kept)
    return Prompt([*first, *kept, *last], form is not None, stops, read, dropped=len(text) - len(kept))


def _surroundings(text: str, ask: str | None, tokenizer: Tokenizer) -> tuple[str, str, QuestionForm | None]:
    """The texts before and after a text about which a question is asked, and the form of the question."""
    if ask is None:
        return "", "", None
    frame = Frame(chat=tokenizer.render is not None)
    form = QuestionForm.of(tokenizer, Context([], frame, line_ends_behind(text), ""))
    return *form.split_around_text([], ask), form


def cut(tokens: list[int], room: int, part: str) -> list[int]:
    """`tokens` without their `head`, `tail` or `middle`, so that `room` of them (1 or more) are left."""
    if len(tokens) <= room:
        return tokens
    if part == "head":
        return tokens[-room:]
    if part == "tail":
        return tokens[:room]
    end = room // 2
    return tokens[: room - end] + tokens[len(tokens) - end :]


@dataclass(frozen=True)
class LongPrompt:
    """Tokens from which contexts of several lengths are taken."""

    token_ids: list[int]
    name: str
    """A description of their origin."""
    text_tokens: int
    """The number of tokens of the text. If there are more tokens, the text is repeated."""


def long_prompt(source: Source, tokenizer: Tokenizer, config: ModelConfig, tokens: int) -> LongPrompt:
    """The first `tokens` tokens of a text, which is repeated if it is too short. A built-in text is used completely.

    Raises:
        UsageError: the text has no token.
        ContextError: see `saved_text`.
    """
    if source.context is not None:
        token_ids = again = saved_text(source.context, config)[0].tolist()
    else:
        content = tokenizer.as_content(source.text)
        token_ids, again = tokenizer.encode(content, True), tokenizer.encode(content, False)
    if not again:
        raise UsageError("the prompt has no tokens; give a longer text")
    found = len(token_ids)
    times = max(0, -(-(tokens - found) // len(again)))
    return LongPrompt((token_ids + again * times)[:tokens], source.name or "--prompt", found)
