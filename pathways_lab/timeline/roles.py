"""Roles of functions in training, told from their names, and a colour for each.

Problem: pictures of a timeline and drawings of a schedule speak of the same functions.

Rule for maintainers: the first word of a name that is known decides.  The colours are told
apart with deficient colour vision too; a test measures it.
"""

from __future__ import annotations

import re

COLOURS = {
    "forward": "#0072b2", "backward": "#d55e00", "weight": "#0f7a4d",
    "loss": "#c65bb0", "optimizer": "#6052e0",
}  # fmt: skip
"""By role."""

_WORDS = {
    "forward": ("fwd", "forward", "encode", "encoder", "embed"),
    "backward": ("bwd", "back", "backs", "backward", "grad", "grads", "gradient", "vjp"),
    "weight": ("wgrad", "weight", "weights"),
    "loss": ("loss", "head"),
    "optimizer": ("optimizer", "optimise", "optimize", "update", "adam", "adamw", "sgd"),
}
_ROLES = {word: role for role, words in _WORDS.items() for word in words}


def role_of(name: str) -> str | None:
    """The role of a function of that name; None for one that says nothing of training."""
    words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    return next((_ROLES[word] for word in words if word in _ROLES), None)
