"""Segment files: what is written is read, bit for bit, and the safetensors library reads it too."""

import json
import random
from dataclasses import replace
from itertools import cycle, islice

import pytest
import torch
from decoded import decoded, flags_of, halves
from oracles import kv_block
from safetensors.torch import load_file
from tiny import random_tokens
from triforce.kernels.slots import Layout
from triforce.offload.contexts.disk import Disk
from triforce.offload.contexts.segments.contents import RUN, Contents, DamagedError, Shape, chained
from triforce.offload.contexts.segments.file import SegmentFile
from triforce.offload.contexts.segments.layout import PackedLayout, RawLayout
from triforce.offload.contexts.segments.rows import byte_views
from triforce.offload.contexts.segments.writing import write_segment

CHAIN = "0" * 32


class Case:
    """A random shape, keys and values of a segment, and a file with all or some of its heads."""

    def __init__(self, path, seed, tokens=None, packed=False, kind=None, last=()):
        """Args: `kind` is of the numbers, see `oracles.kv_block`; `None` is any bits. `last` are by turns the tokens of
        layers that are saved, see `Shape`."""
        self.rng = rng = random.Random(seed)
        self.path = path
        tokens = tokens or rng.choice([1, 2, 63, 64, 65, 1023, 1024, 1025, rng.randint(1, 3000)])
        dtype = "bfloat16" if packed else rng.choice(["float32", "bfloat16", "float16"])
        shape = Shape(rng.randint(1, 3), rng.choice([1, 2, 3, 8]), rng.choice([24, 32, 64]), dtype)
        shape = replace(shape, last_tokens=tuple(islice(cycle(last), shape.num_layers)))
        first_head = rng.randrange(shape.num_kv_heads)
        heads = (first_head, rng.randint(first_head + 1, shape.num_kv_heads))
        self.token_ids = random_tokens(tokens, 2**31 - 1, seed)
        first = rng.choice([0, 16_384, 12_345])
        self.before = CHAIN if first else "fingerprint"
        chain = chained(self.before, self.token_ids)
        self.contents = Contents(shape, "fingerprint", first, tokens, chain, heads, packed)
        size = (shape.num_layers, 2, self.contents.heads, tokens, shape.head_dim)
        if kind:
            self.kv = torch.stack([kv_block(kind, size[1:], seed + layer) for layer in range(shape.num_layers)])
        else:
            bits = torch.randint(
                256, (*size[:-1], shape.row_bytes), dtype=torch.uint8
            )  # NaNs and infinities among them
            self.kv = bits.view(getattr(torch, dtype))
        self.checksum = write_segment(Disk(), path, self.contents, self.token_ids, map(self.pieces, self.kv))

    def flip(self, at):
        """Flips a bit of the file's byte `at`."""
        raw = bytearray(self.path.read_bytes())
        raw[at] ^= 1 << self.rng.randrange(8)
        self.path.write_bytes(bytes(raw))

    def cuts(self, tokens):
        """Random lengths that add up to `tokens`, 0 among them at times."""
        cuts = sorted(self.rng.randint(0, tokens) for _ in range(self.rng.choice([0, 1, 2, 5])))
        return [stop - start for start, stop in zip([0, *cuts], [*cuts, tokens], strict=True)]

    def pieces(self, kv):
        """`[2, heads, tokens, head_dim]` in pieces, as they lie in larger blocks."""
        pieces = []
        for piece in torch.split(kv, self.cuts(kv.shape[2]), dim=2):
            block = torch.zeros(*piece.shape[:2], piece.shape[2] + 3, piece.shape[3], dtype=kv.dtype)
            block[:, :, 1 : 1 + piece.shape[2]] = piece
            pieces.append(block[:, :, 1 : 1 + piece.shape[2]])
        return pieces

    def read(self, layer, heads, stop):
        """The first `stop` tokens of some heads (counted in the file) `[2, heads, stop, head_dim]`."""
        shape = self.contents.shape
        sizes = [(2, len(heads), tokens, shape.head_dim) for tokens in self.cuts(stop)]
        pieces = [torch.zeros(size, dtype=getattr(torch, shape.dtype)) for size in sizes]
        with SegmentFile(self.path, self.contents, self.checksum) as file:
            for index, head in enumerate(heads):
                views = [byte_views(pieces, half, index) for half in (0, 1)]
                file.read(layer, self.contents.kv_heads[0] + head, *views)
        return torch.cat(pieces, dim=2)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def check_reads(case):
    """Some heads of each layer, of all tokens and of some, are read as they were written."""
    contents, rng = case.contents, case.rng
    for layer in range(contents.shape.num_layers):
        heads = sorted(rng.sample(range(contents.heads), rng.randint(1, contents.heads)))
        for stop in (contents.tokens, rng.randint(1, contents.tokens)):
            want = case.kv[layer][:, heads, :stop]
            assert torch.equal(bits(case.read(layer, heads, stop)), bits(want))


