"""What events change in a ChainView, by subject: `on_worker_joined` takes in `WorkerJoined`."""
