"""Videos for the processor of any backbone: where they come from, which frames are shown, and what they become."""
