"""Runs everything that only a GPU can show, in order and within eight minutes: memory, tests, bandwidths, steps, runs.

    python examples/measure/gpu_results.py --out gpu-results

Each part is a process with a time limit of its own; one that fails or hangs costs no other part. `results.json` in the
folder is written anew after each part, `log.txt` has what the parts printed. Most parts are commands of `triforce`,
which need not be installed: the folders of this checkout serve. Keys and values stream where a part's name says so,
however much memory the GPU has. Without a GPU it exits with 1; `--device cpu --quick` runs every part, tiny, on a CPU.
"""

import argparse
import importlib.util
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOTAL_S = 470.0
"""Seconds for all parts together; those that no time is left for are skipped, and said to be."""

GRACE_S = 5.0
"""Seconds that a part has to write what it found once it was told to stop."""

SHAPE = "yarn-llama-2-7b-128k"
BUDGET = 4096
"""Tokens of the retrieval cache of that shape."""


@dataclass(frozen=True)
class Part:
    """One process and what to keep of it."""

    name: str
    command: list[str]
    """Arguments; `{json}` stands for the file that it writes its result to."""
    limit_s: float
    modules: tuple[str, ...] = ()
    """What it imports that may not be installed."""


def parts(device: str, quick: bool) -> list[Part]:
    """All parts, in the order of what is wanted most."""
    python = sys.executable
    triforce = [python, "-m", "triforce.cli", "--debug"]

    def inner(name: str) -> list[str]:
        return [python, __file__, "--part", name, "--device", device, *(["--quick"] if quick else [])]

    def tests(path: str) -> list[str]:
        return [python, "-m", "pytest", "-m", "gpu", "-rfE", "--tb=short", "-p", "no:cacheprovider", path]

    def steps(context: int) -> list[str]:
        shape, length, budget = ("embedded", 400, 64) if quick else (SHAPE, context, BUDGET)
        of_steps = ["--tiers", "1,3", "--budget", budget, "--block-length", 12, "--draft-length", 4, "--resident", 0]
        return [*triforce, "bench", "--shape", shape, "--contexts", str(length), *map(str, of_steps), *to_file]

    def quantised() -> list[str]:
        shape = ["embedded"] if quick else ["qwen3-14b-awq", "--dtype", "bfloat16", "--rope-scaling", "yarn:4:32768"]
        context, budget = (400, 64) if quick else (65536, BUDGET)
        of_steps = ["--contexts", context, "--tiers", "1,2", "--budget", budget, "--block-length", 12, "--resident", 0]
        return [*triforce, "bench", "--shape", *shape, *map(str, of_steps), *to_file]

    def pair(resident: str) -> list[str]:
        context, new_tokens, repeats = (400, 16, 1) if quick else (131072, 128, 3)
        of_runs = ["--contexts", context, "--max-new-tokens", new_tokens, "--repeat", repeats, "--tiers", "1,2,3"]
        seeded = ["--resident", resident, "--seed", "1"]
        return [*triforce, "bench", "--model", "embedded", *map(str, of_runs), *seeded, *to_file]

    def compare() -> list[str]:
        tokens, new_tokens, repeats = (200, 8, 1) if quick else (8192, 128, 3)
        of_prompt = ["--prompt-file", "{book}", "--prompt-tokens", tokens]
        against = ["--baseline", "autoregressive", "--baseline", "transformers"]
        of_runs = ["--max-new-tokens", new_tokens, "--repeat", repeats]
        return [*triforce, "compare", *map(str, of_prompt), *against, *map(str, of_runs), *to_file]

    to_file = ["--device", device, "--json", "{json}"]
    made = [
        Part("memory", inner("memory"), 90),
        Part("machine", inner("machine"), 60),
        Part("link", inner("link"), 60),
        Part("tests", tests("tests/offload/test_gpu.py"), 120, ("pytest",)),
        Part("steps-32k-streamed", steps(32768), 90),
        Part("prefill", inner("prefill"), 60),
        Part("packed", inner("packed"), 60),
        Part("quantised-14b", quantised(), 90),
        Part("pair-128k-streamed", pair("0"), 90),
        Part("pair-128k-on-chip", pair("auto"), 60),
        Part("compare-8k", compare(), 130),
        Part("steps-128k-streamed", steps(131072), 150),
        Part("kernel-tests", tests("tests/kernels"), 120, ("pytest", "hypothesis", "triton")),
    ]
    return [Part(part.name, [str(word) for word in part.command], part.limit_s, part.modules) for part in made]


