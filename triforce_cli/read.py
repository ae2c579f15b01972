"""`triforce read`: reads a text once and saves its keys and values as a context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..offload.settings import Settings
from ..tp.errors import UsageError
from ..tp.units import gib
from ..tp.weights.registry import EMBEDDED, find_pair
from .call import Call
from .contexts import describe
from .options import (
    DEVICE,
    DTYPE,
    GPUS,
    PROMPT,
    TARGET,
    TEMPLATE_ARG,
    ReportOptions,
    argument,
    flag,
    option,
    some_settings,
)
from .parameters import NAME, TEXT
from .terminal.output import JsonFile
from .terminal.stopping import Signals, Stop
from .terminal.streams import print_note

if TYPE_CHECKING:
    from ..offload import Engine
    from ..offload.contexts.model import ModelContexts

SETTINGS = "threads", "pack", "host_memory", "resident", "rope_scaling"
"""The settings that `triforce read` has as options."""

EPILOG = """[bold]Examples[/]

  Prefill a book, and ask about it at any later time:
  [cyan]triforce read anna_karenina.txt --as anna[/]
  [cyan]triforce generate --context anna --ask "Who is Levin?"[/]

  Several files as one context, for another model:
  [cyan]triforce read notes/*.txt --as notes --model llama-3.1-8b-instruct[/]
"""


@dataclass(frozen=True, kw_only=True)
class ReadOptions(ReportOptions):
    """The options of `triforce read`."""

    files: Annotated[
        list[Path],
        argument("FILE...", "Text files, read as one text in this order; [bold]-[/] is stdin."),
    ]
    name: Annotated[
        str | None,
        option(PROMPT, NAME, "The name of the context. Default: the first file's name without its ending.", "--as"),
    ] = None
    system: Annotated[
        str | None, option(PROMPT, TEXT, "A system message before the text. It becomes part of the context.")
    ] = None
    raw: Annotated[
        bool,
        flag("--raw", PROMPT, "Save the text alone, not as the beginning of a user's message in the chat template."),
    ] = False
    template_args: Annotated[list[Any] | None, TEMPLATE_ARG] = None
    model: Annotated[str, TARGET] = EMBEDDED
    dtype: Annotated[str, DTYPE] = "auto"
    device: Annotated[str, DEVICE] = "auto"
    gpus: Annotated[int, GPUS] = 1
    settings: Annotated[Settings, some_settings(*SETTINGS)] = Settings(tiers=1)  # noqa: RUF009 - frozen

    @property
    def draft(self) -> str | None:
        """Always `none`, because reading a text needs no draft."""
        return "none"

    @property
    def wanted_draft(self) -> str | None:
        return self.draft


def read(options: ReadOptions, call: Call) -> None:
    """Runs the model over a text once (the prefill) and saves its KV cache as a context.

    Answers start from the context without a new prefill of the text.
    If the command is interrupted, killed or out of disk space, run it again: it goes on where it stopped.
    A context contains the text in readable form; only its owner can read its files.
    """
    from ..offload.contexts.home import user_store
    from .ranks import starts_or_follows
    from .session.source import read_file, read_option

    name = options.name or _default_name(options.files[0])
    user_store().directory(name)
    if options.raw and options.template_args:
        raise UsageError("--raw leaves the chat template out, which --template-arg is for; give one of them")
    if options.system is not None:
        options = replace(options, system=read_option("--system", options.system, print_note))
    if starts_or_follows(options, call):
        return
    with JsonFile.prepare(options.json) as json_file:
        text = "".join(read_file(path, "FILE", print_note).text for path in options.files)
        directory, _ = find_pair(options.model, "none", print_note)
        with call.with_pytorch():
            _read(options, name, text, directory, json_file, call.signals)


def _default_name(file: Path) -> str:
    """A name for a context whose text is in `file`: the name of the file, without characters that are not allowed."""
    stem = file.stem if str(file) != "-" else "stdin"
    kept = "".join(letter if letter.isalnum() or letter in " .+@=-_" else "-" for letter in stem).lstrip(" .+@=-")
    return kept[:100].rstrip() or "text"


def _read(options: ReadOptions, name: str, text: str, directory: Path, json_file: JsonFile, signals: Signals) -> None:
    """Reads `text` with the model in `directory` and saves it as the context `name`.

    Raises:
        TriforceError: the text cannot be read or saved.
        Stop: this was interrupted; complete segments are saved.
    """
    from ..offload.checks import check_context
    from ..offload.contexts.model import ContextRequest
    from ..tp.model.config import ModelConfig
    from ..tp.weights.tokenizer import Tokenizer
    from .session.open import load_engine, stderr_console
    from .session.prompt import Context, Prompt
    from .session.report import start_progress
    from .session.session import Session, Task

    tokenizer = Tokenizer.load(directory).with_arguments(options.template_args)
    context = Context.read(text, name, tokenizer, system=options.system, raw=options.raw)
    token_ids = context.token_ids
    with signals.interruptible():
        config = ModelConfig.load(directory).with_rope_scaling(options.settings.rope_scaling)
        check_context(config, len(token_ids), 1)
        engine = load_engine(options, len(token_ids) + 1)
        contexts = engine.contexts
        assert contexts
        missing = contexts.missing(name, token_ids)
        if missing:
            _report_start(engine, contexts, name, token_ids, missing)
    seconds = 0.0
    if missing:
        with start_progress(stderr_console(), missing) as progress:
            session = Session(
                engine,
                tokenizer,
                in_slices=False,
                interrupted=signals.pending,
                on_memory=progress.memory,
                on_read=lambda _, share: progress.prefill(share),
            )
            saved = ContextRequest(save=name, frame=context.frame, required=True)
            task = Task(Prompt(token_ids), saved, writes=False)
            try:
                for _ in session.do(task):
                    pass
                signals.raise_pending()
            except Stop:
                there = contexts.saved_tokens(name)
                print_note(f"{there:,} tokens of the context {name} are saved; the same command goes on from there")
                raise
        assert task.sequence
        seconds = task.sequence.statistics.prefill_s
        for warning in session.warnings(task):
            print_note(warning)
    json_file.write(describe(contexts.store, name) | {"read_tokens": missing, "read_s": seconds})
    done = f"read {missing:,} tokens in {seconds:.1f} s" if missing else "nothing to read: all of it was saved already"
    print_note(f"{done}; ask about it with: triforce generate --context '{name}'{_model_options(options)} --ask TEXT")
    engine.finish()
    engine.close()


def _report_start(engine: Engine, contexts: ModelContexts, name: str, token_ids: Sequence[int], missing: int) -> None:
    """Prints how much will be read and written, and approximately how long it takes."""
    from ..offload.contexts.estimate import reading_seconds

    tokens = len(token_ids)
    before = f"; {tokens - missing:,} of them are saved already" if missing < tokens else ""
    print_note(f"context {name}: {tokens:,} tokens{before}")
    seconds = reading_seconds(engine.target, tokens - missing, missing)
    about = "" if seconds is None else f"; the prefill takes about {_duration(seconds)}"
    size, free = contexts.bytes_to_write(token_ids, missing), contexts.store.free_bytes()
    print_note(f"writes {gib(size)} to {contexts.store.root}, which has {gib(free)} free{about}")


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _model_options(options: ReadOptions) -> str:
    """The options with which `triforce generate` uses the same model."""
    model = f" --model {options.model}" if options.model != type(options).model else ""
    scaling = options.settings.rope_scaling
    model += f" --rope-scaling {scaling}" if scaling else ""
    return model + (f" --dtype {options.dtype}" if options.dtype != "auto" else "")
