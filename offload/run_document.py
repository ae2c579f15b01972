"""The JSON of a run: models and settings, current draft lengths, and measurements. docs/json.md describes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from typing import Any

from ..kernels.cpu.library import arithmetic, instructions
from ..kernels.packages import usable_packages
from ..tp.decoder import Decoder
from ..tp.devices import device_name
from .settings import Settings
from .speculation.sampling import Sampling
from .statistics import Statistics, ratio
from .transfer.link import Traffic

version = cache(metadata.version)
"""The version of an installed package. Cached, as looking it up reads files."""


def run_identity(
    target: Decoder,
    names: tuple[str, str | None],
    settings: Settings,
    sampling: Sampling,
    *,
    tiers: int,
    seed: int,
    budget: int,
    exact: bool,
    resident_bytes: int,
    disk_bytes: int,
    packed: bool,
) -> dict[str, Any]:
    """The part of a run's JSON that is not measured.

    Args:
        names: the names of target and draft.
        tiers, budget: those of this run; the budget in tokens, 0 without a retrieval cache.
        seed: the seed that the run draws with, given or drawn.
        exact: whether the tokens cannot depend on draft lengths and tiers.
        resident_bytes, disk_bytes: the bytes of the KV cache on the device and on a disk.
        packed: whether keys and values that stream are packed.
    """
    device = target.device
    return {
        "version": version("triforce-cli"),
        "model": names[0],
        "draft": names[1] if tiers == 3 else None,
        "device": device.type,
        "device_name": device_name(device),
        "world_size": target.ranks.size,
        "kernels": instructions() if device.type == "cpu" else " ".join(sorted(usable_packages(device))) or None,
        "arithmetic": arithmetic(device.type),
        "dtype": str(target.dtype).removeprefix("torch."),
        **({"weights": target.config.quantisation.name} if target.config.quantisation else {}),
        "seed": seed,
        "sampling": sampling.filters,
        "settings": {
            "tiers": tiers,
            "budget": budget,
            "chunk_size": settings.planned_chunk_size,
            "refresh": settings.refresh,
            "exact": exact,
            "resident_bytes": resident_bytes,
            "disk_bytes": disk_bytes,
            "packed": packed,
            **({"rope_scaling": settings.rope_scaling} if settings.rope_scaling else {}),
        },
    }


def run_document(
    identity: Mapping[str, Any], statistics: Statistics, lengths: Mapping[str, int], warnings: Sequence[str]
) -> dict[str, Any]:
    """The JSON of a run that is finished or in progress.

    Args:
        identity: the part that is not measured: versions, models, device, sampling, `settings`.
        lengths: the current draft lengths, which are added to `settings`.
        warnings: one line each.
    """
    settings = {**identity["settings"], **lengths}
    return {**identity, **_measured(statistics), "settings": settings, "warnings": list(warnings)}


def batch_document(whole: Statistics, documents: Sequence[dict[str, Any]], warnings: Sequence[str]) -> dict[str, Any]:
    """The JSON of a batch.

    Args:
        whole: the statistics of all its sequences together.
        documents: the JSON of each sequence; short for a sequence that could not be answered.
        warnings: one line each.
    """
    begun = [document for document in documents if "version" in document]
    shared = (
        "version",
        "model",
        "draft",
        "device",
        "device_name",
        "world_size",
        "kernels",
        "arithmetic",
        "dtype",
        "weights",
    )
    return {
        **{name: begun[0][name] for name in shared if begun and name in begun[0]},
        "new_tokens": len(whole.token_ids),
        "prefill_s": whole.prefill_s,
        "decode_s": whole.decode_s,
        "tokens_per_s": whole.tokens_per_s,
        "rounds": whole.rounds,
        "link": link_document(whole.link),
        "disk": disk_document(whole.link),
        "memory": memory_document(whole.device_peak_bytes, whole.host_peak_bytes, whole.kv_bytes),
        "settings": begun[0]["settings"] if begun else {},
        "warnings": list(warnings),
        "sequences": list(documents),
    }


def _measured(s: Statistics) -> dict[str, Any]:
    return {
        "prompt_tokens": s.prompt_tokens,
        "reused_tokens": s.reused_tokens,
        "new_tokens": len(s.token_ids),
        "token_ids": list(s.token_ids),
        "finish_reason": s.finish_reason,
        "prefill_s": s.prefill_s,
        "ttft_s": s.ttft_s,
        "decode_s": s.decode_s,
        "tbt_ms": {
            "mean": s.tbt_s * 1e3,
            "p50": s.tbt_percentile(50) * 1e3,
            "p95": s.tbt_percentile(95) * 1e3,
            "p99": s.tbt_percentile(99) * 1e3,
        },
        "tokens_per_s": s.tokens_per_s,
        "rounds": s.rounds,
        "plain_rounds": s.plain_rounds,
        "acceptance": {
            "draft": ratio(s.draft_accepted, s.draft_proposed),
            "retrieval": ratio(s.retrieval_accepted, s.retrieval_proposed),
            "draft_per_token": s.draft_acceptance,
            "retrieval_per_token": s.retrieval_acceptance,
            "tokens_per_round": s.tokens_per_round,
            "draft_tokens_per_round": s.retrieval_proposed / s.rounds if s.rounds else 0.0,
        },
        "time_s": {
            "draft": s.draft_s,
            "retrieval": s.retrieval_s,
            "verify": s.verify_s,
            "refresh": s.refresh_s,
            "other": s.other_s,
        },
        "link": link_document(s.link),
        "disk": disk_document(s.link),
        "kv_read": {
            "bytes": s.kv_read_bytes,
            "s": s.kv_read_s,
            "gb_per_s": s.kv_read_bytes / s.kv_read_s / 1e9 if s.kv_read_s else None,
        },
        "memory": memory_document(s.device_peak_bytes, s.host_peak_bytes, s.kv_bytes),
    }


def link_document(traffic: Traffic) -> dict[str, Any]:
    """The part of the JSON about the traffic over the link."""
    return {
        "bytes_streamed": traffic.bytes_in,
        "bytes_written_back": traffic.bytes_out,
        "busy_s": traffic.busy_s,
        "waited_s": traffic.waited_s,
        "gb_per_s": traffic.bytes_in / traffic.busy_s / 1e9 if traffic.busy_s else None,
    }


def disk_document(traffic: Traffic) -> dict[str, Any]:
    """The part of the JSON about reads and writes of the KV cache that is on a disk."""
    seconds = traffic.disk_busy_s
    return {
        "bytes_read": traffic.disk_bytes_in,
        "bytes_written": traffic.disk_bytes_out,
        "busy_s": seconds,
        "waited_s": traffic.disk_waited_s,
        "gb_per_s": traffic.disk_bytes_in / seconds / 1e9 if seconds else None,
    }


def memory_document(device_peak: int, host_peak: int, kv: int) -> dict[str, Any]:
    """The part of the JSON about memory in bytes: the peaks on device and host, and the size of keys and values."""
    return {"device_peak_bytes": device_peak, "host_peak_bytes": host_peak, "kv_bytes": kv}
