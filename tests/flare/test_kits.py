from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from nvflare.apis.fl_constant import AdminCommandNames as Command
from nvflare.apis.fl_exception import UnsafeComponentError
from nvflare.apis.workspace import Workspace
from nvflare.app_common.storages.filesystem_storage import FilesystemStorage
from nvflare.app_common.widgets.component_path_authorizer import ComponentPathAuthorizer
from nvflare.fuel.sec.authz import AuthorizationService, AuthzContext, Person
from nvflare.lighter.constants import DEFINED_ROLES
from nvflare.lighter.entity import Participant
from nvflare.lighter.utils import load_yaml
from nvflare.private.fed.utils.app_authz import AppAuthzService
from nvflare.private.fed.utils.fed_utils import require_signed_jobs
from nvflare.security.security import COMMAND_CATEGORIES, CommandCategory, FLAuthorizer
from typer.testing import CliRunner

import crossward.cli.provision as command
from crossward.federation.errors import BadInput
from crossward.flare import names
from crossward.flare.builder import _properties
from crossward.flare.kits import BUILDERS, SiteKit, check_sites, provision, write_project

TEMPLATE = Path(__file__).resolve().parents[2] / "provisioning" / "project.yml"
SERVER = "server.example.org"
HOSPITALS = ("hospital-a", "hospital-b", "hospital-c")
ORGS = {SERVER: "consortium", "hospital-a": "hospital_a", "hospital-b": "hospital_b", "hospital-c": "hospital_c"}
SHELL = ("pwd", "ls", "cat", "head", "tail", "grep")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("provisioned")


@pytest.fixture(scope="module")
def kits(place: Path) -> Path:
    return provision(TEMPLATE, place)


