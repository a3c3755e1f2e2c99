"""Verdicts that somebody doubts: run again, kept as evidence, claimed against, judged, settled."""
