from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crossward.federation.errors import BadInput
from crossward.imaging.rules.config import read_site_rules
from crossward.imaging.rules.nodes import BadSiteFile
from crossward.imaging.rules.site import DomainRule, LabelRule

EXAMPLE = Path(__file__).resolve().parents[2] / "provisioning" / "site.yaml.example"
START = "version: 1\ndata: images\nlabels: {file: labels.csv}\n"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with images and labels, for a site.yaml to name."""
    (tmp_path / "images").mkdir()
    (tmp_path / "labels.csv").write_text("file,label\n")
    return tmp_path


def write(site: Path, text: str | bytes) -> Path:
    file = site / "site.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def mistakes(site: Path, text: str | bytes) -> list[tuple[int, str]]:
    with pytest.raises(BadSiteFile) as told:
        read_site_rules(write(site, text))
    return [(mistake.line, mistake.text) for mistake in told.value.mistakes]


def test_everything_that_can_be_said(site: Path) -> None:
    text = """\
version: 1
data: images
cache: /somewhere/else
labels:
  source: csv
  file: labels.csv
  key: study_uid
  key_column: Study
  label_column: Finding
  patient_column: Person
  map: {no: normal, 01: normal, yes: nodule}
splits: {train: 0.5, val: 0.25, test: 0.25, seed: 7}
frames: middle
domain:
  names:
    - name: mr-3t
      when: {modality: MR, field_strength: ">=2.5"}
  fields: []
transforms:
  default: [stored_range]
  mr-3t:
    - percentile: {low: 1, high: 99.5}
