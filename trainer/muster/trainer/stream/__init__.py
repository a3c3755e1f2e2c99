"""The training stream: accepted records in order, their files, and what of them is trained on."""
