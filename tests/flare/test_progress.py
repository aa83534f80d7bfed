from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from crossward.federation.errors import StorageFailure
from crossward.flare.progress import Progress
from crossward.site.troubles import Code, Refusal

FINAL = (Code.NOT_RESUMABLE, Code.VERSION, Code.STUDY)


def outcome_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "outcome.json").read_text()))


def test_events_are_numbered_and_say_when_who_and_what() -> None:
    progress = Progress("run-1", rounds=5)
    before = time.time()
    progress.event("started", 0, run="run-1", sites=["alder"])
    progress.event("trained", 1, "alder", loss=0.5)
    first, second = progress.statistics()["events"]
    assert first == {
        "seq": 1,
        "time": first["time"],
        "kind": "started",
        "round": 0,
        "site": None,
        "figures": {"run": "run-1", "sites": ["alder"]},
    }
    assert (second["seq"], second["kind"], second["round"], second["site"]) == (2, "trained", 1, "alder")
    assert second["figures"] == {"loss": 0.5}
    assert before - 0.001 <= first["time"] <= second["time"] <= time.time() + 0.001


def test_statistics_say_how_far_it_is() -> None:
    progress = Progress("run-1", rounds=5)
    assert progress.statistics() == {"run": "run-1", "round": 0, "rounds": 5, "status": "starting", "events": []}
    progress.reached(3)
    assert progress.statistics() | {"events": []} == {
        "run": "run-1",
        "round": 3,
        "rounds": 5,
        "status": "running",
        "events": [],
    }


def test_an_answer_holds_the_last_two_hundred_events() -> None:
    progress = Progress("run-1", rounds=5)
    for number in range(250):
        progress.event("trained", number)
    assert [event["seq"] for event in progress.statistics()["events"]] == list(range(51, 251))


def test_what_was_given_out_is_not_changed_by_what_comes_after() -> None:
    progress = Progress("run-1", rounds=5)
    progress.event("round", 1)
    given = progress.statistics()
    progress.event("round", 2)
    assert len(given["events"]) == 1


def test_a_trouble_is_an_event_and_is_kept_for_the_end(tmp_path: Path) -> None:
    progress = Progress("run-1", rounds=5)
    progress.trouble("failed", 2, "birch", "train", Refusal(Code.SMALL_SUMS, sites=3, needed=9))
    (event,) = progress.statistics()["events"]
    assert (event["kind"], event["round"], event["site"]) == ("failed", 2, "birch")
    assert event["figures"] == {"task": "train", "code": 25, "numbers": {"sites": 3.0, "needed": 9.0}}
    progress.end(tmp_path, best_round=None, refusal=None)
    assert outcome_of(tmp_path)["troubles"] == [
        {"site": "birch", "round": 2, "task": "train", "code": 25, "numbers": {"sites": 3.0, "needed": 9.0}}
    ]


def test_the_end_of_a_run_that_completed(tmp_path: Path) -> None:
    progress = Progress("run-1", rounds=5)
    progress.reached(5)
    progress.end(tmp_path / "crossward", best_round=4, refusal=None)
    outcome = outcome_of(tmp_path / "crossward")
    (ended,) = outcome.pop("events")
    assert outcome == {
        "status": "completed",
        "run": "run-1",
        "round": 5,
        "rounds": 5,
        "best_round": 4,
        "resumable": False,
        "code": None,
        "numbers": {},
        "site": None,
        "troubles": [],
    }
    assert (ended["kind"], ended["round"]) == ("ended", 5)
    assert ended["figures"] == {"status": "completed", "code": None, "numbers": {}}
    assert progress.statistics()["status"] == "completed"


@pytest.mark.parametrize("code", list(Code))
def test_every_other_end_says_why_and_whether_it_can_go_on(tmp_path: Path, code: Code) -> None:
    progress = Progress("run-1", rounds=5)
    progress.reached(2)
    refusal = Refusal(code, site="birch", reports=1, needed=2)
    progress.end(tmp_path, best_round=None, refusal=refusal)
    outcome = outcome_of(tmp_path)
    assert outcome["status"] == ("aborted" if code is Code.ABORTED else "failed")
    assert (outcome["code"], outcome["numbers"], outcome["site"]) == (int(code), refusal.numbers, "birch")
    assert (outcome["round"], outcome["best_round"]) == (2, None)
    assert outcome["resumable"] is (code not in FINAL)
    assert outcome["events"][-1]["figures"] == {
        "status": outcome["status"],
        "code": int(code),
        "numbers": refusal.numbers,
    }
    assert progress.statistics()["status"] == outcome["status"]


def test_the_end_has_all_events(tmp_path: Path) -> None:
    progress = Progress("run-1", rounds=5)
    for number in range(250):
        progress.event("trained", number)
    progress.end(tmp_path, best_round=1, refusal=None)
    assert [event["seq"] for event in outcome_of(tmp_path)["events"]] == list(range(1, 252))


def test_an_end_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageFailure):
        Progress("run-1", rounds=5).end(tmp_path / "file", best_round=1, refusal=None)


def test_the_runs_own_file_has_the_events_of_all_its_jobs(tmp_path: Path) -> None:
    for job in range(2):
        progress = Progress("run-1", rounds=5)
        progress.event("started", job)
        progress.event("closed", job + 1)
        progress.keep(tmp_path / "events.jsonl")
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event["seq"], event["kind"], event["round"]) for event in events] == [
        (1, "started", 0),
        (2, "closed", 1),
        (1, "started", 1),
        (2, "closed", 2),
    ]


def test_events_of_many_threads_all_get_a_number_of_their_own() -> None:
    progress = Progress("run-1", rounds=5)

    def note() -> None:
        for number in range(100):
            progress.trouble("failed", number, "alder", "train", Refusal(Code.BUSY))

    threads = [threading.Thread(target=note) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = progress.statistics()["events"]
    assert [event["seq"] for event in events] == list(range(201, 401))
