"""Parts of the complete layer on NumPy."""
