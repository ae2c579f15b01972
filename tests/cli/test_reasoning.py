"""Where the form of an answer begins, if a chat template knows reasoning before it."""

import pytest
from command import VOCABULARY, save_tokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from triforce.cli.session.form import reasoning_of
from triforce.offload.speculation.grammar import Reasoning
from triforce.tp import Tokenizer

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def tokenizer_with(directory, template, *added):
    save_tokenizer(directory)
    backend = Backend.from_file(str(directory / "tokenizer.json"))
    backend.add_tokens([AddedToken(one, special=False) for one in added])
    backend.save(str(directory / "tokenizer.json"))
    if template:
        (directory / "chat_template.jinja").write_text(template)
    return Tokenizer.load(directory)


@pytest.mark.parametrize(
    ("end", "wanted"),
    [
        ("", Reasoning(VOCABULARY, VOCABULARY + 1, is_open=False)),
        (" <think>\n", Reasoning(VOCABULARY, VOCABULARY + 1, is_open=True)),
        (" <think>\n\n</think>\n\n", None),
    ],
    ids=["may come", "opened", "closed"],
)
def test_a_form_begins_behind_reasoning_that_the_prompt_leaves_to_come(tmp_path, end, wanted):
    tokenizer = tokenizer_with(tmp_path, TEMPLATE + end, "<think>", "</think>")
    assert tokenizer.render
    prompt = tokenizer.encode(tokenizer.render([{"role": "user", "content": "Why? " * 20}]), False)
    assert reasoning_of(prompt, tokenizer) == wanted


@pytest.mark.parametrize(("template", "added"), [(TEMPLATE, ()), (None, ("<think>", "</think>"))])
def test_without_such_tokens_or_a_template_it_begins_at_once(tmp_path, template, added):
    tokenizer = tokenizer_with(tmp_path, template, *added)
    assert reasoning_of([5, 6], tokenizer) is None
