"""The shape of a model, read from the `config.json` of its Hugging Face directory. Runs no remote code and reads no
weights."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from ..errors import ModelError, UsageError
from .families import FAMILIES, Experts, Family, experts_of, plain_name, plain_positions, sliding_windows
from .linear_attention import LinearAttention, linear_attention
from .quantisation import Quantisation, quantisation_of
from .rope_option import parse_rope_scaling
from .rope_scaling import ROPE_TYPES, RopeConfig, rope_parameters, rope_type


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model.

    Names are those of Hugging Face's `config.json`; fields with the name of a field of `Family` have its meaning.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """The width of the MLP; with `experts`, that of one expert."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    """The maximum number of positions, with RoPE scaling but without dual chunk attention."""
    rope: RopeConfig
    rms_norm_eps: float
    tie_word_embeddings: bool
    dtype: torch.dtype
    """The dtype of the checkpoint."""
    eos_token_ids: tuple[int, ...]
    """The end-of-sequence tokens; may be empty."""
    name: str
    """The name of the model's directory."""
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    """The window of each layer (`None`: no window); empty if no layer has a window."""
    dual_chunk: bool = False
    """Whether the model is meant for more positions with dual chunk attention, which is not supported."""
    quantisation: Quantisation | None = None
    """Which matrices are stored in four to eight bits, and how."""
    experts: Experts | None = None
    activation: str = "silu"
    float32_norms: bool = False
    zero_centred_norms: bool = False
    norms_behind: bool = False
    scaled_embedding: bool = False
    query_scalar: float | None = None
    """Scores of attention are divided by the square root of this number; `None`: of `head_dim`."""
    window_rope: RopeConfig | None = None
    """RoPE of layers with a sliding window; `None`: the same as that of other layers."""
    linear: LinearAttention | None = None
    """The layers that have a state in the place of keys and values."""
    output_gate: bool = False
    rotary_dim: int = 0
    """How many dimensions of a head are rotated, counted from the first; 0: all of them."""
    further_layers: int | None = None
    """How many layers the multi-token-prediction head has that the checkpoint may contain; `None`: models of this
    family have no such head."""
    is_head: bool = False
    """Whether this is a multi-token-prediction head: see `mtp_head`."""

    @property
    def mtp_head(self) -> ModelConfig:
        """The model's multi-token-prediction head, as a model of its own.

        It is one layer that attends to keys, with the embedding and the output head of the model. The input of the
        layer is projected from the embedding of a token and the model's hidden state of the token before it.

        Raises:
            ModelError: the model has no head, or a head of another kind.
        """
        if self.further_layers != 1:
            found = f"has {self.further_layers} layers" if self.further_layers else "is not there, or not of this kind"
            raise ModelError(
                f"the multi-token-prediction head of {self.name} {found}; --draft mtp needs a head with one layer "
                "(Qwen3-Next and Qwen3.5 have one); give a small model to --draft, or lookup, or none"
            )
        return replace(self, num_layers=1, sliding_windows=(), linear=None, further_layers=None, is_head=True)

    @property
    def kv_layers(self) -> int:
        """The number of layers with keys and values. Caches count only these."""
        return self.num_layers - (len(self.linear.layers) if self.linear else 0)

    @property
    def rotated(self) -> int:
        """The number of dimensions of a head that are rotated."""
        return self.rotary_dim or self.head_dim

    @property
    def kept_windows(self) -> dict[int, int]:
        """The sliding window of each layer that keeps only the last tokens, by the number of the layer.

        Empty if all layers have a window, or none has.
        """
        windows = self.sliding_windows
        return {layer: window for layer, window in enumerate(windows) if window is not None} if None in windows else {}

    @property
    def full_places(self) -> tuple[int | None, ...]:
        """For each layer with keys and values, its index among the layers that keep all tokens; `None` for those of
        `kept_windows`."""
        windows, places = self.kept_windows, count()
        return tuple(None if layer in windows else next(places) for layer in range(self.kv_layers))

    @property
    def full_layers(self) -> ModelConfig:
        """The model with only the layers that keep all tokens."""
        left = self.kv_layers - len(self.kept_windows)
        return self if left == self.num_layers else replace(self, num_layers=left, sliding_windows=(), linear=None)

    @property
    def attention_scale(self) -> float:
        """The factor on scores of attention."""
        return (self.query_scalar or self.head_dim) ** -0.5

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """RoPE of the layers without a sliding window, and of those with a sliding window if theirs is different."""
        return (self.rope,) if self.window_rope is None else (self.rope, self.window_rope)

    @property
    def positions_note(self) -> str:
        """The text that messages add to the number of positions if it is limited by missing dual chunk attention."""
        return " without dual chunk attention, which is not supported" if self.dual_chunk else ""

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of the keys and values of one token over all layers, in `dtype`."""
        return 2 * self.kv_layers * self.num_kv_heads * self.head_dim * dtype.itemsize

    def sliding_window(self, layer: int) -> int | None:
        """The number of tokens that a token attends to in this layer, including itself; `None`: all tokens up to it."""
        return self.sliding_windows[layer] if self.sliding_windows else None

    def with_rope_scaling(self, asked: str | None) -> ModelConfig:
        """The model with scaled RoPE.

        Args:
            asked: the scaling, see `parse_rope_scaling`; `None`: no change.

        Raises:
            UsageError: the model's RoPE is scaled already, or `asked` is not valid.
        """
        if asked is None:
            return self
        scaling = parse_rope_scaling(asked, self.max_position_embeddings)
        if self.rope.type != "default":
            raise UsageError(f"rope-scaling is {asked}, but RoPE of {self.name} is scaled already ({self.rope.type})")
        raw = {"rope_theta": self.rope.theta, "rope_scaling": scaling}
        rope = RopeConfig.from_raw(raw, self.max_position_embeddings)
        return replace(self, rope=rope, max_position_embeddings=rope.positions(self.max_position_embeddings))

    @classmethod
    def load(cls, directory: Path) -> ModelConfig:
        """Reads `directory/config.json` (and the end-of-sequence ids of `generation_config.json`, if any).

        Raises:
            ModelError: the file is missing or is not JSON, the architecture is not supported, or a value is missing or
                impossible.
        """
        raw = _read_json(directory / "config.json")
        generation = directory / "generation_config.json"
        eos = _read_json(generation).get("eos_token_id") if generation.is_file() else None
        return cls.from_json(raw if eos is None else raw | {"eos_token_id": eos}, directory)

    @classmethod
    def from_json(cls, raw: dict[str, Any], directory: Path) -> ModelConfig:
        """Reads a `config.json` with the content `raw`.

        Args:
            raw: the content.
            directory: its name becomes the name of the model; it does not have to exist.

        Raises:
            ModelError: see `load`.
        """
        family = _family(raw, directory)
        raw = {**family.defaults, **(_unwrapped(raw, directory) if family.wrapped else raw)}
        _refuse_unsupported(raw, family, directory)
        return cls._from_raw(raw, family, raw.get("eos_token_id"), directory)

    @classmethod
    def _from_raw(cls, raw: dict[str, Any], family: Family, eos: Any, directory: Path) -> ModelConfig:
        try:
            num_heads = int(raw["num_attention_heads"])
            hidden_size = int(raw["hidden_size"])
            num_layers = int(raw["num_hidden_layers"])
            max_positions = int(raw["max_position_embeddings"])
            if family.windows == "most":
                rope, window_rope = RopeConfig.of_layers(raw, max_positions)
                positions = max_positions
            else:
                rope, window_rope = RopeConfig.from_raw(raw, max_positions), None
                positions = rope.positions(max_positions)
            plain = plain_positions(raw, positions)
            scalar = raw.get("query_pre_attn_scalar")
            head_dim = int(raw.get("head_dim") or hidden_size // num_heads)
            bias = family.attention_bias and bool(raw.get("attention_bias"))
            config = cls(
                vocab_size=int(raw["vocab_size"]),
                hidden_size=hidden_size,
                intermediate_size=int(raw[family.experts.width if family.experts else "intermediate_size"]),
                num_layers=num_layers,
                num_heads=num_heads,
                num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
                head_dim=head_dim,
                max_position_embeddings=plain,
                rope=rope,
                rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
                tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
                dtype=_dtype(raw),
                eos_token_ids=_token_ids(eos),
                name=directory.name,
                qkv_bias=family.qkv_bias or bias,
                o_bias=bias,
                qk_norm=family.qk_norm,
                sliding_windows=sliding_windows(family, raw, num_layers),
                dual_chunk=plain < positions,
                quantisation=quantisation_of(raw, directory / "config.json"),
                experts=experts_of(family, raw),
                activation=family.activation,
                float32_norms=family.float32_norms,
                zero_centred_norms=bool(raw.get("zero_centred_norms", family.zero_centred_norms)),
                norms_behind=family.norms_behind,
                scaled_embedding=family.scaled_embedding,
                query_scalar=None if scalar is None else float(scalar),
                window_rope=window_rope,
                linear=linear_attention(family.linear, raw, num_layers),
                output_gate=family.output_gate,
                rotary_dim=_rotary_dim(raw, family, head_dim),
                further_layers=_further_layers(raw) if family.predicts_further else None,
            )
        except KeyError as error:
            raise ModelError(f"{directory / 'config.json'} does not give {error}") from error
        except (TypeError, ValueError, ArithmeticError) as error:
            raise ModelError(f"{directory / 'config.json'} has a value of the wrong kind: {error}") from error
        sizes = (
            config.vocab_size,
            config.hidden_size,
            config.num_layers,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        if min(sizes) < 1 or config.num_heads % config.num_kv_heads or config.head_dim % 2:
            raise ModelError(
                f"{directory / 'config.json'} describes no possible model: {config.num_layers} layers, "
                f"width {config.hidden_size}, {config.num_heads} heads of {config.head_dim}, "
                f"{config.num_kv_heads} key/value heads (heads must be a multiple of those, head size even)"
            )
        return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path} does not exist; a model is a directory with config.json and its weights") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path} holds a JSON {type(raw).__name__}, not an object")
    return raw


def _family(raw: dict[str, Any], directory: Path) -> Family:
    names = raw.get("architectures") or []
    names = [str(name) for name in (names if isinstance(names, list) else [names])]
    known = [name for name in names if name in FAMILIES]
    if not known:
        raise ModelError(
            f"{directory / 'config.json'} names the architecture {', '.join(names) or '(none)'}, which is not "
            f"supported; supported: {', '.join(FAMILIES)}"
        )
    return FAMILIES[known[0]]


def _unwrapped(raw: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The description of the text model in a `config.json` that describes several models, together with the values that
    apply to all of them."""
    text, ends = raw.get("text_config"), raw.get("eos_token_id")
    if not isinstance(text, dict):
        raise ModelError(f"{directory / 'config.json'} does not give 'text_config'")
    found = raw | text | ({} if ends is None else {"eos_token_id": ends})
    few_bits = found.get("quantization_config")
    if isinstance(few_bits, dict):  # some of its values are lists of names
        found["quantization_config"] = {
            key: [plain_name(one) if isinstance(one, str) else one for one in value]
            if isinstance(value, list)
            else value
            for key, value in few_bits.items()
        }
    return found


