"""Segment files read by the safetensors library and, where they are packed, as docs/contexts.md describes them: the
oracle for what is restored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from triforce.kernels import Layout
from triforce.kernels.packing import unpack_plain


class Half(NamedTuple):
    """The keys (`half` 0) or values (1) of one head at up to 512 positions, in a layer's bytes of a packed segment."""

    head: int
    run: int
    half: int
    packed: bool
    start: int
    size: int
    tokens: int
    layout: Layout


def halves(packed: Tensor, tokens: int, head_dim: int) -> Iterator[Half]:
    """Those of a layer in the order in which they lie. `packed` `[heads, runs, 2]` says which are slots."""
    at = 0
    for head in range(packed.shape[0]):
        at = -(-at // 4096) * 4096
        for run in range(packed.shape[1]):
            here = min(512, tokens - 512 * run)
            layout = Layout(1, -(-here // 64) * 64, head_dim)
            for half in (0, 1):
                is_slot = bool(packed[head, run, half])
                size = layout.slot_bytes if is_slot else -(-here * head_dim * 2 // 64) * 64
                yield Half(head, run, half, is_slot, at, size, here, layout)
                at += size


def flags_of(tensor: Tensor, layers: int, heads: int, tokens: int) -> Tensor:
    """`[layers, heads, runs, 2]` bool of a file's tensor `packed`."""
    runs = -(-tokens // 512)
    return tensor[: layers * heads * runs * 2].view(layers, heads, runs, 2).bool()


def decoded(path: Path, head_dim: int) -> list[Tensor]:
    """Keys and values of each layer of a segment's file `[heads, 2, tokens, head_dim]`."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors, tokens = load_file(path), int(metadata["tokens"])
    layers = [tensors[f"layer.{layer}"] for layer in range(sum(name.startswith("layer.") for name in tensors))]
    if metadata["format"] == "triforce-kv-1":
        return [layer[:, :, :tokens] for layer in layers]
    first, stop = map(int, metadata["kv_heads"].split(" ")[0].split(":"))
    flags, found = flags_of(tensors["packed"], len(layers), stop - first, tokens), []
    for layer, packed in zip(layers, flags, strict=True):
        values = torch.empty(stop - first, 2, tokens, head_dim, dtype=torch.bfloat16)
        for one in halves(packed, tokens, head_dim):
            content = layer[one.start : one.start + one.size].clone()
            block = torch.empty(1, 1, one.layout.tokens, head_dim, dtype=torch.bfloat16)
            if one.packed:
                unpack_plain(content.view(1, -1), block, one.layout)
            else:
                block = content[: one.tokens * head_dim * 2].view(torch.bfloat16).view(1, 1, -1, head_dim)
            values[one.head, one.half, 512 * one.run :][: one.tokens] = block[0, 0, : one.tokens]
        found.append(values)
    return found


def decoded_context(directory: Path) -> list[Tensor]:
    """Keys and values of each layer of a saved context `[2, heads, tokens, head_dim]`, of one that is whole."""
    manifest = json.loads((directory / "manifest.json").read_bytes())
    segments = []
    for segment in manifest["segments"]:
        parts = [decoded(directory / part["file"], manifest["shape"]["head_dim"]) for part in segment["parts"]]
        segments.append([torch.cat(layer) for layer in zip(*parts, strict=True)])
    return [torch.cat(layer, dim=2).transpose(0, 1) for layer in zip(*segments, strict=True)]
