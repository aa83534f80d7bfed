from __future__ import annotations

import itertools
import json
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from crossward.federation.errors import BadInput
from crossward.imaging import folder
from crossward.imaging.dicom.film import read_image
from crossward.imaging.dicom.scans import Frame, Table, Window
from crossward.imaging.refusals import Reason, Refused
from crossward.imaging.rules.site import Step
from crossward.imaging.transforms.pipeline import Fitted, Fitter, check_step, check_steps, digest, pipeline


def step(name: str, **options: Any) -> Step:
    return Step(name=name, options=options)


def frame(values: Any, **facts: Any) -> Frame:
    values = np.asarray(values, dtype=np.float32)
    return Frame(**{"index": 0, "values": values, "valid": None, "low": 0.0, "high": 4095.0, **facts})


def noise(seed: int, shape: tuple[int, ...] = (16, 16)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 4096, shape).astype(np.float32)


def picture(values: Any, *steps: Step, **facts: Any) -> np.ndarray:
    """A square frame as it is, by these steps."""
    values = np.asarray(values, dtype=np.float32)
    return pipeline(steps, size=values.shape[0], channels=1)(frame(values, **facts))[0]


@pytest.mark.parametrize("photometric", ["MONOCHROME1", "MONOCHROME2"])
@pytest.mark.parametrize("shape", [(40, 33), (12, 20)])
def test_without_steps_a_file_looks_as_in_a_folder_without_rules(tmp_path, write_dicom, photometric, shape) -> None:
    stored = np.random.default_rng(0).integers(0, 4096, shape).astype(np.uint16)
    tags = {"BitsStored": 12, "RescaleSlope": 2, "RescaleIntercept": -1000, "PhotometricInterpretation": photometric}
    film = read_image(write_dicom(tmp_path / "a.dcm", stored, **tags))
    same = frame(stored * 2.0 - 1000, low=-1000.0, high=7190.0, inverted=photometric == "MONOCHROME1")
    for size in (16, 64):
        made = pipeline([], size=size, channels=1)(same)
        np.testing.assert_allclose(made, folder.fit_square(size)(film).numpy(), atol=2e-6)


def test_a_window_of_the_rule_and_of_the_file() -> None:
    values = [[0, 1, 819, 4095]] * 4
    wanted = [0, 1 / 4095, 0.2, 1]
    by_rule = step("window", centre=2048, width=4096)
    np.testing.assert_allclose(picture(values, by_rule)[0], wanted, atol=1e-6)
    windows = (Window(5, 1), Window(2048, 4096))
    np.testing.assert_allclose(picture(values, step("window", file=1), windows=windows)[0], wanted, atol=1e-6)
    np.testing.assert_array_equal(picture(values, step("window", file=0), windows=windows)[0], [0, 0, 1, 1])
    with pytest.raises(Refused) as refused:
        picture(values, step("window", file=2), windows=windows)
    assert refused.value.reason is Reason.TRANSFORM


def test_a_table_comes_before_windows() -> None:
    table = Table(0, np.array([0.5, 0.25], np.float32))
    facts = {"table": table, "windows": (Window(2048, 4096),)}
    assert picture([[0, 1], [2, 0]], step("window", file=0), **facts).tolist() == [[0.5, 0.25], [0.25, 0.5]]
    np.testing.assert_allclose(picture([[0, 819], [0, 0]], step("window", file=1), **facts)[0], [0, 0.2], atol=1e-6)


@pytest.mark.parametrize(
    "chosen", [step("stored_range"), step("window", centre=1000, width=1500), step("window", file=0)], ids=str
)
def test_the_files_own_units_are_those_before_turning(chosen: Step) -> None:
    facts = {"windows": (Window(1000, 1500, "LINEAR_EXACT"),)}
    turned = picture(noise(1), chosen, inverted=True, **facts)
    np.testing.assert_allclose(turned, 1 - picture(noise(1), chosen, **facts), atol=1e-6)


