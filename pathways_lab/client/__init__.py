"""The controller in the notebook kernel: captures, lowers, submits, holds handles."""
