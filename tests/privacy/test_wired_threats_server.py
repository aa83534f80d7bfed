"""What an honest server does where sites refuse: it plans anew, or asks for ranges again; and who may be a site."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from crossward.federation.algebra import Algebra
from crossward.federation.contract import Plan, State
from crossward.federation.coordinator import Coordinator
from crossward.federation.errors import CrosswardError
from crossward.federation.rules import SampleMean
from crossward.federation.scopes import Scope, TensorSpec
from crossward.privacy.secagg.identity import Identity, Untrusted, check_signed
from crossward.privacy.secagg.memory import Forgetful
from crossward.privacy.secagg.server import SecureServer
from crossward.privacy.secagg.settings import Settings
from crossward.privacy.secagg.site import SecureSite
from crossward.privacy.sums import Kind, Request, received_digest
from crossward.site import messages
from crossward.site.evidence import Evidence
from crossward.site.masked_run import MaskedRun
from crossward.site.messages import BEGIN, CONTRIBUTE, TRAIN, Message
from crossward.site.summing import Opened, Summing
from tests.privacy.federation import authority, identity, names, secure_site
from tests.privacy.lying_table import STUDY, Table
from tests.privacy.lying_watch import averaging, mixtures
from tests.privacy.test_wired_threats import whole_plan


class Server:
    """An honest server over the sites of a table; ``deaf`` says whose tasks do not arrive."""

    def __init__(self, table: Table, folder: Path) -> None:
        self.table = table
        self.deaf: Callable[[str, str], bool] = lambda task, site: False
        self.asked: list[Request] = []
        roots = authority().roots
        self.summing = Summing(
            lambda number: SecureServer(f"job-1/{number}", settings=table.settings, roots=roots),
            table.masked,
            study=STUDY,
            exchange=self._exchange,
            evidence=Evidence(folder, shown="runs/server"),
        )
        self.summing.agree({name: {} for name in table.names}, round_number=0, enough=len(table.names))

    def _exchange(
        self,
        task: str,
        asked: Mapping[str, Message],
        take: Callable[[str, Message], None],
        *,
        round_number: int,
        enough: int,
    ) -> Collection[str]:
        del round_number, enough
        heard = []
        for site, message in asked.items():
            if task == BEGIN and site == min(asked):
                self.asked.append(Request.from_message(message["sum"]))
            try:
                if not self.deaf(task, site):
                    take(site, self.table.sites[site].tasks[task](message))
                    heard.append(site)
            except CrosswardError:
                continue
        return heard

    def kinds(self) -> list[Kind]:
        """Of the sums that were asked for since the last time."""
        found, self.asked = [request.kind for request in self.asked], []
        return found


def test_a_site_that_is_lost_costs_a_planned_sum_another_plan(tmp_path: Path) -> None:
    """The plan of five was opened over four, so that weights did not sum to 1, and the step was too small."""
    table = Table(mixtures, 5, fewest=4)
    server = Server(table, tmp_path)
    table.train(7)
    planned: list[tuple[str, ...]] = []
    server.deaf = lambda task, site: task == CONTRIBUTE and site == "site-02"

    def plan_for(cohort: tuple[str, ...]) -> Plan:
        planned.append(cohort)
        return Plan(1, cohort, whole_plan(len(cohort), [1 / len(cohort)] * len(cohort)))

    opened = server.summing.sum(
        Kind.UPDATES,
        {name: {} for name in table.names},
        round_number=1,
        model=received_digest({}, None),
        plan_for=plan_for,
        limits=dict.fromkeys(table.algebra.sent, 100.0),
    )
    left = tuple(name for name in table.names if name != "site-02")
    assert (planned, opened.survivors, opened.request.attempt) == ([table.names, left], left, 2)


class Rounds(Server):
    """Rounds of a run whose model does not matter."""

    def __init__(self, table: Table, folder: Path) -> None:
        super().__init__(table, folder)
        start = {name: torch.zeros(spec.shape) for name, spec in table.algebra.sent.items()}
        self.coordinator = Coordinator(folder, table.algebra, State(0, start), sites=table.names, rounds=9, seed=0)
        self.run = MaskedRun(self.coordinator, self.summing, lambda number: {"round": number})

    def round(self, sites: Collection[str]) -> Opened:
        number = self.coordinator.state.round_number + 1
        for site in sites:
            self.table.sites[site].tasks[TRAIN](self.run.with_model(site, number))
        after, opened, tally = self.run.close(list(sites), {})
        self.coordinator.close_round(self.run.record(opened, tally, {}, sites, refused={}, seconds=0.0), after)
        return opened


def test_ranges_are_asked_for_again_when_a_site_joins(tmp_path: Path) -> None:
    """Its products may be far larger than those of the others, and most of them would have been cut off."""
    table = Table(averaging, 4)
    table.hospitals["site-03"].samples = 1e6
    rounds = Rounds(table, tmp_path)
    rounds.round(table.names[:3])
    assert rounds.kinds() == [Kind.RANGES, Kind.UPDATES]
    rounds.round(table.names[:3])
    assert rounds.kinds() == [Kind.UPDATES]
    opened = rounds.round(table.names)
    assert rounds.kinds() == [Kind.RANGES, Kind.UPDATES]
    assert opened.numbers["outside", "w"] == 0
    rounds.round(table.names[:3])
    assert rounds.kinds() == [Kind.UPDATES]


def test_ranges_are_asked_for_again_when_products_outgrow_them(tmp_path: Path) -> None:
    """Three sites refuse to send little but signs: the round goes on with other ranges, and its sum is right."""

    def wide(fewest: int) -> Algebra:
        del fewest
        return Algebra({"w": TensorSpec(Scope.SHARED, (2048,))}, {Scope.SHARED: SampleMean()})

    table = Table(wide, 3)
    rounds = Rounds(table, tmp_path)
    rounds.round(table.names)
    rounds.kinds()
    before = rounds.coordinator.state
    for hospital in table.hospitals.values():
        hospital.scale = 1000.0
    rounds.round(table.names)
    assert rounds.kinds() == [Kind.UPDATES, Kind.RANGES, Kind.UPDATES]
    payload = messages.unpack_payload(messages.pack_payload(before.payload("site-00")))
    parts = [(each.samples, each.train(payload).update["w"].double()) for each in table.hospitals.values()]
    mean = sum(n * update for n, update in parts) / sum(n for n, _ in parts)
    moved = rounds.coordinator.state.tensors["w"].double() - before.tensors["w"].double()
    np.testing.assert_allclose(moved, mean, atol=1e-3)


# Who is a site


def certificate_of(name: str, *more: x509.NameAttribute[str]) -> tuple[Identity, bytes]:
    """A certificate with more in its subject than a name, and the root that issued it."""
    root, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    now, issuer = datetime.now(UTC), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "root")])

    def issue(subject: x509.Name, public: ec.EllipticCurvePublicKey, *, ca: bool) -> bytes:
        made = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .sign(root, hashes.SHA256())
        )
        return made.public_bytes(serialization.Encoding.PEM)

    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name), *more])
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return Identity(issue(subject, key.public_key(), ca=False), pem), issue(issuer, root.public_key(), ca=True)


def test_a_user_s_certificate_makes_no_site() -> None:
    """An administrator's kit has a certificate of the same root: with it somebody could stand in for a third site."""
    plain, root = certificate_of("somebody")
    check_signed(b"hello", plain.sign(b"hello"), certificate=plain.certificate, name="somebody", roots=root)
    user, root = certificate_of("somebody", x509.NameAttribute(NameOID.UNSTRUCTURED_NAME, "project_admin"))
    with pytest.raises(Untrusted, match="of a user"):
        check_signed(b"hello", user.sign(b"hello"), certificate=user.certificate, name="somebody", roots=root)


def test_the_server_s_own_certificate_makes_no_site() -> None:
    """It is issued by the same root as the sites': beside a site that colludes it would leave one honest site."""
    sites = {name: secure_site(name, settings=Settings(), memory=Forgetful()) for name in (*names(2), "server")}
    wary = SecureSite(
        "site-09",
        "job-1",
        settings=Settings(),
        identity=identity("site-09"),
        roots=authority().roots,
        memory=Forgetful(),
        outsiders={"server"},
    )
    with pytest.raises(Untrusted, match="no site"):
        wary.join([wary.hello(), *(site.hello() for site in sites.values())])
