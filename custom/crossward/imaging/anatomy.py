"""Computer-drawn chests: how much of the beam soft tissue and bone take away, point by point.

Nothing here is a patient. A chest is a handful of numbers drawn at random; the drawing is a set of soft-edged
shapes in body coordinates (x to the right of the film, y downwards, the trunk about from -1 to 1), so a scanner
may look at the same chest through its own geometry and at its own resolution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]

CLASSES = ("normal", "nodule", "effusion", "pneumothorax")

HILUM_X, HILUM_Y = 0.17, 0.02
LUNG_X, LUNG_Y = 0.42, 0.06
AIR = 0.62


@dataclass(frozen=True)
class Chest:
    """The build of one made-up person; lengths in body coordinates.

    Attributes:
        domes: height of the diaphragm, image left and right.
        heart: half its width, half its height, and how far it lies to the image's right.
        vessels: number of branches of a lung's vessels, their phase and strength.
        breast: density of the breasts' shadow, 0 for none.
        gas: air in the stomach, 0 for none.
        arms: how strongly the arms show beside the trunk.
    """

    thickness: float
    lung_width: float
    lung_height: float
    domes: tuple[float, float]
    heart: tuple[float, float, float]
    aorta: float
    rib_spacing: float
    rib_slope: float
    rib_phase: float
    rib_strength: float
    vessels: tuple[float, float, float]
    clavicle: float
    shoulder: float
    breast: float
    gas: float
    arms: float


@dataclass(frozen=True)
class Finding:
    """What is to be seen: its kind, side (-1 image left, 1 image right), extent and strength from 0 to 1, and nodules.

    A nodule is (side, across, down, radius): across and down in units of the lung's half-axes, from its middle.
    """

    kind: str
    side: int
    extent: float
    strength: float
    nodules: tuple[tuple[int, float, float, float], ...] = ()


def draw_person(rng: np.random.Generator) -> Chest:
    """Draw the build of one made-up person."""
    tall = rng.normal(0, 1)
    return Chest(
        thickness=float(rng.uniform(0.92, 1.12)),
        lung_width=float(0.325 + 0.02 * rng.normal()),
        lung_height=float(0.76 + 0.03 * tall),
        domes=(float(0.38 + 0.04 * rng.normal()), float(0.43 + 0.04 * rng.normal())),
        heart=(float(rng.uniform(0.28, 0.36)), float(rng.uniform(0.25, 0.3)), float(rng.uniform(0.08, 0.14))),
        aorta=float(rng.uniform(0.06, 0.12)),
        rib_spacing=float(rng.uniform(0.155, 0.185)),
        rib_slope=float(rng.uniform(0.25, 0.6)),
        rib_phase=float(rng.uniform(0, 0.4)),
        rib_strength=float(rng.uniform(0.75, 1.2)),
        vessels=(float(rng.integers(6, 11)), float(rng.uniform(0, 6.28)), float(rng.uniform(0.5, 1.0))),
        clavicle=float(rng.uniform(-0.05, 0.2)),
        shoulder=float(rng.uniform(-0.04, 0.06)),
        breast=float(max(0.0, rng.uniform(-0.12, 0.12))),
        gas=float(max(0.0, rng.uniform(-0.6, 0.6))),
        arms=float(rng.uniform(0, 1)),
    )


def draw_finding(kind: str, rng: np.random.Generator) -> Finding:
    """Draw side, size, place and strength of a finding of the given class."""
    side = -1 if rng.random() < 0.5 else 1
    nodules = []
    if kind == "nodule":
        for _ in range(int(rng.integers(1, 4))):
            angle, reach = rng.uniform(0, 2 * np.pi), np.sqrt(rng.uniform(0.02, 0.4))
            across, down = 0.1 + reach * np.cos(angle), -0.15 + 0.75 * reach * np.sin(angle)
            if side > 0 and down > -0.15:
                across = max(across, 0.35)  # Not behind the heart, where nobody could see it.
            nodules.append((side, float(across), float(down), float(rng.uniform(0.105, 0.155))))
            side = -side if rng.random() < 0.4 else side
    return Finding(kind, side, float(rng.uniform(0, 1)), float(rng.uniform(0, 1)), tuple(nodules))


def inside(distance: Array, softness: float) -> Array:
    """Turn a signed distance (negative inside) into a soft-edged mask."""
    ramp = np.clip(0.5 - distance * np.float32(0.25 / softness), 0, 1)
    mask: Array = ramp * ramp * (3 - 2 * ramp)
    return mask


def bump(distance: Array, width: float) -> Array:
    """A Gaussian ridge of the given width along distance zero."""
    ridge: Array = np.exp(np.square(distance * np.float32(1 / width)) * np.float32(-0.5))
    return ridge


def ellipse(x: Array, y: Array, centre: tuple[float, float], axes: tuple[float, float]) -> Array:
    """Signed distance (about, in body coordinates) to an ellipse's edge."""
    radius = np.sqrt(np.square((x - centre[0]) / axes[0]) + np.square((y - centre[1]) / axes[1]))
    distance: Array = (radius - 1) * min(axes)
    return distance


