"""Measurements as data: table memory, lookup speed, checkpoints, position schemes.

Every function returns frozen dataclasses of plain values. :mod:`firstlayer.analysis.plot`
draws them, and the command line prints them.
"""
