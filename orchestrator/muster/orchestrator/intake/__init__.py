"""Step 6: uploads, their files, and the batches that they are committed in."""
