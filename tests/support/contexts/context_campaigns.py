"""Campaigns against saved contexts, longer than a test may be: random damage, kills, power cuts and full disks.

    python tests/support/contexts/context_campaigns.py --corruptions 10000 --kills 100 --power-cuts --full-disk 20

Prints what was tried and what failed; exits 1 if anything did.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).parents[1]))

import torch
from corruptions import check_damaged, save_generations
from hooked_disk import HOWS, PowerCut, recording
from killed_reader import check_killed
from small_disk import small_disk
from tiny_contexts import NAME, TEXT, TinyContexts, assert_whole, save_tiny_model, store_at
from tiny_disk import check_full_disk


class Campaign:
    """Counts cases by outcome and prints failures."""

    def __init__(self, name: str) -> None:
        self._name, self.failed, self._began = name, 0, time.monotonic()
        self._outcomes: Counter[str] = Counter()

    def case(self, description: object, check: Callable[[], str]) -> None:
        try:
            self._outcomes[check()] += 1
        except Exception as error:
            self.failed += 1
            print(f"{self._name} {description} FAILED: {type(error).__name__}: {error}", flush=True)

    def report(self) -> None:
        tried = self._outcomes.total() + self.failed
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in self._outcomes.most_common())
        seconds = time.monotonic() - self._began
        print(f"{self._name}: {tried} tried, {self.failed} failed ({outcomes}; {seconds:.0f} s)", flush=True)


def corruptions(tiny: TinyContexts, place: Path, count: int, seed: int) -> Campaign:
    """Damages a copy of a store; see `corruptions.check_damaged`. Every fifth is mended."""
    campaign = Campaign("corruptions")
    generations = save_generations(tiny, place / "generations")
    for index in range(count):
        rng, copy = random.Random(f"{seed} {index}"), place / "copy"
        campaign.case(index, lambda: check_damaged(tiny, generations, copy, rng, mend=index % 5 == 0))  # noqa: B023
        shutil.rmtree(copy)
    return campaign


def power_cuts(tiny: TinyContexts, place: Path, seed: int, every: int = 1) -> Campaign:
    """Cuts the recorded saving of a text in two steps, and of one that shares segments with it, after every event.

    Args: `every`: after every so many events instead.
    """
    campaign = Campaign("power cuts")
    root = place / "recorded" / "contexts"
    disk, events = recording()
    tiny.read(root, TEXT[:100], disk=disk)
    tiny.read(root, TEXT, disk=disk)
    tiny.read(root, TEXT[:140], name="alike", disk=disk)
    for cut in range(0, len(events) + 1, every):
        for index, how in enumerate(HOWS):
            rng, left = random.Random(f"{seed} {cut} {index}"), place / "left"

            def check() -> str:
                PowerCut(root.parent, events[:cut]).leave(left, how, rng)  # noqa: B023
                return check_cut(tiny, left / "contexts")  # noqa: B023

            campaign.case((cut, how, index), check)
            shutil.rmtree(left)
    return campaign


def check_cut(tiny: TinyContexts, root: Path) -> str:
    """The store opens, what it has is whole, and reading goes on to the right tokens; what was there, in words."""
    store, found = store_at(root), []
    for name in store.names():
        if (root / name / "manifest.json").exists():
            assert [wrong for _, wrong in store.verify(name) if wrong] == []
            assert tiny.ask(root, name=name) == "whole"
            found.append(str(store.load(name).saved))
    tiny.read(root)
    assert_whole(root)
    assert tiny.ask(root, which=1) == "whole"
    return f"with {' and '.join(found) or 'no'} tokens saved"


def kills(tiny: TinyContexts, place: Path, count: int, seed: int) -> Campaign:
    """Kills a process that reads; see `killed_reader.check_killed`."""
    campaign = Campaign("kills")
    for index in range(count):
        rng, root = random.Random(f"{seed} {index}"), place / f"killed{index}"
        campaign.case(index, lambda: check_killed(tiny, root, rng))  # noqa: B023
        shutil.rmtree(root, ignore_errors=True)
    return campaign


def full_disks(tiny: TinyContexts, place: Path, count: int) -> Campaign:
    """Saves to disks of several sizes, which a whole context fits on at last; see `tiny_disk.check_full_disk`."""
    campaign = Campaign("full disks")
    tiny.read(place / "measured")
    whole = store_at(place / "measured").disk_bytes([NAME])
    for index in range(count):
        size = 24_576 + (whole + 65_536) * index // count

        def check() -> str:
            with small_disk(place / f"disk{index}", size) as small:  # noqa: B023
                return check_full_disk(tiny, small / "contexts")

        campaign.case(f"{size} bytes", check)
    return campaign


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corruptions", type=int, default=0, metavar="N")
    parser.add_argument("--kills", type=int, default=0, metavar="N")
    parser.add_argument("--power-cuts", action="store_true")
    parser.add_argument("--full-disk", type=int, default=0, metavar="N", help="sizes of small disks (needs root)")
    parser.add_argument("--packed", action="store_true", help="contexts in bfloat16 that are packed, not in float32")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="triforce-campaign-") as name:
        place = Path(name)
        tiny = TinyContexts(save_tiny_model(place / "model"), packed=given.packed)
        campaigns = []
        if given.corruptions:
            campaigns.append(corruptions(tiny, place, given.corruptions, given.seed))
            campaigns[-1].report()
        if given.power_cuts:
            campaigns.append(power_cuts(tiny, place, given.seed))
            campaigns[-1].report()
        if given.full_disk:
            campaigns.append(full_disks(tiny, place, given.full_disk))
            campaigns[-1].report()
        if given.kills:
            campaigns.append(kills(tiny, place, given.kills, given.seed))
            campaigns[-1].report()
    return int(any(campaign.failed for campaign in campaigns))


if __name__ == "__main__":
    sys.exit(main())
