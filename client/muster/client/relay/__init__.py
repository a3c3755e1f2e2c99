"""The relay of a training run: mirrors weights, keeps files for judges, is trusted for nothing."""
