"""The administrator's side of FLARE: one session, opened anew when the server was away, with plain errors."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from cryptography import x509
from cryptography.x509.oid import NameOID

from crossward.federation.errors import BadInput, RunFailure
from crossward.flare import names

Answer = TypeVar("Answer")

LOGIN_SECONDS = 15.0
COMMAND_SECONDS = 20.0


class Unreachable(RunFailure):
    """The server does not answer; it may be down, restarting, or cut off. Jobs on it may well go on."""


class NoSuchJob(BadInput):
    """The server does not know the job."""


class JobConsole(Protocol):
    """What watching and explaining need of the server; ``Console`` has it, and so has a test's stand-in.

    Every method raises ``Unreachable`` while the server does not answer.
    """

    def submit(self, job: Path) -> str:
        """Submit a job folder; gives the job's id."""

    def meta(self, job_id: str) -> dict[str, Any]:
        """FLARE's metadata of a job: name, status, schedule history, what came of deploying it."""

    def statistics(self, job_id: str) -> dict[str, Any] | None:
        """The progress of a job whose controller is at work; none otherwise."""

    def running_jobs(self) -> list[str]:
        """The jobs that have a process at the server now, whatever their status in the store says."""

    def sites(self) -> list[str]:
        """The sites that are connected."""

    def jobs(self) -> list[dict[str, Any]]:
        """The metadata of all jobs, oldest first."""

    def download(self, job_id: str, out: Path) -> Path | None:
        """Fetch an ended job into ``out``; gives its folder, or none where FLARE does not hand it out."""

    def abort(self, job_id: str) -> bool:
        """Stop a job; false where FLARE says that it is not running."""


