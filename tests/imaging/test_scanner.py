from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossward.imaging.anatomy import CLASSES, draw_chest, draw_finding, draw_person
from crossward.imaging.scanner import Scanner, store, take_film
from crossward.imaging.scanner_profiles import HOSPITAL_SCANNERS, UNSEEN_SCANNER

ALL = (*HOSPITAL_SCANNERS, UNSEEN_SCANNER)
PLAIN = Scanner(
    maker="Phantomworks",
    model="Plain",
    software="1",
    detector="DIRECT",
    kvp=100,
    view="PA",
    rows=64,
    columns=64,
    spacing=(1.0, 1.0),
    bits=12,
    noise=0.0,
    scatter=0.0,
)


def disc(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return (np.hypot(x, y) < 0.5).astype(np.float32), np.zeros_like(x)


def rib(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    soft, _ = disc(x, y)
    return soft, 0.5 * (np.abs(y) < 0.1).astype(np.float32) * soft


def chest_of(kind: str, seed: int, scanner: Scanner = PLAIN) -> np.ndarray:
    rng = np.random.default_rng(seed)
    person, finding = draw_person(rng), draw_finding(kind, rng)
    return take_film(scanner, lambda x, y: draw_chest(person, finding, x, y), np.random.default_rng(0))


def test_stored_numbers_by_hand() -> None:
    film = np.array([[0.0, 0.5, 1.0]], dtype=np.float32)
    assert store(replace(PLAIN, bits=8), film).tolist() == [[0, 128, 255]]
    assert store(replace(PLAIN, bits=8), film).dtype == np.uint8
    # 0.5 * 4095 = 2047.5, rounded to even; MONOCHROME1 counts from the other end.
    assert store(PLAIN, film).tolist() == [[0, 2048, 4095]]
    assert store(replace(PLAIN, inverted=True), film).tolist() == [[4095, 2047, 0]]
    assert store(replace(PLAIN, bits=16), film).tolist() == [[0, 32768, 65535]]


@given(bits=st.sampled_from([8, 10, 12, 14, 16]), inverted=st.booleans(), seed=st.integers(0, 100))
def test_storing_loses_half_a_step_at_most(bits: int, inverted: bool, seed: int) -> None:
    film = np.random.default_rng(seed).random((5, 7), dtype=np.float32)
    stored = store(replace(PLAIN, bits=bits, inverted=inverted), film).astype(np.float64) / (2**bits - 1)
    back = 1 - stored if inverted else stored
    assert np.abs(back - film).max() <= 0.5 / (2**bits - 1) + 1e-7


def test_scanners_are_allowed_to_store_as_they_do() -> None:
    # PS3.3 lets a Digital X-Ray object rescale by 1 and 0 only.
    assert all((s.slope, s.intercept) == (1, 0) for s in ALL if s.modality == "DX")
    assert {s.modality for s in ALL} == {"DX", "CR"}
    assert {s.bits for s in ALL} == {8, 10, 12, 14, 16}
    assert len({(s.maker, s.model) for s in ALL}) == len(ALL) == 9
    assert sum(s.inverted for s in HOSPITAL_SCANNERS[:4]) == 1


@pytest.mark.parametrize("scanner", ALL, ids=lambda s: s.model)
def test_films_fill_the_range_and_are_finite(scanner: Scanner) -> None:
    film = chest_of("normal", 1, scanner)
    assert film.shape == (scanner.rows, scanner.columns)
    assert film.dtype == np.float32
    assert film.min() >= 0
    assert film.max() <= 1
    assert film.std() > 0.1


def test_dense_is_bright_and_blur_softens_the_edge() -> None:
    sharp = take_film(replace(PLAIN, blur=0.3), disc, np.random.default_rng(0))
    soft = take_film(replace(PLAIN, blur=3.0), disc, np.random.default_rng(0))
    assert sharp[32, 32] > sharp[2, 2] + 0.5
    steepest = [np.abs(np.diff(film[32])).max() for film in (sharp, soft)]
    assert steepest[0] > 2 * steepest[1]


def test_edge_enhancement_leaves_a_halo() -> None:
    # A steady offset so that the halo is not cut off at white.
    flat = take_film(replace(PLAIN, tone="linear"), disc, np.random.default_rng(0))
    haloed = take_film(replace(PLAIN, edge=0.15, edge_radius=3.0), disc, np.random.default_rng(0))
    assert flat[32, 16:48].max() - flat[32, 32] < 0.02
    assert haloed[32, 16:48].max() - haloed[32, 32] > 0.03


def test_low_voltage_brings_out_bone() -> None:
    contrast = []
    for bone in (0.4, 1.6):
        film = take_film(replace(PLAIN, bone=bone), rib, np.random.default_rng(0))
        contrast.append((film[32, 32] - film[42, 32]) / (film[42, 32] - film[2, 2]))
    assert contrast[1] > 2 * contrast[0]


def test_tilt_and_zoom_move_what_is_seen() -> None:
    def bar(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return ((np.abs(x) < 0.1) & (np.abs(y) < 0.8)).astype(np.float32), np.zeros_like(x)

    across, down = np.meshgrid(np.linspace(-1, 1, 64), np.linspace(-1, 1, 64))

    def lean(tilt: float) -> float:
        film = take_film(replace(PLAIN, tilt=tilt), bar, np.random.default_rng(0))
        weight = np.maximum(film - 0.5, 0)
        x, y = across - np.average(across, weights=weight), down - np.average(down, weights=weight)
        return float(np.rad2deg(np.arctan2(np.average(-x * y, weights=weight), np.average(y * y, weights=weight))))

    assert lean(20.0) - lean(0.0) == pytest.approx(20.0, abs=2.0)
    small, large = (
        (take_film(replace(PLAIN, zoom=(zoom, zoom)), disc, np.random.default_rng(0)) > 0.5).sum()
        for zoom in (0.8, 1.2)
    )
    assert large / small == pytest.approx((1.2 / 0.8) ** 2, rel=0.1)


def test_findings_change_the_lungs_where_they_belong() -> None:
    middle = slice(16, 48)
    for seed in range(8):
        normal = chest_of("normal", seed)
        changed = {kind: np.abs(chest_of(kind, seed) - normal)[:, 4:60] for kind in CLASSES}
        assert changed["normal"].max() == 0
        assert changed["nodule"][middle].max() > 0.1
        # Fluid stands at the bottom of a lung; air rises to its top.
        assert changed["effusion"][34:52].sum() > changed["effusion"][8:26].sum()
        assert changed["pneumothorax"][8:34].sum() > 0


def test_noise_is_correlated_by_the_grain() -> None:
    def empty(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.ones_like(x) * (np.abs(x) < 0.9), np.zeros_like(y)

    def neighbours(grain: float) -> float:
        film = take_film(replace(PLAIN, noise=0.03, grain=grain), empty, np.random.default_rng(0))[16:48, 16:48]
        return float(np.corrcoef(film[:, :-1].ravel(), film[:, 1:].ravel())[0, 1])

    assert abs(neighbours(0.0)) < 0.1
    assert neighbours(2.0) > 0.8
