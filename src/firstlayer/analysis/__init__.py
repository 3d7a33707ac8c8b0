"""Measurements as data: table memory, lookup speed, checkpoints, position schemes.

Every function returns frozen dataclasses of plain values. :mod:`firstlayer.analysis.plot`
draws them, and the command line prints them.
"""

#: Position schemes that :mod:`firstlayer.analysis.position_study` compares. Defined here,
#: so that the command line can list them without importing torch.
SCHEMES = tuple(
    "none learned sinusoidal rotary randomised xpos alibi t5 kerple fire".split()
)
