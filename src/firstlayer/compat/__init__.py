"""Other libraries' names on Firstlayer's layers, for people who have those in their fingers.

A module for each: :mod:`firstlayer.compat.lrnnx`, :mod:`firstlayer.compat.lucid`,
:mod:`firstlayer.compat.equinox`, :mod:`firstlayer.compat.tinytorch`,
:mod:`firstlayer.compat.transformers`. Signatures, attributes and the names in a checkpoint are
the other library's; what its documents promise and it does not keep is kept here. Nothing
is imported until one of them is.
"""
