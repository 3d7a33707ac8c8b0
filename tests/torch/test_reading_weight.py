"""Whatever reads the weight under a row optimizer gets the dense optimizer's values."""

import copy
import io
import multiprocessing.reduction
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import firstlayer.torch.optim
from firstlayer.torch import (
    Embedding,
    EmbeddingBag,
    EmbeddingLayer,
    FrozenRowsEmbedding,
    PartlyFrozenEmbedding,
)
from firstlayer.torch._tensors.row_parameter import RowParameter, without_catch_up
from firstlayer.torch.optim import RowAdamW, RowSGD
from tests.support.optim_cases import ROWS, dense, draw_ids
from tests.support.torch_round_trips import forget_graphs, graphs

# Torch's type stubs do not export the functions of lists of tensors.
_torch: Any = torch
WIDTH = 3
DOUBLE: Any = {"dtype": torch.float64}
OPTIONS: Any = {"lr": 0.05, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-3}
EYE = torch.eye(WIDTH, **DOUBLE)
ALL = torch.arange(ROWS)


class Pair:
    """A model under a row optimizer, and a copy of it under torch's dense optimizer.

    Args:
        model: Model whose first parameter is a table with sparse gradients; None is a
            layer of this library.
        name: Name of the optimizer.
        options: Options of the optimizer.
        steps: Number of steps to train both.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        name: str = "AdamW",
        options: dict[str, Any] = OPTIONS,
        steps: int = 50,
        whole_model: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.model: Any = Embedding(ROWS, WIDTH, sparse=True, **DOUBLE)
        if model is not None:
            self.model = model
        self.twin: Any = copy.deepcopy(self.model)
        for layer in self.twin.modules():
            if hasattr(layer, "sparse"):
                layer.sparse = False
        make = getattr(firstlayer.torch.optim, f"Row{name}")
        params = self.model if whole_model else self.model.parameters()
        self.optimizer = make(params, **options)
        self.dense = dense(name, self.twin.parameters(), **options)
        self.draw = draw_ids("zipf", np.random.default_rng(1))
        self.generator = torch.Generator().manual_seed(2)
        self.step(steps)

    def step(self, steps: int = 1) -> None:
        for _ in range(steps):
            ids = torch.from_numpy(self.draw())
            goal = torch.randn(4, WIDTH, generator=self.generator, **DOUBLE)
            for model, optimizer in (
                (self.model, self.optimizer),
                (self.twin, self.dense),
            ):
                optimizer.zero_grad()
                rows = model(ids).reshape(-1, WIDTH)
                (rows - goal[: len(rows)]).square().sum().backward()
                optimizer.step()

    @property
    def weight(self) -> Any:
        return next(self.model.parameters())

    @property
    def twin_weight(self) -> Any:
        return next(self.twin.parameters())

    @property
    def stale_rows(self) -> int:
        """Number of rows that have missed a step."""
        state = self.weight.table_state
        return int((state.row_steps != state.step_count).sum()) * state.has_stale_weights


def stored(weight: Tensor) -> Tensor:
    """Return a copy of the values in memory."""
    with without_catch_up():
        return weight.detach().clone()


def assert_near(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, atol=1e-8, rtol=1e-8, equal_nan=True)


def saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def shared_with_a_process(value: Any) -> Any:
    pickler: Any = multiprocessing.reduction.ForkingPickler
    return pickler.loads(pickler.dumps(value))


def head_of(weight: Any) -> nn.Linear:
    head = nn.Linear(WIDTH, ROWS, bias=False, **DOUBLE)
    head.weight = weight
    return head


def lookup_of(weight: Any) -> nn.Embedding:
    layer = nn.Embedding(ROWS, WIDTH, **DOUBLE)
    layer.weight = weight
    return layer


def numbers_of(text: str) -> Tensor:
    return torch.tensor([float(x) for x in text.split("[[")[1].split("]")[0].split(",")])


@torch.no_grad()
def written(weight: Any, write: Any) -> Tensor:
    write(weight)
    return weight.detach()


# Ways to read a layer's table. Each gets the layer that a row optimizer trains, and the
# layer that torch's dense optimizer trains.
READS: dict[str, Any] = {
    "data": lambda layer: layer.weight.data,
    "detach": lambda layer: layer.weight.detach(),
    "numpy": lambda layer: torch.from_numpy(layer.weight.detach().numpy()),
    "numpy of a frozen table": lambda layer: torch.from_numpy(
        layer.weight.requires_grad_(False).numpy()
    ),
    "array": lambda layer: torch.from_numpy(np.asarray(layer.weight.data)),
    "DLPack of a frozen table": lambda layer: torch.from_dlpack(
        layer.weight.requires_grad_(False)
    ),
    "as_subclass": lambda layer: layer.weight.as_subclass(Tensor),
    "dlpack": lambda layer: torch.from_dlpack(layer.weight.detach()),
    "storage": lambda layer: torch.frombuffer(
        bytearray(bytes(layer.weight.untyped_storage())), dtype=torch.float64
    ),
    "view": lambda layer: layer.weight.view(-1),
    "tolist": lambda layer: torch.tensor(layer.weight.tolist()),
    "item": lambda layer: torch.tensor(layer.weight[7, 1].item()),
    "repr": lambda layer: numbers_of(repr(layer.weight)),
    "format": lambda layer: numbers_of(f"{layer.weight}"),
    "norm": lambda layer: layer.weight.norm(),
    "row": lambda layer: layer.weight[7],
    "rows": lambda layer: layer.weight[[3, 7, 30]],
    "mask": lambda layer: layer.weight[ALL > 20],
    "iteration": lambda layer: torch.stack(list(layer.weight)),
    "foreach": lambda layer: _torch._foreach_mul([layer.weight], 2.0)[0],
    "cat": lambda layer: torch.cat([layer.weight, layer.weight]),
    "keyword": lambda layer: torch.add(input=EYE[:1], other=layer.weight),
    "operator": lambda layer: torch.ops.aten.mm(layer.weight, EYE),
    "second operand": lambda layer: EYE @ layer.weight.T,
    "linear": lambda layer: F.linear(EYE, layer.weight),
    "F.embedding": lambda layer: F.embedding(ALL, layer.weight),
    "F.embedding_bag": lambda layer: F.embedding_bag(ALL[:, None], layer.weight),
    "torch.embedding": lambda layer: torch.embedding(layer.weight, ALL),
    "tied nn.Linear": lambda layer: head_of(layer.weight)(EYE),
    "shared nn.Embedding": lambda layer: lookup_of(layer.weight)(ALL),
    "state_dict": lambda layer: layer.state_dict()["weight"],
    "state_dict of another module": lambda layer: head_of(layer.weight).state_dict()[
        "weight"
    ],
    "state_dict with variables": lambda layer: layer.state_dict(keep_vars=True)["weight"],
    "loaded state_dict": lambda layer: (
        other := head_of(nn.Parameter(torch.zeros(ROWS, WIDTH, **DOUBLE))),
        other.load_state_dict(layer.state_dict()),
        other.weight,
    )[-1],
    "torch.save": lambda layer: saved_and_loaded(layer).weight,
    "torch.save of the parameter": lambda layer: saved_and_loaded(layer.weight),
    "torch.save of another module": lambda layer: (
        saved_and_loaded(head_of(layer.weight)).weight
    ),
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer.weight)),
    "another process": lambda layer: shared_with_a_process(layer.weight),
    "copy": lambda layer: copy.copy(layer.weight),
    "deepcopy": lambda layer: copy.deepcopy(layer.weight),
    "deepcopy of another module": lambda layer: copy.deepcopy(head_of(layer.weight)).weight,
    "AveragedModel": lambda layer: AveragedModel(layer).module.weight,
    "parameters_to_vector": lambda layer: parameters_to_vector(layer.parameters()),
    "functional_call": lambda layer: torch.func.functional_call(
        layer, {"weight": layer.weight.detach()}, ALL
    ),
    "functional_call of a head": lambda layer: torch.func.functional_call(
        head_of(nn.Parameter(torch.zeros_like(layer.weight))),
        dict(layer.named_parameters()),
        EYE,
    ),
    "stack_module_state": lambda layer: torch.func.stack_module_state([layer, layer])[0][
        "weight"
    ],
    "gradient of functional_call": lambda layer: torch.func.grad(
        lambda weights: torch.func.functional_call(layer, weights, ALL).square().sum()
    )(dict(layer.named_parameters()))["weight"].to_dense(),
    "vmap of the layer": lambda layer: torch.vmap(lambda i: layer(i))(ALL),
    "jagged ids": lambda layer: layer(
        torch.nested.nested_tensor([ALL[:7], ALL[7:]], layout=torch.jagged)
    ).values(),
    "to": lambda layer: layer.weight.to(torch.float32).double(),
    "half": lambda layer: copy.deepcopy(layer).float().weight,
    "export": lambda layer: torch.export.export(layer, (ALL,)).module()(ALL),
    "strict export": lambda layer: torch.export.export(layer, (ALL,), strict=True).module()(
        ALL
    ),
    "trace": lambda layer: _torch.jit.trace(layer, (ALL,))(ALL),
    "symbolic trace": lambda layer: torch.fx.symbolic_trace(layer)(ALL),
}

# Ways to write to a table. Missed steps must not be applied to what was written.
WRITES: dict[str, Any] = {
    "copy_": lambda weight: weight.copy_(torch.ones(ROWS, WIDTH)),
    "fill_": lambda weight: weight.fill_(0.5),
    "zero_": lambda weight: weight.zero_(),
    "mul_": lambda weight: weight.mul_(0.5),
    "augmented": lambda weight: weight.__iadd__(1.0),
    "foreach": lambda weight: _torch._foreach_mul_([weight], 0.5),
    "nn.init": lambda weight: nn.init.constant_(weight, 0.25),
    "drawn": lambda weight: weight.uniform_(generator=torch.Generator().manual_seed(3)),
    "row": lambda weight: weight.__setitem__(7, 3.0),
    "entry": lambda weight: weight.__setitem__((7, 1), 3.0),
    "rows": lambda weight: weight.__setitem__([7, 9], EYE[:2]),
    "index_copy_": lambda weight: weight.index_copy_(0, ALL[5:8], EYE),
    "data": lambda weight: setattr(weight, "data", torch.ones(ROWS, WIDTH, **DOUBLE)),
    "write to data": lambda weight: weight.data.mul_(0.5),
    "write to an alias": lambda weight: weight.detach().mul_(0.5),
    "out": lambda weight: torch.mul(weight, 2.0, out=weight.data),
    "vector_to_parameters": lambda weight: vector_to_parameters(
        torch.arange(ROWS * WIDTH, **DOUBLE), [weight]
    ),
    "load_state_dict": lambda weight: head_of(weight).load_state_dict({
        "weight": torch.ones(ROWS, WIDTH)
    }),
    "sparse add_": lambda weight: weight.add_(
        torch.sparse_coo_tensor(
            torch.tensor([[7]]), EYE[:1], weight.shape, check_invariants=False
        )
    ),
}


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", READS)
def test_every_reader_gets_the_values_of_the_dense_optimizer(name):
    pair = Pair()
    assert (stored(pair.weight) - pair.twin_weight).abs().max() > 0.05
    pair.optimizer.zero_grad()
    assert_near(READS[name](pair.model), READS[name](pair.twin))
    # A second time, after further steps.
    pair.weight.requires_grad_()
    pair.twin_weight.requires_grad_()
    pair.step(3)
    assert_near(pair.model.weight.data, pair.twin.weight.data)


@pytest.mark.parametrize("name", WRITES)
def test_missed_steps_are_not_applied_to_what_was_written(name):
    pair = Pair(steps=20)
    assert pair.stale_rows > 10
    got, want = (written(x, WRITES[name]) for x in (pair.weight, pair.twin_weight))
    assert_near(got, want)
    assert_near(pair.model(ALL), pair.twin(ALL))
    # Both continue with the same weights and the same moments.
    pair.step(5)
    assert_near(pair.weight.data, pair.twin_weight.data)


def test_gradients_of_readers_reach_the_parameter():
    pair = Pair(steps=20)
    for weight in (pair.weight, pair.twin_weight):
        weight.grad = None
        (F.linear(EYE, weight).square().sum() + weight[3].sum()).backward()
    assert type(pair.weight) is RowParameter and isinstance(pair.weight, Parameter)
    assert_near(pair.weight.grad, pair.twin_weight.grad)


def test_average_of_a_model_follows_the_dense_one():
    pair = Pair(steps=0)
    averages = [
        AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        for model in (pair.model, pair.twin)
    ]
    for _ in range(50):
        pair.step()
        for average, model in zip(averages, (pair.model, pair.twin), strict=True):
            average.update_parameters(model)
    ours, theirs = (average.module.weight for average in averages)
    assert type(ours) is Parameter
    # The average of stale rows would be wrong by six times the learning rate.
    assert_near(ours, theirs)


def test_logits_of_functional_call_use_rows_that_are_up_to_date():
    torch.manual_seed(0)
    table = Embedding(ROWS, WIDTH, sparse=True, **DOUBLE)
    pair = Pair(nn.Sequential(table, nn.Linear(WIDTH, WIDTH, **DOUBLE)))

    def logits(model: Any) -> Tensor:
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        hidden = torch.func.functional_call(model, parameters, ALL)
        return F.linear(hidden, parameters["0.weight"])

    # Logits of stale rows would be off by a third of their size.
    assert_near(logits(pair.model), logits(pair.twin))


# Torch functions by enumeration


def torch_functions() -> dict[str, Any]:
    """Return functions of a tensor, by name: methods, operators, properties, functions."""
    functions: dict[str, Any] = {}
    for owner in (Tensor, torch, F, torch.linalg, torch.special, torch.fft):
        for name in dir(owner):
            value = getattr(owner, name)
            if owner is Tensor and hasattr(value, "__get__") and hasattr(value, "__set__"):
                value = value.__get__
            is_private = name.startswith("_") and not name.startswith("__")
            if is_private or name in NOT_CALLED or isinstance(value, type):
                continue
            if callable(value):
                functions[f"{owner.__name__}.{name}"] = value
    return functions


# Functions that change what a tensor is, start threads, print, or read no tensor, those of
# DLPack, which refuse tensors that require a gradient or do not ask their class, and views
# of the bits of numbers, which differ by rounding.
NOT_CALLED = {
    "__class__", "__init__", "__new__", "__init_subclass__", "__subclasshook__", "__dir__",
    "__delattr__", "__getattribute__", "__setattr__", "__setstate__", "__torch_dispatch__",
    "__torch_function__", "__reduce__", "__reduce_ex__", "__getstate__", "__sizeof__",
    "__str__", "__repr__", "_make_subclass", "_make_wrapper_subclass", "_cdata", "apply_",
    "as_subclass", "backward", "breakpoint", "compile", "grad", "data_ptr", "set_",
    "resize_", "resize_as_", "resize", "resize_as", "share_memory_", "pin_memory",
    "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad",
    "storage", "typed_storage", "untyped_storage", "_typed_storage", "cuda", "xpu", "ipu",
    "hpu", "mtia", "module_load", "reinforce", "save", "load", "empty_like", "new_empty",
    "empty", "wait", "fork", "map_", "map2_", "_use_count", "_version", "detach_",
    "_standard_gamma", "_sample_dirichlet", "_is_view", "is_shared", "grad_fn", "_base",
    "set_default_tensor_type", "set_default_dtype", "set_default_device", "manual_seed",
    "seed", "set_num_threads", "set_num_interop_threads", "set_printoptions",
    "set_rng_state", "set_flush_denormal", "set_warn_always", "unravel_index",
    "use_deterministic_algorithms",
    "set_anomaly_enabled", "set_grad_enabled", "set_autocast_enabled",
    "_nested_tensor_from_mask", "to_sparse_bsc", "to_sparse_bsr", "to_sparse_csc",
    "to_sparse_csr", "from_dlpack", "to_dlpack", "__dlpack__", "__dlpack_device__",
    "view", "view_copy",
}  # fmt: skip
ARGUMENTS: list[tuple[Any, ...]] = [
    (),
    (2,),
    (0.5,),
    (0, 1),
    (EYE,),
    (torch.ones(ROWS, WIDTH, **DOUBLE),),
    (torch.ones(ROWS, WIDTH, dtype=torch.bool),),
    (0, torch.tensor([3, 7])),
    (torch.float32,),
    (EYE[0],),
    (-0.5, 0.5),
    (torch.ones(ROWS, WIDTH, dtype=torch.bool), 0.5),
    (0, torch.tensor([3, 7]), 0.5),
    (0, torch.tensor([3, 7, 9]), EYE),
]


def arguments_of(function: Any, weight: Tensor) -> tuple[tuple[Any, ...], Any] | None:
    """Return arguments that a function accepts after the tensor, and its result."""
    for arguments in ARGUMENTS:
        torch.manual_seed(0)
        try:
            return arguments, function(weight.clone(), *arguments)
        except (TypeError, ValueError, RuntimeError, IndexError, NotImplementedError):
            continue
        except (AttributeError, AssertionError, KeyError, ImportError, ArithmeticError):
            continue
    return None


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors and numbers of a result."""
    if isinstance(value, Tensor):
        return [value.detach().to_dense()]
    if isinstance(value, float):
        return [torch.tensor(value)]
    if isinstance(value, np.ndarray):
        return [torch.from_numpy(value)]
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in tensors_in(part)]
    return []


