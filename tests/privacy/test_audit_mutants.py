"""Protection that is broken on purpose, and who notices. Every test says which attack or check it is."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from crossward.privacy.audit import setup, small
from crossward.privacy.audit.checks import Check, check_ledger, check_noise, check_sampler
from crossward.privacy.audit.findings import Findings, Setting
from crossward.privacy.dp import clipping, noise
from crossward.privacy.dp.accounting import Spending
from crossward.privacy.dp.lines import Entry, Shared
from crossward.privacy.dp.noise import NoiseSource
from crossward.privacy.dp.sampling import IntArray, PatientSampler

SIZE = setup.QUICK
PRIVATE = SIZE.private()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def broken(found: Findings, attack: str) -> set[Setting]:
    return {row.setting for row in found.failed if row.attack == attack}


def no_noise(self: NoiseSource, tensors: Sequence[Tensor], *, scale: float) -> None:
    del self, tensors, scale


def everybody(self: PatientSampler) -> IntArray:
    return np.sort(self._rows[self._starts])


class Shuffled:
    """Batches of a shuffled list, one after the other, as plain training takes them."""

    def __init__(self) -> None:
        self._left: list[int] = []
        self._random = np.random.default_rng(0)

    def draw(self, sampler: PatientSampler) -> IntArray:
        size = round(sampler._rate * sampler.units)
        if len(self._left) < size:
            self._left = self._random.permutation(sampler._rows[sampler._starts]).tolist()
        taken, self._left = self._left[:size], self._left[size:]
        return np.array(taken, dtype=np.intp)


def test_what_is_whole_passes() -> None:
    found = small.check_parts(SIZE, PRIVATE)
    assert [row.attack for row in found.rows] == ["check: noise", "check: sampler", "check: clipping"]
    assert not found.failed


def test_noise_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noticed by the bound on epsilon, by membership, by gradient inversion, and by the check of noise."""
    monkeypatch.setattr(NoiseSource, "add_to", no_noise)
    assert broken(small.check_parts(SIZE, PRIVATE), "check: noise") == {Setting.DP}
    found = small.infer_membership(SIZE, PRIVATE)
    assert Setting.DP in broken(found, "epsilon at least")
    assert Setting.DP in broken(found, "membership")
    assert Setting.DP in broken(small.invert_updates(SIZE, PRIVATE), "gradient inversion")


def test_clipping_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noticed by the bound on epsilon, and by the check of clipping."""
    monkeypatch.setattr(clipping, "factors_of", lambda norms, clip: torch.ones_like(norms))
    assert broken(small.check_parts(SIZE, PRIVATE), "check: clipping") == {Setting.DP}
    assert Setting.DP in broken(small.infer_membership(SIZE, PRIVATE), "epsilon at least")


def test_everybody_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noticed by the bound on epsilon, and by the check of the sampler."""
    monkeypatch.setattr(PatientSampler, "draw", everybody)
    assert broken(small.check_parts(SIZE, PRIVATE), "check: sampler") == {Setting.DP}
    assert Setting.DP in broken(small.infer_membership(SIZE, PRIVATE), "epsilon at least")


def test_shuffled_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noticed by the check of the sampler: no attack of seconds tells an epsilon of 1 from one a little larger."""
    shuffled = Shuffled()
    monkeypatch.setattr(PatientSampler, "draw", lambda self: shuffled.draw(self))
    assert broken(small.check_parts(SIZE, PRIVATE), "check: sampler") == {Setting.DP}


def test_all_images_of_a_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noticed by the check of the sampler."""
    patients = [f"patient {row // 3}" for row in range(120)]
    sampler = PatientSampler(patients, rate=0.2, source=NoiseSource())
    assert check_sampler(sampler, patients, rate=0.2).passed

    def whole(self: PatientSampler) -> IntArray:
        return np.concatenate([self._rows[self._starts[0] :][:3], self._rows[3:6]])

    monkeypatch.setattr(PatientSampler, "draw", whole)
    check = check_sampler(sampler, patients, rate=0.2)
    assert not check.passed
    assert "twice" in check.words