burned_in: take
"""
    rules = read_site_rules(write(site, text))
    assert rules.path == site / "site.yaml"
    assert (rules.data, rules.cache) == (site / "images", Path("/somewhere/else"))
    assert rules.labels == LabelRule(
        file=site / "labels.csv",
        key="study_uid",
        key_column="Study",
        label_column="Finding",
        patient_column="Person",
        mapping={"no": "normal", "01": "normal", "yes": "nodule"},
    )
    assert (rules.fractions, rules.split_seed) == ((0.5, 0.25, 0.25), 7)
    assert (rules.frames, rules.burned_in) == ("middle", "take")
    assert rules.domain == DomainRule(names=(("mr-3t", {"modality": "MR", "field_strength": ">=2.5"}),), fields=())
    (step,) = rules.steps("mr-3t")
    assert (step.name, dict(step.options), step.line) == ("percentile", {"low": 1, "high": 99.5}, 22)
    assert [step.name for step in rules.steps("another")] == ["stored_range"]


def test_what_is_not_said_is_usual(site: Path) -> None:
    rules = read_site_rules(write(site, START))
    assert rules.cache == site / "cache"
    assert rules.labels == LabelRule(file=site / "labels.csv")
    assert (rules.fractions, rules.split_seed, rules.frames, rules.burned_in) == (
        (0.7, 0.1, 0.2),
        0,
        "single",
        "refuse",
    )
    assert rules.domain == DomainRule()
    assert rules == read_site_rules(site), "the folder stands for the file in it"


def test_the_key_names_its_column_unless_another_is_given(site: Path) -> None:
    rules = read_site_rules(write(site, START.replace("{file", "{key: accession, file")))
    assert (rules.labels.key, rules.labels.key_column) == ("accession", "accession")


def test_the_example_is_right(site: Path) -> None:
    shutil.copy(EXAMPLE, site / "site.yaml")
    rules = read_site_rules(site)
    assert rules.labels.patient_column == "patient"
    assert rules.transforms.keys() == {"default"}


def test_what_the_example_has_in_comments_is_right_too(site: Path) -> None:
    lines = EXAMPLE.read_text().splitlines()
    commented = {"# map:", "# names:", "# mr-3t:", "# augment:"}
    out, taking = [], False
    for line in lines:
        stripped = line.strip()
        taking = stripped in commented or (taking and stripped.startswith("#   "))
        out.append(line.replace("# ", "", 1) if taking else line)
    text = "\n".join(out)
    rules = read_site_rules(write(site, text))
    assert [name for name, _ in rules.domain.names] == ["mr-3t", "mr-1.5t", "old-digitiser"]
    assert [step.name for step in rules.steps("mr-3t")] == ["bias_field", "percentile"]
    assert rules.labels.mapping["no finding"] == "normal"
    assert rules.augment.keys() == {"default"}


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (START.replace("version: 1", "version: 2"), 1, "reads version 1"),
        (START.replace("version: 1", 'version: "1"'), 1, "not a whole number"),
        (START.replace("version: 1\n", ""), 1, "version is missing"),
        (START.replace("images", "elsewhere"), 2, "data is not there"),
        (START.replace("labels.csv", "others.csv"), 3, "labels.file is not there"),
        (START + "cache: images\n", 4, "inside the cache"),
        (START + "cache: .\n", 4, "inside the cache"),
        (START.replace("images", "cache"), 2, "inside the cache"),
        (START + "frame: each\n", 4, "did you mean 'frames'?"),
        (START + "frames: frist\n", 4, "did you mean 'first'?"),
        (START + "frames: [each]\n", 4, "must be one value, and is a list"),
        (START + "frames:\n", 4, "frames is empty"),
        (START + "frames: each\nframes: each\n", 5, "a second time"),
        (START + "burned_in: yes\n", 4, "cannot be 'yes'"),
        (START + "splits: {train: 70, val: 10, test: 20}\n", 4, "add up to 1"),
        (START + "splits: {train: 0.8, val: 0.2}\n", 4, "no test"),
        (START + "splits: {train: 1.0, val: 0, test: 0}\n", 4, "more than 0"),
        (START + "splits: {train: .nan, val: 0.5, test: 0.5}\n", 4, "not a number"),
        (START + "splits: {seed: 010}\n", 4, "not a whole number"),
        (START + "splits: {seed: 1.5}\n", 4, "not a whole number"),
        ("version: 1\ndata: images\nlabels: labels.csv\n", 3, "must be a block of keys, and is one value"),
        ("version: 1\ndata: images\nlabels:\n  source: csv\n", 3, "labels.file is missing"),
        ("version: 1\ndata: images\nlabels:\n  source: xml\n  file: labels.csv\n", 4, "choose from csv, sr, tag"),
        (START.replace("{file", "{concept: '1', file"), 3, "no meaning with source: csv"),
        (START.replace("{file", "{label_column: file, file"), 3, "same column"),
        (START.replace("{file", "{key: patient, patient_column: label, file"), 3, "same column"),
        (START.replace("{file", "{map: {}, file"), 3, "map is empty"),
        (START.replace("{file", "{map: {a: [b]}, file"), 3, "must be one value"),
        ("version: 1\ndata: images\nlabels: {source: sr, concept: '1'}\n", 3, "labels.map is missing"),
        ("version: 1\ndata: images\nlabels: {source: tag, tag: BodyPartExamind}\n", 3, "'BodyPartExamined'?"),
        ("version: 1\ndata: images\nlabels: {source: tag, tag: PatientName}\n", 3, "says who or when"),
        ("version: 1\ndata: images\nlabels: {source: tag, tag: PatientComments}\n", 3, "says who or when"),
        ("version: 1\ndata: images\nlabels: {source: tag, tag: StudyDate}\n", 3, "says who or when"),
        ("version: 1\ndata: images\nlabels: {source: tag, tag: PixelData}\n", 3, "says who or when"),
        ("version: 1\ndata: images\nlabels: {source: tag, tag: StudyDescription}\n", 3, "add labels.map"),
        (START + "domain:\n  fields: [model, patient_id]\n", 5, "no fact about a scanner"),
        (START + "domain:\n  fields: [modell]\n", 5, "did you mean 'model'?"),
        (START + "domain:\n  names:\n  - name: a\n    when: {sop_uid: x}\n", 7, "no fact about a scanner"),
        (START + "domain:\n  names:\n  - name: a\n    when: {kvp: high}\n", 7, "kvp is a number"),
        (START + "domain:\n  names:\n  - name: a\n    when: {model: '>3'}\n", 7, "model is text"),
        (START + "domain:\n  names:\n  - name: a\n    when: {}\n", 7, "would fit every file"),
        (START + "domain:\n  names:\n  - name: a\n", 6, "when is missing"),
        (START + "domain:\n  names:\n  - {name: A/B, when: {model: x}}\n", 6, "small letters"),
        (START + "domain:\n  names:\n  - {name: default, when: {model: x}}\n", 6, "choose another name"),
        (START + "transforms:\n  default:\n    - percentil\n", 6, "percentile"),
        (START + "transforms:\n  default:\n    - window: {width: 0}\n", 6, "width"),
        (START + "transforms:\n  default: percentile\n", 5, "must be a list"),
        (START + "transforms:\n  default:\n    - stored_range\n      percentile: {}\n", 7, "not YAML"),
        (START + "transforms:\n  default:\n    - {percentile: {}, zscore: {}}\n", 6, "must be a step's name"),
        (START + "transforms:\n  Scanner 1: [percentile]\n", 5, "small letters"),
        (START + "domain: {fields: []}\ntransforms:\n  mr: [percentile]\n", 6, "no rule under domain.names"),
        (START + "augment:\n  default:\n    - nois\n", 6, "noise"),
        (START + "domain:\n  names:\n  - name: a\n    when: {model: *signa*}\n", 7, "put quotes round"),
        (START + "domain:\n  names:\n  - name: a\n    when: {kvp: >=2}\n", 7, "not YAML"),
        (START + "cache: &here there\n", 4, "put quotes round it"),
        (START + "cache: !!python/object/apply:os.getcwd []\n", 4, "begins with !"),
        (START + "cache:\n\tthere\n", 5, "not YAML"),
        (START + "---\nversion: 1\n", 4, "not YAML"),
        (START + "<<: {frames: each}\n", 4, "no key '<<'"),
        ("- version: 1\n", 1, "must be a block of keys, and is a list"),
    ],
)
def test_a_mistake_is_told_with_its_line(site: Path, text: str, line: int, words: str) -> None:
    found = mistakes(site, text)
    assert line in [at for at, told in found if words in told], found


def test_every_mistake_is_told_at_once(site: Path) -> None:
    text = "version: 3\ndata: nowhere\nlables: {}\nframes: some\nsplits: {train: 2}\n"
    with pytest.raises(BadInput) as told:
        read_site_rules(write(site, text))
    lines = str(told.value).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "site.yaml line 1",
        "site.yaml line 1",
        "site.yaml line 2",
        "site.yaml line 3",
        "site.yaml line 4",
        "site.yaml line 5",
    ]
    assert all(";" in line for line in lines), "each says what to do"


def test_twenty_mistakes_are_enough_at_once(site: Path) -> None:
    text = START + "".join(f"wrong{number}: 1\n" for number in range(25))
    with pytest.raises(BadSiteFile) as told:
        read_site_rules(write(site, text))
    lines = str(told.value).splitlines()
    assert len(told.value.mistakes) == 25
    assert len(lines) == 21
    assert lines[-1] == "site.yaml: and 5 more; correct these first"


def test_a_few_lines_that_stand_for_billions_are_refused(site: Path) -> None:
    layers = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]\n" for n in range(1, 12))
    assert mistakes(site, f"l0: &l0 x\n{layers}")[0][0] == 1


@pytest.mark.parametrize("text", ["a: &a [*a]\n", "[" * 5000, "{a: " * 5000, "? " * 3000])
def test_nesting_without_end_is_refused(site: Path, text: str) -> None:
    assert mistakes(site, text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "is empty"),
        (b"# only words\n", "is empty"),
        (b"version: 1\xff\n", "not a text file"),
        (b"version: \x07\n", "not a text file"),
        (b"#" * 300_000, "larger than"),
    ],
)
def test_what_is_no_such_file_is_refused(site: Path, text: bytes, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        read_site_rules(write(site, text))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"site\.yaml cannot be read \(No such file"):
        read_site_rules(tmp_path / "site.yaml")


def test_prepared_images_can_be_used_while_the_archive_is_away(site: Path) -> None:
    (site / "images").rmdir()
    assert read_site_rules(write(site, START), must_exist=False).data == site / "images"


KEYS = st.sampled_from(
    ["version", "data", "cache", "labels", "splits", "frames", "domain", "transforms", "fields", "x"]
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.dictionaries(KEYS, VALUES, max_size=8))
def test_whatever_yaml_says_it_is_read_or_refused_in_words(site: Path, content: dict[str, object]) -> None:
    file = write(site, yaml.safe_dump(content))
    refused = ""
    try:
        read_site_rules(file)
    except BadInput as told:
        refused = str(told)
    right = content.get("version") == 1 and "data" in content and isinstance(content.get("labels"), dict)
    assert refused.startswith("site.yaml") or right


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.binary(max_size=60) | st.text("ab:-[]{}&*!|>%@'\"#, \n\t", max_size=60).map(str.encode))
def test_whatever_bytes_there_are_they_are_refused_in_words(site: Path, text: bytes) -> None:
    with pytest.raises(BadInput, match=r"^site\.yaml"):
        read_site_rules(write(site, text))
