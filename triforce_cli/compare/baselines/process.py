"""Starts a worker process and waits for its result, or for the reason why there is none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from .protocol import Job


class WorkerError(Exception):
    """A worker gave no result. The message is the reason, in one line; `log` is the end of what it printed."""

    def __init__(self, reason: str, log: str) -> None:
        super().__init__(reason)
        self.log = log


def run_worker(module: str, action: str, job: Job, limit_s: float) -> Any:
    """The result of `action` of `module` for `job`, computed in a separate process.

    Raises:
        WorkerError: the process failed, was killed, or took longer than `limit_s` seconds. It has ended, with its
            children.
    """
    folder = Path(job.folder)
    job_path, result_path, log_path = folder / "job.json", folder / "result.json", folder / "worker.log"
    job.save(job_path)
    result_path.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-P",
        "-m",
        "triforce.cli.compare.baselines.worker",
        module,
        action,
        job_path,
        result_path,
    ]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | _environment(job),
            start_new_session=True,  # Ctrl-C reaches only this process, which then ends the worker
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            _end(process)
            raise WorkerError(f"stopped after {limit_s:,.0f} s (--time-limit)", _tail(log_path)) from None
        except BaseException:
            _end(process)
            raise
        _end(process)  # children of the worker that still run
    try:
        answer = json.loads(result_path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise WorkerError(_exit_reason(code, _tail(log_path)), _tail(log_path)) from None
    if "error" in answer:
        raise WorkerError(answer["error"], _tail(log_path))
    return answer["result"]


def _environment(job: Job) -> dict[str, str]:
    """The environment of every worker: the same threads, and no use of a network."""
    threads = str(job.threads)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills the worker and all processes that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _exit_reason(code: int, log: str) -> str:
    """Why a worker without a result ended, by its exit code and the last line that it printed."""
    if code == -signal.SIGKILL:
        return "killed by the system, as it does when memory runs out"
    last = next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "")
    last_words = f"; its last output: {last[:200]}" if last else ""
    if code < 0:
        return f"ended by {signal.Signals(-code).name}{last_words}"
    return f"ended with code {code} and no result{last_words}"


def _tail(path: Path, size: int = 4000) -> str:
    """The last `size` bytes of a log; nothing if it cannot be read."""
    with suppress(OSError):
        return path.read_bytes()[-size:].decode("utf-8", "replace")
    return ""
