"""Bad input, through the real command: one clear message each, and the right exit code."""

import json
import shutil
from types import SimpleNamespace

import psutil
import pytest
import torch
from command import TEXT, check_refusal, run_command, run_fork, run_here, save_tokenizer
from tiny import save_llama


@pytest.fixture
def refuse(pair, capfd):
    """Runs `generate` on the tiny pair with a prompt unless the arguments say otherwise, and checks the refusal."""
    target, draft = pair

    def check(arguments, code, *words):
        given = [str(argument) for argument in arguments]
        if "--model" not in given:
            given += ["--model", str(target), "--draft", str(draft)]
        if not {"--prompt", "--prompt-file"} & set(given):
            given += ["--prompt", TEXT]
        check_refusal(run_here(capfd, "generate", *given), code, *words)

    return check


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        (None, 1, ("does not exist", "--prompt-file", "nowhere.txt")),
        (b"", 1, ("is empty", "nowhere.txt")),
        (b" \n\t\n", 1, ("is empty but for white space",)),
        (b"fine so far \xff\xfe", 1, ("is not UTF-8", "0xff", "offset 12", "iconv")),
        (b"\xef\xbb\xbfwith a mark \xe9", 1, ("is not UTF-8", "0xe9", "offset 15")),
        (b"PK\x03\x04\0\0binary", 1, ("is not text", "NUL", "offset 4")),
    ],
)
def test_bad_prompt_file_is_refused_before_anything_is_loaded(capfd, tmp_path, content, code, words):
    path = tmp_path / "nowhere.txt"
    if content is not None:
        path.write_bytes(content)
    check_refusal(run_here(capfd, "generate", "--model", tmp_path, "--prompt-file", path), code, *words)


def test_directory_as_prompt_file_is_refused(refuse, tmp_path):
    refuse(["--prompt-file", tmp_path], 1, str(tmp_path), "is a directory", "give a text file")


def test_empty_stdin_is_refused(tmp_path):
    outcome = run_fork("generate", "--model", tmp_path, "--prompt-file", "-")
    check_refusal(outcome, 1, "standard input is empty")


def test_empty_prompt_and_empty_question_are_refused(refuse):
    refuse(["--prompt", ""], 1, "--prompt is empty")
    refuse(["--ask", " "], 2, "--ask is empty")


def test_two_prompts_are_refused(refuse, tmp_path):
    refuse(["--prompt", "a", "--prompt-file", tmp_path / "b"], 2, "--prompt-file and --prompt", "give one")


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--max-new-tokens", "0", ("0", "whole number from 1")),
        ("--max-new-tokens", "many", ("'many'", "whole number from 1")),
        ("--temperature", "-0.5", ("-0.5", "0 (greedy) or more")),
        ("--temperature", "hot", ("'hot'", "is a number")),
        ("--temperature", "nan", ("nan", "0 (greedy) or more")),
        ("--top-p", "1.5", ("1.5", "at most 1")),
        ("--top-p", "0", ("0.0", "above 0 and at most 1")),
        ("--min-p", "1.5", ("1.5", "from 0 (off) to 1")),
        ("--min-p", "-0.1", ("-0.1", "from 0 (off) to 1")),
        ("--min-p", "nan", ("nan", "from 0 (off) to 1")),
        ("--top-k", "-1", ("-1", "whole number from 0")),
        ("--seed", "0.5", ("'0.5'", "whole number")),
        ("--seed", str(-(2**63) - 1), (str(-(2**63) - 1), "2^63")),
        ("--seed", str(2**63), (str(2**63), "2^63")),
        ("--gpus", "0", ("0", "whole number from 1")),
        ("--device", "tpu", ("'tpu'", "auto", "cpu", "cuda")),
        ("--dtype", "int4", ("'int4'", "float32", "bfloat16", "float16")),
        ("--tiers", "4", ("'4'", "'1'", "'2'", "'3'")),
        ("--truncate", "left", ("'left'", "head", "tail", "middle")),
        ("--budget", "lots", ("'lots'", "auto or a whole number of tokens")),
        ("--budget", "0", ("'0'", "from 1")),
        ("--budget", "4", ("4 tokens", "one chunk", "raise it")),
        ("--chunk-size", "-8", ("'-8'", "auto or a whole number")),
        ("--chunk-size", "1000", ("1000", "from 1 to 512")),
        ("--draft-length", "0", ("'0'", "from 1")),
        ("--draft-length", "65", ("65", "from 1 to 64")),
        ("--block-length", "1.5", ("'1.5'", "auto or a whole number")),
        ("--block-length", "257", ("257", "from 1 to 256")),
        ("--refresh", "sometimes", ("'sometimes'", "auto, round, never")),
        ("--refresh", "0", ("refresh is 0", "number of rounds from 1")),
        ("--resident", "-1", ("'-1'", "auto or a number of GiB")),
    ],
)
def test_impossible_value_names_option_value_and_what_is_possible(refuse, option, value, words):
    refuse([option, value], 2, option.lstrip("-"), *words)


def test_unknown_option_and_command_are_refused(capfd):
    check_refusal(run_here(capfd, "generate", "--temprature", "1"), 2, "--temprature")
    check_refusal(run_command("generat"), 2, "generat")


