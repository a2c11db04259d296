"""A follower that is interrupted. Usage: interrupted.py WAY FILE.

Ways: connecting (once there is FILE, pulls; interrupted in that, it pulls again), at-end (once there is FILE, the
program ends, which closes the follower).
"""

import sys
import time
from pathlib import Path

from followed import parameters

import jaxrdma

way, file = sys.argv[1], Path(sys.argv[2])
follower = jaxrdma.follow()
print("following", flush=True)
while not file.exists():
    time.sleep(0.01)
if way == "connecting":
    print("pulls", flush=True)
    try:
        follower.pull(parameters())
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    print(f"pulled step {follower.pull(parameters()).step}", flush=True)
    follower.close()
print("ends", flush=True)