@pytest.mark.parametrize(
    "chosen",
    [
        step("percentile", low=5, high=90),
        step("zscore"),
        step("nyul", scale=[0, 0.3, 1], landmarks=[1, 50, 99]),
        step("nyul", scale=[0, 0.3, 1], landmarks=[1, 50, 99], foreground=True),
    ],
    ids=str,
)
def test_an_inverted_frame_is_turned_before_its_statistics(chosen: Step) -> None:
    values = noise(1) ** 2 / 4096
    turned = picture(4095 - values, chosen, inverted=True)
    np.testing.assert_allclose(turned, picture(values, chosen), atol=1e-5)
    assert np.abs(turned - picture(4095 - values, chosen)).max() > 0.1


def test_a_body_threshold_of_an_inverted_frame_is_in_the_files_units() -> None:
    values = np.full((40, 40), 4000.0)
    values[10:20, 5:25] = 3700
    cropped = pipeline([step("crop_body", threshold=3800, margin=0)], size=20, channels=1)(frame(values, inverted=True))
    # The dense part is 10 x 20 and fills the width.
    np.testing.assert_allclose(cropped[0, 5:15], 395 / 4095, rtol=1e-5)
    assert not cropped[0, :5].any()


@pytest.mark.parametrize(
    "steps",
    [
        [],
        [step("window", centre=2000, width=3000)],
        [step("percentile")],
        [step("zscore")],
        [step("nyul", scale=[0, 0.5, 1], landmarks=[1, 50, 99])],
        [step("denoise"), step("percentile")],
        [step("percentile"), step("denoise", by="gaussian", pixels=2)],
        [step("bias_field", order=1), step("percentile")],
        [step("percentile"), step("bias_field", order=1)],
    ],
    ids=lambda steps: "+".join(chosen.name for chosen in steps) or "none",
)
@pytest.mark.parametrize("junk", [60000.0, -60000.0, float("nan"), float("inf")])
def test_padding_ends_as_0_and_decides_nothing(steps: list[Step], junk: float) -> None:
    rows, columns = np.indices((32, 32))
    body = np.hypot(rows - 15, columns - 15) < 14
    values = np.where(body, 1500 + noise(2, (32, 32)) / 16, 50 + noise(3, (32, 32)) / 100)
    valid = np.ones((32, 32), bool)
    valid[:7], valid[:, 25:] = False, False
    pictures = []
    for filled in (0.0, junk):
        values[~valid] = filled
        pictures.append(picture(values, *steps, valid=valid.copy()))
    np.testing.assert_array_equal(pictures[0], pictures[1])
    assert not pictures[0][~valid].any()
    assert pictures[0][valid & body].mean() > 0.2


@pytest.mark.parametrize("chosen", [step("percentile"), step("zscore"), step("nyul", landmarks=[1, 99], scale=[0, 1])])
def test_a_picture_beside_padding_looks_as_it_does_alone(chosen: Step) -> None:
    values, valid = noise(8, (16, 16)), np.zeros((16, 16), bool)
    valid[4:12, :8] = True
    np.testing.assert_array_equal(
        picture(values, chosen, valid=valid)[valid], picture(values[4:12, :8], chosen).ravel()
    )


def test_statistics_are_taken_from_luminance_and_colours_are_treated_alike() -> None:
    colour = np.random.default_rng(3).random((12, 12, 3), dtype=np.float32)
    made = pipeline([step("percentile", low=10, high=90)], size=12, channels=3)(frame(colour, low=0.0, high=1.0))
    low, high = np.percentile(colour @ np.array([0.299, 0.587, 0.114]), (10, 90))
    np.testing.assert_allclose(made, np.clip((colour.transpose(2, 0, 1) - low) / (high - low), 0, 1), atol=1e-5)


def test_grey_becomes_three_equal_channels_and_colour_is_refused_for_grey() -> None:
    grey = pipeline([], size=16, channels=3)(frame(noise(4)))
    assert grey.shape == (3, 16, 16)
    assert (grey[0] == grey[1]).all()
    assert (grey[0] == grey[2]).all()
    assert grey[0].std() > 0
    with pytest.raises(Refused) as refused:
        pipeline([], size=16, channels=1)(frame(np.zeros((16, 16, 3))))
    assert refused.value.reason is Reason.COLOUR


