"""Operations on a torch layer that must not change its output: copies, casts, moves, loads.

Each entry of ``ROUND_TRIPS`` takes a function that builds a layer and returns such a layer
after the operation. Parameters are rounded to half precision, so that casting to it and
back does not change them.
"""

import copy
import io
import pickle
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp._runtime_utils import _cast_buffers_to_dtype_and_device
from torch.utils._python_dispatch import TorchDispatchMode

Build = Callable[[], nn.Module]


def built(build: Build, *, seed: int = 0) -> Any:
    """Return a layer whose parameters depend on the seed only and fit half precision."""
    torch.manual_seed(seed)
    layer = build()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_((parameter * 64).round() / 64)
    return layer


def _loaded(layer: nn.Module, build: Build, **options: Any) -> nn.Module:
    layer.load_state_dict(built(build).state_dict(), **options)
    return layer


def _born_meta(build: Build) -> nn.Module:
    with torch.device("meta"):
        return built(build, seed=1)


def _saved(layer: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _cast_by_fsdp(layer: nn.Module) -> nn.Module:
    buffers = list(layer.buffers())
    halves: list[torch.dtype | None] = [torch.float16] * len(buffers)
    _cast_buffers_to_dtype_and_device(buffers, halves, torch.device("cpu"))
    return layer


def _cast_by_hand(layer: nn.Module) -> nn.Module:
    for buffer in layer.buffers():
        buffer.data = buffer.data.to(torch.float16)
    return layer


def _set_by_hand(layer: nn.Module) -> nn.Module:
    for name, buffer in list(layer.named_buffers()):
        setattr(layer, name, buffer.to(torch.bfloat16))
    return layer


def _buffers_on_meta(layer: nn.Module) -> nn.Module:
    for name, buffer in list(layer.named_buffers()):
        layer._buffers[name] = buffer.to("meta")
    return layer


def converted(layer: Any, *, swap: bool) -> Any:
    """Return a layer converted with torch's option to swap or overwrite parameters."""
    future = torch.__future__
    name = "swap" if swap else "overwrite"
    switch = getattr(future, f"set_{name}_module_params_on_conversion")
    switch(True)
    try:
        layer = layer.double().to(torch.float32)
        layer.load_state_dict(copy.deepcopy(layer.state_dict()))
        return layer.to(torch.bfloat16).float()
    finally:
        switch(False)


def _reset(layer: Any, build: Build) -> nn.Module:
    layer.reset_parameters()
    return _loaded(layer, build)


ROUND_TRIPS: dict[str, Callable[[Build], Any]] = {
    "deepcopied": lambda build: copy.deepcopy(built(build)),
    "pickled": lambda build: pickle.loads(pickle.dumps(built(build))),
    "saved whole": lambda build: _saved(built(build)),
    "its state loaded": lambda build: _loaded(built(build, seed=1), build),
    "its state assigned": lambda build: _loaded(_born_meta(build), build, assign=True),
    "born on meta": lambda build: _loaded(_born_meta(build).to_empty(device="cpu"), build),
    "sent to meta": lambda build: _loaded(
        built(build).to("meta").to_empty(device="cpu"), build
    ),
    "to bfloat16": lambda build: built(build).to(torch.bfloat16),
    "half, double and back": lambda build: built(build).half().double().float(),
    "buffers cast by FSDP": lambda build: _cast_by_fsdp(built(build)),
    "buffers cast by hand": lambda build: _cast_by_hand(built(build)),
    "buffers set by hand": lambda build: _set_by_hand(built(build)),
    "buffers sent to meta": lambda build: _buffers_on_meta(built(build)),
    "in shared memory": lambda build: built(build).share_memory(),
    "parameters swapped": lambda build: converted(built(build), swap=True),
    "parameters overwritten": lambda build: converted(built(build), swap=False),
    "reset": lambda build: _reset(built(build, seed=1), build),
}


class _DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextmanager
def plain_operators() -> Generator[None]:
    """Run plain operators inside: kernels do not run under a dispatch mode."""
    with _DispatchMode():
        yield


def forget_graphs() -> None:
    """Reset the count of compiled graphs."""
    torch._dynamo.reset()
    counters.clear()


def graphs() -> int:
    """Return the number of compiled graphs, without restarts of the analysis."""
    return counters["stats"]["unique_graphs"]
