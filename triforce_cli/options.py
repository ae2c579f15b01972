"""Options as fields of dataclasses. A command declares its options once, as the dataclass that it is called with.

The annotation of a field has the type, the help and the group of the option; its default is that of the option. A field
can also be a dataclass of the engine, annotated with the options for its own fields. `RunOptions` has the options that
all commands with an engine share.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar, get_args, get_type_hints

import typer

from ..offload.settings import Settings
from ..offload.speculation.sampling import Sampling
from ..tp.weights.registry import EMBEDDED
from .call import Call
from .parameters import (
    AUTO_OR_GIB,
    AUTO_OR_THREADS,
    AUTO_OR_TOKENS,
    DRAFT,
    EARLY_END,
    FILE,
    JSON_FILE,
    KEY_VALUE,
    MODEL,
    NAME,
    REFRESH,
    ROPE_SCALING,
    SEED,
    TEXT,
    Kind,
    choice,
    real,
    whole,
)

MEASURING, PROMPT, MACHINE, SAMPLING, OUTPUT = "Measuring", "Prompt", "Model and machine", "Sampling", "Output"
SPECULATION = "Speculation (auto: chosen for this machine, and adapted during the run)"
HARDWARE, ASSUMED, SERVING = "Hardware", "Assumed", "Serving"
_GROUPS = (MEASURING, SERVING, PROMPT, MACHINE, HARDWARE, SAMPLING, SPECULATION, ASSUMED, OUTPUT)
"""The groups, in the order of `--help`."""

Options = TypeVar("Options")


def option(group: str, kind: Kind, help: str, *names: str) -> Any:
    """An option with a value. Without `names`, it has the name of its field."""
    parser: dict[str, Any] = {"parser": kind.parse} if kind.parse else {}
    return typer.Option(
        *names, metavar=kind.metavar, help=help, autocompletion=kind.complete, rich_help_panel=group, **parser
    )


def argument(metavar: str, help: str) -> Any:
    """An argument: a value without the name of an option."""
    return typer.Argument(metavar=metavar, help=help, show_default=False)


def flag(name: str, group: str, help: str) -> Any:
    """A switch. It has a `--no-` form only if `name` includes it."""
    return typer.Option(name, help=help, rich_help_panel=group)


def command(options_type: type[Options], function: Callable[[Options, Call], None]) -> Callable[..., None]:
    """`function` in the form that the option parser needs: with a parameter for each option of `options_type`."""
    declared = sorted(_declared(options_type), key=lambda one: _place(one.info))

    def call(parser_context: typer.Context, **given: Any) -> None:
        parts: dict[str, dict[str, Any]] = {}
        for one in declared:
            if one.part is not None:
                parts.setdefault(one.part, {})[one.name] = given.pop(one.name)
        composed = {part: replace(getattr(options_type, part), **values) for part, values in parts.items()}
        function(options_type(**given, **composed), parser_context.obj)

    parameters = [inspect.Parameter("parser_context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for one in declared:
        # `None` is auto there, which the parser gives for the word; `--help` is to show the word.
        auto = one.default is None and (one.info.metavar or "").startswith("auto|")
        default = inspect.Parameter.empty if one.default is MISSING else one.default
        parameters.append(
            inspect.Parameter(
                one.name,
                inspect.Parameter.KEYWORD_ONLY,
                default="auto" if auto else default,
                annotation=Annotated[one.type, one.info],
            )
        )
    call.__name__, call.__doc__ = function.__name__, function.__doc__
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    call.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    return call


def changed(options: Any) -> list[str]:
    """The names of the options that are not at their defaults."""
    return [one.name for one in _declared(type(options)) if one.value(options) != one.default]


class _Declared(NamedTuple):
    """An option of a command."""

    part: str | None
    """The field that is a dataclass with this option; `None` if the option is a field itself."""
    name: str
    type: Any
    info: Any
    """The result of `option`, `flag` or `argument`."""
    default: Any

    def value(self, options: Any) -> Any:
        return getattr(options if self.part is None else getattr(options, self.part), self.name)


def _declared(options_type: Any) -> Iterator[_Declared]:
    """The options of a command, in the order of its fields."""
    hints = get_type_hints(options_type, include_extras=True)
    for field in fields(options_type):
        annotation = hints[field.name]
        info = getattr(annotation, "__metadata__", (None,))[0]
        if isinstance(info, dict):
            types = get_type_hints(annotation.__origin__)
            for name, own in info.items():
                several = len(set(get_args(types[name])) - {NoneType}) > 1  # which begins as a text
                yield _Declared(field.name, name, str if several else types[name], own, getattr(field.default, name))
        elif info is not None:
            yield _Declared(None, field.name, annotation.__origin__, info, field.default)


def _place(info: Any) -> int:
    """The place of an option in `--help`. Arguments come first."""
    return _GROUPS.index(info.rich_help_panel) if info.rich_help_panel else -1


class EngineOptions(Protocol):
    """The options with which an engine is loaded; see `Engine.load`."""

    @property
    def model(self) -> str: ...
    @property
    def draft(self) -> str | None: ...
    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def gpus(self) -> int: ...
    @property
    def wanted_draft(self) -> str | None: ...
    @property
    def settings(self) -> Settings: ...


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The options of every command."""

    json: Annotated[
        Path | None,
        option(OUTPUT, JSON_FILE, "Write the results as JSON; [bold]-[/] is stdout, which then holds nothing else."),
    ] = None
    debug: Annotated[bool, flag("--debug", OUTPUT, "Show tracebacks of errors.")] = False


