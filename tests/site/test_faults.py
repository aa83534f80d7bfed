from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up_sites import made_up_cohort, made_up_study, same_bits, tensors_on_disk, without_seconds

from crossward.federation.errors import BadInput, CrosswardError, RunFailure
from crossward.federation.storage import read_tensors
from crossward.imaging.data import Cohort
from crossward.methods.registry import create
from crossward.site.inprocess import Event, simulate
from crossward.site.participant import Plugs
from crossward.site.study import Study

HOLD = """
import sys
from pathlib import Path
from made_up_sites import made_up_cohort, made_up_study, simulate

def hold(event):
    print("holding", flush=True)
    sys.stdin.readline()
    raise SystemExit(0)

simulate(made_up_cohort(), made_up_study(), Path(sys.argv[1]), listen=hold)
"""


def poison(cohort: Cohort, site: str, *, after: int) -> Callable[[Event], None]:
    """Spoil one image of a site once the result of a round is in."""

    def listen(event: Event) -> None:
        if (event.kind, event.round_number) == ("aggregated", after):
            cohort.sites[site].train.images[:] = torch.nan

    return listen


def round_of(folder: Path) -> int:
    return int(read_tensors(folder / "server" / "checkpoint.safetensors")[1]["round"])


@pytest.mark.parametrize("method", ["fedavg", "fedbn"])
def test_a_diverging_site_stops_the_run_which_can_be_resumed(tmp_path: Path, method: str) -> None:
    study = made_up_study(method)
    expected = simulate(made_up_cohort(), study, tmp_path / "whole", jobs=1)
    folder = tmp_path / "run"
    cohort = made_up_cohort()
    with pytest.raises(RunFailure) as caught:
        simulate(cohort, study, folder, jobs=1, listen=poison(cohort, "birch", after=2))
    message = str(caught.value)
    assert "birch, round 3: the loss is not a finite number" in message
    assert "not aggregated, the model stays at round 2" in message
    assert round_of(folder) == 2
    before = read_tensors(folder / "server" / "checkpoint.safetensors")[0]
    assert all(torch.isfinite(tensor).all() for tensor in before.values())

    result = simulate(made_up_cohort(), study, folder, resume=True, jobs=1)
    assert without_seconds(result) == without_seconds(expected)
    assert same_bits(tensors_on_disk(folder), tensors_on_disk(tmp_path / "whole"))


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "local"])
def test_a_huge_learning_rate_ends_in_plain_words(tmp_path: Path, method: str) -> None:
    study = made_up_study(method, learning_rate=1e30, weight_decay=1.0, epochs=3)
    with pytest.raises(RunFailure, match="alder, round 1: ") as caught:
        simulate(made_up_cohort(), study, tmp_path / "run", jobs=1)
    assert all(name in str(caught.value) for name in ("alder", "birch", "cedar"))
    assert not (tmp_path / "run" / "server" / "checkpoint.safetensors").exists()


def test_the_advice_for_a_diverged_run_can_be_followed(tmp_path: Path) -> None:
    """It says to lower the learning rate; if it also says to resume, then resuming has to take the lower rate."""
    diverging = made_up_study(learning_rate=1e30, weight_decay=1.0, epochs=3)
    with pytest.raises(RunFailure) as caught:
        simulate(made_up_cohort(), diverging, tmp_path / "run", jobs=1)
    assert "Lower the learning rate" in str(caught.value)
    if "and resume" in str(caught.value):
        simulate(made_up_cohort(), made_up_study(), tmp_path / "run", resume=True, jobs=1)


def test_an_image_that_is_not_finite_is_found_at_its_site(tmp_path: Path) -> None:
    """Among the test images it does not hurt training; the score that cannot be given has to name the site."""
    cohort = made_up_cohort()
    cohort.sites["cedar"].test.images[0, 0, 0, 0] = torch.nan
    with pytest.raises(CrosswardError, match="cedar"):
        simulate(cohort, made_up_study(rounds=1, steps=1), tmp_path / "run", jobs=1)


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path: Path) -> None:
    study = made_up_study(rounds=1, steps=1)
    simulate(made_up_cohort(), study, tmp_path / "run", jobs=1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(BadInput, match="holds a run already; add --resume"):
        simulate(made_up_cohort(), study, tmp_path / "run", jobs=1)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_there_must_be_a_run_to_resume(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no run to resume"):
        simulate(made_up_cohort(), made_up_study(), tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda study: replace(study, method=create("fedprox")), "method = fedavg and not fedprox"),
        (lambda study: replace(study, training=replace(study.training, learning_rate=0.5)), "training.learning_rate"),
        (lambda study: replace(study, training=replace(study.training, seed=3)), "training.seed = 0 and not 3"),
        (lambda study: replace(study, task=replace(study.task, rounds=9)), "task.rounds = 1 and not 9"),
        (lambda study: replace(study, participation=0.5), "participation = 1.0 and not 0.5"),
        (lambda study: replace(study, quorum=2), "quorum = None and not 2"),
    ],
)
def test_resuming_with_another_option_names_it(tmp_path: Path, change: Callable[[Study], Study], said: str) -> None:
    study = made_up_study(rounds=1)
    (tmp_path / "run").mkdir()
    described = {"options": study.options(), "sites": ["alder", "birch", "cedar"]}
    (tmp_path / "run" / "run.json").write_text(json.dumps(described))
    with pytest.raises(BadInput, match=said):
        simulate(made_up_cohort(), change(study), tmp_path / "run", resume=True)


