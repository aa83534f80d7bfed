"""F2DC's block and RFedDis's heads on other methods: scopes, losses, and a round of two small sites."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.site.made_up_sites import made_up_cohort, made_up_study
from torch import Tensor, nn

from crossward.federation.contract import Report
from crossward.federation.coordinator import Coordinator
from crossward.federation.scopes import Scope, layout_of
from crossward.federation.storage import read_tensors
from crossward.methods import Task, create
from crossward.methods.base import Batch, Context, Model
from crossward.methods.f2dc import F2DC, DecouplingBlock, hardest_wrong_label
from crossward.methods.fedavg import FedAvg
from crossward.methods.rfeddis import EvidentialHeads
from crossward.nets.layers import Norm
from crossward.site.inprocess import simulate
from crossward.site.participant import Plugs
from crossward.uncertainty.evidence import expected_probabilities

TASK = Task(classes=("a", "b", "c"), channels=1, size=8, rounds=2, width=0.0625)
SITES = ("alder", "birch")
NORMALISATIONS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm)
LOCAL_NORMALISATION = {"fedbn", "rfeddis"}

BLOCKED = [
    (host, {"block": block})
    for host in ("fedavg", "fedprox", "fedbn", "rfeddis", "fedcode", "fdse")
    for block in ("f2dc", "f2dc-shared")
]
HEADED = [(host, {"head": "evidential"}) for host in ("fedavg", "fedprox", "fedbn", "f2dc", "local", "fedcode", "fdse")]
BOTH = [(host, {"block": "f2dc", "head": "evidential"}) for host in ("fedavg", "fedcode", "fdse")]

every_plug = pytest.mark.parametrize(("host", "plugs"), BLOCKED + HEADED + BOTH)
every_norm = pytest.mark.parametrize("norm", ["batch", "group"])


def tensors_of(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> set[str]:
    """Names of the tensors that belong to layers of some kinds, from a bare walk over the model."""
    return {
        f"{name}.{tensor}"
        for name, module in model.named_modules()
        if isinstance(module, kinds)
        for tensor in module.state_dict()
    }


def scopes_of(model: nn.Module, part: str) -> dict[str, Scope]:
    """Scopes of the floating-point tensors of one part; the batch counter is local anyway."""
    floating = {name for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    return {
        name: spec.scope for name, spec in layout_of(model).items() if name.startswith(f"{part}.") and name in floating
    }


@every_norm
@pytest.mark.parametrize(("host", "plugs"), BLOCKED)
def test_a_plugged_block_has_its_own_scopes_and_the_host_keeps_its(
    host: str, plugs: dict[str, str], norm: Norm
) -> None:
    task = replace(TASK, norm=norm)
    method = create(host)
    model, plain = method.build(task, **plugs), method.build(task)
    assert isinstance(model.block, DecouplingBlock)
    for part in ("backbone", "head"):
        assert scopes_of(model, part) == scopes_of(plain, part)
    own = scopes_of(model, "block")
    normalisation = tensors_of(model, NORMALISATIONS)
    parameters = {name for name, _ in model.named_parameters()}
    assert len(own) == (14 if norm == "batch" else 10)
    for name, scope in own.items():
        if plugs["block"] == "f2dc" or (host in LOCAL_NORMALISATION and name in normalisation):
            assert scope is Scope.LOCAL, name
        else:
            assert scope is (Scope.SHARED if name in parameters else Scope.BUFFER), name
    sent = method.algebra(task, model).sent
    assert {name for name in sent if name.startswith("block.")} == {
        name for name, scope in own.items() if scope is not Scope.LOCAL
    }
    if plugs["block"] == "f2dc":
        assert sent == method.algebra(task, plain).sent


@every_norm
@pytest.mark.parametrize(("host", "plugs"), HEADED)
def test_plugged_heads_have_their_own_scopes_and_the_host_keeps_its(
    host: str, plugs: dict[str, str], norm: Norm
) -> None:
    task = replace(TASK, norm=norm)
    method = create(host)
    model, plain = method.build(task, **plugs), method.build(task)
    assert isinstance(model.head, EvidentialHeads)
    for part in ("backbone", "block"):
        assert scopes_of(model, part) == scopes_of(plain, part)
    linear = {name for name in tensors_of(model, (nn.Linear,)) if name.startswith("head.shared.")}
    assert len(linear) == 6
    shared = set() if host == "local" else linear
    assert {name for name, scope in scopes_of(model, "head").items() if scope is not Scope.LOCAL} == shared
    assert {name for name in method.algebra(task, model).sent if name.startswith("head.")} == shared


@every_norm
def test_on_fedbn_no_normalisation_leaves_whatever_is_plugged_in(norm: Norm) -> None:
    task = replace(TASK, norm=norm)
    method = create("fedbn")
    model = method.build(task, block="f2dc-shared", head="evidential")
    normalisation = tensors_of(model, NORMALISATIONS)
    assert {name.split(".")[0] for name in normalisation} == {"backbone", "block", "head"}
    assert normalisation.isdisjoint(method.algebra(task, model).sent)


def losses(host: str, model: Model, count: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(9)
    batch = Batch(torch.randn(count, 1, 8, 8, generator=generator), torch.arange(count) % 3)
    received = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    context = Context("a", 2, 2, received, generator)
    return create(host).terms(model, model(batch.images, generator), batch, context)


@every_norm
@every_plug
def test_plugged_parts_bring_their_losses_and_are_trained_by_them(host: str, plugs: dict[str, str], norm: Norm) -> None:
    task = replace(TASK, norm=norm)
    model = create(host).build(task, **plugs).train()
    terms = losses(host, model, 6)
    from_block = {"decoupling", "correction"} if "block" in plugs or host == "f2dc" else set()
    from_heads = {"uncertainty", "disentangling"} if "head" in plugs or host == "rfeddis" else set()
    own = {"fedcode": {"orthogonality"}, "fdse": {"consistency"} if norm == "batch" else set()}.get(host, set())
    assert set(terms) == {"cross_entropy"} | from_block | from_heads | own
    coupled = create(host).coupled | model.coupled
    assert all(term.shape == (() if name in coupled else (6,)) for name, term in terms.items())
    assert all(torch.isfinite(term).all() for term in terms.values())
    torch.stack([term.sum() for term in terms.values()]).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
    plugged: list[nn.Module] = [model.block] if "block" in plugs else []
    plugged += [model.head] if "head" in plugs else []
    for part in plugged:
        for name, parameter in part.named_parameters():
            if name.endswith("weight"):
                assert parameter.grad is not None
                assert parameter.grad.any(), name


@every_norm
@every_plug
@pytest.mark.parametrize("count", [0, 1])
def test_plugged_parts_train_on_none_and_on_one(host: str, plugs: dict[str, str], norm: Norm, count: int) -> None:
    model = create(host).build(replace(TASK, norm=norm), **plugs).train()
    terms = losses(host, model, count)
    torch.stack([term.sum() for term in terms.values()]).sum().backward()
    assert all(torch.isfinite(term).all() for term in terms.values())
    assert all(parameter.grad is None or torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def test_the_proximal_term_does_not_hold_what_never_leaves() -> None:
    method = create("fedprox", mu=1.0)
    model = method.build(TASK, block="f2dc")
    received = method.start(TASK, model).tensors
    context = Context("a", 1, 2, received, torch.Generator())
    with torch.no_grad():
        for parameter in model.block.parameters():
            parameter.add_(1.0)
    assert method.penalty(model, context)["proximal"].item() == 0
    with torch.no_grad():
        model.head.linear.bias.add_(2.0)
    assert method.penalty(model, context)["proximal"].item() == pytest.approx(0.5 * 3 * 4)


def test_under_evidential_heads_the_wrong_label_is_the_one_with_most_evidence() -> None:
    model = create("f2dc").build(TASK, head="evidential").eval()
    labels = torch.tensor([0, 1, 2, 0, 1])
    with torch.no_grad():
        trace = model(torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(4)))
    evidence = trace.notes["evidence/fused"].tolist()
    expected = [
        max((c for c in range(3) if c != label), key=row.__getitem__)
        for row, label in zip(evidence, labels.tolist(), strict=True)
    ]
    assert hardest_wrong_label(trace.logits, labels).tolist() == expected


@pytest.mark.parametrize("host", ["fedavg", "rfeddis"])
def test_a_hospital_that_did_not_train_has_neither_local_block_nor_local_head(host: str) -> None:
    method = create(host)
    model = method.build(TASK, block="f2dc", head="evidential").eval()
    images = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(4))
    local = [*model.block.parameters(), *model.head.local.parameters()]
    with torch.no_grad():
        for parameter in local:
            parameter.fill_(math.nan)
        model.forget_local()
        answer = method.predict(model, images)
        evidence = nn.functional.softplus(model.head.shared(model.backbone(images).mean(dim=(2, 3)))[1])
    assert torch.equal(answer.probabilities, expected_probabilities(evidence))


def test_f2dc_without_its_block_is_fedavg_with_domain_aware_weights() -> None:
    bare, plain = F2DC().build(TASK, block="none"), FedAvg().build(TASK)
    one, other = bare.state_dict(), plain.state_dict()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert layout_of(bare) == layout_of(plain)
    own, reference = F2DC().algebra(TASK, bare), FedAvg().algebra(TASK, plain)
    assert own.sent == reference.sent
    assert (own.needs, reference.needs) == ("totals", "nothing")
    terms, plain_terms = losses("f2dc", bare.train(), 4), losses("fedavg", plain.train(), 4)
    assert terms.keys() == plain_terms.keys() == {"cross_entropy"}
    assert torch.equal(terms["cross_entropy"], plain_terms["cross_entropy"])


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[Report]:
    """What the server was given."""
    given: list[Report] = []
    accept = Coordinator.accept

    def spy(self: Coordinator, report: Report) -> None:
        given.append(report)
        accept(self, report)

    monkeypatch.setattr(Coordinator, "accept", spy)
    return given


@every_plug
def test_a_round_of_two_sites_keeps_local_parts_in_the_vault(
    host: str, plugs: dict[str, str], tmp_path: Path, reports: list[Report]
) -> None:
    study = replace(made_up_study(host, rounds=1, steps=2), plugs=Plugs(**plugs))
    model = study.model()
    layout, start = layout_of(model), model.state_dict()
    local = {name for name, spec in layout.items() if spec.scope is Scope.LOCAL}
    result = simulate(made_up_cohort(SITES), study, tmp_path / "run", jobs=1)
    assert [result["rounds"][0]["sites"][site]["status"] for site in SITES] == ["reported"] * 2

    assert sorted(report.site for report in reports) == list(SITES)
    for report in reports:
        assert report.update.keys() == {*layout, *study.method.extras(study.task, model)} - local
        assert all(torch.isfinite(tensor).all() for tensor in report.update.values())
    vaults = [tmp_path / "run" / "sites" / site / "vault" for site in SITES]
    kept = [read_tensors(vault / "local-0001.safetensors")[0] for vault in vaults]
    received = [read_tensors(vault / "model-0001.safetensors")[0] for vault in vaults]
    parts = ("block.", "head.")
    for tensors, whole in zip(kept, received, strict=True):
        assert tensors.keys() == local
        assert all(torch.equal(whole[name], tensor) for name, tensor in tensors.items())
    for name in local:
        if name.startswith(parts) and name.endswith(("weight", "running_mean")):
            assert not torch.equal(kept[0][name], start[name]), f"{name} was not trained"
            assert not torch.equal(kept[0][name], kept[1][name]), f"{name} is the same at both sites"
    personal = {name for name, spec in layout.items() if spec.scope is Scope.PERSONAL}
    assert bool(personal) == (host == "fdse")
    for name in set(layout) - local - personal:
        assert torch.equal(received[0][name], received[1][name]), name
    if plugs.get("block") == "f2dc":
        assert any(name.startswith("block.") for name in local)
    if "head" in plugs:
        assert any(name.startswith("head.local.") for name in local)