def are_near(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(
        torch.allclose(a.to(b.dtype), b, atol=1e-6, rtol=1e-6, equal_nan=True)
        for a, b in zip(ours, theirs, strict=True)
        if a.shape == b.shape
    )


class StalePair(Pair):
    """Pair whose rows can be made stale again."""

    def __init__(self) -> None:
        super().__init__(steps=60)
        self.start, state = stored(self.weight), self.weight.table_state
        self.row_steps, self.base_step = state.row_steps.copy(), state.base_step
        self.arrays = {name: array.copy() for name, array in state.state.items()}

    def make_stale(self) -> None:
        with without_catch_up():
            self.weight.data = self.start.clone()
        state = self.weight.table_state
        state.row_steps[:], state.base_step = self.row_steps, self.base_step
        for key, array in self.arrays.items():
            state.state[key][...] = array


@pytest.mark.filterwarnings("ignore")
def test_no_torch_function_reads_or_writes_stale_rows():
    pair = StalePair()
    start, right = pair.start, pair.twin_weight.detach()
    checked, telling, wrong = 0, 0, []
    for name, function in torch_functions().items():
        found = arguments_of(function, right)
        if found is None:
            continue
        arguments, result = found
        want = tensors_in(result)
        if not want:
            continue
        pair.make_stale()
        torch.manual_seed(0)
        with torch.no_grad():
            got = tensors_in(function(pair.weight, *arguments))
        stale = arguments_of(function, start)
        checked += 1
        telling += stale is None or not are_near(tensors_in(stale[1]), want)
        if not are_near(got, want):
            wrong.append(name)
    # Torch itself warns and recommends detach().
    assert wrong == ["torch.tensor"]
    # The test has seen many functions, and most results tell stale rows from others.
    assert checked > 600 and telling > 450, (checked, telling)


JAGGED = torch.nested.nested_tensor([EYE[:1], EYE[1:]], layout=torch.jagged)
ZEROS = torch.zeros(1, **DOUBLE)
# Functions of torch 2.13 that never ask the class of their argument: C++ code reads its
# memory at once, so no method of a subclass can catch up first. The documentation of
# firstlayer.torch.optim names them, and says to give them weight.detach().
NEVER_ASK: dict[str, Any] = {
    "tensor": torch.tensor,
    "asarray, copied": lambda weight: torch.asarray(weight, copy=True),
    "asarray": lambda weight: torch.asarray(weight, dtype=torch.float32),
    "as_tensor": lambda weight: torch.as_tensor(weight, dtype=torch.float32),
    "new_tensor": lambda weight: ZEROS.new_tensor(weight),
    "new": lambda weight: _torch.Tensor.new(ZEROS, weight),
    "legacy constructor": lambda weight: torch.DoubleTensor(weight),
    "sparse_coo_tensor": lambda weight: torch.sparse_coo_tensor(
        ALL[None], weight, check_invariants=False
    ),
    "strided nested tensor": lambda weight: torch.nested.to_padded_tensor(
        torch.nested.nested_tensor([weight]), 0.0
    ),
    "to_dlpack": lambda weight: torch.from_dlpack(_torch.utils.dlpack.to_dlpack(weight)),
    "data of another tensor": lambda weight: (
        other := torch.zeros(1, **DOUBLE),
        setattr(other, "data", weight),
        other,
    )[0],
    "_make_subclass": lambda weight: _torch.Tensor._make_subclass(Tensor, weight),
    "jagged linear": lambda weight: F.linear(JAGGED, weight).values(),
    "func.grad": torch.func.grad(lambda weight: weight.square().sum()),
    "func.vmap": torch.vmap(lambda row: 2 * row),
    "func.vjp": lambda weight: torch.func.vjp(lambda x: 2 * x, weight)[0],
    "func.functionalize": torch.func.functionalize(lambda weight: 2 * weight),
}


@pytest.mark.filterwarnings("ignore")
def test_functions_that_never_ask_the_class_are_known_and_read_a_detached_weight():
    pair = StalePair()
    for name, read in NEVER_ASK.items():
        pair.make_stale()
        want, stale = (tensors_in(read(x)) for x in (pair.twin_weight, pair.start))
        got = tensors_in(read(pair.weight))
        assert are_near(got, stale) and not are_near(got, want), name
        assert are_near(tensors_in(read(pair.weight.detach())), want), name


@pytest.mark.filterwarnings("ignore")
def test_functions_that_torch_does_not_let_classes_override_are_known():
    pair = StalePair()
    checked, wrong = 0, set()
    for function in torch.overrides.get_ignored_functions():
        name = getattr(function, "__name__", "")
        is_setting = name.startswith(("set_", "is_", "get_", "autocast", "_make", "_has"))
        if not callable(function) or isinstance(function, type) or is_setting:
            continue
        if name in NOT_CALLED - {"as_subclass"}:
            continue
        for others in ((), (ALL[None],), (ZEROS,), (Tensor,)):
            # The weight is the last argument, but the first of as_subclass.
            order = -1 if Tensor in others else 1

            def call(x: Any, function=function, others=others, order=order) -> Any:
                torch.manual_seed(0)
                return tensors_in(function(*(*others, x)[::order]))

            try:
                want = call(pair.twin_weight.detach().clone())
            except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):
                continue
            pair.make_stale()
            with torch.no_grad():
                got = call(pair.weight)
            checked += bool(want)
            if not are_near(got, want):
                wrong.add(name)
    # RowTensor.as_subclass catches up; here it is called as a method of the base class.
    private = {"_view_func_unsafe", "as_subclass"}
    assert wrong == {"tensor", "new_tensor", "new", "sparse_coo_tensor"} | private
    assert checked > 10, checked


