"""FLARE without processes: its own WFCommServer, with a made-up engine below it and sites that are threads.

Callbacks, task states and late answers are therefore FLARE's own. Messages take FLARE's wire format both ways.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nvflare.apis.client import Client
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.impl.wf_comm_server import WFCommServer
from nvflare.apis.shareable import ReservedHeaderKey, Shareable
from nvflare.apis.signal import Signal
from nvflare.apis.utils.decomposers import flare_decomposers
from nvflare.apis.workspace import Workspace
from nvflare.app_common.decomposers import common_decomposers
from nvflare.fuel.utils import fobs
from nvflare.private.privacy_manager import Scope as PrivacyScope

from crossward.federation.contract import VALIDATION
from crossward.federation.rules import Rule
from crossward.federation.scopes import Scope, mark_where
from crossward.flare import names
from crossward.flare.gate import SiteGate
from crossward.methods.base import Method, Model, SoftmaxHead, Task
from crossward.site.declaration import Declaration
from crossward.site.member import Member
from crossward.site.messages import EVALUATE, FINISH, JOIN, SCORES, TRAIN
from crossward.site.policy import Policy
from crossward.site.release import Credentials
from crossward.site.study import Study
from tests.site.made_up_sites import SITES
from tests.standins import Attention

JOB = "11111111-2222-3333-4444-555555555555"
POLL = 0.005

Message = dict[str, Any]
Behaviour = Callable[[str, Message], Message | Shareable | None]
"""What a site does with a task; None is a site that hangs until the server has given the task up."""

flare_decomposers.register()
common_decomposers.register()


class Restarted(Exception):
    """A site's process dies over a task and comes back: FLARE then sends the task again."""


class Engine:
    """The part of FLARE's engine that controllers and WFCommServer use; events that are fired are kept."""

    def __init__(self, sites: list[str], kit: Path, properties: Mapping[str, Any] | None, job: str) -> None:
        self.clients = [Client(name, f"token-{name}") for name in sites]
        self.workspace = workspace_in(kit, "server")
        self.properties = dict(properties or {})
        self.job = job
        self.events: list[tuple[str, Any]] = []

    def get_clients(self) -> list[Client]:
        return self.clients

    def new_context(self) -> FLContext:
        context = context_of(self.workspace, "server", **{ReservedKey.RUN_NUM: self.job})
        context.put(ReservedKey.ENGINE, self, private=True, sticky=False)
        context.put(FLContextKey.SCOPE_PROPERTIES, self.properties, private=True, sticky=False)
        return context

    def fire_event(self, event_type: str, fl_ctx: FLContext) -> None:
        self.events.append((event_type, fl_ctx.get_prop(FLContextKey.EVENT_DATA)))


class PlainController(Controller):
    """A controller whose flow is the test's."""

    def start_controller(self, fl_ctx: FLContext) -> None: ...

    def stop_controller(self, fl_ctx: FLContext) -> None: ...

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None: ...

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None: ...


def workspace_in(kit: Path, site: str) -> Workspace:
    for folder in ("startup", "local"):
        (kit / folder).mkdir(parents=True, exist_ok=True)
    return Workspace(str(kit), site)


def context_of(workspace: Workspace, name: str, **properties: Any) -> FLContext:
    context = FLContext()
    known = {
        ReservedKey.RUN_NUM: JOB,
        ReservedKey.IDENTITY_NAME: name,
        FLContextKey.WORKSPACE_OBJECT: workspace,
        **properties,
    }
    for key, value in known.items():
        context.put(key, value, private=True, sticky=False)
    return context


def site_context(
    kit: Path,
    task: str,
    *,
    site: str = SITES[0],
    properties: dict[str, Any] | None = None,
    gate: SiteGate | None = None,
) -> FLContext:
    """What a filter or an executor sees at a site whose privacy scope has this gate in it."""
    scope = PrivacyScope()
    scope.set_name(names.SCOPE)
    scope.set_props(properties or {})
    if gate is not None:
        scope.add_task_result_filter(gate, FilterKey.OUT)
    context = context_of(workspace_in(kit, site), site)
    context.put(FLContextKey.SCOPE_OBJECT, scope, private=True, sticky=False)
    context.put(FLContextKey.TASK_NAME, task, private=True, sticky=False)
    return context


def deploy(kit: Path, study: Mapping[str, Any], *, site: str = SITES[0], path: str = names.EXECUTOR) -> Path:
    """Put the client half of a job where FLARE puts it."""
    file = Path(workspace_in(kit, site).get_client_app_config_file_path(JOB))
    file.parent.mkdir(parents=True, exist_ok=True)
    executor = {"path": path, "args": {"study": dict(study)}}
    file.write_text(json.dumps({"format_version": 2, "executors": [{"tasks": ["*"], "executor": executor}]}))
    return file


def as_shareable(content: Mapping[str, Any]) -> Shareable:
    shareable = Shareable()
    shareable.update(content)
    return shareable


def over_the_wire(shareable: Shareable) -> Shareable:
    return fobs.loads(fobs.dumps(shareable))


def without_headers(shareable: Mapping[str, Any]) -> Message:
    return {key: value for key, value in shareable.items() if key != ReservedHeaderKey.HEADERS}


