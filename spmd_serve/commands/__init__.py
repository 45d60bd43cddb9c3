"""The subcommands: ``serve`` and ``batch``, and what both do at start."""
