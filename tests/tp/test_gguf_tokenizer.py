"""Tokenizers of GGUF files: the same ids and texts as the tokenizer that was written there, put together by hand as
transformers' converters do it; what cannot be a tokenizer is refused."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from profiles import share
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import GemmaTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter, generate_merges
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX as QWEN_35
from triforce.tp import ModelError, Tokenizer
from triforce.tp.weights.gguf_tokenizer import tokenizer_files

PATH = Path("model.gguf")
CORPUS = [
    "It was the best of times, it WAS the worst of times; the harbour's log, we've 1234 ships. I'LL obey!",
    "Die Straße über den Fluß, où les élèves s'étonnent; señor, ¿qué?  Ещё одна строка на русском языке.",
    "北京的天气很好。 日本語の文章です。 한국어 문장입니다. नमस्ते दुनिया שלום עולם مرحبا بالعالم ไทย",
    "def run(x):\n    return x[0] + 42  # 3.14159\n\n\tif x == '':\r\n        pass  aaaa aaaaaa aaaaaaaa",
] * 10
PIECES = [
    *(word for text in CORPUS[:4] for word in text.split(" ")),
    *(
        " ",
        "  ",
        "   ",
        "       ",
        "\n",
        "\n\n",
        "\r\n",
        "\t",
        " \n ",
        "1",
        "23",
        "4567",
        "'s",
        "'LL",
        "'ve",
        "/",
        "//",
    ),
    *("e\u0301", "é", "ﬁ", "Å", "🙂", "👩‍👩‍👧", "𝔘", "\u200b", "\ufeff", "�", "\x00", "▁", "▁▁", "▁a", "<0x0A>"),
    *("<eos>", "<start_of_turn>", "<end_of_turn>", "<table>", "<tab", " " * 40),
    *("<s>", "</s>", "<unk>", "<|begin|>", "<|end|>", "<|be", "<think>", "<tool call>", "[PAD2]", "aaa", "aaaaa"),
]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True)
class Twin:
    """A tokenizer as `tokenizers` makes it, and what a GGUF file says of it."""

    backend: Backend
    metadata: dict[str, Any]


def added(*texts: str, special: bool = True) -> list[AddedToken]:
    return [AddedToken(text, special=special, normalized=False) for text in texts]


def byte_level(pre: str, regex: str, *, bos: bool, ignore_merges: bool, normalizer: Any = None, first: bool) -> Twin:
    """Args: `first` says whether control tokens have the first ids, as with Mistral, or the last, as with Llama 3."""
    control = ("<|begin|>", "<|end|>", "<s>")
    trained = Backend(models.BPE())
    cut = pre_tokenizers.Split(Regex(regex), "isolated")
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer: Any = trainers.BpeTrainer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        CORPUS,
        trainer(
            vocab_size=700,
            show_progress=False,
            initial_alphabet=alphabet,
            special_tokens=list(control) if first else [],
        ),
    )
    model = json.loads(trained.to_str())["model"]
    # Without some of the merges it matters whether words are looked up before they are merged.
    merges = [pair for number, pair in enumerate(model["merges"]) if number % 5 != 4]
    twin = Backend(models.BPE(model["vocab"], [tuple(pair) for pair in merges], ignore_merges=ignore_merges))
    twin.pre_tokenizer = trained.pre_tokenizer
    if normalizer is not None:
        twin.normalizer = normalizer
    twin.decoder = decoders.ByteLevel()
    twin.add_special_tokens(added(*control))  # type: ignore[arg-type]
    twin.add_tokens(added("<think>", "<tool call>", special=False))
    offsets = processors.ByteLevel(trim_offsets=False)
    twin.post_processor = processors.Sequence([offsets, begun("<|begin|>", twin)]) if bos else offsets  # type: ignore
    types = dict.fromkeys(control, 3) | {"<think>": 4, "<tool call>": 4}
    metadata = described(twin, "gpt2", types, ("<|begin|>", "<|end|>"))
    metadata |= {"tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges]}
    return Twin(twin, metadata)


def learned_pieces() -> tuple[list[str], list[str]]:
    """Words as SentencePiece's BPE learns them, in their order, and characters."""
    trained = Backend(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("▁*[^▁]*"), "isolated")
    trainer: Any = trainers.BpeTrainer(vocab_size=900, show_progress=False)  # type: ignore[call-arg]
    trained.train_from_iterator(CORPUS, trainer)
    learned = trained.get_vocab()
    characters = sorted({*(token for token in learned if len(token) == 1), "▁"})
    return sorted((token for token in learned if len(token) > 1), key=learned.__getitem__), characters


