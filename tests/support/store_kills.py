"""Kill the training of a table on disk, and cut the power in the middle of it.

The training is a function of the number of the step, and every commit is tagged with the
step. So the store of a run that was killed can be compared bit for bit with the arrays of
a run in memory at that step.
"""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from firstlayer.numpy import Embedding
from firstlayer.optim import RowAdamW
from firstlayer.stores import (
    TrainingStore,
    create_store,
    journal,
    mapped_array,
    open_store,
    recovery,
    training_folder,
)

ROWS, WIDTH = 300, 64
COMMIT_EVERY = 3
OPTIONS: dict[str, Any] = {"weight_decay": 0.1, "betas": (0.8, 0.95)}
Arrays = dict[str, np.ndarray]


def initial(rows: int) -> np.ndarray:
    """Return the table before training."""
    return np.random.default_rng(0).normal(size=(rows, WIDTH)).astype(np.float32)


def step(layer: Embedding, optimizer: RowAdamW, number: int) -> None:
    """Take one step, with lookups, ``max_norm`` and now and then a flush."""
    rng = np.random.default_rng(number)
    ids = np.minimum(rng.zipf(1.3, 24) - 1, layer.num_embeddings - 1)
    y, pull = layer.vjp(ids)
    optimizer.lr = 0.02 / (1 + number % 5)
    optimizer.step(pull(y - rng.normal(size=y.shape).astype(np.float32)))
    layer(rng.integers(0, layer.num_embeddings, 30))
    layer.project(ids[:4])
    if number % 11 == 10:
        optimizer.flush()


def arrays_of(optimizer: RowAdamW) -> Arrays:
    """Return copies of every array that the training depends on."""
    state = optimizer.table_states["weight"]
    return {
        **{name: array.copy() for name, array in state.state.items()},
        "weight": state.table().copy(),
        "row_steps": np.maximum(state.row_steps, state.base_step),
        "coefficients": state.missed.coefficients.copy(),
    }


class Reference:
    """Arrays of the same training in memory, after each step.

    Args:
        rows: Number of rows.
    """

    def __init__(self, rows: int = ROWS) -> None:
        self._layer = Embedding(weight=initial(rows), max_norm=6.0)
        self._optimizer = RowAdamW(self._layer, **OPTIONS)
        self._arrays = [arrays_of(self._optimizer)]

    def __getitem__(self, steps: int) -> Arrays:
        while len(self._arrays) <= steps:
            step(self._layer, self._optimizer, len(self._arrays) - 1)
            self._arrays.append(arrays_of(self._optimizer))
        return self._arrays[steps]


def create(path: Path, *, rows: int = ROWS, sync: Any = "off") -> None:
    """Create a store that :func:`train` can open."""
    store = create_store(path, (rows, WIDTH), rows=initial(rows), sync=sync)
    store.commit("0")
    store.close()


def opened(path: Path, **options: Any) -> tuple[TrainingStore, Embedding, RowAdamW]:
    """Open a store with its layer and optimizer."""
    store = open_store(path, mode="r+", **options)
    layer = Embedding.from_store(store, max_norm=6.0)
    return store, layer, RowAdamW(layer, **OPTIONS)


def train(path: Path, steps: int, **options: Any) -> None:
    """Continue training; every third step is committed."""
    store, layer, optimizer = opened(path, **options)
    first = optimizer.table_states["weight"].step_count
    for number in range(first, first + steps):
        step(layer, optimizer, number)
        if number % COMMIT_EVERY == COMMIT_EVERY - 1:
            store.commit(str(number + 1))
    store.close()


def check(path: Path, reference: Reference, *, at: str | None = None) -> int:
    """Return the step that a store opens at; raise AssertionError if it is no commit."""
    store, _, optimizer = opened(path, at=at)
    steps = optimizer.table_states["weight"].step_count
    tag = store.last_commit.tag
    got = arrays_of(optimizer)
    store.close()
    assert tag == str(steps), f"commit {tag} has step {steps}"
    assert steps % COMMIT_EVERY == 0, f"step {steps} was not committed"
    want = reference[steps]
    assert got.keys() == want.keys(), f"arrays {sorted(got)}, expected {sorted(want)}"
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, err_msg=f"{name} at step {steps}")
    return steps


def kill_training(folder: Path, count: int) -> dict[str, int]:
    """Kill ``count`` trainings of a store at random moments, and check it after each.

    Every fourth time the child first returns to an earlier tag, and may be killed in it.
    """
    path, draw, reference = folder / "table", random.Random(0), Reference()
    create(path)
    # Loads the kernels of every path, which children then have.
    train(path, 30)
    store = open_store(path, mode="r+")
    store.return_to(store.tags[0])
    store.close()
    train(path, 30)
    started = time.perf_counter()
    train(path, 30)
    longest = 1.5 * (time.perf_counter() - started)
    last, steps_seen, undone, returned = check(path, reference), set(), 0, 0
    for number in range(count):
        if last > 600:
            shutil.rmtree(path)
            create(path)
            last = 0
        back = None
        if number % 4 == 3:
            store = open_store(path, mode="r+")
            back = store.tags[0]
            store.close()
        child = os.fork()
        if child == 0:
            try:
                if back is not None:
                    open_store(path, mode="r+", at=back).close()
                train(path, 1 << 30)
            finally:
                os._exit(1)
        time.sleep(draw.uniform(0, longest))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        newest = max(path.glob("undo-*[0-9]"))
        size = newest.stat().st_size
        steps = check(path, reference)
        undone += newest.exists() and newest.stat().st_size < size
        assert steps >= (last if back is None else int(back)), f"{steps} after {last}"
        returned += steps < last
        last = steps
        steps_seen.add(steps)
    return {
        "kills": count,
        "undone": undone,
        "returned": returned,
        "commits": len(steps_seen),
    }