def answer_to(task: str, declaration: Declaration, *, round_number: int = 1) -> Message:
    """An answer with everything in it that a site may say."""
    sent, tallies = declaration.algebra.sent, declaration.algebra.tallies
    validation = {name: np.full(1, 5.0) for name in VALIDATION}
    parts: dict[str, Message] = {
        JOIN: {},
        TRAIN: {
            "round": round_number,
            "model": "0f" * 32,
            "update": {name: np.ones(spec.shape, np.float32) for name, spec in sent.items()},
            "tally": {name: np.ones(shape) for name, shape in tallies.items()},
            "validation": validation,
        },
        EVALUATE: {"round": round_number, "validation": validation},
        FINISH: {"round": round_number, "scores": {**dict.fromkeys(SCORES, 0.5), "n_test": 10.0, "auc": None}},
    }
    return {"code": 0, **parts[task]}


@dataclass
class Exchange:
    site: str
    task: str
    message: Message
    answer: Message | None = None


class Federation:
    """A controller with sites that fetch tasks and answer them, each in a thread of its own."""

    def __init__(
        self,
        controller: Controller,
        sites: Mapping[str, Behaviour],
        kit: Path,
        *,
        properties: Mapping[str, Any] | None = None,
        job: str = JOB,
    ) -> None:
        self.controller = controller
        self.engine = Engine(list(sites), kit, properties, job)
        self.server = WFCommServer(task_check_period=POLL)
        self.fl_ctx = self.engine.new_context()
        self.abort = Signal()
        self.online = {name: threading.Event() for name in sites}
        self.exchanges: list[Exchange] = []
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._live, args=(client, sites[client.name]), name=client.name)
            for client in self.engine.clients
        ]

    def __enter__(self) -> Federation:
        self.controller.set_communicator(self.server)
        self.server.initialize_run(self.fl_ctx)
        for event in self.online.values():
            event.set()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._over.set()
        for event in self.online.values():
            event.set()
        for thread in self._threads:
            thread.join(timeout=60)
            assert not thread.is_alive()
        self.server.finalize_run(self.fl_ctx)

    def _live(self, client: Client, behave: Behaviour) -> None:
        torch.set_num_threads(1)
        while not self._over.is_set():
            self.online[client.name].wait()
            task, number, data = self.server.process_task_request(client, self.engine.new_context())
            if not task:
                time.sleep(POLL)
                continue
            exchange = Exchange(client.name, task, without_headers(over_the_wire(data)))
            self.exchanges.append(exchange)
            try:
                answer = behave(task, exchange.message)
            except Restarted:
                continue
            if answer is None:
                self._hang(number)
                continue
            shareable = answer if isinstance(answer, Shareable) else as_shareable(answer)
            exchange.answer = without_headers(shareable)
            self.server.process_submission(client, task, number, over_the_wire(shareable), self.engine.new_context())

    def _hang(self, number: str) -> None:
        while not self._over.is_set() and self.server.process_task_check(number, self.fl_ctx) is not None:
            time.sleep(POLL)

    def sent(self, site: str, task: str) -> list[Message]:
        return [each.message for each in list(self.exchanges) if (each.site, each.task) == (site, task)]


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "it did not happen in time"
        time.sleep(POLL)


_TURNS = threading.Lock()


class SiteThread:
    """A member of a run as the behaviour of a thread; ``interfere`` may answer in its place, ``amend`` afterwards.

    Sites take turns: PyTorch's global random state, which building a model uses, is one for all threads.
    """

    def __init__(
        self,
        name: str,
        study: Study,
        data: Path,
        state: Path,
        *,
        interfere: Callable[[str, Message], Any] = lambda task, message: NotImplemented,
        amend: Callable[[str, Message, Message], Message] = lambda task, message, answer: answer,
        job: str = JOB,
        credentials: Callable[[], Credentials] | None = None,
        **policy: Any,
    ) -> None:
        rules = {"secure_aggregation": study.masking is not None, **policy}
        self.policy = Policy(data_root=data, state_root=state / name, **rules)
        self._amend = amend
        self._interfere = interfere
        self._begin = partial(
            Member, name, study.options(), self.policy, patience=0.0, job=job, credentials=credentials
        )
        self.member = self._begin()

    def restart(self) -> None:
        """The site's process ends, and another one takes its place."""
        self.member.close()
        self.member = self._begin()

    def __call__(self, task: str, message: Message) -> Any:
        answer = self._interfere(task, message)
        if answer is not NotImplemented:
            return answer
        with _TURNS:
            return self._amend(task, message, self.member.answer(task, message))


@contextmanager
def closing(sites: Mapping[str, SiteThread]) -> Iterator[None]:
    try:
        yield
    finally:
        for site in sites.values():
            site.member.close()


class Attentive(Method):
    """A stand-in with personal tensors: every site gets a mixture of all heads of its own."""

    name = "attentive"
    title = "a head of one's own"
    normalisation = "shared"

    def place(self, model: Model) -> None:
        mark_where(model, lambda module: isinstance(module, SoftmaxHead), parameters=Scope.PERSONAL)

    def rules(self, task: Task, model: Model) -> Mapping[Scope, Rule]:
        return {**super().rules(task, model), Scope.PERSONAL: Attention()}


@contextmanager
def small_disk(folder: Path, size: str = "8m") -> Iterator[Path]:
    """A real file system that can be filled; the test is skipped where none may be mounted."""
    folder.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(options, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a tmpfs may not be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
