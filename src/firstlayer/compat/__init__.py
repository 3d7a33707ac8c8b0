"""Drop-in APIs of other libraries, built on Firstlayer's layers.

One module per library: :mod:`firstlayer.compat.lrnnx`, :mod:`firstlayer.compat.lucid`,
:mod:`firstlayer.compat.equinox`, :mod:`firstlayer.compat.tinytorch` and
:mod:`firstlayer.compat.transformers`. Signatures, attributes and checkpoint names are the
other library's. Documented behavior that the original gets wrong is correct here. No
module is imported until it is used.
"""
