"""Tables in host memory with an output device, and prefetched rows."""

import copy
import gc
import pickle
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from firstlayer.torch import Embedding, EmbeddingBag, EmbeddingLayer
from firstlayer.torch import bag as bag_module
from firstlayer.torch._table import host, prefetch
from firstlayer.torch._tensors import worker
from firstlayer.torch.optim import RowAdagrad, RowAdam, RowAdamW, RowSGD
from tests.support.run_alone import run_alone
from tests.support.torch_tables import same_bits

ROWS, WIDTH = 12, 3
BATCHES = (
    torch.tensor([[3, 1, 3]]),
    torch.tensor([[0, 5, 7]]),
    torch.tensor([11, 3], dtype=torch.int32),
    torch.tensor([], dtype=torch.int64),
    torch.tensor([[2], [9]], dtype=torch.uint8),
)

OPTIMIZERS: dict[str, Any] = {
    "RowAdamW": lambda p, **o: RowAdamW(
        p, lr=0.1, betas=(0.8, 0.95), weight_decay=0.3, **o
    ),
    "RowAdam amsgrad": lambda p, **o: RowAdam(p, lr=0.2, amsgrad=True, eps=1e-5, **o),
    "RowAdam lazy": lambda p, **o: RowAdam(p, lr=0.1, mode="lazy", **o),
    "RowSGD": lambda p, **o: RowSGD(p, lr=0.1, **o),
    "RowSGD momentum": lambda p, **o: RowSGD(p, lr=0.1, momentum=0.7, **o),
    "RowAdagrad": lambda p, **o: RowAdagrad(p, lr=0.1, eps=1e-4, **o),
    "SparseAdam": lambda p, **o: torch.optim.SparseAdam(p, lr=0.1),
    "none": lambda p, **o: None,
}


