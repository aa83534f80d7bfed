"""The command ``crossward``: puts the groups together and turns every error into one readable line."""

from __future__ import annotations

import os
import sys

import typer
from rich.console import Console
from rich.markup import escape

import crossward
from crossward.cli import adapt, bench, data, job, job_simulator, methods, poc, provision, report, simulate
from crossward.federation.errors import CrosswardError

app = typer.Typer(
    name="crossward",
    help="Hospitals train one imaging model together without moving a scan.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("methods")(methods.methods)
app.command("simulate")(simulate.simulate)
app.command("poc")(poc.poc)
app.command("adapt")(adapt.adapt)
app.command("report")(report.report)
app.command("provision")(provision.provision)
job.app.command("simulator")(job_simulator.simulator)
app.add_typer(job.app, name="job")
app.add_typer(data.app, name="data")
app.add_typer(bench.app, name="bench")

BROKEN = 70


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and stop.")) -> None:
    """Hospitals train one imaging model together without moving a scan."""
    if version:
        typer.echo(f"crossward {crossward.__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command; errors that a person can act on are one line, and set the exit code."""
    console = Console(stderr=True, soft_wrap=True)
    try:
        app()
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
