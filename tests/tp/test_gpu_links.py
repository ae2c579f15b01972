"""How GPUs are connected, by files as the system has them and by what PyTorch says; none is needed."""

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triforce.cli.doctor import Findings, check_links, describe
from triforce.cli.session.open import report_ranks
from triforce.tp.gpu_links import GpuPair, PcieLink, gpu_pairs, pairs_in_words, pci_address, pcie_link

FULL = ("16.0 GT/s PCIe", "16", "16.0 GT/s PCIe", "16")


def write(folder, address, *texts):
    """Files as Linux has them: speed and width, now and at most."""
    (folder / address).mkdir(parents=True)
    names = ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width")
    for name, text in zip(names, texts, strict=False):
        (folder / address / name).write_text(text + "\n")


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (FULL, PcieLink(4, 16, 4, 16)),
        (("2.5 GT/s PCIe", "8", "32.0 GT/s PCIe", "16"), PcieLink(1, 8, 5, 16)),
        (("8 GT/s", "4", "16 GT/s", "16"), PcieLink(3, 4, 4, 16)),  # as older kernels write it
        (("Unknown", "0", "Unknown", "255"), None),
        (("16.0 GT/s PCIe", "0", "16.0 GT/s PCIe", "16"), None),
        (FULL[:3], None),
        ((), None),
    ],
)
def test_a_pcie_link_is_read_from_the_systems_files(tmp_path, texts, found):
    write(tmp_path, "0000:65:00.0", *texts)
    assert pcie_link("0000:65:00.0", tmp_path) == found
    assert pcie_link("0000:66:00.0", tmp_path) is None


def test_an_address_is_written_as_the_system_does():
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xC1, pci_device_id=0)
    assert pci_address(properties) == "0001:c1:00.0"
    assert pci_address(SimpleNamespace(name="a card of an older PyTorch")) is None


def test_only_what_is_certain_is_said_of_nccl():
    def by(environment, access=True):
        return gpu_pairs([0, 1], lambda first, second: access or first > second, environment)

    assert by({}) == [GpuPair(0, 1, True, None)]
    assert by({"NCCL_P2P_DISABLE": "0"}) == [GpuPair(0, 1, True, None)]
    assert by({"NCCL_P2P_DISABLE": "1"}) == [GpuPair(0, 1, True, "SHM")]
    assert by({}, access=False) == [GpuPair(0, 1, False, "SHM")], "one way is not enough"
    assert by({"NCCL_SHM_DISABLE": "1"}) == [GpuPair(0, 1, True, None)]
    assert by({"NCCL_SHM_DISABLE": "1"}, access=False) == [GpuPair(0, 1, False, "NET")]
    assert gpu_pairs([0], lambda first, second: True, {}) == []
    assert len(gpu_pairs(range(4), lambda first, second: True, {})) == 6


def test_pairs_that_are_alike_are_said_together():
    near = {(0, 1), (1, 0), (2, 3), (3, 2)}
    words = pairs_in_words(gpu_pairs(range(4), lambda *pair: pair in near, {}))
    assert words == (
        "peer access between GPUs 0-1, 2-3: NCCL uses it where the topology allows; "
        "no peer access between GPUs 0-2, 0-3, 1-2, 1-3: NCCL goes through host memory (SHM)"
    )
    forbidden = pairs_in_words([GpuPair(0, 1, True, "SHM")])
    assert forbidden == (
        "peer access between GPUs 0-1, which NCCL_P2P_DISABLE forbids: NCCL goes through host memory (SHM)"
    )


@pytest.mark.parametrize(("rank", "size", "kind"), [(0, 2, "cuda"), (1, 2, "cuda"), (0, 1, "cuda"), (0, 2, "cpu")])
def test_rank_0_says_how_gpus_are_connected_before_they_first_are(monkeypatch, capsys, rank, size, kind):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda first, second: False)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 27, 3))
    monkeypatch.delenv("NCCL_SHM_DISABLE", raising=False)
    ranks = SimpleNamespace(rank=rank, size=size, local_size=size)
    engine: Any = SimpleNamespace(target=SimpleNamespace(ranks=ranks, device=torch.device(kind)))
    report_ranks(engine)
    said = "2 GPUs: NCCL 2.27.3; no peer access between GPUs 0-1: NCCL goes through host memory (SHM)\n"
    assert capsys.readouterr().err == (said if (rank, size, kind) == (0, 2, "cuda") else "")


