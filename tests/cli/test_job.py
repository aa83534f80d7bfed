from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console as Screen

from crossward.cli import job as job_commands
from crossward.cli.progress import JobDisplay
from crossward.flare.jobs import META, SERVER, federated_methods, read_study
from crossward.flare.watch import Event
from crossward.site.troubles import Code
from tests.cli.conftest import Command
from tests.flare.board import Board, Job, event, told

JOBS = Path(__file__).resolve().parents[2] / "jobs"


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Board:
    """Commands talk to a made-up server, whatever kit they are given."""
    made = Board(tmp_path)

    class Session:
        def __enter__(self) -> Board:
            return made

        def __exit__(self, *details: object) -> None: ...

    monkeypatch.setattr(job_commands.Console, "open", lambda kit: Session())
    monkeypatch.setattr("crossward.flare.watch._SystemClock", lambda: made.clock)
    monkeypatch.setenv("CROSSWARD_ADMIN_KIT", str(tmp_path / "admin"))
    return made


def completes(board: Board, job: Job) -> None:
    events = [event(1, "started", run="job-1", sites=["hospital-a"], rounds=4, resumed_after=None)]
    board.clock.after(1, job.starts)
    outcome = told(job.run, "completed", 4, best_round=3, events=events)
    board.clock.after(9, lambda: job.ends("FINISHED:COMPLETED", outcome))


@pytest.mark.parametrize("method", federated_methods())
def test_export_writes_the_job_that_comes_with_crossward(crossward: Command, tmp_path: Path, method: str) -> None:
    done = crossward("job", "export", method, "--out", tmp_path / method)
    assert done.code == 0, done.err
    assert "crossward job submit" in done.out
    for name in (META, SERVER):
        assert (tmp_path / method / name).read_text() == (JOBS / method / name).read_text()


def test_export_takes_the_options_of_a_study(crossward: Command, tmp_path: Path) -> None:
    out = tmp_path / "job"
    given = (
        "--rounds 3 -o mu=0.5 --block none --head softmax --epochs 4 --steps 5 --batch-size 6 --lr 0.7 --clip 2 "
        "--schedule constant --seed 8 --size 48 --depth 18 --width 0.5 --norm group --classes b,a --channels 3 "
        "--participation 0.5 --quorum 3 --min-sites 4 --gpus 1 --join-timeout 11 --round-timeout 12 --grace 13 "
        "--resume run-1"
    )
    done = crossward("job", "export", "fedprox", "--out", out, *given.split())
    assert done.code == 0, done.err
    options = read_study(out).options()
    assert options["options"] == {"mu": 0.5}
    assert options["task"] == {
        "classes": ["b", "a"], "channels": 3, "size": 48, "rounds": 3, "seed": 8, "net": "resnet", "depth": 18,
        "width": 0.5, "norm": "group",
    }  # fmt: skip
    training = options["training"]
    assert (training["epochs"], training["steps"], training["batch_size"], training["seed"]) == (4, 5, 6, 8)
    assert (training["learning_rate"], training["schedule"], training["clip"]) == (0.7, "constant", 2.0)
    assert options["plugs"] == {"block": "none", "head": "softmax"}
    assert (options["participation"], options["quorum"]) == (0.5, 3)
    meta, arguments = (json.loads((out / name).read_text()) for name in (META, SERVER))
    assert (meta["min_clients"], meta["resource_spec"]) == (4, {"@default": {"num_of_gpus": 1}})
    arguments = arguments["workflows"][0]["args"]
    assert arguments["timing"] == {"join": 11, "round": 12, "grace": 13, "step": 30}
    assert arguments["resume"] == "run-1"


