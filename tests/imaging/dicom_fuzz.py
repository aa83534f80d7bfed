"""Damaged copies of real files: each is read in a worker process, and must be refused or make sense.

python -m tests.imaging.dicom_fuzz --cases 5000
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from crossward.imaging.dicom.files import read_scan
from crossward.imaging.dicom.pixels import Limits
from crossward.imaging.dicom.scans import Scan
from crossward.imaging.refusals import Refused
from crossward.imaging.workers import work

PACK = Path(__file__).resolve().parents[3] / "shared" / "data" / "dicom" / "files"
LIMITS = Limits(pixels_per_frame=1 << 24, bytes_total=1 << 28)
NONSENSE = "ACCEPTED NONSENSE"
READ = "read"


@dataclass(frozen=True)
class Case:
    """One damaged copy; the seed decides everything."""

    file: Path
    kind: str
    seed: int


def flip_bits(content: bytes, rng: np.random.Generator) -> bytes:
    """Some bits, anywhere."""
    return _flipped(content, rng, len(content))


def flip_header(content: bytes, rng: np.random.Generator) -> bytes:
    """Some bits near the beginning, where sizes and types are; the preamble means nothing."""
    return _flipped(content, rng, min(len(content), 4096), first=132)


def flip_before_pixels(content: bytes, rng: np.random.Generator) -> bytes:
    """Some bits of the group of pixel facts and of the pixel data's first bytes."""
    start = max(content.find(b"\x28\0\2\0"), content.find(b"\0\x28\0\2"), 132)
    return _flipped(content, rng, min(len(content), start + 400), first=min(start, len(content) - 1))


def cut(content: bytes, rng: np.random.Generator) -> bytes:
    """The file ends early."""
    return content[: int(rng.integers(0, len(content)))]


def overwrite(content: bytes, rng: np.random.Generator) -> bytes:
    """A stretch of other bytes, as a bad sector leaves."""
    start, length = int(rng.integers(132, len(content))), int(rng.integers(1, 600))
    return content[:start] + rng.bytes(length) + content[start + length :]


def _flipped(content: bytes, rng: np.random.Generator, end: int, *, first: int = 0) -> bytes:
    changed = bytearray(content)
    for place in rng.integers(first, max(end, first + 1), int(rng.integers(1, 9))):
        changed[min(int(place), len(changed) - 1)] ^= 1 << int(rng.integers(0, 8))
    return bytes(changed)


KINDS: dict[str, Callable[[bytes, np.random.Generator], bytes]] = {
    "bits": flip_bits,
    "header": flip_header,
    "pixel facts": flip_before_pixels,
    "cut": cut,
    "overwritten": overwrite,
}


def attempt(case: Case) -> str:
    """Damages a copy, reads it, and says what came of it; a refusal is raised."""
    content = KINDS[case.kind](case.file.read_bytes(), np.random.default_rng(case.seed))
    with tempfile.NamedTemporaryFile(suffix=".dcm") as copy:
        copy.write(content)
        copy.flush()
        scan = read_scan(Path(copy.name), limits=LIMITS)
    fault = nonsense(scan)
    if not fault and case.kind == "cut" and not same(scan, original(case.file)):
        fault = "a file that ends early is read as another picture"
    return f"{NONSENSE}: {fault}" if fault else READ


@lru_cache(maxsize=4)
def original(file: Path) -> Scan:
    return read_scan(file, limits=LIMITS)


def same(scan: Scan, other: Scan) -> bool:
    return len(scan.frames) == len(other.frames) and all(
        np.array_equal(one.values, two.values) for one, two in zip(scan.frames, other.frames, strict=True)
    )


def nonsense(scan: Scan) -> str:
    """What is wrong with an accepted scan; empty where nothing is."""
    if len(scan.frames) != scan.header.frames:
        return "number of frames"
    for frame in scan.frames:
        if frame.values.shape[:2] != (scan.header.rows, scan.header.columns) or frame.values.dtype != np.float32:
            return "shape"
        if not np.isfinite(frame.values).all() or not np.isfinite([frame.low, frame.high]).all():
            return "not finite"
        if not frame.low < frame.high or frame.values.min() < frame.low or frame.values.max() > frame.high:
            return "out of range"
        if frame.valid is not None and frame.valid.shape != frame.values.shape:
            return "mask"
    return ""


def fuzz(
    files: Sequence[Path], cases: int, seed: int, *, processes: int | None = None
) -> tuple[dict[str, Counter[str]], list[tuple[Case, str]]]:
    """Reads so many damaged copies.

    Returns:
        Outcomes by kind of damage, and the cases that should never be: nonsense, and programming errors that
        were turned into refusals.
    """
    rng = np.random.default_rng(seed)
    kinds = list(KINDS)
    todo = [
        Case(files[int(rng.integers(len(files)))], kinds[number % len(kinds)], seed * 1_000_003 + number)
        for number in range(cases)
    ]
    outcomes: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    wrong: list[tuple[Case, str]] = []
    answered = 0
    for number, result in work(attempt, todo, processes=processes, seconds=20.0, memory=2 << 30):
        answered += 1
        case = todo[number]
        outcome = result.reason.value if isinstance(result, Refused) else str(result)
        outcomes[case.kind][outcome] += 1
        told = result.detail if isinstance(result, Refused) else ""
        if outcome.startswith(NONSENSE) or told.split(";")[0] in ("AttributeError", "TypeError", "UnboundLocalError"):
            wrong.append((case, f"{outcome} {told}"))
    assert answered == cases
    return outcomes, wrong


def table(outcomes: dict[str, Counter[str]]) -> str:
    names = sorted({name for counts in outcomes.values() for name in counts})
    lines = [f"{'':72s}" + "".join(f"{kind:>13s}" for kind in outcomes) + f"{'all':>9s}"]
    for name in names:
        counts = [outcomes[kind][name] for kind in outcomes]
        lines.append(f"{name[:70]:72s}" + "".join(f"{count:13d}" for count in counts) + f"{sum(counts):9d}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Read damaged copies of the DICOM pack's files.")
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=PACK)
    parser.add_argument("--processes", type=int, default=None)
    options = parser.parse_args()
    files = sorted(path for path in options.folder.rglob("*") if path.is_file())
    outcomes, wrong = fuzz(files, options.cases, options.seed, processes=options.processes)
    print(table(outcomes))
    for case, what in wrong:
        print(f"{case.file.name[:3]} {case.kind} {case.seed}: {what}")


if __name__ == "__main__":
    # By its importable name, so that worker processes find what they are to run.
    from tests.imaging import dicom_fuzz

    dicom_fuzz.main()
