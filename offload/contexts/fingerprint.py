"""The fingerprint of a model: a hash of everything that keys and values depend on, except the tokens.

Keys and values with another fingerprint are never used.
"""

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
"""The file with the hashes of weight files. No context can have this name."""

_NOT_IN_KV = ("name", "eos_token_ids", "dtype", "max_position_embeddings", "dual_chunk", "further_layers", "is_head")
"""Fields of a configuration that do not change keys and values. `dtype` is the checkpoint's number format; the hash has
the number format of the run instead."""

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
"""Fields that are left out of the hash if they have their default value. Earlier versions did not know these fields, so
contexts that they saved are still found."""


def fingerprint(directory: Path, config: ModelConfig, dtype: torch.dtype, store: Path, disk: Disk) -> str:
    """The hash of a model's weights, configuration (including its RoPE scaling) and number format.

    The weight files are read once. Their hashes are kept in the directory `store`, by path, size and times of change.

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
        # If the file cannot be written, or another process is writing it, the weights are hashed again next time.
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