def main() -> None:
    options = parse_options()
    if options.part:
        found: dict[str, Any] = {}
        for name, value in INNER[options.part](options.device, options.quick):
            found[name] = value
            write_whole(options.json, found)
        return
    with tempfile.TemporaryDirectory() as scratch:
        environment = os.environ | {"PYTHONPATH": import_path(Path(scratch)), "PYTHONUNBUFFERED": "1"}
        about = {"script": "gpu_results", **machine_of(options.device, environment)}
        about["options"] = {name: getattr(options, name) for name in ("device", "quick", "minutes", "only")}
        wanted = [part for part in parts(options.device, options.quick) if part.name in (options.only or part.name)]
        options.out.mkdir(parents=True, exist_ok=True)
        done = run_parts(wanted, options.out, environment=environment, total_s=options.minutes * 60, about=about)
    print(f"\n{options.out / 'results.json'}")
    raise SystemExit(0 if all(part["status"] == "ok" for part in done["parts"].values()) else 1)


NAMES_MACHINE = """
import json, sys, torch
if sys.argv[1] == "cuda" and not torch.cuda.is_available():
    sys.exit("PyTorch sees no CUDA device here; --device cpu --quick tries the parts on a CPU")
import report
print(json.dumps({"machine": report.machine(sys.argv[1]), "torch": torch.__version__}))
"""


