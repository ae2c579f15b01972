"""Measures a model with linear attention on a CPU: reading a prompt beside transformers, drafts on a text that quotes
itself, and what it costs to take drafted tokens back.

    python examples/measure/hybrid_results.py --tokens 32768 --json hybrid.json
    python examples/measure/hybrid_results.py --tokens 2048 --parts rejections --dtype bfloat16

The model has the shape of Qwen3.5-0.8B and random weights, of which the last ones are such that it quotes: each token
has a likely successor, with which passages of the prompt go on, and a second one, which begins another passage. What
its layers add decides between them. So the work is a real model's, and how often drafts are right is set by `--gap`: it
says nothing of a trained model. The likely successors come from the embedding alone, so its multi-token-prediction head
knows them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from report import make_parser, print_table, write_json
from torch import Tensor
from triforce.cli.terminal.streams import print_note
from triforce.offload import Engine, Sampling
from triforce.offload.caches.full import FullCache
from triforce.offload.settings import Settings
from triforce.offload.shape_steps import RandomWeights
from triforce.tp.decoder import Decoder
from triforce.tp.weights.registry import PRESETS

PRESET = "qwen3.5-27b-gptq"
"""Whose draft has the shape."""

PASSAGES = 3001
"""Tokens that the text is made of, in one order."""

ADDED = 0.1
"""What the layers add is so much less than a random model's."""

VERIFIED = 13
"""Tokens of a verification."""

CPU = torch.device("cpu")
GREEDY = Sampling(temperature=0.0)


