"""Lookups in one table, their gradients, and the base class of layers with a table."""
