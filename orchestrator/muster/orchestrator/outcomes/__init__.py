"""Steps 7 and 8: what validators sign, and which of it is posted."""
