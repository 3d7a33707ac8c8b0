"""What is kept for each step that rows may be at: the numbers from there to now.

They are float64, ``(kinds, steps)``: what is done to a kind of number is done to all steps
at once. Each rule has its own kinds, named here.
"""

# SGD and RMSprop. Without a gradient, buffer and weight become mixes of the two: buffer
# from buffer, buffer from weight, weight from buffer, weight from weight. Averages shrink.
BB, BW, WB, WW, AVERAGE = range(5)
LINEAR_KINDS = 5

# Lion: what the weight shrinks by, how far the sign has moved it, what the mean shrinks by.
SHRINK, WAY, MEAN = range(3)
LION_KINDS = 3

# Adam: what the weight (SHRINK again), the mean and the square shrink by, the scale of √v,
# and from there a polynomial in 2 u − 1, lowest power first.
FIRST, SECOND, SCALE, POLY = range(1, 5)
#: How many points the polynomial goes through.
POINTS = 12
ADAM_KINDS = POLY + POINTS

# What Adam did in a step: learning rate over its bias correction, β₁, β₂, 1 / (1 − β₂ᵗ).
SIZE, BETA1, BETA2, UNBIAS = range(4)
STEP_KINDS = 4
