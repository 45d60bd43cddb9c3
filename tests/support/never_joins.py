"""A rank that starts but never joins the rendezvous; torchrun runs this instead of spmd_serve."""

import signal

if __name__ == "__main__":
    while True:
        signal.pause()