@pytest.mark.parametrize(
    ("given", "masking", "quorum", "started_with"),
    [
        ("fedavg", {"bits": 32, "min_sites": 3, "allow_pair": False}, 3, 3),
        ("fdse", {"bits": 32, "min_sites": 4, "allow_pair": False}, 4, 4),
        ("fedavg --min-sum 5 --ring-bits 16", {"bits": 16, "min_sites": 5, "allow_pair": False}, 5, 5),
        ("fedavg --quorum 6", {"bits": 32, "min_sites": 3, "allow_pair": False}, 6, 6),
        ("fedavg --no-secagg", None, 2, 2),
        ("fdse --no-secagg", None, 2, 2),
    ],
)
def test_a_job_uses_secure_aggregation_unless_told_otherwise(
    crossward: Command, tmp_path: Path, given: str, masking: dict[str, Any] | None, quorum: int, started_with: int
) -> None:
    done = crossward("job", "export", *given.split(), "--out", tmp_path / "job")
    assert done.code == 0, done.err
    options = read_study(tmp_path / "job").options()
    found = options["masking"]
    assert masking == (found and {name: found[name] for name in ("bits", "min_sites", "allow_pair")})
    assert options["quorum"] == quorum
    assert json.loads((tmp_path / "job" / META).read_text())["min_clients"] == started_with
    # The last evaluation and the test are sums of a round after the last one.
    assert not found or found["rounds"] == options["task"]["rounds"] + 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("fedavgg", "did you mean 'fedavg'"),
        ("fedprox -o mu", "name=value"),
        ("fedprox -o mu=lots", "mu"),
        ("fedavg --head none", "--head none"),
        ("fedavg --depth 50", "--depth 50"),
        ("fedavg --classes a", "two different findings"),
        ("fedavg --classes a,a", "two different findings"),
        ("fedavg --channels 2", "--channels 2"),
        ("fedavg --participation 0", "--participation 0"),
        ("fedavg --quorum 3 --min-sites 2", "--min-sites"),
        ("fedavg --quorum -1", "quorum"),
        ("fedavg --gpus -1", "GPUs"),
        ("fedavg --grace 0", "at least 1 second"),
        ("fedavg --lr nan", "learning_rate"),
        ("fedavg --rounds 0", "rounds"),
        ("fedavg --ring-bits 20", "--ring-bits 20"),
        ("fedavg --min-sum 1", "--min-sum 1"),
        ("fedavg --min-sum 4 --min-sites 3", "--min-sites"),
    ],
)
def test_export_refuses_bad_input_and_writes_nothing(
    crossward: Command, tmp_path: Path, given: str, words: str
) -> None:
    done = crossward("job", "export", *given.split(), "--out", tmp_path / "job")
    assert done.code == 2
    assert words in done.err
    assert not (tmp_path / "job").exists()


