"""Reads a million tokens for real, finds a passage in them, and writes the same tokens with three tiers as with one.

    python examples/measure/million_tokens.py                                # 1,048,576 tokens
    python examples/measure/million_tokens.py --tokens 65536 --json out.json

The model is tiny, and its weights are put together by hand: two layers with one head of 32. The first notes at each
token the one before it, by RoPE pairs that turn fast. The second looks for the place whose note is the current token,
in pairs that stand still even over a million positions, and says what stands there. So the model goes on with whatever
followed the last token earlier. The text is random, but for a passage whose tokens occur nowhere else; the prompt ends
with the first of them, and the answer begins with the others: attention at every position is exact, or it does not.
The model is its own draft, whose window does not reach the passage.

It exits with 1 where tokens differ or the passage is not found.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from report import as_text, make_parser, print_table, write_json
from safetensors.torch import save_file
from torch import Tensor
from triforce.cli.terminal.streams import print_note
from triforce.kernels.cpu.library import instructions
from triforce.offload import Engine, Sampling
from triforce.offload.planning.memory import host_peak_bytes

CODE = 12  # dimensions of a token's code; as many of a head stand still
HEAD_DIM = 32
THETA = 1e12  # the first of 16 pairs turns by 1 a position, the tenth by 3e-8
STILL = [*range(10, 16), *range(26, 32)]
VOCAB, WIDTH = 128, 64
OWN, BEFORE, FOUND = (slice(start, start + CODE) for start in (0, CODE, 2 * CODE))
ONE = 3 * CODE  # a dimension that is 1 in every token

PEAK = 40.0  # logits of each fast pair where it looks one back
SHARP = 5.0  # logits of each of a code's dimensions that agrees
PASSAGE = 48  # tokens, with ids 1 to 48; all others of the text have greater ones


def codes() -> Tensor:
    """A code of -1 and 1 for each token, `[VOCAB, CODE]`, of which no two agree in more than eight dimensions."""
    found: list[int] = []
    for code in range(2**CODE):
        if all((code ^ other).bit_count() >= 4 for other in found):
            found.append(code)
    assert len(found) >= VOCAB
    bits = torch.tensor(found[:VOCAB]).unsqueeze(1) >> torch.arange(CODE) & 1
    return 2.0 * bits - 1.0


def weights() -> dict[str, Tensor]:
    """The model's, by the names of a Llama's."""
    embedding = torch.zeros(VOCAB, WIDTH)
    embedding[:, OWN], embedding[:, ONE] = codes(), 1.0
    found = {"model.embed_tokens.weight": embedding}
    heads = torch.zeros(2, 4, HEAD_DIM, WIDTH)  # of each layer: queries, keys, values, and the output transposed
    root = math.sqrt(HEAD_DIM)

    look_back, size = heads[0], math.sqrt(PEAK * root)
    for pair in range(9):
        turn = THETA ** (-2 * pair / HEAD_DIM)
        look_back[0, pair, ONE], look_back[0, pair + 16, ONE] = size * math.cos(turn), -size * math.sin(turn)
        look_back[1, pair, ONE] = size
    look_back[2, :CODE, OWN] = look_back[3, :CODE, BEFORE] = torch.eye(CODE)

    match, size = heads[1], math.sqrt(SHARP * root)
    match[0, STILL, OWN] = match[1, STILL, BEFORE] = size * torch.eye(CODE)
    match[2, :CODE, OWN] = match[3, :CODE, FOUND] = torch.eye(CODE)

    for layer, (q, k, v, o) in enumerate(heads):
        name = f"model.layers.{layer}."
        # What a token holds so far are numbers of size 1: the norm leaves them as they are.
        norm = torch.full((WIDTH,), math.sqrt((CODE * (layer + 1) + 1) / WIDTH))
        found |= {f"{name}self_attn.{which}_proj.weight": part for which, part in zip("qkv", (q, k, v), strict=True)}
        found |= {f"{name}self_attn.o_proj.weight": o.T, f"{name}input_layernorm.weight": norm}
        found |= {f"{name}mlp.{which}_proj.weight": torch.zeros(32, WIDTH) for which in ("gate", "up")}
        found |= {f"{name}mlp.down_proj.weight": torch.zeros(WIDTH, 32), f"{name}post_attention_layernorm.weight": norm}
    head = torch.zeros(VOCAB, WIDTH)
    head[:, FOUND] = codes()
    found |= {"model.norm.weight": torch.ones(WIDTH), "lm_head.weight": head}
    return {name: weight.bfloat16().contiguous() for name, weight in found.items()}


def save_model(directory: Path, positions: int) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": THETA,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights(), directory / "model.safetensors")


def text(tokens: int, place: float) -> list[int]:
    """A prompt of so many tokens, with the passage at this share of it."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(PASSAGE + 1, VOCAB, (tokens,), generator=generator)
    start = 1 + int(place * (tokens - PASSAGE - 2))  # the first token would note itself
    ids[start : start + PASSAGE] = torch.arange(1, PASSAGE + 1)
    ids[-1] = 1
    return ids.tolist()


