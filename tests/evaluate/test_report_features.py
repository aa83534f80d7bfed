from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from crossward.evaluate.collapse import collapse_facts
from crossward.evaluate.density import uncertainty_facts
from crossward.evaluate.feature_plots import averages, scatter, spectrum
from crossward.evaluate.report import write_report
from crossward.evaluate.report_features import feature_pages

HOSTILE = '<b>North</b> & "sons"'


def made_up(name="North"):
    random = np.random.default_rng(0)
    silhouettes = {"silhouette_class": 0.4321, "silhouette_site": -0.1234, "undefined": {}}
    accuracy = {"robust": 0.75, "related": 0.25, "corrected": 0.625, "fused": 0.875}
    return {
        "collapse": {"images": 40, "sites": {name: collapse_facts(random.normal(size=(40, 6)))}},
        "map": {
            "classes": ["healthy", "nodule"],
            "sites": [name],
            "labels": [0, 1, 0, 1, 0],
            "site_of": [0] * 5,
            "spaces": {"encoder": {"points": random.normal(size=(5, 2)).tolist(), **silhouettes}},
        },
        "masks": {
            "sites": {
                name: {
                    "n": 8,
                    "stage": 4,
                    "kept": 0.4815,
                    "head": accuracy,
                    "auxiliary": {"robust": 1.0, "related": 0.125, "corrected": 0.375, "fused": None},
                }
            }
        },
        "noise": {
            "sigma": 1.5,
            "bins": 20,
            "sites": {name: uncertainty_facts([0.1, 0.2, 0.3], [0.25, 0.8, 0.9], [True, True, False])},
        },
        "gradcam": [
            {
                "site": name,
                "truth": "healthy",
                "predicted": "nodule",
                "uncertainty": 0.7654,
                "warm": True,
                "picture": "gradcam/0/0",
                "overlay": "gradcam/0/0/heat",
            }
        ],
        "left_out": {"South": "no test images"},
        "seconds": 1.0,
    }


PICTURES = {"gradcam/0/0": np.zeros((8, 8), np.uint8), "gradcam/0/0/heat": np.ones((8, 8, 3), np.uint8)}


def read(page):
    """The page as a tree, which it only is if every element is closed in order, and its text."""
    tree = ElementTree.fromstring("<page>" + re.sub(r"(<img[^>]*)>", r"\1/>", page) + "</page>")
    return tree, " ".join(tree.itertext())


def test_the_sections_say_what_the_diagnostics_say(make):
    result = make(diagnostics=made_up())
    tree, text = read(feature_pages(result, PICTURES))
    for words in (
        "75.0 % in round 3, the last and best",
        "nodule, but it is healthy. Uncertainty 0.77",
        "0.20",
        "0.65",
        "0.89",  # 8 of 9 pairs of noised and clean
        "1.00",
        "+0.43",
        "-0.12",
        f"{result['diagnostics']['collapse']['sites']['North']['effective_rank']:.1f} of 6",
        "48.1 %",
        "75.0 %",
        "25.0 %",
        "62.5 %",
        "87.5 %",
        "12.5 %",
        "37.5 %",
        "South: no test images",
    ):
        assert words in text, words
    assert len(tree.findall(".//img")) == 2
    assert "nan" not in re.sub(r"data:image/png;base64,[^\"]*", "", ElementTree.tostring(tree, "unicode")).lower()


def test_names_are_escaped_everywhere(make):
    page = feature_pages(make(names=(HOSTILE, "South"), diagnostics=made_up(HOSTILE)), PICTURES)
    assert "<b>" not in page
    assert '"sons"' not in page.replace("&quot;", "'")
    assert read(page)[1].count(HOSTILE) >= 5


def test_it_is_part_of_the_whole_report(make, tmp_path):
    write_report(tmp_path / "report.html", make(diagnostics=made_up()), None, PICTURES)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    for heading in ("Where the model looked", "How the model sorts the scans", "How fast it learned"):
        assert text.count(f"<h2>{heading}</h2>") == 1


def test_without_diagnostics_only_the_average_is_there(make):
    _, text = read(feature_pages(make(), {}))
    assert "How fast it learned" in text
    assert "model looked" not in text
    assert feature_pages(make(rounds=[]), {}) == ""


