"""Programs: captured once, placed, fused, and simulated."""
