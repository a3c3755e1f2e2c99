"""Studies of the product: red team, simulator, economics. They run from a checkout; wheels lack
them."""
