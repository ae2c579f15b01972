"""What a host does for a pass, counted; the figures at 131,072 tokens are in `docs/gpu-results.md`."""

import count_operations
import pytest
import torch

pytest.importorskip("triton", reason="what its kernels would be launched by is counted")


@torch.inference_mode()
def test_a_streamed_prefill_starts_hardly_more_kernels_than_a_resident_one():
    context = 12_288
    with count_operations.as_on_a_gpu():
        resident, streamed = (next(count_operations.passes_of(share, context))[1] for share in (1, 0))
    assert streamed["copies across the link"] == 32 * 12, "each of a layer's blocks once"
    assert streamed["launches"] < 1.3 * resident["launches"], (resident, streamed)


@torch.inference_mode()
def test_a_draft_token_is_one_replay_and_its_draw():
    with count_operations.as_on_a_gpu():
        counts = count_operations.draft_token()
    assert counts["launches"] < 70, counts


@pytest.mark.parametrize("resident", [0, 1 / 3, 0.95])
@torch.inference_mode()
def test_a_verification_starts_few_kernels_whatever_is_resident(resident):
    with count_operations.as_on_a_gpu():
        _, (_, counts) = count_operations.passes_of(resident, 40_960)
    streamed = counts["copies across the link"]
    assert streamed == 32 * (40 - round(40 * resident))
    assert counts["launches"] <= 30 * 32 + 3 * streamed, counts
