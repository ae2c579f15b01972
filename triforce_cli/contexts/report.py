"""Saved contexts as a table, as lines, and as JSON."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from ...offload.contexts.manifest import ContextError
from ...offload.contexts.store import ContextStore
from ...tp.units import gib
from ..terminal.tables import make_table, print_lines

if TYPE_CHECKING:
    from rich.console import Console


def describe_all(store: ContextStore) -> list[dict[str, Any]]:
    """One description each; of a context that cannot be read, its name and the reason."""
    found = []
    for name in store.names():
        try:
            found.append(describe(store, name))
        except ContextError as error:
            found.append({"name": name, "damaged": str(error)})
    return found


def describe(store: ContextStore, name: str) -> dict[str, Any]:
    """Raises:
    ContextError: see `ContextStore.load`.
    """
    manifest = store.load(name)
    return {
        "name": name,
        "model": manifest.model,
        "dtype": manifest.shape.dtype,
        "arithmetic": manifest.arithmetic,
        "tokens": manifest.saved,
        "planned_tokens": manifest.tokens,
        "kv_bytes": manifest.kv_bytes,
        "disk_bytes": store.disk_bytes([name]),
        "segments": len(manifest.segments),
        "packed_segments": manifest.packed_segments,
        "complete": manifest.complete,
        "chat": manifest.frame.chat,
        "conversation": manifest.frame.answered,
        "created": manifest.created,
        "used": store.used(name),
    }


def show_list(described: list[dict[str, Any]], store: ContextStore, console: Console | None = None) -> None:
    """Args: `console` is where to, if not to stdout."""
    from rich.console import Console

    console = console or Console(file=sys.stdout, highlight=False)
    if not described:
        print_lines(console, [f"no contexts in {store.root}; triforce read FILE saves one"])
        return
    titles = ("name", "model", "tokens", "on disk", "used")
    rows = [_cells(one) for one in described]
    console.print(make_table(titles, rows, left=("name", "model", "used")))
    quota = f" of {gib(store.most_bytes)} (TRIFORCE_CONTEXTS_MAX)" if store.most_bytes is not None else ""
    total = (
        f"{gib(store.disk_bytes())}{quota} in {store.root}, {gib(store.free_bytes())} free; what several share counts"
    )
    print_lines(console, ["", f"{total} once"])


def _cells(one: dict[str, Any]) -> list[str]:
    if "damaged" in one:
        return [one["name"], "damaged", "-", "-", "-"]
    tokens = f"{one['tokens']:,}" + ("" if one["complete"] else f" of {one['planned_tokens']:,}")
    return [one["name"], f"{one['model']}, {one['dtype']}", tokens, gib(one["disk_bytes"]), _when(one["used"])]


def show_one(one: dict[str, Any], store: ContextStore) -> None:
    from rich.console import Console

    unfinished = "" if one["complete"] else f" of {one['planned_tokens']:,}; triforce read goes on from there"
    place = "a user's message, which a question ends" if one["chat"] else "as it is"
    place = "a conversation, which a question continues" if one["conversation"] else place
    packed = f"{one['packed_segments']} of them packed" if one["packed_segments"] else "none packed"
    lines = [
        f"context   {one['name']} in {store.directory(one['name'])}",
        f"model     {one['model']}, {one['dtype']}",
        f"tokens    {one['tokens']:,}{unfinished}",
        f"text      {place}",
        f"on disk   {gib(one['disk_bytes'])} in {one['segments']} segments, {packed}; KV cache {gib(one['kv_bytes'])}",
        f"saved     {_when(one['created'])}, used {_when(one['used'])}",
    ]
    print_lines(Console(file=sys.stdout, highlight=False), lines)


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
