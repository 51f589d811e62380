"""Runs the command line with `python -m hf_vaswani.cli`."""

import sys

from hf_vaswani_start import after_imports

from . import main

if __name__ == "__main__":
    after_imports()
    sys.exit(main())
