"""Parts shared by the position layers on torch."""
