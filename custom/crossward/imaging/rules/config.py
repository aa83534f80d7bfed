"""``site.yaml`` read into `SiteRules`: everything that is wrong with it is told at once, each with its line."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydicom.datadict import dictionary_VR, keyword_dict

from crossward.federation.errors import BadInput
from crossward.imaging.rules import domains
from crossward.imaging.rules.nodes import BadSiteFile, Mistake, Value, hint, quoted, read_tree
from crossward.imaging.rules.site import (
    DEFAULT_DOMAIN,
    SITE_FILE,
    DomainRule,
    Frames,
    Key,
    LabelRule,
    SiteRules,
    Step,
)

VERSION = 1
USUAL_CACHE = "cache"
LONGEST_CLASS = 64

# What each source of labels needs, and what else it takes.
_LABEL_KEYS = {
    "csv": (("file",), ("key", "key_column", "label_column", "patient_column", "map")),
    "tag": (("tag",), ("map",)),
    # A report's values are codes or free text: only a map makes them classes, and keeps names out of what is printed.
    "sr": (("concept", "map"), ()),
}
_CODE_STRING = "CS"
_LABEL_KINDS = ("CS", "LO", "SH", "ST", "LT", "UT", "UC", "IS", "DS", "US", "SS", "UL", "SL", "FL", "FD")
_PATIENT_GROUP = 0x0010
_NAMING_TAGS = ("AccessionNumber", "InstitutionName", "InstitutionAddress", "StudyID", "StationName")


def read_site_rules(path: Path, *, must_exist: bool = True) -> SiteRules:
    """Reads and checks a site's rules.

    Args:
        path: the file, or the folder that has a site.yaml.
        must_exist: whether the images and the table of labels have to be there now; what was prepared can be used
            without them.

    Raises:
        BadInput: names every line that is wrong, and what to do.
    """
    file = (path / SITE_FILE if path.is_dir() else path).absolute()
    mistakes: list[Mistake] = []
    root = read_tree(file, mistakes)
    found = root.block(_SECTIONS, needed=("version", "data", "labels"))
    if mistakes and not found:
        raise BadSiteFile(file.name, mistakes)
    given: dict[str, Any] = {"cache": file.parent / USUAL_CACHE}
    for name, value in found.items():
        given |= _SECTIONS[name](value, file.parent)
    _check_places(found, given, must_exist=must_exist)
    _check_domains_of_steps(found, given)
    if mistakes:
        raise BadSiteFile(file.name, mistakes)
    return SiteRules(path=file, **given)


def _version(value: Value, _: Path) -> dict[str, Any]:
    if value.whole() != VERSION:
        value.wrong(f"this program reads version {VERSION} of the file; write version: {VERSION}")
    return {}


def _place(name: str) -> Callable[[Value, Path], dict[str, Any]]:
    return lambda value, folder: {name: folder / value.text()}


def _choice(name: str, known: tuple[str, ...]) -> Callable[[Value, Path], dict[str, Any]]:
    return lambda value, _: {name: value.choice(known)}


def _labels(value: Value, folder: Path) -> dict[str, Any]:
    every = {"source", *(key for needed, others in _LABEL_KEYS.values() for key in (*needed, *others))}
    asked = value.entries().get("source")
    source = asked.choice(tuple(_LABEL_KEYS)) if asked else "csv"
    needed, others = _LABEL_KEYS[source]
    found = value.block(every, needed=needed)
    for name in found.keys() - {"source", *needed, *others}:
        found.pop(name).wrong(f"labels.{name} has no meaning with source: {source}; take one of the two out")
    key = found["key"].choice(get_args(Key)) if "key" in found else "file"
    given: dict[str, Any] = {"source": source, "key": key, "key_column": key}
    for name in ("key_column", "label_column", "patient_column", "concept"):
        if name in found:
            given[name] = found[name].text()
    if "file" in found:
        given["file"] = folder / found["file"].text()
    if "map" in found:
        given["mapping"] = _mapping(found["map"])
    if "tag" in found:
        given["tag"] = _tag(found["tag"], mapped="map" in found)
    rule = LabelRule(**given)
    if rule.label_column in (rule.key_column, rule.patient_column):
        value.wrong("the label is in the same column as the key or the patient; correct labels.label_column")
    return {"labels": rule}


def _mapping(value: Value) -> Mapping[str, str]:
    mapping = {written: _class(label) for written, label in value.entries().items()}
    if not mapping:
        value.wrong("labels.map is empty; take it out, or name the labels that are to be trained on")
    return mapping


def _class(value: Value) -> str:
    name = value.text()
    if not name.isprintable() or len(name) > LONGEST_CLASS:
        value.wrong(f"a class is one line of {LONGEST_CLASS} letters at most; shorten it")
    return name


def _tag(value: Value, *, mapped: bool) -> str:
    keyword = value.text()
    tag = keyword_dict.get(keyword)
    if tag is None:
        if keyword:
            near = hint(keyword, keyword_dict)
            value.wrong(
                f"DICOM has no element {quoted(keyword)}; {near if near.endswith('?') else 'check the keyword'}"
            )
        return keyword
    kind = dictionary_VR(tag)
    if tag >> 16 == _PATIENT_GROUP or keyword in _NAMING_TAGS or kind not in _LABEL_KINDS:
        value.wrong(f"{keyword} says who or when, or holds no single text or number; choose another element")
    elif kind != _CODE_STRING and not mapped:
        value.wrong(f"{keyword} is free text; add labels.map, so that only labels you name are taken")
    return keyword


def _splits(value: Value, _: Path) -> dict[str, Any]:
    found = value.block(("train", "val", "test", "seed"))
    given: dict[str, Any] = {"split_seed": found.pop("seed").whole()} if "seed" in found else {}
    if not found:
        return given
    missing = [name for name in ("train", "val", "test") if name not in found]
    if missing:
        value.wrong(f"splits has no {', '.join(missing)}; give train, val and test, or none of them")
        return given
    fractions = tuple(found[name].number() for name in ("train", "val", "test"))
    if min(fractions) < 0 or not math.isclose(sum(fractions), 1, abs_tol=1e-6):
        value.wrong("the splits are not fractions that add up to 1; write for example train: 0.7, val: 0.1, test: 0.2")
    elif fractions[0] == 0 or fractions[2] == 0:
        value.wrong("nothing is left to train on or to test with; give train and test more than 0")
    return given | {"fractions": fractions}


def _domain(value: Value, _: Path) -> dict[str, Any]:
    found = value.block(("names", "fields"))
    given: dict[str, Any] = {}
    if "names" in found:
        given["names"] = tuple(_match(item) for item in found["names"].items())
    if "fields" in found:
        for item in (items := found["fields"].items()):
            _check_field(item, item.text())
        given["fields"] = tuple(item.text() for item in items)
    return {"domain": DomainRule(**given)}


def _match(value: Value) -> tuple[str, Mapping[str, str]]:
    found = value.block(("name", "when"), needed=("name", "when"))
    name = found["name"].text() if "name" in found else ""
    if name:
        _told(found["name"], domains.check_name, name)
    patterns: dict[str, str] = {}
    for field, item in (found["when"].entries() if "when" in found else {}).items():
        patterns[field] = item.text(may_be_empty=True)
        if _check_field(item, field):
            _told(item, domains.check_pattern, field, patterns[field])
    if "when" in found and not patterns:
        found["when"].wrong(f"{found['when'].name} is empty and would fit every file; name a field and a pattern")
    return name, patterns


def _check_field(value: Value, field: str) -> bool:
    if field in domains.FIELDS:
        return True
    value.wrong(
        f"{quoted(field)} is no fact about a scanner, and a domain follows from nothing else; "
        f"{hint(field, domains.FIELDS)}"
    )
    return False


def _steps(section: str) -> Callable[[Value, Path], dict[str, Any]]:
    def read(value: Value, _: Path) -> dict[str, Any]:
        return {section: {domain: _chain(listed, section) for domain, listed in value.entries().items()}}

    return read


def _chain(value: Value, section: str) -> tuple[Step, ...]:
    """The steps of a domain, each checked with those before it, so that a mistake is told at the line that makes it."""
    steps: list[Step] = []
    for item in value.items():
        step = _step(item)
        if step.name and _told(item, _CHECKS[section], [*steps, step]):
            steps.append(step)
    return tuple(steps)


def _step(value: Value) -> Step:
    """A step is written as its name, or as a block with its name over its options."""
    if value.single:
        return Step(name=value.text(), line=value.line)
    found = value.entries()
    if len(found) != 1:
        value.wrong(f"{value.name} must be a step's name, alone or with its options below; begin each with a dash")
        return Step(name="", line=value.line)
    ((name, below),) = found.items()
    options = {} if below.empty else {key: option.plain() for key, option in below.entries().items()}
    return Step(name=name, options=options, line=value.line)


def _check_transforms(steps: Sequence[Step]) -> None:
    from crossward.imaging.transforms.pipeline import check_steps

    check_steps(steps)


def _check_styles(steps: Sequence[Step]) -> None:
    from crossward.imaging.transforms.style import check_style

    check_style(steps[-1])


# Imported when they are asked for: they take seconds.
_CHECKS: Mapping[str, Callable[[Sequence[Step]], None]] = {"transforms": _check_transforms, "augment": _check_styles}


def _told(value: Value, check: Callable[..., None], *arguments: Any) -> bool:
    """Whether a check found nothing; what it found is noted at the value's line."""
    try:
        check(*arguments)
    except BadInput as error:
        value.wrong(str(error))
        return False
    return True


