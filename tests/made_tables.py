"""The tables in docs/ that are made from the code; ``python -m tests.made_tables`` writes them anew.

A table stands between ``<!-- made: NAME -->`` and ``<!-- end -->``. tests/test_made_docs.py holds each equal to what
the code gives now. What the code cannot say is in the two dictionaries below; a test fails where one has a gap.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from crossward.cli.methods import describe
from crossward.federation.contract import (
    CORRECT,
    LOSS,
    SAMPLES,
    SEEN,
    VALIDATION,
    VALIDATION_AS_RECEIVED,
    VALIDATION_CORRECT,
    VALIDATION_COUNT,
)
from crossward.federation.scopes import TensorSpec
from crossward.flare.jobs import usual_study
from crossward.flare.outcome import PASSING
from crossward.flare.progress import _FINAL
from crossward.methods.registry import available, create
from crossward.site.declaration import Declaration
from crossward.site.messages import SCORES
from crossward.site.troubles import Code, settings_of, words

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
REWRITE = "python -m tests.made_tables"

MARKED = re.compile(r"<!-- made: ([\w-]+) -->\n(.*?)<!-- end -->", flags=re.DOTALL)

MEANING: Mapping[str, str] = {
    SAMPLES: "training images",
    LOSS: "loss, summed over the images that were seen",
    SEEN: "images seen in training, each as often as it was used",
    CORRECT: "of those, how many the model in training got right",
    "shared/norms": "length of the site's update, tensor by tensor",
    "shared/moved": "1 for every tensor that training changed, 0 for the others",
    "prototypes/present": "1 for every class that the site has training images of, 0 for the others",
    VALIDATION_COUNT: "validation images",
    VALIDATION_CORRECT: "of those, how many the refreshed model got right",
    VALIDATION_AS_RECEIVED: "the same, for the model as it was received",
    "n_train": "training images",
    "n_val": "validation images",
    "n_test": "test images",
    "accuracy": "of the deployed model on the test images",
    "balanced_accuracy": "mean of the recalls of the classes",
    "auc": "area under the curve; the mean over one class against the rest",
    "accuracy_as_received": "accuracy of the same model before its normalisation was refreshed",
}
"""What every number means that a site sends beside tensors."""

ARISES: Mapping[Code, str] = {
    Code.VERSION: "the first check of every task: protocol, version and digest of the study",
    Code.STUDY: "the site, or the server, reads the study of the job",
    Code.NO_DATA: "the site's `data_root` is not set, is not there, or is empty",
    Code.UNREADABLE_DATA: "the site reads `labels.csv` and the images",
    Code.LABELS: "the site compares `labels.csv` with the classes of the job, before it reads an image",
    Code.TOO_FEW_IMAGES: "the site splits its patients into training, validation and test",
    Code.POLICY: "the site's `local/privacy.json` has no scope with the gate, or a setting that is not understood",
    Code.BUSY: "another process has held the lock of the site's state for 20 seconds",
    Code.DATA_CHANGED: "a run goes on, and the images are not those in the site's `run.json`",
    Code.NOT_PREPARED: "the site has a `site.yaml`; its cache lacks the job's images, is older than it, or is damaged",
    Code.DIVERGED: "training, or the test at the end, gave numbers that are not finite; or the server closes a round "
    "after which the model would not be finite",
    Code.MEMORY: "the site's process, or its GPU, could get no more memory",
    Code.INTERNAL: "the site met an error that is on no list",
    Code.BAD_TASK: "the server's message has an unknown task, a bad run name, a round beyond those of the study, or "
    "tensors that are not shared",
    Code.OPEN_JOB: "the site holds the job against `secure_aggregation` of its policy, before it reads an image",
    Code.SMALL_SUMS: "likewise, against `minimum_sites`",
    Code.NOT_MASKED: "a step of secure aggregation: a request, a key, a share, a signature or a set of sites is wrong",
    Code.MASKED_BEFORE: "the site looks into its record of what it masked, before it masks and before it opens",
    Code.NO_CERTIFICATE: "the site reads its certificate, key and root, before it reads an image",
    Code.NO_KEYS: "a step of secure aggregation, at a site that has agreed on no keys since its process began",
    Code.DISK_FULL: "the site writes its vault, outbox, result or journal",
    Code.STORAGE: "the same, for any other reason; or a damaged file is read",
    Code.OTHER_VAULT: "the site reads a vault or outbox file of another format or study",
    Code.TRUSTING_JOB: "the site holds the job's secure aggregation against its policy, before it reads an image",
    Code.NO_PRIVACY: "the site holds the job against its policy, before it reads an image",
    Code.WEAK_PRIVACY: "the same",
    Code.LARGE_DELTA: "the same",
    Code.LITTLE_NOISE: "the same",
    Code.BUDGET: "the site reserves what a round costs in its ledger, before it trains",
    Code.LEDGER: "the site reads its privacy ledger, before it trains or counts",
    Code.NOT_PRIVATE: "before every round the site holds a batch of made-up images against each of them alone",
    Code.OTHER_UNIT: "the site holds the job against its policy, before it reads an image, and against its ledger",
    Code.LEFT_JOB: "every step of secure aggregation after the third one; the site's count is the job's, whatever keys "
    "it has had",
    Code.LARGE_EPSILON: "the site has worked out the noise from its number of patients, before anything is spent",
    Code.LEARNED_PICTURES: "the site has read what `site.yaml` learns from its images, before anything is spent",
    Code.LONG_RUN: "the site has worked out what all rounds cost together, before anything is spent",
    Code.NO_PRICE: "the site works out noise and costs, before anything is spent",
    Code.KEPT_PAYLOAD: "the site holds what the job's method sends against its policy, before it reads an image",
    Code.NO_ANSWER: "the server stopped waiting for the site (`grace`, `round` or `join`)",
    Code.NOT_EXECUTED: "FLARE's own mark of a failed task came back instead of an answer",
    Code.QUORUM: "the server closes a round",
    Code.SERVER_DISK_FULL: "the server writes its checkpoint or its result",
    Code.SERVER_STORAGE: "the same, for any other reason; or a damaged file is read",
    Code.SERVER_INTERNAL: "the server met an error that is on no list",
    Code.NOT_RESUMABLE: "the job names a run, and the server has none like it",
    Code.ABORTED: "somebody, or FLARE, ended the job",
    Code.NO_SUM: "the server asks for a sum, and sites drop out of it or refuse, up to four times; where all that are "
    "missing refused with one code, the job ends with that one",
    Code.CAUGHT: "the server holds what the site signed for a sum against the rest of it, and against what opens it",
    Code.DISPUTED: "sites answer with signed blame in place of a vector; the server counts who disagrees with whom",
    Code.QUARREL: "the same, where one site blames one other, and nobody else does",
    Code.OUTLIER: "the server closes a round: it would move the shared tensors much further than earlier rounds "
    "of its sites",
    Code.GATE: "the gate at the site raised: FLARE sends its mark for a refused filter, and nothing else",
    Code.NOT_DECLARED: "the server holds the answer against the same declaration as the gate",
}
"""Where every code comes from."""

SAMPLE_NUMBERS: Mapping[str, float] = {
    "seconds": 300,
    "reports": 1,
    "sites": 2,
    "needed": 3,
    "epsilon": 8,
    "delta": 1e-3,
    "noise": 0.5,
    "allowed": 4,
    "limit": 4,
    "round": 5,
    "times": 21,
    "most": 5,
}
"""Numbers to show a code's words with."""


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)


