"""Models of the hub, through its real client and a small stand-in for its server: what is fetched, and what may fail.

Each case runs in a process of its own, which imports the client anew: it reads its settings when it is imported.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from checkpoints import in_shards, to_bin
from command import TRIFORCE, check_refusal, run_fork, save_tokenizer
from tiny import save_llama

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PROMPT = (
    "--prompt",
    "It was the best of times",
    "--max-new-tokens",
    "4",
    "--no-live",
    "--device",
    "cpu",
    "--seed",
    "1",
)


class Hub:
    """Serves directories as models. `log` holds what was fetched; `cut` is a file whose transfers end early."""

    def __init__(self, models: dict[str, Path]) -> None:
        self.models, self.log = models, []
        self.cut: str | None = None
        self.stalled, self.go_on = threading.Event(), threading.Event()
        """The first is set when a transfer is cut; the connection then stays open until the second is."""
        self.go_on.set()
        self.fail: tuple[int, str] | None = None
        """A status and an error code that answer every request."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self):
                hub.answer(self)

            do_GET = do_HEAD

            def log_message(self, format, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """As the hub does: `api/models/OWNER/NAME` lists files, `OWNER/NAME/resolve/REVISION/FILE` is one."""
        path = request.path.partition("?")[0].strip("/").removeprefix("api/models/").split("/")
        name, file = "/".join(path[:2]), "/".join(path[4:])
        directory = self.models.get(name, Path("nowhere"))
        files = {str(f.relative_to(directory)): f for f in directory.rglob("*") if f.is_file()}
        headers = {"X-Repo-Commit": COMMIT}
        if self.fail:
            self.reply(request, self.fail[0], b"", {"X-Error-Code": self.fail[1]})
        elif not files:
            self.reply(request, 401, b"", {"X-Error-Code": "RepoNotFound"})
        elif path[2:3] != ["resolve"]:
            listing = [{"rfilename": key, "size": path.stat().st_size} for key, path in files.items()]
            document = {"id": name, "sha": COMMIT, "siblings": listing}
            self.reply(request, 200, json.dumps(document).encode(), {"Content-Type": "application/json"})
        elif file not in files:
            self.reply(request, 404, b"", headers | {"X-Error-Code": "EntryNotFound"})
        else:
            self.send(request, file, files[file].read_bytes(), headers)

    def send(self, request: BaseHTTPRequestHandler, file: str, content: bytes, headers: dict[str, str]) -> None:
        start, headers = 0, headers | {"ETag": f'"{sha256(content).hexdigest()}"'}
        asked = request.headers.get("Range", "").removeprefix("bytes=").partition("-")[0]
        if asked:
            start = int(asked)
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if request.command == "GET":
            self.log.append(f"{file} from {start}" if asked else file)
        self.reply(request, 206 if asked else 200, content[start:], headers, cut=file == self.cut)

    def reply(self, request, status, content, headers, cut=False):
        request.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(content))}).items():
            request.send_header(key, value)
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(content[: len(content) // 2] if cut else content)
        if cut and request.command == "GET":
            request.wfile.flush()
            self.stalled.set()
            self.go_on.wait(60)
            request.close_connection = True


@contextmanager
def serving(models):
    hub = Hub(models)
    thread = threading.Thread(target=hub.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.server.shutdown()
        hub.server.server_close()
        thread.join()


@pytest.fixture
def hub(pair, tmp_path):
    """A hub with the tiny pair as `tiny/target` and `tiny/draft`, beside files that nobody needs."""
    for name, source in zip(("target", "draft"), pair, strict=True):
        copy = tmp_path / "served" / name
        copy.mkdir(parents=True)
        for file in source.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
    target = tmp_path / "served" / "target"
    for name in ("README.md", "modeling_tiny.py", "pytorch_model.bin", "original/model.safetensors", "model.gguf"):
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text("not needed")
    with serving({f"tiny/{name}": tmp_path / "served" / name for name in ("target", "draft")}) as server:
        yield server


@pytest.fixture
def run(hub, tmp_path):
    """Runs `triforce generate` with an empty cache of its own and the stand-in as its hub."""

    def generate(*arguments, **environment):
        settings = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
        return run_fork("generate", *PROMPT, *arguments, anew="huggingface_hub", **(settings | environment))

    return generate


@pytest.mark.slow
def test_a_model_and_its_draft_are_downloaded_once_and_then_need_no_network(hub, run, pair):
    first = run("--model", "tiny/target", "--draft", "tiny/draft", "--json", "-")
    assert first.code == 0, first
    assert "downloading tiny/target, " in first.err
    assert {file for file in hub.log if "." in file} == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"
    }  # fmt: skip
    assert len(hub.log) == len(set(hub.log)) * 2, "each file of both, once"
    hub.log.clear()
    hub.fail = 500, ""
    for environment in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        again = run("--model", "tiny/target", "--draft", "tiny/draft", "--json", "-", **environment)
        assert again.code == 0, again
        assert json.loads(again.out)["token_ids"] == json.loads(first.out)["token_ids"]
        assert "downloading" not in again.err
    local = run("--model", pair[0], "--draft", pair[1], "--json", "-")
    assert json.loads(local.out)["token_ids"] == json.loads(first.out)["token_ids"]
    assert not hub.log


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.slow(keep=1)
def test_shards_are_downloaded_and_no_second_format(hub, run, tmp_path, kind):
    served = tmp_path / "served" / "sharded"
    in_shards(served, save_llama(served, vocab_size=320, max_position_embeddings=1024), "240KB")
    save_tokenizer(served)
    if kind == "bin":
        to_bin(served)
    hub.models["tiny/sharded"] = served
    outcome = run("--model", "tiny/sharded")
    assert outcome.code == 0, outcome
    fetched = sorted(file for file in hub.log if "model" in file)
    assert fetched == sorted(file.name for file in served.iterdir() if "model" in file.name) and len(fetched) == 4


def test_a_gguf_file_is_downloaded_once_by_its_quantisation(hub, run, tmp_path):
    """Without the other quantisations that are there."""
    pytest.importorskip("gguf", reason="the package gguf writes the file")
    from gguf import GGMLQuantizationType as Form
    from gguf_files import save_gguf

    served = tmp_path / "served" / "few-bits"
    served.mkdir()
    save_gguf(tmp_path / "m", "llama", lambda name: Form.Q4_K)
    for name in ("m-Q4_K_M.gguf", "m-Q8_0.gguf", "sub/m-Q6_K-00001-of-00002.gguf", "sub/m-Q6_K-00002-of-00002.gguf"):
        (served / name).parent.mkdir(exist_ok=True)
        (served / name).write_bytes((tmp_path / "m.gguf").read_bytes())
    hub.models["tiny/few-bits"] = served
    home = {"TRIFORCE_HOME": str(tmp_path / "triforce")}
    refused = run("--model", "tiny/few-bits:Q5_K_M", **home)
    check_refusal(refused, 1, "no GGUF file whose name ends with 'Q5_K_M'", "m-Q8_0.gguf")
    first = run("--model", "tiny/few-bits:q4_k_m", "--json", "-", **home)
    assert first.code == 0, first
    assert "downloading tiny/few-bits, " in first.err
    assert [file for file in hub.log if "gguf" in file] == ["m-Q4_K_M.gguf"]
    again = run("--model", "tiny/few-bits:Q4_K_M", "--json", "-", HF_HUB_OFFLINE="1", **home)
    assert json.loads(again.out)["token_ids"] == json.loads(first.out)["token_ids"]


@pytest.mark.slow
def test_a_download_that_breaks_off_is_said_and_goes_on_later(hub, run):
    hub.cut = "model.safetensors"
    outcome = run("--model", "tiny/target")
    check_refusal(outcome, 1, "download of tiny/target broke off", "run again")
    offline = run("--model", "tiny/target", HF_HUB_OFFLINE="1")
    remedy = "HF_HUB_OFFLINE", "hf download tiny/target --local-dir DIR"
    check_refusal(offline, 1, "'tiny/target'", "not complete", *remedy)
    hub.cut = None
    hub.log.clear()
    assert run("--model", "tiny/target").code == 0
    assert hub.log and all(file.startswith("model.safetensors") for file in hub.log), "what was there is kept"


@pytest.mark.slow
def test_an_interrupt_ends_a_download_at_once_and_the_next_run_completes_it(hub, run, tmp_path):
    hub.cut = "model.safetensors"
    hub.go_on.clear()
    settings = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.url, "OMP_NUM_THREADS": "1"}
    command = [*TRIFORCE, "generate", *map(str, PROMPT), "--model", "tiny/target"]
    with subprocess.Popen(command, env=os.environ | settings, stderr=subprocess.PIPE, text=True) as process:
        assert hub.stalled.wait(60)
        process.send_signal(signal.SIGINT)
        told = process.communicate(timeout=20)[1]
    hub.go_on.set()
    assert process.returncode == 130, told
    assert told.rstrip().endswith("interrupted") and "Traceback" not in told
    hub.cut = None
    assert run("--model", "tiny/target").code == 0


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (401, "RepoNotFound", ("no model 'tiny/target'", "not on the hub, or private", "hf auth login")),
        (404, "RepoNotFound", ("no model 'tiny/target'", "spelling", "triforce models")),
        (403, "GatedRepo", ("tiny/target is gated", "/tiny/target,", "licence", "hf auth login", "HF_TOKEN")),
        (401, "GatedRepo", ("tiny/target is gated", "hf auth login")),
        (404, "EntryNotFound", ("tiny/target", "lacks a file", "config.json")),
        (500, "", ("fails to give tiny/target", "500", "try again later")),
    ],
)
@pytest.mark.slow(keep=1)
def test_what_the_hub_refuses_is_explained(hub, run, status, code, words):
    hub.fail = status, code
    check_refusal(run("--model", "tiny/target"), 1, *words)


