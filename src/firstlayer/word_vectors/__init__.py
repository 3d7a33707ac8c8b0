"""Word vectors: corpora, skip-gram training, folders on disk, neighbors."""