def draw_chest(chest: Chest, finding: Finding, x: Array, y: Array) -> tuple[Array, Array]:
    """Draw a chest with a finding.

    Args:
        chest: the person's build.
        finding: what is to be seen.
        x: body coordinate to the right of every pixel.
        y: body coordinate downwards of every pixel.

    Returns:
        What soft tissue and what bone take from the beam, each of the shape of ``x``.
    """
    across = np.abs(x)
    trunk = 0.17 + 0.78 * inside(0.1 * across - y - 0.8 - chest.shoulder, 0.055) - 0.05 * bump(y - 0.3, 0.4)
    ratio = across / trunk
    body = inside((ratio - 1) * trunk, 0.012)
    soft = body * chest.thickness * (0.45 + 0.55 * np.sqrt(np.clip(1 - ratio * ratio, 0, 1)))

    heart_width, heart_height, heart_x = chest.heart
    lean = x - heart_x - 0.25 * (y - 0.22)
    heart = inside(ellipse(lean, y, (0.0, 0.24), (heart_width, heart_height)), 0.02)
    middle = inside(across - 0.12 - 0.05 * np.clip(y, -0.5, 1), 0.02)
    knob = inside(ellipse(x, y, (0.11, -0.27), (chest.aorta, 0.1)), 0.015)
    solid = 1 - (1 - 0.9 * heart) * (1 - middle) * (1 - 0.8 * knob)

    air = np.zeros_like(soft)
    marks = np.zeros_like(soft)
    for side in (-1, 1):
        field, streaks, fluid = _lung(chest, finding, x, y, side)
        air += field * (1 - solid)
        marks += streaks
        soft += fluid * 0.9 * (1 - solid)
    soft -= AIR * air
    soft += marks * (1 - solid)

    windpipe = inside(np.abs(x - 0.015) - 0.045, 0.012) * inside(y + 0.22, 0.03) * body
    soft -= 0.2 * windpipe
    if chest.gas > 0.05:
        bubble = inside(ellipse(x, y, (0.36, chest.domes[1] + 0.2), (0.17, 0.1)), 0.02)
        soft -= 0.7 * chest.gas * bubble
    if chest.breast > 0.01:
        for side in (-1, 1):
            soft += chest.breast * inside(ellipse(x, y, (side * 0.47, 0.36), (0.36, 0.27)), 0.03) * body
    return np.maximum(soft, 0), _skeleton(chest, x, y, body)


