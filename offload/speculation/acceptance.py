"""The acceptance rule of speculative sampling: keep what a draft proposed without changing the distribution.

From Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318). One pure rule, used at both levels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .sampling import draw, read


def accept(proposed: Tensor, draft: Tensor, target: Tensor, generator: torch.Generator) -> tuple[int, int]:
    """Decides how many proposed tokens stand and draws the token after them. Waits for the device once.

    The accepted tokens followed by the returned one are distributed exactly as if drawn one by one from `target`,
    provided `proposed[i]` was drawn from `draft[i]`.

    Args:
        proposed: `[n]` tokens, `n >= 0`.
        draft: `[n, vocab]` distributions they were drawn from.
        target: `[n + 1, vocab]` distributions to follow, each given the proposed tokens before it.

    Returns:
        The number of accepted tokens, 0 to `n`, and the next token: drawn from the residual at the first rejection,
        or from `target[n]` when all stand.

    Raises:
        ModelError: the distribution to draw the next token from is not of numbers.
    """
    n = proposed.shape[0]
    if n == 0:
        return 0, read(draw(target, generator))[0]
    picked = proposed.unsqueeze(1)
    chance = torch.rand(n, generator=generator, device=proposed.device)
    offered, wanted = draft.gather(1, picked).squeeze(1), target[:n].gather(1, picked).squeeze(1)
    stands = chance * offered < wanted  # with probability min(1, target / draft)
    accepted = stands.long().cumprod(0).sum(0, keepdim=True)
    against = draft.index_select(0, accepted.clamp(max=n - 1)) * (accepted < n)  # nothing when all stand
    token = draw(residual(target.index_select(0, accepted), against), generator)
    count, token_id = read(torch.cat((accepted, token)))
    return count, token_id


def residual(target: Tensor, draft: Tensor) -> Tensor:
    """What a rejection is drawn from, `[..., vocab]`: proportional to `max(target - draft, 0)`.

    Where the two agree to the last bit nothing remains; a rejection then has probability 0 but for rounding, and
    `target` itself is right.
    """
    rest = (target - draft).clamp_(min=0.0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, target)
