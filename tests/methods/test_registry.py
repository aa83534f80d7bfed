from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from crossward.federation.errors import BadInput
from crossward.methods import Method, available, create, options_of, registry
from crossward.methods.fedprox import FedProx

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Sample(Method):
    name: ClassVar[str] = "sample"
    title: ClassVar[str] = "Options of every kind"
    normalisation: ClassVar[str] = "none"

    rate: float = 0.5
    count: int = 3
    careful: bool = True
    kind: Literal["one", "two"] = "one"
    stages: tuple[int, ...] = (4,)
    most: int | None = None


@pytest.fixture
def sample() -> Iterator[None]:
    available()
    registry.register(Sample)
    yield
    del registry._METHODS["sample"]


def test_the_baselines_are_found_without_a_list() -> None:
    assert {"fedavg", "fedprox", "fedbn", "local"} <= set(available())
    assert list(available()) == sorted(available())
    with pytest.raises(TypeError):
        available()["other"] = FedProx  # type: ignore[index]


@pytest.mark.parametrize("name", sorted(available()))
def test_every_method_says_what_it_is(name: str) -> None:
    method = available()[name]
    assert method.name == name
    assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
    assert method.title
    assert method.normalisation
    assert method.__doc__
    assert method.__module__ == f"crossward.methods.{name}"
    assert create(name).name == name


@pytest.mark.parametrize("name", sorted(available()))
def test_every_method_has_its_own_tests(name: str) -> None:
    path = ROOT / "tests" / "methods" / f"test_{name}.py"
    assert path.is_file()
    assert "def test_" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(available()))
def test_every_method_has_a_row_in_the_guide(name: str) -> None:
    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    first_cells = re.findall(r"^\|([^|\n]*)\|", text, flags=re.MULTILINE)
    assert any(re.search(rf"(?<![\w-]){name}(?![\w-])", cell) for cell in first_cells)


@pytest.mark.parametrize(
    ("asked", "meant"), [("fedag", "fedavg"), ("fedproxx", "fedprox"), ("FedBN", "fedbn"), ("Local", "local")]
)
def test_an_unknown_method_is_refused_and_the_nearest_is_named(asked: str, meant: str) -> None:
    with pytest.raises(BadInput, match=f"no method '{asked}' .*did you mean '{meant}'.*there are: .*fedavg"):
        create(asked)


def test_a_name_like_no_other_is_refused_without_a_guess() -> None:
    with pytest.raises(BadInput) as caught:
        create("zzzzzzzz")
    assert "did you mean" not in str(caught.value)
    assert "fedavg" in str(caught.value)


def test_an_unknown_option_is_refused_and_the_nearest_is_named() -> None:
    with pytest.raises(BadInput, match=r"fedprox has no option 'muu' \(did you mean 'mu'\?\); it has: mu"):
        create("fedprox", muu=1.0)
    with pytest.raises(BadInput, match=r"fedavg has no option 'mu'.*it has: none"):
        create("fedavg", mu=1.0)


@pytest.mark.usefixtures("sample")
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("rate", "0.1"),
        ("rate", True),
        ("rate", None),
        ("rate", [0.1]),
        ("count", 2.0),
        ("count", True),
        ("count", "2"),
        ("careful", 1),
        ("careful", "yes"),
        ("kind", 1),
        ("kind", "three"),
        ("stages", 4),
        ("stages", "4"),
        ("stages", [4.0]),
        ("stages", [True]),
        ("stages", [[4]]),
        ("stages", None),
        ("most", 2.0),
        ("most", False),
        ("most", "none"),
        ("most", [2]),
    ],
)
def test_a_value_of_another_type_is_refused(option: str, value: object) -> None:
    with pytest.raises(BadInput, match=f"sample.*'{option}'"):
        create("sample", **{option: value})


@pytest.mark.usefixtures("sample")
def test_values_of_the_right_type_are_taken_and_a_whole_number_does_for_a_real_one() -> None:
    made = create("sample", rate=2, count=4, careful=False, kind="two")
    assert isinstance(made, Sample)
    assert (made.rate, made.count, made.careful, made.kind) == (2.0, 4, False, "two")
    assert isinstance(made.rate, float)
    assert create("sample") == Sample()


@pytest.mark.usefixtures("sample")
def test_options_are_listed_with_type_and_default() -> None:
    assert options_of(Sample) == {
        "rate": ("float", 0.5),
        "count": ("int", 3),
        "careful": ("bool", True),
        "kind": ("'one' or 'two'", "one"),
        "stages": ("list of int", (4,)),
        "most": ("int or none", None),
    }
    assert options_of(available()["fedavg"]) == {}


@pytest.mark.usefixtures("sample")
@pytest.mark.parametrize("stages", [[2, 4], (2, 4)])
def test_a_list_as_json_has_it_becomes_a_tuple(stages: list[int] | tuple[int, ...]) -> None:
    made = create("sample", stages=stages, most=5)
    assert made == Sample(stages=(2, 4), most=5)
    assert hash(made) == hash(Sample(stages=(2, 4), most=5))
    assert create("sample", stages=[], most=None) == Sample(stages=())


@pytest.mark.usefixtures("sample")
def test_a_refusal_says_what_kind_of_list_is_taken() -> None:
    with pytest.raises(BadInput, match="'stages' takes list of int, not 4"):
        create("sample", stages=4)
    with pytest.raises(BadInput, match="'most' takes int or none, not 'few'"):
        create("sample", most="few")


@pytest.mark.parametrize("name", sorted(available()))
def test_options_survive_json(name: str) -> None:
    method = create(name)
    assert create(name, **json.loads(json.dumps(asdict(method)))) == method


def test_two_methods_may_not_have_one_name() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Impostor(Method):
        name: ClassVar[str] = "fedprox"

    before = available()["fedprox"]
    with pytest.raises(ValueError, match="two methods are called 'fedprox'"):
        registry.register(Impostor)
    assert available()["fedprox"] is before is FedProx
    assert registry.register(FedProx) is FedProx
