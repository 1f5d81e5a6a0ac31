"""A timeline folded into panels as plain data."""
