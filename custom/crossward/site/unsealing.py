"""The result of a masked round as one site reads it: its own part without pads, turned vectors turned back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from crossward.federation.contract import Payload, Sealed, Summed, Vector
from crossward.federation.rules import divide
from crossward.privacy.secagg.masks import CipherName, remove_pads
from crossward.privacy.secagg.ring import Ring
from crossward.privacy.secagg.sketch import rotation
from crossward.privacy.secagg.vector import checked
from crossward.privacy.sums import MaskedAlgebra
from crossward.site.participant import Participant


def unsealed(
    payload: Payload, participant: Participant, masked: MaskedAlgebra, *, cipher: CipherName, threads: int
) -> Payload:
    """Open what only this site can open, with the keys that it kept before the sum could exist.

    Args:
        payload: as the server sent it.
        participant: whose vault has the keys of the round.
        masked: which tensors are personal, and which are turned.
        cipher: of the pads.
        threads: for taking pads off.

    Raises:
        PrivacyRefusal: what is said to be this site's part is not what the sites summed for it.
    """
    if not payload.round_number:
        return payload
    keys = participant.vault.keys(payload.round_number)
    tensors, turns = dict(payload.tensors), keys.get("rotations", {})
    if any(name in tensors and name not in turns for name in masked.rotated):
        # Made without this site, under a key that it does not have; a method wants all of its extras or none.
        tensors = {name: value for name, value in tensors.items() if name not in participant.algebra.extras}
    for name in set(masked.rotated) & set(tensors):
        tensors[name] = turned(tensors[name], rotation(tensors[name].shape[1], bytes.fromhex(turns[name])).T)
    sealed = payload.sealed
    if sealed is None or not keys.get("pads"):
        # This site was not in the round's sum, and keeps what it had.
        latest = participant.vault.latest_model()
        own = {name: latest[name] for name in masked.personal if name in latest}
    else:
        own = _own(sealed, keys, participant, masked, cipher=cipher, threads=threads)
    return replace(payload, tensors=tensors | own, sealed=None)


def turned(rows: Tensor, by: Vector) -> Tensor:
    """Every row times a rotation."""
    return (rows.double() @ torch.from_numpy(by).T).float()


def _own(
    sealed: Sealed,
    keys: Mapping[str, Any],
    participant: Participant,
    masked: MaskedAlgebra,
    *,
    cipher: CipherName,
    threads: int,
) -> dict[str, Tensor]:
    words = sealed.words.copy()
    remove_pads(words, [bytes.fromhex(key) for key in keys["pads"]], cipher=cipher, threads=threads)
    ring = Ring(masked.bits, keys["parties"])
    words = checked(words, bytes.fromhex(keys["checks"]), bits=ring.bits)
    found, start = {}, 0
    for name in masked.personal:
        spec = participant.algebra.layout[name]
        values = ring.decode(words[start : start + spec.numel], limit=keys["limits"][name] * ring.parties)
        summed = Summed(torch.from_numpy(values.reshape(spec.shape)), float(keys["divisors"][name]))
        found[name] = divide(summed).float()
        start += spec.numel
    return found