def test_export_leaves_an_occupied_folder_alone(crossward: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    done = crossward("job", "export", "fedavg", "--out", tmp_path)
    assert done.code == 2
    assert "choose another --out" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_submit_prints_the_id(crossward: Command, board: Board) -> None:
    done = crossward("job", "submit", JOBS / "fedavg")
    assert done.code == 0, done.err
    assert "crossward job watch job-1" in done.out
    assert json.loads(crossward("job", "submit", JOBS / "fedbn", "--json").out) == {"job": "job-2"}


def test_a_job_is_not_submitted_twice_unless_asked_for(crossward: Command, board: Board) -> None:
    assert crossward("job", "submit", JOBS / "fedavg").code == 0
    twice = crossward("job", "submit", JOBS / "fedavg")
    assert twice.code == 2
    assert "job-1" in twice.err
    assert "--again" in twice.err
    assert crossward("job", "submit", JOBS / "fedbn").code == 0
    assert crossward("job", "submit", JOBS / "fedavg", "--again").code == 0
    board.all["job-1"].ends("FINISHED:COMPLETED")
    board.all["job-3"].ends("FINISHED:ABORTED")
    assert crossward("job", "submit", JOBS / "fedavg").code == 0


def test_a_job_that_a_restarted_server_lost_stands_in_the_way_until_its_run_has_gone_on(
    crossward: Command, board: Board, tmp_path: Path
) -> None:
    assert crossward("job", "submit", JOBS / "fedavg").code == 0
    board.all["job-1"].ends("RUNNING")
    refused = crossward("job", "submit", JOBS / "fedavg")
    assert refused.code == 2
    assert "no process" in refused.err
    resumed = crossward("job", "submit", JOBS / "fedavg", "--resume", "job-1", "--again")
    assert resumed.code == 0, resumed.err
    assert board.all["job-2"].run == "job-1"
    board.all["job-2"].ends("FINISHED:COMPLETED")
    assert crossward("job", "submit", JOBS / "fedavg").code == 0


def test_submit_and_watch_to_the_end(crossward: Command, board: Board, tmp_path: Path) -> None:
    board.live = lambda job: completes(board, job)
    done = crossward("job", "submit", JOBS / "fedavg", "--watch", "--out", tmp_path / "kept")
    assert done.code == 0, done.err
    assert "Completed: run job-1, best round 3 of 4" in done.out
    assert (tmp_path / "kept" / "job-1" / "workspace" / "crossward" / "outcome.json").exists()


def test_watch_prints_json_lines(crossward: Command, board: Board) -> None:
    board.live = lambda job: completes(board, job)
    board.submit(JOBS / "fedavg")
    done = crossward("job", "watch", "job-1", "--json")
    assert done.code == 0, done.err
    first, last = (json.loads(line) for line in done.out.splitlines())
    assert first["kind"] == "started"
    assert last["outcome"]["status"] == "completed"


def test_watch_of_a_failed_job_explains_it_and_is_not_zero(crossward: Command, board: Board) -> None:
    board.submit(JOBS / "fedavg")
    board.all["job-1"].ends("FINISHED:FAILED_TO_RUN")
    board.all["job-1"].meta["job_deploy_detail"] = ["server: BYOC not permitted"]
    done = crossward("job", "watch", "job-1")
    assert done.code == 3
    assert "its own code" in done.out
    assert "could not start" in done.err
    explained = crossward("job", "explain", "job-1")
    assert explained.code == 0
    assert "server: BYOC not permitted" in explained.out
    (line,) = json.loads(crossward("job", "explain", "job-1", "--json").out)
    assert line["site"] == "server"


def test_list_shows_jobs_and_sites(crossward: Command, board: Board) -> None:
    board.submit(JOBS / "fedavg")
    board.all["job-1"].ends("RUNNING")
    done = crossward("job", "list")
    assert done.code == 0, done.err
    assert "RUNNING, no process" in done.out
    assert "hospital-a, hospital-b" in done.out
    listed = json.loads(crossward("job", "list", "--json").out)
    assert listed["sites"] == ["hospital-a", "hospital-b"]
    assert listed["jobs"][0]["name"] == "crossward-fedavg"


def test_abort_says_what_cannot_be_stopped(crossward: Command, board: Board) -> None:
    board.submit(JOBS / "fedavg")
    assert crossward("job", "abort", "job-1").code == 0
    board.all["job-1"].lost = True
    lost = crossward("job", "abort", "job-1")
    assert lost.code == 3
    assert "no process to stop" in lost.err


@pytest.mark.parametrize("words", [("watch", "nobody"), ("explain", "nobody")])
def test_a_job_that_is_not_there(crossward: Command, board: Board, words: tuple[str, ...]) -> None:
    done = crossward("job", *words)
    assert done.code == 2
    assert "nobody" in done.err


def test_a_folder_that_is_no_kit_is_refused_before_anything_is_asked(crossward: Command, tmp_path: Path) -> None:
    done = crossward("job", "list", "--kit", tmp_path)
    assert done.code == 2
    assert "not an administrator's kit" in done.err
    (tmp_path / "startup").mkdir()
    (tmp_path / "startup" / "fed_admin.json").write_text("{}")
    broken = crossward("job", "list", "--kit", tmp_path)
    assert broken.code == 2
    assert "client.crt" in broken.err


def test_a_folder_that_is_no_job_is_refused_before_logging_in(crossward: Command, tmp_path: Path) -> None:
    done = crossward("job", "submit", tmp_path, "--kit", tmp_path)
    assert done.code == 2
    assert "not a job folder" in done.err


@pytest.mark.parametrize("command", ["export", "submit", "watch", "explain", "list", "abort"])
def test_every_command_has_help_with_an_example(crossward: Command, command: str) -> None:
    shown = crossward("job", command, "--help")
    assert shown.code == 0
    assert f"Example: crossward job {command}" in shown.out


def test_every_kind_of_event_that_a_person_wants_to_see_has_a_line() -> None:
    screen = Screen(record=True, width=200)
    show = JobDisplay(screen)
    trouble = {"code": int(Code.NO_ANSWER), "numbers": {"seconds": 9.0}}
    figures = {
        "started": {"run": "run-1", "rounds": 4, "sites": ["hospital-a"], "resumed_after": 2},
        "refused": trouble,
        "failed": trouble,
        "absent": trouble,
        "aggregated": {"val_accuracy": None, "sites": {"hospital-a": {"val_accuracy": 0.25}}},
        "finished": {"best_round": 3},
        "waiting": {"reason": "connected sites (1) < min_sites (2)"},
        "resuming": {"after": 2},
        "resumed": {"job": "job-2"},
    }
    kinds = [*figures, "joined", "back", "unreachable", "reachable"]
    for kind in kinds:
        show(Event(kind, 3, "hospital-a", figures.get(kind, {})))
    show(Event("trained", 3, "hospital-a", {"loss": 0.5, "seconds": 2.0}))
    for silent in ("round", "closed", "ended", "something new"):
        show(Event(silent, 3))
    text = screen.export_text()
    assert len(text.splitlines()) == len(kinds)
    for words in ("going on after round 2", "did not answer within", "25.0 %", "n/a", "min_sites (2)", "job job-2"):
        assert words in text
