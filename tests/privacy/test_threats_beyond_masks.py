"""What masks do not hide by themselves: what can be told from outside a message, and from a sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from crossward.imaging.data import Cohort, SiteData
from crossward.methods.registry import available
from crossward.privacy.audit import setup
from crossward.privacy.audit.findings import no_picture
from crossward.privacy.audit.inversion import Attack, best_psnr, gradient_of, invert
from crossward.privacy.audit.masked import sum_up
from crossward.privacy.secagg.canonical import decode
from crossward.site.inprocess import simulate
from crossward.site.messages import Message
from crossward.site.release import Release
from tests.site.made_up_sites import CLASSES, cohort_of, made_up_site, made_up_split
from tests.site.masked_runs import NAMES, masked_study, quick

SIZE = setup.QUICK

# Side channels


def other_data(name: str, number: int) -> SiteData:
    """Three times as many images as usual, of two classes only, from a much brighter scanner."""
    parts = (
        made_up_split(count, seed=77 + part, classes=2, gain=9.0, shift=-4.0) for part, count in enumerate((60, 31, 5))
    )
    return SiteData(name, CLASSES, *parts, scanner=f"scanner {number}")


def hospitals(make: Callable[..., SiteData]) -> Cohort:
    """Four sites; the last one's data are made by another function."""
    sites = {name: made_up_site(name, number=number) for number, name in enumerate(NAMES)}
    return cohort_of({**sites, NAMES[-1]: make(NAMES[-1], number=len(NAMES) - 1)})


def form(value: Any) -> Any:
    """All that shows of an answer without reading it: names of its fields, kinds and lengths."""
    if isinstance(value, Mapping):
        return {name: form(part) for name, part in value.items()}
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape)
    return (type(value).__name__, len(value)) if isinstance(value, str | bytes) else type(value).__name__


def forms_of(method: str, cohort: Cohort, folder: Path) -> list[tuple[str, Any]]:
    """Task and form of every answer in a masked run, in the order of the tasks and sites."""
    seen: list[tuple[str, Any]] = []
    make = Release.__init__

    def listening(self: Release, *given: Any, **options: Any) -> None:
        make(self, *given, **options)
        self.tasks = {task: noting(task, answer) for task, answer in self.tasks.items()}

    def noting(task: str, answer: Callable[[Any], Message]) -> Callable[[Any], Message]:
        def answered(message: Any) -> Message:
            found = answer(message)
            plain = dict(found)
            if "hello" in plain:
                # A throw-away certificate and its signature have a byte more or less by chance.
                plain["hello"] = decode(plain["hello"])["body"]
            seen.append((task, form(plain)))
            return found

        return answered

    with quick(), patch.object(Release, "__init__", listening):
        simulate(cohort, masked_study(method, rounds=2), folder, jobs=1)
    return seen


@pytest.mark.parametrize("method", sorted(set(available()) - {"local"}))
def test_side_channels(method: str, tmp_path: Path) -> None:
    """How many answers a site gives, their fields and lengths are the same whatever its images are.

    Who takes part, when, and how long training took can be seen: the documents say so.
    """
    usual = forms_of(method, hospitals(made_up_site), tmp_path / "usual")
    other = forms_of(method, hospitals(other_data), tmp_path / "other")
    assert {task for task, _ in usual} >= {"join", "roster", "keys", "train", "begin", "contribute", "survivors"}
    assert other == usual


def test_side_channels_the_comparison_would_see_a_number_that_is_written_out() -> None:
    assert form({"n": "9"}) != form({"n": "31"})
    assert form({"n": np.zeros(9)}) != form({"n": np.zeros(31)})
    assert form({"n": b"9"}) != form({"m": b"9"})


# The sum leaks


@pytest.fixture
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_one_thread")
def test_aggregate_leaks() -> None:
    """The images of all sites are rebuilt from nothing but the opened sum; noise at the sites is what prevents it."""
    model, count = setup.attacked_net(), setup.SITES
    images, labels = setup.drawn_images(count, seed=5), torch.arange(count) % setup.CLASSES
    each = [(images[site : site + 1], labels[site : site + 1]) for site in range(count)]
    plain = [gradient_of(model, setup.mean_loss, *own) for own in each]
    private = [setup.private_gradient(model, *own, private=SIZE.private()) for own in each]

    def rebuilt(updates: list[list[torch.Tensor]]) -> torch.Tensor:
        opened = sum_up([setup.flat(update) for update in updates])
        attack = Attack(restarts=1, sweeps=SIZE.attack.sweeps)
        seen = setup.like(opened.total, plain[0])
        return invert(model, setup.mean_loss, seen, labels, shape=images.shape[1:], attack=attack).images

    assert best_psnr(rebuilt(plain), images) > 25
    found = rebuilt(private)
    _, hidden = no_picture(best_psnr(found, images), best_psnr(found, setup.drawn_images(count, seed=6)))
    assert hidden
