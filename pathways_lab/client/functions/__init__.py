"""``pw.jit`` and its like: arguments, types, and operators on handles."""