@pytest.mark.parametrize("seed", range(24))
def test_what_is_read_is_what_was_written(tmp_path, seed):
    case = Case(tmp_path / "segment.safetensors", seed)
    check_reads(case)
    contents = case.contents
    with SegmentFile(case.path, contents, case.checksum) as file:
        assert file.token_ids(case.before) == case.token_ids
        with pytest.raises(DamagedError, match="token ids"):
            file.token_ids("1" * 32)


@pytest.mark.parametrize("seed", range(24))
def test_the_safetensors_library_reads_it(tmp_path, seed):
    case = Case(tmp_path / "segment.safetensors", seed)
    tokens = case.contents.tokens
    tensors = load_file(case.path)
    assert tensors["token_ids"][:tokens].tolist() == case.token_ids
    for layer, want in enumerate(case.kv):
        found = tensors[f"layer.{layer}"]
        assert found.dtype == want.dtype
        assert torch.equal(bits(found[:, 0, :tokens]), bits(want[0]))
        assert torch.equal(bits(found[:, 1, :tokens]), bits(want[1]))
        assert not bits(found[:, :, tokens:]).any(), "padding is zeros"


@pytest.mark.parametrize("seed", range(24))
def test_every_tensor_begins_at_a_multiple_of_4096_bytes(tmp_path, seed):
    case = Case(tmp_path / "segment.safetensors", seed)
    raw = case.path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    described = json.loads(raw[8 : 8 + length])
    metadata = described.pop("__metadata__")
    starts = [8 + length + tensor["data_offsets"][0] for tensor in described.values()]
    assert {start % 4096 for start in starts} == {0} and starts == sorted(starts)
    assert len(raw) % 4096 == 0
    contents = case.contents
    with SegmentFile(case.path, contents) as file:
        assert isinstance(file.layout, RawLayout)
        for layer, head in ((0, 0), (contents.shape.num_layers - 1, contents.heads - 1)):
            assert [file.layout.half_start(layer, head, half) % 4096 for half in (0, 1)] == [0, 0]
    assert metadata["fingerprint"] == "fingerprint" and metadata["chain"] == contents.chain


@pytest.mark.parametrize("seed", range(6))
def test_damage_is_found_where_it_is_and_does_not_hurt_what_is_before_it(tmp_path, seed):
    case = Case(tmp_path / "segment.safetensors", seed, tokens=2 * RUN + 100)
    contents, rng = case.contents, case.rng
    layer, head, half = rng.randrange(contents.shape.num_layers), rng.randrange(contents.heads), rng.randrange(2)
    row = rng.randrange(RUN, 2 * RUN)
    with SegmentFile(case.path, contents) as file:
        assert isinstance(file.layout, RawLayout)
        case.flip(file.layout.half_start(layer, head, half) + row * contents.shape.row_bytes + 3)
    case.read(layer, [head], RUN)
    position = contents.first + RUN
    with pytest.raises(DamagedError, match=rf"layer {layer}, KV head {contents.kv_heads[0] + head} .*{position:,} on"):
        case.read(layer, [head], RUN + 1)  # checksums are of whole runs
    for other in range(contents.heads):
        if other != head:
            case.read(layer, [other], contents.tokens)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_the_last_tokens_of_some_layers_are_saved_alone(tmp_path, seed, packed):
    kind = "normal" if packed else None
    tokens = random.Random(seed).choice([40, 1500, 2048, 4000])
    case = Case(tmp_path / "segment.safetensors", seed, tokens, packed, kind, last=(90, 0, 600))
    whole = Case(tmp_path / "whole.safetensors", seed, tokens, packed, kind)
    contents = case.contents
    for layer in range(contents.shape.num_layers):
        first = contents.first_token(layer)
        last = contents.shape.last_of(layer)
        assert first <= max(0, tokens - last) < first + contents.run if last else first == 0
        for stop in (tokens, case.rng.randint(first + 1, tokens)):
            want = case.kv[layer][:, :, first:stop]
            assert torch.equal(bits(case.read(layer, range(contents.heads), stop - first)), bits(want))
        with SegmentFile(case.path, contents, case.checksum) as file:
            for head in range(*contents.kv_heads):
                file.check(layer, head)
    saved, all_of = case.path.stat().st_size, whole.path.stat().st_size
    assert saved < all_of if tokens > 600 + contents.run else saved <= all_of + 4096
    assert contents.shape.kv_bytes(tokens, 500) <= whole.contents.shape.kv_bytes(tokens, 500)
    assert all(f"layer.{layer}" in load_file(case.path) for layer in range(contents.shape.num_layers))


