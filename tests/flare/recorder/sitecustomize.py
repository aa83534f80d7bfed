"""Python runs this before anything else in every process that has this folder on its PYTHONPATH.

In a FLARE system under test it records what the server receives, copies what sites trained, and does to a site what a
test asks for. The folder that the environment names holds all of it; without the name nothing is done.

frames/PID/PEER what came over one of the server's connections, byte for byte: a frame's length, then the frame
answers/*.npz   what the server's job process made of it: every number, text and array of every task's result
reports/SITE/   copies of what a site put into its outbox, one for every time that it trained
vectors/*.npy   what sites wrote into the vectors of sums, before masks
stumble/SITE    a test's wishes, a line each: a step of a round's sum of updates, the round, and the signal that the
                site's process gets instead of doing that step
planted/SITE    a test's wish: the name of a tensor that the site gives away
"""

import functools
import importlib.abc
import importlib.util
import itertools
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

FOLDER = "CROSSWARD_RECORDER"


class Finder(importlib.abc.MetaPathFinder):
    """Changes a module when it is imported, so that processes which do not import it lose no time."""

    def __init__(self, name, change):
        self.name, self.change = name, change

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def changed(module):
            execute(module)
            self.change(module)

        spec.loader.exec_module = changed
        return spec


def around(owner, name):
    """Put a function round a method: it is given the method, and what the method is given."""

    def put(outer):
        inner = getattr(owner, name)
        setattr(owner, name, functools.wraps(inner)(lambda *given, **named: outer(inner, *given, **named)))

    return put


def record_frames(module):
    lock = threading.Lock()

    @around(module.ConnManager, "process_frame_task")
    def process_frame_task(inner, self, connection, frame):
        peer = connection.sfm_endpoint.endpoint.name if connection.sfm_endpoint else "unknown"
        with lock, (made("frames", str(os.getpid())) / peer).open("ab") as stream:
            stream.write(len(frame).to_bytes(8, "big") + bytes(frame))
        return inner(self, connection, frame)


def record_answers(module):
    import numpy as np

    numbers = itertools.count(1)

    @around(module.SubmitUpdateCommand, "process")
    def process(inner, self, data, fl_ctx):
        found = {path: np.asarray(value, np.uint8 if type(value) is list else None) for path, value in leaves(data)}
        np.savez(made("answers") / f"{os.getpid()}-{next(numbers):06d}.npz", **found)
        return inner(self, data, fl_ctx)


def leaves(value, path="answer"):
    """The numbers, texts, bytes and arrays of a task's result; FLARE's own objects in its headers are left out."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from leaves(part, f"{path}/{name}")
    elif isinstance(value, list | tuple | set):
        for number, part in enumerate(value):
            yield from leaves(part, f"{path}/{number}")
    elif isinstance(value, bytes | bytearray):
        yield path, list(value)
    elif isinstance(value, bool | float | str) or type(value).__module__ == "numpy":
        yield path, value
    elif isinstance(value, int):
        # One that is larger than any of numpy's stays readable.
        yield path, value if -(1 << 63) <= value < 1 << 63 else str(value)


def copy_reports(module):
    numbers = itertools.count(1)

    @around(module.Outbox, "put")
    def put(inner, self, report):
        inner(self, report)
        written = self._path(report.round_number, report.model)
        copy = made("reports", report.site) / f"{written.stem}-{os.getpid()}-{next(numbers)}{written.suffix}"
        shutil.copyfile(written, copy)


def copy_vectors(module):
    import numpy as np

    numbers = itertools.count(1)

    @around(module.VectorLayout, "encode")
    def encode(inner, *given, **named):
        words = inner(*given, **named)
        np.save(made("vectors") / f"{os.getpid()}-{next(numbers):06d}.npy", words)
        return words


def stumble(module):
    for step in ("contribute", "reveal"):
        stumble_at(module, step)


def stumble_at(module, step):
    @around(module.Release, f"_{step}")
    def take(inner, self, message):
        wishes = Path(os.environ[FOLDER], "stumble", self._name)
        kept = wishes.read_text().splitlines() if wishes.exists() else []
        due = [wish for wish in kept if wish.split()[:2] == [step, str(message["round"])]]
        if due and self._request is not None and self._request.kind == "updates":
            wishes.write_text("\n".join(wish for wish in kept if wish not in due))
            os.kill(os.getpid(), signal.Signals[due[0].split()[2]])
        return inner(self, message)


def plant(module):
    @around(module.Member, "_train")
    def train(inner, self, message):
        answer = inner(self, message)
        wish = Path(os.environ[FOLDER], "planted", self.name)
        if wish.exists():
            name = wish.read_text()
            answer["update"][name] = self._participant._tensors([name])[name].numpy()
        return answer


def made(*parts):
    folder = Path(os.environ[FOLDER], *parts)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


AT_SERVER = {
    "nvflare.fuel.f3.sfm.conn_manager": record_frames,
    "nvflare.private.fed.server.server_commands": record_answers,
}
AT_SITES = {
    "crossward.site.outbox": copy_reports,
    "crossward.privacy.secagg.vector": copy_vectors,
    "crossward.site.release": stumble,
    "crossward.site.member": plant,
}

if os.environ.get(FOLDER):
    command = " ".join(sys.orig_argv)
    if "nvflare.private.fed.app.server." in command:
        sys.meta_path[:0] = [Finder(name, change) for name, change in AT_SERVER.items()]
    elif "nvflare.private.fed.app.client." in command:
        sys.meta_path[:0] = [Finder(name, change) for name, change in AT_SITES.items()]
