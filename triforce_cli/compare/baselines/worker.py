"""The process in which one system is loaded, warmed up and measured: `python -m ... MODULE ACTION JOB RESULT`.

`ACTION` is `measure`, or another function of the module that takes the job and returns what JSON can hold. The result
file holds `{"result": ...}` or `{"error": ...}`; what the process prints goes to a log.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import resource
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from ....tp.parallel.launch import Guard
from .protocol import Job, Measurement, System

_WARM_UP_TOKENS = 16

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "failed to allocate")


def main(module_name: str, action: str, job_path: str, result_path: str) -> int:
    """The exit code: 0 with a result, 1 with an error."""
    Guard(math.inf)  # exit when the parent is gone
    with suppress(OSError):  # if memory runs out, the system should end this process, not the one that reports it
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    answer: dict[str, Any]
    try:
        module, job = importlib.import_module(module_name), Job.load(Path(job_path))
        result = asdict(measure(module, job)) if action == "measure" else getattr(module, action)(job)
        answer = {"result": result}
    except BaseException as error:  # whatever a system raises is reported in its row
        traceback.print_exc()
        answer = {"error": reason(error)}
    partial = Path(f"{result_path}.part")
    partial.write_text(json.dumps(answer), encoding="utf-8")
    partial.replace(result_path)
    sys.stdout.flush()
    sys.stderr.flush()
    return 0 if "result" in answer else 1


def measure(module: ModuleType, job: Job) -> Measurement:
    """Loads a system, warms up with a run over the same number of tokens, and times one run.

    Raises:
        RuntimeError: the system wrote another number of tokens than requested.
    """
    began = time.perf_counter()
    system: System = module.load(job)
    load_s = time.perf_counter() - began
    questions = job.questions or [[]]
    system.generate(warm_up_prompt(job.prompt_ids), questions, min(job.max_new_tokens, _WARM_UP_TOKENS))
    timed = system.generate(job.prompt_ids, questions, job.max_new_tokens)
    wanted = job.sequences * job.max_new_tokens
    if len(timed.token_ids) != wanted:
        raise RuntimeError(f"it wrote {len(timed.token_ids)} tokens instead of {wanted}")
    host, device = peak_bytes(job.device)
    return Measurement(
        **vars(timed),
        ran=system.ran,
        load_s=load_s,
        host_peak_bytes=host,
        device_peak_bytes=device,
        sequences=job.sequences,
    )


def warm_up_prompt(prompt_ids: list[int]) -> list[int]:
    """A prompt of the same length with another first token, so that no cache of prefixes shortens the measured
    prefill."""
    other = next((token for token in prompt_ids if token != prompt_ids[0]), abs(prompt_ids[0] - 1))
    return [other, *prompt_ids[1:]]


def peak_bytes(device: str) -> tuple[int, int]:
    """Maximum bytes of host memory that this process held, and of PyTorch's tensors on the GPU, 0 without one."""
    host = _peak_resident()
    torch = sys.modules.get("torch")
    return host, torch.cuda.max_memory_allocated() if torch and device == "cuda" else 0


def _peak_resident() -> int:
    """Bytes, as `host_peak_bytes` of the engine, but without importing PyTorch into a process that does not use it."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reason(error: BaseException) -> str:
    """The error in one line."""
    message = next(iter(str(error).strip().splitlines()), "")
    kind = type(error).__name__
    if isinstance(error, MemoryError) or any(words in message.lower() for words in _OUT_OF_MEMORY):
        return f"out of memory: {message}" if message else "out of memory"
    return f"{kind}: {message}" if message else kind


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    os._exit(code)  # libraries that hang or crash while they are unloaded change nothing that was measured