# Operations without values


METADATA: dict[str, Any] = {
    name: (lambda weight, name=name: getattr(weight, name))
    for name in (
        "shape", "dtype", "device", "ndim", "is_leaf", "grad", "grad_fn", "requires_grad",
        "layout", "is_sparse", "is_cpu", "nbytes", "itemsize", "_version",
    )
} | {
    "size": lambda weight: weight.size(0),
    "len": len,
    "hash": hash,
    "stride": lambda weight: weight.stride(),
    "numel": lambda weight: weight.numel(),
    "zeros_like": torch.zeros_like,
    "empty_like": torch.empty_like,
    "new_zeros": lambda weight: weight.new_zeros(3),
    "is_floating_point": torch.is_floating_point,
    "register_hook": lambda weight: weight.register_hook(lambda grad: grad).remove(),
    "isinstance": lambda weight: isinstance(weight, Parameter),
    "set grad": lambda weight: setattr(weight, "grad", None),
    "requires_grad_": lambda weight: weight.requires_grad_(),
    "clip_grad_norm_": lambda weight: nn.utils.clip_grad_norm_([weight], 0.1),
    "clip_grad_value_": lambda weight: nn.utils.clip_grad_value_([weight], 0.1),
    "zero_grad": lambda weight: head_of(weight).zero_grad(),
    "parameters": lambda weight: list(head_of(weight).parameters()),
    "eval": lambda weight: lookup_of(weight).eval(),
    "autograd.grad": lambda weight: torch.autograd.grad((), weight, allow_unused=True),
    "another optimizer group": lambda weight: torch.optim.SGD([weight], 0.1).zero_grad(),
}  # fmt: skip


