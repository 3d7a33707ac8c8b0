"""Tables of rows that need not fit in memory, and the formats of their rows."""
