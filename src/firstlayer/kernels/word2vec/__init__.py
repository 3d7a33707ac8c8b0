"""Skip-gram and CBOW: stochastic gradient descent on many parts of a text at once."""