class Console:
    """A session of an administrator.

    Use ``Console.open``; close it, or use it in a ``with``: an open session keeps threads alive.
    """

    def __init__(self, kit: Path, user: str) -> None:
        self._kit = kit
        self._user = user
        self._session: Any = None

    @classmethod
    def open(cls, kit: Path) -> Console:
        """Log in with an administrator's startup kit.

        Raises:
            BadInput: it is not such a kit, or the server does not accept it.
            Unreachable: the server does not answer.
        """
        kit = kit.parent if (kit / "fed_admin.json").is_file() else kit
        if not (kit / "startup" / "fed_admin.json").is_file():
            raise BadInput(f"{kit} is not an administrator's kit (it has no startup/fed_admin.json); see --kit")
        console = cls(kit.resolve(), user_of(kit))
        console._connected()
        return console

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def close(self) -> None:
        """Log out; nothing on the server is changed by it."""
        session, self._session = self._session, None
        if session is not None:
            with suppress(Exception):
                session.close()

    def submit(self, job: Path) -> str:
        """Submit a job folder, signed with the kit's key; gives the job's id."""
        with tempfile.TemporaryDirectory(prefix="crossward-") as folder:
            # FLARE writes its signatures into the folder that it submits.
            copy = shutil.copytree(job, Path(folder) / job.resolve().name)
            return str(self._ask(lambda session: session.submit_job(str(copy)), f"submit {job}"))

    def meta(self, job_id: str) -> dict[str, Any]:
        """FLARE's metadata of a job."""
        return dict(self._ask(lambda session: session.get_job_meta(job_id), f"look at job {job_id}"))

    def jobs(self) -> list[dict[str, Any]]:
        """The metadata of all jobs, oldest first."""
        return list(self._ask(lambda session: session.list_jobs(detailed=True), "list jobs"))

    def statistics(self, job_id: str) -> dict[str, Any] | None:
        """The progress of a job whose controller is at work; none otherwise."""
        from nvflare.fuel.flare_api.api_spec import JobNotFound, JobNotRunning

        def ask(session: Any) -> Any:
            try:
                return session.show_stats(job_id, "server")
            except (JobNotFound, JobNotRunning):
                # FLARE also calls a job unknown whose process has only just been started.
                return {}

        answer = self._ask(ask, f"ask job {job_id} for its progress")
        server = answer.get("server") if isinstance(answer, dict) else None
        group = server.get(names.STATISTICS) if isinstance(server, dict) else None
        return group if isinstance(group, dict) else None

    def running_jobs(self) -> list[str]:
        """The jobs that have a process at the server now."""
        return [str(job.job_id) for job in self._system().job_info]

    def sites(self) -> list[str]:
        """The sites that are connected."""
        return sorted(str(client.name) for client in self._system().client_info)

    def _system(self) -> Any:
        return self._ask(lambda session: session.get_system_info(), "look at the system")

    def download(self, job_id: str, out: Path) -> Path | None:
        """Fetch an ended job; replaces what was downloaded to the same place before."""
        from nvflare.fuel.flare_api.api_spec import InternalError, JobNotDone

        def ask(session: Any) -> Any:
            try:
                return session.download_job_result(job_id)
            except (JobNotDone, InternalError):
                # Still running in FLARE's store, or one of its parts was never stored.
                return None

        location = self._ask(ask, f"download job {job_id}")
        if not location or not Path(location).is_dir():
            return None
        place = out / job_id
        shutil.rmtree(place, ignore_errors=True)
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(location, place))

    def abort(self, job_id: str) -> bool:
        """Stop a job; false where FLARE says that it is not running."""
        from nvflare.fuel.flare_api.api_spec import InternalError, JobNotRunning

        def ask(session: Any) -> bool:
            try:
                session.abort_job(job_id)
            except JobNotRunning:
                return False
            except InternalError as error:
                if "is not running" in str(error):
                    return False
                raise
            return True

        return bool(self._ask(ask, f"abort job {job_id}"))

    def _connected(self) -> Any:
        if self._session is None:
            self._session = self._open_session()
        return self._session

    def _open_session(self) -> Any:
        from nvflare.fuel.flare_api.flare_api import Session

        # FLARE logs every lost connection with its stack; what matters of it is in the errors raised here.
        logging.getLogger().addHandler(logging.NullHandler())
        session = Session(username=self._user, startup_path=str(self._kit))
        session.api._print_hci = lambda message: None
        session.set_timeout(COMMAND_SECONDS)
        try:
            session.try_connect(LOGIN_SECONDS)
        except Exception as error:
            with suppress(Exception):
                session.api.close()
            raise self._explained(error, "log in") from error
        return session

    def _ask(self, question: Callable[[Any], Answer], what: str) -> Answer:
        """Put a question to the server; a session that the server has forgotten is opened anew, once."""
        from nvflare.fuel.flare_api.api_spec import AuthenticationError, SessionClosed

        session = self._connected()
        try:
            return question(session)
        except (SessionClosed, AuthenticationError):
            self._drop()
        except Exception as error:
            raise self._explained(error, what) from error
        try:
            return question(self._connected())
        except RunFailure:
            raise
        except Exception as error:
            raise self._explained(error, what) from error

    def _drop(self) -> None:
        """Forget the session without a word to the server, which may not be there."""
        session, self._session = self._session, None
        if session is not None:
            with suppress(Exception):
                session.api.close()

    def _explained(self, error: Exception, what: str) -> Exception:
        """Turn an error of FLARE's API into a line that a person can act on."""
        from nvflare.fuel.flare_api import api_spec

        if isinstance(error, (BadInput, RunFailure)):
            return error
        if isinstance(error, (api_spec.NoConnection, api_spec.SessionClosed, api_spec.NoReply, ConnectionError)):
            self._drop()
            return Unreachable(f"could not {what}: the server does not answer; see whether it runs, then try again")
        remedies: dict[type[Exception], tuple[type[Exception], str]] = {
            api_spec.JobNotFound: (NoSuchJob, "the server has no such job; see: crossward job list"),
            api_spec.AuthenticationError: (BadInput, "the server does not accept this kit; is it of the same project?"),
            api_spec.AuthorizationError: (BadInput, f"{self._user} may not do that on this system"),
            api_spec.InvalidJobDefinition: (BadInput, f"FLARE does not take the job ({error})"),
            api_spec.JobNotDone: (BadInput, "the job has not ended yet"),
        }
        for kind, (raised, words) in remedies.items():
            if isinstance(error, kind):
                return raised(f"could not {what}: {words}")
        return RunFailure(f"could not {what}: FLARE says '{error}'; the server's log has more")


def user_of(kit: Path) -> str:
    """The administrator that a kit belongs to: FLARE wants the name that is in its certificate."""
    path = kit / "startup" / "client.crt"
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        return str(certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
    except (OSError, ValueError, IndexError) as error:
        raise BadInput(f"{path} cannot be read as a certificate ({error}); is the kit whole?") from error