def look(tmp_path, measure, *links):
    """What doctor finds of cards with such links, which have no access to one another."""
    cards = []
    for bus, texts in enumerate(links, 1):
        write(tmp_path, f"0000:{bus:02x}:00.0", *texts)
        cards.append(SimpleNamespace(pci_domain_id=0, pci_bus_id=bus, pci_device_id=0))
    cuda = SimpleNamespace(
        get_device_properties=lambda index: cards[index],
        can_device_access_peer=lambda first, second: False,
    )
    found = Findings(cpu={"name": "a processor", "cores": 2, "features": []})
    sizes = {"name": "NVIDIA GeForce RTX 4090", "total_bytes": 2**34, "free_bytes": 2**33}
    found.cuda = [{"index": index, **sizes} for index in range(len(cards))]
    check_links(found, SimpleNamespace(cuda=cuda), measure, tmp_path)
    return found


def test_doctor_says_what_a_second_card_lacks(tmp_path, monkeypatch):
    monkeypatch.delenv("NCCL_SHM_DISABLE", raising=False)
    speeds = [{"in": 25e9, "out": 26e9}, {"in": 6.2e9, "out": 6.3e9}]
    found = look(tmp_path, lambda index: speeds[index], FULL, ("16.0 GT/s PCIe", "4", "16.0 GT/s PCIe", "16"))
    first, second = found.cuda
    assert first["pcie"] == asdict(PcieLink(4, 16, 4, 16)) and second["pcie"] == asdict(PcieLink(4, 4, 4, 16))
    assert second["link"] == {"in_gb_per_s": pytest.approx(6.2), "out_gb_per_s": pytest.approx(6.3)}
    assert first["peers"] == [{"index": 1, "access": False, "transport": "SHM"}]
    assert second["peers"] == [{"index": 0, "access": False, "transport": "SHM"}]
    (entry,) = found.missing
    assert entry.startswith("CUDA device 1 runs at PCIe 4.0 x4 of 4.0 x16, so streaming to it takes longer")
    text = describe(found)
    assert (
        "  left free on 0  CUDA's context 0.50 GiB, cuBLAS 128.0 MiB, NCCL 160.0 MiB, fragmentation 0.50 GiB, captured "
        "passes (see triforce plan)\n" in text
    )
    assert "  link of 0       PCIe 4.0 x16 of 4.0 x16; measured 25.0 GB/s to the GPU, 26.0 GB/s back\n" in text
    assert "  link of 1       PCIe 4.0 x4 of 4.0 x16, below x16; measured 6.2 GB/s to the GPU" in text
    assert "between GPUs      no peer access between GPUs 0-1: NCCL goes through host memory (SHM)\n" in text


def test_an_idle_cards_generation_is_no_fault(tmp_path):
    """Where nothing was copied, it may be lower only for now; right after copies it is."""

    def fails(index):
        raise RuntimeError("no memory is locked")

    slow = ("2.5 GT/s PCIe", "16", "16.0 GT/s PCIe", "16")
    idle = look(tmp_path / "idle", fails, slow)
    assert idle.cuda[0]["link"] is None
    assert idle.missing == ["the link to CUDA device 0 could not be measured: no memory is locked"]
    assert "PCIe 1.0 x16 of 4.0 x16 now (an idle card lowers its generation)" in describe(idle)
    busy = look(tmp_path / "busy", lambda index: {"in": 3e9, "out": 3e9}, slow)
    assert [entry.split(",")[0] for entry in busy.missing] == ["CUDA device 0 runs at PCIe 1.0 x16 of 4.0 x16"]


def test_a_card_of_fewer_lanes_lacks_nothing(tmp_path):
    found = look(tmp_path, lambda index: {"in": 12e9, "out": 12e9}, ("16.0 GT/s PCIe", "8", "16.0 GT/s PCIe", "8"))
    assert found.missing == [] and found.cuda[0]["peers"] == []
    assert "PCIe 4.0 x8 of 4.0 x8, below x16, all that this card has; measured" in describe(found)


def test_what_the_system_does_not_tell_is_left_open(tmp_path):
    found = look(tmp_path, lambda index: {"in": 12e9, "out": 12e9}, ())
    assert found.cuda[0]["pcie"] is None and found.missing == []
    assert "  link of 0       measured 12.0 GB/s to the GPU, 12.0 GB/s back\n" in describe(found)
