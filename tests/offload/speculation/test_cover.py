"""How a draft's distribution is made to cover the target's vocabulary."""

import pytest
import torch
from joint_distribution import SAMPLING
from tiny import save_llama
from triforce.offload import Engine, Sampling
from triforce.offload.speculation.distribution import distribution
from triforce.offload.speculation.tiers import cover
from triforce.offload.vocabulary import LARGEST_PADDING
from triforce.tp import ModelError


def test_surplus_tokens_are_cut_before_the_filters_and_missing_ones_are_never_drawn():
    logits = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))
    logits[:, 8:] = 50.0
    sampling = SAMPLING
    assert torch.equal(distribution(cover(logits, 8), sampling), distribution(logits[:, :8], sampling))
    for filters in (sampling, Sampling(temperature=0.0), Sampling(temperature=1.0, top_p=1.0)):
        rows = distribution(cover(logits, 13), filters)
        assert rows.shape == (4, 13)
        assert torch.equal(rows[:, :10], distribution(logits, filters))
        assert (rows[:, 10:] == 0).all()


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_difference_beyond_padding_is_refused(tmp_path, sign):
    save_llama(tmp_path / "target", vocab_size=1000, num_hidden_layers=1)
    save_llama(tmp_path / "near", vocab_size=1000 + sign * LARGEST_PADDING, num_hidden_layers=1)
    save_llama(tmp_path / "far", vocab_size=1000 + sign * (LARGEST_PADDING + 1), num_hidden_layers=1)
    Engine.load(tmp_path / "target", tmp_path / "near", device="cpu")
    words = rf"draft far has a vocabulary of \d+, the target target of 1000.*{LARGEST_PADDING}"
    with pytest.raises(ModelError, match=words):
        Engine.load(tmp_path / "target", tmp_path / "far", device="cpu")
