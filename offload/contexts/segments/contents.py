"""The contents of a segment's files.

A segment holds the keys and values of up to `SEGMENT` consecutive tokens of a context. A file holds those of all KV
heads or of some. If the model has linear attention, separate files hold the states after the last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from ....kernels.slots import Layout

SEGMENT = 16_384
"""Tokens of a segment. The last segment of a context may have fewer."""

RUN = 1024
"""Positions in a run, if the segment is not packed. A run (a *span* in docs/contexts.md) is a fixed number of
consecutive positions of one KV head in one layer. It has one checksum."""

PACKED_RUN = 512
"""Positions in a run, if the segment is packed. The keys of a run are packed together, and so are its values. Blocks
that stream to GPUs are whole multiples of it, if this number of positions is whole chunks."""

DTYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}
"""For each number format, its name in safetensors and the bytes of a number."""

PACKABLE = "bfloat16"
"""The number format that can be packed."""


class DamagedError(Exception):
    """A file does not hold what it must. The message says what is wrong, without the name of the file."""


STATE_ROW = 16
"""Numbers in a row of a file with states."""


@dataclass(frozen=True)
class StatesShape:
    """The shape of the states of a whole model's layers with linear attention."""

    num_layers: int
    """Layers with linear attention."""
    key_heads: int
    numbers: int
    """Values of one key head in one layer, float32: see `caches.states.States.export`."""

    @property
    def rows(self) -> int:
        """Rows of each half of a key head in a layer. Its values are divided into two halves, like keys and values."""
        return -(-self.numbers // (2 * STATE_ROW))

    @property
    def num_bytes(self) -> int:
        """Bytes of the states after one token."""
        return 4 * self.num_layers * self.key_heads * self.numbers

    @property
    def as_rows(self) -> Shape:
        """The shape of a file with states."""
        return Shape(self.num_layers, self.key_heads, STATE_ROW, "float32")


@dataclass(frozen=True)
class Shape:
    """The shape of the keys and values that a whole model has for a token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    """PyTorch's name of the number format, such as `bfloat16`."""
    last_tokens: tuple[int, ...] = ()
    """For each layer, how many of a segment's last tokens are saved; 0: all. If empty: all tokens in all layers."""
    states: StatesShape | None = None
    """The states that are saved after the last token of each segment; `None` without linear attention."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a key, or of a value."""
        return self.head_dim * DTYPES[self.dtype][1]

    def kv_bytes(self, tokens: int, segment_tokens: int) -> int:
        """Bytes of the saved keys, values and states of `tokens` tokens in segments of `segment_tokens`, not packed."""
        return self._kv_bytes(tokens, segment_tokens) + self._state_bytes(tokens, segment_tokens)

    def _state_bytes(self, tokens: int, segment_tokens: int) -> int:
        return -(-tokens // segment_tokens) * self.states.num_bytes if self.states else 0

    def _kv_bytes(self, tokens: int, segment_tokens: int) -> int:
        whole, rest = divmod(tokens, segment_tokens)
        lasts = [self.last_of(layer) for layer in range(self.num_layers)]
        kept = sum(whole * min(last, segment_tokens) + min(last, rest) if last else tokens for last in lasts)
        return 2 * self.num_kv_heads * self.row_bytes * kept

    def last_of(self, layer: int) -> int:
        """The entry of a layer in `last_tokens`; 0 if it is empty."""
        return self.last_tokens[layer] if self.last_tokens else 0

    def saved_bytes(self, tokens: int, segment_tokens: int, packed: bool) -> int:
        """About how many bytes keys, values and states take in files, where whole runs are saved. If `packed`, all runs
        are counted as packed."""
        share = Layout(1, PACKED_RUN, self.head_dim).slot_bytes / (PACKED_RUN * self.row_bytes) if packed else 1
        beside = (PACKED_RUN if packed else RUN) - 1
        whole = replace(self, last_tokens=tuple(last and last + beside for last in self.last_tokens))
        states = self._state_bytes(tokens, segment_tokens)
        return round(whole._kv_bytes(tokens, segment_tokens) * share) + states


@dataclass(frozen=True)
class Contents:
    """The description of what a segment's file holds."""

    shape: Shape
    fingerprint: str
    """The fingerprint of the model, see `fingerprint`."""
    first: int
    """Position of the first token."""
    tokens: int
    chain: str
    """A hash of all token ids from the start of the context to the segment's end, see `chained`."""
    kv_heads: tuple[int, int]
    """The first KV head in the file, and the last plus 1, as numbers in the model. In a file with states: key heads."""
    packed: bool = False
    """Whether keys and values are packed wherever this takes less space; only in bfloat16."""
    state_rows: int = 0
    """In a file with states: `StatesShape.rows`. It has no token ids. 0 in other files."""

    @property
    def heads(self) -> int:
        """Number of heads in the file."""
        return self.kv_heads[1] - self.kv_heads[0]

    @property
    def run(self) -> int:
        """Positions in a run, see `RUN` and `PACKED_RUN`."""
        return PACKED_RUN if self.packed else RUN

    @property
    def rows(self) -> int:
        """Rows of the keys, or of the values, of a head: one for each token. In a file with states: `state_rows`."""
        return self.state_rows or self.tokens

    @property
    def ids_bytes(self) -> int:
        """Bytes of the token ids."""
        return 0 if self.state_rows else 4 * self.tokens

    @property
    def runs(self) -> int:
        """Number of runs of a head in a layer. The last run may be shorter."""
        return self.runs_of(self.rows)

    def runs_of(self, tokens: int) -> int:
        """Number of runs that hold the first `tokens` tokens."""
        return -(-tokens // self.run)

    def first_run(self, layer: int) -> int:
        """The first run of a layer that is saved."""
        last = self.shape.last_of(layer)
        return max(0, self.tokens - last) // self.run if last else 0

    def first_token(self, layer: int) -> int:
        """The first token of the first saved run of a layer, counted from the start of the segment."""
        return self.first_run(layer) * self.run

    def bounds(self, run: int) -> tuple[int, int]:
        """The first token of a run, and its last plus 1, counted from the start of the segment."""
        return run * self.run, min((run + 1) * self.run, self.rows)

    @property
    def sums_bytes(self) -> int:
        """Bytes of the checksums."""
        return 8 * self.shape.num_layers * self.heads * self.runs


def chained(chain: str, token_ids: Sequence[int]) -> str:
    """The hash of `chain` and the token ids after it. The chain before a context's first token is the fingerprint."""
    return xxhash.xxh3_128_hexdigest(chain.encode() + np.asarray(token_ids, dtype="<i4").tobytes())
