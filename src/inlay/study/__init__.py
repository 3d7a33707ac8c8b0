"""Measurements and learning as functions that return data; the command line prints it."""
