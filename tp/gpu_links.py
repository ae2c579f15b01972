"""How the GPUs of this machine are connected: over PCIe to the host, and to one another by what NCCL can use.

Only what is known without running NCCL is reported. If two GPUs have peer access, the transport that NCCL uses depends
on the board; `NCCL_DEBUG=INFO` shows it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

PCI_DEVICES = Path("/sys/bus/pci/devices")
"""The folder in which Linux has a folder for each PCI device, named by its address."""

_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
"""PCIe generation by transfers per second and lane, in 10^9."""


@dataclass(frozen=True)
class PcieLink:
    """A card's present connection to the host, and the maximum that the card supports. An idle card may lower the
    generation while it is idle; the width stays the same."""

    generation: int
    width: int
    """Number of lanes."""
    max_generation: int
    max_width: int
    """Maximum number of lanes."""

    def __str__(self) -> str:
        return f"PCIe {self.generation}.0 x{self.width} of {self.max_generation}.0 x{self.max_width}"


def pcie_link(address: str, devices: Path = PCI_DEVICES) -> PcieLink | None:
    """The link of the card at a PCI address; `None` if the system does not report it, as in some virtual machines.

    Args:
        address: the PCI address, see `pci_address`.
        devices: has a folder for each address, with sysfs's files.
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
    """The PCI address of a device, from its properties (`torch.cuda.get_device_properties`); `None` if unknown."""
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
    """`SHM` (shared host memory) or `NET` (network sockets), if this is certain. `None` if NCCL decides by the topology
    whether it uses peer access."""


def gpu_pairs(
    gpus: Sequence[int], can_access: Callable[[int, int], bool], environment: Mapping[str, str] = os.environ
) -> list[GpuPair]:
    """All pairs of the GPUs with these numbers.

    Args:
        can_access: whether the first GPU can read the memory of the second.
        environment: may have `NCCL_P2P_DISABLE` and `NCCL_SHM_DISABLE`; 1 means yes.
    """
    p2p, shm = (environment.get(name, "").strip() != "1" for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"))
    found = []
    for first, second in combinations(gpus, 2):
        access = can_access(first, second) and can_access(second, first)
        transport = None if access and p2p else "SHM" if shm else "NET"
        found.append(GpuPair(first, second, access, transport))
    return found


def pairs_in_words(pairs: Sequence[GpuPair]) -> str:
    """Describes what NCCL can do between GPUs. Pairs with the same properties are listed together."""
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
    """The version of NCCL in PyTorch; `None` if it has no NCCL."""
    try:
        from torch.cuda import nccl

        return ".".join(map(str, nccl.version()))
    except Exception:  # a PyTorch without NCCL fails in several ways
        return None


def connection_in_words(gpus: int) -> str:
    """Describes NCCL's version. If `gpus` is above 1 and this process sees that many GPUs, also describes what NCCL can
    do between the first `gpus` of them."""
    import torch

    words = [f"NCCL {nccl_version() or 'of unknown version'}"]
    if torch.cuda.device_count() >= gpus > 1:
        words.append(pairs_in_words(gpu_pairs(range(gpus), torch.cuda.can_device_access_peer)))
    return "; ".join(words)