def machine_of(device: str, environment: dict[str, str]) -> dict[str, Any]:
    """The machine as the other scripts name it. Another process asks: this one must not take memory of the GPU, and
    `triforce` may not be installed.

    Raises:
        SystemExit: there is no GPU.
    """
    command, folder = [sys.executable, "-c", NAMES_MACHINE, device], Path(__file__).parent
    asked = subprocess.run(command, env=environment, cwd=folder, stdout=subprocess.PIPE, check=False)
    if asked.returncode:
        raise SystemExit(asked.returncode)
    return json.loads(asked.stdout)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "gpu-results"), help="a folder")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="the same parts, tiny: for trying the script")
    parser.add_argument("--minutes", type=float, default=TOTAL_S / 60, help="for all parts together")
    parser.add_argument("--only", nargs="+", metavar="PART", help="these parts; default: all")
    parser.add_argument("--part", choices=sorted(INNER), help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def import_path(scratch: Path) -> str:
    """What `PYTHONPATH` is to be for `triforce` to be found, installed or not."""
    given = os.environ.get("PYTHONPATH", "")
    if importlib.util.find_spec("triforce") and importlib.util.find_spec("triforce.cli"):
        return given
    package = scratch / "site" / "triforce"
    package.mkdir(parents=True)
    for name, folder in {"cli": "triforce_cli", "offload": "offload", "tp": "tp", "kernels": "kernels"}.items():
        (package / name).symlink_to(ROOT / folder, target_is_directory=True)
    described = package.parent / "triforce_cli-0.0.0.dist-info" / "METADATA"  # `triforce --version` asks for it
    described.parent.mkdir()
    described.write_text("Metadata-Version: 2.1\nName: triforce-cli\nVersion: 0.0.0+checkout\n", encoding="utf-8")
    return os.pathsep.join([str(package.parent), *([given] if given else [])])


def run_parts(
    wanted: Sequence[Part],
    out: Path,
    *,
    environment: dict[str, str],
    total_s: float = TOTAL_S,
    grace_s: float = GRACE_S,
    about: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Runs the parts one after another; what is in `out/results.json` at the end.

    Args:
        out: an existing folder.
        environment: of the parts.
        total_s: seconds for all of them.
        grace_s: what a part whose time has ended has to end by itself.
        about: what the results say of the machine and the options.
    """
    began = time.monotonic()
    date = datetime.now(UTC).isoformat(timespec="seconds")
    done: dict[str, Any] = {**(about or {}), "date": date, "commit": commit(), "parts": {}}
    (out / "log.txt").write_text("", encoding="utf-8")
    for part in wanted:
        left = total_s - (time.monotonic() - began)
        missing = [name for name in part.modules if importlib.util.find_spec(name) is None]
        if missing:
            found: dict[str, Any] = {"status": "skipped", "reason": f"not installed here: {', '.join(missing)}"}
        elif left < grace_s:
            found = {"status": "skipped", "reason": f"no time was left of {total_s:.0f} s"}
        else:
            found = run_part(part, min(part.limit_s, left), out / "log.txt", environment, grace_s)
        done["parts"][part.name] = found
        done["seconds"] = round(time.monotonic() - began, 1)
        done["figures"] = figures(done["parts"])
        write_whole(out / "results.json", done)
        seconds, reason = found.get("seconds", 0), found.get("reason", "")
        print(f"{part.name:22} {found['status']:8} {seconds:6.1f} s  {reason}", flush=True)
    for name, value in done.get("figures", {}).items():
        print(f"{name:40} {value:,}")
    return done


def run_part(
    part: Part, limit_s: float, log: Path, environment: dict[str, str], grace_s: float = GRACE_S
) -> dict[str, Any]:
    """Runs one part: its status, how long it took, what it wrote, and the last line it printed if it failed."""
    with tempfile.TemporaryDirectory() as scratch:
        files = {"json": Path(scratch) / "result.json", "book": Path(scratch) / "book.txt"}
        if "{book}" in part.command:
            files["book"].write_text(book(), encoding="utf-8")
        command = [str(files[word[1:-1]]) if word[1:-1] in files else word for word in part.command]
        if "--part" in command:
            command += ["--json", str(files["json"])]
        began = time.monotonic()
        with log.open("ab") as output:
            output.write(f"\n=== {part.name}: {' '.join(part.command)}\n".encode())
            output.flush()
            place = output.tell()
            process = subprocess.Popen(  # unbuffered: the last line in the log is then the last one printed
                command, cwd=ROOT, env={**environment, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end(process, grace_s)
        printed = log.read_bytes()[place:].decode(errors="replace").strip().splitlines()
        found: dict[str, Any] = {"status": "ok" if code == 0 else "failed"}
        if code is None:
            found |= {"status": "late", "reason": f"stopped after {limit_s:.0f} s"}
        elif code:
            found["reason"] = printed[-1][:300] if printed else f"exit status {code}"
        found |= {"seconds": round(time.monotonic() - began, 1), "command": part.command}
        if "pytest" in part.command:
            found["result"] = [line for line in printed if line.startswith(("FAILED", "ERROR"))] + printed[-1:]
        elif files["json"].exists():
            try:
                found["result"] = json.loads(files["json"].read_text(encoding="utf-8"))
            except ValueError:
                found |= {"status": "failed", "reason": "its JSON is not whole"}
        return found


def end(process: subprocess.Popen, grace_s: float) -> None:
    """Ends a part and all it started: asked first, so that it writes what it has, then killed."""
    for sign in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
            process.wait(grace_s)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def write_whole(path: Path, document: dict[str, Any]) -> None:
    """Writes JSON in place of what is there, at once: whoever is stopped meanwhile leaves the old or the new."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


def commit() -> str:
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"


def book() -> str:
    """Text enough for 8,192 tokens: this repository's own prose and code."""
    files = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "offload").rglob("*.py"))]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def figures(done: dict[str, Any]) -> dict[str, float]:
    """What the parts have found, against the floors that were measured with it."""
    found: dict[str, float] = {}
    results = {name: part.get("result") for name, part in done.items()}
    for name, result in results.items():
        if not isinstance(result, dict):
            continue
        for at in result.get("contexts") or []:
            if at.get("steps_ms"):
                medians = {step: times["median"] for step, times in at["steps_ms"].items() if times}
                found |= {f"{name}: {step} ms": round(ms, 3) for step, ms in medians.items()}
                found[f"{name}: verification / floor"] = round(medians["verify"] / at["floor"]["ms"], 3)
            else:
                found |= {f"{name}: {t['tiers']} tiers, TBT ms": round(t["tbt_ms"]["median"], 3) for t in at["tiers"]}
        retrieval = (results.get("prefill") or {}).get("retrieval_read_bytes")
        memory = (result.get("measured_bandwidth") or {}).get("memory_gb_per_s")
        if f"{name}: retrieval ms" in found and retrieval and memory:
            floor_ms = retrieval / memory / 1e6
            found[f"{name}: retrieval step / floor"] = round(found[f"{name}: retrieval ms"] / floor_ms, 3)
    memory = results.get("memory") or {}
    for phase, at in memory.items():
        if isinstance(at, dict) and "most_allocated" in at and "planned" in at:
            found[f"memory: {phase}, most allocated / planned"] = round(
                at["most_allocated"] / at["planned"]["device"], 4
            )
    for name in ("link", "prefill", "packed"):
        found |= {f"{name}: {key}": value for key, value in (results.get(name) or {}).items()}
    return found