class Power:
    """Records what a power loss may keep of the files in a folder.

    Before every call that writes, syncs, renames or removes, the files are copied. A power
    loss keeps, of every page written since its file was last synced, the old or a new
    content, and of the names changed since the folder was last synced, any of the old and
    new ones in order.

    Args:
        folder: The folder.
    """

    PAGE = 4096

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        #: Contents of each file by inode: the one that was synced, then later ones.
        self.versions: dict[int, list[bytes]] = {}
        #: Names and their inodes: those that were synced, then later ones.
        self.names: list[dict[str, int]] = [self._listing()]
        #: Open files of removed inodes, which a power loss may bring back.
        self._open: dict[int, int] = {}
        self.losses: list[Callable[[Path, random.Random], None]] = []
        self._note()
        for inode in list(self.versions):
            self._synced(inode)

    def _listing(self) -> dict[str, int]:
        return {
            name: os.stat(self.folder / name).st_ino for name in os.listdir(self.folder)
        }

    def _note(self) -> None:
        """Add the present content of every file and the present names."""
        listing = self._listing()
        if listing != self.names[-1]:
            self.names.append(listing)
        for name, inode in listing.items():
            content = (self.folder / name).read_bytes()
            # A new file is durable as an empty one at most.
            versions = self.versions.setdefault(inode, [b""])
            if content != versions[-1]:
                versions.append(content)

    def _synced(self, inode: int) -> None:
        del self.versions[inode][:-1]

    def before(self) -> None:
        """Record a moment at which power may be lost."""
        self._note()
        names = [dict(listing) for listing in self.names]
        versions = {inode: list(each) for inode, each in self.versions.items()}

        def lose(target: Path, draw: random.Random) -> None:
            for name, inode in draw.choice(names).items():
                (target / name).write_bytes(self._kept(versions[inode], draw))

        self.losses.append(lose)

    def sync_file(self, descriptor: int) -> None:
        """Note that a file or the folder is durable."""
        self._note()
        status = os.fstat(descriptor)
        if status.st_ino == os.stat(self.folder).st_ino:
            del self.names[:-1]
        elif status.st_ino in self.versions:
            self._synced(status.st_ino)

    def _kept(self, versions: list[bytes], draw: random.Random) -> bytes:
        """Return a content whose pages are of any of the versions."""
        length = len(draw.choice(versions))
        pages = []
        for start in range(0, length, self.PAGE):
            end = min(start + self.PAGE, length)
            page = draw.choice(versions)[start:end]
            pages.append(page.ljust(end - start, b"\0"))
        return b"".join(pages)


class RecordedSystem:
    """Stands for the module ``os``: calls that write are recorded by a :class:`Power`.

    Args:
        power: The recorder.
    """

    WRITES = ("pwrite", "pwritev", "rename", "unlink", "ftruncate", "posix_fallocate")

    def __init__(self, power: Power) -> None:
        self._power = power

    def __getattr__(self, name: str) -> Any:
        function = getattr(os, name)
        if name == "fsync":
            return self._fsync
        if name not in self.WRITES:
            return function

        def call(*arguments: Any) -> Any:
            self._power.before()
            result = function(*arguments)
            self._power.before()
            return result

        return call

    def _fsync(self, descriptor: int) -> None:
        self._power.before()
        os.fsync(descriptor)
        self._power.sync_file(descriptor)
        self._power.before()


@contextmanager
def recorded(folder: Path) -> Generator[Power, None, None]:
    """Record the calls of the stores during the block."""
    power = Power(folder)
    modules = (journal, mapped_array, recovery, training_folder)
    try:
        for module in modules:
            module.os = RecordedSystem(power)  # pyright: ignore
        yield power
    finally:
        for module in modules:
            module.os = os  # pyright: ignore


def lose_power(folder: Path, count: int, *, sync: Any = "full") -> dict[str, int]:
    """Cut the power at ``count`` recorded moments, and check what the store opens at."""
    rows, reference = 24, Reference(24)
    path = folder / "table"
    create(path, rows=rows, sync="full")
    # One store has arrays from the beginning, so that rows of all of them are journalled.
    train(path, 3, sync="full")
    earliest, draw, seen, moments = 3, random.Random(0), set(), []
    with recorded(path) as power:
        store, layer, optimizer = opened(path, sync=sync)
        for number in range(3, 12):
            step(layer, optimizer, number)
            # A mapped page may be written at any time.
            power.before()
            moments += [(loss, earliest, number) for loss in power.losses]
            power.losses.clear()
            if number % COMMIT_EVERY == COMMIT_EVERY - 1:
                store.commit(str(number + 1))
                moments += [(loss, earliest, number + 1) for loss in power.losses]
                power.losses.clear()
                earliest = number + 1
        store.return_to("9")
        moments += [(loss, 9, 12) for loss in power.losses]
        store.close()
    for number in range(count):
        loss, lowest, highest = draw.choice(moments)
        target = folder / f"loss-{number}"
        target.mkdir()
        loss(target, draw)
        steps = check(target, reference)
        assert lowest <= steps <= highest, f"{steps} is not from {lowest} to {highest}"
        seen.add(steps)
        shutil.rmtree(target)
    return {"losses": count, "moments": len(moments), "commits": len(seen)}
