"""Magics and live figures: thin, over the timeline."""
