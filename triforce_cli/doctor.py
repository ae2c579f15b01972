"""`triforce doctor`: what this machine and this installation have, what is missing, and the command that adds it."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import typer

from ..tp import gpu_links
from ..tp.gpu_links import GpuPair, PcieLink
from ..tp.units import gib
from ..tp.weights.registry import EMBEDDED, find_pair
from .call import Call, import_pytorch
from .options import ReportOptions
from .terminal.output import JsonFile

_OPTIONAL = {
    "flash-attn": ("faster attention on NVIDIA GPUs", "flash-attn"),
    "triton": ("compiled kernels on NVIDIA GPUs", "triton"),
    "matplotlib": ("plots of benchmarks", "matplotlib"),
    "deepspeed": ("the DeepSpeed baseline", "deepspeed accelerate"),
    "llama-cpp-python": ("the llama.cpp baseline", "llama-cpp-python gguf"),
}
"""Optional packages: what each is for, and what to install for it."""

_LOCKED_BYTES = 2**31
"""Maximum number of bytes of host memory that are locked to test whether the system allows it, and how fast."""

_NOT_PLANNED = {
    "cuda_context": "CUDA's context",
    "workspaces": "cuBLAS",
    "nccl": "NCCL",
    "fragmentation": "fragmentation",
}
"""Parts of a GPU's memory that a run leaves free, in words. A further part, for captured passes, depends on the
model."""

_FOR_GPUS = ("flash-attn", "triton")
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "asimd", "sve", "bf16")
_NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy", "typer", "rich")
_NEEDED += ("psutil", "xxhash", "filelock", "platformdirs", "prompt_toolkit")
_REINSTALL = "in the source folder: pip install --force-reinstall --no-deps ."


@dataclass
class Findings:
    """The results of all checks. `broken` has what prevents `triforce generate` from running, `missing` what could be
    added; each with a command that helps."""

    versions: dict[str, str | None] = field(default_factory=dict)
    cpu: dict[str, Any] = field(default_factory=dict)
    cuda: list[dict[str, Any]] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    process_bytes: dict[str, int] = field(default_factory=dict)
    """The bytes that plans count, without a GPU, for a process that computes on the CPU, in addition to its run
    (`ProcessMemory`)."""
    page_locking: dict[str, float] | None = None
    """How many bytes of host memory were tested (`tried_bytes`), how many of them the system locked (`locked_bytes`),
    and the `seconds` that took; `None` without a GPU."""
    compiled_kernels: str | None = None
    """The instruction set that they use; `None` without them."""
    arithmetic: int | None = None
    """The number of their arithmetic (`kernels.cpu.library.arithmetic`): 0 without them; `None` if it is not known."""
    few_bits: dict[str, str] = field(default_factory=dict)
    """How weights in few bits are multiplied here, in words. `formats`: the supported formats; `cpu` and `gpu`: how a
    step multiplies. `gpu` is only present if there is a GPU."""
    embedded_pair: bool = False
    """Whether the embedded pair of models loads."""
    broken: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def doctor(options: ReportOptions, call: Call) -> None:
    """Reports what this machine has (versions, processor, GPUs, memory), what is missing, and how to add it.

    Exits 1 if something that [cyan]triforce generate[/] needs is broken.
    """
    with JsonFile.prepare(options.json) as json_file:
        findings = examine()
        json_file.write(asdict(findings))
    if not json_file.on_stdout:
        print(describe(findings))
    if findings.broken:
        raise typer.Exit(1)


def examine() -> Findings:
    """Runs all checks. One that fails becomes a finding and does not stop the others."""
    found = Findings()
    found.versions = {"triforce-cli": version("triforce-cli"), "python": platform.python_version()}
    found.versions |= {name: _version(name) for name in _NEEDED}
    found.broken += [f"{name} is not installed: pip install {name}" for name in _NEEDED if not found.versions[name]]
    found.cpu = _cpu()
    try:
        import_pytorch()
        import torch
    except Exception as error:  # a broken installation fails in many ways
        found.broken.append(f"torch does not import ({error}): pip install --force-reinstall torch")
    else:
        _check_gpus(found, torch)
        if found.cuda:
            found.versions["nccl"] = gpu_links.nccl_version()
            _check_page_locking(found, torch)
            check_links(found, torch)
        else:
            found.process_bytes = _process_bytes()
        _check_kernels(found)
        found.few_bits = _few_bits(found, torch)
        _check_embedded(found, torch)
    if found.versions["psutil"]:
        import psutil

        memory = psutil.virtual_memory()
        found.memory = {"total_bytes": memory.total, "available_bytes": memory.available}
        found.memory["disk_free_bytes"] = shutil.disk_usage(Path.cwd()).free
    for name, (purpose, packages) in _OPTIONAL.items():
        found.versions[name] = _version(name)
        if found.versions[name] is None and (name not in _FOR_GPUS or found.cuda):
            found.missing.append(f"{name} ({purpose}): pip install {packages}")
    return found


def _version(name: str) -> str | None:
    """The version of a package; `None` where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu() -> dict[str, Any]:
    """The processor's name, the number of cores that this process may use, and those of `_CPU_FLAGS` that it has."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    listed = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    flags = set(listed.group(1).split()) if listed else set()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "name": name.group(1) if name else platform.processor() or platform.machine(),
        "cores": usable,
        "features": [flag for flag in _CPU_FLAGS if flag in flags],
    }


def _check_gpus(found: Findings, torch: Any) -> None:
    """Adds the CUDA devices that PyTorch finds; a GPU that it cannot use is reported as missing."""
    if not torch.cuda.is_available():
        if Path("/proc/driver/nvidia/version").exists():
            built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
            found.missing.append(
                f"an NVIDIA driver is installed, but PyTorch {torch.__version__} ({built}) sees no device: "
                "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu128"
            )
        return
    for index in range(torch.cuda.device_count()):
        try:
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
        except RuntimeError as error:
            found.missing.append(f"CUDA device {index} does not answer ({error}): see nvidia-smi")
            continue
        found.cuda.append({"index": index, "name": name, "total_bytes": total, "free_bytes": free})


def _check_page_locking(found: Findings, torch: Any) -> None:
    """Tests how much host memory the system locks for copies to a GPU, and how long that takes: up to `_LOCKED_BYTES`,
    and up to half of what is free."""
    try:
        import psutil

        from ..offload.transfer.cuda_runtime import CudaRuntime
        from ..offload.transfer.page_locking import lockable

        tried = min(_LOCKED_BYTES, psutil.virtual_memory().available // 2)
        size, seconds = lockable(CudaRuntime(torch.device("cuda", found.cuda[0]["index"])), tried)
    except Exception as error:  # drivers fail in many ways
        found.missing.append(f"page-locked host memory, for streaming to a GPU, could not be tested: {error}")
        return
    found.page_locking = {"tried_bytes": tried, "locked_bytes": size, "seconds": seconds}
    if not size:
        found.missing.append(
            "page-locked host memory: the system locks none, so nothing can stream to a GPU, and the KV cache must fit "
            "into GPU memory; raise the limit: ulimit -l unlimited, in a container --ulimit memlock=-1"
        )
    elif size < tried:
        found.missing.append(
            f"page-locked host memory: the system locks only {gib(size)}; blocks beyond that are copied once more "
            "within host memory on their way to a GPU; raise the limit: ulimit -l unlimited, in a container --ulimit "
            "memlock=-1"
        )


def _measured_link(index: int) -> dict[str, float]:
    """Bytes per second of copies from page-locked memory to the GPU (`in`), and back (`out`)."""
    import torch

    from ..offload.transfer.bandwidth import link_bandwidth
    from ..offload.transfer.link import make_link

    device = torch.device("cuda", index)
    link = make_link(device)
    try:
        return link_bandwidth(link, device)
    finally:
        link.close()


def check_links(
    found: Findings,
    torch: Any,
    measure: Callable[[int], dict[str, float]] = _measured_link,
    pci_devices: Path = gpu_links.PCI_DEVICES,
) -> None:
    """Adds how each GPU is connected to the host and to the others, and how much of its memory runs leave free.

    Args:
        measure: returns the bytes per second of copies `in` to the GPU of this number and `out` of it.
        pci_devices: see `pcie_link`.
    """
    from ..offload.planning.run_plan import CUDA_CONTEXT, left_free

    for device in found.cuda:
        index = device["index"]
        parts = {"cuda_context": CUDA_CONTEXT} | left_free(device["total_bytes"], len(found.cuda))
        device["not_planned_bytes"] = parts
        try:
            bandwidth = {f"{way}_gb_per_s": speed / 1e9 for way, speed in measure(index).items()}
        except Exception as error:  # drivers fail in many ways
            bandwidth = None
            found.missing.append(f"the link to CUDA device {index} could not be measured: {error}")
        # After the copies: an idle card may have lowered its generation.
        address = gpu_links.pci_address(torch.cuda.get_device_properties(index))
        pcie = gpu_links.pcie_link(address, pci_devices) if address else None
        device |= {"pcie": asdict(pcie) if pcie else None, "link": bandwidth, "peers": []}
        if pcie and (pcie.width < pcie.max_width or (bandwidth and pcie.generation < pcie.max_generation)):
            found.missing.append(
                f"CUDA device {index} runs at {pcie}, so streaming to it takes longer in proportion; another slot "
                "may give it all lanes, and firmware settings may raise its generation (a second slot often has fewer "
                "lanes, or shares them with a disk; see the board's manual)"
            )
    devices = {device["index"]: device for device in found.cuda}
    for pair in gpu_links.gpu_pairs(list(devices), torch.cuda.can_device_access_peer):
        for index, other in ((pair.first, pair.second), (pair.second, pair.first)):
            devices[index]["peers"].append({"index": other, "access": pair.access, "transport": pair.transport})


def _process_bytes() -> dict[str, int]:
    """See `Findings`."""
    try:
        from ..offload.limits import LIMITS
    except Exception:  # what is broken is said elsewhere
        return {}
    return asdict(LIMITS.process)


def _check_kernels(found: Findings) -> None:
    """Checks the compiled kernels for this processor, which are optional."""
    try:
        from ..kernels.cpu.library import arithmetic, instructions, loaded

        kernels_loaded = loaded() is not None
        found.compiled_kernels, found.arithmetic = instructions(), arithmetic()
    except ValueError as error:  # TRIFORCE_CPU_LEVEL has no such level
        found.missing.append(f"compiled CPU kernels: {error}")
        return
    except Exception:
        kernels_loaded = False
    if not kernels_loaded:
        found.missing.append(
            "compiled CPU kernels (several times faster where models run on an x86-64 processor): they were not built, "
            f"or were built from other sources than these; with GCC 10 or newer installed, {_REINSTALL}"
        )


def _few_bits(found: Findings, torch: Any) -> dict[str, str]:
    """See `Findings`."""
    try:
        from ..kernels.packages import usable_packages
        from ..kernels.quantised import BLOCK_SIZES
        from ..tp.model.quantisation import SUPPORTED
    except Exception:  # what is broken is said elsewhere
        return {}
    formats = f"{SUPPORTED.partition('; ')[2]} ({', '.join(BLOCK_SIZES)})"
    words = {"formats": formats, "cpu": _few_bits_on_cpu()}
    if found.cuda:
        fused = "triton" in usable_packages(torch.device("cuda", found.cuda[0]["index"]))
        words["gpu"] = (
            "dequantised inside the matrix product, by Triton" if fused else "dequantised before each product"
        )
    return words


def _few_bits_on_cpu() -> str:
    from ..kernels.cpu.library import Level, cpu_level

    try:
        level = cpu_level()
    except ValueError:  # TRIFORCE_CPU_LEVEL has no such level
        level = Level.NONE
    if level >= Level.AVX512_BF16:
        return "dequantised inside the matrix product if the dtype is bfloat16, before it if it is float32"
    if level >= Level.AVX2:
        blocks = "for GGUF blocks other than Q8_0 and Q4_0"
        return (
            f"dequantised inside the matrix product if the dtype is bfloat16; in float32 too, {blocks}; else before it"
        )
    return "dequantised before each product"


def _check_embedded(found: Findings, torch: Any) -> None:
    """Checks the model of a default run: its files exist, and their tensors are as its configuration says."""
    try:
        from ..tp.decoder import Decoder
        from ..tp.weights.tokenizer import Tokenizer

        target, draft = find_pair(EMBEDDED)
        for directory in (target, draft):
            if directory is not None:
                Decoder.load(directory, dtype=torch.bfloat16, device=torch.device("cpu"))
        Tokenizer.load(target)
        found.embedded_pair = True
    except Exception as error:  # whatever is wrong with it, the rest of the report is still useful
        found.broken.append(f"the embedded model pair: {error}; {_REINSTALL}")


def describe(found: Findings) -> str:
    """The findings as text."""
    rows = {name: number or "not installed" for name, number in found.versions.items()}
    features = f" ({', '.join(found.cpu['features'])})" if found.cpu["features"] else ""
    rows |= {"": "", "processor": f"{found.cpu['name']}, {found.cpu['cores']} cores{features}"}
    if found.memory:
        sizes = {key: gib(size) for key, size in found.memory.items()}
        rows["memory"] = f"{sizes['available_bytes']} available of {sizes['total_bytes']}"
        rows["disk, here"] = f"{sizes['disk_free_bytes']} free"
    for device in found.cuda:
        sizes = f"{gib(device['free_bytes'])} free of {gib(device['total_bytes'])}"
        rows[f"CUDA device {device['index']}"] = f"{device['name']}, {sizes}"
        parts = (f"{_NOT_PLANNED[part]} {gib(size)}" for part, size in device["not_planned_bytes"].items() if size)
        rows[f"  left free on {device['index']}"] = ", ".join([*parts, "captured passes (see triforce plan)"])
        rows[f"  link of {device['index']}"] = _link_in_words(device["pcie"], device["link"])
    pairs = [
        GpuPair(device["index"], peer["index"], peer["access"], peer["transport"])
        for device in found.cuda
        for peer in device["peers"]
        if device["index"] < peer["index"]
    ]
    if pairs:
        rows["between GPUs"] = gpu_links.pairs_in_words(pairs)
    if found.page_locking and found.page_locking["locked_bytes"]:
        size, seconds = found.page_locking["locked_bytes"], found.page_locking["seconds"]
        limit = "at least " if size == found.page_locking["tried_bytes"] else ""
        rows["page-locking"] = f"{limit}{gib(int(size))} of host memory, {seconds / size * 2**30:.2f} s for each GiB"
    if not found.cuda:
        rows["CUDA devices"] = "none; models run on the processor"
    if found.process_bytes:
        from .plan.report import PROCESS

        rows["process"] = "; ".join(f"{PROCESS[part]} {gib(size)}" for part, size in found.process_bytes.items())
    rows["compiled kernels"] = found.compiled_kernels or "none; plain PyTorch instead"
    if found.few_bits:
        rows["few bits"] = f"weights in {found.few_bits['formats']}"
        rows["few bits on CPU"] = f"weights are {found.few_bits['cpu']}"
        if "gpu" in found.few_bits:
            rows["few bits on GPU"] = f"weights are {found.few_bits['gpu']}"
    rows["embedded model"] = "installed, and it loads" if found.embedded_pair else "does not load"
    lines = [f"{label:<18}{value}".rstrip() for label, value in rows.items()]
    for title, entries in (("broken", found.broken), ("missing, optional", found.missing)):
        if entries:
            lines += ["", f"{title}:", *(f"  {entry}" for entry in entries)]
    return "\n".join(
        [
            *lines,
            "",
            "something that triforce generate needs is broken" if found.broken else "triforce generate can run here",
        ]
    )


def _link_in_words(pcie: dict[str, int] | None, bandwidth: dict[str, float] | None) -> str:
    """The link between a GPU and the host: its PCIe generation and width, and the measured bandwidth."""
    words = []
    if pcie:
        words.append(str(PcieLink(**pcie)))
        if pcie["width"] < 16:
            words[0] += f", below x16{', all that this card has' if pcie['width'] == pcie['max_width'] else ''}"
        if not bandwidth and pcie["generation"] < pcie["max_generation"]:
            words[0] += " now (an idle card lowers its generation)"
    if bandwidth:
        words.append(
            f"measured {bandwidth['in_gb_per_s']:.1f} GB/s to the GPU, {bandwidth['out_gb_per_s']:.1f} GB/s back"
        )
    return "; ".join(words) or "unknown"
