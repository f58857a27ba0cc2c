"""Started by `accelerate launch recipes/train.py RECIPE [--section.key value ...]`: the same as `dpllm train`."""

import sys

from dpllm.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
