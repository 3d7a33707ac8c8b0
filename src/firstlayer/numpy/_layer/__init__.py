"""Arguments, tables and position layer of the complete layer on NumPy."""
