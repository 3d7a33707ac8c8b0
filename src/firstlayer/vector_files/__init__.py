"""Files with a table of vectors and their words, in the formats of many programs."""
