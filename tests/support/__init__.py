"""What the tests share: tiny models, servers under test, faults, simulated hosts."""
