"""Checks of a request before any work is done for it, and whether the tokens of a run are exact."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..tp.decoder import Decoder
from ..tp.errors import CapacityError, UsageError
from ..tp.model.config import ModelConfig
from .transfer.placement import SPLITS

_WHOLE = "bBhHiIlLqQ"
"""Type codes of arrays of integers."""


def checked_prompt(prompt_ids: Sequence[int] | Tensor, config: ModelConfig, max_new_tokens: int) -> array[int]:
    """Checks a prompt and returns a copy of its token ids.

    Raises:
        UsageError: the prompt is empty, is not a sequence or 1-D tensor of integers, or has a token outside the
            vocabulary; or `max_new_tokens` is below 1.
        CapacityError: see `check_context`.
    """
    if isinstance(prompt_ids, list) and set(map(type, prompt_ids)) <= {int}:
        ids = np.array(prompt_ids)  # in less time than a tensor
    elif isinstance(prompt_ids, array) and prompt_ids.typecode in _WHOLE:
        ids = np.asarray(prompt_ids)  # likewise
    else:
        given = torch.as_tensor(prompt_ids)
        whole = not (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool)
        if given.dim() != 1 or (len(given) and not whole):
            raise UsageError(
                f"the prompt is a {given.dim()}-dimensional tensor of {given.dtype}; give a list or 1-D tensor of "
                "token ids"
            )
        ids = np.array(given.tolist())
    if not len(ids):
        raise UsageError("the prompt is empty; generation needs at least one token")
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        unknown = next(int(token) for token in ids if not 0 <= token < config.vocab_size)
        raise UsageError(f"the prompt holds token {unknown}; {config.name} knows 0 to {config.vocab_size - 1}")
    if max_new_tokens < 1:
        raise UsageError(f"max-new-tokens is {max_new_tokens}; it must be 1 or more")
    check_context(config, len(ids), max_new_tokens)
    return array("i", np.ascontiguousarray(ids, np.intc).tobytes())


def check_context(config: ModelConfig, prompt_tokens: int, max_new_tokens: int) -> None:
    """Checks that prompt and answer fit into the model's positions.

    Raises:
        CapacityError: prompt and answer together have more tokens than the model has positions.
    """
    limit = config.max_position_embeddings
    if prompt_tokens + max_new_tokens > limit:
        raise CapacityError(
            f"the prompt has {prompt_tokens:,} tokens and {max_new_tokens:,} more are asked for, but {config.name} "
            f"has {limit:,} positions{config.positions_note}; shorten the prompt or ask for fewer tokens "
            "(triforce generate and compare: --truncate, --max-new-tokens)"
        )


def tokens_are_exact(target: Decoder, chunk_size: int, padded: bool) -> bool:
    """Whether tokens cannot depend on how many are verified together. Otherwise, that can decide near-ties only. Never
    with three or more ranks, whose sums add in an order that depends on a row's place. Never with a chunk size that
    does not divide 256, as chunks then end within splits of attention."""
    if target.ranks.size > 2 or SPLITS[0] % chunk_size:
        return False
    return padded or target.rows_are_independent


def host_locks_embeddings(target: Decoder, draft: Decoder | None) -> bool:
    """Whether each embedding that could be in page-locked host memory is there; see `RunRequest.locks_embedding`."""
    return not any(model.has_embedding_to_spare for model in (target, draft) if model)
