from __future__ import annotations

import base64
import io
import re
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from crossward.evaluate.metrics import score, summarise
from crossward.evaluate.plots import heat_map, interval_bar, rounds_chart, tag
from crossward.evaluate.report import write_report
from crossward.federation.errors import BadInput

VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Reads a page strictly: every element is closed in order; keeps the text, the elements and the attributes."""

    def __init__(self, source):
        super().__init__()
        self.open, self.elements, self.text = [], [], ""
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text += data + " "

    def all(self, name):
        return [attributes for tag, attributes in self.elements if tag == name]


def report(tmp_path, result, samples=None):
    path = tmp_path / "report.html"
    write_report(path, result, samples)
    source = path.read_text(encoding="utf-8")
    return Page(source), source


def test_the_page_says_what_the_result_says(make, tmp_path):
    page, _ = report(tmp_path, make(warnings=["South was slow."]))
    for words in (
        "fedavg across 3 hospitals",
        "Computer-drawn phantoms, no patients.",
        "1 warning",
        "South was slow.",
        "worst hospital: South",
        "83.3 %",
        "run time 1 min 23 s",
        "AUC: no image of nodule, n=4",
        "West (absent)",
        "2 of 3",
        "1.23 MB",
        "987 B",
        "3 (chosen)",
        "optimiser.rate",
        "0.03",
        "numpy",
    ):
        assert words in page.text, words


def test_phantoms_are_only_claimed_for_phantoms(make, tmp_path):
    result = make()
    result["data"]["phantom"] = False
    page, _ = report(tmp_path, result, {"North": np.zeros((1, 4, 4), dtype=np.uint8)})
    assert "phantoms, no patients" not in page.text
    assert "do not pass this page on" in page.text


@pytest.mark.parametrize("field", ["site", "method", "class", "scanner", "warning", "option", "path", "version"])
def test_nothing_from_the_result_becomes_markup(make, tmp_path, field):
    evil = "<script>alert('x')</script>\"><img src=x onerror=y>"
    result = make(names=("North", evil, "West")) if field == "site" else make()
    if field == "method":
        result["method"] = evil
    elif field == "class":
        result["data"]["classes"][0] = evil
        for site in result["sites"].values():
            site["per_class"][evil] = site["per_class"].pop("healthy")
    elif field == "scanner":
        result["sites"]["North"]["scanner"] = evil
    elif field == "warning":
        result["warnings"] = [evil]
    elif field == "option":
        result["options"] = {evil: {evil: evil}}
    elif field == "path":
        result["data"]["path"] = evil
    elif field == "version":
        result["versions"] = {evil: evil}
    samples = {name: np.zeros((1, 4, 4), dtype=np.uint8) for name in result["sites"]}
    page, source = report(tmp_path, result, samples)
    assert evil in page.text
    assert "<script" not in source
    assert page.all("script") == []
    assert all(image["src"].startswith("data:image/png;base64,") for image in page.all("img"))
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)


def test_the_page_needs_no_network_and_forbids_it(make, tmp_path):
    page, source = report(tmp_path, make(), {"North": np.zeros((2, 4, 4), dtype=np.uint8)})
    assert not re.search(r"https?:|url\(|@import|<link|<script|<iframe", source)
    (policy,) = [m["content"] for m in page.all("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")


def test_every_plot_and_picture_has_words_for_it(make, tmp_path):
    page, _ = report(tmp_path, make(), {"North": np.zeros((2, 4, 4), dtype=np.uint8)})
    plots = [svg for svg in page.all("svg") if "aria-hidden" not in svg]
    assert len(plots) == 7  # a bar and a chart for each hospital, and the chart of their average
    assert all(svg["role"] == "img" and svg["aria-label"] for svg in plots)
    assert [image["alt"] for image in page.all("img")] == [
        "Sample 1 of North, Scanner 0",
        "Sample 2 of North, Scanner 0",
    ]


def test_sample_pictures_keep_their_pixels(make, tmp_path):
    grey = np.random.default_rng(0).integers(0, 256, (1, 8, 6), dtype=np.uint8)
    colour = np.random.default_rng(1).integers(0, 256, (1, 8, 6, 3), dtype=np.uint8)
    page, _ = report(tmp_path, make(), {"North": grey, "South": colour})
    decoded = [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(image["src"].split(",")[1])))) for image in page.all("img")
    ]
    np.testing.assert_array_equal(decoded[0], grey[0])
    np.testing.assert_array_equal(decoded[1], colour[0])


@pytest.mark.parametrize("bad", [np.zeros((1, 4, 4)), np.zeros((1, 4, 4, 2), np.uint8), np.zeros((1, 0, 4), np.uint8)])
def test_samples_that_are_no_pictures_are_refused_and_nothing_is_written(make, tmp_path, bad):
    with pytest.raises(BadInput, match="uint8"):
        write_report(tmp_path / "report.html", make(), {"North": bad})
    assert list(tmp_path.iterdir()) == []


def test_a_result_that_is_none_is_refused(tmp_path):
    with pytest.raises(BadInput, match="'method' is missing"):
        write_report(tmp_path / "report.html", {})


def test_protection_is_told_in_plain_words(make, tmp_path):
    off, _ = report(tmp_path, make())
    assert "could read every hospital's update" in off.text
    assert "No mathematical limit" in off.text
    assert "Epsilon spent" not in off.text
    on, _ = report(tmp_path, make(privacy={"secagg": True, "dp": True, "epsilon": {"North": 3.217, "South": None}}))
    assert "only the sum" in on.text
    assert "North 3.22" in on.text
    assert "could read" not in on.text
    unknown, _ = report(tmp_path, make(privacy={"secagg": True, "dp": True, "epsilon": {}}))
    assert "not recorded" in unknown.text


def masked(make, *found):
    """A run whose rounds' sums differ from the plain ones by what is found."""
    result = make(privacy={"secagg": True, "dp": False, "epsilon": {}})
    for entry, each in zip(result["rounds"], found, strict=False):
        entry["secagg"] = {"sites": list(entry["sites"]), "attempt": 1, "cut_off": 0.0, "sketches": 0, "capped": None}
        entry["secagg"] |= each
    return result


