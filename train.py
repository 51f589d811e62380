"""The launcher: accelerate launch train.py RECIPE.yaml [--section.key value ...]"""

import os
import sys

# Threads that wait for each other are to sleep: by default they spin, and a second busy program on the machine then
# makes training several times slower. OpenMP reads this when torch is loaded, so it stands before the import.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if __name__ == "__main__":
    try:
        from hf_vaswani.cli import main
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(main(["train", *sys.argv[1:]]))
