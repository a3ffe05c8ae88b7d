"""`stts-hf bench`: what every stage costs beside the stock model, in seconds, in FLOPs and in memory."""
