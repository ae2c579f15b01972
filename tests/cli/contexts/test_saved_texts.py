"""Saved texts from within: manifests whose numbers make no sense, and the tokens of a question after a text."""

from dataclasses import replace

from command import TEXT, run_here
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers
from triforce.cli.session.prompt import encode_behind
from triforce.offload.contexts.disk import Disk
from triforce.offload.contexts.manifest import Manifest
from triforce.tp.weights.tokenizer import Tokenizer


def test_a_manifest_of_nonsense_is_one_damaged_context(pair, capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path / "home"))
    (tmp_path / "book.txt").write_text(TEXT)
    assert run_here(capfd, "read", tmp_path / "book.txt", "--model", pair[0], "--device", "cpu").code == 0
    directory = tmp_path / "home" / "contexts" / "book"
    manifest = Manifest.load(directory)
    replace(manifest, shape=replace(manifest.shape, dtype="int8")).write(Disk(), directory)
    assert "damaged" in run_here(capfd, "contexts").out
    shown = run_here(capfd, "contexts", "show", "book")
    assert shown.code == 1 and "impossible numbers" in shown.err


def test_a_question_after_a_saved_text_is_tokenized_as_within_one(pair):
    """Tokenizers in the way of SentencePiece put a space before the first word that they get."""
    backend = Backend.from_file(str(pair[0] / "tokenizer.json"))
    backend.normalizer = normalizers.Prepend(" ")
    tokenizer = Tokenizer(encode=lambda text, special: backend.encode(text, add_special_tokens=special).ids,
                          decode=lambda ids: backend.decode(list(ids)))  # fmt: skip
    assert tokenizer.decode(encode_behind("Why?", tokenizer)) == "Why?"
