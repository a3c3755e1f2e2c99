"""Studies of the product: red team, simulator, economics. Run from a checkout, not in the wheel."""
