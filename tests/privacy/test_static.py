"""No generator of random numbers but the operating system's can be reached from secure aggregation."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import crossward
from crossward.privacy import secagg

PACKAGE = Path(secagg.__file__).parent
ROOT = Path(crossward.__file__).parent
FORBIDDEN_MODULES = {"random", "numpy.random", "torch.random", "scipy.stats", "uuid"}
FORBIDDEN_NAMES = {
    "random",
    "rand",
    "randn",
    "randint",
    "rand_like",
    "randn_like",
    "randint_like",
    "randperm",
    "bernoulli",
    "multinomial",
    "default_rng",
    "RandomState",
    "Generator",
    "manual_seed",
    "normal_",
    "uniform_",
    "random_",
}
OWN_SOURCES = {"secrets.token_bytes", "secrets.randbelow"}


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _file_of(module: str) -> Path | None:
    base = ROOT.parent.joinpath(*module.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def _reachable() -> list[Path]:
    """The package's modules, and every module of Crossward that they import, directly or not."""
    waiting, found = sorted(PACKAGE.glob("*.py")), []
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.append(path)
            files = (_file_of(module) for module in _imports(_tree(path)) if module.startswith("crossward"))
            waiting += [file for file in files if file is not None]
    return sorted(found)


def _random_things(tree: ast.Module) -> set[str]:
    found = {module for module in _imports(tree) if module in FORBIDDEN_MODULES}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in FORBIDDEN_NAMES:
            found.add(node.attr)
        if isinstance(node, ast.Name) and node.id in FORBIDDEN_NAMES:
            found.add(node.id)
        if isinstance(node, ast.Constant) and node.value in FORBIDDEN_MODULES:
            found.add(str(node.value))
    return found


@pytest.mark.parametrize("path", _reachable(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_other_generator_is_reachable(path: Path) -> None:
    assert not _random_things(_tree(path))


@pytest.mark.parametrize(
    "code",
    [
        "import random",
        "from random import choice",
        "import numpy as np\nnp.random.rand(3)",
        "from numpy.random import default_rng",
        "import torch\ntorch.randn(3)",
        "import torch\ntorch.zeros(3).normal_()",
        "__import__('random')",
        "import importlib\nimportlib.import_module('numpy.random')",
    ],
)
def test_the_search_would_see_one(code: str) -> None:
    assert _random_things(ast.parse(code))


def test_the_search_covers_the_package_and_what_it_imports() -> None:
    seen = {path.relative_to(ROOT).as_posix() for path in _reachable()}
    modules = ("canonical", "shamir", "masks", "ring", "settings", "identity", "keys", "roster", "binding", "site")
    assert {f"privacy/secagg/{name}.py" for name in (*modules, "memory", "messages", "server")} <= seen
    assert "federation/errors.py" in seen


def test_secrets_come_from_two_functions_of_the_operating_system() -> None:
    used = set()
    for path in sorted(PACKAGE.glob("*.py")):
        for node in ast.walk(_tree(path)):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in ("secrets", "os")
            ):
                used.add(f"{node.value.id}.{node.attr}")
    assert used == OWN_SOURCES


def test_the_package_writes_no_files_and_prints_nothing() -> None:
    for path in sorted(PACKAGE.glob("*.py")):
        called = {
            node.func.id
            for node in ast.walk(_tree(path))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert not called & {"open", "print", "eval", "exec"}, path.name
        assert not {"logging", "pickle", "socket", "subprocess"} & set(_imports(_tree(path))), path.name
