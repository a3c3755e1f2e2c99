"""Published policy versions: their folders on disk, and their way to workers and chain."""
