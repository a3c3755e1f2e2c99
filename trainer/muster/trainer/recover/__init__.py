"""The trainer's state after a crash, a collapse or a loss: checkpoints, catching up, going back."""
