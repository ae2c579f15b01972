"""How the GPUs of this machine are connected: over PCIe to the host, and to one another by what NCCL can use.

Said is only what is known without running NCCL: which of its transports it takes where two cards have peer access
depends on the board, and `NCCL_DEBUG=INFO` tells.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

PCI_DEVICES = Path("/sys/bus/pci/devices")
"""Where Linux has a folder for each PCI device, named by its address."""

_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
"""Of PCIe, by transfers a second of a lane, in 10^9."""


@dataclass(frozen=True)
class PcieLink:
    """A card's connection to the host, as it is now, and the most that the card can do. A card that has nothing to do
    may lower the generation until it has; the width stays."""

    generation: int
    width: int
    """Lanes."""
    max_generation: int
    max_width: int

    def __str__(self) -> str:
        return f"PCIe {self.generation}.0 x{self.width} of {self.max_generation}.0 x{self.max_width}"


def pcie_link(address: str, devices: Path = PCI_DEVICES) -> PcieLink | None:
    """The link of the card at a PCI address; `None` where the system does not tell, as in some virtual machines.

    Args: `devices` has a folder for each address, with sysfs's files.
    """
    try:
        speeds, widths = (
            [(devices / address / f"{which}_link_{what}").read_text(encoding="ascii") for which in ("current", "max")]
            for what in ("speed", "width")
        )
        now, most = (_GENERATIONS[float(speed.split()[0])] for speed in speeds)  # such as "16.0 GT/s PCIe"
        width, max_width = map(int, widths)
    except (OSError, ValueError, KeyError, IndexError):
        return None
    return PcieLink(now, width, most, max_width) if 0 < width <= 32 else None


def pci_address(properties: Any) -> str | None:
    """The PCI address of a device by its properties (of `torch.cuda.get_device_properties`); `None` if unknown."""
    try:
        return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except (AttributeError, TypeError, ValueError):
        return None


@dataclass(frozen=True)
class GpuPair:
    """Two GPUs, by their numbers, and what NCCL can do between them."""

    first: int
    second: int
    access: bool
    """Whether each can read the other's memory."""
    transport: str | None
    """`SHM` (shared host memory) or `NET` (network sockets), where that is certain; `None` where NCCL decides by the
    topology whether it uses peer access."""


def gpu_pairs(
    gpus: Sequence[int], can_access: Callable[[int, int], bool], environment: Mapping[str, str] = os.environ
) -> list[GpuPair]:
    """All pairs of the GPUs of these numbers.

    Args:
        can_access: whether the first can read the second one's memory.
        environment: where `NCCL_P2P_DISABLE` and `NCCL_SHM_DISABLE` are; NCCL takes 1 for yes.
    """
    p2p, shm = (environment.get(name, "").strip() != "1" for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"))
    found = []
    for first, second in combinations(gpus, 2):
        access = can_access(first, second) and can_access(second, first)
        transport = None if access and p2p else "SHM" if shm else "NET"
        found.append(GpuPair(first, second, access, transport))
    return found


def pairs_in_words(pairs: Sequence[GpuPair]) -> str:
    """What NCCL can do between GPUs, those alike together."""
    kinds: dict[tuple[bool, str | None], list[str]] = {}
    for pair in pairs:
        kinds.setdefault((pair.access, pair.transport), []).append(f"{pair.first}-{pair.second}")
    ways = {
        None: "NCCL uses it where the topology allows",
        "SHM": "NCCL goes through host memory (SHM)",
        "NET": "NCCL goes through the network (NET), as NCCL_SHM_DISABLE is 1",
    }
    words = []
    for (access, transport), names in kinds.items():
        there = "peer access" if access else "no peer access"
        forbidden = ", which NCCL_P2P_DISABLE forbids" if access and transport else ""
        words.append(f"{there} between GPUs {', '.join(names)}{forbidden}: {ways[transport]}")
    return "; ".join(words)


def nccl_version() -> str | None:
    """NCCL's version as PyTorch has it; `None` without."""
    try:
        from torch.cuda import nccl

        return ".".join(map(str, nccl.version()))
    except Exception:  # a PyTorch without NCCL fails in several ways
        return None


def connection_in_words(gpus: int) -> str:
    """NCCL's version, and what it can do between the first `gpus` GPUs of this machine, if this process sees them."""
    import torch

    words = [f"NCCL {nccl_version() or 'of unknown version'}"]
    if torch.cuda.device_count() >= gpus > 1:
        words.append(pairs_in_words(gpu_pairs(range(gpus), torch.cuda.can_device_access_peer)))
    return "; ".join(words)