def _refuse_unsupported(raw: dict[str, Any], family: Family, directory: Path) -> None:
    rope = rope_parameters(raw)
    if not isinstance(rope, dict):
        raise ModelError(f"{directory / 'config.json'} gives RoPE parameters that are not an object")
    scaling, rotated = rope_type(raw), _rotated_share(raw)
    activation = raw.get("hidden_activation" if "hidden_activation" in raw else "hidden_act", family.activation)
    differ = family.windows != "most" and any(isinstance(value, dict) for value in rope.values())
    unsupported = {
        f"RoPE scaling {scaling!r}": (scaling not in ROPE_TYPES, ", ".join(ROPE_TYPES)),
        "RoPE parameters that differ by layer": (differ, "one set for all"),
        f"partial_rotary_factor {rotated}": (family.rotated_share is None and rotated not in (None, 1), "1"),
        f"attn_output_gate {raw.get('attn_output_gate')}": (
            family.output_gate and raw.get("attn_output_gate") not in (None, True),
            "true",
        ),
        f"output_gate_type {raw.get('output_gate_type')!r}": (
            family.linear is not None and raw.get("output_gate_type") not in (None, "swish", "silu"),
            "swish",
        ),
        f"mamba_ssm_dtype {raw.get('mamba_ssm_dtype')!r}": (
            family.linear is not None and raw.get("mamba_ssm_dtype") not in (None, "float32"),
            "float32",
        ),
        f"activation {activation!r}": (activation != family.activation, family.activation),
        "mlp_bias": (bool(raw.get("mlp_bias")), "MLPs without bias"),
        "attn_logit_softcapping": (bool(raw.get("attn_logit_softcapping")), "scores as they are"),
        "final_logit_softcapping": (bool(raw.get("final_logit_softcapping")), "logits as they are"),
        "use_bidirectional_attention": (bool(raw.get("use_bidirectional_attention")), "causal attention"),
        "layers without experts (mlp_only_layers)": (bool(raw.get("mlp_only_layers")), "experts in all of them"),
        f"decoder_sparse_step {raw.get('decoder_sparse_step')}": (raw.get("decoder_sparse_step", 1) != 1, "1"),
    }
    for feature, (present, supported) in unsupported.items():
        if present:
            raise ModelError(
                f"{directory / 'config.json'} asks for {feature}, which is not supported; supported: {supported}"
            )


