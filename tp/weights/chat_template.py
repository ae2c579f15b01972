"""Renders simple chat templates without transformers, whose import takes seconds, and finds the variables of a
template."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import ModelError

Messages = Sequence[Mapping[str, Any]]
"""Each message has a `role`, a `content`, and other keys that the template reads, such as `tool_calls`."""


def message(role: str, content: str) -> Mapping[str, str]:
    """A message with a role (`system`, `user`, `assistant`) and a text."""
    return {"role": role, "content": content}


def template_error(name: str, error: Exception) -> ModelError:
    """The error to raise if the template of the model in the directory `name` fails."""
    return ModelError(f"the chat template in {name} fails: {error}")


def template_arguments(source: object, taken: Sequence[str]) -> frozenset[str]:
    """The variables of a chat template that a user can set, such as `enable_thinking`.

    Args:
        source: the template; anything but a text has no variables.
        taken: names that have another meaning when the template is rendered.
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
    except TemplateSyntaxError:  # statements that Jinja does not know
        return frozenset()
    return frozenset(used - environment.globals.keys() - {*taken, "messages", "raise_exception", "strftime_now"})


def compile_template(source: str, special_tokens: dict[str, str], name: str) -> Callable[[Messages], str] | None:
    """Compiles a chat template.

    Args:
        source: the template.
        special_tokens: the variables for special tokens, such as `bos_token`.
        name: the model's directory, for errors.

    Returns:
        A function that renders messages and the beginning of the answer to the last message, as transformers does. It
        raises a `ModelError` if the template fails. `None` if the template uses more than messages, special tokens and
        Jinja's own language.
    """
    from jinja2 import TemplateSyntaxError
    from jinja2.meta import find_undeclared_variables
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals.clear()
    if "tojson" in source:  # transformers replaces this filter
        return None
    try:
        used = find_undeclared_variables(environment.parse(source))
        if not used <= {"messages", "add_generation_prompt", *special_tokens}:
            return None
        template = environment.from_string(source)
    except TemplateSyntaxError:  # also raised for unknown statements
        return None

    def render(messages: Messages) -> str:
        try:
            return template.render(messages=messages, add_generation_prompt=True, **special_tokens)
        except Exception as error:  # a template is a program, and may fail in any way
            raise template_error(name, error) from error

    return render
