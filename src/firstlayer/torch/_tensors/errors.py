"""Errors with Firstlayer's messages, also instances of the classes that torch raises.

Code written for torch may catch RuntimeError or AssertionError, so these classes inherit
from those as well.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ..._check import all_in_range, out_of_range
from .dtypes import dtype_name
from .memory import array_of, is_plain_cpu


class OutOfRange(IndexError, RuntimeError):
    """An id that is not a row of the table."""


class WrongType(TypeError, RuntimeError):
    """An argument of an unsupported type."""


class WrongValue(ValueError, RuntimeError, AssertionError):
    """An argument with an invalid value."""


@contextmanager
def torch_errors() -> Generator[None, None, None]:
    """Convert errors raised inside to the classes above.

    Example:
        >>> with torch_errors():
        ...     raise ValueError("n must be positive, got 0")
        Traceback (most recent call last):
        ...
        firstlayer.torch._tensors.errors.WrongValue: n must be positive, got 0
    """
    try:
        yield
    except IndexError as error:
        raise OutOfRange(*error.args) from None
    except TypeError as error:
        raise WrongType(*error.args) from None
    except ValueError as error:
        raise WrongValue(*error.args) from None


def check_module(name: str, value: Any) -> None:
    """Raise WrongType unless ``value`` is a module.

    Args:
        name: Name of the argument.
        value: The argument.
    """
    if not isinstance(value, nn.Module):
        raise WrongType(f"{name} must be a torch.nn.Module, got {type(value).__name__}")


def reject_torchrec(ids: Any, advice: str) -> None:
    """Raise WrongType if ``ids`` are a collection of torchrec's.

    Args:
        ids: Something that is not a tensor.
        advice: Tensors to pass instead.
    """
    cls = type(ids)
    # Compiled code cannot read the module of a class.
    if not is_compiling() and cls.__module__.startswith("torchrec."):
        raise WrongType(f"ids must be a tensor, got {cls.__name__}: pass {advice}")


def check_tensor(x: Any, *, name: str) -> None:
    """Raise WrongType unless ``x`` is a tensor.

    Example:
        >>> check_tensor([1.5], name="x")
        Traceback (most recent call last):
        ...
        firstlayer.torch._tensors.errors.WrongType: x must be a tensor, got list
    """
    if not isinstance(x, Tensor):
        raise WrongType(f"{name} must be a tensor, got {type(x).__name__}")


def check_integers(x: Any, *, name: str) -> None:
    """Raise WrongType unless ``x`` is a tensor of integers. Bools are a mask.

    Example:
        >>> check_integers(torch.tensor([True, False]), name="ids")
        Traceback (most recent call last):
        ...
        firstlayer.torch._tensors.errors.WrongType: ids must be integers, got bool
    """
    check_tensor(x, name=name)
    if x.dtype == torch.bool or x.is_floating_point() or x.is_complex():
        raise WrongType(f"{name} must be integers, got {dtype_name(x.dtype)}")


def check_ids(
    ids: Tensor, num_embeddings: int, *, name: str = "ids", bound: str = "num_embeddings"
) -> None:
    """Raise OutOfRange if ids are out of range and their values can be read.

    Example:
        >>> check_ids(torch.tensor([3, -1]), 5)
        Traceback (most recent call last):
        ...
        firstlayer.torch._tensors.errors.OutOfRange: ids[1] is -1, but num_embeddings is 5
    """
    if is_plain_cpu(ids) and not all_in_range(array_of(ids), num_embeddings):
        raise out_of_range_error(ids, num_embeddings, name=name, bound=bound)


def out_of_range_error(
    ids: Tensor, num_embeddings: int, *, name: str = "ids", bound: str = "num_embeddings"
) -> OutOfRange:
    """Return the error that names the first id out of range."""
    error = out_of_range(array_of(ids), num_embeddings, name=name, bound=bound)
    return OutOfRange(*error.args)
