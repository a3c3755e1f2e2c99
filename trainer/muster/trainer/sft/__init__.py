"""Supervised fine-tuning: from a data set to the base model of a run."""
