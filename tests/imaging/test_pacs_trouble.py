from __future__ import annotations

import base64
import logging
import threading
import time
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossward.federation.errors import BadInput
from crossward.imaging.pacs.access import read_access
from crossward.imaging.pacs.trouble import Passing, Patience, Retrying, Stopped, quiet_libraries

QUICK = Patience(attempts=4, first=0.001, longest=0.002)


class Failing:
    """Fails so many times, then answers."""

    def __init__(self, times: int, **options: int) -> None:
        self.left, self.calls, self.options = times, 0, options

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.left:
            raise Passing("not now", **self.options)  # type: ignore[arg-type]
        return "here"


@given(first=st.floats(0.01, 10), longest=st.floats(0.01, 100), attempt=st.integers(1, 60))
def test_waits_double_up_to_the_longest(first: float, longest: float, attempt: int) -> None:
    due = min(longest, first * 2 ** (attempt - 1))
    assert due / 2 <= Patience(first=first, longest=longest).seconds(attempt) <= due


def test_what_passes_is_tried_again_and_counted() -> None:
    retrying = Retrying(QUICK)
    assert retrying(Failing(1)) == "here"
    assert retrying(Failing(3)) == "here"
    assert retrying.retries == 4


def test_patience_ends() -> None:
    retrying = Retrying(QUICK)
    retrying(Failing(0))
    for failing, calls in ((Failing(9), 4), (Failing(9, attempts=3), 3), (Failing(9, attempts=20), 4)):
        with pytest.raises(Passing, match="not now"):
            retrying(failing)
        assert failing.calls == calls


def test_a_host_that_never_answered_is_tried_twice_only() -> None:
    failing = Failing(9)
    with pytest.raises(Passing):
        Retrying(QUICK)(failing)
    assert failing.calls == 2


def test_a_wait_can_be_broken_off() -> None:
    retrying = Retrying(Patience(attempts=9, first=60, longest=60))
    threading.Timer(0.1, retrying.stop).start()
    began = time.monotonic()
    with pytest.raises(Stopped):
        retrying(Failing(9))
    assert time.monotonic() - began < 10
    with pytest.raises(Stopped):
        retrying(Failing(0))


def test_libraries_are_quiet_for_a_while_only(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG):
        with quiet_libraries():
            logging.getLogger("pynetdicom.events").error("PLANTED^NAME")
            logging.getLogger("urllib3.connectionpool").debug("PLANTED^NAME")
            warnings.warn("PLANTED^NAME", stacklevel=1)
        assert "PLANTED" not in caplog.text + "".join(capfd.readouterr())
        logging.getLogger("pynetdicom.events").error("heard again")
    assert "heard again" in caplog.text


def test_secrets_come_from_files_or_the_environment(tmp_path: Path) -> None:
    (tmp_path / "login").write_text("planted-user:planted:password\n")
    (tmp_path / "token").write_text("planted-token\n")
    basic = base64.b64encode(b"planted-user:planted:password").decode()
    assert read_access(environment={}).authorization is None
    assert read_access(login_file=tmp_path / "login", environment={}).authorization == f"Basic {basic}"
    assert read_access(token_file=tmp_path / "token", environment={}).authorization == "Bearer planted-token"
    assert read_access(environment={"CROSSWARD_PACS_TOKEN": "t"}).authorization == "Bearer t"
    environment = {"CROSSWARD_PACS_LOGIN": "somebody:else"}
    assert read_access(login_file=tmp_path / "login", environment=environment).authorization == f"Basic {basic}"


def test_secrets_that_cannot_be_used_are_refused_and_never_repeated(tmp_path: Path) -> None:
    for name, text in {"plain": "plantedpassword", "empty": "", "lines": "planted:a\nplanted:b"}.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(BadInput) as caught:
            read_access(login_file=tmp_path / name, environment={})
        assert "planted" not in str(caught.value)
    with pytest.raises(BadInput, match="both a login and a token"):
        read_access(environment={"CROSSWARD_PACS_LOGIN": "a:b", "CROSSWARD_PACS_TOKEN": "c"})
    for options in ({"login_file": tmp_path / "none"}, {"ca_file": tmp_path / "plain"}, {"key": tmp_path / "plain"}):
        with pytest.raises(BadInput):
            read_access(environment={}, **options)
    with pytest.raises(BadInput, match="cannot be used with its key"):
        read_access(certificate=tmp_path / "plain", environment={})