def sentencepiece(prefix: bool) -> Twin:
    words, characters = learned_pieces()
    fixed = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens = [*fixed, *words, *characters]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    scores = {token: 0.0 if token in fixed else float(len(fixed) - number) for token, number in vocabulary.items()}
    model = models.BPE(
        vocabulary, generate_merges(vocabulary, scores), unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    twin = Backend(model)
    before: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    twin.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    after: list[Any] = [decoders.Strip(" ", 1, 0)] if prefix else []
    spaces: Any = decoders.Replace("▁", " ")
    twin.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), *after])
    twin.add_special_tokens(added("<unk>", "<s>", "</s>"))  # type: ignore[arg-type]
    twin.add_tokens(added("<think>", "<tool call>", special=False))
    twin.post_processor = begun("<s>", twin)
    types = {"<unk>": 2, "<s>": 3, "</s>": 3, "<think>": 4, "<tool call>": 4}
    metadata = described(twin, "llama", types | dict.fromkeys(fixed[3:], 6), ("<s>", "</s>"))
    given = [scores.get(token, -1000.0) for token in metadata["tokenizer.ggml.tokens"]]
    metadata |= {"tokenizer.ggml.scores": np.array(given, np.float32), "tokenizer.ggml.unknown_token_id": 0}
    return Twin(twin, metadata | ({} if prefix else {"tokenizer.ggml.add_space_prefix": False}))


def gemma() -> Twin:
    """Gemma 3's, as transformers has it, with the order of merges of its `tokenizer.json`: runs of spaces first."""
    words, characters = learned_pieces()
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
    defined = ["\n", "\n\n", "\n\n\n", *("▁" * size for size in range(2, 32)), "<table>", "\t", "\t\t"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    learned = [piece for piece in (*words, *characters) if piece not in defined and "▁▁" not in piece]
    ids = {token: number for number, token in enumerate((*control, *defined, *bytes_, *learned))}
    first = ids[learned[0]]
    scores = {token: float(min(first - number, 0)) for token, number in ids.items()}
    merges: Any = generate_merges(ids, scores)
    backend = GemmaTokenizer(vocab=ids, merges=merges).backend_tokenizer
    backend.add_special_tokens(added(*control))  # type: ignore[arg-type]
    backend.add_tokens(added(*defined, special=False))
    backend.post_processor = begun("<bos>", backend)
    types = dict.fromkeys(control, 3) | dict.fromkeys(defined, 4) | dict.fromkeys(bytes_, 6)
    metadata = described(backend, "llama", types, ("<bos>", "<eos>"))
    names = metadata["tokenizer.ggml.tokens"]
    del metadata["llama.context_length"]
    metadata |= {
        "general.architecture": "gemma3",
        "gemma3.context_length": 4096,
        "tokenizer.ggml.tokens": [name.replace("▁", " ") if types.get(name) == 4 else name for name in names],
        "tokenizer.ggml.scores": np.array(
            [-1000.0 if types.get(name, 1) in (3, 4) else scores.get(name, -10000.0) for name in names], np.float32
        ),
        "tokenizer.ggml.unknown_token_id": ids["<unk>"],
        "tokenizer.ggml.padding_token_id": ids["<pad>"],
        "tokenizer.ggml.add_space_prefix": False,
    }
    return Twin(backend, metadata)


def begun(token: str, twin: Backend) -> Any:
    special = [(token, twin.token_to_id(token))]
    return processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token}:1 $B:1", special_tokens=special
    )  # type: ignore


def described(twin: Backend, kind: str, types: dict[str, int], ends: tuple[str, str]) -> dict[str, Any]:
    """Keys that all kinds have. Two unused tokens fill the matrix."""
    vocabulary = twin.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    assert [vocabulary[token] for token in tokens] == list(range(len(tokens)))
    marks = [types.get(token, 1) for token in tokens] + [5, 5]
    return {
        "general.architecture": "llama",
        "llama.context_length": 4096,
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.tokens": [*tokens, *(f"[PAD{len(tokens) + number}]" for number in range(2))],
        "tokenizer.ggml.token_type": np.array(marks, np.int32),
        "tokenizer.ggml.bos_token_id": vocabulary[ends[0]],
        "tokenizer.ggml.eos_token_id": np.uint32(vocabulary[ends[1]]),
        "tokenizer.chat_template": TEMPLATE,
    }