def policy(kits: Path, participant: str, name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((kits / participant / "local" / name).read_text())
    return loaded


def authorizer(kits: Path, participant: str) -> FLAuthorizer:
    return FLAuthorizer(for_org=ORGS[participant], policy_config=policy(kits, participant, "authorization.json"))


def may(kits: Path, participant: str, role: str, right: str, *, org: str = "consortium", submitter: str = "me") -> bool:
    asked = AuthzContext(right=right, user=Person("me", org, role), submitter=Person(submitter, "other", "lead"))
    allowed, _ = authorizer(kits, participant).authorize(asked)
    return bool(allowed)


def everybody(participant: str) -> list[tuple[str, str]]:
    """Every role, from the participant's own organisation and from another."""
    return [(role, org) for role in DEFINED_ROLES for org in (ORGS[participant], "elsewhere")]


# the allow-list


@pytest.mark.parametrize("participant", [SERVER, *HOSPITALS])
def test_only_crosswards_own_classes_are_on_the_list(kits: Path, participant: str) -> None:
    resources = policy(kits, participant, "resources.json")
    expected = names.SERVER_CLASSES if participant == SERVER else names.SITE_CLASSES
    assert resources["class_allow_list"] == list(expected)
    assert resources["class_list_enforcement_mode"] == "enforce"


@pytest.mark.parametrize("participant", [SERVER, *HOSPITALS])
def test_malicious_code_in_a_job_is_a_class_that_flare_refuses(kits: Path, participant: str) -> None:
    workspace = Workspace(root_dir=str(kits / participant), site_name=participant)
    allowed = names.SERVER_CLASSES if participant == SERVER else names.SITE_CLASSES
    for path in allowed:
        ComponentPathAuthorizer().authorize_component_config({"path": path}, workspace=workspace)
    others = {names.CONTROLLER, names.EXECUTOR, names.GATE} - set(allowed)
    for path in (
        *others,
        "subprocess.Popen",
        "crossward.flare.executor.SiteExecutorOfMine",
        "nvflare.app_common.executors.client_api_executor.ClientAPIExecutor",
        "nvflare.app_common.workflows.fedavg.FedAvg",
    ):
        with pytest.raises(UnsafeComponentError):
            ComponentPathAuthorizer().authorize_component_config({"path": path}, workspace=workspace)


# authorization


@pytest.mark.parametrize("participant", [SERVER, *HOSPITALS])
def test_nobody_may_bring_code(kits: Path, participant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AuthorizationService, "the_authorizer", authorizer(kits, participant))
    for role, org in everybody(participant):
        code, reason = AppAuthzService.authorize_app_info({"byoc": True}, "me", org, role)
        assert not code, (role, org)
        assert reason == "BYOC not permitted"
        flower, _ = AppAuthzService.authorize_app_info({}, "me", org, role, job_meta={"flower_predeployed": True})
        assert not flower, (role, org)
        plain, _ = AppAuthzService.authorize_app_info({}, "me", org, role)
        assert plain


@pytest.mark.parametrize("participant", [SERVER, *HOSPITALS])
def test_nobody_may_run_shell_commands_or_use_a_side_door(kits: Path, participant: str) -> None:
    shell = [name for name, category in COMMAND_CATEGORIES.items() if category == CommandCategory.SHELL_COMMANDS]
    assert sorted(shell) == sorted(SHELL)
    doors = [Command.CALL, Command.APP_COMMAND, Command.REPORT_ENV, Command.CONFIGURE_SITE_LOG]
    doors += [Command.CONFIGURE_JOB_LOG, Command.DOWNLOAD_JOB_COMPONENTS, "byoc", "a right of a later version"]
    for right in [*shell, *doors]:
        for role, org in everybody(participant):
            assert not may(kits, participant, role, right, org=org), (right, role, org)


@pytest.mark.parametrize("role", ["project_admin", "lead"])
def test_those_who_run_jobs_still_can(kits: Path, role: str) -> None:
    rights = [Command.SUBMIT_JOB, Command.LIST_JOBS, Command.GET_JOB_META, Command.SHOW_STATS, Command.CHECK_STATUS]
    rights += [Command.DOWNLOAD_JOB, Command.ABORT_JOB, Command.DELETE_JOB, Command.CLONE_JOB, Command.GET_JOB_LOG]
    rights += [Command.SHOW_SCOPES, Command.LIST_JOB, Command.REPORT_VERSION]
    for right in rights:
        assert may(kits, SERVER, role, right), right
    for hospital in HOSPITALS:
        # Asked when a job is deployed there, and when somebody looks at the system.
        assert may(kits, hospital, role, Command.SUBMIT_JOB)
        assert may(kits, hospital, role, Command.CHECK_STATUS)


def test_a_lead_handles_own_jobs_only_and_others_submit_none(kits: Path) -> None:
    for right in (Command.DOWNLOAD_JOB, Command.ABORT_JOB, Command.DELETE_JOB, Command.GET_JOB_LOG):
        assert not may(kits, SERVER, "lead", right, submitter="another"), right
        assert may(kits, SERVER, "project_admin", right, submitter="another"), right
        assert not may(kits, SERVER, "member", right), right
    for participant in (SERVER, *HOSPITALS):
        for role in ("org_admin", "member", "a role of a later version"):
            assert not may(kits, participant, role, Command.SUBMIT_JOB)


def test_a_site_answers_no_question_past_its_gate(kits: Path) -> None:
    for right in (Command.SHOW_STATS, Command.SHOW_ERRORS, Command.RESET_ERRORS):
        for hospital in HOSPITALS:
            for role, org in everybody(hospital):
                assert not may(kits, hospital, role, right, org=org), (right, role, org)


@pytest.mark.parametrize("right", [Command.SHUTDOWN, Command.RESTART, Command.SYS_INFO])
def test_a_site_is_operated_by_its_own_people_and_the_server_by_the_project_admin(kits: Path, right: str) -> None:
    assert may(kits, "hospital-a", "org_admin", right, org="hospital_a")
    for role in DEFINED_ROLES:
        assert not may(kits, "hospital-a", role, right, org="consortium")
        assert not may(kits, "hospital-a", role, right, org="hospital_b")
    assert may(kits, SERVER, "project_admin", right)
    assert not may(kits, SERVER, "lead", right)


# privacy, logs, storage, keys


def test_every_result_of_a_site_passes_the_gate(kits: Path) -> None:
    for hospital in HOSPITALS:
        assert policy(kits, hospital, "privacy.json") == {
            "scopes": [
                {
                    "name": names.SCOPE,
                    "properties": {
                        "data_root": "",
                        "state_root": "",
                        "publish_scores": True,
                        "minimum_cell": 10,
                        "secure_aggregation": True,
                        "minimum_sites": 3,
                        "max_epsilon": 0,
                        "max_delta": 1e-5,
                        "min_noise": 0.0,
                        "privacy_unit": "patient",
                        "payloads": ["update", "personal", "prototypes", "counts"],
                    },
                    "task_data_filters": [],
                    "task_result_filters": [{"path": names.GATE, "args": {}}],
                }
            ],
            "default_scope": names.SCOPE,
        }


def test_the_server_has_the_scope_without_filters(kits: Path) -> None:
    (scope,) = policy(kits, SERVER, "privacy.json")["scopes"]
    assert scope["properties"] == {"state_root": ""}
    assert scope["task_data_filters"] == scope["task_result_filters"] == []


def test_no_log_is_streamed(kits: Path) -> None:
    for hospital in HOSPITALS:
        resources = policy(kits, hospital, "resources.json")
        assert resources["allow_log_streaming"] is False
        assert {part["id"] for part in resources["components"]} == {
            "resource_manager",
            "resource_consumer",
            "process_launcher",
        }
    parts = {part["id"] for part in policy(kits, SERVER, "resources.json")["components"]}
    assert parts == {"job_scheduler", "job_manager", "job_store", "process_launcher"}


def test_the_server_keeps_jobs_in_its_kit_wherever_that_is(
    kits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resources = policy(kits, SERVER, "resources.json")
    assert "/tmp" not in json.dumps(resources)
    parts = {part["id"]: part for part in resources["components"]}
    assert parts["job_scheduler"]["args"] == {"max_jobs": 1}
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    monkeypatch.chdir(moved)  # as FLARE's server does before it reads its settings
    jobs = FilesystemStorage(**parts["job_store"]["args"])
    snapshots = FilesystemStorage(**resources["snapshot_persistor"]["args"]["storage"]["args"])
    monkeypatch.chdir(tmp_path)
    jobs.create_object(f"{parts['job_manager']['args']['uri_root']}/some-job", b"job", {"name": "x"})
    assert (moved / "storage" / "jobs" / "some-job" / "meta").is_file()
    assert snapshots.root_dir == str(moved.resolve() / "storage" / "snapshots")


def test_unsigned_jobs_are_refused(kits: Path) -> None:
    for participant, file in ((SERVER, "fed_server.json"), *((name, "fed_client.json") for name in HOSPITALS)):
        assert json.loads((kits / participant / "startup" / file).read_text())["require_signed_jobs"] is True
        assert require_signed_jobs(Workspace(root_dir=str(kits / participant), site_name=participant), file)


def test_no_default_of_flare_is_left_to_fall_back_to(kits: Path) -> None:
    for participant in (SERVER, *HOSPITALS):
        local = {path.name for path in (kits / participant / "local").iterdir()}
        assert local == {"resources.json", "authorization.json", "privacy.json", "log_config.json.default"}


def test_keys_are_for_their_owner_only(kits: Path) -> None:
    state = kits.parent / "state"
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    assert (state / "cert.json").is_file()
    secrets = [*state.iterdir(), *kits.glob("*/startup/*.key")]
    assert len(secrets) > 6
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets} == {0o600}
    assert stat.S_IMODE(kits.stat().st_mode) == 0o700


def test_a_second_run_adds_a_hospital_and_keeps_every_certificate(kits: Path, place: Path, tmp_path: Path) -> None:
    project = load_yaml(str(TEMPLATE))
    project["participants"].append(SiteKit(org="hospital_d", minimum_cell=3).entry("hospital-d"))
    larger = tmp_path / "larger.yml"
    larger.write_text(json.dumps(project))
    again = provision(larger, place)
    assert again != kits
    assert again.parent == kits.parent
    before = {path.relative_to(kits): path.read_bytes() for path in kits.glob("*/startup/*.crt")}
    after = {path.relative_to(again): path.read_bytes() for path in again.glob("*/startup/*.crt")}
    assert len(before) == 7
    assert {path: after[path] for path in before} == before
    assert set(after) - set(before) == {Path("hospital-d/startup/client.crt")}
    (scope,) = policy(again, "hospital-d", "privacy.json")["scopes"]
    assert scope["properties"]["minimum_cell"] == 3
    assert stat.S_IMODE((again.parent / "state").stat().st_mode) == 0o700


def test_one_machine_gets_what_hospitals_get() -> None:
    assert load_yaml(str(TEMPLATE))["builders"] == BUILDERS


# what is refused


def test_a_project_file_keeps_what_was_said(tmp_path: Path) -> None:
    site = SiteKit(
        data_root=tmp_path / "images",
        publish_scores=False,
        minimum_cell=5,
        gpus=2,
        gpu_memory=16,
        secure_aggregation=False,
        minimum_sites=5,
        max_delta=1e-3,
    )
    write_project(tmp_path / "p.yml", name="x", sites={"a": site}, host="localhost", port=20001)
    server, client, admin = load_yaml(str(tmp_path / "p.yml"))["participants"]
    assert (server["default_host"], server["fed_learn_port"], server["admin_port"]) == ("localhost", 20001, 20001)
    assert client["data_root"] == str(tmp_path / "images")
    assert (client["publish_scores"], client["minimum_cell"]) == (False, 5)
    assert (client["secure_aggregation"], client["minimum_sites"]) == (False, 5)
    assert client["max_delta"] == 1e-3
    assert client["capacity"] == {"num_of_gpus": 2, "mem_per_gpu_in_GiB": 16}
    assert admin["role"] == "project_admin"


@pytest.mark.parametrize("name", ["server", "all", "ward 3", "a/b", "../up", "", "ä", "x" * 64])
def test_a_site_name_that_flare_cannot_take_is_refused(name: str) -> None:
    with pytest.raises(BadInput, match="cannot be a site's name"):
        check_sites({name: SiteKit()})


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"publish_score": False}, "'publish_scores' is"),
        ({"data_rooot": "/x"}, "'data_root' is"),
        ({"data_root": "images"}, "not a full path"),
        ({"state_root": 3}, "not a full path"),
        ({"publish_scores": "no"}, "true or false"),
        ({"minimum_cell": 0}, "whole number"),
        ({"minimum_cell": True}, "whole number"),
        ({"secure_aggregation": "off"}, "true or false"),
        ({"secure_aggregation": 0}, "true or false"),
        ({"minimum_sites": 1}, "whole number from 2"),
        ({"minimum_sites": 3.0}, "whole number from 2"),
        ({"payloads": "update"}, "list of update, personal, prototypes, counts"),
        ({"payloads": ["update", "scores"]}, "list of update, personal, prototypes, counts"),
        ({"payload": ["update"]}, "'payloads' is"),
    ],
)
def test_a_setting_that_would_not_do_what_it_says_is_refused(entry: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        _properties(Participant("client", "hospital-a", "org", props=entry))


def without_policy(project: dict[str, Any]) -> None:
    project["builders"] = [each for each in project["builders"] if "crossward" not in each["path"]]


def policy_too_early(project: dict[str, Any]) -> None:
    project["builders"].insert(0, project["builders"].pop(3))


def unsigned(project: dict[str, Any]) -> None:
    project["builders"][1]["args"]["require_signed_jobs"] = False


def no_participants(project: dict[str, Any]) -> None:
    del project["participants"]


def bad_name(project: dict[str, Any]) -> None:
    project["name"] = "../up"


def super_user(project: dict[str, Any]) -> None:
    project["participants"][-1]["role"] = "super"


def admin_without_address(project: dict[str, Any]) -> None:
    project["participants"][-1]["name"] = "somebody"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (without_policy, "open defaults"),
        (policy_too_early, "open defaults"),
        (unsigned, "require_signed_jobs"),
        (no_participants, "no list of participants"),
        (bad_name, "letters, digits"),
        (super_user, "the role 'super' is not one of"),
        (admin_without_address, "somebody is ill-formatted"),
    ],
)
def test_a_project_that_would_make_weak_kits_is_refused(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], None], said: str
) -> None:
    project = load_yaml(str(TEMPLATE))
    spoil(project)
    (tmp_path / "p.yml").write_text(json.dumps(project))
    with pytest.raises(BadInput, match=said) as caught:
        provision(tmp_path / "p.yml", tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("out/*/prod_*"))


