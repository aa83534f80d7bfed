"""How fast DICOM files are inventoried, prepared and loaded, against doing the least that could be done with them."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydicom import dcmread

from crossward.federation.errors import BadInput
from crossward.imaging.data import Split, load_site
from crossward.imaging.inventory.scan import scan
from crossward.imaging.loading import batches
from crossward.imaging.prepare.site import prepare
from crossward.imaging.rules.config import read_site_rules
from crossward.methods import Task, create
from crossward.methods.base import Context
from crossward.site.devices import Device
from crossward.site.trainer import Training, train_round

_SAMPLE = 1000
_BATCH = 32
Row = dict[str, Any]


def run(site: Path, *, size: int, processes: int | None) -> list[Row]:
    """Measure one hospital: inventory and preparation from nothing, each killed half-way and begun again, and loading.

    Args:
        site: folder with a site.yaml; its cache is left alone.
        size: of the pictures.
        processes: workers; one per processor if not given.
    """
    rules = read_site_rules(site)
    files = sorted(path for path in rules.data.rglob("*.dcm"))
    if not files:
        raise BadInput(f"{rules.data} has no .dcm file to measure")
    with tempfile.TemporaryDirectory(prefix="crossward-bench-") as scratch:
        folder = Path(scratch)
        rows = [*_bare(files), *_inventory(rules.data, folder, len(files), processes)]
        copy = folder / "site"
        copy.mkdir()
        text = rules.path.read_text(encoding="utf-8")
        (copy / "site.yaml").write_text(_moved(text, data=rules.data, labels=rules.labels.file), encoding="utf-8")
        rows += _preparation(copy, len(files), size, processes)
        rows += _loading(copy, size)
    bare = {"inventory": rows[0]["files/s"], "preparation": rows[1]["files/s"]}
    for row in rows:
        against = bare.get(row["what"].split(",")[0])
        row["/ bare"] = round(row["files/s"] / against, 2) if against and row["files/s"] else None
    return rows


def _moved(text: str, *, data: Path, labels: Path | None) -> str:
    """The rules with absolute paths and a cache of their own."""
    lines = [line for line in text.splitlines() if not line.startswith(("data:", "cache:"))]
    moved = [f"  file: {labels}" if labels is not None and line.strip().startswith("file:") else line for line in lines]
    return "\n".join([*moved, f"data: {data}", "cache: cache", ""])


def _row(what: str, *, files: int, seconds: float, megabytes: float | None = None, note: str = "") -> Row:
    rate = round(files / seconds, 1) if files else None
    return {"what": what, "files/s": rate, "seconds": round(seconds, 2), "MB": megabytes, "note": note, "/ bare": None}


def _bare(files: Sequence[Path]) -> list[Row]:
    """One core reading a sample of headers, and of pixels, with pydicom alone."""
    step = max(1, len(files) // _SAMPLE)
    sample = files[::step]
    kinds: dict[str, Callable[[Path], object]] = {
        "bare header (dcmread, stop_before_pixels)": lambda file: dcmread(file, stop_before_pixels=True).get(
            "Modality"
        ),
        "bare pixels (dcmread, pixel_array)": lambda file: dcmread(file).pixel_array,
    }
    found = []
    for what, read in kinds.items():
        # Once before, so that neither side pays for the disk or for what is read at first use.
        for file in sample:
            read(file)
        began = time.perf_counter()
        for file in sample:
            read(file)
        found.append(_row(what, files=len(sample), seconds=time.perf_counter() - began, note="one core, a sample"))
    return found


def _inventory(data: Path, folder: Path, count: int, processes: int | None) -> list[Row]:
    rows = []
    for what, state in (("inventory, first", "state"), ("inventory, again", "state")):
        began = time.perf_counter()
        scan(data, state=folder / state, processes=processes)
        rows.append(_row(what, files=count, seconds=time.perf_counter() - began, megabytes=_peak()))
    command = ["data", "scan", str(data), "--state", str(folder / "killed"), "--json"]
    rows.append(_killed("inventory, killed half-way", command, rows[0]["seconds"] / 2, count))
    return rows


def _preparation(site: Path, count: int, size: int, processes: int | None) -> list[Row]:
    rows = []
    for what in ("preparation, first", "preparation, again"):
        began = time.perf_counter()
        manifest = prepare(read_site_rules(site), size=size, processes=processes)
        seconds = time.perf_counter() - began
        if not manifest.pictures:
            raise BadInput("no file became a picture; crossward data check says why")
        kept = f"{len(manifest.pictures)} pictures, {len(manifest.rejected)} files rejected"
        rows.append(_row(what, files=count, seconds=seconds, megabytes=_peak(), note=kept))
    shutil.rmtree(read_site_rules(site).cache)
    command = ["data", "prepare", str(site), "--size", str(size), "--json"]
    rows.append(_killed("preparation, killed half-way", command, rows[0]["seconds"] / 2, count))
    return rows


def _killed(what: str, words: Sequence[str], after: float, count: int) -> Row:
    """Run a command, kill it and all its workers, run it again to its end; the time is that of the second run."""
    command = [sys.executable, "-c", "from crossward.cli.main import main; main()", *words]
    began = time.perf_counter()
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        first.wait(timeout=after)
    except subprocess.TimeoutExpired:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    killed = time.perf_counter() - began
    began = time.perf_counter()
    second = subprocess.run(command, capture_output=True, text=True, check=False)
    if second.returncode:
        raise BadInput(f"{what}: the second run failed: {second.stderr.strip()[-200:]}")
    seconds = time.perf_counter() - began
    row = _row(
        what, files=0, seconds=seconds, note=f"killed after {killed:.1f} s; the rest of {count} files, start-up too"
    )
    return {**row, "files/s": None}


def _loading(site: Path, size: int) -> list[Row]:
    """Milliseconds a batch of the second epoch's loading, beside those of a training step."""
    manifest_classes = sorted({row.label for row in prepare(read_site_rules(site), size=size).pictures})
    cohort = load_site(site, name="site", classes=manifest_classes, size=size, channels=1, seed=0, batch_size=_BATCH)
    split = cohort.sites["site"].train
    _epoch(split)
    loading = statistics.median(_epoch(split) for _ in range(3))
    method = create("fedavg")
    task = Task(classes=tuple(manifest_classes), channels=1, size=size, rounds=2, width=0.25)
    model = method.build(task)
    device = Device.best().take(model)
    context = Context(
        "site", 1, 2, {name: value.clone() for name, value in model.state_dict().items()}, torch.Generator()
    )
    few = split.rows(range(min(len(split), 20 * _BATCH)))
    train_round(model, method, few, context, training=Training(epochs=1, batch_size=_BATCH), device=device)
    began = time.perf_counter()
    train_round(model, method, few, context, training=Training(epochs=1, batch_size=_BATCH), device=device)
    step = (time.perf_counter() - began) / (len(few) // _BATCH)
    note = (
        f"{1000 * loading:.2f} ms a batch of {_BATCH}, a training step {1000 * step:.1f} ms: {loading / step:.3f} of it"
    )
    return [_row("loading, epoch 2", files=_BATCH, seconds=loading, note=note)]


def _epoch(split: Split) -> float:
    began = time.perf_counter()
    count = sum(1 for _ in batches(replace(split), batch_size=_BATCH, seed=1, drop_last=True))
    return (time.perf_counter() - began) / max(1, count)


def _peak() -> float:
    """Of this process and of its largest worker, so far."""
    own, workers = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return round((own + workers) / 1024)