def test_by_how_much_sketches_moved_the_weights_is_what_was_measured(make, tmp_path):
    one = {"shared/cosines": 0.03, "shared/weights": 0.01, "personal/cosines": 0.05, "personal/attention": 2e-5}
    other = {"shared/cosines": 0.05, "shared/weights": 0.01, "personal/cosines": 0.05, "personal/attention": 4e-5}
    rounds = [{"sketches": 8, "capped": 0.25, "sketch_error": each} for each in (one, other)]
    page, _ = report(tmp_path, masked(make, *rounds))
    # The root of the mean square of the rounds: 0.0412, of updates' cosines.
    for said in (
        "compared by 8 sketches instead of exactly",
        "cosines of updates are off by about 0.041",
        "weights of updates by about 0.010",
        "cosines of personal tensors by about 0.050",
        "parts of mixtures by less than 0.001",
        "up to 25.0 %",
    ):
        assert said in page.text, said
    earlier, _ = report(tmp_path, masked(make, {"sketches": 8}))
    assert "by 8 sketches instead of exactly." in earlier.text
    assert "off by" not in earlier.text, "what was not measured is not said"


def test_how_many_style_groups_and_prototypes_there_would_have_been_is_said(make, tmp_path):
    bounds = {"style/groups": 1.0, "style/plain_groups": 3.0, "prototypes/withheld": 2.0}
    fewer = {"style/groups": 1.0, "style/plain_groups": 1.0, "prototypes/withheld": 0.0}
    page, _ = report(tmp_path, masked(make, {"bounds": bounds}, {"bounds": fewer}))
    assert "2 style groups of all rounds together, where there would have been 4" in page.text
    assert "2 times a class had no new prototype" in page.text
    same, _ = report(tmp_path, masked(make, {"bounds": fewer}))
    assert "No style groups were joined" in same.text
    assert "No prototype was withheld" in same.text


ASKED = {"epsilon": 8.0, "noise": None, "delta": 1e-5, "clip": 0.5, "unit": "patient", "distributed": False}


def privacy_told(make, tmp_path, **privacy) -> str:
    page, _ = report(tmp_path, make(privacy={"secagg": True, "epsilon": {"North": None, "South": None}, **privacy}))
    return page.text


def test_what_a_job_asked_for_bounds_every_hospital_though_the_server_knows_no_more(make, tmp_path):
    """Between hospitals what each of them spent stays in its own files."""
    told = privacy_told(make, tmp_path, dp=ASKED)
    assert "not recorded" not in told
    assert "at most 8.00 at every hospital, by the job" in told
    assert "crossward ledger show" in told
    assert "delta 1e-05" in told
    assert "a length of 0.5" in told
    assert "any other hospital" in told
    for covered in ("right answers on validation", "prototypes"):
        assert covered in told
    assert "The numbers of patients in training, validation and test count as public." in told


def test_what_was_spent_is_told_with_what_the_run_has_left(make, tmp_path):
    told = privacy_told(make, tmp_path, dp=ASKED, epsilon={"North": 3.217, "South": None})
    assert "North 3.22 (4.78 left)" in told
    assert "at most 8.00 at every other hospital, by the job" in told


def test_with_noise_asked_for_epsilon_is_each_hospitals_own(make, tmp_path):
    told = privacy_told(make, tmp_path, dp={**ASKED, "epsilon": None, "noise": 1.25})
    assert "1.25 times that length" in told
    assert "follows from its number of patients" in told
    assert "by the job" not in told


