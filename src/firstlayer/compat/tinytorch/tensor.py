"""Tensor of TinyTorch: a torch tensor whose ``data`` is a NumPy array."""

from typing import Any, cast

import numpy as np
import torch


class Tensor(torch.Tensor):
    """Torch tensor built from NumPy data. Every torch operation works on it.

    Args:
        data: Numbers, nested lists of numbers, or an array. Floats become float32;
            integers stay integers.
        requires_grad: Whether ``backward()`` stores a gradient.

    ``data`` is a NumPy array that shares the tensor's memory. It can be assigned.

    Example:
        >>> x = Tensor([[1.0, 2.0]], requires_grad=True)
        >>> (x * x).sum().backward()
        >>> x.grad.data.tolist()
        [[2.0, 4.0]]
        >>> x.data = x.data - 0.5 * x.grad.data
        >>> x.data
        array([[0., 0.]], dtype=float32)
    """

    @staticmethod
    def __new__(cls, data: Any, requires_grad: bool = False) -> "Tensor":
        array = data.detach().numpy() if isinstance(data, torch.Tensor) else data
        array = np.array(array)
        if array.dtype.kind == "f":
            array = array.astype(np.float32, copy=False)
        made = torch.from_numpy(array).as_subclass(cls)
        return cast(Tensor, made.requires_grad_(requires_grad))

    def __init__(self, data: Any, requires_grad: bool = False) -> None:
        super().__init__()

    @property
    def data(self) -> np.ndarray:  # pyright: ignore[reportIncompatibleVariableOverride]
        """NumPy array that shares the tensor's memory."""
        return self.detach().as_subclass(torch.Tensor).numpy()

    @data.setter
    def data(self, value: Any) -> None:
        new = torch.as_tensor(value).to(self.dtype)
        torch.Tensor.data.__set__(self, new)  # pyright: ignore

    @property
    def grad(self) -> "Tensor | None":  # pyright: ignore[reportIncompatibleVariableOverride]
        """Gradient stored by ``backward()``, or None."""
        found = torch.Tensor.grad.__get__(self)  # pyright: ignore
        return None if found is None else found.as_subclass(Tensor)

    @grad.setter
    def grad(self, value: Any) -> None:
        torch.Tensor.grad.__set__(self, value)  # pyright: ignore

    def __deepcopy__(self, memo: dict[int, Any]) -> "Tensor":
        if id(self) not in memo:
            twin = memo[id(self)] = Tensor(self.data, self.requires_grad)
            twin.grad = None if self.grad is None else self.grad.clone()
        return memo[id(self)]
