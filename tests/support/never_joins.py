"""A rank that starts and never says a word: torchrun runs this in spmd_serve's place."""

import signal

if __name__ == "__main__":
    while True:
        signal.pause()
