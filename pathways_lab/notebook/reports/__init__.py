"""Tables and figures that compare and explain."""
