"""Parts of the embedding bag on torch."""
