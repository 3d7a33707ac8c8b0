"""Helpers shared by the torch position layers."""