LLAMA_3 = TikTokenConverter().pattern
TEKKEN = GGUF_PRE_TOKENIZER_SPLITS["tekken"]
TWINS: dict[str, Callable[[], Twin]] = {
    "llama-bpe": lambda: byte_level("llama-bpe", LLAMA_3, bos=True, ignore_merges=True, first=False),
    "llama-v3": lambda: byte_level("llama-v3", LLAMA_3, bos=True, ignore_merges=True, first=False),
    "qwen2": lambda: byte_level(
        "qwen2", PRETOKENIZE_REGEX, bos=False, ignore_merges=False, normalizer=normalizers.NFC(), first=False
    ),
    "qwen35": lambda: byte_level(
        "qwen35", QWEN_35, bos=False, ignore_merges=False, normalizer=normalizers.NFC(), first=False
    ),
    "tekken": lambda: byte_level("tekken", TEKKEN, bos=True, ignore_merges=True, first=True),
    "sentencepiece": lambda: sentencepiece(True),
    "sentencepiece-without-prefix": lambda: sentencepiece(False),
    "gemma": gemma,
}


@cache
def twin_of(name: str) -> Twin:
    return TWINS[name]()


def backend_of(metadata: dict[str, Any]) -> Backend:
    return Backend.from_str(json.dumps(tokenizer_files(metadata, PATH)["tokenizer.json"]))


