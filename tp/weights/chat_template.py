"""Simple chat templates without transformers, whose import takes seconds; and what a template can be told."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import ModelError

Messages = Sequence[Mapping[str, Any]]
"""Each with its `role` and `content`, and with what else a template reads, such as `tool_calls`."""


def message(role: str, content: str) -> Mapping[str, str]:
    """One of a role (`system`, `user`, `assistant`) with a text."""
    return {"role": role, "content": content}


def template_error(name: str, error: Exception) -> ModelError:
    """What to raise where the template of the model in `name` fails."""
    return ModelError(f"the chat template in {name} fails: {error}")


def template_arguments(source: object, taken: Sequence[str]) -> frozenset[str]:
    """The variables of a chat template that can be given, such as `enable_thinking`.

    Args: `taken` are names that mean something else to what renders it.
    """
    if not isinstance(source, str):
        return frozenset()
    from jinja2 import TemplateSyntaxError
    from jinja2.meta import find_undeclared_variables
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    plain = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", source)  # a statement that transformers adds
    try:
        used = find_undeclared_variables(environment.parse(plain))
    except TemplateSyntaxError:  # other statements
        return frozenset()
    return frozenset(used - environment.globals.keys() - {*taken, "messages", "raise_exception", "strftime_now"})


def compile_template(source: str, special_tokens: dict[str, str], name: str) -> Callable[[Messages], str] | None:
    """What renders messages and the beginning of the answer to the last one, as transformers does; `None` where the
    template uses more than messages, special tokens and Jinja's own language.

    Args: `special_tokens` are the variables `bos_token` and its like; `name` is the model's directory, for errors.

    Raises (what is returned):
        ModelError: the template fails.
    """
    from jinja2 import TemplateSyntaxError
    from jinja2.meta import find_undeclared_variables
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals.clear()
    if "tojson" in source:  # transformers has another one
        return None
    try:
        used = find_undeclared_variables(environment.parse(source))
        if not used <= {"messages", "add_generation_prompt", *special_tokens}:
            return None
        template = environment.from_string(source)
    except TemplateSyntaxError:  # also for unknown statements
        return None

    def render(messages: Messages) -> str:
        try:
            return template.render(messages=messages, add_generation_prompt=True, **special_tokens)
        except Exception as error:  # a template is a program, and may fail in any way
            raise template_error(name, error) from error

    return render
