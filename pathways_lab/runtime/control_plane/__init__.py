"""The control plane's process: the core, its links, its clock."""
