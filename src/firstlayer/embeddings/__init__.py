"""Token tables, bags, the complete layer and row gradients, shared by all front ends."""
