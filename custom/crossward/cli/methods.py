"""``crossward methods``: what there is, what each shares, and what the server learns."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from crossward.federation.algebra import Algebra
from crossward.federation.scopes import Scope, layout_digest
from crossward.methods import Method, Task, available, create, options_of
from crossward.methods.base import BLOCKS, HEADS

_EXAMPLE_TASK = Task(classes=("a", "b", "c", "d"), channels=1, size=32, rounds=1, width=1.0)


def methods(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")] = False,
) -> None:
    """List the methods with their options, what leaves a site, and the digest that sites compare.

    Figures are for a full-width ResNet-10 on grey images with four classes.

    Example: crossward methods --json
    """
    rows = {name: describe(create(name)) for name in available()}
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    console = Console()
    table = Table(title="Methods (ResNet-10, 4 classes)", title_justify="left", expand=False)
    for heading, side in (
        ("method", "left"),
        ("what it is", "left"),
        ("values sent", "right"),
        ("values local", "right"),
    ):
        table.add_column(heading, justify=side)  # type: ignore[arg-type]
    for name, row in rows.items():
        table.add_row(name, row["title"], _counted(row["values_sent"]), _counted(row["values"]["local"]))
    console.print(table)
    for name, row in rows.items():
        console.print(f"[bold]{name}[/], normalisation: {row['normalisation']}", soft_wrap=True, highlight=False)
        for key, value in row["options"].items():
            default = json.dumps(value["default"])
            console.print(f"  -o {key}={default}  ({escape(value['type'])})", soft_wrap=True, highlight=False)
    console.print(f"Any method takes --block {', '.join(BLOCKS)} and --head {', '.join(HEADS)}.", soft_wrap=True)
    console.print(
        "In the open, the server sees each site's update and counts. Secure aggregation is not part of this version.",
        style="dim",
    )


def describe(method: Method) -> dict[str, Any]:
    """Describe a method from the model it builds."""
    model = method.build(_EXAMPLE_TASK)
    algebra = method.algebra(_EXAMPLE_TASK, model)
    values = {
        scope.value: sum(spec.numel for spec in algebra.layout.values() if spec.scope is scope) for scope in Scope
    }
    return {
        "title": method.title,
        "normalisation": method.normalisation,
        "needs": algebra.needs,
        "options": {
            key: {"type": kind, "default": default} for key, (kind, default) in options_of(type(method)).items()
        },
        "values": values,
        "values_sent": sum(spec.numel for spec in algebra.sent.values()),
        "server_learns": server_learns(algebra),
        "digest": layout_digest(algebra.layout),
    }


def server_learns(algebra: Algebra) -> list[str]:
    """What the server sees of each site in the open, from what the site declares to send."""
    groups = {
        "its update of every shared tensor": any(spec.scope is Scope.SHARED for spec in algebra.layout.values()),
        "its update of the shared statistics": any(spec.scope is Scope.BUFFER for spec in algebra.layout.values()),
        "its personal tensors": any(spec.scope is Scope.PERSONAL for spec in algebra.layout.values()),
        **dict.fromkeys(algebra.extras, True),
    }
    return [what for what, sent in groups.items() if sent] + sorted(algebra.tallies)


def _counted(count: int) -> str:
    return f"{count:,}"
