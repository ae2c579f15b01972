"""The acceptance rule of speculative sampling: use drafted tokens without changing the target's distribution.

One function, used at both levels. With fresh noise the rule is that of Leviathan et al. (arXiv 2211.17192) and Chen et
al. (arXiv 2302.01318). With common noise (see `noise`) the target draws at every position, and a drafted token is
accepted where it is what the target draws: what is emitted is then the target's own draws, whatever was drafted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .noise import FreshNoise, Noise
from .sampling import read


def accept(proposed: Tensor, draft: Tensor, target: Tensor, noise: Noise, position: int) -> tuple[int, int]:
    """Accepts some of the proposed tokens and draws the token that follows them. Waits for the device once.

    The accepted tokens followed by the returned one are distributed exactly as if drawn one by one from `target`,
    provided `proposed[i]` was drawn from `draft[i]`; with common noise whatever was proposed.

    Args:
        proposed: `[n]` draft tokens, `n >= 0`.
        draft: `[n, vocab]`, the distributions they were drawn from.
        target: `[n + 1, vocab]`, the target's distribution after each number of proposed tokens, 0 to `n`.
        position: in the text, of the first proposed token.

    Returns:
        The number of accepted tokens, 0 to `n`, and the next token: the target's draw at the first rejection (with
        fresh noise from the residual), or from `target[n]` when all are accepted.

    Raises:
        ModelError: the distribution to draw the next token from holds NaN.
    """
    n = proposed.shape[0]
    if n == 0:
        return 0, read(noise.draw(target, position))[0]
    if isinstance(noise, FreshNoise):
        accepted, token = _accept_by_ratio(proposed, draft, target, noise)
    else:
        drawn = noise.draw(target, position)
        accepted = _leading(drawn[:n] == proposed)
        token = drawn.gather(0, accepted)
    count, token_id = read(torch.cat((accepted, token)))
    return count, token_id


def _accept_by_ratio(proposed: Tensor, draft: Tensor, target: Tensor, noise: FreshNoise) -> tuple[Tensor, Tensor]:
    """`accept` with probability `min(1, target / draft)` for each token; tensors of one number each."""
    n = proposed.shape[0]
    picked = proposed.unsqueeze(1)
    chance = torch.rand(n, generator=noise.generator, device=proposed.device)
    offered, wanted = draft.gather(1, picked).squeeze(1), target[:n].gather(1, picked).squeeze(1)
    accepted = _leading(chance * offered < wanted)
    drafted_from = draft.index_select(0, accepted.clamp(max=n - 1)) * (accepted < n)  # zeros when all are accepted
    return accepted, noise.draw(residual(target.index_select(0, accepted), drafted_from), 0)


def _leading(passed: Tensor) -> Tensor:
    """`[1]`: how many of the first of `passed` are true without a break."""
    return passed.long().cumprod(0).sum(0, keepdim=True)


def residual(target: Tensor, draft: Tensor) -> Tensor:
    """What the token after a rejection is drawn from, `[..., vocab]`: proportional to `max(target - draft, 0)`.

    Where the two are equal to the last bit, that is 0 everywhere and `target` is returned: a rejection then has
    probability 0, rounding aside.
    """
    rest = (target - draft).clamp_(min=0.0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, target)
