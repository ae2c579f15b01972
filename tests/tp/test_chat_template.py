"""Chat templates in `tokenizer_config.json`: rendered as transformers does, and without it where they are simple."""

import json
from pathlib import Path

import pytest
from command import save_tokenizer
from transformers import AutoTokenizer
from triforce.tp import ModelError, Tokenizer

OF_THE_PAIR = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ 'Answer: ' + message['content'] | trim + eos_token + '\\n\\n' }}"
    "{% else %}{{ message['content'] + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Answer:' }}{% endif %}"
)
IN_LINES = """{%- for m in messages %}
  {% if loop.first %}<s>{% endif %}
[{{ m.role | upper }}] {{ m.content | trim }}
{% endfor %}
{% if add_generation_prompt %}>> {% endif %}"""
WITH_NAMESPACE = "{% set n = namespace(k=0) %}{% for m in messages %}{% set n.k = n.k + 1 %}{{ n.k }}{% endfor %}"
WITH_JSON = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
WITH_MORE = "{% if tools %}?{% endif %}{% for m in messages %}{{ m.content }}{% break %}{% endfor %}"
MESSAGES = [
    {"role": "system", "content": "Be <brief>."},
    {"role": "user", "content": " A text.\n\nWhy? "},
    {"role": "assistant", "content": "So."},
    {"role": "user", "content": "Ça va? 是"},
]


def saved(directory: Path, template: str) -> Path:
    save_tokenizer(directory)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return directory


@pytest.mark.parametrize(
    "template, simple",
    [(OF_THE_PAIR, True), (IN_LINES, True), (WITH_NAMESPACE, False), (WITH_JSON, False), (WITH_MORE, False)],
    ids=["pair", "lines", "namespace", "json", "more"],
)
def test_a_template_gives_what_transformers_gives(tmp_path, monkeypatch, template, simple):
    directory = saved(tmp_path / "model", template)
    oracle = AutoTokenizer.from_pretrained(directory)
    loaded: list[Path] = []
    slow = AutoTokenizer.from_pretrained
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda path, **how: loaded.append(path) or slow(path, **how))
    tokenizer = Tokenizer.load(directory)
    assert bool(loaded) is not simple, "transformers, whose import takes seconds, reads what nothing else does"
    assert tokenizer.render is not None and tokenizer.chat is not None
    expected = oracle.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert tokenizer.render(MESSAGES) == expected
    ids = oracle.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    assert tokenizer.encode(expected, False) == ids
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    expected = oracle.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert tokenizer.chat("Why?", "Be brief.") == expected


def test_a_template_that_fails_says_whose_it_is(tmp_path):
    tokenizer = Tokenizer.load(saved(tmp_path / "model", "{{ messages[0].content / 2 }}"))
    assert tokenizer.chat is not None
    with pytest.raises(ModelError, match=r"chat template in .*model.* fails"):
        tokenizer.chat("Why?", None)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content | tojson }}{% endif %}{% endfor %}",
        "{{ messages | map('tojson') | join }}",
    ],
)
def test_what_only_transformers_renders_is_left_to_it_even_where_it_is_reached_seldom(tmp_path, template):
    directory = saved(tmp_path / "model", template)
    render = Tokenizer.load(directory).render
    want = AutoTokenizer.from_pretrained(directory).apply_chat_template(MESSAGES, tokenize=False)
    assert render is not None and render(MESSAGES) == want
