"""Restored and kept in memory are one: what is answered after reopening a context is what is answered at once."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tiny import random_tokens, save_families, save_llama
from triforce.offload import ContextError, ContextRequest, ContextStore, Engine, Sampling

RECENT_ROWS = 8
"""Tokens of a prompt that are computed again where all of it was there."""

FAMILIES = ("llama", "mistral-window", "qwen2", "qwen3-bias", "qwen3-moe", "mixtral", "gemma3")
SEGMENT = 64
"""Tokens of a segment in these tests."""

TEXT = random_tokens(900, seed=5)
FIND = ContextRequest(find=True)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return save_families(tmp_path_factory.mktemp("families"), FAMILIES)


@pytest.fixture
def store(tmp_path):
    return ContextStore(tmp_path / "contexts", segment_tokens=SEGMENT)


@dataclass
class Case:
    """A text that is read, in one or two steps, a question after it, and settings of the run that answers."""

    family: str
    dtype: str
    text: list[int]
    read_first: int
    """Tokens of the text that an earlier process reads; 0 for none."""
    question: list[int]
    sampling: Sampling
    settings: dict[str, Any]

    @classmethod
    def random(cls, seed: int) -> "Case":
        rng = random.Random(seed)
        length = rng.choice([20, 64, 65, 200, 256, 390, 700])
        return cls(
            family=rng.choice(FAMILIES),
            dtype=rng.choice(["float32", "float32", "bfloat16"]),
            text=TEXT[:length],
            read_first=rng.choice([0, 0, length // 2, length - 3]),
            question=random_tokens(rng.choice([0, 1, 5, 9, 40, 130]), seed=seed),
            sampling=rng.choice([Sampling(0.0), Sampling(rng.choice([0.6, 1.2]), 0.95, 0, seed)]),
            settings={
                "tiers": rng.choice([1, 2, 3, 3]),
                "budget": rng.choice([16, 64]),
                "chunk_size": rng.choice([1, 8, 16]),
                "block_length": rng.choice([1, 6, 20]),
                "draft_length": rng.choice([1, 4]),
                "refresh": rng.choice(["round", 3, "never"]),
                "resident": rng.choice([None, None, 0.0, 2e-5]),
            },
        )

    def engine(self, checkpoints, store: ContextStore) -> Engine:
        pair = checkpoints / self.family, checkpoints / "draft"
        return Engine.load(*pair, device="cpu", dtype=self.dtype, store=store, **self.settings)

    def answer(self, engine: Engine, contexts: ContextRequest | None = None) -> dict[str, Any]:
        prompt = self.text + self.question
        return engine.generate(prompt, self.sampling, 20, ignore_eos=True, contexts=contexts).stats

    def check(self, checkpoints, store: ContextStore) -> None:
        """Reads, asks at once, asks a new engine that restores, and, where rounding allows, one that reads afresh."""
        if self.read_first:
            self.engine(checkpoints, store).read(self.text[: self.read_first], "book")
        engine = self.engine(checkpoints, store)
        saved = engine.read(self.text, "book")
        assert saved.complete and saved.saved == len(self.text)
        kept = self.answer(engine)
        reopened = self.engine(checkpoints, store)
        restored = self.answer(reopened, ContextRequest("book"))
        assert restored["token_ids"] == kept["token_ids"]
        expected = min(len(self.text), max(0, len(self.text + self.question) - RECENT_ROWS))
        assert restored["reused_tokens"] == kept["reused_tokens"] == expected
        assert restored["context"] == ("book" if expected else None) and not restored["warnings"]
        if self.settings["tiers"] > 1:
            assert restored["acceptance"] == kept["acceptance"], "the same chunks were chosen, the same tokens drafted"
        for layer in range(engine.target.config.num_layers):
            one, other = (keys_and_values(e, layer, expected) for e in (engine, reopened))
            assert torch.equal(one, other), f"layer {layer} is not bit for bit what was saved"
        if self.dtype == "float32":
            assert self.answer(self.engine(checkpoints, store))["token_ids"] == kept["token_ids"]


def keys_and_values(engine: Engine, layer: int, tokens: int) -> torch.Tensor:
    """Of the first tokens of the cache that the last run used, `[2, num_kv_heads, any, head_dim]`; of a layer that
    keeps the last ones only, of these."""
    cache = engine._kept.caches[-1]
    cache.blocks.drain()
    pieces = cache.export(layer, cache.first_restored(layer, tokens), tokens)()
    return torch.cat(pieces, dim=2).view(torch.uint8) if pieces else torch.empty(0)


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.slow(keep=2)
def test_a_restored_context_answers_as_the_process_that_read_it(checkpoints, store, seed):
    Case.random(seed).check(checkpoints, store)


def test_the_restored_part_of_a_text_is_found_by_its_tokens(checkpoints, store):
    case = Case("llama", "float32", TEXT[:500], 0, TEXT[500:560], Sampling(0.0), {"budget": 64})
    want = case.answer(case.engine(checkpoints, store))["token_ids"]
    engine = case.engine(checkpoints, store)
    engine.read(TEXT[:300], "half")
    engine.read([*TEXT[:400], 7, 7, 7], "most")
    for name in ("half", "most"):
        assert engine.contexts and engine.contexts.saved_tokens(name)
    found = case.answer(case.engine(checkpoints, store), FIND)
    assert (found["context"], found["reused_tokens"], found["token_ids"]) == ("most", 400, want)
    other = [*TEXT[1:300]]
    assert case.engine(checkpoints, store).generate(other, Sampling(0.0), 4, contexts=FIND).stats["context"] is None
    no_question = case.engine(checkpoints, store).generate(TEXT[:400], Sampling(0.0), 4, contexts=FIND)
    assert no_question.stats["reused_tokens"] == 400 - RECENT_ROWS


def test_a_context_that_is_removed_before_it_is_restored_is_said_to_be_and_its_text_is_read(checkpoints, store):
    case = Case("llama", "float32", TEXT[:300], 0, TEXT[300:340], Sampling(0.0), {"budget": 64})
    want = case.answer(case.engine(checkpoints, store))["token_ids"]
    case.engine(checkpoints, store).read(case.text, "book")
    run = case.engine(checkpoints, store).stream(
        case.text + case.question, case.sampling, 20, ignore_eos=True, contexts=FIND
    )
    store.remove("book")
    assert [token for event in run for token in event.tokens] == want
    assert run.sequence.warnings == [
        "the context 'book' was removed meanwhile; this run computes the text again from position 0 on"
    ]


def test_memory_comes_before_the_disk(checkpoints, store):
    case = Case("llama", "float32", TEXT[:400], 0, TEXT[400:440], Sampling(0.0), {"budget": 64})
    engine = case.engine(checkpoints, store)
    engine.read(case.text, "book")
    stats = case.answer(engine, FIND)
    assert stats["reused_tokens"] == 400 and stats["context"] is None


def test_saving_a_run_saves_its_prompt_for_the_next(checkpoints, store):
    case = Case("llama", "float32", TEXT[:300], 0, TEXT[300:340], Sampling(0.6, seed=2), {"budget": 64})
    saving = case.answer(case.engine(checkpoints, store), ContextRequest(save="book", save_tokens=300))
    assert not saving["warnings"]
    assert store.load("book").saved == 300 and store.token_ids("book") == TEXT[:300]
    again = case.answer(case.engine(checkpoints, store), ContextRequest("book"))
    assert again["token_ids"] == saving["token_ids"] and again["reused_tokens"] == 300


def test_a_context_that_grew_reads_only_what_is_new(checkpoints, store):
    case = Case("llama", "float32", TEXT[:300], 0, [], Sampling(0.0), {"budget": 64})
    case.engine(checkpoints, store).read(TEXT[:300], "book")
    shares: list[float] = []
    engine = case.engine(checkpoints, store)
    grown = engine.read(TEXT[:500], "book", on_prefill=shares.append)
    assert grown.saved == 500 and shares[-1] == 1.0 and sorted(shares) == shares
    assert engine._running and engine._running.live[0].statistics.reused_tokens == 300
    unchanged = case.engine(checkpoints, store)
    assert unchanged.read(TEXT[:500], "book") == grown and unchanged._running is None, "there was nothing to read"


def test_another_text_another_model_and_impossible_names_are_refused(checkpoints, store):
    case = Case("llama", "float32", TEXT[:200], 0, TEXT[:9], Sampling(0.0), {})
    case.engine(checkpoints, store).read(case.text, "book")
    with pytest.raises(ContextError, match="another text: it differs from this one at token 100"):
        case.engine(checkpoints, store).read([*TEXT[:100], *TEXT[:100]], "book")
    other = Case("qwen2", "float32", TEXT[:200], 0, [], Sampling(0.0), {})
    with pytest.raises(ContextError, match="a different model"):
        other.answer(other.engine(checkpoints, store), ContextRequest("book"))
    sixteen = Case("llama", "bfloat16", TEXT[:200], 0, [], Sampling(0.0), {})
    with pytest.raises(ContextError, match=r"llama in float32"):
        sixteen.answer(sixteen.engine(checkpoints, store), ContextRequest("book"))
    assert other.answer(other.engine(checkpoints, store), FIND)["context"] is None
    with pytest.raises(ContextError, match="no context 'bok'"):
        case.answer(case.engine(checkpoints, store), ContextRequest("bok"))


def test_keys_that_depend_on_the_prompts_length_are_neither_saved_nor_shared(tmp_path, store):
    scaling = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    save_llama(tmp_path / "dynamic", seed=1, rope_parameters=scaling, max_position_embeddings=256)
    case = Case(str(tmp_path / "dynamic"), "float32", TEXT[:200], 0, TEXT[200:230], Sampling(0.0), {"tiers": 1})
    engine = Engine.load(tmp_path / "dynamic", device="cpu", store=store, tiers=1)
    engine.read(TEXT[:200], "short")
    within = Engine.load(tmp_path / "dynamic", device="cpu", store=store, tiers=1)
    assert case.answer(within, ContextRequest("short"))["reused_tokens"] == 200
    with pytest.raises(ContextError, match="scales RoPE dynamically: beyond 256 tokens"):
        engine.read(TEXT[:300], "long")
    assert engine.generate(TEXT[:300], Sampling(0.0), 4, contexts=FIND).stats["context"] is None


@pytest.mark.parametrize("resident", [None, 0.0])
def test_damage_that_reads_as_nan_leaves_nothing_behind(checkpoints, store, resident):
    """Keys and values behind the last token are hidden by a weight of 0, which does not help against NaN."""
    settings = {"budget": 64, "resident": resident}
    case = Case("llama", "float32", TEXT[:100], 0, TEXT[100:140], Sampling(0.0), settings)
    case.engine(checkpoints, store).read(case.text, "book")
    want = case.answer(case.engine(checkpoints, store))["token_ids"]
    for damaged, intact in ((1, SEGMENT), (0, 0)):
        segment = sorted((store.root / "book").glob("*.safetensors"))[damaged]
        content = bytearray(segment.read_bytes())
        content[4096 : 4096 + 100_000] = b"\xff" * 100_000
        segment.write_bytes(content)
        got = case.answer(case.engine(checkpoints, store), ContextRequest("book"))
        assert got["token_ids"] == want and got["reused_tokens"] == intact
        assert f"is damaged in positions {damaged * SEGMENT} to" in got["warnings"][0]
    mending = case.engine(checkpoints, store)
    mending.read(case.text, "book")  # computes a segment while numbers of the next one are still in the cache
    assert [wrong for _, wrong in store.verify("book") if wrong] == []
    assert case.answer(mending)["token_ids"] == want


def test_a_shorter_text_takes_nothing_from_a_longer_one(checkpoints, store):
    case = Case("llama", "float32", TEXT[:300], 0, [], Sampling(0.0), {"tiers": 1})
    case.engine(checkpoints, store).read(case.text, "book")
    assert case.engine(checkpoints, store).read(TEXT[:200], "book").saved == 300, "all of it is there"
    with pytest.raises(ContextError, match="another text: it differs from this one at token 199"):
        case.engine(checkpoints, store).read([*TEXT[:199], 96 - TEXT[199]], "book")
    grown = [*TEXT[:298], 96 - TEXT[298], *TEXT[300:400]]
    assert case.engine(checkpoints, store).read(grown, "book").saved == len(grown), "its last tokens may differ then"


def test_what_another_process_has_saved_meanwhile_stays(checkpoints, store):
    case = Case("llama", "float32", TEXT[:300], 0, [], Sampling(0.0), {"tiers": 1})
    save = ContextRequest(save="book", required=True)
    planned = case.engine(checkpoints, store).stream(case.text, Sampling(0.0), 1, contexts=save)
    case.engine(checkpoints, store).read(case.text, "book")
    with pytest.raises(ContextError, match="was saved by another process meanwhile"):
        next(planned)
    assert store.load("book").complete


def test_a_mending_that_is_broken_off_keeps_what_was_whole(checkpoints, store):
    case = Case("llama", "float32", TEXT[:300], 0, [], Sampling(0.0), {"tiers": 1})
    case.engine(checkpoints, store).read(case.text, "book")
    first = sorted((store.root / "book").glob("*.safetensors"))[0]
    content = bytearray(first.read_bytes())
    content[5000] ^= 1
    first.write_bytes(content)
    engine, tokens = case.engine(checkpoints, store), 0

    def stop_after_two_segments(share):
        nonlocal tokens
        tokens = store.load("book").saved
        if share > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.read(case.text, "book", on_prefill=stop_after_two_segments)
    assert engine._running
    engine._running.close()
    assert tokens == store.load("book").saved == 300
    assert [wrong for _, wrong in store.verify("book") if wrong] == []


def test_a_store_that_cannot_be_looked_into_matters_only_to_those_who_ask_for_it(checkpoints, tmp_path):
    (tmp_path / "file").touch()
    store = ContextStore(tmp_path / "file" / "contexts")
    case = Case("llama", "float32", TEXT[:300], 0, [], Sampling(0.0), {"tiers": 1})
    assert len(case.answer(case.engine(checkpoints, store), FIND)["token_ids"]) == 20
    saving = case.answer(case.engine(checkpoints, store), ContextRequest(save="book"))
    assert "nothing is saved" in saving["warnings"][0]
    with pytest.raises(ContextError):
        case.engine(checkpoints, store).read(case.text, "book")


def test_without_looking_a_saved_text_shares_nothing(checkpoints, store):
    case = Case("llama", "float32", TEXT[:300], 0, [], Sampling(0.0), {"tiers": 1})
    case.engine(checkpoints, store).read(case.text, "book")
    assert case.answer(case.engine(checkpoints, store), ContextRequest(save="mine"))["context"] is None
    found = case.answer(case.engine(checkpoints, store), ContextRequest(find=True, save="ours"))
    assert found["context"] in ("book", "mine")
