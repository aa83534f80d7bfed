"""A YAML file as a tree of nodes, so that every mistake has its line; no object is ever built from it."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from crossward.federation.errors import BadInput

LARGEST_FILE = 256_000
DEEPEST = 20
MOST_TOLD = 20

_LONGEST_QUOTE = 40
_WHOLE = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_DECIMAL = re.compile(r"[-+]?(([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)")
_KINDS = {yaml.MappingNode: "a block of keys", yaml.SequenceNode: "a list", yaml.ScalarNode: "one value"}
_YAML = "tag:yaml.org,2002:"


@dataclass(frozen=True)
class Mistake:
    """What is wrong in a line, with what to do."""

    line: int
    text: str


class BadSiteFile(BadInput):
    """Everything that is wrong with a file, a line of text each.

    Attributes:
        mistakes: all of them, by line; the message tells the first twenty.
    """

    def __init__(self, file: str, mistakes: Sequence[Mistake]) -> None:
        self.mistakes = tuple(sorted(set(mistakes), key=lambda mistake: (mistake.line, mistake.text)))
        lines = [f"{file} line {mistake.line}: {mistake.text}" for mistake in self.mistakes[:MOST_TOLD]]
        if len(self.mistakes) > MOST_TOLD:
            lines.append(f"{file}: and {len(self.mistakes) - MOST_TOLD} more; correct these first")
        super().__init__("\n".join(lines))


def quoted(text: str) -> str:
    """As it is shown in a message: on one line, and not too long."""
    return repr(text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}…")


def hint(name: str, known: Collection[str]) -> str:
    """The nearest known name, or all of them."""
    lower = {each.casefold(): each for each in known}
    near = get_close_matches(name.casefold(), lower, n=1)
    return f"did you mean '{lower[near[0]]}'?" if near else f"choose from {', '.join(sorted(known))}"


class Value:
    """One value of the file.

    It reads itself as what it should be. Where it is something else that is noted, and a stand-in is given so that the
    rest can be looked at too; the stand-ins are never used, for whoever reads the file looks at the notes at the end.
    """

    def __init__(self, name: str, node: yaml.Node, mistakes: list[Mistake], *, key: yaml.Node | None = None) -> None:
        self.name = name
        self.node = node
        # A value may begin below its key.
        self.line = int((key or node).start_mark.line) + 1
        self._mistakes = mistakes

    def wrong(self, text: str) -> None:
        """Note a mistake in this line; the text says what to do after a semicolon."""
        self._mistakes.append(Mistake(self.line, text))

    @property
    def single(self) -> bool:
        return isinstance(self.node, yaml.ScalarNode)

    @property
    def empty(self) -> bool:
        return self.node.tag == f"{_YAML}null"

    def text(self, *, may_be_empty: bool = False) -> str:
        """As it is written: `no`, `01` and `1.0` are these letters, not a truth or a number."""
        if not self._is(yaml.ScalarNode):
            return ""
        written = str(self.node.value).strip()
        if self.empty or not (written or may_be_empty):
            self.wrong(f"{self.name} is empty; fill it in or take the line out")
        return written

    def choice(self, known: Sequence[str]) -> str:
        written = self.text()
        if written in known:
            return written
        if written:
            self.wrong(f"{self.name} cannot be {quoted(written)}; {hint(written, known)}")
        return known[0]

    def number(self) -> float:
        number = self._number() if self._is(yaml.ScalarNode) else 0.0
        if number is None:
            self.wrong(f"{self.name} is not a number; write it with digits and without quotes")
        return float(number or 0)

    def whole(self) -> int:
        number = self._number() if self._is(yaml.ScalarNode) else 0
        if not isinstance(number, int):
            self.wrong(f"{self.name} is not a whole number; write it with digits and without quotes")
            return 0
        return number

    def items(self) -> list[Value]:
        if not self._is(yaml.SequenceNode):
            return []
        return [Value(f"{self.name}[{index}]", node, self._mistakes) for index, node in enumerate(self.node.value)]

    def entries(self) -> dict[str, Value]:
        """A block of keys, whatever they are called; one that is there twice is a mistake."""
        found: dict[str, Value] = {}
        if not self._is(yaml.MappingNode):
            return found
        for key_node, node in self.node.value:
            key = Value(self._below("a key"), key_node, self._mistakes)
            name = key.text()
            if name in found:
                key.wrong(f"{self._below(quoted(name))} is there a second time; keep one (line {found[name].line})")
            elif name:
                found[name] = Value(self._below(name), node, self._mistakes, key=key_node)
        return found

    def block(self, known: Collection[str], *, needed: Collection[str] = ()) -> dict[str, Value]:
        """A block of keys out of a closed list."""
        found = self.entries()
        for name in [name for name in found if name not in known]:
            found.pop(name).wrong(f"there is no key {self._below(quoted(name))}; {hint(name, known)}")
        if isinstance(self.node, yaml.MappingNode):
            for name in needed:
                if name not in found:
                    self.wrong(f"{self._below(name)} is missing; add it")
        return found

    def plain(self) -> Any:
        """Text, numbers, truths, and lists and blocks of them: for options that only their user knows."""
        if isinstance(self.node, yaml.MappingNode):
            return {name: value.plain() for name, value in self.entries().items()}
        if isinstance(self.node, yaml.SequenceNode):
            return [value.plain() for value in self.items()]
        number = self._number()
        if number is not None:
            return number
        kind = self.node.tag.removeprefix(_YAML)
        if kind == "bool":
            return yaml.SafeLoader.bool_values[self.node.value.lower()]
        if kind != "str":
            self.wrong(f"{self.name} is no plain text, decimal number, yes or no; put quotes round a text")
        return str(self.node.value)

    def _number(self) -> int | float | None:
        """Only what every reader takes for the same number: no octals, hours and minutes, infinities."""
        if not isinstance(self.node, yaml.ScalarNode) or self.node.style is not None:
            return None
        if _WHOLE.fullmatch(self.node.value):
            return int(self.node.value)
        number = float(self.node.value) if _DECIMAL.fullmatch(self.node.value) else math.nan
        return number if math.isfinite(number) else None

    def _is(self, kind: type[yaml.Node]) -> bool:
        if isinstance(self.node, kind):
            return True
        self.wrong(f"{self.name} must be {_KINDS[kind]}, and is {_KINDS[type(self.node)]}; see the example file")
        return False

    def _below(self, name: str) -> str:
        return f"{self.name}.{name}" if self.name else name


def read_tree(path: Path, mistakes: list[Mistake]) -> Value:
    """Reads a file whose top is a block of keys.

    Raises:
        BadInput: there is no such file, or it is far too large.
        BadSiteFile: it is not YAML, or uses more of YAML than is read here.
    """
    try:
        with path.open("rb") as stream:
            content = stream.read(LARGEST_FILE + 1)
    except OSError as error:
        raise BadInput(f"{path.name} cannot be read ({error.strerror}); check the path and its permissions") from None
    if len(content) > LARGEST_FILE:
        raise BadInput(f"{path.name} is larger than {LARGEST_FILE} bytes; it is hardly the right file")
    try:
        _refuse_tricks(path, content)
        node = yaml.compose(content, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        text = f"is not YAML ({error.problem}); check indentation and colons, and put quotes round special characters"
        raise BadSiteFile(path.name, [Mistake(line, text)]) from None
    except yaml.YAMLError:
        raise BadInput(f"{path.name} is not a text file; save it as UTF-8") from None
    if node is None:
        raise BadInput(f"{path.name} is empty; begin with a copy of site.yaml.example")
    return Value("", node, mistakes)


def _refuse_tricks(path: Path, content: bytes) -> None:
    """Looks at the file before a tree is built: no references, no tags, no depth without end.

    With references a few lines can stand for millions, and a node can be inside itself.
    """
    depth = 0
    for event in yaml.parse(content, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        reason = ""
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            reason = "begins with * or &, which YAML takes for a reference; put quotes round it, or write it out"
        elif getattr(event, "tag", None):
            reason = "begins with !, which YAML takes for a type; put quotes round it, or take it out"
        elif depth > DEEPEST:
            reason = f"is nested deeper than {DEEPEST} levels; see the example file"
        if reason:
            line = event.start_mark.line + 1 if event.start_mark else 1
            raise BadSiteFile(path.name, [Mistake(line, reason)])
