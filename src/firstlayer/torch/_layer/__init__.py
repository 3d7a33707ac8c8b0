"""Parts of the complete layer on torch."""
