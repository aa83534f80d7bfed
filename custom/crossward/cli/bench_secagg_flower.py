"""Flower's SecAgg+ as a worker process, and what every worker of ``bench secagg`` has in common.

This file is read by an interpreter that has flwr and numpy and no Crossward, so it imports nothing else. All work of
the protocol is done by Flower's own functions; the network alone is left out. A worker reads one request a line and
answers with one line, both JSON, so that systems take turns in one run without sharing an environment.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Update = list[NDArray[np.float32]]

_APART = 64
_SMALLEST_SCALE, _LARGEST_SCALE = 1e-4, 5e-3
_SMALLEST_TENSOR = 1000


class Updates:
    """Made-up updates with heavy tails: Student's t with four degrees of freedom, every tensor on a scale of its own.

    Tensors halve in size, as the last layers of a net hold most of it. The same noise moved by a few places is other
    noise at every coordinate, so that one draw does for all sites.
    """

    def __init__(self, parameters: int, sites: int) -> None:
        rng = np.random.default_rng(0)
        self.sizes = _halves(parameters)
        # Just within the largest weight that Flower expects if it is told nothing.
        self.samples = [1000 - 4 * site for site in range(sites)]
        self._noise = np.empty(parameters + _APART * sites, dtype=np.float32)
        for first in range(0, len(self._noise), 1 << 20):
            piece = self._noise[first : first + (1 << 20)]
            piece[:] = rng.standard_t(4, len(piece))
        self._scales = np.exp(rng.uniform(np.log(_SMALLEST_SCALE), np.log(_LARGEST_SCALE), len(self.sizes)))

    def __len__(self) -> int:
        return len(self.samples)

    def of(self, site: int) -> Update:
        """One site's tensors."""
        firsts = np.cumsum([_APART * site, *self.sizes[:-1]])
        return [
            self._noise[first : first + size] * np.float32(scale)
            for first, size, scale in zip(firsts, self.sizes, self._scales, strict=True)
        ]

    def largest(self) -> list[float]:
        """Of every tensor, the largest value at any site."""
        firsts, reach = np.cumsum([0, *self.sizes[:-1]]), _APART * (len(self) - 1)
        return [
            float(np.abs(self._noise[first : first + size + reach]).max() * np.float32(scale))
            for first, size, scale in zip(firsts, self.sizes, self._scales, strict=True)
        ]

    def weights(self) -> list[float]:
        """Of every site, its part of all samples."""
        return [count / sum(self.samples) for count in self.samples]

    def average(self) -> list[NDArray[np.float64]]:
        """The weighted average in float64."""
        totals = [np.zeros(size) for size in self.sizes]
        for site, weight in enumerate(self.weights()):
            for total, values in zip(totals, self.of(site), strict=True):
                total += weight * values.astype(np.float64)
        return totals


def _halves(parameters: int) -> list[int]:
    sizes = []
    while parameters > _SMALLEST_TENSOR:
        sizes.append(parameters // 2)
        parameters -= sizes[-1]
    return [*sizes, parameters]


def relative_error(found: Sequence[NDArray[Any]], exact: Sequence[NDArray[np.float64]]) -> float:
    """Root of the mean square of what is wrong, in units of that of what is right."""
    wrong = sum(float(np.square(one - other).sum()) for one, other in zip(found, exact, strict=True))
    return float(np.sqrt(wrong / sum(float(np.square(each).sum()) for each in exact)))


class Stopwatch:
    """Adds up the time of what runs inside it: that which passes, and the processor's."""

    def __init__(self) -> None:
        self.seconds, self.processor = 0.0, 0.0

    def __enter__(self) -> Stopwatch:
        self._began = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *details: object) -> None:
        self.seconds += time.perf_counter() - self._began[0]
        self.processor += time.process_time() - self._began[1]

    def figures(self) -> dict[str, float]:
        return {"seconds": self.seconds, "processor": self.processor}


class Peak:
    """The most memory above what was in use before, as the kernel counts it for this process (Linux; else None).

    What was freed is given back to the system first: it would hide as much of what is used.
    """

    extra: int | None = None

    def __enter__(self) -> Peak:
        self._known = Path("/proc/self/clear_refs").exists()
        if self._known:
            getattr(ctypes.CDLL(None), "malloc_trim", lambda spare: None)(0)
            Path("/proc/self/clear_refs").write_text("5")
            self._before = _status("VmRSS")
        return self

    def __exit__(self, *details: object) -> None:
        if self._known:
            self.extra = _status("VmHWM") - self._before


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


