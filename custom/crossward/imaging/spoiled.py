"""Films that no model should be trusted on: the wrong part of the body, an inverted, a blurred, an empty film."""

from __future__ import annotations

import numpy as np
from scipy.ndimage import gaussian_filter

from crossward.imaging.anatomy import Array, bump, draw_chest, draw_finding, draw_person, ellipse, inside
from crossward.imaging.scanner import Scanner, take_film

KINDS = ("wrong-anatomy", "inverted", "blurred", "empty")

# Fingers, thumb last: where each starts on the palm (x, y), its direction in degrees from straight up, its length.
FINGERS = (
    (-0.27, -0.02, -14.0, 0.62),
    (-0.1, -0.1, -4.0, 0.74),
    (0.08, -0.09, 5.0, 0.7),
    (0.24, 0.0, 14.0, 0.55),
    (-0.28, 0.42, -52.0, 0.6),
)


def spoiled_film(kind: str, *, scanner: Scanner, rng: np.random.Generator) -> Array:
    """Draw one spoiled film as this scanner would have taken it."""
    if kind == "wrong-anatomy":
        return take_film(scanner, draw_hand if rng.random() < 0.5 else draw_skull, rng)
    if kind == "empty":
        return take_film(scanner, _nothing, rng)
    person, finding = draw_person(rng), draw_finding("normal", rng)
    film = take_film(scanner, lambda x, y: draw_chest(person, finding, x, y), rng)
    if kind == "inverted":
        return 1 - film
    moved: Array = gaussian_filter(film, (scanner.rows * rng.uniform(0.06, 0.1), scanner.columns * 0.04))
    return moved


def draw_hand(x: Array, y: Array) -> tuple[Array, Array]:
    """A schematic hand: palm, five rays of bones with gaps at the joints, wrist and forearm."""
    palm = inside(ellipse(x, y, (-0.02, 0.24), (0.4, 0.42)), 0.02)
    wrist = inside(np.maximum(np.abs(x) - 0.25, 0.45 - y), 0.03)
    flesh = np.maximum(palm, wrist)
    bone = 0.5 * inside(ellipse(np.abs(x), y, (0.1, 0.62), (0.09, 0.09)), 0.015)
    bone += 0.6 * inside(np.abs(np.abs(x) - 0.12) - 0.07, 0.015) * inside(0.75 - y, 0.015)
    for start_x, start_y, degrees, length in FINGERS:
        turn = np.deg2rad(degrees)
        along = (x - start_x) * np.sin(turn) - (y - start_y) * np.cos(turn)
        aside = (x - start_x) * np.cos(turn) + (y - start_y) * np.sin(turn)
        sleeve = np.maximum(np.abs(aside) - 0.085, np.abs(along - length / 2) - length / 2)
        flesh = np.maximum(flesh, inside(sleeve, 0.02))
        reach = along / np.float32(length) + 0.55
        joints = 1 - bump((reach / 0.42 - np.round(reach / 0.42)).astype(np.float32), 0.06)
        waist = 0.034 + 0.018 * np.square(np.cos(np.pi * reach / 0.42))
        bone += 0.6 * inside(np.abs(aside) - waist, 0.01) * inside(np.abs(reach - 0.75) - 0.75, 0.02) * joints
    return (0.45 * flesh).astype(np.float32), (bone * flesh).astype(np.float32)


def draw_skull(x: Array, y: Array) -> tuple[Array, Array]:
    """A schematic skull from the front: vault, eye sockets, nose, jaw and teeth."""
    vault = ellipse(x, y, (0.0, -0.15), (0.62, 0.7))
    jaw = ellipse(x, y, (0.0, 0.42), (0.4, 0.45))
    head = np.maximum(inside(vault, 0.02), inside(jaw, 0.02))
    bone = 0.3 * head + 0.5 * bump(vault + 0.04, 0.03) * inside(y - 0.3, 0.05)
    bone += 0.3 * bump(jaw + 0.05, 0.04) * inside(0.35 - y, 0.04)
    across = np.abs(x)
    bone -= 0.28 * inside(ellipse(across, y, (0.24, 0.02), (0.16, 0.13)), 0.015)
    bone += 0.25 * bump(ellipse(across, y, (0.24, 0.02), (0.17, 0.14)), 0.018)
    bone -= 0.26 * inside(ellipse(x, y, (0.0, 0.24), (0.07, 0.14)), 0.015)
    teeth = np.square(np.cos(np.pi * x / 0.075)) * inside(across - 0.24, 0.015)
    bone += 0.4 * teeth * inside(np.abs(y - 0.55) - 0.09, 0.01) * (1 - bump(y - 0.55, 0.012))
    neck = inside(np.maximum(across - 0.24, 0.5 - y), 0.03)
    soft = 0.5 * np.maximum(np.maximum(inside(vault - 0.04, 0.03), inside(jaw - 0.05, 0.03)), neck)
    return soft.astype(np.float32), np.maximum(bone, 0).astype(np.float32)


def _nothing(x: Array, y: Array) -> tuple[Array, Array]:
    """An exposure with nobody in the beam: a faint table edge at most."""
    return (0.01 * inside(0.9 - y, 0.01)).astype(np.float32), np.zeros_like(x)
