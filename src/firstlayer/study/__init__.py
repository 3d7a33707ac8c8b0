"""Measurements as data: what tables cost, how fast lookups are, how far positions reach.

Every study returns frozen dataclasses of plain values. Drawing them is
:mod:`firstlayer.study.plot`, printing them the command line's.
"""
