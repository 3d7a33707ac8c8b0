"""Row indices into the coefficients of missed steps.

Coefficients are float64 of shape ``(num_coefficients, steps)``. Column ``k`` catches up
a row that was last updated at step ``k``. Below, ``w`` is the weight, ``b`` the momentum
buffer, ``m`` and ``v`` the first and second moment, each as it was at step ``k``;
products and sums run over the missed steps ``i = k + 1, …``.
"""

# SGD and RMSprop:
#     b ← BUFFER_FROM_BUFFER · b + BUFFER_FROM_WEIGHT · w
#     w ← WEIGHT_FROM_BUFFER · b + WEIGHT_FROM_WEIGHT · w
#     each average of gradients or of their squares ← AVERAGE_DECAY · average
(
    BUFFER_FROM_BUFFER,
    BUFFER_FROM_WEIGHT,
    WEIGHT_FROM_BUFFER,
    WEIGHT_FROM_WEIGHT,
    AVERAGE_DECAY,
) = range(5)
NUM_LINEAR = 5

# Lion:
#     w ← WEIGHT_DECAY · w − SIGN_STEP · sign(m)    WEIGHT_DECAY = Π (1 − lrᵢ · decayᵢ)
#     m ← MOMENT_DECAY · m                          MOMENT_DECAY = Π β₂ᵢ
# SIGN_STEP is Σ lrᵢ, each term times the weight decay of the steps after it.
WEIGHT_DECAY, SIGN_STEP, MOMENT_DECAY = range(3)
NUM_LION = 3

# Adam, with u = ε / (ε + ROOT_SCALE · √v):
#     w ← WEIGHT_DECAY · w − m · (u / ε) · polynomial(2u − 1)    WEIGHT_DECAY as in Lion
#     m ← FIRST_DECAY · m                           FIRST_DECAY = Π β₁ᵢ
#     v ← SECOND_DECAY · v                          SECOND_DECAY = Π β₂ᵢ
# The polynomial's coefficients start at POLYNOMIAL, lowest power first.
FIRST_DECAY, SECOND_DECAY, ROOT_SCALE, POLYNOMIAL = range(1, 5)
#: Number of points through which the polynomial is interpolated.
NUM_POINTS = 12
NUM_ADAM = POLYNOMIAL + NUM_POINTS

# Hyperparameters of each step t of Adam, for steps that are replayed one by one:
#     STEP_SIZE = lr / (1 − β₁ᵗ),  BETA1,  BETA2,  SECOND_CORRECTION = 1 / (1 − β₂ᵗ)
STEP_SIZE, BETA1, BETA2, SECOND_CORRECTION = range(4)
NUM_STEP_VALUES = 4
