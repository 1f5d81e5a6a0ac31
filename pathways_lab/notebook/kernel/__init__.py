"""The kernel extension: magics, cells, errors and printed output."""