def test_resuming_with_other_sites_is_refused(tmp_path: Path) -> None:
    study = made_up_study(rounds=1, steps=1)
    simulate(made_up_cohort(), study, tmp_path / "run", jobs=1)
    with pytest.raises(BadInput, match=r"sites\.cedar"):
        simulate(made_up_cohort(("alder", "birch")), study, tmp_path / "run", resume=True)


def test_a_run_described_by_an_older_version_gets_a_plain_answer(tmp_path: Path) -> None:
    """An option that came later, and has no value, is not in the old description: resumed or refused, no crash."""
    study = made_up_study(rounds=1, steps=1)
    simulate(made_up_cohort(), study, tmp_path / "run", jobs=1)
    path = tmp_path / "run" / "run.json"
    described = json.loads(path.read_text())
    del described["options"]["quorum"]
    path.write_text(json.dumps(described))
    with suppress(BadInput):
        assert simulate(made_up_cohort(), study, tmp_path / "run", resume=True, jobs=1)["rounds"]


def test_a_damaged_description_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"options": ')
    with pytest.raises(CrosswardError, match=r"run\.json"):
        simulate(made_up_cohort(), made_up_study(), tmp_path / "run", resume=True)


def test_two_processes_cannot_run_in_one_folder(tmp_path: Path, environment: dict[str, str]) -> None:
    script = tmp_path / "hold.py"
    script.write_text(HOLD)
    folder = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, script, folder], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        try:
            assert first.stdout.readline() == "holding\n"
            before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
            for resume in (False, True):
                with pytest.raises(BadInput, match="another process is running in"):
                    simulate(made_up_cohort(), made_up_study(), folder, resume=resume)
            assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
        finally:
            first.kill()
    # The kernel gives the lock back when its holder is killed.
    result = simulate(made_up_cohort(), made_up_study(), folder, resume=True, jobs=1)
    assert len(result["rounds"]) == 4


def test_the_folder_is_free_again_after_a_failure(tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        raise KeyboardInterrupt

    study = made_up_study(rounds=1, steps=1)
    with pytest.raises(KeyboardInterrupt):
        simulate(made_up_cohort(), study, tmp_path / "run", listen=stop)
    assert simulate(made_up_cohort(), study, tmp_path / "run", resume=True)["rounds"]


def test_a_folder_that_cannot_be_made_is_refused_in_plain_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(BadInput, match=r"cannot write to .*choose another --out"):
            simulate(made_up_cohort(), made_up_study(), folder)


def test_a_read_only_disk_is_refused_in_plain_words(read_only_disk: Path) -> None:
    for folder in (read_only_disk, read_only_disk / "run"):
        with pytest.raises(BadInput, match=r"cannot write to .*Read-only file system"):
            simulate(made_up_cohort(), made_up_study(), folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused_in_plain_words(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(BadInput, match=r"cannot write to .*Permission denied"):
        simulate(made_up_cohort(), made_up_study(), tmp_path / "locked" / "run")


@pytest.mark.parametrize(
    "wrong",
    [
        {"participation": 2.0},
        {"participation": 0.0},
        {"quorum": -1},
        {"plugs": Plugs(head="no such head")},
        {"plugs": Plugs(block="no such block")},
        {"rounds": 0},
    ],
    ids=str,
)
def test_a_study_that_cannot_be_run_is_refused_before_it_leaves_a_trace(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """Bad input changes nothing, so the corrected command can be given with the same folder."""
    good = made_up_study(rounds=1, steps=1)

    def attempt() -> None:
        task = replace(good.task, rounds=wrong.get("rounds", 1))
        rest = {option: value for option, value in wrong.items() if option != "rounds"}
        simulate(made_up_cohort(), replace(good, task=task, **rest), tmp_path / "run", jobs=1)

    with pytest.raises(BadInput):
        attempt()
    assert simulate(made_up_cohort(), good, tmp_path / "run", jobs=1)["rounds"]


def test_a_site_name_that_is_a_path_does_not_leave_the_folder(tmp_path: Path) -> None:
    cohort = made_up_cohort()
    sites = {"../outside": cohort.sites["alder"], "birch": cohort.sites["birch"]}
    with pytest.raises(BadInput, match="cannot name a site"):
        simulate(replace(cohort, sites=sites), made_up_study(), tmp_path / "run")
    assert not (tmp_path / "outside").exists()
    assert not (tmp_path / "run" / "outside").exists()
