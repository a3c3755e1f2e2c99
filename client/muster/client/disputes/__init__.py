"""Disputed verdicts: recomputed, kept as evidence, challenged, judged, settled."""