class Run:
    """A layer and its optimizer, with or without a worker that reads and writes rows."""

    def __init__(self, kind: str, prefetches: bool, **options: Any) -> None:
        torch.manual_seed(0)
        dtype = options.pop("dtype", torch.float32)
        self.layer = Embedding(ROWS, WIDTH, sparse=True, dtype=dtype, **options)
        self.optimizer = OPTIMIZERS[kind]([self.layer.weight], background=prefetches)
        self.prefetches = prefetches
        self.outputs: list[torch.Tensor] = []

    def do(self, action: str, number: int) -> Any:
        """Do one action, and return what it shows."""
        layer, ids = self.layer, BATCHES[number]
        if action == "prefetch":
            if self.prefetches:
                layer.prefetch(ids)
            return None
        if action == "prefetch bad ids":
            if self.prefetches:
                with pytest.raises(IndexError, match=r"ids\[1\] is 99, but num_emb"):
                    layer.prefetch(torch.tensor([0, 99]))
            return None
        if action == "bad ids":
            with pytest.raises(IndexError, match=r"ids\[1\] is 99, but num_emb"):
                layer(torch.tensor([0, 99]))
            return None
        if action == "lookup":
            self.outputs.append(layer(ids))
            return self.outputs[-1].detach().clone()
        if action == "no_grad":
            with torch.no_grad():
                return layer(ids)
        if action == "eval":
            layer.eval()
            with torch.no_grad():
                y = layer(ids)
            layer.train()
            return y
        if action == "backward":
            scale = torch.arange(1.0, WIDTH + 1)
            if self.outputs:
                # One backward for all: a step would change what a second one needs.
                sum((y * scale * (y + 1)).float().sum() for y in self.outputs).backward()  # pyright: ignore
            self.outputs = []
            grad = layer.weight.grad
            return None if grad is None else grad.to_dense()
        if action == "step":
            if self.optimizer is not None and layer.weight.grad is not None:
                self.outputs = []
                self.optimizer.step()
                layer.weight.grad = None
            return None
        assert action == "write"
        with torch.no_grad():
            layer.weight[number] = float(number)
        return None

    def table(self) -> torch.Tensor:
        """Return a copy of the table's memory, stale rows included."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.layer.weight.detach().clone()

    def finish(self) -> None:
        """Wait for the worker, and do what it may not have done."""
        worker._wait_for_worker()
        state = getattr(self.layer.weight, "table_state", None)
        if state is not None:
            state.catch_up_deferred()


ACTIONS = ["prefetch", "prefetch", "lookup", "lookup", "backward", "step", "no_grad"]
ACTIONS += ["eval", "write", "bad ids", "prefetch bad ids"]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(ACTIONS), st.integers(0, len(BATCHES) - 1)), max_size=25
    ),
    st.sampled_from(list(OPTIMIZERS)),
    st.sampled_from([{}, {"max_norm": 0.7}, {"padding_idx": 3}, {"dtype": torch.bfloat16}]),
    st.booleans(),
)
def test_any_sequence_gives_the_same_bits_with_and_without_a_worker(
    actions, kind, options, waits
):
    runs = Run(kind, True, **options), Run(kind, False, **options)
    for at, (action, number) in enumerate(actions):
        shown = [run.do(action, number) for run in runs]
        assert (shown[0] is None) == (shown[1] is None)
        if shown[0] is not None:
            assert same_bits(*shown), (action, number)
        if waits or at == len(actions) - 1:
            for run in runs:
                run.finish()
            assert same_bits(runs[0].table(), runs[1].table()), (action, number)


@pytest.mark.parametrize("kind", ["RowAdamW", "RowSGD", "RowAdam lazy", "none"])
@pytest.mark.parametrize("early", [False, True], ids=["after the step", "before it"])
def test_training_with_a_busy_worker_gives_the_same_bits(kind, early):
    """The worker reads and writes 4 MB while the main thread trains."""
    random = np.random.default_rng(0)
    batches = [torch.from_numpy(random.zipf(1.2, 3000) % 8000) for _ in range(12)]
    results = []
    for prefetches in (True, False):
        torch.manual_seed(0)
        layer = Embedding(8000, 128, sparse=True)
        optimizer = OPTIMIZERS[kind]([layer.weight], background=prefetches)
        outputs = []
        for ids, following in zip(batches, batches[1:], strict=False):
            y = layer(ids)
            if prefetches and early:
                layer.prefetch(following)
            outputs.append(y.detach())
            (y * y).sum().backward()
            if optimizer is not None:
                optimizer.step()
            layer.weight.grad = None
            if prefetches and not early:
                layer.prefetch(following)
        results.append((torch.stack(outputs), layer.state_dict()["weight"]))
    for got, want in zip(*results, strict=True):
        assert same_bits(got, want)


def taken(layer: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Look ids up, and return whether the lookup used prefetched rows."""
    used = []
    take = prefetch.Prefetch.take

    def record(self: Any, weight: torch.Tensor) -> Any:
        rows = take(self, weight)
        used.append(rows is not None)
        return rows

    with monkeypatch.context() as patch:
        patch.setattr(prefetch.Prefetch, "take", record)
        y = layer(ids)
    assert torch.equal(y, layer.weight[ids.long()])
    return used == [True]


def prefetched(layer: Any, ids: torch.Tensor) -> None:
    layer.prefetch(ids)
    worker._wait_for_worker()


def test_a_lookup_of_the_same_ids_takes_the_rows_once(monkeypatch):
    layer, ids = Embedding(50, 4), torch.tensor([[3, 4], [9, 3]])
    prefetched(layer, ids)
    assert not taken(layer, torch.tensor([3, 4, 9]), monkeypatch)
    assert taken(layer, ids.to(torch.int16), monkeypatch)
    assert not taken(layer, ids, monkeypatch)


def test_the_caller_may_change_the_ids_after_the_call(monkeypatch):
    layer, ids = Embedding(50, 4), torch.tensor([3, 4])
    layer.prefetch(ids)
    ids.fill_(49)
    worker._wait_for_worker()
    assert not taken(layer, ids, monkeypatch)
    assert taken(layer, torch.tensor([3, 4]), monkeypatch)


def test_the_latest_prefetches_are_kept(monkeypatch):
    layer = Embedding(50, 4)
    batches = [torch.tensor([number, 7]) for number in range(6)]
    for ids in batches:
        prefetched(layer, ids)
    assert [taken(layer, ids, monkeypatch) for ids in batches] == [False] * 2 + [True] * 4


