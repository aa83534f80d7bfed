from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tests.site.packs import carried

import crossward
from crossward.federation.contract import Payload, Plan, Report
from crossward.site import messages
from crossward.site.messages import PROTOCOL, address, check_address, pack_payload, unpack_payload
from crossward.site.troubles import Code, Refusal

PLAN = Plan(2, ("alder", "birch"), {"shared": {"weight:conv": np.array([0.1 + 0.2, 1e-300])}})
PAYLOAD = Payload(3, {"w": torch.arange(6.0).reshape(2, 3), "s": torch.tensor(0.1)}, best_round=2, plan=PLAN)
FINITE = arrays.arrays(
    np.float32, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3), elements=st.floats(width=32)
)


def leaves(value: Any) -> list[Any]:
    return [leaf for part in value.values() for leaf in leaves(part)] if isinstance(value, dict) else [value]


def test_an_address_has_what_a_site_needs_to_know_and_no_more() -> None:
    assert address(run="r-1", study="ab" * 32, round_number=4) == {
        "protocol": 1,
        "version": crossward.__version__,
        "study": "ab" * 32,
        "run": "r-1",
        "round": 4,
    }
    check_address(address(run="r-1", study="ab" * 32, round_number=4), "ab" * 32)


@pytest.mark.parametrize(
    "change",
    [
        {"protocol": PROTOCOL + 1},
        {"protocol": str(PROTOCOL)},
        {"protocol": None},
        {"version": "0.0.0"},
        {"version": ""},
        {"study": "cd" * 32},
        {"study": None},
    ],
)
def test_another_protocol_version_or_study_is_refused(change: dict[str, Any]) -> None:
    message = address(run="r-1", study="ab" * 32, round_number=1) | change
    with pytest.raises(Refusal) as caught:
        check_address(message, "ab" * 32)
    assert caught.value.code is Code.VERSION


@pytest.mark.parametrize("missing", ["protocol", "version", "study"])
def test_an_address_that_lacks_something_is_refused(missing: str) -> None:
    message = address(run="r-1", study="ab" * 32, round_number=1)
    del message[missing]
    with pytest.raises(Refusal):
        check_address(message, "ab" * 32)


def test_a_payload_arrives_as_it_was_sent() -> None:
    back = unpack_payload(carried(pack_payload(PAYLOAD)))
    assert (back.round_number, back.best_round) == (3, 2)
    assert back.plan is not None
    assert back.plan.digest() == PLAN.digest()
    assert back.tensors.keys() == PAYLOAD.tensors.keys()
    assert all(torch.equal(back.tensors[name], tensor) for name, tensor in PAYLOAD.tensors.items())
    assert {tensor.dtype for tensor in back.tensors.values()} == {torch.float32}


def test_the_common_start_has_no_plan_and_no_best_round() -> None:
    packed = pack_payload(Payload(0, {}))
    assert packed == {"model_round": 0, "best_round": None, "plan": "", "sealed": {}, "tensors": {}}
    back = unpack_payload(packed)
    assert (back.round_number, back.best_round, back.plan, back.sealed) == (0, None, None, None)


@given(st.dictionaries(st.text(max_size=8), FINITE, max_size=3), st.dictionaries(st.text(max_size=8), FINITE))
def test_a_report_arrives_bit_for_bit(update: dict[str, Any], tally: dict[str, Any]) -> None:
    tensors = {name: torch.from_numpy(value.copy()) for name, value in update.items()}
    counts = {name: value.astype(np.float64) for name, value in tally.items()}
    sent = Report("alder", 5, "ab" * 32, tensors, counts)
    back = messages.unpack_report("alder", carried({"round": 5, **messages.pack_report(sent)}))
    assert (back.site, back.round_number, back.model) == ("alder", 5, "ab" * 32)
    assert {name: value.numpy().tobytes() for name, value in back.update.items()} == {
        name: value.tobytes() for name, value in update.items()
    }
    assert {name: value.tobytes() for name, value in back.tally.items()} == {
        name: value.tobytes() for name, value in counts.items()
    }


def test_only_plain_values_travel() -> None:
    report = Report("alder", 1, "ab" * 32, {"w": torch.ones(2, requires_grad=True)}, {"n": np.ones(1)})
    for packed in (pack_payload(PAYLOAD), messages.pack_report(report), address(run="r", study="s", round_number=1)):
        assert {type(leaf) for leaf in leaves(packed)} <= {int, str, type(None), np.ndarray}


def test_read_only_memory_is_copied_and_never_written_to() -> None:
    sent = carried(pack_payload(PAYLOAD))
    assert not sent["tensors"]["w"].flags.writeable
    unpack_payload(sent).tensors["w"].zero_()
    assert sent["tensors"]["w"].tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("missing", ["model_round", "best_round", "plan", "tensors"])
def test_a_model_that_lacks_a_part_is_a_bad_task(missing: str) -> None:
    message = pack_payload(PAYLOAD)
    del message[missing]
    with pytest.raises(Refusal) as caught:
        unpack_payload(message)
    assert caught.value.code is Code.BAD_TASK


@pytest.mark.parametrize(
    "change",
    [
        {"model_round": "three"},
        {"model_round": None},
        {"model_round": [1]},
        {"tensors": None},
        {"tensors": [np.zeros(1)]},
        {"tensors": "w"},
        {"tensors": {"w": [1.0]}},
        {"tensors": {"w": "text"}},
        {"tensors": {"w": np.array([object()])}},
        {"tensors": {"w": np.array(["text"])}},
        {"plan": "not json"},
        {"plan": "[1]"},
        {"plan": 7},
        {"plan": '[1, ["a"], {"shared": {"w": "text"}}]'},
    ],
    # Named by its parts: the address of an object would differ from one test process to the next.
    ids=lambda change: re.sub(r" at 0x\w+", "", str(change)),
)
def test_what_is_no_model_is_a_bad_task(change: dict[str, Any]) -> None:
    with pytest.raises(Refusal) as caught:
        unpack_payload(pack_payload(PAYLOAD) | change)
    assert caught.value.code is Code.BAD_TASK


def test_a_trouble_is_a_code_with_its_numbers() -> None:
    assert messages.trouble(Refusal(Code.SMALL_SUMS, sites=3, needed=4)) == {
        "code": 25,
        "numbers": {"sites": 3.0, "needed": 4.0},
    }
    assert messages.trouble(Refusal(Code.LABELS, unknown=3, images=40)) == {"code": 14, "numbers": {}}
    assert messages.trouble(Refusal(Code.BUSY)) == {"code": 17, "numbers": {}}
    assert type(messages.trouble(Refusal(Code.BUSY))["code"]) is int