def _declarations(*, secagg: bool = False) -> dict[str, Declaration]:
    return {method: Declaration(usual_study(method, secagg=secagg)) for method in available()}


def answers() -> str:
    """What may leave in answer to each task, in the open."""
    return _answers(_declarations())


def masked_answers() -> str:
    """The same, under secure aggregation."""
    return _answers(_declarations(secagg=True))


def _answers(declarations: Mapping[str, Declaration]) -> str:
    """``Declaration.rows()`` of every method, equal rows put together."""
    senders: dict[tuple[str, str, str], list[str]] = {}
    for method, declaration in declarations.items():
        for row in declaration.rows():
            senders.setdefault((row["task"], row["part"], row["content"]), []).append(method)
    # Python's sort keeps the order of rows() among the parts of a task.
    order = list(dict.fromkeys((task, part) for task, part, _ in senders))
    rows = sorted(senders.items(), key=lambda each: order.index(each[0][:2]))
    return _table(
        ("task", "part of the answer", "content", "methods"),
        [
            (f"`{task}`", f"`{part}`", content, "all" if len(methods) == len(available()) else ", ".join(methods))
            for (task, part, content), methods in rows
        ],
    )


def tensors() -> str:
    """Every tensor of the model with its scope, method by method."""
    found = _declarations()
    specs: dict[str, dict[str, TensorSpec]] = {}
    for method, declaration in found.items():
        for name, spec in {**declaration.algebra.layout, **declaration.algebra.sent}.items():
            specs.setdefault(name, {})[method] = spec
    rows = []
    for name, by_method in specs.items():
        shapes = dict.fromkeys(spec.shape for spec in by_method.values())
        shape = " or ".join(" x ".join(map(str, shape)) or "one number" for shape in shapes)
        rows.append((f"`{name}`", shape, *(by_method[m].scope.value if m in by_method else "-" for m in found)))
    return _table(("tensor", "shape", *found), rows)