@pytest.mark.parametrize("name", METADATA)
def test_operations_without_values_do_not_touch_the_table(name):
    pair = Pair(steps=10)
    before, stale = stored(pair.weight), pair.stale_rows
    METADATA[name](pair.weight)
    assert stale > 10 and pair.stale_rows == stale
    assert torch.equal(stored(pair.weight), before)


def test_training_step_catches_up_only_the_rows_it_reads():
    pair = Pair(steps=10)
    for _ in range(5):
        pair.step()
        nn.utils.clip_grad_norm_(pair.model.parameters(), 1.0)
        pair.optimizer.zero_grad()
        assert pair.stale_rows >= ROWS - 4


def test_torch_lookups_catch_up_only_their_rows():
    pair = Pair(nn.Embedding(ROWS, WIDTH, sparse=True, **DOUBLE), steps=10)
    stale = pair.stale_rows
    F.embedding(torch.tensor([39]), pair.weight)
    F.embedding_bag(torch.tensor([[38, 39]]), pair.weight)
    assert pair.stale_rows == stale - 2


# Evaluation


def bag(**options: Any) -> EmbeddingBag:
    return EmbeddingBag(ROWS, WIDTH, sparse=True, **options, **DOUBLE)


def layer_with_positions(**options: Any) -> EmbeddingLayer:
    return EmbeddingLayer(
        ROWS, WIDTH, max_positions=9, padding_idx=0, sparse=True, **options, **DOUBLE
    )


