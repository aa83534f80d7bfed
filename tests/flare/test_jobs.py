from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from nvflare.private.fed.server.job_meta_validator import JobMetaValidator
from nvflare.utils.job_launcher_utils import get_resource_manager_spec

from crossward.federation.errors import BadInput
from crossward.flare import names
from crossward.flare.jobs import (
    CLIENT,
    META,
    SERVER,
    Timing,
    export,
    federated_methods,
    from_meta,
    notes_of,
    read_study,
    usual_study,
    with_resume,
)
from crossward.methods import available
from crossward.site.study import Study

JOBS = Path(__file__).resolve().parents[2] / "jobs"


def files(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def load(job: Path, name: str) -> dict[str, Any]:
    return dict(json.loads((job / name).read_text()))


def change(job: Path, name: str, edit: Any) -> None:
    content = load(job, name)
    edit(content)
    (job / name).write_text(json.dumps(content))


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return export(usual_study("fedprox"), tmp_path / "job", timing=Timing(join=5, round=6, grace=7), min_sites=3)


def test_there_is_a_job_folder_for_every_method() -> None:
    assert sorted(path.name for path in JOBS.iterdir()) == sorted(set(available()) - {"local"}) == federated_methods()


@pytest.mark.parametrize("method", federated_methods())
def test_the_job_folder_is_what_export_writes(method: str, tmp_path: Path) -> None:
    study = usual_study(method)
    written = export(study, tmp_path / method, timing=Timing(), min_sites=study.quorum)
    assert files(JOBS / method) == files(written), f"write it anew: crossward job export {method} --out jobs/{method}"


def test_a_job_is_configuration_only_and_names_allowed_classes_and_no_place(job: Path) -> None:
    assert sorted(files(job)) == [CLIENT, SERVER, META]
    server, client = load(job, SERVER), load(job, CLIENT)
    assert [flow["path"] for flow in server["workflows"]] == [names.CONTROLLER]
    assert [each["executor"]["path"] for each in client["executors"]] == [names.EXECUTOR]
    own = ["join", "train", "evaluate", "finish"]
    steps = ["roster", "keys", "begin", "contribute", "survivors", "reveal"]
    assert client["executors"][0]["tasks"] == own + steps
    assert server["workflows"][0]["args"]["timing"] == {"join": 5, "round": 6, "grace": 7, "step": 30}
    assert server["workflows"][0]["args"]["resume"] == ""
    assert server["server"]["task_request_interval"] == 0.1
    assert load(job, META)["min_clients"] == 3
    assert load(job, META)["scope"] == names.SCOPE
    assert "/" not in "".join(text for text in files(job).values())


def test_flare_takes_the_job_and_keeps_our_notes(job: Path, tmp_path: Path) -> None:
    archive = shutil.make_archive(str(tmp_path / "zipped"), "zip", job.parent, job.name)
    valid, error, meta = JobMetaValidator().validate(job.name, archive)
    assert valid, error
    assert notes_of(meta)["digest"] == usual_study("fedprox").digest()
    assert "byoc" not in meta


def test_gpus_are_reserved_at_every_site(tmp_path: Path) -> None:
    with_two = export(usual_study("fedavg"), tmp_path / "two", timing=Timing(), min_sites=3, gpus=2)
    meta = load(with_two, META)
    assert get_resource_manager_spec(meta, "any-hospital") == {"num_of_gpus": 2}
    archive = shutil.make_archive(str(tmp_path / "zipped"), "zip", tmp_path, "two")
    assert JobMetaValidator().validate("two", archive)[:2] == (True, "")
    without = export(usual_study("fedavg"), tmp_path / "none", timing=Timing(), min_sites=3)
    assert get_resource_manager_spec(load(without, META), "any-hospital") == {}


def test_the_study_is_read_back(job: Path) -> None:
    study = read_study(job)
    assert isinstance(study, Study)
    assert study.options() == usual_study("fedprox").options()


def test_an_occupied_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("taken", "file"):
        with pytest.raises(BadInput, match="choose another --out"):
            export(usual_study("fedavg"), tmp_path / name, timing=Timing(), min_sites=3)
    assert files(tmp_path) == {"taken/mine.txt": "mine", "file": "mine"}


@pytest.mark.parametrize(
    ("more", "words"),
    [({"min_sites": 0}, "--min-sites"), ({"min_sites": 2}, "quorum"), ({"min_sites": 3, "gpus": -1}, "GPUs")],
)
def test_numbers_that_do_not_fit_are_refused(more: dict[str, int], words: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=words):
        export(usual_study("fedavg"), tmp_path / "job", timing=Timing(), **more)
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize("seconds", [0, -1, 1.5, True])
def test_a_time_is_whole_seconds(seconds: Any) -> None:
    with pytest.raises(BadInput, match="'grace'"):
        Timing(grace=seconds)


def test_a_name_that_flare_refuses_is_refused_here(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="my job"):
        export(usual_study("fedavg"), tmp_path / "my job", timing=Timing(), min_sites=3)


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        (SERVER, lambda content: content["workflows"][0]["args"]["study"]["task"].update(rounds=3)),
        (CLIENT, lambda content: content["executors"][0]["executor"]["args"]["study"]["task"].update(rounds=3)),
        (META, lambda content: content["crossward"]["study"]["task"].update(rounds=3)),
        (META, lambda content: content["crossward"].update(digest="0")),
    ],
)
def test_a_job_that_was_changed_in_one_place_is_refused(name: str, edit: Any, job: Path) -> None:
    change(job, name, edit)
    with pytest.raises(BadInput, match="crossward job export"):
        read_study(job)


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        (META, lambda content: content.pop("crossward")),
        (SERVER, lambda content: content.update(workflows=[])),
        (CLIENT, lambda content: content["executors"][0].pop("executor")),
    ],
)
def test_somebody_elses_job_is_refused(name: str, edit: Any, job: Path) -> None:
    change(job, name, edit)
    with pytest.raises(BadInput, match="not a job of Crossward"):
        read_study(job)


