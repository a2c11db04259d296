"""`python -m jaxrdma`, the same as the command `jaxrdma`."""

import sys

from jaxrdma.cli import main

if __name__ == "__main__":
    sys.exit(main())
