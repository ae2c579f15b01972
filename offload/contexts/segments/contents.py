"""What a segment holds: the keys and values of up to `SEGMENT` consecutive tokens of a context, or of some KV heads; of
a model with linear attention also the states behind the last of them, in files of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from ....kernels.slots import Layout

SEGMENT = 16_384
"""Tokens of a segment, but for the last one of a context, which may have fewer."""

RUN = 1024
"""Consecutive positions with a checksum for each layer and KV head, where they are not packed."""

PACKED_RUN = 512
"""The same where they are packed. The keys of a KV head at these positions are packed together, and so are the values.
Blocks that stream to GPUs are whole multiples of it, where whole chunks are."""

DTYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}
"""What safetensors calls a number format, and the bytes of a number."""

PACKABLE = "bfloat16"
"""The number format that can be packed."""


class DamagedError(Exception):
    """A file that does not hold what it must. The message says what is wrong, without its name."""


STATE_ROW = 16
"""Numbers in a row of a file with states."""


@dataclass(frozen=True)
class StatesShape:
    """What the states of layers with linear attention are, of a whole model."""

    num_layers: int
    """With linear attention."""
    key_heads: int
    numbers: int
    """Of a key head in a layer, float32: see `caches.states.States.export`."""

    @property
    def rows(self) -> int:
        """Rows of each half of a key head in a layer: its numbers are in two, as keys and values are."""
        return -(-self.numbers // (2 * STATE_ROW))

    @property
    def num_bytes(self) -> int:
        """Behind one token."""
        return 4 * self.num_layers * self.key_heads * self.numbers

    @property
    def as_rows(self) -> Shape:
        """The shape of a file with them."""
        return Shape(self.num_layers, self.key_heads, STATE_ROW, "float32")


@dataclass(frozen=True)
class Shape:
    """What the keys and values of a token are, of a whole model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    """PyTorch's name for it, such as `bfloat16`."""
    last_tokens: tuple[int, ...] = ()
    """Of each layer how many of a segment's tokens are saved, the last ones; 0, or no entry: all."""
    states: StatesShape | None = None
    """What is saved behind the last token of each segment."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a key, or of a value."""
        return self.head_dim * DTYPES[self.dtype][1]

    def kv_bytes(self, tokens: int, segment_tokens: int) -> int:
        """Bytes of the keys and values that are saved of so many tokens, in segments of so many, and of the states."""
        return self._kv_bytes(tokens, segment_tokens) + self._state_bytes(tokens, segment_tokens)

    def _state_bytes(self, tokens: int, segment_tokens: int) -> int:
        return -(-tokens // segment_tokens) * self.states.num_bytes if self.states else 0

    def _kv_bytes(self, tokens: int, segment_tokens: int) -> int:
        whole, rest = divmod(tokens, segment_tokens)
        lasts = [self.last_of(layer) for layer in range(self.num_layers)]
        kept = sum(whole * min(last, segment_tokens) + min(last, rest) if last else tokens for last in lasts)
        return 2 * self.num_kv_heads * self.row_bytes * kept

    def last_of(self, layer: int) -> int:
        """See `last_tokens`."""
        return self.last_tokens[layer] if self.last_tokens else 0

    def saved_bytes(self, tokens: int, segment_tokens: int, packed: bool) -> int:
        """Bytes that they take in files, about, where whole runs are saved: if packed, as if all packed."""
        share = Layout(1, PACKED_RUN, self.head_dim).slot_bytes / (PACKED_RUN * self.row_bytes) if packed else 1
        beside = (PACKED_RUN if packed else RUN) - 1
        whole = replace(self, last_tokens=tuple(last and last + beside for last in self.last_tokens))
        states = self._state_bytes(tokens, segment_tokens)
        return round(whole._kv_bytes(tokens, segment_tokens) * share) + states


@dataclass(frozen=True)
class Contents:
    """What a segment's file holds."""

    shape: Shape
    fingerprint: str
    """Of the model, see `fingerprint`."""
    first: int
    """Position of the first token."""
    tokens: int
    chain: str
    """See `chained`: of all token ids from the first of the context to the last of the segment."""
    kv_heads: tuple[int, int]
    """The model's KV heads, or key heads of states, that are in the file: the first, and the one behind the last."""
    packed: bool = False
    """Whether keys and values are packed, where that takes less; only in bfloat16."""
    state_rows: int = 0
    """Of a file with the states behind the last token: `StatesShape.rows`. It has no token ids."""

    @property
    def heads(self) -> int:
        return self.kv_heads[1] - self.kv_heads[0]

    @property
    def run(self) -> int:
        """Consecutive positions that have a checksum for each layer and KV head."""
        return PACKED_RUN if self.packed else RUN

    @property
    def rows(self) -> int:
        """Rows of keys, or of values, of a head: one for each token, or those of states."""
        return self.state_rows or self.tokens

    @property
    def ids_bytes(self) -> int:
        """Bytes of the token ids."""
        return 0 if self.state_rows else 4 * self.tokens

    @property
    def runs(self) -> int:
        return self.runs_of(self.rows)

    def runs_of(self, tokens: int) -> int:
        """Runs that hold the first `tokens` tokens."""
        return -(-tokens // self.run)

    def first_run(self, layer: int) -> int:
        """The first run of a layer that is saved."""
        last = self.shape.last_of(layer)
        return max(0, self.tokens - last) // self.run if last else 0

    def first_token(self, layer: int) -> int:
        """Its first token, counted in the segment."""
        return self.first_run(layer) * self.run

    def bounds(self, run: int) -> tuple[int, int]:
        """The first token of a run, and the one behind its last, counted in the segment."""
        return run * self.run, min((run + 1) * self.run, self.rows)

    @property
    def sums_bytes(self) -> int:
        """Bytes of the checksums."""
        return 8 * self.shape.num_layers * self.heads * self.runs


def chained(chain: str, token_ids: Sequence[int]) -> str:
    """The hash of `chain` and the token ids after it; the first chain of a context is its model's fingerprint."""
    return xxhash.xxh3_128_hexdigest(chain.encode() + np.asarray(token_ids, dtype="<i4").tobytes())
