"""The launcher: accelerate launch train.py RECIPE.yaml [--section.key value ...]"""

import sys

from hf_vaswani_start import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]], "train.py"))
