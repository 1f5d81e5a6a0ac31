"""Modules as the MLIR of this jaxlib spells them."""

from __future__ import annotations

import re

from jaxlib.version import __version_info__ as jaxlib_version


def spelled(module: str) -> str:
    """A module of IFRT IR: from jaxlib 0.12 on properties of operations are in angle brackets."""
    if jaxlib_version < (0, 12):
        return module
    module = re.sub(r"(donated_input_indices = )array<i32: ([\d, ]+)>", r"\1[\2]", module)
    module = re.sub(r'attributes \{(sym_visibility = "\w+")\}', r"<\1>", module)
    return re.sub(r'\{(ifrt\.mesh_name = "\w+"), ([^}]*)\}', r"<\2> {\1}", module)
