"""A timeline for other tools: its own file of columns, pandas, and Perfetto."""
