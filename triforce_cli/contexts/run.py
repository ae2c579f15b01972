"""One run of `triforce read`: from a checked request to a saved context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...offload import Engine, Generation
from ...offload.contexts.estimate import reading_seconds
from ...offload.contexts.model import ModelContexts
from ...tp.model.config import ModelConfig
from ...tp.units import gib
from ...tp.weights.tokenizer import Tokenizer
from ..session.open import load_engine, stderr_console
from ..session.prompt import Context
from ..session.report import start_progress
from ..terminal.output import JsonFile
from ..terminal.stopping import Signals, Stop, step
from ..terminal.streams import tell
from .report import describe
from .request import ReadRequest


def run(request: ReadRequest, text: str, directory: Path, json_file: JsonFile, signals: Signals) -> None:
    """Reads and saves. `directory` is the model's.

    Raises:
        TriforceError: it cannot be read or saved.
        Stop: it was interrupted; whole segments are saved.
    """
    name = request.name
    assert name
    tokenizer = Tokenizer.load(directory).with_arguments(request.template_args or ())
    context = Context.read(text, name, tokenizer, system=request.system, raw=request.raw)
    token_ids, frame = context.token_ids, context.frame
    with signals.allowed():
        from ...offload.checks import check_context

        check_context(ModelConfig.load(directory), len(token_ids), 1)
        engine = load_engine(request, len(token_ids) + 1)
        contexts = engine.contexts
        assert contexts
        missing = contexts.missing(name, token_ids)
        if missing:
            _announce(engine, contexts, name, token_ids, missing)
    seconds = 0.0
    if missing:
        with start_progress(stderr_console(), missing) as progress:
            calls: dict[str, Any] = {"on_memory": progress.memory, "on_prefill": progress.prefill}
            generation = engine.reading(token_ids, name, frame=frame, **calls, interrupted=signals.pending)
            seconds = _read(generation, contexts, name, signals)
        for warning in generation.warnings:
            tell(warning)
    described = describe(contexts.store, name)
    json_file.write(described | {"read_tokens": missing, "read_s": seconds})
    done = f"read {missing:,} tokens in {seconds:.1f} s" if missing else "nothing to read: all of it was saved already"
    tell(f"{done}; ask it with: triforce generate --context '{name}'{_model_option(request)} --ask TEXT")
    engine.finish()
    engine.close()


def _read(generation: Generation, contexts: ModelContexts, name: str, signals: Signals) -> float:
    """Reads to the end; the seconds it took."""
    try:
        while step(generation, signals) is not None:
            pass
    except Stop:
        generation.close()
        saved = contexts.saved_tokens(name)
        tell(f"{saved:,} tokens of the context {name} are saved; the same command goes on from there")
        raise
    return generation.statistics.prefill_s


def _announce(engine: Engine, contexts: ModelContexts, name: str, token_ids: list[int], missing: int) -> None:
    tokens = len(token_ids)
    before = f"; {tokens - missing:,} of them are saved already" if missing < tokens else ""
    tell(f"context {name}: {tokens:,} tokens{before}")
    seconds = reading_seconds(engine.target, tokens - missing, missing)
    about = f", about {_duration(seconds)}" if seconds is not None else ""
    size, free = contexts.bytes_to_write(token_ids, missing), contexts.store.free_bytes()
    tell(f"writes {gib(size)} to {contexts.store.root}, which has {gib(free)} free{about}")


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _model_option(request: ReadRequest) -> str:
    model = f" --model {request.model}" if request.model != type(request).model else ""
    return model + (f" --dtype {request.dtype}" if request.dtype != "auto" else "")