def test_a_wrong_rate() -> None:
    """Noticed by the check of the sampler: every patient is drawn twice as often as was paid for."""
    patients = [str(row) for row in range(300)]
    assert not check_sampler(PatientSampler(patients, rate=0.2, source=NoiseSource()), patients, rate=0.1).passed


def test_a_key_that_is_always_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noticed by the check of noise: a second source has the noise of the first."""
    monkeypatch.setattr(
        noise, "_new_cipher", lambda: Cipher(algorithms.AES(bytes(32)), modes.CTR(bytes(16))).encryptor()
    )
    check = check_noise()
    assert not check.passed
    assert "same noise" in check.words


def test_the_same_noise_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noticed by the check of noise: a source that starts over."""
    key, add_to = os.urandom(32), NoiseSource.add_to

    def again(self: NoiseSource, tensors: Sequence[Tensor], *, scale: float) -> None:
        self._cipher = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
        add_to(self, tensors, scale=scale)

    monkeypatch.setattr(NoiseSource, "add_to", again)
    assert broken(small.check_parts(SIZE, PRIVATE), "check: noise") == {Setting.DP}


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_noise_of_another_scale(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Noticed by the check of noise: a tenth less than was paid for."""
    add_to = NoiseSource.add_to

    def weaker(self: NoiseSource, tensors: Sequence[Tensor], *, scale: float) -> None:
        add_to(self, tensors, scale=factor * scale)

    monkeypatch.setattr(NoiseSource, "add_to", weaker)
    assert not check_noise().passed


STEPS = Spending(1.0, 0.1, 6)
RELEASE = Spending(4.0, 1.0, 1)
USED = [(1, "steps"), (2, "steps"), (2, "release")]


def paid(number: int, what: str = "steps", spending: Spending = STEPS, **more: Any) -> Entry:
    return Entry(**{"run": "run", "round": number, "what": what, "unit": "patient", "spending": spending, **more})


def ledger_of(*entries: Entry, unit: str = "patient", shared: Shared | None = None) -> Check:
    return check_ledger(entries, used=USED, prices={"steps": STEPS, "release": RELEASE}, unit=unit, shared=shared)


WHOLE = (paid(1), paid(2), paid(2, "release", RELEASE))


def test_a_round_that_nobody_paid_for() -> None:
    """Noticed by the check of the ledger; tests/cli/test_audit.py skips a reservation in a real run."""
    assert ledger_of(*WHOLE).passed
    # A crash counts as spent, and is paid for twice.
    assert ledger_of(*WHOLE, paid(2)).passed
    halves = (paid(2, spending=replace(STEPS, steps=3)), paid(2, spending=replace(STEPS, steps=3)))
    assert ledger_of(WHOLE[0], *halves, WHOLE[2]).passed
    for entries in ((), (WHOLE[0], WHOLE[2]), (WHOLE[0], halves[0], WHOLE[2])):
        check = ledger_of(*entries)
        assert not check.passed
        assert "used steps" in check.words
    assert "release" in ledger_of(*WHOLE[:2]).words
    assert not ledger_of(*WHOLE[:2]).passed


@pytest.mark.parametrize(
    "entry",
    [
        paid(2, spending=replace(STEPS, noise=10.0)),
        paid(2, spending=replace(STEPS, rate=0.01)),
        paid(2, spending=replace(STEPS, part="val")),
        paid(2, unit="image"),
        paid(2, shared=Shared(fewest=3, colluders=0)),
    ],
)
def test_a_ledger_that_claims_something_else_than_what_was_done(entry: Entry) -> None:
    """Noise 10 in the ledger, and steps with noise 1."""
    check = ledger_of(WHOLE[0], entry, WHOLE[2])
    assert not check.passed
    assert "round 2" in check.words
    assert not ledger_of(*WHOLE[:2], paid(2, "release", replace(RELEASE, noise=9.0))).passed