def test_rows_written_in_between_are_read_again(monkeypatch):
    layer, ids = Embedding(50, 4), torch.tensor([3, 4])

    def replace(weight):
        weight.data = torch.randn(50, 4)

    def load(weight):
        layer.load_state_dict({"weight": torch.randn(50, 4)})

    for write in (nn.init.ones_, replace, load, lambda weight: layer.resize(40)):
        prefetched(layer, ids)
        with torch.no_grad():
            write(layer.weight)
        assert not taken(layer, ids, monkeypatch)


@pytest.mark.parametrize(
    ("kind", "want"), [("RowSGD", True), ("RowAdagrad", True), ("RowAdamW", False)]
)
def test_a_step_between_replaces_only_the_rows_it_moved(kind, want, monkeypatch):
    layer, ids = Embedding(50, 4, sparse=True), torch.tensor([[3, 8], [9, 3]])
    optimizer = OPTIMIZERS[kind]([layer.weight])
    for batch in ([1, 2, 9], [3, 4]):
        layer(torch.tensor(batch)).sum().backward()
        prefetched(layer, ids)
        optimizer.step()
        layer.zero_grad()
    assert taken(layer, ids, monkeypatch) == want


def test_a_prefetch_that_has_not_begun_is_cancelled():
    layer, ids = Embedding(50, 4), torch.tensor([3, 4])
    go = threading.Event()
    blocked = worker.submit(lambda: go.wait(30))
    layer.prefetch(ids)
    assert torch.equal(layer(ids), layer.weight[ids])
    assert not blocked.done()
    go.set()
    assert blocked.result(30)


def test_rows_are_caught_up_before_the_next_step_without_a_worker(monkeypatch):
    """A worker that never runs delays nothing: the step does its work."""
    layer, ids = Embedding(50, 4, sparse=True), torch.tensor([3, 4])
    optimizer = RowAdamW([layer.weight], lr=0.1, weight_decay=0.2)
    for batch in ([3, 4], [5, 6]):
        layer(torch.tensor(batch)).sum().backward()
        optimizer.step()
        layer.zero_grad()
    prefetched(layer, ids)
    state: Any = layer.weight.table_state  # pyright: ignore
    go = threading.Event()
    worker.submit(lambda: go.wait(30))
    loss = layer(ids).sum()
    assert state.deferred_ids and state.row_steps[3] == 1
    loss.backward()
    optimizer.step()
    assert not state.deferred_ids and state.row_steps[3] == 3
    go.set()


def test_an_error_of_the_worker_is_raised_by_the_lookup(monkeypatch):
    def fail(*args: Any, **options: Any) -> Any:
        raise MemoryError("no memory for the rows")

    layer, ids = Embedding(50, 4), torch.tensor([3, 4])
    with monkeypatch.context() as patch:
        patch.setattr(prefetch, "gather_into", fail)
        prefetched(layer, ids)
    with pytest.raises(MemoryError, match="no memory for the rows"):
        layer(ids)
    assert torch.equal(layer(ids), layer.weight[ids])


def test_bad_ids_of_a_prefetch_are_named():
    layer = Embedding(5, 2)
    with pytest.raises(IndexError, match=r"ids\[0, 1\] is 5, but num_embeddings is 5"):
        layer.prefetch(torch.tensor([[0, 5]]))
    with pytest.raises(TypeError, match="ids must be integers, got float32"):
        layer.prefetch(torch.ones(2))
    with pytest.raises(TypeError, match="ids must be a tensor, got list"):
        layer.prefetch([0])  # pyright: ignore


def test_tables_that_the_worker_cannot_read_are_not_prefetched():
    layer = Embedding(5, 2, device="meta")
    layer.prefetch(torch.tensor([0]))
    strided = Embedding(5, 2, _weight=torch.randn(2, 5).T)
    strided.prefetch(torch.tensor([0]))
    assert layer._prefetches == strided._prefetches == ()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_have_no_prefetched_rows(copied, monkeypatch):
    layer, ids = Embedding(50, 4), torch.tensor([3, 4])
    layer.prefetch(ids)
    other = copied(layer)
    with torch.no_grad():
        other.weight.zero_()
    assert other._prefetches == () and not other(ids).any()
    worker._wait_for_worker()
    assert taken(layer, ids, monkeypatch)


