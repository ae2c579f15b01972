"""How `logprobs` describes tokens."""

from tokenizers import Tokenizer, decoders, models
from triforce.cli.session.logprobs import entries, logprobs_field
from triforce.offload.speculation.sampling import TokenLogprobs


def test_a_token_has_the_space_before_it_also_where_a_text_would_not_begin_with_one():
    backend = Tokenizer(models.WordLevel({"▁The": 0, "▁cat": 1, "s": 2, "▁sat": 3}, unk_token="s"))
    backend.decoder = decoders.Metaspace()  # as in SentencePiece's vocabularies
    assert backend.decode([0, 1, 2, 3]) == "The cats sat"
    found = [TokenLogprobs(token, -0.5, ((3, -0.1),)) for token in (1, 2, 3)]
    described = entries(found, backend.decode, ())
    assert [entry["token"] for entry in described] == [" cat", "s", " sat"]
    assert described[0]["bytes"] == list(b" cat")
    assert described[1]["top_logprobs"][0]["token"] == " sat"
    field = logprobs_field(described, chat=False, offset=3)
    assert field and field["text_offset"] == ["The cats sat".index(word) for word in (" cat", "s", " sat")]


def test_a_part_of_a_character_has_no_bytes():
    backend = Tokenizer(models.WordLevel({"<0xE5>": 0, "a": 1}, unk_token="a"))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    (entry,) = entries([TokenLogprobs(0, -0.5, ())], backend.decode, ())
    assert entry["token"] == "\ufffd" and entry["bytes"] is None