def test_cuda_where_there_is_none_is_refused(refuse, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    refuse(["--device", "cuda"], 2, "device is cuda", "--device cpu")


def test_prompt_longer_than_the_model_names_both_lengths(refuse):
    refuse(["--prompt", TEXT * 20], 1, "1,024 positions", "256 more", "--truncate", "--max-new-tokens")


def test_question_that_leaves_no_room_is_refused(refuse):
    refuse(["--prompt", TEXT, "--ask", TEXT * 20, "--truncate", "head"], 1, "--ask takes", "no room", "1,024 positions")


def test_length_that_leaves_no_room_does_not_blame_a_question(refuse):
    refuse(["--max-new-tokens", 5000, "--truncate", "head"], 1, "--max-new-tokens takes 5,000", "no room", "lower it")


def test_question_that_is_not_utf8_is_refused(pair, capfd):
    question = b"Who is Andr\xe9?".decode("utf-8", "surrogateescape")
    asked = run_command("generate", "--model", pair[0], "--prompt", "A", "--ask", question)
    given = run_here(capfd, "generate", "--model", pair[0], "--prompt", question)
    for option, outcome in (("--ask", asked), ("--prompt", given)):
        check_refusal(outcome, 1, f"{option} is not UTF-8", "0xe9", "offset 11")


def test_unknown_model_lists_what_is_known(capfd):
    unknown = run_here(capfd, "generate", "--model", "no-such-model")
    check_refusal(unknown, 1, "'no-such-model'", "embedded", "owner/name")
    check_refusal(run_here(capfd, "generate", "--draft", "./no/such-draft"), 1, "'./no/such-draft'")


def test_file_as_model_is_refused(refuse, pair):
    refuse(["--model", pair[0] / "config.json"], 1, "is a file", "directory with config.json")


@pytest.fixture
def broken(pair, tmp_path):
    """A copy of the tiny target to break."""
    copy = tmp_path / "broken"
    shutil.copytree(pair[0], copy)
    return copy


def test_missing_weights(refuse, broken):
    (broken / "model.safetensors").unlink()
    refuse(["--model", broken], 1, "has no weights", "model.safetensors")
    (broken / "model.gguf").write_bytes(b"x")
    refuse(["--model", broken], 1, "has no weights", "model.gguf is there")
    (broken / "pytorch_model.bin").write_bytes(b"x")
    refuse(["--model", broken], 1, "pytorch_model.bin is damaged or is not a PyTorch file", "download it again")


def test_truncated_weights(refuse, broken):
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refuse(["--model", broken], 1, "model.safetensors is damaged", "download it again")


def test_weights_that_are_not_safetensors(refuse, broken):
    (broken / "model.safetensors").write_bytes(b"PK\x03\x04 a zip, as torch.save writes it")
    refuse(["--model", broken], 1, "not a safetensors file")


def test_weights_of_another_shape(refuse, broken):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    refuse(["--model", broken], 1, "has shape", "its config says")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ("config.json does not exist",)),
        ("{", ("cannot be read as JSON",)),
        ('{"architectures": ["MambaForCausalLM"]}', ("MambaForCausalLM", "not supported", "LlamaForCausalLM")),
        ('{"architectures": ["LlamaForCausalLM"]}', ("config.json does not give",)),
    ],
)
def test_config_that_cannot_be_used(refuse, broken, content, words):
    if content is None:
        (broken / "config.json").unlink()
    else:
        (broken / "config.json").write_text(content)
    refuse(["--model", broken], 1, *words)


def test_missing_and_damaged_tokenizer(refuse, broken):
    (broken / "tokenizer.json").write_text("{}")
    refuse(["--model", broken], 1, "the tokenizer in", "cannot be loaded")
    (broken / "tokenizer.json").unlink()
    (broken / "tokenizer_config.json").unlink()
    refuse(["--model", broken], 1, "has no tokenizer", "tokenizer.json")


def test_draft_with_another_vocabulary(refuse, pair, tmp_path):
    sized, worded = tmp_path / "sized", tmp_path / "worded"
    save_llama(sized, vocab_size=900, num_hidden_layers=1)
    refuse(["--model", pair[0], "--draft", sized], 1, "vocabulary of 900", "320", "--draft none")
    shutil.copytree(pair[1], worded)
    save_tokenizer(worded, "entirely other words make entirely other tokens, which these are " * 8)
    refuse(["--model", pair[0], "--draft", worded], 1, "tokenizers of", "differ in", "--draft none")


def test_too_little_memory_is_found_before_weights_are_read(refuse, broken):
    config = json.loads((broken / "config.json").read_text())
    giant = {"num_hidden_layers": 200, "hidden_size": 32768, "intermediate_size": 131072, "head_dim": 8192}
    (broken / "config.json").write_text(json.dumps(config | giant))
    (broken / "model.safetensors").unlink()
    refuse(["--model", broken], 1, "of memory", "weights", "KV cache", "available", "smaller model")


def test_context_that_does_not_fit_says_how_much_would(refuse, broken, monkeypatch):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 10_000_000}))
    little = SimpleNamespace(available=640 * 2**20, total=2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: little)
    refuse(["--model", broken, "--max-new-tokens", 9_000_000], 1, "KV cache", "0.62 GiB is available", "would fit")


def test_json_that_cannot_be_written_is_found_before_the_run(refuse, tmp_path):
    refuse(["--json", tmp_path], 2, "--json", "is a directory")
    refuse(["--json", tmp_path / "none" / "run.json"], 1, "--json", "no directory")


def test_unexpected_error_is_one_line_and_debug_gives_the_traceback(pair, capfd, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("a bug\nof two lines")

    monkeypatch.setattr(torch, "set_num_threads", fail)
    arguments = ("generate", "--model", pair[0], "--prompt", TEXT, "--max-new-tokens", 8, "--threads", 2)
    outcome = run_here(capfd, *arguments)
    check_refusal(outcome, 1, "ZeroDivisionError: a bug")
    assert "--debug" in outcome.err
    assert "Traceback" in run_here(capfd, *arguments, "--debug").err