def test_steps_are_done_in_their_order() -> None:
    values = np.zeros((30, 20))
    values[5:15, 5:15] = 3000
    values[25:28, 1:4] = 100
    cropped = pipeline([step("crop_body", margin=0, threshold=1000)], size=10, channels=1)(frame(values))
    np.testing.assert_allclose(cropped, 3000 / 4095, rtol=1e-6)
    square = pipeline([step("square", by="crop")], size=20, channels=1)(frame(values))
    np.testing.assert_array_equal(square[0], picture(values[5:25]))


def test_resampling_gives_square_millimetres() -> None:
    made = pipeline([step("resample", spacing=[1, 1])], size=16, channels=1)(
        frame(noise(5, (8, 16)), spacing=(2.0, 1.0))
    )
    assert made[0, 0].any()
    assert made[0, 15].any()
    with pytest.raises(Refused) as refused:
        pipeline([step("resample", spacing=[1, 1])], size=16, channels=1)(frame(noise(5)))
    assert refused.value.reason is Reason.GEOMETRY


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"values": np.full((8, 8), np.nan, np.float32)}, Reason.TRANSFORM),
        ({"values": np.full((8, 8), np.inf, np.float32)}, Reason.TRANSFORM),
        ({"valid": np.zeros((8, 8), bool)}, Reason.TRANSFORM),
        ({"valid": np.ones((8, 9), bool)}, Reason.TRANSFORM),
        ({"values": np.zeros((8, 8, 4), np.float32)}, Reason.TRANSFORM),
        ({"values": np.zeros((0, 8), np.float32)}, Reason.TRANSFORM),
        ({"low": 5.0, "high": 5.0}, Reason.RESCALE),
        ({"low": 0.0, "high": float("nan")}, Reason.RESCALE),
        ({"values": np.zeros((1, 100), np.float32)}, Reason.TOO_NARROW),
    ],
)
def test_a_frame_without_a_picture_is_refused(broken: dict[str, Any], reason: Reason) -> None:
    with pytest.raises(Refused) as refused:
        pipeline([], size=8, channels=3)(replace(frame(np.zeros((8, 8))), **broken))
    assert refused.value.reason is reason


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (step("percentil"), "there is no transform percentil; did you mean percentile?"),
        (step("xyz"), "choose from stored_range, window,"),
        (step("percentile", lo=3), "percentile has no option lo; did you mean low?"),
        (step("stored_range", bits=3), "stored_range has no option bits; it takes none"),
        (step("percentile", low=101), "low must be a number from 0 to 100"),
        (step("percentile", low="1"), "low must be a number from 0 to 100"),
        (step("percentile", low=True), "low must be a number from 0 to 100"),
        (step("percentile", low=float("nan")), "low must be a number from 0 to 100"),
        (step("percentile", low=60, high=40), "low must be below high"),
        (step("percentile", foreground="yes"), "foreground must be true or false"),
        (step("window"), "give centre and width, or file"),
        (step("window", centre=3), "give centre and width, or file"),
        (step("window", file=0, width=3), "give either file, or centre and width"),
        (step("window", centre=3, width=0), "width must be a number above 0"),
        (step("window", centre=3, width=0.5), "choose LINEAR_EXACT for less"),
        (step("window", centre=3, width=5, function="LOG"), "function must be one of LINEAR, LINEAR_EXACT, SIGMOID"),
        (step("nyul", landmarks=[50, 1]), "landmarks must be a list of 2 to 99 increasing numbers"),
        (step("nyul", landmarks=[1, 50, 99], scale=[0, 1]), "scale must have as many numbers as landmarks"),
        (step("histogram", bins=1.5), "bins must be a whole number from 2 to 4096"),
        (step("resample"), "give spacing"),
        (step("resample", spacing=1), "spacing must be two numbers"),
        (step("crop_body", threshold="otsu"), "threshold must be a number"),
        (step("square", by="stretch"), "by must be one of pad, crop"),
        (step("denoise", pixels=1.5), "pixels must be a whole number with median"),
        (step("bias_field", order=9), "order must be a whole number from 1 to 5"),
    ],
    ids=lambda value: value.name if isinstance(value, Step) else None,
)
def test_a_wrong_step_is_named_with_what_would_do(wrong: Step, says: str) -> None:
    with pytest.raises(BadInput) as error:
        check_step(wrong)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_steps_that_do_not_go_together() -> None:
    with pytest.raises(BadInput, match="window speaks of the file's own values, which percentile has changed"):
        check_steps([step("percentile"), step("window", file=0)])
    with pytest.raises(BadInput, match="nyul and histogram both learn"):
        check_steps([step("nyul"), step("histogram")])
    check_steps([step("crop_body", threshold="auto"), step("window", file=0), step("nyul"), step("denoise")])


