"""Trainer sites: places far apart that train one policy, and exchange little (DiLoCo)."""