EVALUATED: dict[str, tuple[Any, Any]] = {
    "lookup": (None, lambda layer: layer(ALL.reshape(2, -1))),
    "int32 ids": (None, lambda layer: layer(ALL.int())),
    "uint8 ids": (None, lambda layer: layer(ALL.byte())),
    "no ids": (None, lambda layer: layer(ALL[:0])),
    "max_norm": (
        lambda: Embedding(ROWS, WIDTH, max_norm=0.7, norm_type=1.5, sparse=True, **DOUBLE),
        lambda layer: layer(ALL),
    ),
    "frozen rows": (
        lambda: FrozenRowsEmbedding(
            ROWS, WIDTH, frozen=range(0, ROWS, 3), sparse=True, **DOUBLE
        ),
        lambda layer: layer(ALL),
    ),
    "partly frozen": (
        lambda: PartlyFrozenEmbedding(
            ROWS, WIDTH, frozen=range(0, ROWS, 3), sparse=True, **DOUBLE
        ),
        lambda layer: layer(ALL),
    ),
    "bag": (bag, lambda layer: layer(ALL.reshape(-1, 4))),
    "bag of sums with padding": (
        lambda: bag(mode="sum", padding_idx=3),
        lambda layer: layer(ALL.reshape(-1, 4)),
    ),
    "bag of maxima with offsets": (
        lambda: bag(mode="max", padding_idx=3, max_norm=0.8),
        lambda layer: layer(ALL, torch.tensor([0, 7, 7, 30])),
    ),
    "bag with weights": (
        lambda: bag(mode="sum", include_last_offset=True),
        lambda layer: layer(
            ALL,
            torch.tensor([0, 7, ROWS]),
            per_sample_weights=torch.linspace(0, 1, ROWS, **DOUBLE),
        ),
    ),
    "complete layer": (
        layer_with_positions,
        lambda layer: layer(ALL.reshape(-1, 4), offset=2),
    ),
    "complete layer with norm and segments": (
        lambda: layer_with_positions(
            layer_norm=True, segments=2, scale=True, zero_padding=True, norm_eps=1e-3
        ),
        lambda layer: layer(ALL.reshape(-1, 4), segments=ALL.reshape(-1, 4) % 2),
    ),
}