def _rotated_share(raw: dict[str, Any]) -> Any:
    return rope_parameters(raw).get("partial_rotary_factor", raw.get("partial_rotary_factor"))


def _rotary_dim(raw: dict[str, Any], family: Family, head_dim: int) -> int:
    if family.rotated_share is None:
        return 0
    given = _rotated_share(raw)
    found = int(head_dim * float(family.rotated_share if given is None else given))
    if not 2 <= found <= head_dim or found % 2:
        raise ValueError(
            f"partial_rotary_factor {given}, by which {found} of {head_dim} dimensions are rotated (supported: even "
            "numbers from 2)"
        )
    return found if found < head_dim else 0


def _further_layers(raw: dict[str, Any]) -> int:
    """See `ModelConfig.further_layers`. Also 0 for a head with an embedding of its own, which is not supported."""
    given = raw.get("mtp_num_hidden_layers")
    return 0 if raw.get("mtp_use_dedicated_embeddings") else 1 if given is None else int(given)


def _token_ids(value: Any) -> tuple[int, ...]:
    """Token ids that are given as one number, as a list, or as null."""
    return tuple(int(token) for token in (value if isinstance(value, list) else [value]) if token is not None)


def _dtype(raw: dict[str, Any]) -> torch.dtype:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    dtype = getattr(torch, str(name), None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype {name!r} (known: float32, bfloat16, float16)")
    return dtype
