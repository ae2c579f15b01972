"""The fingerprint of a model: what keys and values depend on. KV of another fingerprint is never used."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash
from filelock import FileLock, Timeout

from ...tp.weights.weight_files import weight_files
from .disk import Disk

if TYPE_CHECKING:
    import torch

    from ...tp.model.config import ModelConfig

_CACHE = ".fingerprints.json"
"""A name that no context can have."""

_NOT_IN_KV = ("name", "eos_token_ids", "dtype", "max_position_embeddings", "dual_chunk", "further_layers", "is_head")
"""What a configuration says beyond keys and values; the number format in use counts, not the checkpoint's."""

_LATER = (
    "quantisation",
    "experts",
    "activation",
    "float32_norms",
    "zero_centred_norms",
    "norms_behind",
    "scaled_embedding",
    "query_scalar",
    "window_rope",
    "linear",
    "output_gate",
    "rotary_dim",
)
"""What says nothing where a model does not have it, or texts that were saved before there was such a thing would not be
found."""


def fingerprint(directory: Path, config: ModelConfig, dtype: torch.dtype, store: Path, disk: Disk) -> str:
    """The hash of a model's weights, configuration (its RoPE scaling among it) and number format.

    Hashing the weights reads them once; their hashes are kept in `store` by name, size and time of change.

    Raises:
        ModelError: see `weight_files`.
    """
    described = {name: value for name, value in asdict(config).items() if name not in _NOT_IN_KV}
    for field in fields(config):
        if field.name in _LATER and described[field.name] == field.default:
            del described[field.name]
    if config.quantisation is not None:
        described["quantisation"] |= {"kind": type(config.quantisation).__name__}
        if forms := described["quantisation"].get("forms"):
            described["quantisation"]["forms"] = [one for one in forms if not one[0].startswith("mtp.")]
    if config.experts is not None:
        del described["experts"]["names"]
        if not config.experts.shared_width:
            del described["experts"]["shared_width"]
    if config.linear is not None:
        del described["linear"]["names"]
    described |= {"dtype": str(dtype), "weights": _weight_hashes(weight_files(directory), store, disk)}
    return xxhash.xxh3_128_hexdigest(json.dumps(described, sort_keys=True).encode())


def _weight_hashes(files: list[Path], store: Path, disk: Disk) -> list[str]:
    known = _known(store / _CACHE)
    found = {}
    for path in files:
        stat = path.stat()
        key = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"
        found[key] = known.get(key) or _hash(path)
    if store.is_dir() and not found.keys() <= known.keys():
        # Where it cannot be written, or another process does so now, they are hashed again next time.
        with suppress(OSError, Timeout), FileLock(store / f"{_CACHE}.lock", timeout=0, mode=0o600):
            content = json.dumps(known | found)
            disk.write_whole(store / _CACHE, json.dumps([content, xxhash.xxh3_64_hexdigest(content.encode())]).encode())
    return sorted(found.values())  # shards may have other names in another copy


def _known(path: Path) -> dict[str, str]:
    try:
        content, checksum = json.loads(path.read_bytes())
        return dict(json.loads(content)) if checksum == xxhash.xxh3_64_hexdigest(content.encode()) else {}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _hash(path: Path) -> str:
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            state.update(piece)
    return state.hexdigest()
