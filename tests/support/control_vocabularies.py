"""Tokenizers with control tokens, trained here with the pre-tokenizers of model families, and chat templates of their
forms. What a prompt's ids are to be is found by `tokenizers` alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "It was the best of times, it was the worst of times; the harbour's log, 1234 ships [x]. Obey!",
    "system user assistant header",
    "eot_id start_header_id end_header_id begin_of_text im_start im_end INST <think> Be brief | <s> </s> Why?\n\nSo.",
] * 20

# The regex of github.com/meta-llama/llama3, llama/tokenizer.py (Tokenizer.pat_str).
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# That of github.com/huggingface/transformers, models/qwen2/tokenization_qwen2.py: digits stand alone.
_QWEN_2 = _LLAMA_3.replace("{1,3}", "")

# The form of github.com/vllm-project/vllm, examples/tool_chat_template_llama3.1_json.jinja, without tools.
LLAMA_3 = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim }}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
# That of examples/template_chatml.jinja there, which Qwen 2.5 and Qwen 3 share.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# That of examples/tool_chat_template_mistral.jinja there, without tools.
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] + ' ' + eos_token }}{% else %}{{ '[INST]' + message['content'] + '[/INST]' }}"
    "{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Vocabulary:
    """How a family's tokenizer is made."""

    template: str
    control: tuple[str, ...]
    """BOS and EOS first."""
    begin: Callable[[], Tokenizer]
    """Without a vocabulary."""
    trainer: Callable[..., Any] = trainers.BpeTrainer
    is_trained: bool = False
    """Whether the control tokens are in the model's vocabulary too."""
    normalized: bool = False
    """Whether they are found in normalized text."""
    stretches: Callable[[Tokenizer], None] = lambda tokenizer: None
    """Makes a tokenizer one that encodes what stands behind a control token."""

    def train(self) -> Tokenizer:
        tokenizer = self.begin()
        fixed: dict[str, Any] = {"vocab_size": 600, "show_progress": False}
        if isinstance(tokenizer.model, models.Unigram):
            fixed["unk_token"] = "<unk>"
        else:
            fixed["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
        tokens = [AddedToken(text, special=True, normalized=self.normalized) for text in self.control]
        unknown = ["<unk>"] if isinstance(tokenizer.model, models.Unigram) else []
        special = [*unknown, *(tokens if self.is_trained else [])]
        tokenizer.train_from_iterator(CORPUS, self.trainer(special_tokens=special, **fixed))
        tokenizer.add_special_tokens(tokens)  # type: ignore[arg-type]
        tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
        return tokenizer

    def save(self, directory: Path) -> Path:
        """Writes its files; a template is in the configuration."""
        directory.mkdir(parents=True, exist_ok=True)
        self.train().save(str(directory / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.control[0],
            "eos_token": self.control[1],
            "chat_template": self.template,
        }
        (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        return directory


def _byte_level(regex: str, normalizer: Any = None, **of_the_model: Any) -> Callable[[], Tokenizer]:
    def begin() -> Tokenizer:
        tokenizer = Tokenizer(models.BPE(**of_the_model))
        if normalizer is not None:
            tokenizer.normalizer = normalizer
        split = pre_tokenizers.Split(Regex(regex), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    return begin


def _metaspace(model: Callable[[], Any], scheme: str) -> Callable[[], Tokenizer]:
    def begin() -> Tokenizer:
        tokenizer = Tokenizer(model())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
        return tokenizer

    return begin


def _prepended() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizer


def _without_prefix(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)


_LLAMA_TOKENS = ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
_MISTRAL_TOKENS = ("<s>", "</s>", "[INST]", "[/INST]")

VOCABULARIES = {
    "llama3": Vocabulary(LLAMA_3, _LLAMA_TOKENS, _byte_level(_LLAMA_3, ignore_merges=True)),
    "llama3-in-model": Vocabulary(LLAMA_3, _LLAMA_TOKENS, _byte_level(_LLAMA_3), is_trained=True),
    "qwen": Vocabulary(
        CHATML, ("<|endoftext|>", "<|im_end|>", "<|im_start|>"), _byte_level(_QWEN_2, normalizers.NFC())
    ),
    "first": Vocabulary(
        MISTRAL, _MISTRAL_TOKENS, _metaspace(models.BPE, "first"), is_trained=True, stretches=_without_prefix
    ),
    "always": Vocabulary(MISTRAL, _MISTRAL_TOKENS, _metaspace(models.BPE, "always"), is_trained=True),
    "unigram": Vocabulary(MISTRAL, _MISTRAL_TOKENS, _metaspace(models.Unigram, "always"), trainers.UnigramTrainer),
    "prepend": Vocabulary(MISTRAL, _MISTRAL_TOKENS, _prepended, is_trained=True),
}
"""Without `is_trained`, ids of control tokens lie behind the model's, as with Llama 3 and Qwen."""


@cache
def _encoders(vocabulary: Vocabulary, saved: Path) -> tuple[Tokenizer, Tokenizer]:
    """Tokenizers to which control tokens are plain text: for what begins a prompt, and for what stands behind a control
    token."""
    begin, behind = (Tokenizer.from_file(str(saved / "tokenizer.json")) for _ in range(2))
    begin.encode_special_tokens = behind.encode_special_tokens = True
    vocabulary.stretches(behind)
    return begin, behind


@cache
def _compiled(template: str) -> jinja2.Template:
    return jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(template)


def expected_ids(vocabulary: Vocabulary, saved: Path, messages: Sequence[tuple[str, str]]) -> list[int]:
    """The ids of messages: the template's own control tokens, and plain text between them. The files in `saved` are
    read once."""
    words = {f"zq{number}qz": content for number, (_, content) in enumerate(messages)}
    given = [{"role": role, "content": word} for (role, _), word in zip(messages, words, strict=True)]
    named = {"bos_token": vocabulary.control[0], "eos_token": vocabulary.control[1]}
    rendered = _compiled(vocabulary.template).render(messages=given, add_generation_prompt=True, **named)
    pieces = re.split(f"({'|'.join(map(re.escape, vocabulary.control))})", rendered)
    contents = {w: text.strip() if "trim" in vocabulary.template else text for w, text in words.items()}
    encoders = _encoders(vocabulary, saved)
    return [token for piece in _texts(pieces, contents, vocabulary) for token in _ids(*piece, *encoders)]


def _texts(pieces: list[str], contents: dict[str, str], vocabulary: Vocabulary) -> list[tuple[str, bool, bool]]:
    """Each with whether it is one of the template's control tokens, and whether it begins the prompt."""
    found = []
    for piece in pieces:
        is_control = piece in vocabulary.control
        for word, content in contents.items():
            piece = piece.replace(word, content)
        if piece:
            found.append((piece, is_control, not found))
    return found


def _ids(text: str, is_control: bool, begins: bool, begin: Tokenizer, behind: Tokenizer) -> list[int]:
    if is_control:
        token = begin.token_to_id(text)
        assert token is not None
        return [token]
    return (begin if begins else behind).encode(text, add_special_tokens=False).ids
