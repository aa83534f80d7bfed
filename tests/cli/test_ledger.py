from __future__ import annotations

import io
import json
import math
import shutil
from pathlib import Path

import pytest
from PIL import Image

from crossward.evaluate.ledger_plot import ledger_picture
from crossward.federation.errors import PrivacyRefusal
from crossward.privacy.dp.accounting import Budget, Spending, epsilon
from crossward.privacy.dp.ledger import FILE, anchor_of, key_of
from crossward.privacy.dp.lines import Shared
from tests.cli.conftest import Command
from tests.privacy.ledgers import BUDGET, entry, filled, ledger_in


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ledgers" / "chest"


def test_show_says_what_every_entry_cost_and_what_is_left(crossward: Command, folder: Path) -> None:
    ledger = filled(folder, 3)
    ledger.reserve([entry(1, run="second", what="validation", part="val", noise=7.0)], budget=BUDGET)
    done = crossward("ledger", "show", folder)
    assert done.code == 0, done.err
    assert "alder/chest" in done.out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.out.splitlines() if line.startswith("│")]
    assert [row[:4] for row in rows][1] == ["first", "1", "prototypes", "train"]
    assert rows[-1][:8] == ["second", "1", "validation", "val", "patient", "7", "1", "1"]
    spent = ledger.spent(delta=BUDGET.delta)
    assert rows[-1][8] == f"{spent:.3f}"
    assert f"Spent: epsilon {spent:.2f} of 8 at delta 1e-05; {8 - spent:.2f} is left." in done.out
    # In words: odds times e^epsilon, and one in so many.
    assert f"by {math.exp(spent):,.2f} at most" in done.out
    assert "1e-05 is 1 in 100,000" in done.out
    assert len(done.out.split("left.\n")[1].strip().splitlines()) == 3


@pytest.mark.parametrize(
    ("unit", "said"),
    [
        ("image", "a patient with several of them is protected less"),
        ("patient", "one given patient was among those trained on"),
        ("site", "this site's data were trained on at all"),
    ],
)
def test_the_figure_is_said_to_be_about_the_ledgers_unit(
    crossward: Command, folder: Path, unit: str, said: str
) -> None:
    ledger_in(folder).reserve([entry(1, unit=unit), entry(1, unit=unit, what="release")], budget=BUDGET)
    assert [each.unit for each in ledger_in(folder).entries()] == [unit] * 2
    facts = json.loads(crossward("ledger", "show", folder, "--json").out)
    assert facts["unit"] == unit
    assert said in " ".join(facts["meaning"])


def test_it_is_said_against_whom_shared_noise_protects(crossward: Command, folder: Path) -> None:
    """One site's own noise is less than its epsilon says: the promise is about sums, and whom they are kept from."""
    shared = Shared(fewest=4, colluders=1)
    ledger_in(folder).reserve([entry(1, unit="site", shared=shared)], budget=BUDGET)
    facts = json.loads(crossward("ledger", "show", folder, "--json").out)
    alone = epsilon([Spending(10.0 * math.sqrt(4 / 3), 1.0, 1)], delta=1e-5)
    assert facts["against"] == {"fewest": 4, "colluders": 1, "epsilon_server_alone": pytest.approx(alone)}
    assert facts["entries"][0]["shared"] == {"fewest": 4, "colluders": 1}
    assert alone < facts["spent"]
    said = crossward("ledger", "show", folder).out
    assert "everything that left this site" not in said
    assert "the server, together with up to 1 other site," in said
    assert f"Against the server alone it is {alone:.2f}" in said
    ledger_in(folder.parent / "plain").reserve([entry(1, unit="site")], budget=BUDGET)
    plain = crossward("ledger", "show", folder.parent / "plain").out
    assert "everything that left this site" in plain
    assert "server alone" not in plain


def test_an_entry_that_does_not_say_whom_it_hides_is_none() -> None:
    with pytest.raises(PrivacyRefusal, match="'person' does not"):
        entry(1, unit="person")


def test_show_in_json(crossward: Command, folder: Path) -> None:
    ledger = filled(folder, 2)
    done = crossward("ledger", "show", folder / FILE, "--json")
    assert done.code == 0, done.err
    facts = json.loads(done.out)
    assert facts["ledger"] == "alder/chest"
    assert facts["spent"] == ledger.spent(delta=BUDGET.delta)
    assert facts["left"] == pytest.approx(8 - facts["spent"])
    assert facts["budget"] == {"epsilon": 8.0, "delta": 1e-5}
    assert [each["number"] for each in facts["entries"]] == [1, 2, 3, 4]
    assert [each["round"] for each in facts["entries"]] == [1, 1, 2, 2]
    assert facts["entries"][0]["epsilon"] == facts["entries"][1]["epsilon"] < facts["entries"][2]["epsilon"]
    assert facts["entries"][3] | {"noise": 20.0, "rate": 1.0, "steps": 1, "part": "train"} == facts["entries"][3]