# Parts that are no command: what goes into the JSON, name and value, as it is found.


def memory(device: str, quick: bool) -> Iterator[tuple[str, Any]]:
    """Bytes by phase of a run, of a shape with random weights: what was planned, what the engine says it holds, what
    PyTorch has allocated and reserved, and what is used of the GPU by whomever. On a CPU only the first two, and the
    most that the process has held."""
    yield "shape", "embedded" if quick else SHAPE  # before anything can fail
    import torch
    from triforce.kernels.host_rows import reads_host_memory
    from triforce.offload import Engine, Sampling
    from triforce.offload.held import bytes_by_part
    from triforce.offload.planning.memory import host_peak_bytes
    from triforce.offload.planning.run_plan import RunPlan
    from triforce.offload.settings import Settings
    from triforce.offload.shape_steps import RandomWeights
    from triforce.offload.transfer.link import make_link
    from triforce.tp.decoder import Decoder
    from triforce.tp.weights.registry import PRESETS

    where = torch.device(device)
    tokens, new_tokens, budget = (400, 16, 64) if quick else (32768, 128, BUDGET)

    def on_device() -> dict[str, int]:
        """The device's figures; the next ones have the most that was allocated since these."""
        if where.type != "cuda":
            return {"process_at_most": host_peak_bytes()}
        free, total = torch.cuda.mem_get_info(where)
        found = {
            "allocated": torch.cuda.memory_allocated(where),
            "most_allocated": torch.cuda.max_memory_allocated(where),
            "reserved": torch.cuda.memory_reserved(where),
            "used": total - free,
        }
        torch.cuda.reset_peak_memory_stats(where)
        return found

    def planned(plan: RunPlan) -> dict[str, int]:
        """Its parts on the device; in their sum the larger one of a prefill and what rounds take (retrieval, mass,
        step) counts."""
        parts = "weights", "rope", "resident_kv", "ring", "open_stretches", "draft_kv", "scratch", "prefill"
        parts += "retrieval", "mass", "step"
        outside = {"cuda_context": plan.cuda_context, "reserve": plan.reserve if plan.request.on_gpu else 0}
        total = plan.weights + plan.resident_kv + plan.working
        return {part: getattr(plan, part) for part in parts} | {"device": total} | outside

    torch.zeros(1, device=where)  # after which the process has what CUDA takes for itself
    yield "before", on_device()
    target, draft = PRESETS["embedded" if quick else SHAPE].configs()
    weights: Any = RandomWeights(target.dtype, where)
    of_embeddings = make_link(where).host_memory if reads_host_memory(where) else None
    decoders = [Decoder(config, weights, where, host_memory=of_embeddings) for config in (target, draft)]
    # So few tokens would not be worth filling caches for drafts.
    engine = Engine(decoders[0], decoders[1], Settings(budget=budget, block_length=4 if quick else None))
    plan = engine.plan(tokens + new_tokens, answer=new_tokens)
    yield "tokens", {"prompt": tokens, "new": new_tokens, "budget": plan.budget, "streamed_kv": plan.streamed_kv}

    def phase() -> dict[str, Any]:
        return {"planned": planned(plan), "held": bytes_by_part(engine.held())} | on_device()

    yield "weights_loaded", phase()
    reading: dict[str, Any] = {}

    def note(share: float) -> None:
        before = reading.get("most_allocated", 0)
        reading.update(phase())
        if where.type == "cuda":
            reading["most_allocated"] = max(before, reading["most_allocated"])

    prompt = torch.randint(target.vocab_size, (tokens,), generator=torch.Generator().manual_seed(1))
    run = engine.stream(prompt, Sampling(0.0), new_tokens, ignore_eos=True, on_prefill=note)
    try:
        next(run)
    finally:
        yield "prefill", reading  # also where memory did not suffice
    next(run)  # caches of drafting tiers are filled before the first round
    yield "first_refresh", phase()
    for _ in run:
        pass
    yield "decoding", phase()
    run.close()
    engine.close()  # frees what was captured
    yield "after_the_run", phase()


