"""Made-up scanners: how a beam that passed a phantom becomes the stored pixels of one hospital.

Makers and models do not exist. What differs between them is what differs between real installations: beam quality
(bone against soft tissue), scatter, sharpness, noise and its grain, grid lines, the maker's local processing, tone
curve, positioning and magnification, collimation, and how the numbers are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter, uniform_filter

from crossward.imaging.anatomy import Array, inside

Drawing = Callable[[Array, Array], tuple[Array, Array]]


@dataclass(frozen=True)
class Scanner:
    """One made-up scanner and the way its hospital uses it.

    Attributes:
        rows: height of the film in pixels.
        columns: width of the film in pixels.
        spacing: millimetres per pixel, down and across.
        bits: bits stored per pixel.
        inverted: stores MONOCHROME1 (high values are dark).
        slope: rescale slope.
        intercept: rescale intercept.
        zoom: magnification down and across; 1 shows the trunk from -1 to 1.
        tilt: usual rotation of the person on the film, degrees.
        shift: usual displacement, across and down, in body coordinates.
        bone: weight of bone against soft tissue; falls with the tube voltage.
        scatter: share of the beam that arrives scattered.
        noise: noise of the detector, as a share of the full signal.
        grain: correlation length of the noise, pixels.
        lines: strength of grid lines.
        line_period: their period, pixels.
        blur: unsharpness, pixels.
        edge: strength of edge enhancement.
        edge_radius: its radius, pixels.
        flatten: 0 keeps large-scale brightness, 1 removes it (local contrast).
        tone: shape of the tone curve.
        steepness: how strong the curve bends.
        heel: brightness falling off across and down.
        shutter: shape of the collimation.
        margin: how far the shutter reaches into the film, share of half the film.
        shutter_value: brightness of the shutter, 0 black to 1 white.
        marker: corner of the side marker, across and down, each -1 or 1; (0, 0) for none.
    """

    maker: str
    model: str
    software: str
    detector: Literal["DIRECT", "SCINTILLATOR", "STORAGE", "FILM"]
    kvp: int
    view: Literal["PA", "AP"]
    rows: int
    columns: int
    spacing: tuple[float, float]
    bits: int
    inverted: bool = False
    slope: float = 1.0
    intercept: float = 0.0
    zoom: tuple[float, float] = (1.0, 1.0)
    tilt: float = 0.0
    shift: tuple[float, float] = (0.0, 0.0)
    bone: float = 1.0
    scatter: float = 0.1
    noise: float = 0.01
    grain: float = 1.0
    lines: float = 0.0
    line_period: float = 7.0
    blur: float = 0.7
    edge: float = 0.0
    edge_radius: float = 4.0
    flatten: float = 0.0
    tone: Literal["linear", "film", "gamma"] = "linear"
    steepness: float = 1.0
    heel: tuple[float, float] = (0.0, 0.0)
    shutter: Literal["none", "rectangle", "circle"] = "none"
    margin: float = 0.0
    shutter_value: float = 0.0
    marker: tuple[int, int] = (0, 0)

    @property
    def modality(self) -> Literal["CR", "DX"]:
        """Computed radiography for storage plates, the only kind that may rescale; digital X-ray otherwise."""
        return "CR" if self.detector == "STORAGE" else "DX"


def take_film(scanner: Scanner, draw: Drawing, rng: np.random.Generator) -> Array:
    """Expose one film: brightness from 0 (black) to 1 (white), bones bright.

    Args:
        scanner: the scanner and its habits.
        draw: what lies on the table, as a function of body coordinates.
        rng: the film's own positioning, exposure and noise.
    """
    x, y = _body_coordinates(scanner, rng)
    soft, bone = draw(x, y)
    depth = gaussian_filter(soft * 1.6 + bone * (1.6 * scanner.bone), scanner.blur)
    return _process(scanner, _expose(scanner, depth, rng), rng)


def store(scanner: Scanner, film: Array) -> NDArray[np.uint16] | NDArray[np.uint8]:
    """Turn brightness into the numbers that this scanner stores."""
    top = 2**scanner.bits - 1
    values = np.clip(np.rint(film.astype(np.float64) * top), 0, top)
    if scanner.inverted:
        values = top - values
    stored: NDArray[np.uint16] | NDArray[np.uint8] = values.astype(np.uint8 if scanner.bits <= 8 else np.uint16)
    return stored


def _film_coordinates(scanner: Scanner) -> tuple[Array, Array]:
    across = np.linspace(-1, 1, scanner.columns, dtype=np.float32)
    down = np.linspace(-1, 1, scanner.rows, dtype=np.float32)
    x, y = np.meshgrid(across, down)
    return x, y


def _body_coordinates(scanner: Scanner, rng: np.random.Generator) -> tuple[Array, Array]:
    """Where every pixel lies in the body: the hospital's habit, and this film's own positioning."""
    x, y = _film_coordinates(scanner)
    size = 1 + 0.03 * rng.normal()
    x = x / (scanner.zoom[1] * size * (1 + 0.02 * rng.normal())) - scanner.shift[0] - 0.025 * rng.normal()
    y = y / (scanner.zoom[0] * size * (1 + 0.02 * rng.normal())) - scanner.shift[1] - 0.025 * rng.normal()
    turn = np.deg2rad(scanner.tilt + 1.5 * rng.normal())
    c, s = np.cos(turn), np.sin(turn)
    return (c * x + s * y).astype(np.float32), (c * y - s * x).astype(np.float32)


def _expose(scanner: Scanner, depth: Array, rng: np.random.Generator) -> Array:
    """Beam through the phantom onto the detector, and the logarithm of what arrives."""
    beam = np.exp(-depth)
    if scanner.scatter > 0:
        beam = (1 - scanner.scatter) * beam + scanner.scatter * _smooth(beam, scanner.rows // 4)
    grain = rng.standard_normal(beam.shape, dtype=np.float32)
    if scanner.grain > 0.3:
        grain = gaussian_filter(grain, scanner.grain)
        grain /= grain.std()
    beam = beam + scanner.noise * np.sqrt(beam) * grain
    density: Array = -np.log(np.maximum(beam, 0.02)).astype(np.float32)
    return density


def _process(scanner: Scanner, density: Array, rng: np.random.Generator) -> Array:
    """The maker's processing: auto-exposure, local contrast, edges, tone curve; then shutter and marker."""
    x, y = _film_coordinates(scanner)
    low, high = np.percentile(_smooth(density, 7)[::2, ::2], (4, 97))
    film = (density - low) / max(float(high - low), 0.6)
    film = 0.08 + 0.84 * film
    if scanner.flatten > 0:
        film += scanner.flatten * (0.5 - _smooth(film, scanner.rows // 3))
    if scanner.edge > 0:
        film += scanner.edge * (film - gaussian_filter(film, scanner.edge_radius))
    film += 0.5 * (scanner.heel[0] * x + scanner.heel[1] * y)
    if scanner.lines > 0:
        phase = 2 * np.pi * (np.arange(scanner.columns) / scanner.line_period + rng.uniform())
        film += scanner.lines * np.cos(phase)
    # No two exposures are alike: contrast, brightness and gamma vary, so that they say little about the finding.
    film = (film - 0.5) * (1 + 0.14 * rng.normal()) + 0.5 + 0.06 * rng.normal()
    film = _tone(scanner, np.clip(film, 0, 1) ** np.float32(np.exp(0.1 * rng.normal())))
    if scanner.shutter != "none":
        film = scanner.shutter_value + (film - scanner.shutter_value) * _opening(scanner, x, y, rng)
    if scanner.marker != (0, 0):
        film = np.maximum(film, 0.95 * _marker(scanner, x, y))
    finished: Array = np.clip(film, 0, 1).astype(np.float32)
    return finished


def _smooth(picture: Array, size: int) -> Array:
    """A wide blur in constant time: two box filters."""
    blurred: Array = uniform_filter(uniform_filter(picture, size, mode="nearest"), size, mode="nearest")
    return blurred


def _tone(scanner: Scanner, film: Array) -> Array:
    if scanner.tone == "gamma":
        bent: Array = film**scanner.steepness
        return bent
    if scanner.tone == "film":
        k = scanner.steepness
        low, high = 1 / (1 + np.exp(k / 2)), 1 / (1 + np.exp(-k / 2))
        curve: Array = (1 / (1 + np.exp(-k * (film - 0.5))) - low) / (high - low)
        return curve
    return film


def _opening(scanner: Scanner, x: Array, y: Array, rng: np.random.Generator) -> Array:
    """Where the collimator lets the beam through."""
    reach = 1 - scanner.margin * (1 + 0.3 * rng.uniform(-1, 1))
    if scanner.shutter == "circle":
        return inside(np.hypot(x, y) - reach * 1.12, 0.008)
    return inside(np.maximum(np.abs(x), np.abs(y)) - reach, 0.008)


def _marker(scanner: Scanner, x: Array, y: Array) -> Array:
    """A lead letter L in one corner."""
    u, v = x - 0.84 * scanner.marker[0], y - 0.84 * scanner.marker[1]
    stem = (np.abs(u + 0.04) < 0.018) & (np.abs(v) < 0.075)
    foot = (np.abs(u) < 0.055) & (np.abs(v - 0.06) < 0.018)
    letter: Array = (stem | foot).astype(np.float32)
    return letter
