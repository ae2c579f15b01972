"""RoPE scaling, which extends a model to contexts longer than its original context: parameters and frequencies.

Scalings: none, linear (position interpolation, arXiv 2306.15595), dynamic (NTK-aware, recomputed as the sequence
grows), YaRN (arXiv 2309.00071) and Llama 3.1's. The meaning and the defaults of the parameters are those of
`transformers`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True)
class RopeConfig:
    """RoPE's base and scaling. Parameters that a type does not use keep their defaults and have no effect."""

    theta: float = 10000.0
    """The base."""
    type: str = "default"
    """One of `ROPE_TYPES`."""
    factor: float = 1.0
    original_positions: int = 1
    """The context without the scaling, in tokens."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """The factor on cosines and sines."""

    @classmethod
    def of_layers(cls, raw: dict[str, Any], max_positions: int) -> tuple[RopeConfig, RopeConfig]:
        """Reads a `config.json` in which layers with sliding windows have a RoPE of their own.

        transformers 5 writes parameters for each type of layer. Others write separate keys for the two types.

        Returns:
            RoPE of the layers without a window, and RoPE of the layers with a window.

        Raises:
            KeyError, TypeError, ValueError: see `from_raw`.
        """
        by_type = raw.get("rope_parameters") or {}
        if by_type and not by_type.keys() & {"full_attention", "sliding_attention"}:
            raise ValueError(
                f"rope_parameters with {', '.join(by_type)}, without full_attention or sliding_attention, the types of "
                "layers that they are for"
            )
        full = {"rope_theta": raw.get("rope_theta") or 1e6} | (by_type.get("full_attention") or {})
        full |= raw.get("rope_scaling") or {}
        windowed = {"rope_theta": raw.get("rope_local_base_freq") or 1e4} | (by_type.get("sliding_attention") or {})
        both = tuple(cls.from_raw({"rope_parameters": given}, max_positions) for given in (full, windowed))
        unknown = [rope.type for rope in both if rope.type == "dynamic" or rope.type not in ROPE_TYPES]
        if unknown:
            raise ValueError(f"RoPE scaling {unknown[0]!r}, which is not supported for some of a model's layers")
        return both[0], both[1]

    @classmethod
    def from_raw(cls, raw: dict[str, Any], max_positions: int) -> RopeConfig:
        """Reads the RoPE part of a `config.json` whose `max_position_embeddings` is `max_positions`.

        Raises:
            KeyError: a parameter that the type needs is missing.
            TypeError, ValueError: a value is of the wrong kind, or impossible.
        """
        given = rope_parameters(raw)
        kind = rope_type(raw)
        theta = float(given.get("rope_theta") or raw.get("rope_theta") or 10000.0)
        if theta <= 1.0:
            raise ValueError(f"rope_theta {theta:g}, which must be above 1")
        if kind == "default":
            return cls(theta)
        # The original context may be given inside or outside the RoPE parameters; outside takes precedence.
        original = raw.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
        original = max_positions if kind in ("linear", "dynamic") else int(original or max_positions)
        if kind == "yarn" and given["factor"] is None:
            given = given | {"factor": max_positions / original}
        factor = float(given["factor"])
        if not 1.0 <= factor < math.inf or original < 1:
            raise ValueError(f"RoPE scaling by {factor:g} from {original} positions, which must both be 1 or more")
        if kind == "yarn":
            return cls(
                theta,
                kind,
                factor,
                original,
                beta_fast=float(given.get("beta_fast") or 32.0),
                beta_slow=float(given.get("beta_slow") or 1.0),
                truncate=bool(given.get("truncate", True)),
                attention_factor=_yarn_attention_factor(given, factor),
            )
        if kind == "llama3":
            low, high = float(given["low_freq_factor"]), float(given["high_freq_factor"])
            if not 0.0 < low < high:
                raise ValueError(
                    f"low_freq_factor {low:g} and high_freq_factor {high:g}; both must be above 0, the second larger"
                )
            return cls(theta, kind, factor, original, low, high)
        return cls(theta, kind, factor, original)

    def positions(self, max_positions: int) -> int:
        """The context length of the model, in tokens, with the scaling.

        Args:
            max_positions: `max_position_embeddings` of its `config.json`. With some scalings, this is the context
                without the scaling in some models, and with the scaling in others.
        """
        if self.type in ("linear", "dynamic", "yarn"):
            return max(max_positions, int(self.original_positions * self.factor))
        return max_positions

    def inverse_frequencies(self, head_dim: int, lengths: Tensor) -> Tensor:
        """The angle in radians by which each position advances each pair of dimensions, float32 on the CPU.

        Operations have the same order as in `transformers`. At position one million, the error of an angle is a million
        times the error of its frequency. So even another rounding of the frequency changes logits.

        Args:
            head_dim: the number of rotated dimensions.
            lengths: `[n]` int64, for each of `n` positions the length of the sequence when its token is added. Only
                dynamic scaling uses it.

        Returns:
            `[head_dim / 2]`, or for dynamic scaling `[n, head_dim / 2]`.
        """
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        if self.type == "dynamic":
            stretch = self.factor * lengths / self.original_positions - (self.factor - 1)
            # In float64, as PyTorch does for the power of a single number, but not for a tensor of many.
            bases = self.theta * (stretch.clamp_min(1.0).double() ** (head_dim / (head_dim - 2))).float()
            return 1.0 / bases.unsqueeze(1) ** exponents
        frequencies = 1.0 / self.theta**exponents
        if self.type == "linear":
            return frequencies / self.factor
        if self.type == "yarn":
            kept = self._yarn_kept(head_dim)
            return 1.0 / (self.factor * self.theta**exponents) * (1 - kept) + frequencies * kept
        if self.type == "llama3":
            return self._llama3(frequencies)
        return frequencies

    def _llama3(self, frequencies: Tensor) -> Tensor:
        """Frequencies that turn rarely within the original context are divided by the factor; fast ones are kept, and
        those between are interpolated."""
        wavelengths = 2 * math.pi / frequencies
        turns = self.original_positions / wavelengths
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        between = (1 - kept) * frequencies / self.factor + kept * frequencies
        slow = wavelengths > self.original_positions / self.low_freq_factor
        fast = wavelengths < self.original_positions / self.high_freq_factor
        return torch.where(slow, frequencies / self.factor, torch.where(fast, frequencies, between))

    def _yarn_kept(self, head_dim: int) -> Tensor:
        """The share of each frequency that is not scaled, `[head_dim / 2]`, falling from 1 to 0 along a ramp."""

        def pair_that_turns(turns: float) -> float:
            """The (fractional) index of the pair of dimensions that makes `turns` turns within the original context."""
            return head_dim * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        first, last = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        if first == last:
            last += 0.001
        return 1 - ((torch.arange(head_dim // 2).float() - first) / (last - first)).clamp(0.0, 1.0)


def rope_parameters(raw: dict[str, Any]) -> dict[str, Any]:
    """The RoPE part of a `config.json`: `rope_scaling` (before transformers 5), which takes precedence, or
    `rope_parameters` (transformers 5)."""
    return raw.get("rope_scaling") or raw.get("rope_parameters") or {}


def rope_type(raw: dict[str, Any]) -> str:
    """The name of the scaling, `default` for none; older checkpoints call it `type`."""
    given = rope_parameters(raw)
    return str(given.get("rope_type") or given.get("type") or "default")


def _yarn_attention_factor(given: dict[str, Any], factor: float) -> float:
    """The factor on cosines and sines: the given one, or a ratio of two (`mscale`, `mscale_all_dim`), or that of the
    paper for `factor` (section 3.4)."""

    def suggested(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    scale, scale_all = given.get("mscale"), given.get("mscale_all_dim")
    if scale and scale_all:
        return suggested(float(scale)) / suggested(float(scale_all))
    return suggested(1.0)