def test_show_holds_against_another_budget(crossward: Command, folder: Path) -> None:
    ledger = filled(folder, 2)
    facts = json.loads(crossward("ledger", "show", folder, "--json", "--epsilon", 0.5, "--delta", 1e-6).out)
    assert facts["spent"] == ledger.spent(delta=1e-6) > ledger.spent(delta=1e-5)
    assert facts["left"] == 0.0
    said = crossward("ledger", "show", folder, "--epsilon", 0.5, "--delta", 1e-6).out
    assert f"that is {facts['spent'] - 0.5:.2f} more than allowed" in said
    assert crossward("ledger", "show", folder, "--epsilon", 0).code == 5


def test_a_site_without_a_budget_is_told_so(crossward: Command, folder: Path, tmp_path: Path) -> None:
    ledger_in(folder).reserve([entry(1)], budget=Budget(1e6, 1e-5))
    done = crossward("ledger", "show", folder, "--plot", tmp_path / "spent.png")
    assert done.code == 0, done.err
    assert "has set no budget" in done.out
    assert " is left" not in done.out


def test_plot(crossward: Command, folder: Path, tmp_path: Path) -> None:
    filled(folder, 3)
    done = crossward("ledger", "show", folder, "--plot", tmp_path / "spent.png")
    assert done.code == 0, done.err
    with Image.open(tmp_path / "spent.png") as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 300


def test_the_plot_shows_the_budget_where_it_is() -> None:
    """The dashed line stands as high over the axis as the budget says, also where nothing was spent."""

    def height(budget: float, spent: float) -> float:
        points = [{"run": "a run with a name that is far too long to be shown", "round": 1, "epsilon": spent}]
        content = ledger_picture(points, name="alder", budget=budget, delta=1e-5)
        picture = Image.open(io.BytesIO(content)).convert("RGB")
        width, tall = picture.size
        orange = [
            y for y in range(tall) for x in (width // 3, width // 3 + 3) if picture.getpixel((x, y)) == (179, 89, 0)
        ]
        assert orange
        return min(orange) / tall

    assert height(8.0, 1.0) < 0.25
    assert ledger_picture([], name="alder", budget=None, delta=1e-5).startswith(b"\x89PNG")
    assert height(2.0, 8.0) > 0.5


def test_verify_says_yes_in_one_line(crossward: Command, folder: Path) -> None:
    filled(folder, 2)
    done = crossward("ledger", "verify", folder)
    assert (done.code, done.err) == (0, "")
    (line,) = done.out.splitlines()
    assert line.startswith("alder/chest: whole and unchanged, 2 lines with 4 entries, the last of 20")
    assert "signed by key " in line


def edited(folder: Path) -> None:
    path = folder / FILE
    path.write_bytes(path.read_bytes().replace(b'"noise":10.0', b'"noise":90.0', 1))


def cut(folder: Path) -> None:
    path = folder / FILE
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])


def another_key(folder: Path) -> None:
    key_of(folder).unlink()
    filled(folder.parent / "other", 1)
    shutil.copy(key_of(folder.parent / "other"), key_of(folder))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (edited, "line 1 was changed"),
        (cut, "was cut"),
        (another_key, "not signed with this site's key"),
        (lambda folder: (folder / FILE).unlink(), "is missing"),
        (lambda folder: anchor_of(folder).unlink(), "has no anchor"),
        (lambda folder: key_of(folder).unlink(), "name it by --key"),
        (lambda folder: shutil.rmtree(folder.parent), "there is no privacy ledger"),
    ],
    ids=["edited", "cut", "key", "ledger", "anchor", "no key", "nothing"],
)
def test_verify_says_no_in_one_line(crossward: Command, folder: Path, spoil, said: str) -> None:
    filled(folder, 2)
    spoil(folder)
    done = crossward("ledger", "verify", folder)
    assert (done.code, done.out) == (1, "")
    (line,) = done.err.splitlines()
    assert line.startswith("error: ")
    assert said in line
    # What does not hold is not shown either.
    shown = crossward("ledger", "show", folder)
    assert shown.code in (2, 5)
    assert shown.out == ""
    assert said in shown.err


def test_key_and_anchor_may_be_elsewhere(crossward: Command, folder: Path, tmp_path: Path) -> None:
    ledger = ledger_in(folder, anchor=tmp_path / "elsewhere")
    ledger.reserve([entry(1)], budget=BUDGET)
    moved = tmp_path / "moved.pem"
    key_of(folder).rename(moved)
    assert crossward("ledger", "verify", folder, "--key", moved).code == 1
    done = crossward("ledger", "verify", folder, "--key", moved, "--anchor", tmp_path / "elsewhere")
    assert done.code == 0, done.err


def test_reading_changes_nothing(crossward: Command, folder: Path) -> None:
    filled(folder, 1)
    before = {path: path.read_bytes() for path in folder.parent.rglob("*") if path.is_file()}
    assert crossward("ledger", "show", folder).code == 0
    assert crossward("ledger", "verify", folder).code == 0
    assert {path: path.read_bytes() for path in folder.parent.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("words", [("show",), ("verify",)])
def test_help_has_an_example(crossward: Command, words: tuple[str, ...]) -> None:
    done = crossward("ledger", *words, "--help")
    assert done.code == 0
    assert "Example:" in done.out


def test_simulate_says_that_its_ledgers_count_one_run_only(crossward: Command) -> None:
    """It is a laboratory: two runs on the same images do not know of each other."""
    said = " ".join(crossward("simulate", "--help").out.replace("│", " ").split())
    assert "other runs on the same images are not counted" in said
