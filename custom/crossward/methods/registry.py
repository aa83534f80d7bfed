"""Finds methods: every module in this folder that defines a registered class is one, without a list to keep."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from types import MappingProxyType, NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import crossward.methods
from crossward.federation.errors import BadInput
from crossward.methods.base import Method

_METHODS: dict[str, type[Method]] = {}
MethodClass = TypeVar("MethodClass", bound=type[Method])


def register(method: MethodClass) -> MethodClass:
    """Make a method known under its name (a class decorator)."""
    if _METHODS.setdefault(method.name, method) is not method:
        raise ValueError(f"two methods are called '{method.name}'")
    return method


@cache
def _discover() -> None:
    for module in pkgutil.iter_modules(crossward.methods.__path__):
        importlib.import_module(f"{crossward.methods.__name__}.{module.name}")


def available() -> Mapping[str, type[Method]]:
    """All methods by name."""
    _discover()
    return MappingProxyType(dict(sorted(_METHODS.items())))


def options_of(method: type[Method]) -> dict[str, tuple[str, Any]]:
    """The options of a method: name -> (type in words, default)."""
    hints = get_type_hints(method)
    return {
        field.name: (_words(hints[field.name]), None if field.default is MISSING else field.default)
        for field in fields(method)
    }


def _words(hint: Any) -> str:
    if hint is NoneType:
        return "none"
    if get_origin(hint) is tuple:
        return f"list of {_words(get_args(hint)[0])}"
    if get_origin(hint) is not None:
        return " or ".join(_words(part) if isinstance(part, type) else repr(part) for part in get_args(hint))
    return hint.__name__ if isinstance(hint, type) else str(hint)


def create(name: str, **options: Any) -> Method:
    """Make a method by name with its options.

    Raises:
        BadInput: no such method or option, or a value that the option does not take.
    """
    known = available()
    if name not in known:
        raise BadInput(f"there is no method '{name}'{_nearest(name, known)}; there are: {', '.join(known)}")
    allowed, hints = options_of(known[name]), get_type_hints(known[name])
    for option, value in options.items():
        if option not in allowed:
            listed = ", ".join(allowed) or "none"
            raise BadInput(f"{name} has no option '{option}'{_nearest(option, allowed)}; it has: {listed}")
        default = allowed[option][1]
        if isinstance(default, tuple) and isinstance(value, list):
            value = options[option] = tuple(value)
        if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
            options[option] = float(value)
        elif not fits(value, hints[option]):
            raise BadInput(f"{name}: option '{option}' takes {allowed[option][0]}, not {value!r}")
    return known[name](**options)


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of the kind that an annotation says; a whole number will do for a float."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(fits(each, get_args(hint)[0]) for each in value)
    if hint is float and type(value) is int:
        return True
    if get_args(hint):
        return any(fits(value, part) for part in get_args(hint))
    return type(value) is hint


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name.lower(), known, n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""