def machine(device: str, quick: bool) -> Iterator[tuple[str, Any]]:
    """What `machine_of` does not say."""
    import torch

    optional = ("triton", "flash_attn", "transformers", "pytest", "hypothesis")
    yield "packages", [name for name in optional if importlib.util.find_spec(name)]
    if device == "cuda":
        yield "gpus", torch.cuda.device_count()
        yield "capability", list(torch.cuda.get_device_capability())
        yield "cuda", torch.version.cuda
        smi = ["nvidia-smi", "--query-gpu=driver_version,pcie.link.gen.max,pcie.link.width.max", "--format=csv"]
        yield "nvidia_smi", subprocess.run(smi, capture_output=True, text=True, check=False).stdout.splitlines()


def link(device: str, quick: bool) -> Iterator[tuple[str, float]]:
    """Gigabytes a second of page-locking, of the link each way by the size of a copy, and of the device's memory."""
    import torch
    from triforce.offload.transfer import bandwidth
    from triforce.offload.transfer.link import make_link

    where = torch.device(device)
    connection = make_link(where)
    size = 2**24 if quick else 4 * 2**30
    began = time.perf_counter()
    connection.host_memory((size,), torch.uint8)
    yield "page_locking_gb_per_s", round(size / (time.perf_counter() - began) / 1e9, 2)
    for mib in (1,) if quick else (8, 16, 256):
        carried = bandwidth.link_bandwidth(connection, where, num_bytes=mib * 2**20)
        for way, value in carried.items():
            yield f"{way}_{mib}_mib_gb_per_s", round(value / 1e9, 2)
    yield "memory_gb_per_s", round(bandwidth.memory_bandwidth(where, num_bytes=2**24 if quick else None) / 1e9, 2)
    connection.close()


