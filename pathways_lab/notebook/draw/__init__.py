"""Plots drawn by Bokeh, and as SVG."""
