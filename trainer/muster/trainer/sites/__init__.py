"""Trainer sites: trainers far apart that train one policy and exchange little data (DiLoCo)."""
