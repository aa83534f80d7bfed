from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "custom" / "crossward"

# Imports point down: a room may import itself and every room on a lower line, never one beside it or above it.
LEVELS = (
    ("cli",),
    ("flare", "review"),
    ("site",),
    ("methods", "privacy", "imaging", "evaluate"),
    ("uncertainty",),
    ("federation", "nets"),
)
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
MAY_IMPORT_NVFLARE = ("flare", "cli")


def absolute(name: str, dots: int, package: str) -> str:
    """The full name of a module that is written with leading dots inside `package`."""
    if not dots:
        return name
    parents = package.split(".")
    return ".".join([*parents[: len(parents) - dots + 1], *([name] if name else [])])


def literal_start(node: ast.expr) -> str | None:
    """The text of a string, or of the part of an f-string before its first value."""
    if isinstance(node, ast.JoinedStr) and node.values:
        node = node.values[0]
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def called_import(call: ast.Call, package: str) -> str | None:
    """What `importlib.import_module(...)` or `__import__(...)` imports, where it is written out."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    given = [*call.args[:1], *(word.value for word in call.keywords if word.arg == "name")]
    name = literal_start(given[0]) if function in ("import_module", "__import__") and given else None
    if name is None:
        return None
    anchors = [*call.args[1:2], *(word.value for word in call.keywords if word.arg == "package")]
    anchor = (literal_start(anchors[0]) if anchors else None) or package
    stripped = name.lstrip(".")
    return absolute(stripped, len(name) - len(stripped), anchor)


def imported(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = absolute(node.module or "", node.level, package)
            yield from ((node.lineno, f"{start}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and (name := called_import(node, package)):
            yield node.lineno, name


def broken_rules(path: str, source: str) -> list[str]:
    """What is wrong with the imports of the module at `path`, counted from the package's folder."""
    folders = path.split("/")[:-1]
    room = folders[0] if folders else None
    if room is not None and room not in LEVEL_OF:
        return [f"{path}: the room {room}/ has no place in the order of imports; give it one in LEVELS"]
    found = []
    for line, name in imported(source, ".".join(["crossward", *folders])):
        top, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if top == "nvflare" and room not in MAY_IMPORT_NVFLARE:
            found.append(f"{path}:{line}: imports nvflare outside flare/ and cli/")
        elif top != "crossward" or target == room:
            continue
        elif room is None:
            found.append(f"{path}:{line}: a module beside the rooms imports {name}")
        elif target in LEVEL_OF and LEVEL_OF[target] <= LEVEL_OF[room]:
            found.append(f"{path}:{line}: {room} imports {name}, which is not below it")
    return found


def test_every_import_points_down() -> None:
    modules = sorted(PACKAGE.rglob("*.py"))
    assert modules
    broken = [
        rule
        for module in modules
        for rule in broken_rules(module.relative_to(PACKAGE).as_posix(), module.read_text(encoding="utf-8"))
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("federation/round.py", "from crossward.uncertainty.evidence import fuse"),
        ("federation/round.py", "import crossward.nets.resnet"),
        ("nets/resnet.py", "from crossward import federation"),
        ("uncertainty/flags.py", "from crossward.methods import f2dc"),
        ("methods/fdse.py", "from crossward.privacy.ledger import Ledger"),
        ("imaging/dicom/film.py", "def f():\n    from crossward.evaluate import report\n"),
        ("evaluate/report.py", "from ..imaging.read import scan"),
        ("evaluate/report.py", "from .. import site"),
        ("evaluate/plots/bars.py", "from ...site import trainer"),
        ("site/trainer.py", "import importlib\nimportlib.import_module('crossward.review.app')"),
        ("site/trainer.py", "from importlib import import_module\nimport_module(name='crossward.flare')"),
        ("site/trainer.py", "import importlib\nimportlib.import_module('..flare.gate', __package__)"),
        ("site/trainer.py", "import importlib\nimportlib.import_module('.gate', package='crossward.flare')"),
        ("methods/registry.py", "from importlib import import_module\nimport_module(f'crossward.site.{1}')"),
        ("flare/gate.py", "__import__('crossward.review')"),
        ("review/app.py", "if True:\n    import crossward.flare.gate as gate\n"),
        ("flare/gate.py", "from crossward.cli.main import main"),
    ],
)
def test_an_import_that_does_not_point_down_is_found(path: str, source: str) -> None:
    (rule,) = broken_rules(path, source)
    assert rule.startswith(f"{path}:")
    assert "not below it" in rule


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("cli/run.py", "import nvflare\nfrom crossward.flare import gate\nfrom crossward.nets.resnet import ResNet"),
        ("flare/gate.py", "from nvflare.apis.filter import Filter\nfrom crossward.site.policy import Policy"),
        ("site/trainer.py", "from crossward.federation import errors\nfrom . import vault\nfrom .vault import Vault"),
        ("methods/f2dc.py", "from ..nets import resnet\nfrom crossward import __version__\nimport torch"),
        ("methods/__init__.py", "from . import f2dc\nimport importlib\nimportlib.import_module('.fdse', __package__)"),
        ("uncertainty/flags.py", "import crossward\nfrom crossward.federation.errors import BadInput"),
        ("nets/resnet.py", "def load(name):\n    return importlib.import_module(name)\n"),
        ("__init__.py", "import importlib.metadata"),
    ],
)
def test_an_import_that_points_down_is_allowed(path: str, source: str) -> None:
    assert broken_rules(path, source) == []


@pytest.mark.parametrize(
    "source",
    [
        "import nvflare",
        "def f():\n    from nvflare.apis.shareable import Shareable\n",
        "import importlib\nimportlib.import_module('nvflare.app_common')",
    ],
)
@pytest.mark.parametrize("path", ["site/trainer.py", "review/app.py", "nets/__init__.py", "__init__.py"])
def test_nvflare_outside_its_rooms_is_found(path: str, source: str) -> None:
    (rule,) = broken_rules(path, source)
    assert "nvflare" in rule


@pytest.mark.parametrize("source", ["from crossward.nets import resnet", "from .federation import errors"])
def test_a_module_beside_the_rooms_imports_no_room(source: str) -> None:
    (rule,) = broken_rules("__init__.py", source)
    assert "beside the rooms" in rule


def test_a_room_without_a_place_is_found() -> None:
    (rule,) = broken_rules("attic/boxes.py", "import torch")
    assert "attic/ has no place" in rule