@pytest.mark.parametrize("text", ["a: [", "just words", ""])
def test_a_file_that_is_no_project_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.yml").write_text(text)
    with pytest.raises(BadInput):
        provision(tmp_path / "p.yml", tmp_path / "out")
    with pytest.raises(BadInput, match="no project file"):
        provision(tmp_path / "missing.yml", tmp_path / "out")


# the command


def test_the_command_says_where_the_kits_are_and_what_to_keep_secret(
    kits: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[Path, Path]] = []

    def made(project: Path, out: Path) -> Path:
        asked.append((project, out))
        return kits

    monkeypatch.setattr("crossward.flare.kits.provision", made)
    app = typer.Typer()
    app.command()(command.provision)
    words = CliRunner().invoke(app, ["p.yml", "--out", str(tmp_path)])
    assert words.exit_code == 0
    assert asked == [(Path("p.yml"), tmp_path)]
    for expected in (*HOSPITALS, SERVER, str(kits), str(kits.parent / "state")):
        assert expected in words.output
    said = json.loads(CliRunner().invoke(app, ["p.yml", "--out", str(tmp_path), "--json"]).output)
    assert set(said["kits"]) == {path.name for path in kits.iterdir()}
    assert all(Path(kit).is_dir() for kit in said["kits"].values())
