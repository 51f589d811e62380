"""The launcher: accelerate launch train.py RECIPE.yaml [--section.key value ...]"""

import sys

from hf_vaswani.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
