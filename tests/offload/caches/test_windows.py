"""Layers with sliding windows, where others have none, keep the last tokens only: texts stay those of transformers."""

from dataclasses import replace

import pytest
import torch
from tiny import greedy_oracle, random_tokens, save_family, save_llama
from triforce.offload import ContextRequest, ContextStore, Engine, Sampling
from triforce.offload.caches.full import FullCache
from triforce.offload.caches.windows import WindowBlocks
from triforce.offload.limits import LIMITS
from triforce.offload.planning.request import RunRequest
from triforce.offload.planning.run_plan import make_plan
from triforce.offload.settings import Settings
from triforce.offload.system import THIS_MACHINE
from triforce.tp.decoder import Decoder
from triforce.tp.model.config import ModelConfig

CPU = torch.device("cpu")

SHORT = replace(LIMITS, window_slack=16)
"""By which such a layer has two blocks of 512 tokens in these tests."""

BOOK = random_tokens(2600, seed=3)
GREEDY = Sampling(0.0)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    root = tmp_path_factory.mktemp("windows")
    save_llama(root / "draft", seed=4, num_hidden_layers=1)
    return root, save_family(root / "gemma3", "gemma3", seed=1, max_position_embeddings=8192)


def engine(root, store=None, **settings):
    system = replace(THIS_MACHINE, limits=SHORT)
    given = {"device": "cpu", "dtype": "float32", "budget": 64, "tiers": 3, "system": system, "store": store} | settings
    return Engine.load(root / "gemma3", root / "draft", **given)


def answer(root, asked, prompt, n=12, **contexts):
    statistics = asked.generate(prompt, GREEDY, n, ignore_eos=True, **contexts).stats
    assert not statistics["warnings"]
    return statistics["token_ids"], statistics["reused_tokens"]


@pytest.mark.parametrize("parts", [37, 512, 700, 2600, [2000, 1, 3, 280, 16, 300]], ids=str)
@torch.inference_mode()
def test_logits_are_those_of_transformers_however_tokens_come(gemma, parts):
    root, model = gemma
    decoder = Decoder.load(root / "gemma3", dtype=torch.float32, device=CPU)
    blocks = FullCache.on_device(decoder.config, decoder.rope, dtype=torch.float32, device=CPU, capacity=2600).blocks
    given = {"dtype": torch.float32, "device": CPU, "chunk_size": 8, "limits": SHORT}
    cache = FullCache(decoder.config, decoder.rope, blocks, chunk_size=8, windows=WindowBlocks(decoder.config, **given))
    pieces = torch.tensor(BOOK).split(parts)
    got = torch.cat([decoder.forward(piece, cache, num_logits=len(piece)) for piece in pieces])
    want = model(torch.tensor([BOOK])).logits[0]
    assert (got - want).abs().max() < 2e-4
    assert [cache.reachable(length) for length in (1000, 2047, 2110, 2600)] == [0, 0, 2110, 2600]
    cache.rollback(2200)
    again = decoder.forward(torch.tensor(BOOK[2200:]), cache, num_logits=400)
    assert (again - want[2200:]).abs().max() < 2e-4
    cache.rollback(0)  # for another text, where no token is known of the one that was there
    again = decoder.forward(torch.tensor(BOOK[:400]), cache, num_logits=400)
    assert (again - want[:400]).abs().max() < 2e-4
    decoder.forward(torch.tensor(BOOK[400:]), cache)
    cache.rollback(1500)
    assert cache.length == 0, "what it had then is gone"


@torch.inference_mode()
def test_chunks_and_tokens_are_those_of_a_cache_that_keeps_all(gemma):
    root, _ = gemma
    decoder = Decoder.load(root / "gemma3", dtype=torch.float32, device=CPU)
    whole = FullCache.on_device(decoder.config, decoder.rope, dtype=torch.float32, device=CPU, capacity=1500)
    for start, stop in ((0, 900), (900, 907), (907, 1400)):
        decoder.forward(torch.tensor(BOOK[start:stop]), whole)
    windows = WindowBlocks(decoder.config, dtype=torch.float32, device=CPU, chunk_size=24, limits=SHORT)
    k, v = whole.slice(0, 0, 1400)
    for first in range(0, 1400, 100):
        windows.append(0, first, k[:, first : first + 100], v[:, first : first + 100])
    kept = windows.slice(0, 1300, 1400)
    assert torch.equal(kept[0], k[:, 1300:1400]) and torch.equal(kept[1], v[:, 1300:1400])
    chunks = torch.tensor([[55, 57, 50], [49, 56, 52]])
    for got, of_all in zip(windows.gather(0, chunks, 24), (k, v), strict=True):
        want = torch.stack(
            [
                torch.cat([of_all[head, 24 * chunk : 24 * chunk + 24] for chunk in row.tolist()])
                for head, row in enumerate(chunks)
            ]
        )
        assert torch.equal(got, want)


