"""Follows a job for ever, or until that ends; counts what it pulls. Usage: follower.py."""

from followed import parameters

import jaxrdma


def main() -> None:
    """Pull every newer version."""
    with jaxrdma.follow() as follower:
        print("following", flush=True)
        for count, snapshot in enumerate(follower.snapshots(parameters()), 1):
            print(f"pull {count}: step {snapshot.step}", flush=True)
    print("the job ended", flush=True)


if __name__ == "__main__":
    main()
