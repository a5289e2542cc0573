"""The page for browsers, and what it is made of."""
