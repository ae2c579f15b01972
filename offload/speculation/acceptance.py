"""The acceptance rule of speculative sampling: use drafted tokens without changing the target's distribution.

From Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318). One pure function, used at both levels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .sampling import draw, read


def accept(proposed: Tensor, draft: Tensor, target: Tensor, generator: torch.Generator) -> tuple[int, int]:
    """Accepts some of the proposed tokens and draws the token that follows them. Waits for the device once.

    The accepted tokens followed by the returned one are distributed exactly as if drawn one by one from `target`,
    provided `proposed[i]` was drawn from `draft[i]`.

    Args:
        proposed: `[n]` draft tokens, `n >= 0`.
        draft: `[n, vocab]`, the distributions they were drawn from.
        target: `[n + 1, vocab]`, the target's distribution after each number of proposed tokens, 0 to `n`.

    Returns:
        The number of accepted tokens, 0 to `n`, and the next token: drawn from the residual at the first rejection,
        or from `target[n]` when all are accepted.

    Raises:
        ModelError: the distribution to draw the next token from holds NaN.
    """
    n = proposed.shape[0]
    if n == 0:
        return 0, read(draw(target, generator))[0]
    picked = proposed.unsqueeze(1)
    chance = torch.rand(n, generator=generator, device=proposed.device)
    offered, wanted = draft.gather(1, picked).squeeze(1), target[:n].gather(1, picked).squeeze(1)
    passed = chance * offered < wanted  # with probability min(1, target / draft)
    accepted = passed.long().cumprod(0).sum(0, keepdim=True)
    drafted_from = draft.index_select(0, accepted.clamp(max=n - 1)) * (accepted < n)  # zeros when all are accepted
    token = draw(residual(target.index_select(0, accepted), drafted_from), generator)
    count, token_id = read(torch.cat((accepted, token)))
    return count, token_id


def residual(target: Tensor, draft: Tensor) -> Tensor:
    """What the token after a rejection is drawn from, `[..., vocab]`: proportional to `max(target - draft, 0)`.

    Where the two are equal to the last bit, that is 0 everywhere and `target` is returned: a rejection then has
    probability 0, rounding aside.
    """
    rest = (target - draft).clamp_(min=0.0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, target)
