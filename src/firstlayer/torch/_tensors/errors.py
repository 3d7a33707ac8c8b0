"""Errors that are of the right class and of the class that torch would have raised.

The sentences are the core's. Code written for torch may catch what torch raises, which is
often a RuntimeError or an AssertionError, so these classes inherit from both.
"""

from collections.abc import Generator
from contextlib import contextmanager

from torch import Tensor

from ..._check import all_in_range, out_of_range
from .memory import array_of, concrete


class OutOfRange(IndexError, RuntimeError):
    """An id that is not a row of the table."""


class WrongType(TypeError, RuntimeError):
    """An argument of a type that cannot be meant."""


class WrongValue(ValueError, RuntimeError, AssertionError):
    """An argument whose value is not allowed."""


@contextmanager
def torch_classes() -> Generator[None, None, None]:
    """Raise the core's errors as ones that torch's users catch too.

    Example:
        >>> with torch_classes():
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


def explained(error: IndexError, ids: Tensor, num_embeddings: int) -> IndexError:
    """Return the error that names the bad id, or torch's own where ids cannot be read."""
    return bad_id(ids, num_embeddings) if concrete(ids) else error


def check_ids(
    ids: Tensor,
    num_embeddings: int,
    *,
    name: str = "ids",
    bound: str = "num_embeddings",
) -> None:
    """Refuse ids that are out of range, if they can be looked at.

    Example:
        >>> import torch
        >>> check_ids(torch.tensor([3, -1]), 5)
        Traceback (most recent call last):
        ...
        firstlayer.torch._tensors.errors.OutOfRange: ids[1] is -1, but num_embeddings is 5
    """
    if concrete(ids) and not all_in_range(array_of(ids), num_embeddings):
        raise bad_id(ids, num_embeddings, name=name, bound=bound)


def bad_id(
    ids: Tensor, num_embeddings: int, *, name: str = "ids", bound: str = "num_embeddings"
) -> OutOfRange:
    """Return the error that names the first id out of range, as the core does."""
    error = out_of_range(array_of(ids), num_embeddings, name=name, bound=bound)
    return OutOfRange(*error.args)