TARGET = option(
    MACHINE,
    MODEL,
    "A preset ([bold]triforce models[/] lists them), a directory, a GGUF file, or a model of the Hugging Face hub "
    "(owner/name, or owner/name:Q4_K_M for a GGUF file), which is downloaded once.",
)
DTYPE = option(
    MACHINE,
    choice("auto", "float32", "bfloat16", "float16"),
    "Number format of weights and KV cache; auto is the checkpoint's. In float32, greedy text is the same for all "
    "draft lengths and tiers. In 16 bits, it may differ at near-ties, unless the run is exact (see --exact of "
    "[bold]triforce generate[/]). settings.exact in the JSON of a run says whether it is.",
)
DEVICE = option(MACHINE, choice("auto", "cpu", "cuda"), "Where to compute; auto is CUDA if there is a GPU.")
CONTEXT = option(
    PROMPT,
    NAME,
    "Start from a text that was saved with the command [bold]triforce read[/]. No prompt file is needed, and the text "
    "needs no new prefill.",
)
TEMPLATE_ARG = option(
    PROMPT,
    KEY_VALUE,
    "A variable for the model's chat template, such as enable_thinking=false. The value is read as JSON if possible, "
    "else as text. May be repeated.",
    "--template-arg",
)
GPUS = option(
    MACHINE,
    whole(1),
    "Number of GPUs that share the model (tensor parallelism). With --device cpu: number of processes. Under torchrun, "
    "its ranks share the model.",
)
ASKED = "A question or an instruction, put after the text through the model's chat template if it has one."
ASK = option(PROMPT, TEXT, ASKED)
TRUNCATE = option(
    PROMPT,
    choice("error", "head", "tail", "middle"),
    "Part of the text to drop if it is too long for the model; error refuses the text. The question is never cut.",
)
SAMPLING_OPTIONS = {
    "temperature": option(SAMPLING, real("T"), "Softmax temperature; 0 is greedy decoding."),
    "top_p": option(SAMPLING, real("P"), "Keep the most likely tokens up to this probability mass; 1 keeps all."),
    "top_k": option(SAMPLING, whole(0, "K"), "Keep the K most likely tokens; 0 keeps all."),
    "min_p": option(SAMPLING, real("P"), "Drop tokens less likely than P times the likeliest; 0 drops none."),
    "seed": option(
        SAMPLING,
        SEED,
        "Random seed: a whole number, which may be negative. The same command with the same seed writes the same text. "
        "In float32, and in 16 bits if the run is exact, the text does not depend on the draft or its lengths either. "
        "Default: random. Without --seed, slightly more draft tokens are accepted, but the text cannot be reproduced.",
    ),
}
"""The options for all fields of `Sampling`."""

SETTINGS_OPTIONS = {
    "threads": option(
        MACHINE,
        AUTO_OR_THREADS,
        "CPU threads of each process. auto: OMP_NUM_THREADS, else all cores; decoding uses fewer while other programs "
        "take the cores.",
    ),
    "pack": option(
        MACHINE,
        choice("auto", "on", "off"),
        "Store bfloat16 keys and values in three quarters of their bytes, without loss: in saved contexts, and where "
        "they stream from host memory or a disk. auto: on if there are compiled kernels (for streaming to a GPU: if "
        "there is Triton). If a CPU computes, auto does not pack what streams from host memory.",
    ),
    "host_memory": option(
        MACHINE,
        AUTO_OR_GIB,
        "Maximum host memory in GiB, for all GPUs or processes of a host together. auto: the free memory. The part of "
        "the KV cache that exceeds it is kept on the disk of the saved contexts, and read from there in every pass.",
    ),
    "rope_scaling": option(
        MACHINE,
        ROPE_SCALING,
        "Scale the model's RoPE for more positions than its checkpoint has. yarn:4 is YaRN to four times as many, "
        "yarn:4:32768 to four times 32,768. This changes the model; the model card says whether it is made for this.",
    ),
    "budget": option(
        SPECULATION,
        AUTO_OR_TOKENS,
        "Size of the retrieval cache, in tokens. auto: as published for the preset, else chosen by the context length.",
    ),
    "chunk_size": option(
        SPECULATION,
        AUTO_OR_TOKENS,
        "Number of positions that are scored and chosen together for the retrieval cache. auto: as published for the "
        "preset, else 8.",
    ),
    "draft_length": option(
        SPECULATION, AUTO_OR_TOKENS, "Tokens that the small model drafts for one pass over the retrieval cache (γ1)."
    ),
    "block_length": option(
        SPECULATION, AUTO_OR_TOKENS, "Tokens drafted for one pass over the full cache, which verifies them (γ2)."
    ),
    "resident": option(
        SPECULATION,
        AUTO_OR_GIB,
        "GiB of the full KV cache to keep on each GPU; the rest streams from host memory. auto: as much as fits. On a "
        "CPU, auto keeps everything; with a number, the rest streams through a thread, to test streaming without a "
        "GPU.",
    ),
    "refresh": option(
        SPECULATION,
        REFRESH,
        "When the chunks of the retrieval cache are chosen again: every round, every N rounds, or never. auto: every "
        "round while this takes hardly any time; else when acceptance drops, and at the latest after some rounds.",
    ),
    "early_end": option(
        SPECULATION,
        EARLY_END,
        "End a draft before a token if this token, with all tokens before it, would be accepted with a probability "
        "below P. auto: end it when a further token is not worth its time, but never if draft lengths are set. "
        "off: never.",
    ),
    "exact": option(
        SPECULATION,
        choice("auto", "on", "off"),
        "Give every pass that determines the text a fixed number of rows, by padding. The tokens then do not depend on "
        "draft lengths and tiers in 16 bits either. auto: on for GPUs, where it should cost hardly any time; off for "
        "CPUs. Compiled kernels with AVX-512 BF16 or AMX are exact in bfloat16 without it.",
    ),
    "tiers": option(
        SPECULATION,
        choice("1", "2", "3"),
        "3: a small model drafts; the model tests these tokens on its retrieval cache, then verifies the accepted ones "
        "on its full cache. 2: no small model; the model drafts on its retrieval cache. 1: plain decoding on the full "
        "cache.",
    ),
}
"""The options for the fields of `Settings`, except `lookup`, which --draft sets."""