def _lung(chest: Chest, finding: Finding, x: Array, y: Array, side: int) -> tuple[Array, Array, Array]:
    """One lung: air, the markings in it, and whatever a finding puts in its place."""
    outward = side * x
    dome = chest.domes[0 if side < 0 else 1]
    edge = ellipse(outward, y, (LUNG_X, LUNG_Y), (chest.lung_width, chest.lung_height))
    floor = y - dome - 1.2 * np.square(outward - 0.3)
    field = inside(edge, 0.014) * inside(floor, 0.012)

    spokes, phase, strength = chest.vessels
    dx, dy = outward - HILUM_X, y - HILUM_Y
    reach = np.hypot(dx, dy)
    turn = np.arctan2(dy, dx)
    wave = np.cos(spokes * turn + phase * (1 + side) + 5 * reach)
    streaks = 0.16 * strength * np.square(np.square(np.clip(wave, 0, 1))) * np.exp(-reach / 0.28)
    streaks += 0.2 * bump(reach, 0.075)
    marks = streaks * field
    fluid = np.zeros_like(field)

    solid = np.zeros_like(field)
    for at, u, v, radius in finding.nodules:
        if at == side:
            centre = (LUNG_X + chest.lung_width * u, LUNG_Y + chest.lung_height * v)
            solid = np.maximum(solid, inside(ellipse(outward, y, centre, (radius, radius)), 0.02))
    marks += (0.5 + 0.2 * finding.strength) * field * solid
    if finding.side == side and finding.kind == "effusion":
        level = dome - 0.06 - 0.34 * finding.extent
        wall = LUNG_X + chest.lung_width
        surface = level - 0.2 * np.exp(np.clip(outward - wall, -2, 0.2) / 0.09)
        fluid = (0.45 + 0.2 * finding.strength) * field * inside(surface - y, 0.018)
        marks *= 1 - 0.7 * inside(surface - y, 0.018)
    if finding.side == side and finding.kind == "pneumothorax":
        shrink = 0.78 - 0.26 * finding.extent
        rim = ellipse(
            outward,
            y,
            (LUNG_X - 0.8 * (1 - shrink) * chest.lung_width, LUNG_Y + 0.9 * (1 - shrink) * chest.lung_height),
            (chest.lung_width * shrink, chest.lung_height * shrink),
        )
        lung = inside(rim, 0.012)
        marks = marks * lung + field * (0.16 + 0.1 * finding.strength) * (lung + bump(rim, 0.012))
        field = field * (1 + 0.2 * (1 - lung))
    return field, marks, fluid


def _skeleton(chest: Chest, x: Array, y: Array, body: Array) -> Array:
    """Ribs seen from behind and in front, spine, collarbones and shoulders."""
    across = np.abs(x)
    cage = inside(ellipse(x, y, (0.0, 0.05), (0.8, 0.86)), 0.02) * inside(y - 0.62, 0.06)
    back = (y - chest.rib_slope * np.square(across - 0.15)) / chest.rib_spacing + chest.rib_phase
    front = (y + 0.75 * across - 0.4 * np.square(across)) / (chest.rib_spacing * 1.12) + chest.rib_phase
    behind = bump((back - np.round(back)).astype(np.float32), 0.14)
    before = bump((front - np.round(front)).astype(np.float32), 0.17) * inside(0.3 - across, 0.05)
    rim = bump(ellipse(x, y, (0.0, 0.05), (0.77, 0.84)), 0.02) * inside(y - 0.55, 0.05)
    bone = chest.rib_strength * cage * (0.17 * behind * inside(0.1 - across, 0.02) + 0.07 * before + 0.12 * rim)

    vertebra = 0.75 + 0.25 * np.cos(2 * np.pi * y / 0.15)
    bone += 0.26 * inside(across - 0.075, 0.012) * vertebra
    collar = y + 0.6 + chest.clavicle * (across - 0.1) - 0.1 * np.sin(6 * across)
    bone += 0.3 * bump(collar.astype(np.float32), 0.026) * inside(np.abs(across - 0.43) - 0.34, 0.02)
    blade = inside(ellipse(across - 0.25 * (y + 0.3), y, (0.72, -0.3), (0.1, 0.3)), 0.03)
    head = inside(ellipse(across, y, (0.87, -0.52), (0.11, 0.11)), 0.02)
    shaft = inside(np.abs(across - 0.93 - 0.05 * y) - 0.05, 0.015) * inside(-0.5 - y, 0.02)
    bone += 0.12 * blade + 0.3 * head + 0.3 * chest.arms * shaft
    drawn: Array = (bone * body).astype(np.float32)
    return drawn