def prefill(device: str, quick: bool) -> Iterator[tuple[str, float]]:
    """Tokens a second of reading a prompt, with the whole cache on the device (if it fits) and with all of it streamed;
    before that, the bytes that a pass over the retrieval cache reads."""
    import torch
    from triforce.offload.batch.kept import KeptCache
    from triforce.offload.caches.full import FullCache
    from triforce.offload.planning.request import RunRequest
    from triforce.offload.settings import Settings
    from triforce.offload.shape_steps import RandomWeights
    from triforce.offload.transfer.bandwidth import timed
    from triforce.tp.decoder import Decoder
    from triforce.tp.matrices import ModelMatrices
    from triforce.tp.weights.registry import PRESETS

    where = torch.device(device)
    config = PRESETS["embedded" if quick else SHAPE].configs()[0]
    budget = 64 if quick else BUDGET
    yield (
        "retrieval_read_bytes",
        (ModelMatrices.of(config).bytes_of_a_pass(config.dtype) + budget * config.kv_bytes_per_token(config.dtype)),
    )
    decoder = Decoder(config, RandomWeights(config.dtype, where), where)  # pyright: ignore[reportArgumentType]
    for tokens, resident in itertools.product((300,) if quick else (8192, 32768), (None, 0.0)):
        request = RunRequest(config, None, config.dtype, tokens + 64, Settings(tiers=1, resident=resident))
        cache, _ = KeptCache(decoder).prepare(array("i", [0]), request)
        prompt = torch.zeros(tokens, dtype=torch.int64, device=where)

        def read_prompt(cache: FullCache = cache, prompt: torch.Tensor = prompt) -> None:
            cache.rollback(0)
            decoder.forward(prompt, cache)

        with torch.inference_mode():
            seconds = statistics.median(timed(read_prompt, where, 1 if quick else 3))
        place = "on_chip" if cache.blocks.all_on_device else "streamed" if resident == 0.0 else "partly_streamed"
        yield f"{place}_{tokens}_tokens_per_s", round(tokens / seconds)
        del cache, read_prompt  # their memory is wanted by the next


def packed(device: str, quick: bool) -> Iterator[tuple[str, float]]:
    """Decoding, row by row, of a model with grouped queries whose keys and values all stream packed, in many small
    blocks: the time between tokens beside the time that their bytes take the link. What is above both is the host's."""
    import torch
    from triforce.offload import Engine, Sampling
    from triforce.offload.settings import Settings
    from triforce.offload.shape_steps import RandomWeights
    from triforce.tp.decoder import Decoder
    from triforce.tp.weights.registry import PRESETS

    where, rounds = torch.device(device), 12
    config = PRESETS["embedded" if quick else "llama-3.1-8b-instruct"].configs()[0]
    weights = RandomWeights(torch.bfloat16, where)
    engine = Engine(Decoder(config, weights, where), None, Settings(tiers=1, resident=0.0))  # pyright: ignore[reportArgumentType]
    for tokens in (400,) if quick else (32768, 65536):
        prompt = torch.randint(config.vocab_size, (tokens,), generator=torch.Generator().manual_seed(1))
        run = engine.stream(prompt, Sampling(0.0), rounds + 4, ignore_eos=True)
        for _ in range(3):  # the prefill, and rounds that warm up
            next(run)
        times, before = [], run.stats()["link"]
        for _ in range(rounds):
            began = time.perf_counter()
            next(run)
            times.append(time.perf_counter() - began)
        link = {name: value - before[name] for name, value in run.stats()["link"].items() if name != "gb_per_s"}
        yield f"{tokens}_tbt_ms", round(1e3 * statistics.median(times), 2)
        yield f"{tokens}_link_ms", round(1e3 * link["busy_s"] / rounds, 2)
        yield f"{tokens}_streamed_bytes", link["bytes_streamed"] // rounds
        run.close()
    engine.close()


INNER: dict[str, Callable[[str, bool], Iterator[tuple[str, Any]]]] = {
    "memory": memory,
    "machine": machine,
    "link": link,
    "prefill": prefill,
    "packed": packed,
}
"""By the name of the part."""

if __name__ == "__main__":
    main()
