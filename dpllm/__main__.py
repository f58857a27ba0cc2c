"""Makes ``python -m dpllm`` the same as ``dpllm``."""

import sys

from dpllm.cli import main

if __name__ == "__main__":
    sys.exit(main())
