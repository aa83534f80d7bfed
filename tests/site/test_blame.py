"""Sites that lie to others within a sum: who finds out, who is named, and what is kept to show it."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.site.liars import accusing, lying, rubbish
from tests.site.made_up_sites import made_up_study
from tests.site.masked import ALGEBRA, Answered, Federation, authority

from crossward.federation.errors import PrivacyRefusal
from crossward.privacy.secagg.blame import left_out
from crossward.privacy.secagg.canonical import decode, encode
from crossward.privacy.secagg.identity import Untrusted
from crossward.privacy.secagg.keys import sign, signed_by
from crossward.privacy.secagg.messages import BLAME, REVEAL, SHARE
from crossward.privacy.secagg.roster import checked_hello
from crossward.privacy.secagg.settings import Settings
from crossward.site.declaration import Declaration
from crossward.site.messages import BEGIN, CONTRIBUTE, SURVIVORS, Message
from crossward.site.messages import REVEAL as REVEALING
from crossward.site.troubles import Code, Refusal

pytestmark = pytest.mark.usefixtures("without_fsync")

LIAR = "site-01"
"""Not the first by name, and not the last."""


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Federation]:
    def make(count: int, **options: Any) -> Federation:
        return Federation(tmp_path / "run-1", ALGEBRA, count, **options)

    return make


def found(federation: Federation) -> list[tuple[int, str, Code]]:
    return [(number, site, refusal.code) for number, _, site, refusal in federation.left_out]


def kept(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((folder / "evidence").glob("*"))]


def others(federation: Federation, *gone: str) -> list[str]:
    return [name for name in federation.names if name not in gone]


def summed(federation: Federation) -> list[str]:
    names: list[str] = federation.coordinator.history[-1]["secagg"]["sites"]
    return names


# one liar


@pytest.mark.parametrize("count", [4, 6])
def test_a_site_that_lies_to_everybody_is_left_out_alone_and_by_name(made: Any, count: int) -> None:
    federation = made(count)
    lying(federation.releases[LIAR], LIAR, rubbish(federation.names))
    federation.round()
    assert summed(federation) == others(federation, LIAR)
    assert federation.refused == [], "the honest sites did what they were asked for"
    assert set(found(federation)) == {(1, LIAR, Code.DISPUTED)}
    _, task, _, refusal = federation.left_out[0]
    assert (task, refusal.numbers) == (CONTRIBUTE, {"sites": count - 1})
    assert "evidence: runs/server/evidence/round-0001-site-01-" in refusal.evidence


@pytest.mark.parametrize("lie", [{"box": b""}, {"pair": bytes(32)}, {"shares": [bytes(32)] * 2}, {"to": "site-99"}])
def test_whatever_does_not_hold_in_signed_shares_is_blamed(made: Any, lie: dict[str, Any]) -> None:
    federation = made(5)
    lying(federation.releases[LIAR], LIAR, lambda peer, body: lie)
    federation.round()
    assert summed(federation) == others(federation, LIAR)
    assert set(found(federation)) == {(1, LIAR, Code.DISPUTED)}


def test_a_site_that_lies_to_one_other_does_not_drop_it_quietly(made: Any) -> None:
    """Nobody can know which of the two lies: both are left out, and both are named."""
    federation = made(5)
    victim = federation.names[3]
    lying(federation.releases[LIAR], LIAR, rubbish([victim]))
    federation.round()
    assert summed(federation) == others(federation, LIAR, victim)
    assert set(found(federation)) == {(1, LIAR, Code.QUARREL), (1, victim, Code.QUARREL)}


def test_where_too_few_are_left_the_run_ends_with_both_named(made: Any) -> None:
    federation = made(4)
    victim = federation.names[3]
    lying(federation.releases[LIAR], LIAR, rubbish([victim]))
    with pytest.raises(Refusal) as caught:
        federation.round()
    assert (caught.value.code, caught.value.site) == (Code.QUARREL, f"{LIAR} and {victim}")
    assert {site for _, site, _ in found(federation)} == {LIAR, victim}
    assert federation.coordinator.state.round_number == 0


def test_of_three_the_run_ends_with_the_liar_named(made: Any) -> None:
    federation = made(3)
    lying(federation.releases[LIAR], LIAR, rubbish(federation.names))
    with pytest.raises(Refusal) as caught:
        federation.round()
    assert (caught.value.code, caught.value.site) == (Code.DISPUTED, LIAR)


def test_who_is_left_out_of_a_sum_is_asked_again_in_the_next_round(made: Any) -> None:
    federation = made(5)
    honest = federation.releases[LIAR].tasks
    lying(federation.releases[LIAR], LIAR, rubbish(federation.names))
    federation.round()
    federation.releases[LIAR].tasks = honest
    federation.round()
    assert summed(federation) == list(federation.names)


# lying accusers


def test_one_lying_accuser_takes_one_site_with_it_at_most_and_only_for_that_sum(made: Any) -> None:
    federation = made(5)
    victim = federation.names[2]
    honest = federation.releases[LIAR].tasks
    accusing(federation.releases[LIAR], LIAR, [victim])
    federation.round()
    assert summed(federation) == others(federation, LIAR, victim)
    federation.releases[LIAR].tasks = honest
    federation.round()
    assert summed(federation) == list(federation.names)


@pytest.mark.parametrize("accused", [2, 3, 4])
def test_a_site_that_accuses_several_goes_alone(made: Any, accused: int) -> None:
    federation = made(5)
    accusing(federation.releases[LIAR], LIAR, others(federation, LIAR)[:accused])
    federation.round()
    assert summed(federation) == others(federation, LIAR)
    assert set(found(federation)) == {(1, LIAR, Code.DISPUTED)}


@pytest.mark.parametrize(
    "shares",
    [
        lambda inbox: {},
        lambda inbox: {"site-00": b"made up"},
        lambda inbox: {"site-00": inbox["site-02"]},
        lambda inbox: {"site-99": inbox["site-02"]},
        lambda inbox: {"site-00": inbox["site-00"], "site-02": b""},
        lambda inbox: [inbox["site-00"]],
    ],
    ids=["nothing", "made up", "another's", "a stranger", "one of two", "a list"],
)
def test_blame_without_what_the_accused_signed_is_no_answer(made: Any, shares: Any) -> None:
    federation = made(5)
    tasks = federation.train() and federation.begun(federation.request())
    inbox = tasks[LIAR]["inbox"]
    keys, context = federation.releases[LIAR]._secure._keys, decode(inbox["site-00"])["context"]
    message = sign(BLAME, {"shares": shares(inbox)}, sender=LIAR, context=context, keys=keys)
    with pytest.raises(PrivacyRefusal):
        federation.attempt.take_blame(LIAR, message)
    assert federation.attempt.blames == {}


def test_blame_of_another_signer_or_attempt_is_no_answer(made: Any) -> None:
    federation = made(5)
    federation.train()
    inbox = federation.begun(federation.request())[LIAR]["inbox"]
    keys, context = federation.releases[LIAR]._secure._keys, decode(inbox["site-00"])["context"]
    body = {"shares": {"site-00": inbox["site-00"]}}
    for sender, about in (("site-02", context), (LIAR, bytes(32))):
        with pytest.raises(Untrusted):
            federation.attempt.take_blame(LIAR, sign(BLAME, body, sender=sender, context=about, keys=keys))
    good = sign(BLAME, body, sender=LIAR, context=context, keys=keys)
    federation.attempt.take_blame(LIAR, good)
    with pytest.raises(PrivacyRefusal):
        federation.attempt.take_blame(LIAR, good)
    assert federation.attempt.blames == {LIAR: ("site-00",)}


@pytest.mark.parametrize(
    ("blames", "out"),
    [
        ({}, {}),
        ({"a": ["l"], "b": ["l"], "c": ["l"]}, {"l": ("a", "b", "c")}),
        ({"l": ["a", "b"]}, {"l": ("a", "b")}),
        ({"a": ["l"]}, {"a": ("l",), "l": ("a",)}),
        ({"a": ["l"], "l": ["a"]}, {"a": ("l",), "l": ("a",)}),
        # Two that lie together: whom both accuse goes without them, or two go with both.
        ({"l": ["a"], "m": ["a"]}, {"a": ("l", "m")}),
        ({"l": ["a", "b"], "m": ["a", "b"]}, {"a": ("l", "m"), "b": ("l", "m"), "l": ("a", "b"), "m": ("a", "b")}),
        # One that lies to three, and a quarrel between two others.
        ({"a": ["l"], "b": ["l"], "c": ["l", "d"]}, {"l": ("a", "b", "c"), "c": ("d",), "d": ("c",)}),
    ],
)
def test_who_is_left_out(blames: dict[str, list[str]], out: dict[str, tuple[str, ...]]) -> None:
    assert left_out(blames) == out


def test_two_that_lie_together_have_four_honest_ones_left_out_of_a_sum(made: Any) -> None:
    """What docs/secure-aggregation.md says of two, and why code 52 may not say that whoever it names lies."""
    federation = made(9)
    liars, honest = federation.names[:2], federation.names[2:]
    for liar in liars:
        accusing(federation.releases[liar], liar, [honest[0]], [honest[1]], honest[2:4])
    federation.round()
    assert summed(federation) == list(honest[4:])
    assert [site for _, site, _ in found(federation)[:2]] == list(honest[:2])
    assert {site for _, site, _ in found(federation)} == {*liars, *honest[:4]}
    assert "it lies, or those others do together" in str(federation.left_out[0][3])


def test_two_that_lie_together_can_end_a_run(made: Any) -> None:
    federation = made(9)
    liars, honest = federation.names[:2], federation.names[2:]
    for liar in liars:
        accusing(federation.releases[liar], liar, *([name] for name in honest))
    with pytest.raises(Refusal) as caught:
        federation.round()
    assert (caught.value.code, caught.value.site) == (Code.DISPUTED, " and ".join(honest[:4]))


# caught by its own signatures


def test_a_site_that_tells_two_others_different_things_is_caught_with_both(made: Any) -> None:
    federation = made(5)
    lying(federation.releases[LIAR], LIAR, lambda peer, body: {"self": bytes(32)} if peer == "site-02" else {})
    heard: list[Refusal] = []
    exchange = federation.exchange

    def listening(task: str, asked: Any, take: Any, **options: Any) -> Any:
        def taken(site: str, answer: Message) -> None:
            try:
                take(site, answer)
            except Refusal as refusal:
                heard.append(refusal)
                raise

        return exchange(task, asked, taken, **options)

    federation.summing._exchange = listening
    federation.round()
    assert summed(federation) == others(federation, LIAR)
    assert {(each.code, each.site) for each in heard} == {(Code.CAUGHT, LIAR)}
    assert "committed to different secrets towards different sites; evidence: " in heard[0].evidence
    record = kept(federation.folder / "server")[0]
    assert (record["site"], record["round"]) == (LIAR, 1)
    bodies = proven(record, federation)
    assert len({body["self"] for body in bodies}) == 2, "its own messages contradict one another"


def test_a_liar_that_is_found_when_the_sum_is_opened_is_reported(made: Any) -> None:
    """It commits to one self mask towards everybody and shares another: seen only when enough have revealed."""
    federation = made(5)
    lying(federation.releases[LIAR], LIAR, lambda peer, body: {"self": bytes(32)})
    with pytest.raises(Refusal) as caught:
        federation.round()
    assert (caught.value.code, caught.value.site) == (Code.CAUGHT, LIAR)
    assert (1, LIAR, Code.CAUGHT) in found(federation)
    assert "shared another secret than it committed to; evidence: " in federation.left_out[0][3].evidence
    assert all(body["self"] == bytes(32) for body in proven(kept(federation.folder / "server")[0], federation))
    # Resuming helps nobody: those that revealed are in no other sum of these updates. Another seed's are other ones.
    federation.open_job("job-2")
    rest = federation.agree(others(federation, LIAR))
    with pytest.raises(Refusal):
        federation.round(rest)
    assert {code for _, _, code in federation.refused} == {Code.MASKED_BEFORE}
    assert "a new run with another --seed" in str(caught.value)
    assert "resume" not in str(caught.value)


def test_a_liar_that_sealed_rubbish_and_dropped_out_is_reported(made: Any) -> None:
    federation = made(6)
    release = federation.releases[LIAR]
    original = release._secure.begin

    def begin(binding: Any, **options: Any) -> bytes:
        with pytest.MonkeyPatch.context() as patch:
            # Its masks with the others are the first thing that it writes; then come its boxes.
            written = iter([encode(7)])
            patch.setattr("crossward.privacy.secagg.site.encode", lambda value: next(written, None) or encode(value))
            return original(binding, **options)

    release._secure.begin = begin
    federation.deaf = lambda task, site: task == CONTRIBUTE and site == LIAR
    federation.round()
    assert summed(federation) == others(federation, LIAR)
    assert (1, LIAR, Code.CAUGHT) in found(federation)
    assert "sealed a list of masks that is none" in federation.left_out[0][3].evidence


def proven(record: Mapping[str, Any], federation: Federation, kind: str = SHARE) -> list[dict[str, Any]]:
    """Bodies of what a record's site signed, checked with nothing but the record and the federation's root."""
    site = record["site"]
    job = federation.summing.server._job
    hello = checked_hello(
        base64.b64decode(record["hellos"][site]), job=job, settings=federation.masking, roots=authority().roots
    )
    signed = [base64.b64decode(each) for each in record["messages"].values()]
    return [
        signed_by(each, kind, sender=site, context=decode(each)["context"], verify_key=hello["verify_key"])
        for each in signed
        if (decode(each)["kind"], decode(each)["sender"]) == (kind, site)
    ]


# evidence


def test_evidence_of_a_quarrel_is_at_the_server_and_at_whoever_was_lied_to(made: Any) -> None:
    federation = made(5)
    victim = federation.names[3]
    lying(federation.releases[LIAR], LIAR, rubbish([victim]))
    federation.round()
    own = kept(federation.folder / victim)
    assert {(each["site"], each["round"]) for each in own} == {(LIAR, 1)}
    assert all(proven(each, federation)[0]["to"] == victim for each in own)
    for record in kept(federation.folder / "server"):
        (blame,) = (base64.b64decode(each) for each in record["messages"].values())
        assert decode(blame)["kind"] == BLAME
        assert decode(blame)["sender"] == victim
        shares = decode(decode(blame)["body"])["shares"]
        assert shares.keys() == {LIAR}
        assert record["hellos"].keys() == {LIAR, victim}
    assert not (federation.folder / "site-00" / "evidence").exists()


def test_evidence_holds_no_secret_and_nothing_revealed(made: Any) -> None:
    federation = made(5)
    lying(federation.releases[LIAR], LIAR, lambda peer, body: {"self": bytes(32)})
    with pytest.raises(Refusal):
        federation.round()
    secrets = [
        share
        for each in federation.said
        if each.task in (SURVIVORS, REVEALING) and decode(each.answer["opening"])["kind"] == REVEAL
        for part in ("self", "wrap")
        for share in decode(decode(each.answer["opening"])["body"])[part].values()
    ]
    assert secrets
    for path in (federation.folder).rglob("evidence/*"):
        record = json.loads(path.read_text())
        raw = b"".join(base64.b64decode(each) for each in record["messages"].values())
        assert not any(secret in raw for secret in secrets)
        assert {decode(base64.b64decode(each))["kind"] for each in record["messages"].values()} <= {SHARE, BLAME}
        assert path.parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("again", [SURVIVORS, REVEALING])
def test_a_second_set_of_survivors_is_refused_and_both_are_kept(made: Any, again: str) -> None:
    federation = made(5)
    request = federation.request()
    federation.train()
    tasks = federation.begun(request)
    uploads = {site: federation.ask(site, CONTRIBUTE, task)["upload"] for site, task in tasks.items()}
    four, other = ({site: uploads[site] for site in others(federation, gone)} for gone in ("site-03", "site-04"))
    agreed = {
        site: federation.ask(site, SURVIVORS, {**federation.address(1), "uploads": four})["opening"] for site in four
    }
    assert not (federation.folder / "site-00" / "evidence").exists()
    if again == SURVIVORS:
        message = {**federation.address(1), "uploads": other}
    else:
        message = {**federation.address(1), "agreements": agreed}
        assert federation.ask("site-00", REVEALING, message) is not None
    assert federation.refusal("site-00", again, message) is Code.NOT_MASKED
    (record,) = kept(federation.folder / "site-00")
    assert (record["site"], record["round"], record["attempt"]) == ("server", 1, 1)
    first = {name.removeprefix("first: ") for name in record["messages"] if name.startswith("first: ")}
    assert first == set(four)
    assert "own upload" in record["messages"]
    if again == SURVIVORS:
        assert {name.removeprefix("then: ") for name in record["messages"] if name.startswith("then: ")} == set(other)
        assert decode(base64.b64decode(record["messages"]["own opening"]))["kind"] == "agreed"
    else:
        assert {f"then agreed: {name}" for name in agreed} <= record["messages"].keys()
        assert "own opening" not in record["messages"], "it was the reveal"


def test_a_replayed_attempt_is_refused_and_kept(made: Any) -> None:
    federation = made(5)
    request = federation.request()
    federation.train()
    tasks = federation.begun(request)
    assert federation.ask("site-00", CONTRIBUTE, tasks["site-00"]) is not None
    assert federation.refusal("site-00", BEGIN, federation.asking(request)) is Code.MASKED_BEFORE
    (record,) = kept(federation.folder / "site-00")
    assert record["site"] == "server"
    assert "attempt 1 of round 1 was made before" in record["what"]
    assert "own upload" in record["messages"]


def test_an_honest_round_with_drop_outs_leaves_no_evidence(made: Any) -> None:
    federation = made(6)
    federation.deaf = lambda task, site: task == CONTRIBUTE and site == LIAR
    federation.round()
    assert not list(federation.folder.rglob("evidence"))


# the gate


@pytest.fixture
def blamed(made: Any) -> Answered:
    federation = made(5)
    lying(federation.releases[LIAR], LIAR, rubbish(federation.names))
    federation.round()
    return next(each for each in federation.said if "blame" in each.answer)


DECLARATION = Declaration(made_up_study("fedavg").masked(Settings()))


def test_the_gate_lets_blame_out_in_place_of_a_vector(blamed: Answered) -> None:
    answer = {"code": 0, **blamed.answer}
    assert DECLARATION.rebuild(CONTRIBUTE, answer, blamed.message) == answer


@pytest.mark.parametrize("beside", ["vector", "upload", "note"])
def test_the_gate_lets_nothing_out_beside_blame(blamed: Answered, beside: str) -> None:
    with pytest.raises(PrivacyRefusal, match=f"the answer holds '{beside}'"):
        DECLARATION.rebuild(CONTRIBUTE, {"code": 0, **blamed.answer, beside: b"x"}, blamed.message)


@pytest.mark.parametrize(
    "change",
    [
        lambda body: {"shares": {LIAR: b"4711 has a nodule"}},
        lambda body: {"shares": {**body["shares"], "site-00": b"4711"}},
        lambda body: {"shares": {}},
        lambda body: {"shares": [body["shares"][LIAR]]},
        lambda body: {**body, "note": b"4711"},
        lambda body: {},
        lambda body: [],
    ],
    ids=["other bytes", "one more", "nobody", "a list", "a note", "nothing", "no fields"],
)
def test_the_gate_lets_no_blame_out_that_holds_more_than_what_came(blamed: Answered, change: Any) -> None:
    signed = decode(blamed.answer["blame"])
    other = encode({**signed, "body": encode(change(decode(signed["body"])))})
    with pytest.raises(PrivacyRefusal, match=r"contribute: blame (holds|is not)"):
        DECLARATION.rebuild(CONTRIBUTE, {"code": 0, **blamed.answer, "blame": other}, blamed.message)


def test_the_gate_lets_no_blame_out_that_nobody_was_sent_shares_for(blamed: Answered) -> None:
    for asked in (None, {}, {"inbox": {}}, {"inbox": [blamed.message["inbox"]]}):
        with pytest.raises(PrivacyRefusal, match="contribute: blame"):
            DECLARATION.rebuild(CONTRIBUTE, {"code": 0, **blamed.answer}, asked)


def test_a_message_of_another_kind_is_no_blame(blamed: Answered) -> None:
    for other in (blamed.message["inbox"][LIAR], b"", b"4711 has a nodule", None):
        with pytest.raises(PrivacyRefusal):
            DECLARATION.rebuild(CONTRIBUTE, {"code": 0, **blamed.answer, "blame": other}, blamed.message)