@pytest.mark.parametrize("resident", [None, 0.0], ids=["resident", "streamed"])
def test_a_next_turn_goes_on_as_far_as_windows_reach(gemma, resident):
    root, model = gemma
    asked = engine(root, resident=resident)
    first, _ = answer(root, asked, BOOK[:2000])
    assert first == greedy_oracle(model, BOOK[:2000], 12, first)
    turn = [*BOOK[:2000], *first, *BOOK[100:130]]
    text, reused = answer(root, asked, turn)
    assert text == greedy_oracle(model, turn, 12, text) and reused >= 2000
    other = [*BOOK[:900], *BOOK[30:80]]
    text, reused = answer(root, asked, other)
    assert text == greedy_oracle(model, other, 12, text) and reused == 0, "of which the windows are gone"


@pytest.mark.parametrize("resident", [None, 0.0], ids=["resident", "streamed"])
def test_a_saved_text_is_restored_up_to_the_end_of_a_segment(gemma, tmp_path, resident):
    root, model = gemma
    store = ContextStore(tmp_path, segment_tokens=512)
    saved = engine(root, store, resident=resident).read(BOOK[:2300], "book")
    assert saved.complete
    whole = [*BOOK[:2300], *BOOK[40:70]]
    text, reused = answer(root, engine(root, store, resident=resident), whole, contexts=ContextRequest("book"))
    assert text == greedy_oracle(model, whole, 12, text) and reused == 2300
    short = BOOK[:2300]
    text, reused = answer(root, engine(root, store, resident=resident), short, contexts=ContextRequest("book"))
    assert text == greedy_oracle(model, short, 12, text) and 2280 < reused < 2300, "but for the last few"
    partly = [*BOOK[:1400], *BOOK[10:60]]
    text, reused = answer(root, engine(root, store, resident=resident), partly, contexts=ContextRequest(find=True))
    assert text == greedy_oracle(model, partly, 12, text) and reused == 1024


def test_what_was_read_before_is_read_again_to_be_saved(gemma, tmp_path):
    """At the ends of the first segments its windows are gone."""
    root, model = gemma
    store = ContextStore(tmp_path, segment_tokens=512)
    asked = engine(root, store)
    answer(root, asked, BOOK[:2300])
    saving = ContextRequest(save="book", required=True)
    _, reused = answer(root, asked, BOOK[:2300], contexts=saving)
    assert reused == 0
    partly = [*BOOK[:1100], *BOOK[10:60]]
    text, reused = answer(root, engine(root, store), partly, contexts=ContextRequest(find=True))
    assert text == greedy_oracle(model, partly, 12, text) and reused == 1024


def test_a_plan_counts_windows_and_no_more(gemma):
    root, _ = gemma
    target, draft = (ModelConfig.load(root / name) for name in ("gemma3", "draft"))
    request = RunRequest(target, draft, torch.float32, 6000, Settings(tiers=3, budget=64), limits=SHORT)
    plan, longer = make_plan(request), make_plan(replace(request, context=12000))
    of_token = target.kv_bytes_per_token(torch.float32)
    assert plan.windows == longer.windows == 2 * 1024 * of_token // 3, "two of three layers"
    assert plan.kv == plan.placement.capacity * of_token // 3
    assert make_plan(replace(request, sequences=3)).windows == 3 * plan.windows
    llama = make_plan(replace(request, target=draft))
    assert llama.windows == 0


