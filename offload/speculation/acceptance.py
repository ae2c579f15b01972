"""The acceptance rule of speculative sampling: uses draft tokens without changing the target's distribution.

One function is used for both levels, for one sequence and for several. With fresh noise, the rule is that of Leviathan
et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318). With common noise (see `noise`), the target draws a token
at every position. A draft token is accepted if it equals the target's token. So the emitted tokens are the target's own
draws, for any draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from .distribution import rounded_certainties
from .noise import FreshNoise
from .sampler import Sampler, draw


def accept(
    proposed: Sequence[Sequence[int]],
    drafts: Sequence[Tensor | None],
    target: Tensor,
    samplers: Sequence[Sampler],
    positions: Sequence[int],
    logits: Tensor | None = None,
) -> tuple[list[tuple[int, int]], list[list[float]]]:
    """Accepts some of the tokens proposed for each sequence, and draws the token that follows them. Waits for the
    device once. If some sequences have fresh noise and a draft and others do not, it waits once more for each of the
    others.

    A sequence's accepted tokens and the next token are distributed exactly as if they were drawn one by one from its
    rows of `target`. With fresh noise, proposed token `i` must have been drawn from row `i` of its draft. With common
    noise, any tokens may be proposed.

    Args:
        proposed: for each sequence, `n` draft tokens, `n >= 0`.
        drafts: for each sequence, `[n, vocab]`: the distributions from which they were drawn; `None` without tokens.
        target: for each sequence, one after another, `[n + 1, vocab]`: the target's distribution after each number of
            proposed tokens, 0 to `n`.
        samplers: one for each sequence.
        positions: for each sequence, the position of the first proposed token in the text.
        logits: `[rows, vocab]`, from which `target` was made, if certainties are needed.

    Returns:
        For each sequence, the number of accepted tokens, 0 to `n`, and the next token. The next token is the target's
        draw at the first rejection (with fresh noise, from the residual), or from the last row if all tokens are
        accepted. It is below 0 if its distribution holds NaN. Then, for each sequence, the certainties
        (`distribution.certainties`) of its accepted tokens and of the next one; empty without `logits`.
    """
    rows = [len(tokens) + 1 for tokens in proposed]
    by_ratio = [isinstance(s.noise, FreshNoise) and n > 1 for s, n in zip(samplers, rows, strict=True)]
    if any(by_ratio):
        return _accept_mixed(proposed, drafts, target, samplers, positions, logits, by_ratio)
    drawn = draw(target, samplers, rows, positions)
    numbers: list[int] = (drawn if logits is None else torch.cat((drawn, rounded_certainties(logits, drawn)))).tolist()
    rated = numbers[len(numbers) // 2 :] if logits is not None else []
    outcomes: list[tuple[int, int]] = []
    ratings: list[list[float]] = []
    first = 0
    for tokens in proposed:
        accepted = 0
        while accepted < len(tokens) and numbers[first + accepted] == tokens[accepted]:
            accepted += 1
        outcomes.append((accepted, numbers[first + accepted]))
        ratings.append([one / 1e6 for one in rated[first : first + accepted + 1]])
        first += len(tokens) + 1
    return outcomes, ratings


def _accept_mixed(
    proposed: Sequence[Sequence[int]],
    drafts: Sequence[Tensor | None],
    target: Tensor,
    samplers: Sequence[Sampler],
    positions: Sequence[int],
    logits: Tensor | None,
    by_ratio: Sequence[bool],
) -> tuple[list[tuple[int, int]], list[list[float]]]:
    """`accept` if some sequences, those of `by_ratio`, are tested by the rule of fresh noise."""
    outcomes: list[tuple[int, int]] = [(0, 0)] * len(proposed)
    ratings: list[list[float]] = [[]] * len(proposed)
    found = []
    rows = [len(tokens) + 1 for tokens in proposed]
    parts = target.split(rows)
    of_logits = [None] * len(rows) if logits is None else logits.split(rows)
    for i, (tokens, draft, part, sampler) in enumerate(zip(proposed, drafts, parts, samplers, strict=True)):
        given = of_logits[i]
        if by_ratio[i]:
            assert draft is not None and isinstance(sampler.noise, FreshNoise)
            tested = torch.tensor(tokens, device=target.device)
            accepted, token = _accept_by_ratio(tested, draft, part, sampler.noise)
            found += [accepted, token]
            if given is not None:
                found.append(rounded_certainties(given[:-1], tested))
                found.append(rounded_certainties(given.index_select(0, accepted), token))
        else:
            (outcomes[i],), (ratings[i],) = accept([tokens], [draft], part, [sampler], [positions[i]], given)
    numbers = iter(torch.cat(found).tolist())
    for i, tokens in enumerate(proposed):
        if by_ratio[i]:
            outcomes[i] = next(numbers), next(numbers)
            if logits is not None:
                *before, last = [one / 1e6 for one in islice(numbers, len(tokens) + 1)]
                ratings[i] = [*before[: outcomes[i][0]], last]
    return outcomes, ratings


def _accept_by_ratio(proposed: Tensor, draft: Tensor, target: Tensor, noise: FreshNoise) -> tuple[Tensor, Tensor]:
    """`accept` with probability `min(1, target / draft)` for each token; tensors of one number each."""
    n = proposed.shape[0]
    picked = proposed.unsqueeze(1)
    chance = torch.rand(n, generator=noise.generator, device=proposed.device)
    offered, wanted = draft.gather(1, picked).squeeze(1), target[:n].gather(1, picked).squeeze(1)
    accepted = (chance * offered < wanted).long().cumprod(0).sum(0, keepdim=True)  # up to the first rejection
    drafted_from = draft.index_select(0, accepted.clamp(max=n - 1)) * (accepted < n)  # zeros when all are accepted
    return accepted, noise.draw(residual(target.index_select(0, accepted), drafted_from), 0)


def residual(target: Tensor, draft: Tensor) -> Tensor:
    """The weights `[..., vocab]` from which the token after a rejection is drawn: `max(target - draft, 0)`.

    If the two are equal to the last bit, this is 0 everywhere, and `target` is returned. A rejection then has
    probability 0, rounding aside.
    """
    rest = (target - draft).clamp_(min=0.0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, target)
