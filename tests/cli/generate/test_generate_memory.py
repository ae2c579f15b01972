"""What a run takes of memory, by the JSON it writes."""

import json

import pytest
from command import TEXT, VOCABULARY, run_command, save_tokenizer
from tiny import save_llama

LAYERS, KV_HEADS, HEAD_DIM, BUDGET = 16, 8, 128, 512
TOKEN_BYTES = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4
"""Keys and values of a token in float32: far more than weights and activations take in this shape."""


@pytest.mark.slow
def test_a_long_answer_takes_little_more_memory_than_a_short_one(tmp_path):
    """The retrieval cache has room for 64 tokens behind its chunks at first. When it grows, a copy of all its layers
    beside it might not fit where the budget was planned to fill the device."""
    save_tokenizer(tmp_path)
    shape = {"num_hidden_layers": LAYERS, "num_key_value_heads": KV_HEADS, "num_attention_heads": KV_HEADS}
    shape |= {"head_dim": HEAD_DIM, "hidden_size": 32, "intermediate_size": 32}
    save_llama(tmp_path, vocab_size=VOCABULARY, max_position_embeddings=2048, **shape)
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 8, encoding="utf-8")

    def peak(new_tokens: int) -> tuple[int, int]:
        """Tokens of the prompt, and the maximum memory in bytes. In a process of its own: a fork has this one's memory,
        used and free, and how much of it a run takes again is another each time."""
        run = run_command(
            *("generate", "--model", tmp_path, "--draft", "none", "--prompt-file", text, "--tiers", 2),
            *("--budget", BUDGET, "--refresh", "never", "--block-length", 2, "--temperature", 0, "--ignore-eos"),
            *("--threads", 1, "--max-new-tokens", new_tokens, "--json", "-"),
            MALLOC_MMAP_THRESHOLD_="65536",  # large memory is mapped, and given back as soon as it is freed
        )
        assert run.code == 0, run
        document = json.loads(run.out)
        return document["prompt_tokens"], document["memory"]["host_peak_bytes"]

    (prompt, short), (_, long) = peak(8), peak(80)
    assert prompt > BUDGET + 512, "the prompt must be longer than the budget"
    cache, tokens = BUDGET * TOKEN_BYTES, 2 * 80 * TOKEN_BYTES
    assert long - short < tokens + cache / 4, (
        f"{(long - short) / 2**20:.0f} MiB more; the cache has {cache / 2**20:.0f}"
    )