def fitted(steps: list[Step], frames: list[Frame]) -> Fitted:
    fitter = Fitter(steps)
    for one in frames:
        fitter.add(one)
    return fitter.fitted()


@pytest.mark.parametrize("name", ["nyul", "histogram"])
def test_what_is_learned_does_not_depend_on_order_or_process(name: str) -> None:
    steps = [step("window", centre=2000, width=3000), step(name)]
    frames = [frame(noise(seed) ** 0.9) for seed in range(4)]
    results = {fitted(steps, list(order)) for order in itertools.permutations(frames)}
    assert len(results) == 1
    elsewhere, here = Fitter(steps), Fitter(steps)
    for one in frames:
        here.take(pickle.loads(pickle.dumps(elsewhere.summary(one))))
    (result,) = results
    assert here.fitted() == result
    assert Fitted.from_json(json.loads(json.dumps(result.as_json()))) == result
    assert result.images == 4


def test_domains_that_differ_by_gain_and_offset_give_the_same_pictures() -> None:
    steps = [step("nyul", landmarks=[1, 25, 50, 75, 99], foreground=True)]
    first = [frame(noise(seed) ** 2 / 4096) for seed in range(3)]
    second = [replace(one, values=one.values * 2 + 512) for one in first]
    learned = [fitted(steps, domain) for domain in (first, second)]
    np.testing.assert_allclose(learned[0].values, learned[1].values, atol=1e-6)
    for pair in zip(first, second, strict=True):
        pictures = [pipeline(steps, what, size=16, channels=1)(one) for one, what in zip(pair, learned, strict=True)]
        np.testing.assert_allclose(pictures[0], pictures[1], atol=1e-5)


def test_learning_sees_what_the_steps_before_make() -> None:
    frames = [frame(noise(seed)) for seed in range(3)]
    plain = fitted([step("histogram", bins=4)], frames)
    windowed = fitted(
        [step("window", centre=2048, width=2048, function="LINEAR_EXACT"), step("histogram", bins=4)], frames
    )
    np.testing.assert_allclose(plain.values[1:4], [0.25, 0.5, 0.75], atol=0.06)
    # The window cuts off a quarter at either end, and spreads the rest.
    assert windowed.values[0] == 0
    assert windowed.values[4] == 1
    np.testing.assert_allclose(windowed.values[2], 0.5, atol=0.1)
    assert windowed.values[1] < 0.1


def test_a_step_that_learns_needs_what_was_learned() -> None:
    for wrong in (None, Fitted(), Fitted("histogram", (0.0,) * 257, 3), Fitted("nyul", (0.0, 1.0), 3)):
        with pytest.raises(BadInput, match="nyul has not learned"):
            pipeline([step("nyul")], wrong, size=16, channels=1)
    with pytest.raises(BadInput, match="there is none"):
        Fitter([step("nyul")]).fitted()
    nothing = Fitter([step("percentile")])
    assert not nothing.needed
    nothing.add(frame(noise(0)))
    assert nothing.fitted() == Fitted()
    assert not Fitter([step("nyul", landmarks=[1, 99], scale=[0, 1])]).needed
    assert Fitter([step("nyul")]).needed