def test_the_page_says_what_each_unit_leaves_open(make, tmp_path):
    image = privacy_told(make, tmp_path, dp={**ASKED, "unit": "image"})
    assert "a patient with several images is protected less" in image
    assert "The numbers of images" in image
    site = privacy_told(make, tmp_path, dp={**ASKED, "unit": "site"})
    assert "count as public" not in site
    assert "half the noise" in site
    assert "validation" not in site.partition("Covered")[2].partition("Against whom")[0]


def test_of_shared_noise_both_promises_are_told(make, tmp_path):
    shared = {"fewest": 4, "colluders": 1, "epsilon": 7.98, "epsilon_server_alone": 6.41}
    told = privacy_told(make, tmp_path, dp={**ASKED, "unit": "site", "distributed": True, "shared": shared})
    assert "the server together with up to 1 other hospital" in told
    assert "6.41 against the server alone" in told
    assert "any other hospital, and whoever" not in told


def test_a_bare_result_still_makes_a_page(make, tmp_path):
    site = {"n_train": 3, "n_test": 2, "accuracy": 0.5}
    bare = make(sites={"North": site}, rounds=[], cross_site=None, best_round=None, data={}, options={}, versions={})
    bare["summary"] = {"avg": 0.5, "std": None, "all": 0.5, "worst_site": "North"}
    page, _ = report(tmp_path, bare)
    assert "fedavg across 1 hospital " in page.text
    assert "Accuracy by round" not in page.text


def test_a_result_without_any_defined_accuracy_still_makes_a_page(make, tmp_path):
    result = make(names=("Only",))
    result["sites"]["Only"] |= score([], [], ("healthy", "nodule")) | {"n_test": 0}
    result["summary"] = summarise(result["sites"])
    page, _ = report(tmp_path, result)
    assert "No hospital has a defined accuracy" in page.text
    assert "no images to score, n=0" in page.text


def test_pages_written_at_the_same_time_are_the_same(make, tmp_path):
    samples = {"North": np.arange(32, dtype=np.uint8).reshape(2, 4, 4)}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: write_report(tmp_path / f"{i}.html", make(), samples), range(16)))
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


def test_a_round_without_a_report_leaves_a_gap(make):
    chart = rounds_chart(make(), "West")
    assert 'class="own" points' not in chart  # rounds 1 and 3 alone make no line: two single dots
    assert chart.count('circle class="own"') == 2
    # 75 % in round 3, the chosen one: y = 10 + 132 * .25, at the right end
    assert '<circle class="best" cx="270.0" cy="43.0"' in chart
    assert "25.0 % in round 1, 75.0 % in round 3" in chart


def test_line_runs_through_the_accuracies(make):
    assert '<polyline class="own" points="38.0,109.0 154.0,76.0 270.0,43.0">' in rounds_chart(make(), "North")


def test_bar_places_accuracy_guess_and_interval():
    bar = interval_bar(
        {
            "accuracy": 0.5,
            "accuracy_interval": [0.25, 0.75],
            "as_received": {"accuracy": 0.0},
            "per_class": {"a": {"n": 1}, "b": {"n": 3}},
        }
    )
    assert 'class="own" cx="70.0"' in bar
    assert 'class="interval" x1="37.0" x2="103.0"' in bar
    assert 'class="received" cx="4.0"' in bar
    assert 'class="guess" x1="103.0" x2="103.0"' in bar


def luminance(red, green, blue):
    channels = [
        c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)
    ]
    return 0.2126 * channels[0] + 0.7152 * channels[1] + 0.0722 * channels[2]


def test_numbers_in_the_heat_map_are_readable_on_every_shade():
    for value in np.linspace(0, 1, 101):
        cell = heat_map({"sites": ["a"], "accuracy": [[float(value)]]})
        shade = tuple(map(int, re.search(r"rgb\((\d+),(\d+),(\d+)\)", cell).groups()))
        ink = (255,) * 3 if "#fff" in cell else (0,) * 3
        light, dark = sorted((luminance(*shade) + 0.05, luminance(*ink) + 0.05), reverse=True)
        assert light / dark >= 4.5, value


def test_tag_escapes_by_default():
    assert tag("b", "<i>", class_='"') == '<b class="&quot;">&lt;i&gt;</b>'
    assert tag("b", tag("i", "&")) == "<b><i>&amp;</i></b>"


def test_together_and_alone_stand_side_by_side_where_both_were_measured(make, tmp_path):
    result = make()
    first, *others = result["sites"]
    accuracy = dict.fromkeys(result["sites"])
    accuracy[first] = result["sites"][first]["accuracy"] - 0.125
    shown, _ = report(tmp_path, {**result, "alone": {"accuracy": accuracy, "avg": None, "worst_site": None}})
    assert "Was it worth training together?" in shown.text
    assert "+12.5" in shown.text
    assert shown.text.count("n/a") >= len(others)
    assert "worth training together" not in report(tmp_path, result)[0].text