@pytest.mark.parametrize("part", ["collapse", "map", "masks", "noise", "gradcam"])
def test_an_absent_part_is_passed_over(make, part):
    headings = {
        "collapse": "How many different things",
        "map": "How the model sorts",
        "masks": "What the model keeps",
        "noise": "Does the model notice",
        "gradcam": "Where the model looked",
    }
    _, text = read(feature_pages(make(diagnostics={**made_up(), part: None}), PICTURES))
    for name, heading in headings.items():
        assert (heading in text) == (name != part)


def test_parts_without_a_figure_are_passed_over_without_an_error(make):
    empty = {
        "collapse": {"images": 1, "sites": {"North": collapse_facts(np.zeros((1, 3)))}},
        "map": {"classes": [], "sites": [], "labels": [], "site_of": [], "spaces": {}},
        "masks": None,
        "noise": {"sigma": 1.5, "bins": 20, "sites": {"North": uncertainty_facts([], [], [])}},
        "gradcam": [],
        "left_out": {},
    }
    _, text = read(feature_pages(make(diagnostics=empty), {}))
    assert re.findall(r"n/a|nan|None", text) == []
    assert "model" not in text


def test_pictures_that_are_not_at_hand_are_passed_over(make):
    assert "model looked" not in feature_pages(make(diagnostics=made_up()), {})


def test_pictures_of_patients_are_marked_as_such(make):
    warning = "real patients"
    assert warning not in feature_pages(make(diagnostics=made_up()), PICTURES)
    data = {**make()["data"], "phantom": False}
    assert warning in feature_pages(make(diagnostics=made_up(), data=data), PICTURES)


def test_misleading_uncertainty_is_said_in_words(make):
    found = made_up()
    assert "More certain about noise" not in feature_pages(make(diagnostics=found), {})
    found["noise"]["sites"]["West"] = uncertainty_facts([0.8, 0.9], [0.1, 0.2], [True, True])
    _, text = read(feature_pages(make(diagnostics=found), {}))
    assert "More certain about noise than about scans: West." in text
    assert "every answer was right, n=2" in text


def test_averages_are_over_the_hospitals_that_reported():
    rounds = [
        {"round": 1, "sites": {"a": {"val_accuracy": 0.25}, "b": {"val_accuracy": 0.75}}},
        {"round": 2, "sites": {"a": {"val_accuracy": None}, "b": {"val_accuracy": 1.0}}},
        {"round": 3, "sites": {"a": {"status": "absent"}, "b": {}}},
    ]
    assert averages(rounds, "val_accuracy") == [0.5, 1.0, None]


def test_a_spectrum_falls_by_one_grid_line_per_power_of_ten():
    tree, _ = read(spectrum([[1.0, 0.1, 0.01, 0.0]], title="t", threshold=0.01))
    heights = [float(point.split(",")[1]) for point in tree.find(".//polyline").get("points").split()]
    levels = [float(line.get("y1")) for line in tree.findall(".//line[@class='grid']")]
    assert heights[:3] == levels[:3]
    assert heights[3] == levels[-1]
    assert float(tree.find(".//line[@class='threshold']").get("y1")) == levels[2]


def test_a_map_keeps_distances_and_draws_every_point_once():
    points = [[0.0, 0.0], [3.0, 0.0], [0.0, 1.0], [3.0, 1.0]]
    tree, _ = read(scatter(points, [0, 0, 1, 9], title="t"))
    paths = tree.findall(".//path")
    drawn = [tuple(map(float, match)) for path in paths for match in re.findall(r"M([\d.]+) ([\d.]+)", path.get("d"))]
    assert len(paths) == 3
    (x0, y0), (x1, y1), (x2, y2), _ = drawn
    assert y0 == y1
    assert x0 == x2
    assert x1 - x0 == pytest.approx(3 * (y0 - y2), abs=0.2)


def test_a_map_of_points_in_one_place_is_drawn():
    tree, _ = read(scatter([[1.0, 1.0]] * 3, [0, 1, 2], title="t"))
    assert len(tree.findall(".//path")) == 3