class Progress:
    """Says every five per cent how much is read, and how long that took."""

    def __init__(self) -> None:
        self._began, self._next = time.perf_counter(), 0.05

    def __call__(self, share: float) -> None:
        if share >= self._next:
            spent = time.perf_counter() - self._began
            print_note(f"  {share:4.0%} after {spent:,.0f} s, about {spent / share - spent:,.0f} s left")
            self._next = share + 0.05


def run(engine: Engine, prompt: list[int], new_tokens: int, tiers: int) -> dict[str, Any]:
    """The statistics of one answer, after reading what has not been read."""
    result = engine.generate(
        prompt, Sampling(temperature=0.0), new_tokens, tiers=tiers, ignore_eos=True, on_prefill=Progress()
    )
    return dict(result.stats)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=2**20, help="of the prompt (default: 1,048,576)")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--place", type=float, default=0.4, help="of the passage: a share of the text (default: 0.4)")
    parser.add_argument("--dtype", default="float32", help="float32 (default) or bfloat16, where near-ties may differ")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        save_model(Path(directory), options.tokens + options.new_tokens)
        capacity = options.tokens + options.new_tokens
        engine = Engine.load(
            directory,
            directory,
            device="cpu",
            dtype=options.dtype,
            capacity=capacity,
            threads=options.threads,
            block_length=12,  # fixed, so that it speculates however fast plain decoding of so small a model is
            draft_length=2,
        )
    prompt = text(options.tokens, options.place)
    print_note(f"reading {options.tokens:,} tokens ...")
    three = run(engine, prompt, options.new_tokens, 3)
    one = run(engine, prompt, options.new_tokens, 1)

    same = three["token_ids"] == one["token_ids"]
    wanted = list(range(2, PASSAGE + 1))[: options.new_tokens]
    found = one["token_ids"][: len(wanted)] == wanted
    document = {
        "same_tokens": same,
        "passage_found": found,
        "prefill_s": three["prefill_s"],
        "host_peak_bytes": host_peak_bytes(),
        "instructions": instructions(),
        "three_tiers": three,
        "one_tier": one,
    }
    rows = [
        {"tiers": tiers, "ms_a_token": stats["tbt_ms"]["mean"], **stats, **stats["acceptance"]}
        for tiers, stats in ((3, three), (1, one))
    ]
    columns = ("tiers", "prefill_s", "reused_tokens", "ms_a_token", "tokens_per_round")
    verdict = f"the same tokens: {as_text(same)}; the passage was found: {as_text(found)}"
    print_table(options, f"{options.tokens:,} tokens, {options.dtype}", rows, columns, [verdict])
    write_json(options, document)
    sys.exit(not (same and found))


if __name__ == "__main__":
    main()
