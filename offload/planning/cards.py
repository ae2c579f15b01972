"""GPUs for which a run can be planned without having one: memory, bandwidth, speed and link.

Sources. Memory is what PyTorch reports for the card in out-of-memory messages ("GPU 0 has a total capacity of ..."). If
reports differ, it is the smaller figure. It is less than the advertised memory, as driver and error correction take a
part. Bandwidth and operations are NVIDIA's figures: for GeForce and RTX cards from the Ampere, Ada and Blackwell
architecture papers (FP16 with FP32 accumulation, dense), for the others from the product data sheets (half of a figure
given "with sparsity").
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PCIE4 = 24.5
"""GB/s of PCIe 4.0 x16 from page-locked memory, as measured on RTX 4090 (24 to 26). The specification gives 31.5."""

PCIE5 = 49.0
"""GB/s of PCIe 5.0 x16: twice the rate per lane, with the same efficiency."""

DISK_BANDWIDTH = 5e9
"""Bytes per second of large direct reads. Assumed for an NVMe disk on four lanes of PCIe 4.0. Data sheets say 7e9 and
more (Samsung 990 PRO: 7.45e9)."""


@dataclass(frozen=True)
class Card:
    """A GPU, or a machine that was measured (`Measured.card`)."""

    name: str
    memory_gib: float
    """Total memory in GiB."""
    memory_gb_per_s: float
    """Memory bandwidth in GB/s."""
    tflops: float
    """16-bit matrix products, dense, in TFLOP/s."""
    link_gb_per_s: float
    """Bandwidth from the host in practice, in GB/s."""


CARDS = {
    "rtx3090": Card("NVIDIA GeForce RTX 3090", 23.68, 936, 71, PCIE4),
    "rtx4090": Card("NVIDIA GeForce RTX 4090", 23.64, 1008, 165.2, PCIE4),
    "rtx5090": Card("NVIDIA GeForce RTX 5090", 31.34, 1792, 209.5, PCIE5),
    "rtx-a6000": Card("NVIDIA RTX A6000", 47.40, 768, 154.8, PCIE4),
    "l4": Card("NVIDIA L4", 22.03, 300, 121, PCIE4),
    "l40s": Card("NVIDIA L40S", 44.39, 864, 362, PCIE4),
    "a100-40gb": Card("NVIDIA A100 40GB", 39.38, 1555, 312, PCIE4),
    "a100-80gb": Card("NVIDIA A100 80GB SXM", 79.14, 2039, 312, PCIE4),
    "h100": Card("NVIDIA H100 80GB SXM", 79.18, 3350, 989, PCIE5),
    "h200": Card("NVIDIA H200 SXM", 139.72, 4800, 989, PCIE5),
}
"""The cards by their value for `--gpu`."""

DEFAULT_CARD = "rtx4090"
"""The card for a device that is not in the table."""


_NAMES = {
    "rtx3090": r"RTX 3090(?! Ti)",
    "rtx4090": r"RTX 4090(?! D)",
    "rtx5090": r"RTX 5090(?! D)",
    "rtx-a6000": r"RTX A6000",
    "l4": r"L4\b",
    "l40s": r"L40S?\b",
    "a100-40gb": r"A100.*40GB",
    "a100-80gb": r"A100.*80GB",
    "h100": r"H100\b",
    "h200": r"H200\b",
}
"""Patterns that recognise a card in its driver's name (`NVIDIA A100-SXM4-80GB`, `NVIDIA H100 80GB HBM3`)."""


def card_named(device_name: str) -> Card:
    """The card for a driver's device name; the default card if the device is not in the table."""
    found = (word for word, pattern in _NAMES.items() if re.search(pattern, device_name))
    return CARDS[next(found, DEFAULT_CARD)]