def test_gradients_flow_through_prefetched_rows():
    ids = torch.tensor([[3, 4, 3]])
    options: Any
    for options in ({}, {"sparse": True}, {"scale_grad_by_freq": True}, {"padding_idx": 3}):
        grads = []
        for prefetches in (True, False):
            torch.manual_seed(0)
            layer = Embedding(20, 4, dtype=torch.float64, **options)
            if prefetches:
                prefetched(layer, ids)
            y = layer(ids)
            assert y.requires_grad
            y.pow(3).sum().backward()
            assert layer.weight.grad is not None
            grads.append(layer.weight.grad.to_dense())
        assert same_bits(*grads)
    layer = Embedding(20, 4, dtype=torch.float64)

    def lookup(weight: torch.Tensor) -> torch.Tensor:
        layer.prefetch(ids)
        worker._wait_for_worker()
        return layer(ids).pow(2)

    weight = layer.weight
    assert torch.autograd.gradcheck(lookup, [weight])
    assert torch.autograd.gradgradcheck(lookup, [weight])


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["sum", "mean", "max"]),
    st.booleans(),
    st.sampled_from([None, 3]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.sampled_from([{}, {"scale_grad_by_freq": True}, {"max_norm": 0.6}]),
)
def test_bags_give_the_same_bits_with_and_without_prefetch(
    mode, sparse, padding_idx, ragged, weighted, dtype, more
):
    ids = torch.tensor([[3, 1, 3, 7], [3, 3, 3, 3], [9, 0, 1, 9]])
    offsets = torch.tensor([0, 5, 5, 10]) if ragged else None
    results = []
    for prefetches in (True, False):
        torch.manual_seed(0)
        bag = EmbeddingBag(
            12, 5, mode=mode, sparse=sparse, padding_idx=padding_idx, dtype=dtype, **more
        )
        optimizer = RowAdamW([bag.weight], lr=0.1, weight_decay=0.2)
        shown = []
        for _ in range(3):
            weights = torch.rand(ids.shape, dtype=dtype, requires_grad=True)
            flat = ids.reshape(-1) if ragged else ids
            factors = weights.view(flat.shape) if weighted else None
            if prefetches:
                prefetched(bag, flat)
            y = bag(flat, offsets, factors)
            y.pow(2).sum().backward()
            with torch.no_grad():
                if prefetches:
                    prefetched(bag, flat)
                shown.append(bag(flat, offsets, factors))
            grads = [bag.weight.grad, weights.grad]
            shown += [y.detach(), *(g.to_dense() for g in grads if g is not None)]
            optimizer.step()
            optimizer.zero_grad()
            # Makes rows stale.
            bag(torch.tensor([[2]])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([*shown, bag.state_dict()["weight"]])
    assert len(results[0]) == len(results[1]) == (13 if weighted else 10)
    for got, want in zip(*results, strict=True):
        assert same_bits(got, want)


def test_bags_take_prefetched_rows_once(monkeypatch):
    taken_rows = []
    pool_bags = bag_module.pool_bags

    def record(*args: Any, gathered: Any = None, **options: Any) -> Any:
        taken_rows.append(gathered is not None)
        return pool_bags(*args, gathered=gathered, **options)

    monkeypatch.setattr(bag_module, "pool_bags", record)
    bag, ids = EmbeddingBag(12, 5), torch.tensor([[3, 1], [4, 3]])
    prefetched(bag, ids)
    assert torch.equal(bag(ids), bag(ids))
    assert taken_rows == [True]
    with pytest.raises(IndexError, match=r"ids\[0\] is 12, but num_embeddings is 12"):
        bag.prefetch(torch.tensor([12]))


def test_a_layer_with_a_pending_prefetch_is_freed():
    layer = Embedding(50, 4)
    go = threading.Event()
    worker.submit(lambda: go.wait(30))
    layer.prefetch(torch.tensor([3]))
    reference = weakref.ref(layer)
    del layer
    gc.collect()
    assert reference() is None
    go.set()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_fork_exit_and_interrupt_with_a_pending_prefetch():
    script = """
        import os, signal, threading, time, warnings
        import torch
        from firstlayer.torch import Embedding
        from firstlayer.torch._tensors import worker
        from firstlayer.torch.optim import RowAdamW

        warnings.simplefilter("ignore", DeprecationWarning)
        layer, ids = Embedding(20000, 64, sparse=True), torch.arange(20000)
        optimizer = RowAdamW([layer.weight], lr=0.1, weight_decay=0.2)
        for batch in (ids[:9], ids[9:]):
            layer(batch).sum().backward()
            optimizer.step()
            layer.zero_grad()

        def is_right():
            return torch.equal(layer(ids), layer.weight[ids])

        # Slow jobs, so that each event finds the worker busy.
        worker.submit(lambda: time.sleep(0.1))
        layer.prefetch(ids)
        child = os.fork()
        if not child:
            # The rows are here, and the child's own worker starts.
            for _ in range(2):
                loss = layer(ids).sum()
                layer.prefetch(ids)
                loss.backward()
                optimizer.step()
                layer.zero_grad()
            assert is_right()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert is_right()

        started = threading.Event()

        def slow():
            started.set()
            time.sleep(0.5)
            return layer.weight[ids].detach()

        layer.prefetch(ids)
        layer._prefetches[-1].rows.cancel()
        layer._prefetches[-1].rows = worker.submit(slow)
        started.wait()
        threading.Timer(0.1, signal.raise_signal, [signal.SIGINT]).start()
        try:
            layer(ids)
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("the wait was not interrupted")
        assert is_right()
        worker.submit(lambda: time.sleep(0.1))
        layer.prefetch(ids)
        print("exit")
    """
    assert run_alone(script) == "exit\n"


def test_output_device_is_where_the_rows_are():
    ids = torch.tensor([[1, 2]])
    layer = Embedding(5, 2, output_device="meta")
    assert layer.weight.is_cpu and layer(ids).is_meta and layer(ids).shape == (1, 2, 2)
    layer.prefetch(ids)
    assert layer(ids).is_meta and layer(ids).requires_grad
    assert "output_device='meta'" in repr(layer)
    bag = EmbeddingBag(5, 2, output_device="meta")
    weights = torch.ones(1, 2, requires_grad=True)
    assert bag.weight.is_cpu and bag(ids).is_meta
    pooled = EmbeddingBag(5, 2, output_device="meta", mode="sum")(ids, None, weights)
    assert pooled.is_meta and pooled.requires_grad
    assert "output_device='meta'" in repr(bag)


def test_the_same_code_trains_with_the_cpu_as_output_device():
    ids, results = torch.tensor([[1, 2, 1]]), []
    options: Any
    for options in ({}, {"output_device": "cpu"}):
        torch.manual_seed(0)
        layer = Embedding(5, 2, sparse=True, max_norm=0.9, **options)
        bag = EmbeddingBag(5, 2, sparse=True, **options)
        optimizer = RowAdamW([layer.weight, bag.weight], lr=0.1)
        for _ in range(3):
            loss = (layer(ids).sum(1) * bag(ids)).sum()
            optimizer.zero_grad()
            loss.backward()
            assert layer.weight.grad is not None and layer.weight.grad.is_sparse
            optimizer.step()
        results += [torch.cat([layer.weight.detach(), bag.weight.detach()])]
    assert same_bits(*results)


def test_moving_a_model_leaves_a_host_table_where_it_is():
    table = Embedding(5, 2, output_device="meta")
    bag = EmbeddingBag(5, 2, output_device="meta")
    model = nn.ModuleList([table, bag, nn.Linear(2, 2)])
    before = table.weight.detach().clone()
    table.weight.grad = torch.ones(5, 2)
    model.to("meta")
    assert model[2].weight.is_meta and table.weight.is_cpu and bag.weight.is_cpu
    assert table.weight.grad.is_cpu
    assert torch.equal(table.weight, before)
    model.to("meta", torch.float64)
    assert table.weight.dtype == torch.float64 and table.weight.is_cpu
    assert table.half().weight.dtype == torch.float16
    assert list(table.state_dict()) == ["weight"]
    assert copy.deepcopy(table).output_device == torch.device("meta")
    assert table.share_memory().weight.is_shared()


def test_a_host_table_is_allocated_on_the_host():
    table = Embedding(5, 2, device="meta", output_device="cuda")
    assert table.weight.is_meta
    # Moves the sample to a device other than the CPU, as to_empty(device="cuda") does.
    moved = host._apply_on_host(lambda x: torch.empty_like(x, device="cpu"), table.weight)
    assert moved.is_cpu and moved.shape == (5, 2)
    with torch.device("meta"):
        assert Embedding(5, 2, output_device="cuda").weight.is_cpu


def test_the_output_device_can_be_set():
    table = Embedding.from_pretrained(torch.randn(5, 2))
    table.output_device = "meta"  # pyright: ignore
    assert table.output_device == torch.device("meta")
    assert table(torch.tensor([1])).is_meta
    table.output_device = None
    assert table(torch.tensor([1])).is_cpu


def test_a_table_with_an_output_device_must_be_on_the_cpu():
    with pytest.raises(ValueError, match="must be on the CPU if output_device is given, g"):
        Embedding(5, 2, device="cuda", output_device="cuda")
    with pytest.raises(ValueError, match="must be on the CPU if output_device is given, g"):
        EmbeddingBag(5, 2, device="cuda", output_device="cuda")


class PinnedMemory:
    """Page-locked memory without an accelerator: records allocations and copies."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.allocated: set[int] = set()
        self.copied: list[bool] = []
        empty, to = torch.empty, torch.Tensor.to

        def recorded_empty(*args: Any, pin_memory: bool = False, **options: Any) -> Any:
            out = empty(*args, **options)
            if pin_memory:
                self.allocated.add(out.data_ptr())
            return out

        def recorded_to(x: torch.Tensor, *args: Any, **options: Any) -> Any:
            if options.get("non_blocking"):
                self.copied.append(x.data_ptr() in self.allocated)
            return to(x, *args, **options)

        patch.setattr(torch, "empty", recorded_empty)
        patch.setattr(torch.Tensor, "to", recorded_to)
        patch.setattr(torch.Tensor, "is_pinned", lambda x: x.data_ptr() in self.allocated)
        patch.setattr(host, "is_pinned", lambda device: device is not None)


@pytest.mark.parametrize("prefetches", [False, True])
def test_rows_are_gathered_into_pinned_memory_and_copied_asynchronously(
    prefetches, monkeypatch
):
    ids = torch.tensor([[1, 2, 1]])
    want = Embedding(5, 2, sparse=True)
    layer = Embedding(5, 2, sparse=True, _weight=want.weight.detach(), output_device="cpu")
    with monkeypatch.context() as patch:
        memory = PinnedMemory(patch)
        if prefetches:
            prefetched(layer, ids)
        y = layer(ids)
        assert memory.copied == [True]
    assert torch.equal(y, want(ids))
    y.pow(2).sum().backward()
    want(ids).pow(2).sum().backward()
    assert layer.weight.grad is not None and want.weight.grad is not None
    assert torch.equal(layer.weight.grad.to_dense(), want.weight.grad.to_dense())
    with monkeypatch.context() as patch:
        PinnedMemory(patch)
        with pytest.raises(IndexError, match=r"ids\[1\] is 5, but num_embeddings is 5"):
            layer(torch.tensor([0, 5]))


def test_memory_is_pinned_for_the_accelerator_only(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda:1")
    assert not host.is_pinned(None) and not host.is_pinned(cpu)
    for name, want in (("cuda", True), ("xpu", False), ("mps", False)):
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda kind=name: torch.device(kind)
        )
        assert host.is_pinned(cuda) == want
    assert not host.is_pinned(torch.device("mps"))


def test_the_complete_layer_takes_a_host_table():
    ids = torch.tensor([[1, 2, 1]])
    layer = EmbeddingLayer(5, 4, max_positions=3)
    want = layer(ids)
    layer.token.output_device = torch.device("cpu")
    torch.testing.assert_close(layer(ids), want)


def test_compiled_lookups_ignore_prefetches():
    layer, ids = Embedding(50, 4, output_device="cpu"), torch.tensor([3, 4])
    layer.prefetch(ids)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(ids), layer.weight[ids])
