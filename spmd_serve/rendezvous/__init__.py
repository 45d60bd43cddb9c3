"""How the ranks of a round meet on torchrun's store, are numbered, and agree before anything is loaded."""