@pytest.mark.parametrize("name", EVALUATED)
def test_evaluation_reads_corrected_rows_and_writes_nothing(name):
    build, read = EVALUATED[name]
    torch.manual_seed(0)
    is_bag = name.startswith("bag")
    pair = Pair(None if build is None else build(), steps=0)
    model, twin = pair.model, pair.twin
    for _ in range(30):
        ids = torch.from_numpy(pair.draw())
        for each, optimizer in ((model, pair.optimizer), (twin, pair.dense)):
            optimizer.zero_grad()
            y = each(ids[:, None] if is_bag else ids)
            y.square().sum().backward()
            optimizer.step()
    before, stale = stored(pair.weight), pair.stale_rows
    assert stale > 10
    model.eval()
    twin.eval()
    with torch.no_grad():
        want = read(twin)
        assert_near(read(model), want)
    with torch.inference_mode():
        assert_near(read(model), want)
    assert pair.stale_rows == stale and torch.equal(stored(pair.weight), before)
    # With gradients the rows catch up in place, since a step may follow.
    assert_near(read(model).detach(), want)
    assert pair.stale_rows < stale or name == "no ids"
    with torch.no_grad():
        assert_near(read(model), want)


def test_hooks_of_a_token_table_are_called_in_evaluation():
    torch.manual_seed(0)
    pair = Pair(layer_with_positions(), steps=0)
    ids = torch.tensor([[5, 7]])
    for _ in range(3):
        pair.optimizer.zero_grad()
        pair.model(ids[:, :1]).square().sum().backward()
        pair.optimizer.step()
    before, calls = stored(pair.weight), []
    pair.model.eval().token.register_forward_hook(lambda *given: calls.append(given))
    with torch.no_grad():
        got = pair.model(ids)
        assert len(calls) == 1 and torch.equal(stored(pair.weight), before)
        assert_near(got, copy.deepcopy(pair.model)(ids))


