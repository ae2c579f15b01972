"""Segment files: what is written is read, bit for bit, and the safetensors library reads it too."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file
from tiny import random_tokens
from triforce.offload.contexts.disk import Disk
from triforce.offload.contexts.segment import (
    RUN,
    Contents,
    DamagedError,
    SegmentFile,
    Shape,
    byte_views,
    chained,
    write_segment,
)

CHAIN = "0" * 32


class Case:
    """A random shape, keys and values of a segment, and a file with all or some of its heads."""

    def __init__(self, path, seed, tokens=None):
        self.rng = rng = random.Random(seed)
        self.path = path
        tokens = tokens or rng.choice([1, 2, 63, 64, 65, 1023, 1024, 1025, rng.randint(1, 3000)])
        dtype = rng.choice(["float32", "bfloat16", "float16"])
        shape = Shape(rng.randint(1, 3), rng.choice([1, 2, 3, 8]), rng.choice([24, 32, 64]), dtype)
        first_head = rng.randrange(shape.num_kv_heads)
        heads = (first_head, rng.randint(first_head + 1, shape.num_kv_heads))
        self.token_ids = random_tokens(tokens, 2**31 - 1, seed)
        first = rng.choice([0, 16_384, 12_345])
        self.before = CHAIN if first else "fingerprint"
        chain = chained(self.before, self.token_ids)
        self.contents = Contents(shape, "fingerprint", first, tokens, chain, heads)
        size = (shape.num_layers, 2, self.contents.heads, tokens, shape.head_dim)
        bits = torch.randint(256, (*size[:-1], shape.row_bytes), dtype=torch.uint8)  # NaNs and infinities among them
        self.kv = bits.view(getattr(torch, dtype))
        self.checksum = write_segment(Disk(), path, self.contents, self.token_ids, map(self.pieces, self.kv))

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


@pytest.mark.parametrize("seed", range(24))
def test_what_is_read_is_what_was_written(tmp_path, seed):
    case = Case(tmp_path / "segment.safetensors", seed)
    contents, rng = case.contents, case.rng
    for layer in range(contents.shape.num_layers):
        heads = sorted(rng.sample(range(contents.heads), rng.randint(1, contents.heads)))
        for stop in (contents.tokens, rng.randint(1, contents.tokens)):
            want = case.kv[layer][:, heads, :stop]
            assert torch.equal(bits(case.read(layer, heads, stop)), bits(want))
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
    assert len(raw) % 4096 == 0 and len(raw) == case.contents.file_bytes
    contents = case.contents
    for layer, head in ((0, 0), (contents.shape.num_layers - 1, contents.heads - 1)):
        assert [contents.half_start(layer, head, half) % 4096 for half in (0, 1)] == [0, 0]
    assert metadata["fingerprint"] == "fingerprint" and metadata["chain"] == contents.chain


@pytest.mark.parametrize("seed", range(6))
def test_damage_is_found_where_it_is_and_does_not_hurt_what_is_before_it(tmp_path, seed):
    case = Case(tmp_path / "segment.safetensors", seed, tokens=2 * RUN + 100)
    contents, rng = case.contents, case.rng
    layer, head, half = rng.randrange(contents.shape.num_layers), rng.randrange(contents.heads), rng.randrange(2)
    row = rng.randrange(RUN, 2 * RUN)
    raw = bytearray(case.path.read_bytes())
    raw[contents.half_start(layer, head, half) + row * contents.shape.row_bytes + 3] ^= 1 << rng.randrange(8)
    case.path.write_bytes(bytes(raw))
    case.read(layer, [head], RUN)
    position = contents.first + RUN
    with pytest.raises(DamagedError, match=rf"layer {layer}, KV head {contents.kv_heads[0] + head} .*{position:,} on"):
        case.read(layer, [head], RUN + 1)  # checksums are of whole runs
    for other in range(contents.heads):
        if other != head:
            case.read(layer, [other], contents.tokens)


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