@pytest.mark.parametrize("packed", [False, True])
def test_damage_in_what_is_saved_of_a_layer_is_found(tmp_path, packed):
    case = Case(tmp_path / "segment.safetensors", 1, 4000, packed, "normal" if packed else None, last=(600,))
    contents = case.contents
    first, layer = contents.first_token(0), contents.shape.num_layers - 1
    with SegmentFile(case.path, contents) as file:
        where = file.layout
        if isinstance(where, PackedLayout):
            start = where.half_start(layer, 0, contents.runs - 1, 0)
        else:
            start = where.half_start(layer, 0, 1)
    case.flip(start + 5)
    with pytest.raises(DamagedError, match=f"layer {layer}"):
        case.read(layer, [0], 4000 - first)


PACKED_KINDS = ["normal", "any bits", "some zeros", "few any bits"]
"""Numbers of which all, no, or some runs fit into slots."""


@pytest.mark.parametrize("kind", PACKED_KINDS)
@pytest.mark.parametrize("seed", range(12))
def test_what_is_read_from_a_packed_segment_is_what_was_written(tmp_path, seed, kind):
    case = Case(tmp_path / "segment.safetensors", seed, packed=True, kind=kind)
    check_reads(case)
    contents = case.contents
    with SegmentFile(case.path, contents, case.checksum) as file:
        assert file.token_ids(case.before) == case.token_ids
        for layer in range(contents.shape.num_layers):
            for head in range(*contents.kv_heads):
                file.check(layer, head)


