"""`muster doctor`: is this machine fit for a run, before anything is at stake?"""
