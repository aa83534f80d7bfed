"""Batches of images for training: in an order that the seed decides, read ahead where they are not in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from queue import Full, Queue
from typing import Protocol

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, SequentialSampler

from crossward.federation.errors import BadInput
from crossward.imaging.data import Split

Loaded = tuple[torch.Tensor, torch.Tensor]
_LOOK_UP = 0.1


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How batches are made ready; it changes no number and no order.

    Attributes:
        workers: processes that read; 0 reads in this one, ahead in a thread where images are on disk.
        prefetch: batches that wait, per worker or in all; 0 reads none ahead.
        pinned: whether they wait where a GPU can fetch them by itself; where there is a GPU when None.
    """

    workers: int = 0
    prefetch: int = 2
    pinned: bool | None = None

    def __post_init__(self) -> None:
        if self.workers < 0 or self.prefetch < 0:
            raise BadInput(f"{self.workers} workers and {self.prefetch} batches ahead cannot be; give 0 or more")


USUAL = Loading()


class Batches(Protocol):
    """Batches that can be gone through any number of times."""

    def __iter__(self) -> Iterator[Loaded]: ...

    def __len__(self) -> int: ...


def batches(split: Split, *, batch_size: int, seed: int | None, drop_last: bool, loading: Loading = USUAL) -> Batches:
    """Gives (images, labels) batch by batch; shuffled by the seed, or in the stored order when there is none.

    A batch is fetched by one indexing operation; nothing is collated image by image. Each pass over the loader
    shuffles anew. The global random state is not touched.
    """
    rows = _Rows(split)
    # A loader draws a number even when nothing is shuffled; without a generator of its own, from the global state.
    generator = torch.Generator().manual_seed(seed or 0)
    order: Sampler[int] = SequentialSampler(rows) if seed is None else RandomSampler(rows, generator=generator)
    loader: DataLoader[Loaded] = DataLoader(
        rows,
        batch_size=None,
        sampler=BatchSampler(order, batch_size=batch_size, drop_last=drop_last),
        generator=generator,
        num_workers=loading.workers,
        prefetch_factor=max(1, loading.prefetch) if loading.workers else None,
        pin_memory=torch.cuda.is_available() if loading.pinned is None else loading.pinned,
    )
    in_memory = isinstance(split.images, torch.Tensor)
    return loader if in_memory or loading.workers or not loading.prefetch else _Ahead(loader, loading.prefetch)


class _Rows(Dataset[Loaded]):
    def __init__(self, split: Split) -> None:
        self.split = split

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, rows: list[int]) -> Loaded:
        where = torch.tensor(rows)
        return self.split.images[where], self.split.labels[where]


class _Ahead:
    """The batches of a loader, the next ones read by a thread while one is trained on."""

    def __init__(self, loader: DataLoader[Loaded], prefetch: int) -> None:
        self._loader = loader
        self._prefetch = prefetch

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Loaded]:
        waiting: Queue[Loaded | BaseException | None] = Queue(self._prefetch)
        stopped = threading.Event()

        def offer(what: Loaded | BaseException | None) -> bool:
            while not stopped.is_set():
                try:
                    waiting.put(what, timeout=_LOOK_UP)
                except Full:
                    continue
                return True
            return False

        def read() -> None:
            try:
                for batch in self._loader:
                    if not offer(batch):
                        return
                offer(None)
            except BaseException as error:
                offer(error)

        reader = threading.Thread(target=read, name="crossward-loading", daemon=True)
        reader.start()
        try:
            while (batch := waiting.get()) is not None:
                if isinstance(batch, BaseException):
                    raise batch
                yield batch
        finally:
            stopped.set()
            reader.join()
