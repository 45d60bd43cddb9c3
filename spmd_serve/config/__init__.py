"""What the user asks for: our flags, the config file, HTTP endpoints, and the specification of a job."""
