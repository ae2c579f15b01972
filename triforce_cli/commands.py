"""The subcommands of `triforce`, put together."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from .batch.command import EPILOG as BATCH_EPILOG
from .batch.command import batch
from .batch.options import BatchOptions
from .bench.command import EPILOG as BENCH_EPILOG
from .bench.command import BenchOptions, bench
from .chat.command import EPILOG as CHAT_EPILOG
from .chat.command import chat
from .chat.options import ChatOptions
from .compare.command import EPILOG as COMPARE_EPILOG
from .compare.command import CompareOptions, compare
from .contexts import app as contexts
from .doctor import doctor
from .generate.command import EPILOG, generate
from .generate.options import GenerateOptions
from .models import models
from .options import ReportOptions, command
from .plan.command import EPILOG as PLAN_EPILOG
from .plan.command import PlanOptions, plan
from .read import EPILOG as READ_EPILOG
from .read import ReadOptions, read
from .serve.command import EPILOG as SERVE_EPILOG
from .serve.command import serve
from .serve.options import ServeOptions


class _BareJson(TyperCommand):
    """A command whose `--json` may have no path; it then means stdout. This is an older form."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        for index in reversed(range(len(args))):
            if args[index] == "--json" and args[index + 1 : index + 2] in ([], ["--debug"]):
                given.insert(index + 1, "-")
        return super().parse_args(ctx, given)


def _renamed(**names: str) -> dict[str, Any]:
    """The settings of a command that also accepts options by older names: `old_name="new-name"`."""
    by_old = {old.replace("_", "-"): new for old, new in names.items()}
    return {"token_normalize_func": lambda name: by_old.get(name, name)}


app = typer.Typer(
    name="triforce",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Runs language models on long texts. Several draft tokens are verified in one pass, [bold]losslessly[/]: "
    "every token is drawn from the model's own distribution over its full context.",
    epilog="Start with [bold]triforce generate[/]: it needs no option, no network and no GPU.",
)
app.command("generate", epilog=EPILOG)(command(GenerateOptions, generate))
app.command("chat", epilog=CHAT_EPILOG)(command(ChatOptions, chat))
app.command("batch", epilog=BATCH_EPILOG)(command(BatchOptions, batch))
app.command("serve", epilog=SERVE_EPILOG)(command(ServeOptions, serve))
app.command("read", epilog=READ_EPILOG)(command(ReadOptions, read))
app.add_typer(contexts, name="contexts")
app.command("bench", epilog=BENCH_EPILOG, context_settings=_renamed(new_tokens="max-new-tokens"))(
    command(BenchOptions, bench)
)
app.command("compare", epilog=COMPARE_EPILOG)(command(CompareOptions, compare))
app.command("models", cls=_BareJson)(command(ReportOptions, models))
app.command("plan", epilog=PLAN_EPILOG, context_settings=_renamed(acceptance="assume-acceptance"))(
    command(PlanOptions, plan)
)
app.command("doctor", cls=_BareJson)(command(ReportOptions, doctor))


def _print_version(asked: bool) -> None:
    if asked:
        print(f"triforce {version('triforce-cli')}")
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Options of the command itself; `app.run` looks for `--debug` among all arguments."""
