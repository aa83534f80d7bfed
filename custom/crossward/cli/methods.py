"""``crossward methods``: what there is, what each shares, and what the server and other sites learn."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from crossward.federation.algebra import Algebra
from crossward.federation.blocks import SKETCH_WIDTH
from crossward.federation.rules import Shown
from crossward.federation.scopes import Scope, layout_digest
from crossward.methods import Method, Task, available, create, options_of
from crossward.methods.base import BLOCKS, HEADS
from crossward.privacy.secagg.settings import Settings

_EXAMPLE_TASK = Task(classes=("a", "b", "c", "d"), channels=1, size=32, rounds=1, width=1.0)

_PLACES: Mapping[str, str] = {
    Scope.SHARED: "shared tensors",
    Scope.BUFFER: "shared statistics",
    Scope.PERSONAL: "personal tensors",
}
_COUNTS = "numbers of training images, of those seen and answered right in training, their loss"
_VALIDATED = "numbers of validation images and of right answers on them"
_PUBLISHED = "at the end, the test figures of sites whose policy publishes them"
_RANGE = "tensor by tensor, the range of values that are not cut off"
_RANGES = (
    "tensor by tensor, how many values of all sites together were cut off at the end of the public range",
    "in the first round, tensor by tensor, how many sites' largest value is of which power of two",
)
_PADDED = "of personal tensors no site's own: those are under pads of the other sites"
_PRIVATE = (
    "BatchNorm gives way to GroupNorm, so there are no running statistics to share or to refresh",
    "a step's batch is of patients drawn at random; the gradient of each, of local tensors too, is clipped by itself, "
    "and noise is added to their sum",
)
_OFF = SKETCH_WIDTH**-0.5
_ASKED = (
    ("open", "server", "the server learns, in the open"),
    ("masked", "server", "the server learns, under secure aggregation"),
    ("open", "sites", "other sites learn, in the open"),
    ("masked", "sites", "other sites learn, under secure aggregation"),
)


def methods(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")] = False,
) -> None:
    """List the methods: options, what leaves a site, and what the server and other sites learn of it.

    Figures are for a full-width ResNet-10 on grey images with four classes.

    Example: crossward methods --json
    """
    rows = {name: describe(create(name)) for name in available()}
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    console = Console(highlight=False)
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
    common = {(mode, who): _true_of_all([row[mode][who] for row in rows.values()]) for mode, who, _ in _ASKED}
    for name, row in rows.items():
        console.print(f"[bold]{name}[/], normalisation: {row['normalisation']}", soft_wrap=True)
        for key, value in row["options"].items():
            console.print(f"  -o {key}={json.dumps(value['default'])}  ({escape(value['type'])})", soft_wrap=True)
        fewest = f"at least {row['masked']['fewest_sites']} sites"
        demanded = ", ".join([fewest, *_as_options(row["masked"]["options"])])
        console.print(f"  under secure aggregation: {demanded}", soft_wrap=True)
        own = [line for line in row["private"]["changes"] if line not in _PRIVATE]
        _print_private(console, own, row["private"]["options"])
        _print_learnt(
            console, {key: [line for line in row[key[0]][key[1]] if line not in lines] for key, lines in common.items()}
        )
    console.print("[bold]with every method[/]")
    _print_private(console, _PRIVATE, {})
    _print_learnt(console, common)
    console.print(f"Any method takes --block {', '.join(BLOCKS)} and --head {', '.join(HEADS)}.", soft_wrap=True)


def _true_of_all(learnt: Sequence[Sequence[str]]) -> list[str]:
    return [line for line in learnt[0] if all(line in lines for lines in learnt)]


def _print_learnt(console: Console, learnt: Mapping[tuple[str, str], Sequence[str]]) -> None:
    for mode, who, title in _ASKED:
        if learnt[mode, who]:
            console.print(f"  {title}:")
        for line in learnt[mode, who]:
            console.print(f"    - {escape(line)}", soft_wrap=True)


def _print_private(console: Console, changes: Sequence[str], options: Mapping[str, Any]) -> None:
    if changes or options:
        demanded = f" ({', '.join(_as_options(options))})" if options else ""
        console.print(f"  under differential privacy{demanded}:", soft_wrap=True)
    for line in changes:
        console.print(f"    - {escape(line)}", soft_wrap=True)


def _as_options(values: Mapping[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def _changed(method: Method, other: Method) -> dict[str, Any]:
    """The options of the other that the method has not."""
    return {key: value for key, value in asdict(other).items() if value != asdict(method)[key]}


def describe(method: Method) -> dict[str, Any]:
    """Describe a method from the model it builds."""
    model = method.build(_EXAMPLE_TASK)
    algebra = method.algebra(_EXAMPLE_TASK, model)
    values = {
        scope.value: sum(spec.numel for spec in algebra.layout.values() if spec.scope is scope) for scope in Scope
    }
    fewest = max(Settings().fewest, method.fewest_masked)
    masked = method.under_masks(fewest)
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
        "open": {"server": seen_in_the_open(algebra), "sites": seen_by_sites(algebra)},
        "masked": {
            "server": seen_under_masks(masked.algebra(_EXAMPLE_TASK, model)),
            "sites": seen_by_sites(masked.algebra(_EXAMPLE_TASK, model)) + [_RANGE] * bool(algebra.sent),
            "fewest_sites": fewest,
            "options": _changed(method, masked),
        },
        "private": {
            "options": _changed(method, method.under_privacy()),
            "changes": [*_PRIVATE, *method.private_changes],
        },
        "digest": layout_digest(algebra.layout),
    }


def server_learns(algebra: Algebra) -> list[str]:
    """What a site sends in the open, by the names that its report has for it."""
    groups = {
        "its update of every shared tensor": any(spec.scope is Scope.SHARED for spec in algebra.layout.values()),
        "its update of the shared statistics": any(spec.scope is Scope.BUFFER for spec in algebra.layout.values()),
        "its personal tensors": any(spec.scope is Scope.PERSONAL for spec in algebra.layout.values()),
        **dict.fromkeys(algebra.extras, True),
    }
    return [what for what, sent in groups.items() if sent] + sorted(algebra.tallies)


def seen_in_the_open(algebra: Algebra) -> list[str]:
    """What the server learns where sites report to it."""
    reported = _each(algebra, lambda shown: shown.reported)
    return [*(f"every site's {what}" for what in [*reported, _COUNTS, _VALIDATED]), _PUBLISHED]


def seen_under_masks(algebra: Algebra) -> list[str]:
    """What the server learns where it opens only sums."""
    shown = [rule.shown() for rule in algebra.rules().values()]
    summed = _each(algebra, lambda shown: shown.summed)
    return [
        *(f"summed over the sites: {what}" for what in [*summed, _COUNTS, _VALIDATED]),
        *([_PADDED] if Scope.PERSONAL in algebra.rules() else []),
        *_compared(algebra),
        *dict.fromkeys(line for each in shown for line in (*each.server, *each.planned)),
        *(_RANGES if algebra.sent else ()),
        "at the end, summed over the sites: numbers of test images and of right answers on them",
    ]


def seen_by_sites(algebra: Algebra) -> list[str]:
    """What a site learns that took part."""
    shown = [rule.shown() for rule in algebra.rules().values()]
    common = [_PLACES[scope] for scope in (Scope.SHARED, Scope.BUFFER) if scope in algebra.rules()]
    return [
        *([f"the new {' and '.join(common)}, the same for all"] if common else []),
        *dict.fromkeys(line for each in shown for line in (*each.received, *each.planned)),
        "which sites took part in a round, and which round is the best so far",
    ]


def _each(algebra: Algebra, words: Callable[[Shown], str | None]) -> list[str]:
    """What rules say, each followed by the tensors that it is about; equal words once."""
    places: dict[str, list[str]] = {}
    for group, rule in algebra.rules().items():
        said = words(rule.shown())
        if said is not None:
            places.setdefault(said, []).append(_PLACES.get(group, group))
    return [f"{said} ({', '.join(where)})" for said, where in places.items()]


def _compared(algebra: Algebra) -> list[str]:
    """Whose cosines the server learns: of extras exactly, of the model's tensors by sketches."""
    counts = Counter(block.partition("/")[0] for block in algebra.blocks())
    return [
        f"the cosine of any two sites' {group}, which is rotated, as are its sums: only sites know how to turn it back"
        if group in algebra.extras
        else f"the cosine of any two sites' {_PLACES[group]} in {count} blocks, off by about {_OFF:.3f} (sketches)"
        for group, count in counts.items()
    ]


def _counted(count: int) -> str:
    return f"{count:,}"
