"""Programs of clients, and the plans that they are lowered to."""