@pytest.mark.slow
def test_without_a_network_it_says_how_to_bring_the_model(run):
    remedy = "hf download no/where --local-dir DIR"
    check_refusal(run("--model", "no/where", HF_HUB_OFFLINE="1"), 1, "'no/where'", "HF_HUB_OFFLINE", remedy)
    unreachable = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    check_refusal(run("--model", "no/where", **unreachable), 1, "http://127.0.0.1:9 cannot be reached", remedy)
    check_refusal(run("--model", "embedded", "--draft", "no/where", **unreachable), 1, "'no/where'", remedy)


@pytest.mark.slow
def test_what_cannot_run_is_found_before_gigabytes_are_fetched(hub, run, tmp_path):
    config = tmp_path / "served" / "target" / "config.json"
    kept = config.read_text()
    config.write_text(json.dumps(json.loads(kept) | {"architectures": ["MambaForCausalLM"]}))
    check_refusal(run("--model", "tiny/target"), 1, "MambaForCausalLM", "not supported")
    assert "model.safetensors" not in hub.log
    (tmp_path / "served" / "draft" / "model.safetensors").unlink()
    check_refusal(run("--model", "tiny/draft"), 1, "tiny/draft", "no weights", "safetensors")


FULL_DISK = """
import collections, errno, shutil, sys
import huggingface_hub
from triforce.tp import find_pair
Usage = collections.namedtuple("Usage", "total used free")
real = huggingface_hub.hf_hub_download
def no_room(name, file, **options):
    if file == "model.safetensors":
        raise OSError(errno.ENOSPC, "No space left on device")
    return real(name, file, **options)
if sys.argv[1] == "little":
    shutil.disk_usage = lambda path: Usage(10**12, 10**12, 4096)
else:
    huggingface_hub.hf_hub_download = no_room
try:
    find_pair("tiny/target")
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("how", ["little", "none"])
@pytest.mark.slow
def test_a_full_disk_is_said_with_where_and_how_much(hub, tmp_path, how):
    done = subprocess.run(
        [sys.executable, "-P", "-c", FULL_DISK, how],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"},
    )
    told = done.stdout
    assert told.startswith("ModelError"), done
    assert "is free in " in told and str(tmp_path / "home") in told and "HF_HOME" in told
    assert ("model.safetensors" in hub.log) is False
    assert "tiny/target needs" in told if how == "little" else "the disk is full" in told
