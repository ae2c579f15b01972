"""The subcommands of `triforce`, put together."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from .bench.command import EPILOG as BENCH_EPILOG
from .bench.command import bench
from .compare.command import EPILOG as COMPARE_EPILOG
from .compare.command import compare
from .doctor import doctor
from .generate.command import EPILOG, generate
from .models import models
from .plan.command import EPILOG as PLAN_EPILOG
from .plan.command import plan

app = typer.Typer(
    name="triforce",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Reads a long text and writes what follows, [bold]losslessly[/]: every token is drawn from the model's own "
    "distribution over its full context, only several at a time.",
    epilog="Start with [bold]triforce generate[/]: it needs no option, no network and no GPU.",
)
app.command(epilog=EPILOG)(generate)
app.command(epilog=BENCH_EPILOG)(bench)
app.command(epilog=COMPARE_EPILOG)(compare)
app.command()(models)
app.command(epilog=PLAN_EPILOG)(plan)
app.command()(doctor)


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
    """Options of the command itself; `app.main` looks at `--debug` wherever it stands."""
