"""The complete layer in one pass over memory, forward and backward."""
