"""The lab as users see it: devices and slices, who has them, what they hold."""
