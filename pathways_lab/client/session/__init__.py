"""The kernel's link to the control plane, and the values behind handles."""
