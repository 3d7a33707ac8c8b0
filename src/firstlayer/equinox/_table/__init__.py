"""Lookups in one table, and the base class of layers with a table."""
