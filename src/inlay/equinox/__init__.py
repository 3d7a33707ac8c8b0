"""The Equinox face: layers as ``eqx.Module``s, for JAX."""

for _name in ("jax", "equinox"):
    try:
        __import__(_name)
    except ModuleNotFoundError as error:
        if error.name != _name:
            raise
        raise ImportError(
            "inlay.equinox needs JAX and Equinox: pip install inlay[equinox]"
        ) from error
