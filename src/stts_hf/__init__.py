"""STTS for Hugging Face."""
