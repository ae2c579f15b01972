"""The field `logprobs`: the target's own probabilities of an answer's tokens, in OpenAI's two formats."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from ...offload.speculation.sampling import TokenLogprobs

Entry = dict[str, Any]
"""A token in the format of chat completions: `token`, `logprob`, `bytes`, `top_logprobs`."""


def entries(
    found: Sequence[TokenLogprobs], decode: Callable[[Sequence[int]], str], left_out: Collection[int]
) -> list[Entry]:
    """An entry for each token.

    Args:
        left_out: tokens that are not part of an answer, because they end it.
    """

    def one(token: int, logprob: float) -> Entry:
        text = decode([token])
        part = "\ufffd" in text  # some of a character's bytes
        if not part:  # read behind another token, as some tokenizers leave out the space before a text's first one
            text = decode([token, token])[len(text) :]
        return {"token": text, "logprob": logprob, "bytes": None if part else list(text.encode())}

    return [
        {**one(each.token, each.logprob), "top_logprobs": [one(token, value) for token, value in each.top]}
        for each in found
        if each.token not in left_out
    ]


def logprobs_field(found: Sequence[Entry] | None, chat: bool, offset: int = 0) -> dict[str, Any] | None:
    """`logprobs` of a choice, for a chat or for a completion; `None` if they were not asked for.

    Args:
        offset: the length of the completion's text before these tokens.
    """
    if found is None:
        return None
    if chat:
        return {"content": list(found)}
    offsets = []
    for entry in found:
        offsets.append(offset)
        offset += len(entry["token"])
    best = [{one["token"]: one["logprob"] for one in reversed(entry["top_logprobs"])} for entry in found]
    return {
        "tokens": [entry["token"] for entry in found],
        "token_logprobs": [entry["logprob"] for entry in found],
        "top_logprobs": best,
        "text_offset": offsets,
    }
