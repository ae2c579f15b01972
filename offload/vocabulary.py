"""Checks that a draft model shares its target's vocabulary. Only the padding of the embeddings may differ.

Embeddings are padded with unused rows to sizes that suit the hardware. These sizes differ between the models of a
family (Qwen2.5 has 152,064 rows at 7B and 151,936 at 0.5B).
"""

from __future__ import annotations

from pathlib import Path

from ..tp.errors import ModelError
from ..tp.model.config import ModelConfig
from ..tp.weights.tokenizer import check_same_vocabulary

LARGEST_PADDING = 512
"""The maximum difference in rows at which two vocabularies count as the same one, padded differently."""


def check_draft(target: ModelConfig, draft: ModelConfig) -> None:
    """Checks the sizes of the two vocabularies.

    Raises:
        ModelError: they differ by more than padding.
    """
    if abs(draft.vocab_size - target.vocab_size) > LARGEST_PADDING:
        raise ModelError(
            f"the draft {draft.name} has a vocabulary of {draft.vocab_size}, the target {target.name} of "
            f"{target.vocab_size}; a draft must share its target's vocabulary, except for up to {LARGEST_PADDING} "
            "tokens of padding (or use --draft none)"
        )


def check_pair(target: Path, draft: Path | None, rope_scaling: str | None = None) -> ModelConfig:
    """Checks a pair, given by its directories, and returns the target's configuration. `draft` is `None` for no draft.
    The target's RoPE is scaled as `Settings.rope_scaling` says.

    Raises:
        ModelError: a configuration cannot be read, or the two do not share a vocabulary, token for token.
    """
    config = ModelConfig.load(target).with_rope_scaling(rope_scaling)
    if draft:
        check_draft(config, ModelConfig.load(draft))
        check_same_vocabulary(target, draft)
    return config
