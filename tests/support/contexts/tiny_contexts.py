"""Saved contexts of a tiny model: one engine that starts on any store as a new process would, and what it must say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from decoded import decoded_context
from tiny import random_tokens, save_llama
from triforce.offload import ContextError, ContextRequest, ContextStore, Engine, Sampling
from triforce.offload.contexts.disk import Disk

SEGMENT = 64
"""Tokens of a segment."""

NAME = "book"
TEXT = random_tokens(150, seed=11)
"""Two whole segments and a part of a third."""

HEAD_DIM = 16

QUESTION = random_tokens(12, seed=12)
NEW_TOKENS = 6
SAMPLINGS = (Sampling(temperature=0.0), Sampling(temperature=1.0, seed=7))

_REMEDY = re.compile(r"triforce contexts rm|read the text again|update triforce|another name|there are: ")


def save_tiny_model(directory: Path) -> Path:
    """Writes a model of two layers with two KV heads."""
    save_llama(directory, seed=1, num_hidden_layers=2, num_key_value_heads=2)
    return directory


MARKER = ".triforce-context"
"""An empty file in a context's directory that says whose it is."""


def store_at(root: Path, disk: Disk | None = None, most_bytes: int | None = None) -> ContextStore:
    return ContextStore(root, most_bytes, segment_tokens=SEGMENT, disk=disk)


class TinyContexts:
    """An engine, and what it answers to `TEXT` and `QUESTION` with nothing saved."""

    def __init__(self, model: Path, *, packed: bool = False) -> None:
        """Args: `packed`: in bfloat16, with packed contexts; else in float32."""
        self.model, self.packed = model, packed
        kind: dict[str, Any] = {"dtype": "bfloat16", "pack": "on"} if packed else {"dtype": "float32"}
        self.engine = Engine.load(model, "none", device="cpu", **kind, budget=32, store=store_at(Path("none")))
        prompt = TEXT + QUESTION
        self.want = [self.engine.generate(prompt, s, NEW_TOKENS, reuse=0).token_ids for s in SAMPLINGS]

    def on(self, root: Path, disk: Disk | None = None, most_bytes: int | None = None) -> Engine:
        """The engine as if it had just been loaded, with the contexts in `root`."""
        engine = self.engine
        engine._end_run()
        engine._kept.forget_all()
        assert engine.contexts
        engine.contexts.store = store_at(root, disk, most_bytes)
        return engine

    def read(self, root: Path, tokens: list[int] = TEXT, name: str = NAME, disk: Disk | None = None) -> None:
        self.on(root, disk).read(tokens, name)

    def ask(
        self, root: Path, name: str = NAME, which: int = 0, disk: Disk | None = None, undamaged: Path | None = None
    ) -> str:
        """Asks what is saved in `root`: the tokens must be those of a fresh reading, or the refusal must name the
        context and a remedy. The outcome in a word.

        In bfloat16 a fresh reading may round otherwise: there, what is restored must be what is in the files of
        `undamaged`, which is `root` itself by default.
        """
        request = ContextRequest(name=name)
        try:
            result = self.on(root, disk).generate(TEXT + QUESTION, SAMPLINGS[which], NEW_TOKENS, contexts=request)
        except ContextError as error:
            assert name in str(error) and _REMEDY.search(str(error)), f"no help: {error}"
            return "refused"
        warnings, reused = result.stats["warnings"], result.stats["reused_tokens"]
        if self.packed:
            self._check_restored((undamaged or root) / name, reused)
        else:
            assert result.token_ids == self.want[which], f"other tokens: {result.token_ids}, not {self.want[which]}"
        assert all(name in line for line in warnings), warnings
        assert bool(warnings) or reused == store_at(root).load(name).saved
        return "damaged" if warnings else "whole"

    def _check_restored(self, directory: Path, tokens: int) -> None:
        cache = self.engine._kept.caches[-1]
        for layer, want in enumerate(decoded_context(directory) if tokens else []):
            found = torch.cat(cache.blocks.export(layer, 0, tokens)(), dim=2)
            same = found.view(torch.int16) == want[:, :, :tokens].contiguous().view(torch.int16)
            assert bool(same.all()), f"other keys or values in layer {layer}: {(~same).nonzero()[0].tolist()}"


def assert_whole(root: Path, tokens: list[int] = TEXT, name: str = NAME) -> None:
    """The context holds these tokens, every checksum is right, and its directory has no other files."""
    store = store_at(root)
    manifest = store.load(name)
    assert manifest.saved == manifest.tokens == len(tokens)
    assert store.token_ids(name) == tokens
    assert [wrong for _, wrong in store.verify(name) if wrong] == []
    named = {"manifest.json", *(part.file for segment in manifest.segments for part in segment.parts)}
    assert {path.name for path in (root / name).iterdir() if not path.is_dir()} - {MARKER} == named
