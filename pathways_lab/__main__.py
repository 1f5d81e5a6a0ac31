"""``python -m pathways_lab``: see :mod:`pathways_lab.cli`."""

import sys

from pathways_lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