def tallies() -> str:
    """The numbers beside the tensors in a report."""
    found = _declarations()
    methods: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for method, declaration in found.items():
        for key, shape in declaration.algebra.tallies.items():
            methods.setdefault((key, shape), []).append(method)
    rows = [
        (f"`{key}`", " x ".join(map(str, shape)), MEANING[key], "all" if len(who) == len(found) else ", ".join(who))
        for (key, shape), who in methods.items()
    ]
    return _table(("tally", "float64 values", "what it is", "methods"), rows)


def validation() -> str:
    """The counts of a validated model."""
    return _table(("count", "what it is"), [(f"`{name}`", MEANING[name]) for name in VALIDATION])


def scores() -> str:
    """What is published at the end."""
    return _table(("score", "what it is"), [(f"`{name}`", MEANING[name]) for name in SCORES])


def private() -> str:
    """What differential privacy changes in a method; what is common to all in the first row."""
    rows = {method: describe(create(method))["private"] for method in available()}
    common = [line for line in rows["local"]["changes"] if all(line in row["changes"] for row in rows.values())]
    return _table(
        ("method", "options", "what else is different"),
        [
            ("all", "`--norm group`", "; ".join(common)),
            *(
                (
                    f"`{method}`",
                    ", ".join(f"`{key}` {value:g}" for key, value in row["options"].items()) or "-",
                    "; ".join(line for line in row["changes"] if line not in common) or "-",
                )
                for method, row in rows.items()
            ),
        ],
    )


def code_numbers() -> str:
    """Every code with the numbers that may travel with it."""
    rows = [
        (str(int(code)), code.name, ", ".join(f"`{name}`" for name in settings_of(code)) or "none") for code in Code
    ]
    return _table(("code", "name", "numbers that travel with it"), rows)


def failures() -> str:
    """The catalogue: code, words, cause, remedy, and whether a watcher goes on by itself."""
    rows = []
    for code in Code:
        said, _, remedy = words(code, {name: SAMPLE_NUMBERS[name] for name in settings_of(code)}).partition(". ")
        rows.append((f"{int(code)} `{code.name}`", said, ARISES[code], remedy, _afterwards(code)))
    return _table(("code", "what you read", "where it arises", "what to do", "does `watch` go on by itself?"), rows)


def _afterwards(code: Code) -> str:
    if code in PASSING:
        return "yes"
    return "no: another job is needed" if code in _FINAL else "no"


TABLES: Mapping[str, Callable[[], str]] = {
    "answers": answers,
    "masked-answers": masked_answers,
    "tensors": tensors,
    "tallies": tallies,
    "validation": validation,
    "scores": scores,
    "private": private,
    "code-numbers": code_numbers,
    "failures": failures,
}


def rewritten(text: str) -> str:
    """A document with its made tables as the code gives them now."""
    return MARKED.sub(lambda found: f"<!-- made: {found[1]} -->\n{TABLES[found[1]]()}<!-- end -->", text)


def main() -> None:
    for path in sorted(DOCS.glob("*.md")):
        before = path.read_text(encoding="utf-8")
        after = rewritten(before)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"rewritten: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