def texts(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    letters = [chr(draw.choice((draw.randrange(32, 0x250), draw.randrange(0x370, 0xD800)))) for _ in range(500)]
    pieces = PIECES + letters
    return ["".join(draw.choices(pieces, k=draw.randrange(14))) for _ in range(count)]


@pytest.fixture(params=TWINS)
def twin(request: pytest.FixtureRequest) -> Twin:
    return twin_of(request.param)


def test_ids_and_texts_are_those_of_the_tokenizer_that_was_written(twin: Twin) -> None:
    ours, given = backend_of(twin.metadata), texts(share(10_000), 0)
    assert ours.get_vocab() == twin.backend.get_vocab()
    for special in (False, True):
        want = [found.ids for found in twin.backend.encode_batch_fast(given, add_special_tokens=special)]
        have = [found.ids for found in ours.encode_batch_fast(given, add_special_tokens=special)]
        wrong = [text for text, one, other in zip(given, have, want, strict=True) if one != other]
        assert not wrong, f"{len(wrong)} of {len(given)} texts have other ids, such as {wrong[0]!r}"
        for skipped in (False, True):
            assert ours.decode_batch(want, skipped) == twin.backend.decode_batch(want, skipped)
    pair = ours.encode(given[1], given[2])
    assert (pair.ids, pair.type_ids) == ((other := twin.backend.encode(given[1], given[2])).ids, other.type_ids)


def saved(metadata: dict[str, Any], directory: Path) -> Tokenizer:
    for name, content in tokenizer_files(metadata, PATH).items():
        (directory / name).write_text(json.dumps(content), encoding="utf-8")
    return Tokenizer.load(directory)


def test_the_files_are_a_tokenizer_with_its_chat_template(twin: Twin, tmp_path: Path) -> None:
    tokenizer = saved(twin.metadata, tmp_path)
    tokens = twin.metadata["tokenizer.ggml.tokens"]
    ends = {name: tokens[twin.metadata[f"tokenizer.ggml.{name[:3]}_token_id"]] for name in ("bos_token", "eos_token")}
    oracle: Any = PreTrainedTokenizerFast(tokenizer_object=twin.backend, chat_template=TEMPLATE, **ends)
    said = [("system", "Be brief."), ("user", " Why 12?\n"), ("assistant", "Ещё"), ("user", "é")]
    messages = [{"role": role, "content": content} for role, content in said]
    assert tokenizer.render is not None
    rendered = tokenizer.render(messages)
    assert rendered == oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    for text in [rendered, *texts(200, 1)]:
        for special in (False, True):
            ids = tokenizer.encode(text, special)
            assert ids == oracle.encode(text, add_special_tokens=special)
            assert tokenizer.decode(ids) == oracle.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
    content = tokenizer.as_content(ends["eos_token"])
    assert oracle.eos_token_id not in tokenizer.encode(content, False)


def test_the_configuration_names_what_the_file_does(tmp_path: Path) -> None:
    metadata = twin_of("llama-bpe").metadata
    padding = metadata["tokenizer.ggml.tokens"].index("<s>")
    want = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    assert tokenizer_files(metadata, PATH)["tokenizer_config.json"] == want
    padded = metadata | {"tokenizer.ggml.padding_token_id": padding}
    assert tokenizer_files(padded, PATH)["tokenizer_config.json"] == want | {"pad_token": "<s>"}
    letter = metadata["tokenizer.ggml.tokens"].index("a")
    ordinary = metadata | {"tokenizer.ggml.padding_token_id": letter, "tokenizer.ggml.unknown_token_id": letter}
    files = tokenizer_files(ordinary, PATH)
    assert files["tokenizer_config.json"] == want, "a letter that is named as padding stays a letter"
    assert files["tokenizer.json"] == tokenizer_files(metadata, PATH)["tokenizer.json"]
    plain = saved(metadata, tmp_path)
    with_transformers = saved(padded, tmp_path)
    for text in texts(100, 2):
        assert with_transformers.encode(text, True) == plain.encode(text, True)


@pytest.mark.parametrize("name", ["tekken", "qwen2", "sentencepiece"])
def test_the_file_says_which_ends_are_added(name: str) -> None:
    metadata = twin_of(name).metadata
    bos, eos = (int(metadata[f"tokenizer.ggml.{end}_token_id"]) for end in ("bos", "eos"))
    plain = backend_of(metadata).encode("Why?", add_special_tokens=False).ids
    for begins in (False, True):
        for ends in (False, True):
            said = {"tokenizer.ggml.add_bos_token": begins, "tokenizer.ggml.add_eos_token": np.bool_(ends)}
            want = [*[bos] * begins, *plain, *[eos] * ends]
            assert backend_of(metadata | said).encode("Why?").ids == want


@pytest.mark.parametrize("name", ["tekken", "sentencepiece", "gemma"])
def test_merges_are_those_of_transformers_in_their_order(name: str) -> None:
    twin = twin_of(name)
    model = tokenizer_files(twin.metadata, PATH)["tokenizer.json"]["model"]
    assert model["merges"] == json.loads(twin.backend.to_str())["model"]["merges"]


def test_turns_of_gemma_are_control_tokens_whatever_they_are_marked_as() -> None:
    metadata = twin_of("gemma").metadata
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"].copy()
    types[[tokens.index("<start_of_turn>"), tokens.index("<end_of_turn>")]] = 1, 4
    assert tokenizer_files(metadata | {"tokenizer.ggml.token_type": types}, PATH) == tokenizer_files(metadata, PATH)


def test_roles_of_sentencepiece_are_known_without_keys() -> None:
    metadata = dict(twin_of("sentencepiece").metadata)
    for name in ("bos", "eos", "unknown"):
        del metadata[f"tokenizer.ggml.{name}_token_id"]
    files, given = tokenizer_files(metadata, PATH), tokenizer_files(twin_of("sentencepiece").metadata, PATH)
    assert files["tokenizer.json"] == given["tokenizer.json"]
    unknown = {"unk_token": "<unk>"}
    assert files["tokenizer_config.json"] | unknown == given["tokenizer_config.json"]


REFUSED = [
    ("qwen2", {"tokenizer.ggml.model": None}, "has no tokenizer"),
    ("qwen2", {"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model is 't5'; supported: 'gpt2' and 'llama'"),
    ("qwen2", {"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre is missing; supported: 'llama-bpe'"),
    ("qwen2", {"tokenizer.ggml.pre": "default"}, "tokenizer.ggml.pre is 'default'; supported: "),
    ("qwen2", {"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing"),
    ("qwen2", {"tokenizer.ggml.merges": ["a zzz"]}, "has 'a zzz', which does not join two tokens into a token"),
    ("qwen2", {"tokenizer.ggml.tokens": ["a", "b", "a"]}, "tokenizer.ggml.tokens has 'a' twice"),
    ("qwen2", {"tokenizer.ggml.tokens": ["\ud800"]}, "has a text that is not Unicode"),
    ("qwen2", {"tokenizer.ggml.eos_token_id": 10**9}, "tokenizer.ggml.eos_token_id is 1000000000, but there are"),
    ("qwen2", {"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True}, "is true, but"),
    ("qwen2", {"tokenizer.ggml.add_bos_token": 1}, "is 1, not true or false"),
    ("qwen2", {"tokenizer.ggml.token_type": np.ones(5, np.int32)}, "has 5 values for"),
    ("qwen2", {"llama.context_length": 0}, "llama.context_length is 0; at least one token must fit"),
    ("qwen2", {"llama.context_length": "long"}, "llama.context_length is 'long', not a whole number"),
    ("sentencepiece", {"tokenizer.ggml.scores": None}, "tokenizer.ggml.scores is missing"),
    ("sentencepiece", {"tokenizer.ggml.scores": np.ones(5, np.float32)}, "tokenizer.ggml.scores has 5 values for"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_what_is_no_tokenizer_is_refused(name: str, change: dict[str, Any], message: str) -> None:
    metadata = {key: value for key, value in (twin_of(name).metadata | change).items() if value is not None}
    with pytest.raises(ModelError) as refused:
        tokenizer_files(metadata, PATH)
    assert message in str(refused.value)


@pytest.mark.parametrize("value", [-1000.0, float("nan")])
def test_scores_that_give_no_order_are_refused(value: float) -> None:
    metadata = twin_of("sentencepiece").metadata
    scores = np.full(len(metadata["tokenizer.ggml.tokens"]), value, np.float32)
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.scores has"):
        tokenizer_files(metadata | {"tokenizer.ggml.scores": scores}, PATH)


def test_a_vocabulary_that_would_take_long_is_refused_at_once() -> None:
    def seconds(tokens: list[str]) -> float:
        begun_at = time.monotonic()
        metadata = {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": np.arange(len(tokens), dtype=np.float32),
        }
        with pytest.raises(ModelError, match=r"tokenizer\.ggml\.tokens has (a token of|more than)"):
            tokenizer_files(metadata, PATH)
        return time.monotonic() - begun_at

    longest = max(seconds(["a" * 2_000_000, "b"]), seconds(["a" * size for size in range(1, 257)]))
    assert longest < 5, f"refused after {longest:.1f} s"


def damaged(metadata: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """With one key that is missing, of another type, or has another value somewhere."""
    key = draw.choice(sorted(metadata))
    value = metadata[key]
    strange = [None, True, -1, 3, 2**70, 0.5, "", "a b", "\ud800", b"a", [], [1], {}, np.zeros((2, 2)), np.array(["a"])]
    if draw.random() < 0.3 or not isinstance(value, list | np.ndarray) or not len(value):
        near = [value + "x"] if isinstance(value, str) else [value + 1] if isinstance(value, int) else []
        changed = draw.choice(strange + near)
    else:
        numbers: Any = value
        changed: Any = value.copy()
        at, other, how = draw.randrange(len(value)), draw.randrange(len(value)), draw.randrange(4)
        if how == 0:
            changed = changed[:at]
        elif how == 1:
            changed[at] = value[other]
        elif how == 2:
            changed[at], changed[other] = value[other], value[at]
        elif isinstance(changed, list):
            changed[at] = draw.choice(["", " ", "a", "a b", "\ud800", "x" * 5000, " a", "Ġ", 3, None])
        elif numbers.dtype.kind in "if":
            changed = draw.choice([numbers * np.nan, numbers - 1, numbers.astype("U"), numbers[::-1], numbers[None]])
    return metadata | {key: changed}


def test_damage_ends_in_one_line_or_a_tokenizer() -> None:
    draw, refused = random.Random(0), 0
    for number in range(300):
        metadata = damaged(twin_of(draw.choice(list(TWINS))).metadata, draw)
        if draw.random() < 0.3:
            metadata = damaged(metadata, draw)
        try:
            files = tokenizer_files(metadata, PATH)
        except ModelError as error:
            refused += 1
            assert str(PATH) in str(error) and "\n" not in str(error) and len(str(error)) < 300, f"damage {number}"
        else:
            backend = Backend.from_str(json.dumps(files["tokenizer.json"]))
            backend.decode(backend.encode("It was <s> 12 é\n").ids)
            json.dumps(files["tokenizer_config.json"])
    assert 100 < refused < 290, f"{refused} of 300 were refused"
