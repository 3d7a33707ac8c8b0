"""Parts shared by the position layers for Equinox."""