def test_a_folder_that_is_no_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not a job folder"):
        read_study(tmp_path)


def test_a_resumed_job_differs_in_nothing_but_the_run(job: Path, tmp_path: Path) -> None:
    (job / "app" / ".__nvfl_sig.json").write_text("a signature that FLARE left")
    change(job, SERVER, lambda content: content["server"].update(task_request_interval=0.5))
    again = with_resume(job, "run-1", tmp_path / "again")
    assert sorted(files(again)) == [CLIENT, SERVER, META]
    server, meta = load(again, SERVER), load(again, META)
    assert server["workflows"][0]["args"]["resume"] == notes_of(meta)["resume"] == "run-1"
    server["workflows"][0]["args"]["resume"] = meta["crossward"]["resume"] = ""
    assert (server, meta, load(again, CLIENT)) == (load(job, SERVER), load(job, META), load(job, CLIENT))
    assert read_study(again).digest() == read_study(job).digest()


def test_a_job_is_written_anew_from_what_flare_keeps_of_it(job: Path, tmp_path: Path) -> None:
    kept = {**load(job, META), "job_id": "1", "status": "RUNNING", "submitter_name": "lead", "study": "default"}
    assert files(from_meta(kept, "run-1", tmp_path / "a")).keys() == files(job).keys()
    assert load(tmp_path / "a", SERVER) == load(with_resume(job, "run-1", tmp_path / "b"), SERVER)
    assert load(tmp_path / "a", META) == load(tmp_path / "b", META)
    kept.pop("crossward")
    with pytest.raises(BadInput, match="submit it anew"):
        from_meta(kept, "run-1", tmp_path / "c")


def test_malicious_code_in_a_job_is_found_before_it_is_submitted(tmp_path: Path) -> None:
    study = usual_study("fedavg")
    job = export(study, tmp_path / "job", timing=Timing(), min_sites=3)
    assert read_study(job) == study
    (job / "app" / "custom").mkdir()
    with pytest.raises(BadInput, match="carries code"):
        read_study(job)
    (job / "app" / "custom").rmdir()
    configuration = json.loads((job / CLIENT).read_text())
    configuration["components"] = [{"id": "x", "path": "somebody.else.Intruder", "args": {}}]
    (job / CLIENT).write_text(json.dumps(configuration))
    with pytest.raises(BadInput, match=r"somebody\.else\.Intruder"):
        read_study(job)
