"""One rank's life in the job: its watcher, its rendezvous, its child process with the drivers, its end."""