@pytest.mark.rejects
def test_ids_out_of_range_are_named_in_evaluation():
    pair = Pair(steps=5)
    pair.model.eval()
    message = rf"ids\[1\] is {ROWS}, but num_embeddings is {ROWS}"
    with torch.no_grad(), pytest.raises(IndexError, match=message):
        pair.model(torch.tensor([3, ROWS]))


@pytest.mark.parametrize("rounding", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_evaluation_has_the_bits_that_rows_get_in_place(dtype, rounding):
    torch.manual_seed(0)
    layer = Embedding(ROWS, 5, sparse=True, dtype=dtype)
    rounded = rounding and dtype == torch.bfloat16
    optimizer = RowAdamW(layer, **OPTIONS, stochastic_rounding=rounded)
    draw = draw_ids("zipf", np.random.default_rng(1))
    for _ in range(20):
        optimizer.zero_grad()
        layer(torch.from_numpy(draw())).square().sum().backward()
        optimizer.step()
    layer.eval()
    ids = torch.cat([ALL.flip(0), ALL])
    with torch.no_grad():
        got = layer(ids)
    assert torch.equal(got, layer.weight.detach()[ids])


# Compiled code


def test_compiled_readers_catch_up_in_one_graph():
    forget_graphs()
    pair = Pair(steps=2)

    def head(layer: Any, x: Tensor, ids: Tensor) -> Tensor:
        rows = layer(ids)
        size = x.new_full((), layer.weight.shape[0] + layer.weight.dim())
        return F.linear(x, layer.weight.detach()).sum() * rows + size

    compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
    ids = torch.tensor([1, 7, 30, 7])
    for _ in range(5):
        pair.step()
        assert_near(compiled(pair.model, EYE, ids), head(pair.twin, EYE, ids))
    assert graphs() == 1


def test_compiled_evaluation_writes_nothing():
    forget_graphs()
    pair = Pair(steps=5)
    pair.model.eval()
    compiled = torch.compile(pair.model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_near(compiled(ALL), pair.twin(ALL))
        for _ in range(4):
            with torch.enable_grad():
                pair.step()
            before = stored(pair.weight)
            assert_near(compiled(ALL), pair.twin(ALL))
            assert torch.equal(stored(pair.weight), before) and pair.stale_rows > 10
    assert graphs() == 1


# Tied heads


class Sampled(nn.Module):
    """Scores of sampled ids, through lookups in one table."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = Embedding(ROWS, WIDTH, sparse=sparse, **DOUBLE)
        self.hidden = nn.Linear(WIDTH, WIDTH, **DOUBLE)

    def forward(self, ids: Tensor, sampled: Tensor) -> Tensor:
        return F.linear(self.hidden(self.table(ids)).tanh(), self.table(sampled))


def test_sampled_softmax_through_the_table_is_sparse_and_exact():
    ours, theirs = Sampled(sparse=True), Sampled(sparse=False)
    optimizers = RowAdamW(ours, **OPTIONS), dense("AdamW", theirs.parameters(), **OPTIONS)
    rng = np.random.default_rng(3)
    draw = draw_ids("zipf", rng)
    for _ in range(50):
        ids, negatives = torch.from_numpy(draw()), torch.from_numpy(rng.choice(ROWS, 6))
        targets = torch.from_numpy(draw())
        losses = []
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            scores = model(ids, torch.cat([targets, negatives]))
            losses.append(F.cross_entropy(scores, torch.arange(len(targets))))
            losses[-1].backward()
            optimizer.step()
        grad = ours.table.weight.grad
        assert grad is not None and grad.is_sparse
        assert_near(*losses)
    assert_near(ours.table.weight, theirs.table.weight)


DENSE_GRADIENT = (
    "the gradient of a table of 40 rows is dense, as that of a tied output head is, so "
    "RowAdamW updates every row. This is exact, but costs as much as a dense optimizer. A "
    "sampled softmax through the table, F.linear(x, layer(sampled_ids)), keeps the "
    "gradient sparse and the result exact"
)


@pytest.mark.parametrize("make", [Embedding, nn.Embedding])
def test_tied_head_warns_once_for_each_table(make):
    tables = [make(ROWS, WIDTH, sparse=True) for _ in range(2)]
    optimizer = RowAdamW(nn.ModuleList(tables), lr=0.1)
    for table in tables:
        with pytest.warns(UserWarning) as caught:
            for _ in range(3):
                optimizer.zero_grad()
                x = table(torch.tensor([3, 5]))
                F.linear(x, table.weight).square().sum().backward()
                optimizer.step()
        assert [str(warning.message) for warning in caught] == [DENSE_GRADIENT]


def test_table_that_becomes_dense_later_warns_once():
    pair = Pair(nn.Embedding(ROWS, WIDTH, sparse=True, **DOUBLE), steps=5)
    with pytest.warns(UserWarning, match="the gradient of a table of 40 rows") as caught:
        for _ in range(2):
            pair.optimizer.zero_grad()
            pair.weight.square().sum().backward()
            pair.optimizer.step()
    assert len(caught) == 1


def test_dense_layers_do_not_warn():
    layer = Embedding(ROWS, WIDTH, max_norm=2.0)
    optimizer = RowAdamW(layer, lr=0.1)
    layer.logits(layer(torch.tensor([3]))).sum().backward()
    optimizer.step()


# Classes


def test_parameters_have_their_class_again_without_an_optimizer():
    pair = Pair(steps=5)
    weight = pair.weight
    assert type(weight) is RowParameter
    for other in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        assert type(other) is Parameter and "table_state" not in vars(other)
    assert repr(weight) == repr(copy.deepcopy(weight))
    # A new optimizer takes over.
    RowSGD(pair.model, lr=0.1)
    assert type(weight) is Parameter and "table_state" not in vars(weight)
    assert_near(weight, pair.twin_weight)


def test_two_optimizers_of_a_table_take_turns():
    pair = Pair(steps=5)
    ours, theirs = pair.optimizer, pair.dense
    others = (
        RowSGD(pair.model, lr=0.1, momentum=0.9),
        dense("SGD", pair.twin.parameters(), lr=0.1, momentum=0.9),
    )
    for number in range(12):
        pair.optimizer, pair.dense = others if number % 3 else (ours, theirs)
        pair.step()
    assert_near(pair.weight.data, pair.twin_weight.data)


def test_leaf_tensors_that_are_not_parameters_catch_up_too():
    torch.manual_seed(0)
    table = torch.randn(ROWS, WIDTH, **DOUBLE).requires_grad_()
    twin = table.detach().clone().requires_grad_()
    optimizers = RowAdamW([table], **OPTIONS), dense("AdamW", [twin], **OPTIONS)
    draw = draw_ids("zipf", np.random.default_rng(1))
    for _ in range(20):
        ids = torch.from_numpy(draw())
        for x, optimizer in zip((table, twin), optimizers, strict=True):
            optimizer.zero_grad()
            F.embedding(ids, x, sparse=x is table).square().sum().backward()
            optimizer.step()
    assert not torch.allclose(stored(table), twin)
    for copied in (copy.deepcopy(table), saved_and_loaded(table)):
        assert type(copied) is Tensor and copied.requires_grad
        assert_near(copied, twin)
    assert_near(table * 2, twin * 2)


class OwnParameter(Parameter):
    """Parameter with behaviour of its own."""


@pytest.mark.rejects
def test_parameters_of_another_class_raise_and_nothing_changes():
    layer = nn.Embedding(ROWS, WIDTH, sparse=True)
    layer.weight = OwnParameter(layer.weight.detach())
    before = layer.weight.detach().clone()
    layer(torch.tensor([3])).sum().backward()
    message = 'a table must be a torch.nn.Parameter in mode="exact", got OwnParameter'
    with pytest.raises(TypeError, match=message):
        RowAdamW(layer.parameters(), lr=0.1).step()
    assert torch.equal(layer.weight, before)
    RowAdamW(layer.parameters(), lr=0.1, mode="lazy").step()
    assert not torch.equal(layer.weight, before)


class Doubling(Tensor):
    """Tensor with a class that handles torch functions itself."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None):
        with torch._C.DisableTorchFunctionSubclass():
            return 2 * func(*args, **(kwargs or {}))


def test_other_tensor_classes_get_rows_that_are_up_to_date():
    pair = Pair(steps=10)
    other = torch.ones(ROWS, WIDTH, **DOUBLE).as_subclass(Doubling)
    got = torch.add(pair.weight, other)
    assert_near(got, 2 * (pair.twin_weight + 1))


@pytest.mark.parametrize("name", ["jagged", "func"])
def test_modules_of_a_model_catch_up_where_torch_does_not_ask_the_parameter(name):
    torch.manual_seed(0)
    table = nn.Embedding(ROWS, WIDTH, sparse=True, **DOUBLE)
    pair = Pair(table, steps=0)
    # The optimizer is given a model that also has a head.
    pair.optimizer = RowAdamW(
        nn.ModuleList([pair.model, head := head_of(table.weight)]), **OPTIONS
    )
    pair.step(20)
    assert pair.stale_rows > 10
    want = EYE @ pair.twin_weight.T
    if name == "jagged":
        x = torch.nested.nested_tensor([EYE[:1], EYE[1:]], layout=torch.jagged)
        assert_near(head(x).values(), want)
        return

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(head, weights, EYE).square().sum()

    got = torch.func.grad(loss)({"weight": head.weight})["weight"]
    assert_near(got, 2 * want.T @ EYE)


def test_flop_counter_runs_under_a_row_optimizer():
    from torch.utils.flop_counter import FlopCounterMode

    pair = Pair(steps=5)
    with FlopCounterMode(display=False) as counter:
        got = F.linear(EYE, pair.weight)
    assert counter.get_total_flops() == 2 * WIDTH * WIDTH * ROWS
    assert_near(got, F.linear(EYE, pair.twin_weight))