class Subject(Protocol):
    """What a worker measures: every request names a method."""

    @property
    def about(self) -> Mapping[str, str]: ...


def serve(make: Callable[[], Subject]) -> None:
    """Answer requests until there are none; the first line says what is measured, or what is not installed."""
    answers = os.fdopen(os.dup(1), "w")
    # Whatever a library prints must not get between the answers.
    os.dup2(2, 1)

    def say(content: Mapping[str, Any]) -> None:
        print(json.dumps(content), file=answers, flush=True)

    try:
        subject = make()
    except ModuleNotFoundError as error:
        say({"missing": error.name})
        return
    say({"about": {"python": platform.python_version(), "numpy": np.__version__, **subject.about}})
    for line in sys.stdin:
        request = json.loads(line)
        say({"answer": getattr(subject, request.pop("do"))(**request)})


class Flower:
    """Clients and server of SecAgg+ in one process, every client a neighbour of every other."""

    def __init__(self) -> None:
        self._client = import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")
        self._server = import_module("flwr.server.workflow.secure_aggregation.secaggplus_workflow")
        self._common = import_module("flwr.common")
        self._constant = import_module("flwr.server.workflow.constant")
        # What the server asks goes nowhere here, and a message can be made only inside a job of Flower's.
        vars(self._server)["Message"] = SimpleNamespace
        self.about = {"flwr": version("flwr")}

    def prepare(self, parameters: int, sites: int, fitted: bool = False) -> dict[str, Any]:
        """Let so many clients make their keys and share their secrets.

        Args:
            parameters: of the model.
            sites: how many clients.
            fitted: a clipping range and a largest weight that just hold the updates, instead of Flower's defaults.
        """
        self._updates = Updates(parameters, sites)
        self._uploads: dict[int, Any] = {}
        defaults = self._server.SecAggPlusWorkflow(1.0, 1.0)
        # More than half, as ours.
        self._threshold = (sites + 1) // 2 + 1
        self._clip = max(self._updates.largest()) if fitted else defaults.clipping_range
        self._levels, self._modulus = defaults.quantization_range, defaults.modulus_range
        self._heaviest = float(max(self._updates.samples)) if fitted else defaults.max_weight
        self._states, self._keys = {}, {}
        for node in range(1, sites + 1):
            self._states[node], self._keys[node] = self._keyed(node)
        self._inboxes: dict[int, dict[str, Any]] = {
            node: {self._key.SOURCE_LIST: [], self._key.CIPHERTEXT_LIST: []} for node in self._states
        }
        for node, state in self._states.items():
            shared = self._client._share_keys(state, self._told(self._keys))
            for receiver, box in zip(
                shared[self._key.DESTINATION_LIST], shared[self._key.CIPHERTEXT_LIST], strict=True
            ):
                self._inboxes[receiver][self._key.SOURCE_LIST].append(node)
                self._inboxes[receiver][self._key.CIPHERTEXT_LIST].append(box)
        self._first = self._parameters(1)
        return {}

    @property
    def _key(self) -> Any:
        return self._server.Key

    def _keyed(self, node: int) -> tuple[Any, list[bytes]]:
        state = self._client.SecAggPlusState()
        state.nid = node
        answer = self._client._setup(
            state,
            {
                self._key.SAMPLE_NUMBER: len(self._updates),
                self._key.SHARE_NUMBER: len(self._updates),
                self._key.THRESHOLD: self._threshold,
                self._key.CLIPPING_RANGE: self._clip,
                self._key.TARGET_RANGE: self._levels,
                self._key.MOD_RANGE: self._modulus,
                self._key.MAX_WEIGHT: self._heaviest,
            },
        )
        return state, [answer[self._key.PUBLIC_KEY_1], answer[self._key.PUBLIC_KEY_2]]

    def _told(self, keys: Mapping[int, list[bytes]]) -> dict[str, list[bytes]]:
        return {str(node): pair for node, pair in keys.items()}

    def _parameters(self, node: int) -> Any:
        return self._common.ndarrays_to_parameters(self._updates.of(node - 1))

    def client(self, memory: bool = False) -> dict[str, Any]:
        """One client's work: keys, shares, quantising, masks, and bytes to send.

        Keys and shares are made once more beside those that the peers know: they cost the same.
        """
        watch, peak = Stopwatch(), Peak()
        with watch:
            state, keys = self._keyed(1)
            shared = self._client._share_keys(state, self._told({**self._keys, 1: keys}))
        with peak if memory else nullcontext():
            upload = self._collect(1, self._first, watch)
        sent = sum(len(each) for each in (*keys, *shared[self._key.CIPHERTEXT_LIST], *upload))
        return {**watch.figures(), "bytes": sent, "memory": peak.extra}

    def _collect(self, node: int, parameters: Any, watch: Stopwatch) -> list[bytes]:
        samples = self._updates.samples[node - 1]
        with watch:
            answer = self._client._collect_masked_vectors(self._states[node], self._inboxes[node], samples, parameters)
        found: list[bytes] = answer[self._key.MASKED_PARAMETERS]
        return found

    def server(self) -> dict[str, Any]:
        """The server's work once all have answered: sum, unmask and dequantise, and how wrong the average is."""
        nodes, key, records = set(self._states), self._key, self._server
        if not self._uploads:
            for node in self._states:
                upload = self._collect(node, self._parameters(node), Stopwatch())
                self._uploads[node] = self._answer(node, {key.MASKED_PARAMETERS: upload}, fit=True)
        asked = {key.ACTIVE_NODE_ID_LIST: sorted(nodes), key.DEAD_NODE_ID_LIST: []}
        reveals = [self._answer(node, self._client._unmask(state, asked)) for node, state in self._states.items()]
        state = records.WorkflowState(
            nid_to_proxies=dict.fromkeys(nodes),
            nid_to_fitins={node: records.RecordDict() for node in nodes},
            sampled_node_ids=set(nodes),
            active_node_ids=set(nodes),
            threshold=self._threshold,
            clipping_range=self._clip,
            quantization_range=self._levels,
            mod_range=self._modulus,
            nid_to_neighbours={node: set(nodes) for node in nodes},
            forward_srcs={node: box[key.SOURCE_LIST] for node, box in self._inboxes.items()},
            forward_ciphertexts={node: box[key.CIPHERTEXT_LIST] for node, box in self._inboxes.items()},
        )
        workflow, watch = records.SecAggPlusWorkflow(1.0, 1.0), Stopwatch()
        with watch:
            summed = workflow.collect_masked_vectors_stage(_answering(self._uploads.values()), self._context(), state)
            opened = workflow.unmask_stage(_answering(reveals), self._context(), state)
        if not (summed and opened):
            raise RuntimeError("Flower's server did not open the sum")
        _, result = state.legacy_results[0]
        found = self._common.parameters_to_ndarrays(result.parameters)
        return {**watch.figures(), "error": relative_error(found, self._updates.average())}

    def _answer(self, node: int, values: Mapping[str, Any], *, fit: bool = False) -> SimpleNamespace:
        """A client's message as the server reads it."""
        content = self._server.RecordDict()
        if fit:
            common = self._common
            status = common.Status(common.Code.OK, "")
            nothing = common.Parameters([], "")
            result = common.FitRes(status, nothing, self._updates.samples[node - 1], {})
            content = self._server.compat.fitres_to_recorddict(result, keep_input=False)
        content.config_records[self._server.RECORD_KEY_CONFIGS] = self._server.ConfigRecord(dict(values))
        return SimpleNamespace(content=content, metadata=SimpleNamespace(src_node_id=node), has_error=lambda: False)

    def _context(self) -> SimpleNamespace:
        """A first round whose strategy does nothing with the average."""
        records = {self._constant.MAIN_CONFIGS_RECORD: {self._constant.Key.CURRENT_ROUND: 1}}
        strategy = SimpleNamespace(aggregate_fit=lambda number, results, failures: (None, {}))
        return SimpleNamespace(state=SimpleNamespace(config_records=records), strategy=strategy)


def _answering(messages: Iterable[SimpleNamespace]) -> SimpleNamespace:
    """Stands in for Flower's network: everybody has answered already."""
    return SimpleNamespace(send_and_receive=lambda asked, timeout=None: list(messages))


if __name__ == "__main__":
    serve(Flower)
