"""A stand-in for somebody's own training script: it only prints, and knows nothing of fleetd.

Usage: print_losses.py SECONDS
"""

import signal
import sys
import time


def stop(number: int, frame: object) -> None:
    print("asked to stop: leaving", flush=True)
    sys.exit(0)


def main() -> None:
    signal.signal(signal.SIGTERM, stop)
    for step in range(1, int(sys.argv[1]) + 1):
        print(f"step {step} loss {9.0 / (1 + 0.1 * step):.4f}", flush=True)
        time.sleep(1)


if __name__ == "__main__":
    main()