class QuotingWeights(RandomWeights):
    """Those of a model that quotes."""

    def __init__(self, dtype: torch.dtype, gap: float) -> None:
        super().__init__(dtype, CPU)
        self._gap = gap
        self._embedding: Tensor | None = None
        self.second = torch.randperm(PASSAGES)
        """The second successor of each token of the passages."""

    def read(self, name: str, *shape: int, **part: Any) -> Tensor:
        if name == "model.embed_tokens.weight":
            self._embedding = torch.randn(shape, dtype=self.dtype)
            return self._embedding
        if name == "lm_head.weight":
            return self._head(*shape)
        if name == "mtp.fc.weight":
            return torch.eye(*shape, dtype=self.dtype)
        found = super().read(name, *shape, **part)
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            found *= ADDED
        return found

    def _head(self, tokens: int, width: int) -> Tensor:
        assert self._embedding is not None
        head, known = torch.zeros(tokens, width, dtype=self.dtype), self._embedding[:PASSAGES] * width**-0.5
        head[:PASSAGES] = known.roll(1, dims=0)  # the likely one is the next
        head[self.second] += (1 - self._gap) * known
        return head


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=32_768, help="of the prompt")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--gap", type=float, default=0.2, help="by which the likely successor is ahead: 0 to 1")
    parser.add_argument("--passage", type=int, default=100, help="tokens of a passage of the prompt, on average")
    parser.add_argument("--drafts", default="lookup,mtp", help="what to measure against plain decoding")
    parser.add_argument(
        "--parts", default="drafts,transformers", help="which of drafts, transformers and rejections to measure"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of rejections")
    given = parser.parse_args()
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    prompt = f"{given.tokens:,} tokens of prompt"
    if "drafts" in given.parts:
        found["drafts"] = drafts(given)
        rows = [{"draft": kind, **row} for kind, row in found["drafts"].items()]
        print_table(given, f"{prompt}, medians", rows, ("draft", "prefill_s", "plain_tbt_ms", "tbt_ms", "ratio"))
    if "transformers" in given.parts:
        found["transformers_prefill_s"] = transformers_prefill(given.tokens)
        print_table(given, prompt, [found], ["transformers_prefill_s"])
    if "rejections" in given.parts:
        found["rejections"] = rejections(given)
        rows = [
            {"": name, "ms": median, "at least": least, "at most": most}
            for name, (median, least, most) in found["rejections"].items()
        ]
        print_table(given, f"{prompt}, a pass over {VERIFIED} tokens", rows)
    write_json(given, found)


def drafts(given: argparse.Namespace) -> dict[str, Any]:
    """Plain decoding, and with each draft, in turns; medians."""
    config = replace(PRESETS[PRESET].configs()[1], tie_word_embeddings=False)
    weights = QuotingWeights(torch.float32, given.gap)
    target = Decoder(config, weights, CPU)  # pyright: ignore[reportArgumentType]
    head = Decoder(config.mtp_head, weights, CPU, model=target)  # pyright: ignore[reportArgumentType]
    prompt = quoting_text(given.tokens, given.passage, weights.second)
    found: dict[str, Any] = {}
    for kind in given.drafts.split(","):
        lookup = kind == "lookup"
        engine = Engine(target, None if lookup else head, Settings(lookup=lookup))
        first = engine.generate(prompt, GREEDY, 1, ignore_eos=True).stats
        print_note(f"{kind}: the prompt takes {first['prefill_s']:.1f} s")
        turns = [[one_answer(engine, prompt, given.new_tokens, tiers) for tiers in (1, 3)] for _ in range(given.repeat)]
        found[kind] = {"prefill_s": first["prefill_s"], "turns": turns}
        found[kind] |= {
            "plain_tbt_ms": statistics.median(plain["tbt_ms"]["mean"] for plain, _ in turns),
            "tbt_ms": statistics.median(drafted["tbt_ms"]["mean"] for _, drafted in turns),
            "ratio": statistics.median(plain["tbt_ms"]["mean"] / drafted["tbt_ms"]["mean"] for plain, drafted in turns),
        }
    return found


@torch.inference_mode()
def rejections(given: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a pass over as many tokens as a verification has, behind one of which so many were taken back, in
    turns; medians, and from the least to the most."""
    config, dtype = PRESETS[PRESET].configs()[1], getattr(torch, given.dtype)
    decoder = Decoder(config, RandomWeights(dtype, CPU), CPU)  # pyright: ignore[reportArgumentType]
    where = {"dtype": dtype, "device": CPU, "capacity": given.tokens + 4096}
    cache = FullCache.on_device(decoder.part, decoder.rope, **where, chunk_size=8)
    decoder.forward(torch.randint(config.vocab_size, (given.tokens,)), cache)
    tokens = torch.randint(config.vocab_size, (VERIFIED,))

    def one_pass() -> float:
        began = time.perf_counter()
        decoder.forward(tokens, cache, num_logits=VERIFIED)
        return 1000 * (time.perf_counter() - began)

    times: dict[int, list[float]] = {0: [], VERIFIED // 2: [], VERIFIED - 1: []}
    for _ in range(5 * given.repeat):
        for back, found in times.items():
            one_pass()
            cache.rollback(cache.length - back)
            found.append(one_pass())
    return {f"{back} taken back": [statistics.median(found), min(found), max(found)] for back, found in times.items()}


def one_answer(engine: Engine, prompt: list[int], new_tokens: int, tiers: int) -> dict[str, Any]:
    """What is kept of an answer's figures."""
    stats = engine.generate(prompt, GREEDY, new_tokens, ignore_eos=True, tiers=tiers).stats
    kept = {name: stats[name] for name in ("prefill_s", "reused_tokens", "tbt_ms", "acceptance", "token_ids")}
    print_note(f"{tiers} tiers: {stats['tbt_ms']['mean']:.1f} ms a token, {stats['acceptance']}")
    return kept


def quoting_text(tokens: int, passage: int, second: Tensor) -> list[int]:
    """A prompt as the model would write it, with a passage of so many tokens on average."""
    found, jumps = [0], (torch.rand(tokens) * passage < 1).tolist()
    for i in range(tokens - 1):
        found.append(int(second[found[-1]]) if jumps[i] else (found[-1] + 1) % PASSAGES)
    return found


@torch.inference_mode()
def transformers_prefill(tokens: int) -> float:
    """Seconds in which transformers reads so many tokens, with random weights of the same shape."""
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = PRESETS[PRESET].raw_configs[1]
    text = raw.get("text_config", raw)
    config = AutoConfig.for_model(**{"model_type": "qwen3_5_text", **text})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    prompt = torch.randint(config.vocab_size, (1, tokens))
    began = time.perf_counter()
    model(prompt, logits_to_keep=1, use_cache=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
