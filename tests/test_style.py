from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LARGEST_FILE = 1_000_000
LONGEST_MODULE = 400
HOME_PATH = re.compile(r"(?<![\w.~/-])/(?:root|home|Users)/")


def git_files() -> list[Path] | None:
    """What git holds or would take in here; None where this folder is not a repository of its own."""
    question = ["git", "-C", str(ROOT)]
    try:
        top = subprocess.run([*question, "rev-parse", "--show-toplevel"], capture_output=True, text=True, check=True)
        if Path(top.stdout.strip()) != ROOT:
            return None
        listing = [*question, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        return None
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def walked_files() -> list[Path]:
    """The files of a copy without git: all but those that .gitignore names."""
    rules = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    anywhere = [rule.strip("/") for rule in rules if not rule.startswith("/")]
    at_top = [rule.strip("/") for rule in rules if rule.startswith("/")]

    def ignored(path: Path) -> bool:
        inside = path.relative_to(ROOT)
        return inside.parts[0] in at_top or any(Path(part).match(rule) for part in inside.parts for rule in anywhere)

    return [path for path in ROOT.rglob("*") if path.is_file() and ".git" not in path.parts and not ignored(path)]


@pytest.fixture(scope="module")
def files() -> list[Path]:
    found = git_files()
    found = walked_files() if found is None else found
    assert Path(__file__).resolve() in found
    return found


def text_of(path: Path) -> str | None:
    """The file's text, or None for one that is not text."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def faults(path: str, text: str) -> list[str]:
    found = []
    if text and not text.endswith("\n"):
        found.append(f"{path}: does not end with a newline")
    found += [
        f"{path}:{number}: names a folder of one machine"
        for number, line in enumerate(text.splitlines(), start=1)
        if HOME_PATH.search(line)
    ]
    lines = text.count("\n")
    if path.startswith("custom/") and path.endswith(".py") and lines > LONGEST_MODULE:
        found.append(f"{path}: {lines} lines, more than {LONGEST_MODULE}")
    return found


def test_text_files_are_in_order(files: list[Path]) -> None:
    texts = {path.relative_to(ROOT).as_posix(): text_of(path) for path in files}
    found = [fault for path, text in texts.items() if text is not None for fault in faults(path, text)]
    assert not found, "\n".join(found)


def test_no_file_is_large(files: list[Path]) -> None:
    large = [str(path.relative_to(ROOT)) for path in files if path.stat().st_size > LARGEST_FILE]
    assert not large, "\n".join(large)


@pytest.mark.parametrize("folder", ["root", "home", "Users"])
@pytest.mark.parametrize("before", ["", "see ", "path='", '"', "file=", "(", "x:"])
def test_a_home_path_is_found(before: str, folder: str) -> None:
    assert faults("docs/a.md", f"fine\n{before}/{folder}/x\n") == ["docs/a.md:2: names a folder of one machine"]


@pytest.mark.parametrize("text", ["docs/home/x", "https://example.org/home/x", "../home/x", "~/home/x", "/homes/x"])
def test_a_path_from_elsewhere_is_allowed(text: str) -> None:
    assert faults("docs/a.md", f"{text}\n") == []


def test_a_missing_newline_and_a_long_module_are_found() -> None:
    assert faults("a.txt", "x") == ["a.txt: does not end with a newline"]
    assert faults("a.txt", "") == []
    assert faults("custom/a.py", "x\n" * LONGEST_MODULE) == []
    assert faults("custom/a.py", "x\n" * (LONGEST_MODULE + 1)) == ["custom/a.py: 401 lines, more than 400"]
    assert faults("tests/a.py", "x\n" * (LONGEST_MODULE + 1)) == []