_SECTIONS: Mapping[str, Callable[[Value, Path], dict[str, Any]]] = {
    "version": _version,
    "data": _place("data"),
    "cache": _place("cache"),
    "labels": _labels,
    "splits": _splits,
    "frames": _choice("frames", get_args(Frames)),
    "domain": _domain,
    "transforms": _steps("transforms"),
    "augment": _steps("augment"),
    "burned_in": _choice("burned_in", ("refuse", "take")),
}


def _check_places(found: Mapping[str, Value], given: Mapping[str, Any], *, must_exist: bool) -> None:
    if "data" not in found:
        return
    data, cache = (Path(given[name]).resolve() for name in ("data", "cache"))
    if data.is_relative_to(cache):
        where = found.get("cache", found["data"])
        where.wrong("the images lie inside the cache, which may be deleted; give the cache a folder of its own")
    if not must_exist:
        return
    if not data.is_dir():
        found["data"].wrong("the folder of data is not there; correct the path, or mount it")
    rule = given.get("labels")
    if rule is not None and rule.file is not None and not rule.file.is_file():
        found["labels"].entries()["file"].wrong("the table of labels.file is not there; correct the path")


def _check_domains_of_steps(found: Mapping[str, Value], given: Mapping[str, Any]) -> None:
    rule = given.get("domain", DomainRule())
    known = {DEFAULT_DOMAIN, *(name for name, _ in rule.names)}
    for section in ("transforms", "augment"):
        for domain, value in (found[section].entries() if section in found else {}).items():
            if not rule.fields and domain not in known:
                value.wrong(f"no rule under domain.names gives {quoted(domain)}; {hint(domain, known)}")
            elif domain != DEFAULT_DOMAIN:
                _told(value, domains.check_name, domain)