@pytest.mark.parametrize("kind", PACKED_KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_a_packed_segment_is_read_by_its_description_alone(tmp_path, seed, kind):
    case = Case(tmp_path / "segment.safetensors", seed, packed=True, kind=kind)
    for found, want in zip(decoded(case.path, case.contents.shape.head_dim), case.kv, strict=True):
        assert torch.equal(bits(found.transpose(0, 1)), bits(want))
    tensors = load_file(case.path)
    assert tensors["token_ids"][: case.contents.tokens].tolist() == case.token_ids


@pytest.mark.parametrize("kind", PACKED_KINDS)
def test_a_packed_segment_never_takes_more_than_a_raw_one_and_usually_three_quarters(tmp_path, kind):
    case = Case(tmp_path / "packed.safetensors", 3, tokens=8192, packed=True, kind=kind)
    contents = case.contents
    raw = Contents(contents.shape, "fingerprint", 0, 8192, CHAIN, contents.kv_heads)
    write_segment(Disk(), tmp_path / "raw.safetensors", raw, case.token_ids, map(case.pieces, case.kv))
    packed_bytes, raw_bytes = ((tmp_path / f"{name}.safetensors").stat().st_size for name in ("packed", "raw"))
    assert packed_bytes <= raw_bytes + 8192  # what of it is packed, and twice the checksums
    if kind == "normal":
        padding = 4096 * (4 + contents.shape.num_layers * contents.heads)
        assert packed_bytes < 0.77 * raw_bytes + padding
        share = contents.shape.saved_bytes(8192, 8192, True) / contents.shape.kv_bytes(8192, 8192)
        assert share == pytest.approx(packed_bytes / raw_bytes, rel=0.02), "what is said before it is written"


@pytest.mark.parametrize("seed", range(12))
def test_every_tensor_and_every_head_of_a_packed_segment_begins_at_a_multiple_of_4096_bytes(tmp_path, seed):
    case = Case(tmp_path / "segment.safetensors", seed, packed=True, kind="normal")
    contents, raw = case.contents, case.path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    described = json.loads(raw[8 : 8 + length])
    metadata = described.pop("__metadata__")
    starts = [8 + length + tensor["data_offsets"][0] for tensor in described.values()]
    assert {start % 4096 for start in starts} == {0} and starts == sorted(starts)
    assert len(raw) % 4096 == 0 and metadata["format"] == "triforce-kv-2"
    with SegmentFile(case.path, contents) as file:
        assert isinstance(file.layout, PackedLayout)
        for layer in range(contents.shape.num_layers):
            for head in range(contents.heads):
                assert file.layout.half_start(layer, head, 0, 0) % 4096 == 0


@pytest.mark.parametrize("kind", ["normal", "some zeros"])
@pytest.mark.parametrize("seed", range(6))
def test_every_flipped_bit_of_a_packed_run_is_found_where_it_is(tmp_path, seed, kind):
    case = Case(tmp_path / "segment.safetensors", seed, tokens=1200, packed=True, kind=kind)
    contents, rng = case.contents, case.rng
    tensors = load_file(case.path)
    layer = rng.randrange(contents.shape.num_layers)
    flags = flags_of(tensors["packed"], contents.shape.num_layers, contents.heads, 1200)[layer]
    one = rng.choice(list(halves(flags, 1200, contents.shape.head_dim)))
    raw = case.path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    begin = 8 + length + json.loads(raw[8 : 8 + length])[f"layer.{layer}"]["data_offsets"][0]
    case.flip(begin + one.start + rng.randrange(one.size))
    position = contents.first + 512 * one.run
    if one.run:
        case.read(layer, [one.head], 512 * one.run)
    with pytest.raises(DamagedError, match=rf"KV head {contents.kv_heads[0] + one.head} .*{position:,} on"):
        case.read(layer, [one.head], 512 * one.run + 1)
    with SegmentFile(case.path, contents, case.checksum) as file:
        for other in range(contents.heads):
            if other != one.head:
                file.check(layer, contents.kv_heads[0] + other)


@pytest.mark.parametrize("seed", range(6))
def test_what_a_file_says_is_packed_is_checked(tmp_path, seed):
    case = Case(tmp_path / "segment.safetensors", seed, tokens=1200, packed=True, kind="some zeros")
    with SegmentFile(case.path, case.contents, case.checksum) as file:
        assert isinstance(file.layout, PackedLayout)
        start, count = file.layout.flags_start, file.layout.packed.size
    case.flip(start + case.rng.randrange(count))
    with pytest.raises(DamagedError, match=r"bytes instead of|which parts of it are packed|its header|its checksums"):
        SegmentFile(case.path, case.contents, case.checksum)


def test_a_packed_file_is_not_read_as_a_raw_one_nor_the_other_way_round(tmp_path):
    shape, ids = Shape(1, 1, 64, "bfloat16"), random_tokens(700)
    for packed in (False, True):
        path = tmp_path / f"{packed}.safetensors"
        known = {"shape": shape, "fingerprint": "f", "first": 0, "tokens": 700, "chain": CHAIN, "kv_heads": (0, 1)}
        layers = [[torch.randn(2, 1, 700, 64).bfloat16()]]
        write_segment(Disk(), path, Contents(**known, packed=packed), ids, layers)
        with pytest.raises(DamagedError, match=r"bytes|packed"):
            SegmentFile(path, Contents(**known, packed=not packed))


def test_half_a_run_takes_a_slot_only_where_that_is_smaller(tmp_path):
    """A few tokens take less raw than padded up to 64."""
    for tokens in (1, 40, 49, 60, 64, 512, 513, 560, 575, 576):
        case = Case(tmp_path / f"{tokens}.safetensors", 5, tokens=tokens, packed=True, kind="normal")
        dim = case.contents.shape.head_dim
        flags = flags_of(load_file(case.path)["packed"], case.contents.shape.num_layers, case.contents.heads, tokens)
        for run, here in enumerate([512] * (tokens // 512) + ([tokens % 512] if tokens % 512 else [])):
            slot = Layout(1, -(-here // 64) * 64, dim).slot_bytes
            raw = -(-here * dim * 2 // 64) * 64
            assert (flags[:, :, run] == (slot < raw)).all(), f"{tokens} tokens, run {run}"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fingerprint": "another"}, "header"),
        ({"first": 64}, "header"),
        ({"chain": "f" * 32}, "header"),
        ({"tokens": 99}, "bytes|header"),
        ({"kv_heads": (1, 2)}, "header"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path, change, words):
    shape = Shape(1, 2, 64, "float32")
    known = {
        "shape": shape,
        "fingerprint": "fingerprint",
        "first": 0,
        "tokens": 100,
        "chain": CHAIN,
        "kv_heads": (0, 1),
    }
    path = tmp_path / "segment.safetensors"
    layers = [[torch.zeros(2, 1, 100, 64)]]
    write_segment(Disk(), path, Contents(**known), random_tokens(100), layers)
    with pytest.raises(DamagedError, match=words):
        SegmentFile(path, Contents(**known | change))
    with pytest.raises(DamagedError, match="checksums"):
        SegmentFile(path, Contents(**known), checksum="0" * 32)


def test_the_chain_is_of_every_token_id_before():
    ids = random_tokens(100)
    whole = chained(chained("fingerprint", ids[:64]), ids[64:])
    for at in range(100):
        other = [*ids]
        other[at] += 1
        assert chained(chained("fingerprint", other[:64]), other[64:]) != whole
    assert chained(chained("another", ids[:64]), ids[64:]) != whole
