"""Steps 7, 8 and 10: what validators sign, which of it is posted, and when slashing pauses."""
