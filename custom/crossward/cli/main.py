"""The command ``crossward``: puts the groups together and turns every error into one readable line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

import typer
from rich.console import Console
from rich.markup import escape

import crossward
from crossward.federation.errors import CrosswardError

_HELP = "Hospitals train one imaging model together without moving a scan."

# Importing all of them takes seconds, in every process that a command starts: only the one that is asked for is.
_COMMANDS = ("methods", "simulate", "poc", "adapt", "report", "provision", "audit")
_GROUPS = ("job", "data", "bench", "ledger")

BROKEN = 70


def root(version: bool = typer.Option(False, "--version", help="Print the version and stop.")) -> None:
    """Hospitals train one imaging model together without moving a scan."""
    if version:
        typer.echo(f"crossward {crossward.__version__}")
        raise typer.Exit


def _app(words: Sequence[str]) -> typer.Typer:
    """The command with what the words ask for; with everything where that is help, or nothing that is known."""
    app = typer.Typer(
        name="crossward",
        help=_HELP,
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(root)
    asked = {next((word for word in words if not word.startswith("-")), "")} & {*_COMMANDS, *_GROUPS}
    if not asked and "--version" not in words:
        asked = {*_COMMANDS, *_GROUPS}
    for name in _COMMANDS:
        if name in asked:
            app.command(name)(getattr(import_module(f"crossward.cli.{name}"), name))
    for name in _GROUPS:
        if name in asked:
            app.add_typer(import_module(f"crossward.cli.{name}").app, name=name)
    return app


def main() -> None:
    """Run the command; errors that a person can act on are one line, and set the exit code."""
    console = Console(stderr=True, soft_wrap=True)
    try:
        _app(sys.argv[1:])()
    except CrosswardError as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if os.environ.get("CROSSWARD_DEBUG"):
            raise
        kind = type(error).__name__
        console.print(
            f"[bold red]internal error:[/] {escape(f'{kind}: {error}')}. This is a fault of Crossward; "
            "CROSSWARD_DEBUG=1 shows where.",
            highlight=False,
        )
        sys.exit(BROKEN)
