"""`stts-hf bench`: what every stage costs beside stock Molmo2, in seconds, in FLOPs and in memory."""
