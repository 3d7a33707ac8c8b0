"""Parts of the complete layer for Equinox."""
