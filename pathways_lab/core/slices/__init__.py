"""The resource manager: islands, and the slices of devices that clients hold."""
