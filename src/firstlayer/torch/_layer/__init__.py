"""One call of the complete layer: arguments, kernel eligibility, the fused computation."""