def test_the_digest_is_of_what_decides_the_picture() -> None:
    steps = [step("percentile", low=1)]
    base = digest(steps, None, 32, 1)
    assert base == digest([Step(name="percentile", options={"high": 99.0, "low": 1.0}, line=12)], Fitted(), 32, 1)
    assert digest([], None, 32, 1) == digest([step("stored_range")], None, 32, 1)
    assert len(base) == 64
    others = [
        digest([step("percentile", low=2)], None, 32, 1),
        digest([step("percentile", foreground=True)], None, 32, 1),
        digest([*steps, step("square", by="crop")], None, 32, 1),
        digest([step("square", by="crop"), *steps], None, 32, 1),
        digest([], None, 32, 1),
        digest(steps, None, 64, 1),
        digest(steps, None, 32, 3),
    ]
    assert len({base, *others}) == len(others) + 1
    nyul = [step("nyul", landmarks=[1, 50, 99])]
    learned = Fitted("nyul", (0.0, 0.4, 1.0), 10)
    assert digest(nyul, learned, 32, 1) == digest(nyul, replace(learned, images=99), 32, 1)
    assert digest(nyul, learned, 32, 1) != digest(nyul, replace(learned, values=(0.0, 0.5, 1.0)), 32, 1)


def test_a_pipeline_travels_to_a_worker() -> None:
    made = pipeline([step("percentile"), step("denoise")], size=16, channels=1)
    again = pickle.loads(pickle.dumps(made))
    np.testing.assert_array_equal(again(frame(noise(7))), made(frame(noise(7))))


INTENSITY = [
    step("stored_range"),
    step("window", centre=100, width=50, function="SIGMOID"),
    step("window", file=0),
    step("percentile", foreground=True),
    step("zscore", spread=2),
    step("nyul", landmarks=[0, 50, 100], scale=[0, 0.2, 1]),
]
SHAPE = [
    step("resample", spacing=[0.7, 1.3]),
    step("resample", spacing=[3, 2], anti_alias=False),
    step("crop_body"),
    step("square", by="crop"),
    step("denoise"),
    step("denoise", by="gaussian", pixels=0.5),
    step("bias_field"),
]


@pytest.mark.parametrize("measured", ["percentile", "zscore"])
def test_a_picture_of_which_a_crop_leaves_only_padding_is_refused(measured: str) -> None:
    """The image is a corner of a wide strip, and the middle of it is cut out."""
    valid = np.zeros((4, 20), dtype=bool)
    valid[:, :3] = True
    make = pipeline([step("square", by="crop"), step(measured)], size=12, channels=1)
    with pytest.raises(Refused, match="not padding"):
        make(frame(np.arange(80, dtype=np.float32).reshape(4, 20), valid=valid))


@settings(max_examples=150)
@given(data=st.data())
def test_whatever_comes_in_a_picture_or_a_refusal_comes_out(data: st.DataObject) -> None:
    height, width = data.draw(st.tuples(st.integers(1, 24), st.integers(1, 24)))
    extent = data.draw(st.sampled_from([1.0, 4095.0, 2.0**127]))
    odd = data.draw(st.sampled_from([[], [], [float("nan")], [float("inf")]]))
    numbers = st.floats(-extent, extent, width=32) | st.sampled_from([0.0, *odd])
    shape = (height, width, 3) if data.draw(st.booleans()) else (height, width)
    values = data.draw(arrays.arrays(np.float32, shape, elements=numbers))
    one = frame(
        values,
        valid=data.draw(st.none() | arrays.arrays(np.bool_, (height, width))),
        low=-extent,
        high=extent,
        inverted=data.draw(st.booleans()),
        spacing=data.draw(st.none() | st.tuples(st.floats(0.01, 10), st.floats(0.01, 10))),
        windows=(Window(40, 400),),
    )
    before = data.draw(st.lists(st.sampled_from(SHAPE), max_size=2))
    after = data.draw(st.lists(st.sampled_from(SHAPE), max_size=1))
    make = pipeline([*before, data.draw(st.sampled_from(INTENSITY)), *after], size=12, channels=3)
    try:
        made = make(one)
    except Refused:
        return
    assert made.shape == (3, 12, 12)
    assert made.dtype == np.float32
    assert np.isfinite(made).all()
    assert made.min() >= 0
    assert made.max() <= 1
    np.testing.assert_array_equal(make(one), made)
