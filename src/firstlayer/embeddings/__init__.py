"""What a lookup means: token tables, bags, the complete layer, row gradients."""