WITHOUT_TIERS = {name: one for name, one in SETTINGS_OPTIONS.items() if name != "tiers"}


def some_settings(*names: str) -> dict[str, Any]:
    """The options for these settings."""
    return {name: SETTINGS_OPTIONS[name] for name in names}


@dataclass(frozen=True, kw_only=True)
class ModelOptions(ReportOptions):
    """The options of all commands that plan or run a model. `None` is `auto`, or not given."""

    model: Annotated[str, TARGET] = EMBEDDED
    draft: Annotated[
        str | None,
        option(
            MACHINE,
            DRAFT,
            "The small model that drafts tokens, given like --model. [bold]none[/]: no small model, so two tiers "
            "(see --tiers of [bold]triforce generate[/]). "
            "[bold]lookup[/]: copies the tokens that followed the same words earlier in the text. "
            "[bold]D,lookup[/]: both. "
            "[bold]mtp[/]: the model's own multi-token-prediction head (Qwen3-Next, Qwen3.5). "
            "Default: the preset's draft, else none.",
        ),
    ] = None
    dtype: Annotated[str, DTYPE] = "auto"
    gpus: Annotated[int, GPUS] = 1


@dataclass(frozen=True, kw_only=True)
class RunOptions(ModelOptions):
    """The options of all commands that run a model on texts."""

    device: Annotated[str, DEVICE] = "auto"
    settings: Annotated[Settings, SETTINGS_OPTIONS] = Settings()  # noqa: RUF009 - frozen
    sampling: Annotated[Sampling, SAMPLING_OPTIONS] = Sampling()  # noqa: RUF009 - frozen

    @property
    def wanted_draft(self) -> str | None:
        """The draft to look for: none if fewer than three tiers run."""
        return self.draft if self.settings.tiers == 3 else "none"


@dataclass(frozen=True, kw_only=True)
class TextOptions(RunOptions):
    """The options of the commands that run a model on one text."""

    prompt_file: Annotated[
        Path | None,
        option(
            PROMPT,
            FILE,
            "Text file; [bold]-[/] is stdin. If no text is given, a built-in one is used: the invented log book of a "
            "harbour. With [bold]triforce generate[/], each --seed gives another log (without --seed, a random one); "
            "if no question is given and -n is 1, this command asks three questions about the log, then continues it.",
        ),
    ] = None
    prompt: Annotated[str | None, option(PROMPT, TEXT, "The text itself, instead of a file.")] = None


def new_tokens(least: int, help: str) -> Any:
    """The option `--max-new-tokens`."""
    return option(SAMPLING, whole(least), help)


@dataclass(frozen=True, kw_only=True)
class AnsweringOptions(RunOptions):
    """The options of the commands that answer requests in OpenAI's format. Sampling options, lengths and the context
    apply to requests that do not have these fields."""

    context: Annotated[
        str | None,
        option(
            PROMPT,
            NAME,
            "The saved context that requests start from if they name none; [bold]triforce read[/] saves one.",
        ),
    ] = None
    template_args: Annotated[list[Any] | None, TEMPLATE_ARG] = None
    max_sequences: Annotated[
        int,
        option(
            MACHINE,
            whole(1),
            "Maximum number of answers that are generated at the same time; fewer if memory does not suffice.",
        ),
    ] = 8
    max_new_tokens: Annotated[int, new_tokens(1, "Maximum number of tokens of an answer.")] = 256
