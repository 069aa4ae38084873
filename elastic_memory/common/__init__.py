"""Small things that everybody needs."""
