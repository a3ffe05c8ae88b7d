"""What a checkpoint needs on the Hub: its card, and the push."""