def test_a_saved_text_of_another_slack_is_as_good(gemma, tmp_path):
    root, model = gemma
    store = ContextStore(tmp_path, segment_tokens=512)
    engine(root, store).read(BOOK[:1500], "book")
    given = {"device": "cpu", "dtype": "float32", "budget": 64, "store": store}
    asked = Engine.load(root / "gemma3", root / "draft", **given)
    prompt = [*BOOK[:1500], *BOOK[40:70]]
    text, reused = answer(root, asked, prompt, contexts=ContextRequest("book"))
    assert text == greedy_oracle(model, prompt, 12, text) and reused == 1500


def test_no_more_is_taken_over_than_was_restored(gemma, tmp_path):
    """With other chunks a layer has room for more tokens than were saved of it."""
    root, model = gemma
    store = ContextStore(tmp_path, segment_tokens=4096)
    engine(root, store).read(BOOK[:2390], "book")
    asked = engine(root, store, chunk_size=500, budget=1000)
    whole = [*BOOK[:2390], *BOOK[40:70]]
    text, reused = answer(root, asked, whole, contexts=ContextRequest("book"))
    assert text == greedy_oracle(model, whole, 12, text) and reused == 2390
    for shared in (700, 1100, 1400, 1900):
        asked = engine(root, store, chunk_size=500, budget=1000)
        answer(root, asked, whole, contexts=ContextRequest("book"))
        prompt = [*BOOK[:shared], *BOOK[10:60]]
        text, reused = answer(root, asked, prompt)
        assert text == greedy_oracle(model, prompt, 12, text) and reused in (0, shared)


LONG = [*BOOK, *BOOK[7:1700]]
GROWN = [(4200, 4203, 4201), (4092, 4096, 4094), (2100, 4290, 4285), (2050, 2060, 2055), (4096, 4099, 4096)]
"""Tokens of a text that are read, those that it has then, and those that another prompt shares with it."""


def restored_texts(root, store, read, then, shared, **settings):
    """Texts that go on from a context that has grown: from all of it, from some, and from all but the last few."""
    name = f"book-{read}-{then}"
    for tokens in (read, then):
        assert engine(root, store, **settings).read(LONG[:tokens], name).saved == tokens
    for prompt in ([*LONG[:then], *BOOK[40:70]], [*LONG[:shared], *BOOK[10:60]], LONG[:then]):
        text, reused = answer(root, engine(root, store, **settings), prompt, contexts=ContextRequest(name))
        assert reused >= 2048
        yield prompt, text


@pytest.mark.parametrize("grown", GROWN, ids=str)
@pytest.mark.slow(keep=2)
def test_segments_leave_out_what_no_window_sees(gemma, tmp_path, grown):
    """Texts that end anywhere in a segment, that grow by a few tokens, and that are restored but for a few."""
    root, model = gemma
    for prompt, text in restored_texts(root, ContextStore(tmp_path, segment_tokens=2048), *grown):
        assert text == greedy_oracle(model, prompt, 12, text)
    kept = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert (
        kept < 0.9 * grown[1] * ModelConfig.load(root / "gemma3").kv_bytes_per_token(torch.float32) or grown[1] < 4000
    )


@pytest.mark.parametrize("grown", GROWN[1:3], ids=str)
@pytest.mark.slow(keep=1)
def test_packed_segments_are_restored_as_raw_ones(gemma, tmp_path, grown):
    root, _ = gemma
    raw, packed = (
        list(
            restored_texts(
                root, ContextStore(tmp_path / pack, segment_tokens=2048), *grown, dtype="bfloat16", pack=pack
            )
        )
        for pack in ("off", "on")
    )
    assert raw == packed


def test_damage_to_what_is_not_restored_is_mended(gemma, tmp_path):
    """Of a layer with windows a run reads what the last segment has, and what is before stays in the context."""
    root, _ = gemma
    store = ContextStore(tmp_path, segment_tokens=512)
    engine(root, store).read(BOOK[:2300], "book")
    first = min((tmp_path / "book").glob("*.safetensors"))
    raw = bytearray(first.read_bytes())
    raw[4096] ^= 4  # of the first layer, which has one
    first.write_bytes(bytes(raw))
    assert [bool(wrong) for _, wrong in store.verify("book")] == [True, False, False, False, False]
    engine(root, store).read(BOOK[:2300], "book")
    assert not any(wrong for _, wrong in store.verify("book"))
