"""Checkpoint folders: converting, examining, describing and pushing them."""
