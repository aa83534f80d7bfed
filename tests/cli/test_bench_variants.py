from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossward.cli.bench_variants import parse_variant, parse_variants
from crossward.federation.errors import BadInput
from crossward.methods import create
from crossward.privacy.dp.settings import Privacy
from crossward.site.participant import Plugs
from crossward.site.trainer import Training
from tests.site.made_up_sites import made_up_cohort


def test_options_plugs_and_training_come_from_the_brackets() -> None:
    plain, many, block = parse_variants(
        "fedavg, f2dc[weights=samples; lambda1=0;stages=[3,4]],"
        "fedbn[block=f2dc;head=evidential;lr=0.01;clip=1;epochs=3]"
    )
    assert (plain.text, plain.method, plain.plugs, plain.training) == ("fedavg", create("fedavg"), Plugs(), {})
    assert many.method == create("f2dc", weights="samples", lambda1=0.0, stages=(3, 4))
    assert block.method == create("fedbn")
    study = block.study(made_up_cohort(), rounds=5, seed=7)
    assert study.plugs == Plugs("f2dc", "evidential")
    assert study.training == Training(learning_rate=0.01, clip=1, epochs=3, seed=7)
    assert (study.task.rounds, study.task.seed) == (5, 7)


def test_a_plain_name_is_its_folder_and_options_make_another() -> None:
    texts = "f2dc,f2dc[weights=samples],f2dc[lambda1=0;lambda2=0],f2dc[stages=[3,4]],fedprox[mu=1e-3]"
    assert [variant.folder for variant in parse_variants(texts)] == [
        "f2dc",
        "f2dc-weights=samples",
        "f2dc-lambda1=0-lambda2=0",
        "f2dc-stages=-3-4",
        "fedprox-mu=1e-3",
    ]


@given(mu=st.floats(0, 1e6), lr=st.floats(0, 10), space=st.sampled_from(["", " ", "\t"]))
def test_a_folder_is_a_safe_name(mu: float, lr: float, space: str) -> None:
    variant = parse_variant(f"fedprox[mu={mu};{space}lr={lr}]")
    assert re.fullmatch(r"fedprox-[A-Za-z0-9=._-]+", variant.folder)
    assert variant.method == create("fedprox", mu=mu)
    assert variant.training == {"learning_rate": lr}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no method"),
        ("fedavgg", "did you mean 'fedavg'"),
        ("f2dc[lambda3=1]", "no option 'lambda3'"),
        ("f2dc[lambda1]", "name=value"),
        ("f2dc[lambda1=-1]", "negative"),
        ("f2dc[lambda1=0", "name[option=value"),
        ("f2dc[lambda1=0]x", "name[option=value"),
        ("fedavg[block=magic]", "magic"),
        ("fedavg[head=3]", "3"),
        ("fedavg[lr=fast]", "'lr' takes float"),
        ("fedavg[epochs=1.5]", "'epochs' takes int"),
        ("fedavg[epochs=0]", "at least 1"),
        ("fedavg,f2dc,fedavg", "share a folder"),
        ("f2dc[stages=[3,4]],f2dc[stages=[3, 4]]", "share a folder"),
    ],
)
def test_what_is_not_there_is_refused(text: str, said: str) -> None:
    with pytest.raises(BadInput, match=re.escape(said)):
        parse_variants(text)


def test_the_net_and_the_noise_come_from_the_brackets_too() -> None:
    text = "f2dc[width=0.125;depth=18;norm=group;steps=4;momentum=0;dp=8;dp_clip=0.5]"
    study = parse_variant(text).study(made_up_cohort(), rounds=5, seed=7)
    assert (study.task.width, study.task.depth, study.task.norm) == (0.125, 18, "group")
    assert (study.training.steps, study.training.momentum) == (4, 0.0)
    assert study.privacy == Privacy(epsilon=8.0, clip=0.5)
    assert parse_variant("f2dc").study(made_up_cohort(), rounds=5, seed=7).privacy is None


@pytest.mark.parametrize(
    ("text", "said"),
    [("fedavg[width=9]", "--width 9"), ("fedavg[norm=layer]", "--norm"), ("fedavg[depth=10.5]", "takes int")],
)
def test_a_net_that_is_not_there_is_refused(text: str, said: str) -> None:
    with pytest.raises(BadInput, match=re.escape(said)):
        parse_variant(text)
